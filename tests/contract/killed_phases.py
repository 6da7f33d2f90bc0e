"""A job that trains in phases, is killed again and again at random moments, and goes on in other ways.

Run as a program: ``killed_phases.py FOLDER NUM_KILLS SEED``. Each life draws its number of instances and phases,
or that the model is in memory. One instance dies at a count of what it does (each transfer of the store, each file
of a checkpoint, each backward pass), or all of them do after a time, wherever they are then. At the end it prints
what came of it, as JSON.
"""

import hashlib
import json
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import popdist
import popdist.checkpoint.tensor_files
from popdist.checkpoint import load_latest, save
from popdist.phases.store_file import StoreThreads
from tests.contract.killed_training import Life, run_job

SPLITS = (1, 2, 4)
PHASES = (1, 2, 4, None)
"""None: the whole model is in memory."""

NUM_STEPS = 16
SAVE_EVERY = 2
KILLED = {-signal.SIGKILL, -signal.SIGALRM}

LONGEST_LIFE = 200
"""Counts after which the first instance is dead at the latest."""


class Block(nn.Module):
    """A layer whose bits depend on random numbers and on buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As many numbers as it is given."""
        return x + self.layers(x)  # type: ignore[no-any-return] # a tensor


def make_model() -> nn.Module:
    """Blocks, and two layers around them."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), *(Block() for _ in range(4)), nn.Linear(32, 1))


def train(store: Path, phases: int | None, seconds: float, checkpoints: Path, life: Life) -> str:
    """Go on from the last checkpoint to the end; the digest of the weights."""
    if seconds:
        signal.setitimer(signal.ITIMER_REAL, seconds)  # nobody handles the signal, so it ends the process
    popdist.init(timeout_seconds=300)
    count_transfers(life)
    samples = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    loader = popdist.data_loader(samples, 4, shuffle=True)
    model: Any
    optimizer: Any
    if phases is None:
        model = popdist.ReplicatedModel(popdist.parallel.recompute(make_model()))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    else:
        model = popdist.parallel.phased(make_model(), phases=phases, store=store)
        optimizer = popdist.parallel.PhasedOptimizer(model, torch.optim.AdamW, lr=0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    named: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    last = load_latest(checkpoints, **named)
    step = last.values["step_count"] if last else 0
    while step < NUM_STEPS:
        for batch in loader:
            optimizer.zero_grad()
            for x in model.micro_batches(batch):
                (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
                life.count()
            optimizer.step()
            scheduler.step()
            step += 1
            if step % SAVE_EVERY == 0:
                save(checkpoints, keep=2, **named, step_count=step)
            if step == NUM_STEPS:
                break
    return digest_of(model)


def count_transfers(life: Life) -> None:
    """Have each read and write of a store count, while others run."""
    run = StoreThreads.run

    def counted(piece: Callable[[], None]) -> None:
        life.count()
        piece()

    def run_counted(threads: StoreThreads, pieces: Iterable[Callable[[], None]]) -> None:
        run(threads, [partial(counted, piece) for piece in pieces])

    StoreThreads.run = run_counted  # type: ignore[assignment, method-assign] # in a process that is about to die


def digest_of(model: nn.Module) -> str:
    """The digest of all weights and buffers."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def main(folder: Path, num_kills: int, seed: int) -> None:
    """A job that is never killed, with the model in memory, and one that is."""
    draw = random.Random(seed)  # noqa: S311 - which instance dies when
    torch.optim.AdamW([torch.zeros(1)])  # has torch import the rest of itself once, and not in each instance
    for name in ("undisturbed", "killed"):
        (folder / name).mkdir()
    begin = time.monotonic()
    whole = run_job(folder / "undisturbed", 1, train=partial(train, folder / "store", None, 0.0))
    seconds = time.monotonic() - begin
    ends: list[list[int | str]] = []
    lives, num_torn = [], 0
    while sum(bool(KILLED & {*end}) for end in ends) < num_kills and not any(1 in end for end in ends):
        split, phases = draw.choice(SPLITS), draw.choice(PHASES)
        is_timed, victim = draw.random() < 0.5, draw.randrange(split)
        life = 0 if is_timed else draw.randint(1, LONGEST_LIFE)
        after = draw.uniform(0.0, 2 * seconds) if is_timed else 0.0
        end = run_job(folder / "killed", split, victim, life, partial(train, folder / "store", phases, after))
        ends.append(end)
        lives.append([split, phases, is_timed])
        num_torn += any((folder / "killed" / "checkpoints").glob(".step-*"))
        if end[0] == whole[0]:  # it came to its end, and the next life begins anew
            shutil.rmtree(folder / "killed" / "checkpoints")
    resumed = [
        run_job(folder / "killed", 2, train=partial(train, folder / "store", phases, 0.0)) for phases in (3, None)
    ]
    found = {"whole": whole, "resumed": resumed, "ends": ends, "lives": lives, "num_torn": num_torn}
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
