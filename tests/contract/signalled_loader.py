"""Read with a loader whose workers are signalled: signalled_loader.py fork|spawn whole|part main|child."""

import multiprocessing
import os
import signal
import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

import popdist


class Signalled(Dataset[Tensor]):
    """Samples whose worker is sent a signal once, as by a batch system that signals every process of a job."""

    was_signalled = False

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        if not self.was_signalled:
            self.was_signalled = True
            os.kill(os.getpid(), signal.SIGTERM)
        return torch.tensor(float(index))


def read(method: str, part: str) -> None:
    """Read all batches, or two, and leave the workers to the end of this process."""
    popdist.init()
    popdist.on_preemption(lambda: None)
    options: Any = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": method}
    found = []
    for batch in popdist.data_loader(Signalled(), 1, **options):
        found.append(batch)
        if part == "part" and len(found) == 2:
            break
    sys.stdout.write(f"{len(found)}\n")


def main() -> None:
    """Read in this process, or in a child."""
    method, part, place = sys.argv[1:]
    if place == "main":
        read(method, part)
        return
    child = multiprocessing.get_context("spawn").Process(target=read, args=(method, part))
    child.start()
    child.join()
    sys.exit(child.exitcode)


if __name__ == "__main__":
    main()
