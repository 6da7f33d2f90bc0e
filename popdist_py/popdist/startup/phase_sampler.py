"""Looks about twenty times a second at what the main thread does, and adds up on the page of progress how long.

The start-up hook (``startup/sitecustomize.py``) calls it in whatever Python the program runs, so this is written
for Python 3.8 and imports next to nothing. `popdist.ground.progress` reads what it writes.
"""

from __future__ import annotations

import gc
import os
import sys
import time

TYPE_CHECKING = False  # importing typing takes longer than all of this
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any

    Place = tuple[str, int, str]  # a file, a line in it, and the function
    Phases = dict[str, str]  # of the functions of one file; "" is for all others

START, DATA, FORWARD, BACKWARD, OPTIMIZER = "start", "data", "forward", "backward", "optimizer"
CHECKPOINT, COMMUNICATION, OUTSIDE = "checkpoint", "communication", "outside"
PHASES = (START, DATA, FORWARD, BACKWARD, OPTIMIZER, CHECKPOINT, COMMUNICATION, OUTSIDE)
"""Where time goes: "start" is what comes before the first of the next four, "outside" the program's own code."""

COUNTERS_AT, COUNTERS_FORMAT = 272, f"=Q{len(PHASES)}d6dd"
"""Where and how the page has the number of optimizer steps, the seconds of each phase, those of backward in which
the main thread used no processor, those in which it waited for a disk, those in which it waited for a loader's
workers, those in which it exchanged messages, which torch does not record, those of long forward passes, those of
garbage collection, and when the sampler began (monotonic)."""

PLACES_AT, PLACE_BYTES = 512, 96
"""Where it has, for each phase, the line of the program's own code that was seen most often."""

ENDS_AT, ENDS_FORMAT, NUM_ENDS = 1280, "=100d", 100
"""Where it has the moments at which the last steps of optimizers ended, oldest first: seconds since 1970."""

LEAST_SECONDS, MOST_SECONDS = 0.03, 0.07
FIRST_STEPS = 10  # of optimizers, after which a process that is connected to no other trains alone
LONG_SECONDS = 1.0  # of forward without a step of an optimizer: a program that validates
_IDLE_SHARE = 0.3  # of the time between two looks: a thread that used less of a processor waited

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
"""Which phase the functions of a file belong to, by a part of its path: torch's, and popdist's."""

_AROUND = {FORWARD: (DATA, BACKWARD, CHECKPOINT, START), COMMUNICATION: (START,)}
"""Phases that count in place of one that they are around, such as backward around what is computed again."""

_TORCH_CALLS, _PIPELINING = "/torch/distributed/distributed_c10d.py", "/torch/distributed/pipelining/"
_MESSAGES = ("send", "recv", "isend", "irecv", "batch_isend_irecv")
_WORKERS = ("/selectors.py", "/multiprocessing/connection.py", "/threading.py", "/queue.py")
"""Where a loader waits for the next batch of its workers."""

_OWN_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/torch/", os.path.dirname(os.__file__) + os.sep, "<frozen")


class StackReader:
    """Tells a stack's phase, and which line of the program's own code it stands in."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[Phases, bool]] = {}
        self.has_messages = False  # whether the last stack was inside of a pipeline or of a message

    def read(self, frame: FrameType | None) -> tuple[str, Place | None]:
        """The phase that a stack is in, and the latest place in the program's own code."""
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
    """The phases of the functions in a file of torch's or popdist's; none for another one."""
    path = file.replace("\\", "/")
    if path.startswith(_OWN_FOLDER):
        path = path[len(_OWN_FOLDER) :]
        return next((phases for part, phases in _OWN_PARTS.items() if path.startswith(part)), {})
    return next((phases for part, phases in _PARTS.items() if part in path), {})


def is_own(file: str) -> bool:
    """Whether a file is the program's own, and not a library's."""
    return not file.startswith(_OWN_FOLDER) and not any(part in file for part in _LIBRARIES)


def used_device() -> Any:
    """Return torch's module for the kind of device that this program has used, such as torch.cuda, or None."""
    torch = sys.modules.get("torch")
    kinds = (getattr(torch, name, None) for name in ("cuda", "xpu"))
    return next((kind for kind in kinds if kind is not None and kind.is_initialized()), None)


class CollectorPause:
    """A time in which Python 3.11 collects no garbage, so that a thread may read the frames of another.

    There to read a frame makes an object, that may begin a collection, and the program's code which a collection
    calls may let the other thread go on and end that very frame: then Python crashes. Later ones collect between
    two instructions, and earlier ones make no object. `gc.disable()` would show in `gc.isenabled()`.
    """

    def __init__(self) -> None:
        self._thresholds: tuple[int, ...] = ()
        os.register_at_fork(after_in_child=self.__exit__)  # another thread may fork in such a time

    def __enter__(self) -> None:
        if sys.version_info[:2] == (3, 11):
            self._thresholds = gc.get_threshold()
            gc.set_threshold(0)

    def __exit__(self, *_: object) -> None:
        thresholds, self._thresholds = self._thresholds, ()
        if thresholds and gc.get_threshold()[0] == 0:  # else the program has set others
            gc.set_threshold(*thresholds)


