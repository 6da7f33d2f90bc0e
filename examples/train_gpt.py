"""Train a small GPT on Python's own help texts: one file for every way to share a replica.

    python examples/train_gpt.py
    poprun --num-instances 4 --parallelism tensor=2 python examples/train_gpt.py
    poprun --num-instances 8 --parallelism tensor=2,pipeline=2 python examples/train_gpt.py
    poprun --num-instances 4 python examples/train_gpt.py --fully-sharded

The losses are the same for each, up to the rounding of another order of addition. All samples of a step are the
same ones, however many replicas there are.
"""

import argparse
from pydoc_data.topics import topics
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.utils.data import TensorDataset

import popdist
from popdist.parallel import Roles, parallelize

LAYERS, WIDTH, HEAD, LENGTH = 4, 64, 16, 64
GLOBAL_BATCH, MICRO_BATCH = 32, 2
NUM_BYTES, LEARNING_RATE = 256, 1e-3


class Layer(nn.Module):
    """Attention to what stands before, and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.value, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Of (samples, positions, features) the same; an instance may have some of the heads only."""
        y = self.norm(x)
        made = self.query(y), self.key(y), self.value(y)
        query, key, value = (it.unflatten(-1, (-1, HEAD)).transpose(1, 2) for it in made)
        y = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return torch.add(x, self.down(gelu(self.up(self.second_norm(x)))))


class GPT(nn.Module):
    """A language model of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_BYTES, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, NUM_BYTES)

    def forward(self, x: Tensor) -> Tensor:
        """Of bytes the scores of the next ones."""
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        scores: Tensor = self.head(self.norm(x))
        return scores.clone()  # fully_shard wants no view of a tensor


ROLES = Roles(
    layers="layers",
    columns=("query", "key", "value", "up"),
    rows=("out", "down"),
    norms=("norm", "second_norm"),
    embedding="embedding",
    last=("norm",),
    head="head",
)


def help_texts() -> TensorDataset:
    """Python's help texts in pieces of bytes, each with the same one byte later."""
    text = torch.tensor(list("\n".join(topics[name] for name in sorted(topics)).encode()))
    stop = (len(text) - 1) // LENGTH * LENGTH
    return TensorDataset(text[:stop].view(-1, LENGTH), text[1 : stop + 1].view(-1, LENGTH))


def loss_of(scores: Tensor, target: Tensor) -> Tensor:
    """The mean over all bytes of a micro batch."""
    return cross_entropy(scores.flatten(0, 1), target.flatten())


def make_schedule(net: GPT, num_micro_batches: int) -> Schedule1F1B | None:
    """What runs the stages of a pipeline; None where a replica is no pipeline."""
    stages = popdist.device_mesh()["pipeline"]
    if stages.size() == 1:
        return None
    place = stages.get_local_rank(), stages.size(), popdist.device()
    return Schedule1F1B(PipelineStage(net, *place, group=stages.get_group()), num_micro_batches, loss_fn=loss_of)


def main() -> None:
    """Train, and print the loss of each step from one instance."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--fully-sharded", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    net, accumulation = GPT(), GLOBAL_BATCH // MICRO_BATCH // popdist.num_replicas()
    if options.fully_sharded:  # torch adds the gradients of the replicas, which share weights and optimizer state
        for module in (*net.layers, net):
            fully_shard(module, mesh=popdist.device_mesh()["replica"])
    else:
        parallelize(net, roles=ROLES)
    schedule = make_schedule(net, accumulation)
    model = None if options.fully_sharded else popdist.ReplicatedModel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=LEARNING_RATE)
    loader = popdist.data_loader(help_texts(), MICRO_BATCH, accumulation, shuffle=True, drop_last=True)
    for number, batch in zip(range(options.steps), loader, strict=False):
        losses: list[Tensor] = []
        if model is not None and schedule is not None:
            losses += cast("Tensor", model.pipeline_step(schedule, batch, share_losses=True))
        else:
            for x, y in batch if model is None else model.micro_batches(batch):
                loss = loss_of(net(x), y)
                (loss / accumulation if model is None else loss).backward()
                losses.append(loss.detach())
        popdist.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = popdist.weighted_mean(losses, len(losses))
        if popdist.is_main():
            print(number, f"{mean:.7f}")


if __name__ == "__main__":
    main()
