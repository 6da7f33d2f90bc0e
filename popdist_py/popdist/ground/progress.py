"""The progress of a program, on a page of memory that poprun's agent can read at any time.

The page is a file in memory (memfd_create(2)). poprun's agent makes the file, and the program inherits the file's
descriptor. Writing needs no system call, and the page of a program that hangs still says what the program does.
The number of changes is at both ends of the page, so that a reader detects an unfinished change (a sequence lock).
"""

import math
import os
import struct
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final, Self
from zlib import crc32

from popdist.errors import runs_of
from popdist.ground.contract import PROGRESS_DESCRIPTOR
from popdist.ground.values import dataclass
from popdist.startup import phase_sampler, stack_signal

PAGE_BYTES: Final = 4096
"""Number of bytes of the progress page; the text about threads begins behind the page."""

USED_BYTES: Final = 272
"""Number of bytes of the page that describe progress; counters, places and stamps follow."""

_COUNTERS: Final = struct.Struct(phase_sampler.COUNTERS_FORMAT)
_SAMPLES: Final = struct.Struct("=Q")
_SAMPLES_AT: Final = phase_sampler.COUNTERS_AT + _COUNTERS.size
COUNTED_BYTES: Final = _SAMPLES_AT + _SAMPLES.size
"""Number of bytes of the page that an agent sends every second; for a report on calls it sends the whole page."""

_STAMP: Final = struct.Struct("=IId")
_ENDS: Final = struct.Struct(phase_sampler.ENDS_FORMAT)
_STAMPS_AT: Final = phase_sampler.ENDS_AT + _ENDS.size
_NUM_STAMPS: Final = (PAGE_BYTES - _STAMPS_AT) // _STAMP.size

MAX_NAME_BYTES: Final = 96
"""Maximum number of bytes of a collective's name on the page; a longer name is shortened."""

MAX_MEMBER_RUNS: Final = 12
"""Maximum number of ranges of consecutive instances on the page; a group of more ranges means all instances."""

AFTER_LEAVING: Final = "the next step after one that an exception has ended"
"""The text on the page, in place of a collective's name, while one instance of a replica waits after an error."""

FINALIZE: Final = "MPI_Finalize"
"""The text on the page, in place of a collective's name, while a program waits in MPI_Finalize."""

ANNOUNCEMENT_AT: Final = 8
ANNOUNCEMENT_FORMAT: Final = "=qi"
"""Offset and `struct` format of the process id and of the signal at which the process writes its stacks."""

RECORDER_AT: Final = stack_signal.RECORDER_AT
"""Offset, with the format ``=i``, of the descriptor that connects to torch's recorder of collectives."""

_COUNT: Final = struct.Struct("=Q")
_VALUES: Final = struct.Struct(f"{ANNOUNCEMENT_FORMAT}4?QqdQd{MAX_NAME_BYTES}s")
_RUNS: Final = struct.Struct(f"={2 * MAX_MEMBER_RUNS}I")
_RUNS_AT: Final = ANNOUNCEMENT_AT + _VALUES.size
_BEGUN_AT: Final = _RUNS_AT + _RUNS.size
_BY_HOOK: Final = struct.Struct("=i?")
_HAS_JOINED_AT, _HAS_STEP_AT, _HAS_LOSS_AT = 20, 21, 22
_NUM_STEPS, _STEP, _LOSS, _NUM_WAITS, _WAITING_SINCE, _BEGUN = 3, 4, 5, 6, 7, _BEGUN_AT // 8
_NAME_AT: Final = 64
"""Offsets of single values on the page: in bytes for names that end with ``_AT``, else in words of 8 bytes."""

