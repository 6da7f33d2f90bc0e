"""The sampler of phases: about 20 times a second it adds time to the phase, such as data, of the main thread.

The start-up hook (``startup/sitecustomize.py``) uses this module in the Python of the program, so it is written
for Python 3.8 and imports almost nothing. `popdist.ground.progress` reads the counters.
"""

from __future__ import annotations

import gc
import os
import sys
import time

TYPE_CHECKING = False  # importing typing takes longer than importing this module
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any

    Place = tuple[str, int, str]  # a file, a line in the file, and the function
    Phases = dict[str, str]  # phase of each function of one file; "" means all other functions

START, DATA, FORWARD, BACKWARD, OPTIMIZER = "start", "data", "forward", "backward", "optimizer"
CHECKPOINT, COMMUNICATION, OUTSIDE = "checkpoint", "communication", "outside"
PHASES = (START, DATA, FORWARD, BACKWARD, OPTIMIZER, CHECKPOINT, COMMUNICATION, OUTSIDE)
"""The phases. "start" is before the first data, forward, backward or optimizer; "outside" is other code."""

COUNTERS_AT, COUNTERS_FORMAT = 272, f"=Q{len(PHASES)}d6dd"
"""The place and format of the counters on the progress page: optimizer steps, then seconds of each phase.

Then follow seconds of the main thread: of backward passes without use of the processor, of waits for a disk, of
waits for DataLoader workers, of messages, which torch does not record, of long forward passes, and of garbage
collection. The last number is the monotonic time at which the sampler began."""

PLACES_AT, PLACE_BYTES = 512, 96
"""The place on the progress page of the program's slowest line in each phase, and its number of bytes."""

ENDS_AT, ENDS_FORMAT, NUM_ENDS = 1280, "=100d", 100
"""The place on the progress page of the last optimizer steps' times (seconds since 1970), format and number."""

LEAST_SECONDS, MOST_SECONDS = 0.03, 0.07
FIRST_STEPS = 10  # steps of optimizers, after which the sampler checks whether the process trains alone
LONG_SECONDS = 1.0  # of forward without an optimizer step, which means that the program validates
_IDLE_SHARE = 0.3  # of the time between two samples: a thread that used less processor time has waited

_PARTS = {
    "/torch/utils/data/": {"": DATA},
    "/torch/autograd/__init__.py": {"backward": BACKWARD, "grad": BACKWARD},
    "/torch/optim/": {"": OPTIMIZER},
    "/torch/serialization.py": {"": CHECKPOINT},
    "/torch/distributed/checkpoint/": {"": CHECKPOINT},
    "/safetensors/": {"": CHECKPOINT},
    "/torch/distributed/distributed_c10d.py": {"": COMMUNICATION, "init_process_group": START, "new_group": START},
    "/torch/distributed/pipelining/": {"": COMMUNICATION},
    "/torch/distributed/_functional_collectives.py": {"": COMMUNICATION},
    "/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py": {"": COMMUNICATION},
    "/torch/nn/parallel/distributed.py": {"__init__": START},
}
_OWN_PARTS = {
    "/data/": {"": DATA},
    "/packing/": {"": DATA},
    "/optim/": {"": OPTIMIZER},
    "/checkpoint/": {"": CHECKPOINT},
    "/exchange/": {"": COMMUNICATION},
    "/job/collectives.py": {"": COMMUNICATION},
}
"""The phases of functions in popdist's files, as in ``_PARTS`` for torch; the key is a part of the path."""

_AROUND = {FORWARD: (DATA, BACKWARD, CHECKPOINT, START), COMMUNICATION: (START,)}
"""Phases that replace an inner phase, such as backward around a forward pass that is computed again."""

_TORCH_CALLS, _PIPELINING = "/torch/distributed/distributed_c10d.py", "/torch/distributed/pipelining/"
_MESSAGES = ("send", "recv", "isend", "irecv", "batch_isend_irecv")
_WORKERS = ("/selectors.py", "/multiprocessing/connection.py", "/threading.py", "/queue.py")
"""The files in which a DataLoader waits for the next batch of its workers."""

_OWN_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/torch/", os.path.dirname(os.__file__) + os.sep, "<frozen")


