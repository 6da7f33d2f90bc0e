"""Learning rate schedulers in a loop that sees the batches of several replicas, one after the other.

A program that calls ``scheduler.step()`` for each batch means each batch of one replica. So the calls count in the
turns of one replica only.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Final

from torch.optim.lr_scheduler import LRScheduler

_WATCHED: Final[set[type]] = set()
_uncounted_turns: Final[list[object]] = []


@contextmanager
def without_schedulers() -> Iterator[None]:
    """A context in which ``scheduler.step()`` does nothing, for every scheduler of torch."""
    _watch(LRScheduler)
    _uncounted_turns.append(None)
    try:
        yield
    finally:
        _uncounted_turns.pop()


def _watch(kind: type[Any]) -> None:
    """Watch the method ``step`` of the class ``kind`` and of its subclasses."""
    for subclass in kind.__subclasses__():
        _watch(subclass)
    if kind not in _WATCHED and "step" in vars(kind):
        _WATCHED.add(kind)
        kind.step = _watched(kind.step)


def _watched(step: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(step)
    def call(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        return None if _uncounted_turns else step(scheduler, *args, **kwargs)

    return call
