"""Headers between hosts, of which one is interrupted or comes after its instance has left."""

from typing import Any

import pytest
from torch import distributed as dist

import popdist
from popdist.job import context

TIMEOUT_SECONDS = 300.0


class Interrupted:
    """A message for which somebody waits who presses Ctrl-C as it comes."""

    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def is_completed(self) -> bool:
        """Whether it was waited for."""
        return self._work.is_completed()

    def wait(self, *arguments: Any) -> None:
        """As the message's own, then an exception."""
        self._work.wait(*arguments)
        raise KeyboardInterrupt


def run() -> str:
    """An interrupted wait goes on when asked again; then what an instance hears that has left."""
    popdist.init(timeout_seconds=TIMEOUT_SECONDS)
    group = context.current_group()
    exchange = group.start("interrupted")
    pending: Any = exchange._pending
    pending._works = {peer: list(map(Interrupted, works)) for peer, works in pending._works.items()}
    num_interrupted = 0
    while exchange._numbers is None:
        try:
            exchange.wait()
        except KeyboardInterrupt:
            num_interrupted += 1
    assert num_interrupted == 2 * (popdist.num_instances() - 1)
    popdist.barrier()
    popdist.finalize()
    with pytest.raises(popdist.BackendError) as caught:
        group.start("too late")
    return str(caught.value)
