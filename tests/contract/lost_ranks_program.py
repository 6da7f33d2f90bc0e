"""One rank of a job that loses ranks: ``lost_ranks_program.py FOLDER RANK SIZE`` prints what it was told."""

import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import distributed as dist

from popdist.host_memory.barriers import Barriers

PATIENCE = timedelta(seconds=3600)
"""Longer than the test may take: who waits it out has not noticed a death."""

SHORT_SECONDS = 2.5


def main(folder: str, rank: str, size: str) -> None:
    """Wait for a late rank, then for one that dies in the middle of an all-reduce."""
    dist.init_process_group(
        "popdist",
        init_method=f"file://{Path(folder) / 'store'}",
        rank=int(rank),
        world_size=int(size),
        timeout=PATIENCE,
    )
    be_late()
    lose_one()


def be_late() -> None:
    """The last rank comes when the others have stopped waiting."""
    group: Any = dist.new_group(backend="popdist", timeout=PATIENCE)
    group.host_group.barriers.timeout_seconds = SHORT_SECONDS
    if dist.get_rank() == dist.get_world_size() - 1:
        dist.barrier()
        tell("late", lambda: dist.all_reduce(torch.ones(1), group=group))
        tell("later", lambda: dist.all_reduce(torch.ones(1), group=group))
    else:
        tell("late", lambda: dist.all_reduce(torch.ones(1), group=group))
        tell("later", lambda: dist.all_reduce(torch.ones(1), group=group, async_op=True).wait())
        dist.barrier()


def lose_one() -> None:
    """Rank 1 is killed when it has sent a part of what it has."""
    if dist.get_rank() == 1:
        wait, num_barriers = Barriers.wait, iter(range(100))

        def wait_thrice(barriers: Barriers, *arguments: Any) -> None:  # noqa: ANN401 - as it is called
            if next(num_barriers) == 3:
                die()
            wait(barriers, *arguments)

        faulty: Any = Barriers
        faulty.wait = wait_thrice
    tensor = torch.ones(1 << 20)
    tell("lost", lambda: dist.all_reduce(tensor))
    tell("lost for ever", dist.barrier)


def die() -> NoReturn:
    """Be killed without a chance to say so."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def tell(what: str, call: Callable[[], object]) -> None:
    """Print what ``call`` raised."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - torch raises of every kind
        os.write(1, f"{what}: {error}\n".encode())
    else:
        os.write(1, f"{what}: nothing\n".encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
