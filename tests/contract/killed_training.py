"""A training job that is killed again and again, at random moments, and goes on at another number of instances.

Run as a program: ``killed_training.py FOLDER NUM_KILLS SEED``. It imports torch once and forks each instance, so
that a life costs a fraction of a second. An instance counts what it does (each backward pass, each step, and,
through an audit hook, each file it opens, renames or removes) and kills itself at a count that was drawn before.
At the end it prints what came of it, as JSON.
"""

import json
import os
import random
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils.data import Dataset

import popdist
import popdist.checkpoint.tensor_files
from popdist.checkpoint import load_latest, save
from popdist.ground.contract import Contract, Endpoint

NUM_REPLICAS = 4
SPLITS = (1, 2, 4)
NUM_STEPS = 60
SAVE_EVERY = 2
LONGEST_LIVES = (60, 12)
"""Counts after which instance 0, and any other one, is dead at the latest: about three saves."""

LEFT_BEHIND = 3
"""Exit code of an instance that heard of the other's death before it was stopped."""

FILE_EVENTS = frozenset({"open", "os.listdir", "os.scandir", "os.mkdir", "os.rename", "os.remove", "os.rmdir"})


class Life:
    """Counts down to the death of this instance.

    Args:
        length: How many counts it has; 0 for a life without end.
        folder: What is done to files in it counts.
    """

    def __init__(self, length: int, folder: Path) -> None:
        self._left = length
        self._folder = str(folder)
        if length:
            sys.addaudithook(self._on_event)

    def count(self) -> None:
        """Come closer to the end."""
        self._left -= 1
        if not self._left:
            os.kill(os.getpid(), signal.SIGKILL)

    def _on_event(self, event: str, arguments: tuple[object, ...]) -> None:
        if event in FILE_EVENTS and str(arguments[0]).startswith(self._folder):
            self.count()


Training: TypeAlias = Callable[[Path, Life], str]
"""Trains to the end in a folder of checkpoints, and returns what is to be the same."""


def make_model() -> nn.Module:
    """A little net whose bits depend on buffers and on random numbers."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(4 * 36, 3)
    )


class Images(Dataset[torch.Tensor]):
    """Some images, moved a little each time they are looked at."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> torch.Tensor:
        image = torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(index))
        return image.roll(random.randrange(3), 2) + torch.rand(())  # noqa: S311 - what augmentations draw from


def train(folder: Path, life: Life) -> str:
    """Go on from the last checkpoint to the end; the checksum of the weights."""
    popdist.init(timeout_seconds=300)
    model = popdist.ReplicatedModel(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, NUM_STEPS)
    loader = popdist.data_loader(Images(), 2, shuffle=True)
    named: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    last = load_latest(folder, **named)
    step = last.values["step_count"] if last else 0
    while step < NUM_STEPS:
        for batch in loader:
            for x in model.micro_batches(batch):
                nn.functional.cross_entropy(model(x), x.sum((1, 2, 3)).gt(0).long()).backward()
                life.count()
            optimizer.step()
            scheduler.step()
            step += 1
            life.count()
            if step % SAVE_EVERY == 0:
                save(folder, keep=2, **named, step_count=step)
            if step == NUM_STEPS:
                break
    return popdist.checksum(model)


def run_job(
    folder: Path, num_instances: int, victim: int = 0, life: int = 0, train: Training = train
) -> list[int | str]:
    """Fork a job and wait for it; each instance's exit code, or the checksum it ended with."""
    with socket.create_server(("127.0.0.1", 0), backlog=NUM_REPLICAS) as server:
        contract = Contract(
            num_instances=num_instances,
            num_local_instances=num_instances,
            num_replicas=NUM_REPLICAS,
            num_threads=1,
            store=Endpoint(host="127.0.0.1", port=server.getsockname()[1]),
        )
        children = [
            _fork(
                train, folder, replace(contract, instance_index=index, local_instance_index=index), server, lives
            )
            for index, lives in ((index, life if index == victim else 0) for index in range(num_instances))
        ]
    codes: dict[int, int] = {}
    while len(codes) < len(children):
        child, status = os.wait()
        codes[child] = os.waitstatus_to_exitcode(status)
        if codes[child]:
            for other in set(children) - set(codes):
                os.kill(other, signal.SIGTERM)
    return [codes[child] or (folder / f"end-{index}").read_text() for index, child in enumerate(children)]


def _fork(train: Training, folder: Path, contract: Contract, server: socket.socket, life: int) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        if contract.instance_index == 0:
            contract = replace(contract, store_descriptor=server.detach())
        else:
            server.close()
        os.environ.update(contract.to_env())
        checkpoints = folder / "checkpoints"
        end = train(checkpoints, Life(life, checkpoints))
        (folder / f"end-{contract.instance_index}").write_text(end)
        code = 0
    except popdist.BackendError:
        code = LEFT_BEHIND
    except BaseException:  # noqa: BLE001 - the end of a forked process, whatever it is
        traceback.print_exc()
    finally:
        os._exit(code)


def main(folder: Path, num_kills: int, seed: int) -> None:
    """A job that is never killed, and one that is."""
    draw = random.Random(seed)  # noqa: S311 - which instance dies when
    torch.optim.AdamW([torch.zeros(1)])  # has torch import the rest of itself once, and not in each instance
    (folder / "undisturbed").mkdir()
    (folder / "killed").mkdir()
    whole = run_job(folder / "undisturbed", 1)
    ends, splits, num_torn = [], [], 0
    for _ in range(num_kills):
        splits.append(draw.choice(SPLITS))
        victim = draw.randrange(splits[-1])
        life = draw.randint(1, LONGEST_LIVES[victim > 0])
        ends.append(run_job(folder / "killed", splits[-1], victim, life))
        num_torn += any((folder / "killed" / "checkpoints").glob(".step-*"))
    resumed = run_job(folder / "killed", draw.choice(SPLITS))
    found = {"whole": whole, "resumed": resumed, "ends": ends, "splits": splits, "num_torn": num_torn}
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
