"""A training loop of the program, in which each turn trains one replica on one batch.

A program that calls ``scheduler.step()`` for each batch means each batch of one replica. So schedulers of learning
rates act in the turns of one replica only.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any, Final

from torch.optim.lr_scheduler import LRScheduler

from popdist.errors import BatchError
from popdist.trainers.replica_steps import ReplicaBatch, ReplicaSteps, in_replica_order


class LoopTurns:
    """The turns of a training loop, one turn for each batch of each replica; the last turn of an optimizer step
    reduces the gradients of all replicas.

    Args:
        steps: The steps of the model that the loop trains.
        accumulate_by: The code with which a program accumulates gradients, for the text of an error.

    Attributes:
        has_stepped: Whether the program has called ``optimizer.step()`` in this turn.
        accumulates: Whether the program may leave out ``optimizer.step()`` in this turn, if it is not the last.
    """

    def __init__(self, steps: ReplicaSteps, accumulate_by: str) -> None:
        self.has_stepped = self.accumulates = False
        self._steps = steps
        self._accumulate_by = accumulate_by
        self._turn: ReplicaBatch | None = None

    @property
    def is_running(self) -> bool:
        """Whether the program is inside the loop."""
        return self._turn is not None

    @property
    def is_last(self) -> bool:
        """Whether an optimizer may update weights now: in the last turn of a step, and outside of the loop."""
        return self._turn is None or self._turn.is_last

    def over(self, rows_of_steps: Iterable[Sequence[Any]]) -> Iterator[Any]:
        """Yield each local replica's batches in turn; the loop's body then uses this replica's random states.

        Raises:
            BatchError: After a turn in which the program had to call ``optimizer.step()``, and has not.
        """
        try:
            for rows in rows_of_steps:
                for turn in in_replica_order(rows):
                    self._turn, self.has_stepped, self.accumulates = turn, False, False
                    self._steps.begin(turn)
                    with nullcontext() if turn.is_of_last_replica else without_schedulers():
                        yield turn.content
                    self.end_micro_batch()
                    self._check_step(turn)
        finally:
            self._turn = None
            self._steps.exit()

    def end_micro_batch(self) -> None:
        """End the micro batch of this turn (one batch of one replica in the program's loop), if the micro batch is
        open. In the last turn of an optimizer step, also reduce the gradients of all replicas.
        """
        self._steps.end(add=len(self._steps.replicas) == 1)

    def check_backward(self, name: str) -> None:
        """Raise BatchError if the function ``name``, which computes gradients, was called in this turn before."""
        if self._turn is not None and not self._steps.is_open:
            raise BatchError(
                f"{name}() was called twice in one turn of the loop: add the losses, and call it once"
            )

    def _check_step(self, turn: ReplicaBatch) -> None:
        is_alone = turn.is_last and turn.index == 0  # then gradients that the program accumulates are added
        if not (self.has_stepped or is_alone or (self.accumulates and not turn.is_last)):
            raise BatchError(
                "optimizer.step() was not called in a turn of the loop whose gradients it needs. To accumulate "
                f"gradients, write {self._accumulate_by}"
            )


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
    """Replace ``step`` of ``kind`` and its subclasses, so that :func:`without_schedulers` can disable ``step``."""
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
