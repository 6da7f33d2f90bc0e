"""This process's page of progress, where the agent that started it reads how far it has come.

There is one under poprun, else none, and then every call here does nothing. It belongs to the first process that
asked popdist for its job, and to none that was forked from it. It is opened once, when popdist is imported, and
with it the signal at which the process shows its stacks is registered.
"""

import mmap
import os

from popdist import stack_signal
from popdist.arguments import whole_number
from popdist.contract import PROGRESS_DESCRIPTOR
from popdist.errors import PopdistError
from popdist.progress_page import PAGE_BYTES, Progress, ProgressPage

_LARGEST_STEP = 2**63 - 1


class Presence:
    """What this process says of itself, as long as it is the one that opened the page."""

    def __init__(self) -> None:
        self._page: ProgressPage | None = None

    @property
    def is_watched(self) -> bool:
        """Whether there is a page."""
        return self._page is not None

    def open(self, descriptor: int) -> None:
        """Take the page behind ``descriptor``; whatever else that may be is left alone."""
        if not stack_signal.is_page(descriptor):
            return
        try:
            page = ProgressPage(memoryview(mmap.mmap(descriptor, PAGE_BYTES)))
        except (OSError, ValueError):
            return
        found = page.read()
        if found.pid not in (0, os.getpid()) and found.has_joined and stack_signal.is_alive(found.pid):
            return
        is_announced = found.pid == os.getpid() and stack_signal.catches(found.stack_signal)
        signum = found.stack_signal if is_announced else stack_signal.register(descriptor)
        page.write(Progress(pid=os.getpid(), stack_signal=signum))
        self._page = page
        os.register_at_fork(after_in_child=self.close)

    def close(self) -> None:
        """Say nothing any more."""
        self._page = None

    def tell_joined(self) -> None:
        """Say that the program asked which job it is in."""
        if self._page is not None:
            self._page.join()

    def count_step(self) -> None:
        """Say that the gradients of a step have been reduced."""
        if self._page is not None:
            self._page.count_step()

    def wait(self, collective: str) -> None:
        """Say that this process waits for other instances now, in ``collective``."""
        if self._page is not None:
            self._page.wait(collective)

    def wait_again(self) -> None:
        """Say that it waits for what it waited for last, or for the data that belongs to it."""
        if self._page is not None:
            self._page.wait_again()

    def go_on(self) -> None:
        """Say that it waits no more."""
        if self._page is not None:
            self._page.go_on()

    def report(self, step: int | None, loss: float | None) -> None:
        """Say what the program itself tells of its training; None leaves a value as it is."""
        if self._page is not None:
            self._page.report(step, loss)


presence = Presence()
"""The one of this process."""


def begin() -> None:
    """Open the page that the environment names, if there is one and nobody has: popdist does so when imported."""
    descriptor = os.environ.get(PROGRESS_DESCRIPTOR, "")
    if descriptor.isdecimal() and not presence.is_watched:
        presence.open(int(descriptor))


def report(*, step: int | None = None, loss: float | None = None) -> None:
    """Tell poprun how far the training is: its report of a hang and its monitor show it.

    Needs no ``init()``, asks nobody and takes less than a microsecond; outside poprun it does nothing. A program
    that reports makes progress, also where it calls nothing else of popdist for long. Not needed where
    ``ReplicatedModel`` trains: its steps are counted.

    Args:
        step: The step that has been done, 0 or greater; a number of the program's own. None leaves the last one.
        loss: Its loss: a number, or a tensor with one element. To read a CUDA tensor waits for the GPU; so report
            it as often as the loss is printed, not at every step. None leaves the last one.

    Raises:
        PopdistError: If ``step`` is no such whole number, or ``loss`` is no number.
    """
    presence.report(
        None if step is None else min(whole_number("step", step, PopdistError, minimum=0), _LARGEST_STEP),
        None if loss is None else _number(loss),
    )


def _number(loss: object) -> float:
    try:
        if not isinstance(loss, str | bytes):
            return float(loss)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError, OverflowError):
        pass
    raise PopdistError(f"loss={loss!r} must be a number, or a tensor with one element")
