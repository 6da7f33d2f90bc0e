"""Train a GPT that is ten times larger than the memory it may use: the rest of it waits in a file.

    python examples/train_phased.py --folder /data
    python examples/train_phased.py --folder /data --memory 4000 --width 2048 --length 1024 --steps 1000

It reads Python's own help texts. Beside each step stand what the plan predicted and the phase that took longest,
and at the end what each phase took, and the most memory that the process had. The file, ten times as large as the
memory, is removed then.
"""

import argparse
import resource
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.utils.data import TensorDataset

import popdist
from popdist.parallel import PhasedOptimizer, phased

NUM_BYTES, HEAD = 256, 64
MEGABYTE = 1_000_000
BYTES_OF_PARAMETER = 16  # with its gradient and the two averages of AdamW


class Layer(nn.Module):
    """Attention to what stands before, and two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Of (samples, positions, features) the same."""
        parts = self.attention(self.norm(x)).chunk(3, -1)
        query, key, value = (it.unflatten(-1, (-1, HEAD)).transpose(1, 2) for it in parts)
        y = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return torch.add(x, self.down(gelu(self.up(self.second_norm(x)))))


class GPT(nn.Module):
    """A language model of bytes."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_BYTES, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, NUM_BYTES)

    def forward(self, x: Tensor) -> Tensor:
        """Of bytes the scores of the next ones."""
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        scores: Tensor = self.head(self.norm(x))
        return scores


def help_texts(length: int) -> TensorDataset:
    """Python's help texts in pieces of bytes, each with the same one byte later."""
    text = torch.tensor(list("\n".join(topics[name] for name in sorted(topics)).encode()))
    stop = (len(text) - 1) // length * length
    return TensorDataset(text[:stop].view(-1, length), text[1 : stop + 1].view(-1, length))


def main() -> None:
    """Train, and say what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(), help="on the fastest disk, not in memory (.)")
    parser.add_argument("--memory", type=int, default=600, help="MB of this process, torch included (600)")
    parser.add_argument("--times", type=float, default=10, help="so many times the memory is the model (10)")
    parser.add_argument("--width", type=int, default=512, help="of the layers, a multiple of 64 (512)")
    parser.add_argument("--length", type=int, default=256, help="of a sample in bytes (256)")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    torch.manual_seed(0)
    layer_bytes = BYTES_OF_PARAMETER * 12 * options.width**2
    with torch.device("meta"):  # without memory
        net = GPT(max(round(options.times * options.memory * MEGABYTE / layer_bytes), 1), options.width)
    size = BYTES_OF_PARAMETER * sum(it.numel() for it in net.parameters()) / MEGABYTE
    console = Console(stderr=True)
    columns = "step", BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}")
    seconds = []
    with (
        tempfile.TemporaryDirectory(dir=options.folder) as store,
        Progress(*columns, console=console, disable=not popdist.is_main()) as progress,
    ):
        model = phased(net, memory=f"{options.memory} MB", store=store)
        optimizer = PhasedOptimizer(model, torch.optim.AdamW, lr=1e-3)
        loader = popdist.data_loader(help_texts(options.length), 1, shuffle=True, drop_last=True)
        bar = progress.add_task("", total=options.steps)
        for _, batch in zip(range(options.steps), loader, strict=False):
            start = time.perf_counter()
            for x, y in model.micro_batches(batch):
                loss = cross_entropy(model(x).flatten(0, 1), y.flatten())
                loss.backward()
            optimizer.step()
            seconds.append(time.perf_counter() - start)
            longest = max(model.phase_seconds)
            text = f"loss {loss.item():.3f}, {seconds[-1]:.2f} s, predicted {model.predicted_seconds or 0:.2f} s"
            text += f", phase {model.phase_seconds.index(longest)} of {len(model.phase_seconds)}: {longest:.2f} s"
            progress.update(bar, advance=1, description=text)
        phase_seconds = model.phase_seconds
    if popdist.is_main():
        print("Seconds of the phases:", *(f"{it:.3f}" for it in phase_seconds))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MEGABYTE
        print(f"{size:,.0f} MB of model, {peak:,.0f} MB of memory, {median(seconds):.2f} s a step")


if __name__ == "__main__":
    main()
