"""A rank is killed in the middle of a collective: the others hear of it, in time, and leave."""

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import distributed
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from tests.contract.forked_ranks import Rank, run_ranks

TIMEOUT = timedelta(seconds=60)
SHORT_TIMEOUT = timedelta(seconds=4)
LEAVE_SECONDS = 250.0
"""More than the timeout, on a machine with much to do; less than for ever."""

MIDDLE_SECONDS = 0.05


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _lost(rank: Rank, victim: int, collective: Callable[[], object], die: Callable[[], object]) -> None:
    """The victim meets the others once, then dies as ``die`` says; the others go on until they are told."""
    distributed.barrier()
    if rank.rank == victim:
        die()
    begin, message = time.monotonic(), ""
    try:
        while True:
            collective()
    except RuntimeError as error:
        message = str(error)
    took = time.monotonic() - begin
    assert took < TIMEOUT.total_seconds() + LEAVE_SECONDS, took
    assert f"rank {victim}" in message, message


def before_it_comes(rank: Rank) -> None:
    """The others wait for one that does not come."""
    _lost(rank, 1, lambda: distributed.all_reduce(torch.ones(3)), _die)


def with_calls_begun(rank: Rank) -> None:
    """It has begun a large call and dies while the others are in it."""

    def begin_and_die() -> None:
        distributed.all_reduce(torch.ones(4_000_000), async_op=True)
        _die()

    _lost(rank, 0, lambda: distributed.all_reduce(torch.ones(4_000_000)), begin_and_die)


def anywhere(rank: Rank) -> None:
    """It dies somewhere in a row of calls, on whichever line that is."""

    def die_soon() -> None:
        threading.Timer(MIDDLE_SECONDS, _die).start()

    _lost(rank, 2, lambda: distributed.all_reduce(torch.ones(300_000)), die_soon)


def while_it_is_to_send(rank: Rank) -> None:
    """They wait for its message, or for one of any rank; where ranks share no host, gloo names nobody."""
    group: Any = distributed.group.WORLD
    source = 2 if rank.rank else None
    call = partial(distributed.recv, torch.ones(3), source) if group.host_group else distributed.barrier
    _lost(rank, 2, call, _die)


def asynchronously(rank: Rank) -> None:
    """The wait for a call raises, as the call itself would have."""

    def wait() -> None:
        work = distributed.all_reduce(torch.ones(3), async_op=True)
        assert work is not None
        work.wait()

    _lost(rank, 2, wait, _die)


def in_ddp(rank: Rank) -> None:
    """DistributedDataParallel's reducer, which is C++, is told, and backward() raises."""
    model = DistributedDataParallel(torch.nn.Linear(100, 100))
    _lost(rank, 1, lambda: model(torch.ones(100)).sum().backward(), _die)


def never(rank: Rank) -> None:
    """It lives and does not come; the others give up when the time is over, and it hears of that and dies."""
    store = distributed_c10d._get_default_store()
    others = [f"told {other}" for other in range(rank.num_ranks) if other != 1]

    def wait_for_others() -> None:
        store.wait(others, timedelta(seconds=LEAVE_SECONDS))
        _die()

    _lost(rank, 1, lambda: distributed.all_reduce(torch.ones(3)), wait_for_others)
    store.set(f"told {rank.rank}", "")


def run_all(backend: str, num_ranks: int, hosts: str) -> None:
    """Every way to die."""
    for way, victim, timeout in (
        (before_it_comes, 1, TIMEOUT),
        (with_calls_begun, 0, TIMEOUT),
        (anywhere, 2, TIMEOUT),
        (while_it_is_to_send, 2, TIMEOUT),
        (asynchronously, 2, TIMEOUT),
        (in_ddp, 1, TIMEOUT),
        (never, 1, SHORT_TIMEOUT),
    ):
        run_ranks(way, backend, num_ranks, timeout=timeout, victims=(victim,), hosts=hosts)
