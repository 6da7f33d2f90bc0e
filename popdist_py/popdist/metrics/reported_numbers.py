"""Numbers that a program reports during training, for poprun's report of the job and for trackers.

The numbers go to poprun through a pipe that poprun's agent has made. The pipe never makes the program wait. At
most 100 lines a second are written, with the last value of each number since the lines before. If the pipe is
full, a later report writes the numbers.
"""

import atexit
import json
import os
import stat
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from popdist.errors import PopdistError, PopdistWarning, whole_number
from popdist.ground.contract import NUMBERS_DESCRIPTOR
from popdist.ground.progress import LARGEST_STEP, progress_page
from popdist.job.context import instance_index

MAX_NAMES: Final = 64
"""The largest number of different names that a program may report."""

MAX_NAME_BYTES: Final = 100

_GAP_SECONDS: Final = 0.01
_NUMBERS_OF_A_LINE: Final = 16  # so that a line fits into PIPE_BUF (pipe(7))

OnReport = Callable[[dict[str, float], int | None], object]


class NumberPipe:
    """A pipe that sends the numbers that a program reports to poprun; without poprun numbers are dropped."""

    def __init__(self) -> None:
        self._descriptor = -1
        self._unsent: dict[str, float] = {}
        self._next_seconds = 0.0

    def open(self, place: str) -> None:
        """Use the pipe ``place`` (``DESCRIPTOR:INODE``) from now on; do nothing if this process lacks the pipe."""
        number, _, inode = place.partition(":")
        if not (number.isdecimal() and inode.isdecimal()):
            return
        try:
            found = os.fstat(int(number))
        except (OSError, OverflowError):
            return
        if stat.S_ISFIFO(found.st_mode) and found.st_ino == int(inode):  # otherwise the program's own file
            self._descriptor = int(number)
            os.register_at_fork(after_in_child=self.close)
            atexit.register(self.flush)

    def close(self) -> None:
        """Stop writing to the pipe; later numbers are dropped."""
        self._descriptor = -1

    def send(self, numbers: dict[str, float]) -> None:
        """Write ``numbers`` to the pipe; within 10 ms of the last write, keep the numbers for a later call."""
        if self._descriptor >= 0:
            self._unsent |= numbers
            if time.monotonic() >= self._next_seconds:
                self.flush()

    def flush(self) -> None:
        """Write all unwritten numbers to the pipe as lines of JSON; the pipe takes a line whole or not at all."""
        while self._unsent and self._descriptor >= 0:
            now_seconds = time.monotonic()
            some = dict(islice(self._unsent.items(), _NUMBERS_OF_A_LINE))
            line = json.dumps([now_seconds, some], ensure_ascii=False, separators=(",", ":"))
            try:
                os.write(self._descriptor, f"{line}\n".encode())
            except BlockingIOError:
                return
            except OSError:
                self.close()
            self._next_seconds = now_seconds + _GAP_SECONDS
            for name in some:
                del self._unsent[name]


@dataclass(eq=False, slots=True)
class _Listener:
    """A callback of the program, called at each report of numbers, and whether it has raised an error before."""

    callback: OnReport
    has_failed: bool = False


@dataclass(slots=True, kw_only=True)
class _Reporting:
    """The state of this process's reports of numbers: pipe to poprun, names in use, last step, and callbacks."""

    pipe: NumberPipe | None = None  # None before the first report
    names: set[str] = field(default_factory=set)
    step: int | None = None  # the last step that was reported
    listeners: list[_Listener] = field(default_factory=list)
    is_calling: bool = False


_reporting = _Reporting()