LARGEST_STEP: Final = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of a program, as the program has written it into memory that poprun reads."""

    pid: int = 0  # the process that writes; 0 if no process has written yet
    stack_signal: int = 0  # the signal at which the process writes its stacks behind the page; 0 if there is none
    has_joined: bool = False  # whether the program asked popdist which job it is in
    num_steps: int = 0  # steps whose gradients popdist has reduced
    step: int | None = None  # the last step that the program itself reported, or None
    loss: float | None = None  # the last loss that the program reported, or None
    num_waits: int = 0  # how often the program has waited for other instances
    # monotonic time at which the program began to wait for other instances; None if it does not wait
    waiting_since_seconds: float | None = None
    collective: str = ""  # the last collective in which the program waited, in words; empty before the first wait
    # the instances in this collective, as pairs of a first and a last instance; empty if all instances of the job
    # take part
    member_runs: tuple[tuple[int, int], ...] = ()
    # whether the program had an optimizer of torch, and used nothing that connects it to other instances. The
    # start-up hook writes this when the program ends (``startup/sitecustomize.py``)
    has_trained_alone: bool = False
    # the program's descriptor for asking torch's recorder of collectives, written by the start-up hook; or 0
    recorder: int = 0
    uses_jax: bool = False  # whether JAX asked which job it is in; written by the start-up hook

    @classmethod
    def read(cls, page: bytes) -> Self | None:
        """Read progress from ``page``, a copy of a program's memory; None if too short or copied in a change."""
        if len(page) < USED_BYTES or page[: _COUNT.size] != page[_BEGUN_AT : _BEGUN_AT + _COUNT.size]:
            return None
        pid, signum, has_joined, has_step, has_loss, is_alone, num_steps, step, loss, num_waits, since, name = (
            _VALUES.unpack_from(page, ANNOUNCEMENT_AT)
        )
        bounds = _RUNS.unpack_from(page, _RUNS_AT)
        runs = zip(bounds[::2], bounds[1::2], strict=True)
        recorder, uses_jax = _BY_HOOK.unpack_from(page, RECORDER_AT)
        return cls(
            pid=pid,
            stack_signal=signum,
            has_joined=has_joined,
            num_steps=num_steps,
            step=step if has_step else None,
            loss=_one_nan(loss) if has_loss else None,
            num_waits=num_waits,
            waiting_since_seconds=since or None,
            collective=name.rstrip(b"\0").decode(errors="replace"),
            member_runs=tuple((first, stop - 1) for first, stop in runs if stop),
            has_trained_alone=is_alone,
            recorder=recorder,
            uses_jax=uses_jax,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseCounters:
    """The seconds that a program has spent in each phase of training, as a sampler in the program measured."""

    seconds: Mapping[str, float]  # for each phase in `popdist.startup.phase_sampler.PHASES`
    idle_backward_seconds: float  # time of the backward pass in which the main thread used no processor
    disk_seconds: float  # time in which the main thread waited for a disk
    worker_seconds: float  # time in which the main thread waited for DataLoader workers
    message_seconds: float  # time of waiting in a pipeline, sending and receiving
    long_forward_seconds: float  # time of forward passes of several seconds without a step of an optimizer
    gc_seconds: float  # time of Python's garbage collector
    began_at_seconds: float  # monotonic time of the program's host at which the sampler began
    num_optimizer_steps: int
    num_samples: int  # samples that popdist has given the program; 0 if popdist gave none

    @classmethod
    def read(cls, page: bytes) -> Self | None:
        """Read the seconds of training phases from ``page``, a copy of a program's memory; None without them."""
        if len(page) < COUNTED_BYTES:
            return None
        num_steps, *seconds, idle, disk, workers, messages, long_forward, gc, began = _COUNTERS.unpack_from(
            page, phase_sampler.COUNTERS_AT
        )
        return (
            cls(
                seconds=dict(zip(phase_sampler.PHASES, seconds, strict=True)),
                idle_backward_seconds=idle,
                disk_seconds=disk,
                worker_seconds=workers,
                message_seconds=messages,
                long_forward_seconds=long_forward,
                gc_seconds=gc,
                began_at_seconds=began,
                num_optimizer_steps=num_steps,
                num_samples=_SAMPLES.unpack_from(page, _SAMPLES_AT)[0],
            )
            if began
            else None
        )


def read_places(page: bytes) -> dict[str, str]:
    """Return for each phase of training the line of code (``file:line``) at which the program was most often."""
    size = phase_sampler.PLACE_BYTES
    fields = [page[at : at + size] for at in range(phase_sampler.PLACES_AT, phase_sampler.ENDS_AT, size)]
    texts = (field.rstrip(b"\0").decode(errors="replace") for field in fields)
    return {phase: text for phase, text in zip(phase_sampler.PHASES, texts, strict=True) if text}


def read_step_ends(page: bytes) -> list[float]:
    """Return the times at which the program's last optimizer steps ended, ascending (seconds since 1970)."""
    return [at for at in _ENDS.unpack_from(page, phase_sampler.ENDS_AT) if at]


def read_stamps(page: bytes) -> dict[str, dict[int, float]]:
    """Return the times (seconds since 1970) of popdist's last collectives, by group, then by call number."""
    stamps: dict[str, dict[int, float]] = {}
    for group, number, at_seconds in _STAMP.iter_unpack(page[_STAMPS_AT : _STAMPS_AT + _NUM_STAMPS * _STAMP.size]):
        if number:
            stamps.setdefault(f"popdist {group}", {})[number] = at_seconds
    return stamps


class ProgressPage:
    """The memory in which this process writes its progress for poprun; before ``open()``, nobody reads it."""

    def __init__(self, memory: memoryview | None = None) -> None:
        self.is_watched = False  # whether an agent reads the page
        self._use(memoryview(bytearray(PAGE_BYTES)) if memory is None else memory)

    def close(self) -> None:
        """Stop writing progress into the memory that poprun reads."""
        self.is_watched = False
        self._use(memoryview(bytearray(PAGE_BYTES)))

    def open(self, descriptor: int) -> None:
        """Write progress from now on to the memory file ``descriptor``, if poprun has made the file for this."""
        if not stack_signal.is_page(descriptor):
            return
        import mmap

        try:
            memory = memoryview(mmap.mmap(descriptor, PAGE_BYTES))
        except (OSError, ValueError):
            return
        written = Progress.read(bytes(memory[:USED_BYTES])) or Progress()
        if written.pid not in (0, os.getpid()) and written.has_joined and stack_signal.is_alive(written.pid):
            return  # the page belongs to the first process that asked popdist for its job
        is_announced = written.pid == os.getpid() and stack_signal.catches(written.stack_signal)
        signum = written.stack_signal if is_announced else stack_signal.register(descriptor)
        self.is_watched = True
        self._use(memory)
        recorder, uses_jax = (written.recorder, written.uses_jax) if is_announced else (0, False)
        self.write(Progress(pid=os.getpid(), stack_signal=signum, recorder=recorder, uses_jax=uses_jax))
        os.register_at_fork(after_in_child=self.close)

    def _use(self, memory: memoryview) -> None:
        """Write progress from now on to ``memory``, whose address must be a multiple of 8."""
        self._whole = memory
        self._num_stamps = 0
        self._groups: dict[tuple[int, ...], tuple[int, int]] = {}
        self._memory = memory[:USED_BYTES]
        self._words = self._memory.cast("Q")
        self._floats = self._memory.cast("d")
        self._collective = ""

    def read(self) -> Progress:
        """Return the progress that this process has written so far."""
        return Progress.read(bytes(self._memory)) or Progress()

    def write(self, progress: Progress) -> None:
        """Replace all progress that this process has written for poprun by ``progress``."""
        self._words[_BEGUN] += 1
        _VALUES.pack_into(
            self._memory,
            ANNOUNCEMENT_AT,
            progress.pid,
            progress.stack_signal,
            progress.has_joined,
            progress.step is not None,
            progress.loss is not None,
            progress.has_trained_alone,
            progress.num_steps,
            progress.step or 0,
            progress.loss or 0.0,
            progress.num_waits,
            progress.waiting_since_seconds or 0.0,
            _encode(progress.collective),
        )
        _RUNS.pack_into(self._memory, _RUNS_AT, *_bounds_of(progress.member_runs))
        _BY_HOOK.pack_into(self._memory, RECORDER_AT, progress.recorder, progress.uses_jax)
        self._collective = progress.collective
        self._words[0] = self._words[_BEGUN]

    def join(self) -> None:
        """Record for poprun that the program uses popdist: it has asked popdist for its job."""
        self._memory[_HAS_JOINED_AT] = 1

    def report(self, step: int | None, loss: float | None) -> None:
        """Record for poprun the step and the loss that the program reports; None leaves a value unchanged."""
        if step is not None:
            self._words[_STEP] = step
            self._memory[_HAS_STEP_AT] = 1
        if loss is not None:
            self._floats[_LOSS] = loss
            self._memory[_HAS_LOSS_AT] = 1

    def count_step(self) -> None:
        """Record for poprun that the gradients of one more step have been reduced."""
        self._words[_NUM_STEPS] += 1

    def wait(self, collective: str, members: Sequence[int] = ()) -> None:
        """Record for poprun that the program waits in ``collective`` for instances ``members``; () means all."""
        if collective != self._collective:  # the name and the members of a collective change together
            self._words[_BEGUN] += 1
            self._floats[_WAITING_SINCE] = 0.0
            self._memory[_NAME_AT : _NAME_AT + MAX_NAME_BYTES] = _encode(collective)
            runs = [(run[0], run[-1]) for run in runs_of(members)]
            _RUNS.pack_into(self._memory, _RUNS_AT, *_bounds_of(runs))
            self._collective = collective
            self._words[0] = self._words[_BEGUN]
        self._words[_NUM_WAITS] += 1
        self._floats[_WAITING_SINCE] = time.monotonic()
        self._stamp(tuple(members))

    def _stamp(self, members: tuple[int, ...]) -> None:
        """Record when the program called a collective of the group ``members``, in place of the oldest record."""
        group, number = self._groups.get(members) or (crc32(repr(members).encode()), 0)
        self._groups[members] = group, number + 1
        at = _STAMPS_AT + self._num_stamps % _NUM_STAMPS * _STAMP.size
        _STAMP.pack_into(self._whole, at, group, number + 1, time.time())
        self._num_stamps += 1

    def count_samples(self, num_samples: int) -> None:
        """Record for poprun that popdist has given the program ``num_samples`` more samples."""
        (before,) = _SAMPLES.unpack_from(self._whole, _SAMPLES_AT)
        _SAMPLES.pack_into(self._whole, _SAMPLES_AT, before + num_samples)

    def wait_again(self) -> None:
        """Record for poprun that the program again waits in its last collective, or for the collective's data."""
        self._floats[_WAITING_SINCE] = time.monotonic()

    def end_wait(self) -> None:
        """Record for poprun that the program no longer waits for other instances."""
        self._floats[_WAITING_SINCE] = 0.0


def _one_nan(loss: float) -> float:
    """Return ``loss``; for each NaN return the same NaN object, so that equal progress compares as equal."""
    return math.nan if math.isnan(loss) else loss


def _bounds_of(runs: Sequence[tuple[int, int]]) -> list[int]:
    """Return the bounds (first, last + 1) of the ranges ``runs``, then zeros; only zeros if too many ranges."""
    bounds = [bound for first, last in runs for bound in (first, last + 1)]
    return (
        [0] * 2 * MAX_MEMBER_RUNS
        if len(runs) > MAX_MEMBER_RUNS
        else bounds + [0] * (2 * MAX_MEMBER_RUNS - len(bounds))
    )


@lru_cache(maxsize=64)
def _encode(name: str) -> bytes:
    """Return ``name`` as exactly ``MAX_NAME_BYTES`` bytes; a long name keeps only its beginning and its end."""
    text = name.encode(errors="replace")
    if len(text) > MAX_NAME_BYTES:
        half = (MAX_NAME_BYTES - 5) // 2
        text = text[:half] + b" ... " + text[-half:]
    return text.ljust(MAX_NAME_BYTES, b"\0")


progress_page = ProgressPage()
"""The progress page of this process."""


def begin() -> None:
    """Begin to write progress to a memory file if poprun's environment names one. Importing popdist does this."""
    descriptor = os.environ.get(PROGRESS_DESCRIPTOR, "")
    if descriptor.isdecimal() and not progress_page.is_watched:
        progress_page.open(int(descriptor))
