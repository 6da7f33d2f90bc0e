"""Where one step of a training loop ends and the next one begins.

Between two steps model, optimizers, schedulers and loaders belong together, and what the loop counts is up to
date. ``optimizer.step()`` is no such place: schedulers and counters come after it. So a step ends where the loop
asks a loader of popdist for its next batch, if an optimizer has stepped since the last one; a loop that only
evaluates has no steps. In a loop without such a loader it ends where a model begins its next step. Standard
library only.
"""

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class TrainingLoop:
    """The training loop of a program: finds the ends of its steps, and calls ``on_step_end`` at each.

    Attributes:
        on_step_end: What to call; it may leave by an exception. None for nothing.
        num_step_ends: Ends of steps so far.
        num_optimizer_steps: Calls of ``step()`` so far, of any optimizer.
        num_loader_passes: How often the program has begun to read a loader: the same on all instances, unless
            one reads a loader that the others do not read.
    """

    def __init__(self) -> None:
        self.on_step_end: Callable[[], None] | None = None
        self.num_step_ends = 0
        self.num_optimizer_steps = 0
        self.num_loader_passes = 0
        self._num_open_loaders = 0
        self._begun: set[object] = set()
        self._num_steps_before = 0

    @contextmanager
    def read_loader(self) -> "Iterator[Callable[[], None]]":
        """A context for the time in which the program reads one loader.

        It gives a function to be called when the loop asks for its next batch: the end of a step, if it has
        trained on the last one.
        """
        num_steps_before = self.num_optimizer_steps

        def ask() -> None:
            nonlocal num_steps_before
            if self.num_optimizer_steps != num_steps_before:
                num_steps_before = self.num_optimizer_steps
                self.end_step()

        self.num_loader_passes += 1
        self._num_open_loaders += 1
        try:
            yield ask
        finally:
            self._num_open_loaders -= 1

    def begin_step(self, model: object) -> None:
        """A step of a model begins: the end of the one before, unless a loader tells of ends.

        Where several models take turns, a step ends when all have had theirs. And a step that begins before an
        optimizer has stepped belongs to the step before it, as those of a closure do.

        Args:
            model: What stands for the model; kept until the step ends.
        """
        if self._num_open_loaders:
            return
        if model in self._begun and self.num_optimizer_steps != self._num_steps_before:
            self.end_step()
        if not self._begun:
            self._num_steps_before = self.num_optimizer_steps
        self._begun.add(model)

    def end_step(self) -> None:
        """A step has ended here."""
        self.num_step_ends += 1
        self._begun.clear()
        if self.on_step_end is not None:
            self.on_step_end()


training_loop = TrainingLoop()
"""The training loop of this process."""
