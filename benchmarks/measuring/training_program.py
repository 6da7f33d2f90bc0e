"""Trains one GPT a step at a time: in memory, phase by phase, or in mapped files.

    python benchmarks/measuring/training_program.py '{"way": "memory", "layers": 2, "tokens": 8}'

It says when it is ready, and then for each line that it reads: of ``step`` what it took, of ``checksum`` what the
weights are. `trainings` starts it.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring.trainings import Taken, Training
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import popdist
from examples.train_phased import GPT, NUM_BYTES
from popdist.optim import LAMB
from popdist.parallel import PhasedModel, PhasedOptimizer, phased, recompute

BLOCK_BYTES = 4096

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 1e-2}),
    "AdamW": (torch.optim.AdamW, {"lr": 1e-3, "fused": True}),
    "LAMB": (LAMB, {"lr": 1e-3}),
}


Step = Callable[[Tensor], None]


def in_memory(training: Training, net: GPT) -> tuple[nn.Module, Step]:
    """The model in memory; the backward pass computes its layers again."""
    initialize(net.to_empty(device="cpu"))
    model = popdist.ReplicatedModel(recompute(net, net.layers))
    make, settings = OPTIMIZERS[training.optimizer]
    return model, partial(step_of, model, make(model.parameters(), **settings))


def by_phases(training: Training, net: GPT) -> tuple[nn.Module, Step]:
    """The same, phase by phase."""
    torch.manual_seed(0)
    model = phased(net, memory=training.memory_bytes, store=Path(training.folder) / "store")
    make, settings = OPTIMIZERS[training.optimizer]
    return model, partial(step_of, model, PhasedOptimizer(model, make, **settings))


def step_of(model: popdist.ReplicatedModel | PhasedModel, optimizer: torch.optim.Optimizer, words: Tensor) -> None:
    """One step."""
    for part in model.micro_batches((words,)):
        loss_of(model, part[0]).backward()
    optimizer.step()
    optimizer.zero_grad()


def in_mapped_files(training: Training, net: GPT) -> tuple[nn.Module, Step]:
    """The same in mapped files, which the kernel reads and writes: weights, and the state of AdamW.

    Each parameter is updated as soon as its gradient is there, as by phases: so no gradient is read or written.
    """
    names = [name for name, _ in net.named_parameters()]
    shapes = [parameter.shape for parameter in net.parameters()]
    weights, means, squares = (
        mapped_tensors(Path(training.folder, kind), shapes) for kind in ("weights", "exp_avg", "exp_avg_sq")
    )
    for name, tensor in zip(names, weights, strict=True):
        owner, _, key = name.rpartition(".")
        setattr(net.get_submodule(owner), key, nn.Parameter(tensor))
    initialize(net)
    make, settings = OPTIMIZERS[training.optimizer]
    for parameter, mean, square in zip(net.parameters(), means, squares, strict=True):
        optimizer = make([parameter], **settings)
        optimizer.state[parameter] = {"step": torch.zeros(()), "exp_avg": mean, "exp_avg_sq": square}
        parameter.register_post_accumulate_grad_hook(partial(updated, optimizer))
    recompute(net, net.layers)
    return net, lambda words: loss_of(net, words).backward()


def mapped_tensors(file: Path, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Zeros of these shapes in a file, each from a multiple of 4096 bytes on."""
    lengths = [-(-4 * shape.numel() // BLOCK_BYTES) * BLOCK_BYTES // 4 for shape in shapes]
    with file.open("wb") as opened:
        os.posix_fallocate(opened.fileno(), 0, 4 * sum(lengths))
    parts = torch.from_file(str(file), shared=True, size=sum(lengths)).split(lengths)
    return [part[: shape.numel()].view(shape) for part, shape in zip(parts, shapes, strict=True)]


def updated(optimizer: torch.optim.Optimizer, _parameter: Tensor) -> None:
    """Update the only parameter of ``optimizer``, and give its gradient back."""
    optimizer.step()
    optimizer.zero_grad()


def loss_of(model: nn.Module, words: Tensor) -> Tensor:
    """The mean over all words but the first one."""
    return cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


def initialize(net: nn.Module) -> None:
    """Give each module its own initial weights, in their order."""
    torch.manual_seed(0)
    for module in net.modules():
        if isinstance(module, nn.Linear | nn.LayerNorm | nn.Embedding):
            module.reset_parameters()


def taken(step: Step, words: Tensor) -> Taken:
    """What a step takes."""
    before, start = disk_bytes(), time.perf_counter()
    step(words)
    seconds = time.perf_counter() - start
    num_read, num_written = (now - then for now, then in zip(disk_bytes(), before, strict=True))
    return Taken(seconds=seconds, read_bytes=num_read, written_bytes=num_written)


def disk_bytes() -> tuple[int, int]:
    """What this process has had the disk read and write until now."""
    rows = dict(line.split(": ") for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines())
    return int(rows["read_bytes"]), int(rows["write_bytes"])


def checksum(model: nn.Module) -> str:
    """Of all weights, by name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.numpy())
    return digest.hexdigest()


def main() -> None:
    """Train on order."""
    training = Training(**json.loads(sys.argv[1]))
    with torch.device("meta"):
        net = GPT(training.layers, training.width)
    ways = {"memory": in_memory, "phases": by_phases, "mapped": in_mapped_files}
    model, step = ways[training.way](training, net)
    words = torch.randint(
        NUM_BYTES,
        (training.micro_batches, training.tokens // training.micro_batches + 1),
        generator=torch.Generator().manual_seed(1),
    )
    print(json.dumps("ready"), flush=True)
    for order in sys.stdin:
        answer = asdict(taken(step, words)) if order == "step\n" else checksum(model)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
