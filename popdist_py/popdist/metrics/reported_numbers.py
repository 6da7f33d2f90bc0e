"""The numbers that a program reports while it trains: for poprun's report of the job, and for trackers.

To poprun they go through a pipe that its agent made. It never makes the program wait: at most 100 lines a second
are written, with the last value of each number since the lines before, and a pipe that is full is tried again.
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

MAX_NAMES: Final = 64
"""How many different numbers a program may report."""

MAX_NAME_BYTES: Final = 100

_GAP_SECONDS: Final = 0.01
_NUMBERS_OF_A_LINE: Final = 16  # which then fits into PIPE_BUF (pipe(7))

OnReport = Callable[[dict[str, float], int | None], object]


class NumberPipe:
    """The pipe to the agent; it takes numbers, and drops them where there is none."""

    def __init__(self) -> None:
        self._descriptor = -1
        self._unsent: dict[str, float] = {}
        self._next_seconds = 0.0

    def open(self, place: str) -> None:
        """Write from now on to the pipe at ``place``, ``DESCRIPTOR:INODE``, if this process has inherited it."""
        number, _, inode = place.partition(":")
        if not (number.isdecimal() and inode.isdecimal()):
            return
        try:
            found = os.fstat(int(number))
        except (OSError, OverflowError):
            return
        if stat.S_ISFIFO(found.st_mode) and found.st_ino == int(inode):  # else a file of the program's own
            self._descriptor = int(number)
            os.register_at_fork(after_in_child=self.close)
            atexit.register(self.flush)

    def close(self) -> None:
        """Write no more."""
        self._descriptor = -1

    def send(self, numbers: dict[str, float]) -> None:
        """Write ``numbers``, now or with those that come next."""
        if self._descriptor >= 0:
            self._unsent |= numbers
            if time.monotonic() >= self._next_seconds:
                self.flush()

    def flush(self) -> None:
        """Write what has not been written yet, as lines of JSON that the pipe takes wholly or not at all."""
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
    """A callback that is told of reports."""

    callback: OnReport
    has_failed: bool = False


@dataclass(slots=True, kw_only=True)
class _Reporting:
    """What this process has reported, and who is told."""

    pipe: NumberPipe | None = None  # None before the first report
    names: set[str] = field(default_factory=set)
    step: int | None = None  # the last one that was reported
    listeners: list[_Listener] = field(default_factory=list)
    is_calling: bool = False


_reporting = _Reporting()


def report(*, step: int | None = None, loss: float | None = None, **numbers: float | None) -> None:
    """Tell poprun, and the callbacks of :func:`on_report`, how far the training is and how well it goes.

    poprun's report of a hang and its monitor show step and loss; ``poprun --report run.html`` draws every number
    over time. Needs no ``init()`` and asks nobody; outside poprun only the callbacks hear of it. A program that
    reports makes progress, also where it calls nothing else of popdist for long. Steps need not be reported where
    ``ReplicatedModel`` trains: they are counted.

    Args:
        step: The step that has been done, 0 or greater; a number of the program's own. None leaves the last one.
        loss: Its loss: a number, or a tensor with one element. Reading an accelerator's waits for it; so report
            it as often as the loss is printed, not at every step. None leaves the last one.
        **numbers: Any others by name, such as ``accuracy=0.9`` or ``**{"loss/train": 0.3}``, of the same kinds.
            None is left out. At most 64 names in all, of at most 100 bytes.

    Raises:
        PopdistError: If ``step`` is no such whole number, another value is no number, or there are more names.
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

    All instances may call this alike: ``popdist.on_report(wandb.log)``. It needs no ``init()``, and goes on after
    ``finalize()``. An exception of a callback does not end the training: its first one becomes a PopdistWarning,
    and the callback is called again at the next report. A report made by a callback tells no callback.

    Args:
        callback: Takes a new dictionary of the numbers that this report has, ``loss`` among them, by name, and the
            step of the report, else the last one reported; None where none was.

    Returns:
        A function that ends this; calling it twice does nothing more.

    Raises:
        PopdistError: If ``callback`` cannot be called.
        ContractError: If the environment promises a job and does not describe one.
    """
    from popdist.job.context import instance_index

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