class StackReader:
    """Reads a thread's stack, to find the training phase (such as forward) and the program's innermost line."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[Phases, bool]] = {}
        self.has_messages = False  # whether the last stack was in a pipeline or in a message

    def read(self, frame: FrameType | None) -> tuple[str, Place | None]:
        """Return the stack's training phase, and the program's innermost line; None without a program line."""
        found, place = "", None
        self.has_messages = False
        while frame is not None:
            code = frame.f_code
            known = self._files.get(code.co_filename)
            if known is None:
                known = self._files[code.co_filename] = (phases_of(code.co_filename), is_own(code.co_filename))
            phases, is_programs = known
            phase = FORWARD if code.co_name == "forward" else phases.get(code.co_name) or phases.get("", "")
            if phase and (not found or phase in _AROUND.get(found, ())):
                found = phase
            if phase == COMMUNICATION and not self.has_messages:
                is_message = code.co_name in _MESSAGES and code.co_filename.endswith(_TORCH_CALLS)
                self.has_messages = is_message or _PIPELINING in code.co_filename
            if is_programs and place is None:
                place = (code.co_filename, frame.f_lineno, code.co_name)
            frame = frame.f_back
        return found or OUTSIDE, place


def phases_of(file: str) -> Phases:
    """Return the training phase of each function in a file of torch or popdist; an empty dict for other files."""
    path = file.replace("\\", "/")
    if path.startswith(_OWN_FOLDER):
        path = path[len(_OWN_FOLDER) :]
        return next((phases for part, phases in _OWN_PARTS.items() if path.startswith(part)), {})
    return next((phases for part, phases in _PARTS.items() if part in path), {})


def is_own(file: str) -> bool:
    """Whether the source file ``file`` belongs to the program, and not to a library."""
    return not file.startswith(_OWN_FOLDER) and not any(part in file for part in _LIBRARIES)


def used_device() -> Any:
    """Return torch's module for the accelerators in use by this program, such as torch.cuda; None if none."""
    torch = sys.modules.get("torch")
    kinds = (getattr(torch, name, None) for name in ("cuda", "xpu"))
    return next((kind for kind in kinds if kind is not None and kind.is_initialized()), None)


class CollectorPause:
    """A context in which Python 3.11 collects no garbage, so that a thread can read frames of another thread.

    In Python 3.11, reading a frame makes an object, which may start a garbage collection. Program code that the
    collection calls may let the other thread run and end the frame: then Python crashes. Later versions collect
    between two instructions, and earlier versions make no object. `gc.disable()` is not used because it would show
    in `gc.isenabled()`.
    """

    def __init__(self) -> None:
        self._thresholds: tuple[int, ...] = ()
        os.register_at_fork(after_in_child=self.__exit__)  # because another thread may fork during the pause

    def __enter__(self) -> None:
        if sys.version_info[:2] == (3, 11):
            self._thresholds = gc.get_threshold()
            gc.set_threshold(0)

    def __exit__(self, *_: object) -> None:
        thresholds, self._thresholds = self._thresholds, ()
        if thresholds and gc.get_threshold()[0] == 0:  # otherwise the program has changed the thresholds
            gc.set_threshold(*thresholds)


