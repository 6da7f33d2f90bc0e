"""How far a program has come: a page of memory that its agent reads at any time.

The page is a file in memory (memfd_create(2)) that poprun's agent makes and the program inherits: writing costs no
system call, and a program that hangs has still said where it is. The number of changes stands at both ends of the
page, so a reader notices that the writer was in the middle of a change (a sequence lock).
"""

import math
import mmap
import os
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Self
from zlib import crc32

from popdist.errors import runs_of
from popdist.ground.contract import PROGRESS_DESCRIPTOR
from popdist.startup import phase_sampler, stack_signal

PAGE_BYTES: Final = 4096
"""Where the page ends and the text about threads begins."""

USED_BYTES: Final = 272
"""So much of the page says how far the program is; behind it stand its counters, places and stamps."""

_COUNTERS: Final = struct.Struct(phase_sampler.COUNTERS_FORMAT)
_SAMPLES: Final = struct.Struct("=Q")
_SAMPLES_AT: Final = phase_sampler.COUNTERS_AT + _COUNTERS.size
COUNTED_BYTES: Final = _SAMPLES_AT + _SAMPLES.size
"""So much of it an agent passes on each second; the whole page when it is asked for calls."""

_STAMP: Final = struct.Struct("=IId")
_ENDS: Final = struct.Struct(phase_sampler.ENDS_FORMAT)
_STAMPS_AT: Final = phase_sampler.ENDS_AT + _ENDS.size
_NUM_STAMPS: Final = (PAGE_BYTES - _STAMPS_AT) // _STAMP.size

MAX_NAME_BYTES: Final = 96
"""Longest name of a collective; a longer one is cut."""

MAX_MEMBER_RUNS: Final = 12
"""Runs of consecutive instances that the page has room for; a group of more runs is named as all instances."""

AFTER_LEAVING: Final = "the next step after one that an exception has ended"
"""What an instance waits in that shares a replica, and whose program has caught an exception."""

FINALIZE: Final = "MPI_Finalize"
"""What a program of an MPI job waits in at its end, until every other one is there."""

ANNOUNCEMENT_AT: Final = 8
ANNOUNCEMENT_FORMAT: Final = "=qi"
"""Where and how (`struct`) the page names its process and the signal at which that writes its stacks."""

RECORDER_AT: Final = stack_signal.RECORDER_AT
"""Where it names, as an ``=i``, the descriptor through which torch's recorder is asked."""

_COUNT: Final = struct.Struct("=Q")
_VALUES: Final = struct.Struct(f"{ANNOUNCEMENT_FORMAT}4?QqdQd{MAX_NAME_BYTES}s")
_RUNS: Final = struct.Struct(f"={2 * MAX_MEMBER_RUNS}I")
_RUNS_AT: Final = ANNOUNCEMENT_AT + _VALUES.size
_BEGUN_AT: Final = _RUNS_AT + _RUNS.size
_BY_HOOK: Final = struct.Struct("=i?")
_HAS_JOINED_AT, _HAS_STEP_AT, _HAS_LOSS_AT = 20, 21, 22
_NUM_STEPS, _STEP, _LOSS, _NUM_WAITS, _WAITING_SINCE, _BEGUN = 3, 4, 5, 6, 7, _BEGUN_AT // 8
_NAME_AT: Final = 64
"""Places of single values: in bytes, those of the second line in words of eight bytes."""

