"""Where one step of a training loop ends and the next one begins.

Between the two, model, optimizers, schedulers and loaders belong together, and what the loop counts is up to date.
``optimizer.step()`` is no such place: schedulers and counters come after it. So it is where the loop asks a loader
of popdist for its next batch, if an optimizer has stepped since the last one; a loop that only evaluates has none.
In a loop without such a loader it is where a model begins its next step. Standard library only.
"""

import weakref
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable


class TrainingLoop:
    """Counts the boundaries that the program comes to, and calls ``on_step_end`` at each.

    Attributes:
        on_step_end: What to call; it may leave by an exception. None for nothing.
        num_step_ends: Step ends so far.
        num_optimizer_steps: Calls of ``step()`` so far, of any optimizer.
    """

    def __init__(self) -> None:
        self.on_step_end: Callable[[], None] | None = None
        self.num_step_ends = 0
        self.num_optimizer_steps = 0
        self._num_open_loops = 0
        self._begun: weakref.WeakSet[object] = weakref.WeakSet()
        self._num_steps_before = 0

    def read_loader(self) -> "LoaderLoop":
        """A context for the time in which the program loops over one loader."""
        return LoaderLoop(self)

    def begin_step(self, model: object) -> None:
        """A step of ``model`` begins: a boundary, unless a loader has them.

        Where several models take turns, one comes round again when all have had theirs. And a step that begins
        before an optimizer has stepped belongs to the step before it, as those of a closure do.
        """
        if self._num_open_loops:
            return
        if model in self._begun and self.num_optimizer_steps != self._num_steps_before:
            self.end_step()
        if not self._begun:
            self._num_steps_before = self.num_optimizer_steps
        self._begun.add(model)

    def end_step(self) -> None:
        """This is a boundary."""
        self.num_step_ends += 1
        self._begun.clear()
        if self.on_step_end is not None:
            self.on_step_end()

    def open_loop(self, by: int) -> None:
        """One loop over a loader more, or with -1 one less."""
        self._num_open_loops += by


class LoaderLoop:
    """The time in which the program loops over one loader; made by :meth:`TrainingLoop.read_loader`."""

    def __init__(self, training_loop: TrainingLoop) -> None:
        self._training_loop = training_loop
        self._num_steps_before = training_loop.num_optimizer_steps

    def __enter__(self) -> Self:
        self._training_loop.open_loop(1)
        return self

    def __exit__(self, *_: object) -> None:
        self._training_loop.open_loop(-1)

    def next_batch(self) -> None:
        """The loop asks for its next batch: a boundary, if it has trained on the last one."""
        if self._training_loop.num_optimizer_steps != self._num_steps_before:
            self._num_steps_before = self._training_loop.num_optimizer_steps
            self._training_loop.end_step()


training_loop = TrainingLoop()
"""The one of this process."""
