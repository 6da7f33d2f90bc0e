"""A training loop of the program, in which each turn trains one replica on one batch.

A program that calls ``scheduler.step()`` for each batch means each batch of one replica. So schedulers of learning
rates act in the turns of one replica only.
"""

import atexit
import sys
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any, Final

from torch.optim.lr_scheduler import LRScheduler

from popdist.errors import BatchError, PopdistWarning
from popdist.job.instances import is_main
from popdist.step.training.outside_step import is_any_suspended
from popdist.trainers.replica_steps import LEFT, ReplicaBatch, ReplicaSteps, in_replica_order


class LoopTurns:
    """The turns of a training loop, one turn for each batch of each replica; the last turn of an optimizer step
    reduces the gradients of all replicas.

    Args:
        steps: The steps of the model that the loop trains.
        accumulate_by: The code with which a program accumulates gradients, for the text of an error.
        asks_by: The expression by which a program asks whether an optimizer step acts in this turn.

    Attributes:
        accumulates: Whether the program may leave out ``optimizer.step()`` in this turn, if it is not the last.
        is_asked: Whether the program has asked, in any turn, whether an optimizer step acts.
    """

    def __init__(self, steps: ReplicaSteps, accumulate_by: str, asks_by: str) -> None:
        self.accumulates = self.is_asked = False
        self._steps = steps
        self._accumulate_by = accumulate_by
        self._asks_by = asks_by
        self._turn: ReplicaBatch | None = None
        self._before: dict[Any, list[float]] = {}  # the learning rates of optimizers before the step's first turn
        self._rates: dict[Any, list[float]] = {}  # and in the first turn that stepped each optimizer
        self._stepped: set[Any] = set()  # the optimizers that the program has stepped in this turn
        self._may_warn = len(steps.replicas) > 1 and is_main()

    @property
    def is_running(self) -> bool:
        """Whether the program is inside the loop."""
        return self._turn is not None

    @property
    def is_last(self) -> bool:
        """Whether an optimizer may update weights now: in the last turn of a step, and outside of the loop."""
        return self._turn is None or self._turn.is_last

    def over(self, rows_of_steps: Iterable[Sequence[Any]]) -> Iterator[Any]:
        """Return a training loop, which ends before Python does, even if the program keeps the loop."""
        loop = self._over(rows_of_steps)
        _open_loops.add(loop)
        return loop

    def _over(self, rows_of_steps: Iterable[Sequence[Any]]) -> Generator[Any, None, None]:
        """Yield each local replica's batches in turn; the loop's body then uses this replica's random states.

        Raises:
            BatchError: Within the model's ``no_sync()``, as in accelerate's LocalSGD; after a turn in which the
                program had to call ``optimizer.step()``, and has not; or after a step in which an optimizer was
                stepped for some replicas, and not for the last one.
        """
        if is_any_suspended():
            raise BatchError(
                "a training loop began within model.no_sync(), and LocalSGD is such a context: the loop reduces "
                "gradients in each optimizer step, so leave the context out"
            )
        try:
            for rows in rows_of_steps:
                self._before, self._rates = {it: _rates_of(it) for it in self._before}, {}
                for turn in in_replica_order(rows):
                    self._turn, self.accumulates = turn, False
                    self._stepped.clear()
                    self._steps.begin(turn)
                    with nullcontext() if turn.is_of_last_replica else without_schedulers():
                        yield turn.content
                    self.end_micro_batch()
                    self._check_step(turn)
                    if not turn.is_of_last_replica:
                        self._check_rates(turn)
                self._warn_of_iterations()
        except GeneratorExit:
            if not (self.is_last or self._steps.is_untouched or self._steps.is_between_steps):
                warnings.warn(f"{LEFT}. The step was discarded", PopdistWarning, stacklevel=3)
            raise
        finally:
            self._turn = None
            self._steps.exit()

    def end_micro_batch(self) -> None:
        """End the micro batch of this turn (one batch of one replica in the program's loop), if the micro batch is
        open. In the last turn of an optimizer step, also reduce the gradients of all replicas.
        """
        self._steps.end(add=len(self._steps.replicas) == 1)

    def check_backward(self, name: str) -> None:
        """Raise BatchError if the function ``name``, which computes gradients, was called in this turn before, or
        is called outside of a loop over replicas.
        """
        if self._turn is None and not self._steps.is_open and len(self._steps.replicas) > 1:
            raise BatchError(
                f"{name}() was called outside of a training loop over a loader of replicas: prepare or set up the "
                "loader, too, and call model.train() before the loop begins"
            )
        if self._turn is not None and not self._steps.is_open:
            raise BatchError(
                f"{name}() was called twice in one turn of the loop: add the losses, and call it once"
            )

    def check_collective(self, name: str, *, may_be_over: bool = False) -> None:
        """Raise BatchError if the program calls the function ``name`` in a training loop over several replicas,
        where the function would join the value of one replica of each instance. An evaluation may call it.

        Args:
            name: The name of the function.
            may_be_over: Warn instead where a step has ended, because a program that keeps the iterator of the
                loader may have left its loop there.
        """
        if not (self.is_running and self._steps.is_training and len(self._steps.replicas) > 1):
            return
        if may_be_over and self._steps.is_between_steps:
            if not is_main():
                return
            warnings.warn(
                f"{name}() was called between two optimizer steps of a training loop. A sum over all batches of "
                "the loop is right, but a value of the last batch belongs to one replica of each instance. If the "
                "loop is over, delete its iterator before the call",
                PopdistWarning,
                stacklevel=4,
            )
        else:
            raise BatchError(
                f"{name}() joins the value of one replica of each instance. In each turn add the value to a "
                f"popdist.Mean(), and call its compute() after the loop, or when {self._asks_by} is True"
            )

    def begin_step(self, optimizer: Any, closure: Any = None) -> None:
        """Note that the program calls ``optimizer.step(closure)`` in this turn, and end the turn's micro batch.

        Raises:
            BatchError: For a closure, or if the turns of one step have different learning rates.
        """
        if closure is not None:
            raise BatchError("optimizer.step(closure) has no place in a loop over replicas: call step() alone")
        self.end_micro_batch()
        self._stepped.add(optimizer)
        rates = _rates_of(optimizer)
        self._before.setdefault(optimizer, rates)
        self._rates.setdefault(optimizer, rates)
        if self._turn is not None:
            self._check_rates(self._turn)

    def _check_rates(self, turn: ReplicaBatch) -> None:
        """Raise BatchError if a learning rate has changed since the step's first turn.

        A scheduler acts in the turns of the last replica, so only the first of these turns is checked. A program
        that counts steps may set a learning rate in the last turn, if it has not set the rate in the first turn.
        """
        if turn.is_of_last_replica and turn.index % turn.accumulation:
            return
        for optimizer, first in self._rates.items():
            is_of_step = turn.is_last and self.is_asked and self._before[optimizer] == first
            if _rates_of(optimizer) != first and not is_of_step:
                raise BatchError(
                    "the learning rate has changed between the replicas of one optimizer step. Call "
                    "scheduler.step() after optimizer.step(); set a learning rate by hand where "
                    f"{self._asks_by} is True"
                )

    def _check_step(self, turn: ReplicaBatch) -> None:
        is_alone = turn.is_last and turn.index == 0  # then gradients that the program accumulates are added
        if not (self._stepped or is_alone or (self.accumulates and not turn.is_last)):
            raise BatchError(
                "optimizer.step() was not called between two batches of the loop. Call backward() and step() for "
                "each batch, before the loop reads the next one. To accumulate gradients, write "
                f"{self._accumulate_by}"
            )
        if turn.is_last and not self._stepped >= self._rates.keys():
            raise BatchError(
                "an optimizer made a step for some replicas and not for the last one, so the step had no effect. "
                f"Choose between optimizers by a number of steps, and count steps where {self._asks_by} is True"
            )

    def _warn_of_iterations(self) -> None:
        """Warn once, after the first optimizer step, that an iteration of the loop is no optimizer step."""
        if self._may_warn:
            warnings.warn(
                f"this instance trains {len(self._steps.replicas)} replicas in turn, and an iteration of the loop "
                "is the batch of one replica. Code that counts optimizer steps, averages weights or logs belongs "
                f"under `if {self._asks_by}:`. Divide a sum of losses by the number of iterations",
                PopdistWarning,
                stacklevel=4,  # the line of the loop
            )
        self._may_warn = False


_open_loops: Final[weakref.WeakSet[Generator[Any, None, None]]] = weakref.WeakSet()


@atexit.register
def _close_loops() -> None:
    """End the loops whose iterators the program keeps, while Python can still run the code of their ends.

    If an exception has ended the program, the exception says more than the warning of a loop that was left.
    """
    with warnings.catch_warnings():
        if hasattr(sys, "last_type"):
            warnings.simplefilter("ignore", PopdistWarning)
        for loop in tuple(_open_loops):
            loop.close()


def _rates_of(optimizer: Any) -> list[float]:
    return [float(group.get("lr", 0.0)) for group in optimizer.param_groups]


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