LARGEST_STEP: Final = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a program says about itself."""

    pid: int = 0  # the process that writes; 0 when none has yet
    stack_signal: int = 0  # the signal at which it writes the stacks of its threads behind the page; 0 for none
    has_joined: bool = False  # whether it asked popdist which job it is in
    num_steps: int = 0  # steps whose gradients popdist has reduced
    step: int | None = None  # the step that the program itself reported last, or None
    loss: float | None = None  # the loss that it reported last, or None
    num_waits: int = 0  # how often it has waited for other instances
    # monotonic time at which it began to wait for them, or None when it does not
    waiting_since_seconds: float | None = None
    collective: str = ""  # what it waited for last, in words; empty before the first time
    # the instances that take part in it, as runs from a first one up to a last one; none when all instances of
    # the job do
    member_runs: tuple[tuple[int, int], ...] = ()
    # whether it had an optimizer of torch's, and nothing that it used connected it to others. The start-up hook
    # says so when the program ends (``startup/sitecustomize.py``)
    has_trained_alone: bool = False
    # the program's descriptor through which torch's recorder of collectives is asked, which the hook writes; or 0
    recorder: int = 0
    uses_jax: bool = False  # whether JAX asked which job it is in, which the hook says

    @classmethod
    def read(cls, page: bytes) -> Self | None:
        """What ``page`` says; None when it is too short or was copied in the middle of a change."""
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
    """Where a program's time has gone so far, as its sampler has seen it; totals, in seconds."""

    seconds: Mapping[str, float]  # by phase: `popdist.startup.phase_sampler.PHASES`
    idle_backward_seconds: float  # of the backward pass, in which the main thread used no processor
    disk_seconds: float  # in which the main thread waited for a disk
    worker_seconds: float  # for the workers of a loader
    message_seconds: float  # in a pipeline, or sending and receiving
    long_forward_seconds: float  # in forward passes that took seconds without a step of an optimizer
    gc_seconds: float  # collecting Python's garbage
    began_at_seconds: float  # monotonic time, by the program's host, at which the sampler began
    num_optimizer_steps: int
    num_samples: int  # that popdist has given the program; 0 where it knows of none

    @classmethod
    def read(cls, page: bytes) -> Self | None:
        """What ``page`` says; None where no sampler has written."""
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
    """The line of the program's own code seen most often in each phase, as ``file:line``, where one was."""
    size = phase_sampler.PLACE_BYTES
    fields = [page[at : at + size] for at in range(phase_sampler.PLACES_AT, phase_sampler.ENDS_AT, size)]
    texts = (field.rstrip(b"\0").decode(errors="replace") for field in fields)
    return {phase: text for phase, text in zip(phase_sampler.PHASES, texts, strict=True) if text}


def read_step_ends(page: bytes) -> list[float]:
    """When the last steps of the program's optimizers ended, ascending: seconds since 1970."""
    return [at for at in _ENDS.unpack_from(page, phase_sampler.ENDS_AT) if at]


def read_stamps(page: bytes) -> dict[str, dict[int, float]]:
    """When popdist's last collectives were called (seconds since 1970): by group, and number in the group."""
    stamps: dict[str, dict[int, float]] = {}
    for group, number, at_seconds in _STAMP.iter_unpack(page[_STAMPS_AT : _STAMPS_AT + _NUM_STAMPS * _STAMP.size]):
        if number:
            stamps.setdefault(f"popdist {group}", {})[number] = at_seconds
    return stamps