def report(*, step: int | None = None, loss: float | None = None, **numbers: float | None) -> None:
    """Send the step, the loss and other numbers to poprun, and to the callbacks of :func:`on_report`.

    poprun's report of a hang and poprun's monitor show step and loss; ``poprun --report run.html`` draws every
    number over time. The call needs no ``init()`` and no communication; outside poprun only the callbacks get the
    numbers. A program that reports makes progress, even if it calls nothing else of popdist for a long time. Steps
    need not be reported if ``ReplicatedModel`` trains, because popdist counts these steps.

    Args:
        step: The step that has been done, 0 or greater, as the program counts. None keeps the last step.
        loss: Loss of the step: a number, or a tensor with one element. Reading a tensor waits for its accelerator,
            so report the loss as often as it is printed, not at every step. None keeps the last loss.
        **numbers: Other numbers by name, such as ``accuracy=0.9`` or ``**{"loss/train": 0.3}``, of the same types.
            None is left out. At most 64 names in all, each of at most 100 bytes.

    Raises:
        PopdistError: If ``step`` is no whole number from 0 up, another value is no number, or names are too many.
    """
    number = None if step is None else min(whole_number("step", step, PopdistError, minimum=0), LARGEST_STEP)
    values = {name: _number(name, it) for name, it in {"loss": loss, **numbers}.items() if it is not None}
    if not values.keys() <= _reporting.names:
        _check_names(values.keys() | _reporting.names)
        _reporting.names |= values.keys()
    progress_page.report(number, values.get("loss"))
    if _reporting.pipe is None:
        _reporting.pipe = NumberPipe()
        _reporting.pipe.open(os.environ.get(NUMBERS_DESCRIPTOR, ""))
    _reporting.step = _reporting.step if number is None else number
    if values:
        _reporting.pipe.send(values)
        _call_listeners(values)


def on_report(callback: OnReport) -> Callable[[], None]:
    """Call ``callback(numbers, step)`` at each :func:`report` of numbers, on instance 0 only.

    All instances may make the same call: ``popdist.on_report(wandb.log)``. The call needs no ``init()``, and the
    callback stays after ``finalize()``. An exception of a callback does not end the training: the first exception
    becomes a PopdistWarning, and the callback is called again at the next report. A report made by a callback
    calls no callback.

    Args:
        callback: Function of a new dictionary with the numbers of this report by name, also ``loss``, and of a
            step. The step is the last reported step; None if no step was reported.

    Returns:
        A function that removes the callback; a second call does nothing.

    Raises:
        PopdistError: If ``callback`` cannot be called.
        ContractError: If the environment variables announce a job and do not describe the job.
    """
    if not callable(callback):
        raise PopdistError(f"on_report({callback!r}): expected a function that takes numbers and a step")
    listener = _Listener(callback)
    if instance_index() == 0:
        _reporting.listeners.append(listener)

    def remove() -> None:
        if listener in _reporting.listeners:
            _reporting.listeners.remove(listener)

    return remove


def _call_listeners(numbers: dict[str, float]) -> None:
    if _reporting.is_calling:
        return
    _reporting.is_calling = True
    try:
        for listener in tuple(_reporting.listeners):
            try:
                listener.callback(dict(numbers), _reporting.step)
            except Exception as error:  # noqa: BLE001 - a tracker whose server is gone must not end a training
                if not listener.has_failed:
                    listener.has_failed = True
                    _warn(listener, error)
    finally:
        _reporting.is_calling = False


def _warn(listener: _Listener, error: Exception) -> None:
    name = getattr(listener.callback, "__qualname__", repr(listener.callback))
    warnings.warn(
        f"{name}, given to popdist.on_report(), raised {type(error).__name__}: {error}. The training goes on; "
        "further exceptions of it are not told",
        PopdistWarning,
        stacklevel=4,
    )


def _check_names(names: set[str]) -> None:
    if len(names) > MAX_NAMES:
        raise PopdistError(
            f"report() was given {len(names)} different names, and {MAX_NAMES} are possible: a name stands for "
            f"one curve, so do not number names; among them are {', '.join(sorted(names)[:3])}"
        )
    for name in names:
        if not (name.isprintable() and 0 < len(name.encode()) <= MAX_NAME_BYTES):
            raise PopdistError(
                f"report(): the name {name!r:.120} must be printable, of 1 to {MAX_NAME_BYTES} bytes"
            )


def _number(name: str, value: object) -> float:
    try:
        if not isinstance(value, str | bytes):
            return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError, OverflowError):
        pass
    raise PopdistError(f"{name}={value!r} must be a number, or a tensor with one element")
