"""Ranks of a process group that are forked from one process, which has imported torch once for all of them."""

import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from popdist.exchange.process_group import torch_process_group

TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One process of a world.

    Attributes:
        rank: Its number.
        num_ranks: How many there are.
        gloo: All of them, over torch's own backend.
    """

    rank: int
    num_ranks: int
    gloo: distributed.ProcessGroup

    @property
    def is_last(self) -> bool:
        """Whether there is none after it."""
        return self.rank == self.num_ranks - 1


def run_ranks(
    fn: Callable[[Rank], None],
    backend: str,
    num_ranks: int,
    *,
    timeout: timedelta = TIMEOUT,
    victims: Collection[int] = (),
    hosts: str = "",
) -> None:
    """Call ``fn`` in ``num_ranks`` processes whose default group is on ``backend``, and wait for all of them.

    Args:
        fn: Gets its rank.
        backend: A name that `init_process_group` knows.
        num_ranks: At least 1.
        timeout: Of the default group.
        victims: The ranks that end by SIGKILL, and not by returning.
        hosts: A letter for each rank, the host that it takes itself to be on; empty for all on this one.

    Raises:
        SystemExit: If another rank fails or these do not; all that still run are killed.
    """
    with tempfile.TemporaryDirectory(prefix="popdist-ranks-") as folder:
        store = str(Path(folder) / "store")
        ranks: dict[int, int] = {}
        for rank in range(num_ranks):
            ranks[_fork(fn, backend, (rank, num_ranks), store, timeout, hosts)] = rank
        try:
            while ranks:
                child, status = os.wait()
                rank, code = ranks.pop(child), os.waitstatus_to_exitcode(status)
                if code != (-signal.SIGKILL if rank in victims else 0):
                    raise SystemExit(f"rank {rank} of {num_ranks} ended with {code}")
        finally:
            for child in ranks:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


def _fork(
    fn: Callable[[Rank], None],
    backend: str,
    place: tuple[int, int],
    store: str,
    timeout: timedelta,
    hosts: str,
) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        rank, num_ranks = place
        torch.set_num_threads(1)
        if hosts:
            group: Any = torch_process_group
            group.machine = lambda: hosts[rank]
        distributed.init_process_group(
            backend, init_method=f"file://{store}", rank=rank, world_size=num_ranks, timeout=timeout
        )
        gloo = distributed.new_group(backend="gloo")
        assert isinstance(gloo, distributed.ProcessGroup)
        fn(Rank(rank=rank, num_ranks=num_ranks, gloo=gloo))
        distributed.destroy_process_group()
        code = 0
    except BaseException:  # noqa: BLE001 - the end of a forked process, whatever it is
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