class ProgressPage:
    """The page on which this process writes how far it is; before ``open()`` it writes where nobody reads."""

    def __init__(self, memory: memoryview | None = None) -> None:
        self.is_watched = False  # whether an agent reads it
        self._use(memoryview(bytearray(PAGE_BYTES)) if memory is None else memory)

    def close(self) -> None:
        """Stop writing to the page."""
        self.is_watched = False
        self._use(memoryview(bytearray(PAGE_BYTES)))

    def open(self, descriptor: int) -> None:
        """Write from now on to the page behind ``descriptor``, if it is one."""
        if not stack_signal.is_page(descriptor):
            return
        try:
            memory = memoryview(mmap.mmap(descriptor, PAGE_BYTES))
        except (OSError, ValueError):
            return
        found = Progress.read(bytes(memory[:USED_BYTES])) or Progress()
        if found.pid not in (0, os.getpid()) and found.has_joined and stack_signal.is_alive(found.pid):
            return  # the page belongs to the first process that asked popdist for its job
        is_announced = found.pid == os.getpid() and stack_signal.catches(found.stack_signal)
        signum = found.stack_signal if is_announced else stack_signal.register(descriptor)
        self.is_watched = True
        self._use(memory)
        recorder, uses_jax = (found.recorder, found.uses_jax) if is_announced else (0, False)
        self.write(Progress(pid=os.getpid(), stack_signal=signum, recorder=recorder, uses_jax=uses_jax))
        os.register_at_fork(after_in_child=self.close)

    def _use(self, memory: memoryview) -> None:
        """Write to ``memory``, whose address is a multiple of 8."""
        self._whole = memory
        self._num_stamps = 0
        self._groups: dict[tuple[int, ...], tuple[int, int]] = {}
        self._memory = memory[:USED_BYTES]
        self._words = self._memory.cast("Q")
        self._floats = self._memory.cast("d")
        self._collective = ""

    def read(self) -> Progress:
        """What the page says; its own writer never reads it in the middle of a change."""
        return Progress.read(bytes(self._memory)) or Progress()

    def write(self, progress: Progress) -> None:
        """Make ``progress`` the content of the page."""
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
        """Say that the program asked which job it is in."""
        self._memory[_HAS_JOINED_AT] = 1

    def report(self, step: int | None, loss: float | None) -> None:
        """Store the step and the loss that the program reports; None leaves a value as it is."""
        if step is not None:
            self._words[_STEP] = step
            self._memory[_HAS_STEP_AT] = 1
        if loss is not None:
            self._floats[_LOSS] = loss
            self._memory[_HAS_LOSS_AT] = 1

    def count_step(self) -> None:
        """Say that the gradients of a step have been reduced."""
        self._words[_NUM_STEPS] += 1

    def wait(self, collective: str, members: Sequence[int] = ()) -> None:
        """Write that the program waits in ``collective``, for ``members``; none stands for all instances."""
        if collective != self._collective:  # a text among some instances names them, so both change together
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
        """Write when the program came to a collective of ``members``, over the oldest such moment."""
        group, number = self._groups.get(members) or (crc32(repr(members).encode()), 0)
        self._groups[members] = group, number + 1
        at = _STAMPS_AT + self._num_stamps % _NUM_STAMPS * _STAMP.size
        _STAMP.pack_into(self._whole, at, group, number + 1, time.time())
        self._num_stamps += 1

    def count_samples(self, num_samples: int) -> None:
        """Say that the program was given so many samples more."""
        (before,) = _SAMPLES.unpack_from(self._whole, _SAMPLES_AT)
        _SAMPLES.pack_into(self._whole, _SAMPLES_AT, before + num_samples)

    def wait_again(self) -> None:
        """Write that the program waits again in the collective of the last wait, or for its data."""
        self._floats[_WAITING_SINCE] = time.monotonic()

    def end_wait(self) -> None:
        """Write that the program does not wait any more."""
        self._floats[_WAITING_SINCE] = 0.0


def _one_nan(loss: float) -> float:
    """One NaN object for every NaN, so that two pages with a NaN compare equal."""
    return math.nan if math.isnan(loss) else loss


def _bounds_of(runs: Sequence[tuple[int, int]]) -> list[int]:
    """The numbers that the page has for ``runs``: a first one and the one after the last; zeros for no run."""
    bounds = [bound for first, last in runs for bound in (first, last + 1)]
    return (
        [0] * 2 * MAX_MEMBER_RUNS
        if len(runs) > MAX_MEMBER_RUNS
        else bounds + [0] * (2 * MAX_MEMBER_RUNS - len(bounds))
    )


@lru_cache(maxsize=64)
def _encode(name: str) -> bytes:
    """``name`` in the bytes that the page has for it; of a long name both ends are kept."""
    text = name.encode(errors="replace")
    if len(text) > MAX_NAME_BYTES:
        half = (MAX_NAME_BYTES - 5) // 2
        text = text[:half] + b" ... " + text[-half:]
    return text.ljust(MAX_NAME_BYTES, b"\0")


progress_page = ProgressPage()
"""The page of this process."""


def begin() -> None:
    """Open the page that the environment names, unless it is open: popdist does so when it is imported."""
    descriptor = os.environ.get(PROGRESS_DESCRIPTOR, "")
    if descriptor.isdecimal() and not progress_page.is_watched:
        progress_page.open(int(descriptor))