class PhaseSampler:
    """The counters of one program; a thread of its own keeps them."""

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
        self._idle_seconds = self._disk_seconds = self._worker_seconds = self._long_seconds = 0.0
        self._message_seconds = 0.0
        self._forward_seconds = 0.0  # since the last step of an optimizer
        self._step = 0
        self.process = os.open("/proc/self/stat", os.O_RDONLY | os.O_CLOEXEC)  # the main thread's
        self._began_at_seconds = self._at_seconds = time.monotonic()
        self._used_seconds = 0.0
        self._favourites: dict[str, tuple[Place, int]] = {}
        self._has_begun = False
        self.num_steps = 0
        self.gc_seconds = 0.0
        self._gc_began_at_seconds = 0.0

    def count_step(self, *_: object) -> None:
        """Count a step of an optimizer: torch calls this after each."""
        self.num_steps += 1
        self._ends.append(time.time())

    def note_collection(self, moment: str, _: object) -> None:
        """Add up how long Python collects garbage: `gc.callbacks` has this called."""
        now_seconds = time.monotonic()
        if moment == "start":
            self._gc_began_at_seconds = now_seconds
        else:
            self.gc_seconds += now_seconds - self._gc_began_at_seconds

    def run(self, on_first_steps: Callable[[], None]) -> None:
        """Look until the program ends; call ``on_first_steps`` after the first steps of optimizers."""
        import random
        import signal

        crashes = {
            signal.SIGSEGV,
            signal.SIGBUS,
            signal.SIGFPE,
            signal.SIGILL,
        }  # where one is blocked, nobody says
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - crashes)
        moments = random.Random()  # noqa: S311 - and the program's own random numbers stay what they are
        has_told = False
        while True:
            time.sleep(moments.uniform(LEAST_SECONDS, MOST_SECONDS))
            self.inspect()
            if not has_told and self.num_steps >= FIRST_STEPS:
                has_told = True
                on_first_steps()

    def inspect(self) -> None:
        """Add the time since the last call to the phase that the main thread is in."""
        with self._pause:
            frame = sys._current_frames().get(self._main)  # noqa: SLF001 - documented, for such diagnoses
            phase, place = self._stacks.read(frame)
            waits_for_workers = frame is not None and frame.f_code.co_filename.endswith(_WORKERS)
            is_inside = frame is not None and not is_own(frame.f_code.co_filename)
            del frame
        now_seconds, used_seconds = time.monotonic(), time.clock_gettime(self._clock)
        seconds, self._at_seconds = now_seconds - self._at_seconds, now_seconds
        is_idle = used_seconds - self._used_seconds < _IDLE_SHARE * seconds
        self._used_seconds = used_seconds
        state = os.pread(self.process, 64, 0) if is_idle else b""
        is_idle &= b") R " not in state  # a thread that wants a core does not wait for others
        self._has_begun |= phase in (DATA, FORWARD, BACKWARD, OPTIMIZER)
        self._seconds[phase if self._has_begun else START] += seconds
        # on a device the main thread sleeps while the device, and a thread of autograd's, work
        if phase == BACKWARD and is_idle and is_inside and used_device() is None:
            self._idle_seconds += seconds
        if b") D " in state:
            self._disk_seconds += seconds
        if phase == DATA and is_idle and waits_for_workers:
            self._worker_seconds += seconds
        if self._step != self.num_steps:
            del self._ends[:-NUM_ENDS]
            os.pwrite(self._page, self._pack_ends(*self._ends[-NUM_ENDS:]), ENDS_AT)
        self._watch_forward(phase, seconds)
        if self._stacks.has_messages:
            self._message_seconds += seconds
        waits = (self._idle_seconds, self._disk_seconds, self._worker_seconds, self._message_seconds)
        numbers = (*waits, self._long_seconds, self.gc_seconds)
        packed = self._pack(self.num_steps, *self._seconds.values(), *numbers, self._began_at_seconds)
        os.pwrite(self._page, packed, COUNTERS_AT)
        if place is not None:
            self._vote(phase, place)

    def _watch_forward(self, phase: str, seconds: float) -> None:
        """Add up forward passes between two steps of an optimizer that take longer than a second together."""
        if self._step != self.num_steps:
            self._step, self._forward_seconds = self.num_steps, 0.0
        elif phase in (DATA, FORWARD):
            self._forward_seconds += seconds
            if self._forward_seconds >= LONG_SECONDS:
                is_first = self._forward_seconds - seconds < LONG_SECONDS
                self._long_seconds += self._forward_seconds if is_first else seconds

    def _vote(self, phase: str, place: Place) -> None:
        """Keep the place that is seen most often in a phase: another place that is seen takes one vote from it."""
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


def start(page: int, on_first_steps: Callable[[], None]) -> None:
    """Begin to look at the main thread, in a thread that ends with the program; torch has been imported.

    The thread calls ``on_first_steps`` once, after the first steps of optimizers.
    """
    import threading

    from torch.optim.optimizer import register_optimizer_step_post_hook

    sampler = PhaseSampler(page, threading.main_thread().ident or 0)
    register_optimizer_step_post_hook(sampler.count_step)
    gc.callbacks.append(sampler.note_collection)
    threading.Thread(target=sampler.run, args=(on_first_steps,), name="poprun-phases", daemon=True).start()
