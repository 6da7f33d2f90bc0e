"""Which steps of a model are checked: the checks that cost time are made in those alone.

They are its first three steps, and then every 100th: what goes wrong does so from the start most of the time, or
goes on for long. A model counts its own steps, from 1: each loop over micro batches that ended with a gradient on
all instances, each ``reduce_gradients()``, and each reduction after a backward pass outside of the loop. So the
number is the same on all instances when they begin a step together. A new process counts anew, also when it goes
on from a checkpoint.

A step is a checked one from its beginning to its end. There are no checks outside of steps, so an evaluation, or
what runs on some instances only, never waits for others because of one.
"""

from typing import Final

from popdist import context

NUM_FIRST: Final = 3
"""So many first steps are checked."""

EVERY: Final = 100
"""And every so many-th."""


def is_checked(number: int) -> bool:
    """Whether step ``number`` of a model, counted from 1, is one in which the checks are made that cost time."""
    return number <= NUM_FIRST or number % EVERY == 0


class CheckedSteps:
    """The steps of one model, counted: ``number`` is that of the next one, from 1."""

    def __init__(self) -> None:
        self.number = 1

    def is_next_checked(self) -> bool:
        """Whether the next step, which begins now, is checked; never with ``popdist.init(checks="off")``."""
        return is_checked(self.number) and context.current_job().is_checked

    def end_step(self) -> None:
        """Count a step that has ended with a gradient on all instances."""
        self.number += 1