class Collections:
    """The total time of Python's garbage collections."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began_at_seconds = 0.0

    def record(self, moment: str, _: object) -> None:
        """Add the duration of a garbage collection when it ends; `gc.callbacks` calls this method."""
        now_seconds = time.monotonic()
        if moment == "start":
            self._began_at_seconds = now_seconds
        else:
            self.seconds += now_seconds - self._began_at_seconds


class LongForwards:
    """The seconds of validation: data loading and forward passes of over 1 s without an optimizer step."""

    def __init__(self) -> None:
        self.long_seconds = 0.0
        self._seconds = 0.0  # since the last optimizer step

    def add(self, phase: str, seconds: float, *, has_stepped: bool) -> None:
        """Add ``seconds`` of the training phase ``phase``; begin at 0 again if an optimizer has made a step."""
        if has_stepped:
            self._seconds = 0.0
        elif phase in (DATA, FORWARD):
            self._seconds += seconds
            if self._seconds >= LONG_SECONDS:
                is_first = self._seconds - seconds < LONG_SECONDS
                self.long_seconds += self._seconds if is_first else seconds


class SlowLines:
    """For each training phase, the source line at which samples find the program's main thread most often. The
    class writes each new such line on the progress page, memory that poprun reads.
    """

    def __init__(self, page: int) -> None:
        self._page = page
        self._favourites: dict[str, tuple[Place, int]] = {}

    def vote(self, phase: str, place: Place) -> None:
        """Count a sample of ``phase`` at the line ``place``; show a new most common line to poprun."""
        favourite, votes = self._favourites.get(phase, (place, 0))
        if favourite == place:
            self._favourites[phase] = (place, votes + 1)
        elif votes:
            self._favourites[phase] = (favourite, votes - 1)
            return
        else:
            self._favourites[phase] = (place, 1)
        if votes <= 1:
            text = f"{place[0]}:{place[1]}".encode(errors="replace")[-PLACE_BYTES:]
            os.pwrite(self._page, text.ljust(PLACE_BYTES, b"\0"), PLACES_AT + PLACE_BYTES * PHASES.index(phase))


class PhaseSampler:
    """The seconds of each training phase, such as forward; a thread reads the main thread's stack regularly.

    The counters belong together, because each sample of the main thread changes all of them at one moment.
    """

    def __init__(self, page: int, main: int) -> None:
        import struct

        self._page = page
        self._main = main
        self._clock = time.pthread_getcpuclockid(main)
        self._pack = struct.Struct(COUNTERS_FORMAT).pack
        self._pack_ends = struct.Struct(ENDS_FORMAT).pack
        self._ends = [0.0] * NUM_ENDS
        self._pause = CollectorPause()
        self._stacks = StackReader()
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._idle_seconds = self._disk_seconds = self._worker_seconds = self._message_seconds = 0.0
        self._step = 0
        self.process = os.open("/proc/self/stat", os.O_RDONLY | os.O_CLOEXEC)  # the state of the main thread
        self._began_at_seconds = self._at_seconds = time.monotonic()
        self._used_seconds = 0.0
        self._forwards = LongForwards()
        self._lines = SlowLines(page)
        self._has_begun = False
        self.num_steps = 0
        self.collections = Collections()

    def count_step(self, *_: object) -> None:
        """Count a step of an optimizer; torch calls this method after each step."""
        self.num_steps += 1
        self._ends.append(time.time())

    def run(self, on_first_steps: Callable[[], None]) -> None:
        """Sample the main thread until the program ends; call ``on_first_steps`` after 10 optimizer steps."""
        import random
        import signal

        crashes = {
            signal.SIGSEGV,
            signal.SIGBUS,
            signal.SIGFPE,
            signal.SIGILL,
        }  # a blocked crash signal would end the program silently
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - crashes)
        moments = random.Random()  # noqa: S311 - moments are no secrets
        has_told = False
        while True:
            time.sleep(moments.uniform(LEAST_SECONDS, MOST_SECONDS))
            self.inspect()
            if not has_told and self.num_steps >= FIRST_STEPS:
                has_told = True
                on_first_steps()

    def inspect(self) -> None:
        """Add the time since the last call to the training phase that the main thread is in."""
        with self._pause:
            frame = sys._current_frames().get(self._main)  # noqa: SLF001 - documented for such diagnoses
            phase, place = self._stacks.read(frame)
            waits_for_workers = frame is not None and frame.f_code.co_filename.endswith(_WORKERS)
            is_inside = frame is not None and not is_own(frame.f_code.co_filename)
            del frame
        now_seconds, used_seconds = time.monotonic(), time.clock_gettime(self._clock)
        seconds, self._at_seconds = now_seconds - self._at_seconds, now_seconds
        is_idle = used_seconds - self._used_seconds < _IDLE_SHARE * seconds
        self._used_seconds = used_seconds
        state = os.pread(self.process, 64, 0) if is_idle else b""
        is_idle &= b") R " not in state  # a thread that is ready to run does not wait
        self._has_begun |= phase in (DATA, FORWARD, BACKWARD, OPTIMIZER)
        self._seconds[phase if self._has_begun else START] += seconds
        # with an accelerator the main thread sleeps while the accelerator and autograd's thread work
        if phase == BACKWARD and is_idle and is_inside and used_device() is None:
            self._idle_seconds += seconds
        if b") D " in state:
            self._disk_seconds += seconds
        if phase == DATA and is_idle and waits_for_workers:
            self._worker_seconds += seconds
        has_stepped, self._step = self._step != self.num_steps, self.num_steps
        if has_stepped:
            del self._ends[:-NUM_ENDS]
            os.pwrite(self._page, self._pack_ends(*self._ends[-NUM_ENDS:]), ENDS_AT)
        self._forwards.add(phase, seconds, has_stepped=has_stepped)
        if self._stacks.has_messages:
            self._message_seconds += seconds
        waits = (self._idle_seconds, self._disk_seconds, self._worker_seconds, self._message_seconds)
        numbers = (*waits, self._forwards.long_seconds, self.collections.seconds)
        packed = self._pack(self.num_steps, *self._seconds.values(), *numbers, self._began_at_seconds)
        os.pwrite(self._page, packed, COUNTERS_AT)
        if place is not None:
            self._lines.vote(phase, place)


def start(page: int, on_first_steps: Callable[[], None]) -> None:
    """Start a thread that samples the main thread until the program ends, and that calls ``on_first_steps`` once,
    after the first optimizer steps. torch must have been imported before.
    """
    import threading

    from torch.optim.optimizer import register_optimizer_step_post_hook

    sampler = PhaseSampler(page, threading.main_thread().ident or 0)
    register_optimizer_step_post_hook(sampler.count_step)
    gc.callbacks.append(sampler.collections.record)
    threading.Thread(target=sampler.run, args=(on_first_steps,), name="poprun-phases", daemon=True).start()
