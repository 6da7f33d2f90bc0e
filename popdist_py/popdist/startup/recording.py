"""The recording of some training steps: torch's profiler, collectives, DataLoader workers, and the clock.

The start-up hook (``startup/sitecustomize.py``) uses this module in the Python of the program if poprun wants a
trace, so it is written for Python 3.8. `poprun.observe.show.trace` reads the files. No error in this module stops
the program.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time

TYPE_CHECKING = False  # importing typing takes longer than importing this module
if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from types import FrameType
    from typing import Any

SETTINGS = "POPDIST_TRACE"
"""The environment variable with the settings as JSON: ``file`` (prefix of names), ``steps`` and ``seconds``."""

CLOCK_DESCRIPTOR = "POPDIST_CLOCK_DESCRIPTOR"
"""The environment variable with the descriptor of a socket whose other end, poprun's agent, sends its time."""

NUM_QUESTIONS = 12
ANSWER_SECONDS = 0.05
SAMPLE_SECONDS, IDLE_SECONDS = 0.004, 0.05  # between two samples of a worker, inside and outside of the window
FETCHES, LOADS = "torch/utils/data/_utils/fetch.py", "torch/utils/data/dataloader.py"
PROFILES_ITSELF = "the program profiles itself, and a second profiler would take its events away"


def begin(
    after_import: Callable[[str, Callable[[Any], None]], None],
    read_recorder: Callable[[], bytes],
    make_pause: Callable[[], AbstractContextManager[None]],
    used_device: Callable[[], Any],
) -> None:
    """Prepare to record the training steps that the environment asks for, once the program has imported torch."""
    settings = json.loads(os.environ[SETTINGS])
    try:
        if os.lstat(os.path.dirname(settings["file"])).st_uid != os.geteuid():
            return  # a folder of another user may contain links; this host does not share poprun's
    except OSError:
        return
    recording = Recording(settings, read_recorder, make_pause, used_device)
    after_import("torch", recording.prepare)
    atexit.register(recording.end_program)
    os.register_at_fork(after_in_child=recording.go_on_in_child)


def ask_clock() -> list[int]:
    """Return three times, to compare clocks: before a question to poprun's agent process, at the agent, after the
    answer. Of several questions take the one with the fastest answer; return [] if no answer came.
    """
    import socket

    try:
        link = socket.socket(fileno=int(os.environ[CLOCK_DESCRIPTOR]))
    except (KeyError, ValueError, OSError):  # the program has removed the variable or closed the descriptor
        return []
    link.settimeout(ANSWER_SECONDS)
    answers = []
    for _ in range(NUM_QUESTIONS):
        sent_ns = time.time_ns()
        try:
            link.send(b"%d" % sent_ns)
            asked_ns, answered_ns = map(int, link.recv(64).split())
        except (OSError, ValueError):
            continue
        heard_ns = time.time_ns()
        if asked_ns == sent_ns:
            answers.append([sent_ns, answered_ns, heard_ns])
    link.detach()  # the descriptor stays open, for later questions
    return min(answers, key=lambda it: it[2] - it[0], default=[])


class Recording:
    """The recording of those training steps of this program that poprun wants to see (the window of the trace).

    One class has the settings and the state of the window, because each call of torch can begin or end the window.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        read_recorder: Callable[[], bytes],
        make_pause: Callable[[], AbstractContextManager[None]],
        used_device: Callable[[], Any],
    ) -> None:
        self._file: str = settings["file"]
        self._seconds: float = settings["seconds"] or 0.0
        steps: tuple[int, int] = settings["steps"] or (0, 0)
        self._first, self._stop = steps
        self._read_recorder = read_recorder
        self._make_pause = make_pause
        self._used_device = used_device
        self._num_steps = 0
        self._optimizer: Callable[[], object] = lambda: None
        self._profile: Any = None
        self._others = ProgramsProfilers(self._give_way)
        self._forward_hook: Any = None
        self._waits = Waits()
        self._about: dict[str, Any] = {}
        self._deadline_seconds = 0.0
        self._is_over = False
        import mmap

        self._shared = mmap.mmap(-1, 1)  # tells forked workers whether the window is open

    def prepare(self, _torch: object) -> None:
        """Register hooks in torch, which the program has just imported: the hooks count the optimizer's steps, and
        begin to record the trace at the first step that poprun wants to see.
        """
        from torch.nn.modules.module import register_module_forward_pre_hook
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._others.watch()
        register_optimizer_step_post_hook(self._after_step)  # never removed: it cannot be while it is called
        if self._first == 0:
            self._forward_hook = register_module_forward_pre_hook(self._before_forward)

    def _after_step(self, optimizer: object, *_: object) -> None:
        import weakref

        counted = self._optimizer()
        if self._is_over:
            return
        if counted is None:
            self._optimizer = weakref.ref(optimizer)
        elif counted is not optimizer:
            return
        self._num_steps += 1
        if self._profile is None and self._num_steps == self._first:
            self._open()
        elif self._is_own_thread() and (self._num_steps == self._stop or self._is_late()):
            self._close()

    def _before_forward(self, *_: object) -> None:
        if self._profile is None:
            self._open()
        elif self._is_own_thread() and self._is_late():
            self._close()

    def _is_late(self) -> bool:
        return self._seconds > 0.0 and time.monotonic() >= self._deadline_seconds

    def _is_own_thread(self) -> bool:
        """Whether this thread has begun the recording: torch crashes if another thread ends a profile."""
        import threading

        return self._profile is not None and self._about["thread"] == threading.get_native_id()

    def _open(self) -> None:
        """Start torch's profiler and the recording of waits, unless the program runs a profiler of its own."""
        import threading

        import torch.profiler as profilers

        if self._is_over:
            return
        if self._others.active:
            self._finish(PROFILES_ITSELF)
            return
        try:
            self._about = {"thread": threading.get_native_id(), "exchanges": [ask_clock()]}
            activities = [profilers.ProfilerActivity.CPU]
            if (device := self._used_device()) is not None:
                activities.append(getattr(profilers.ProfilerActivity, device.__name__.rpartition(".")[2].upper()))
            # torch 2.11 warns about events that another cycle would remove, unless all events are kept
            self._profile = self._others.own = profilers.profile(activities=activities, acc_events=True)
            self._profile.start()
            self._wait_for_device()
            self._waits.begin()
        except Exception as error:  # noqa: BLE001 - the program must continue as without the recording
            self._finish(f"torch's profiler cannot start: {error}")
            return
        self._about["begun_ns"] = time.time_ns()
        self._about["first_step"] = self._num_steps
        self._deadline_seconds = time.monotonic() + self._seconds
        self._shared[0] = 1

    def _close(self, problem: str = "") -> None:
        """Stop torch's profiler and the recording of waits, and write the recorded data to files."""
        profile, self._profile, self._shared[0] = self._profile, None, 0
        self._wait_for_device()
        self._about["ended_ns"] = time.time_ns()
        self._about["waits"] = self._waits.end()
        try:
            profile.stop()
            self._about["exchanges"].append(ask_clock())
            self._about["recorder"] = self._recorder()
            profile.export_chrome_trace(f"{self._file}.tmp")
            os.replace(f"{self._file}.tmp", f"{self._file}.json")
        except Exception as error:  # noqa: BLE001 - the program must continue as without the recording
            problem = f"its trace cannot be written: {error}"
        self._finish(problem)

    def _wait_for_device(self) -> None:
        """Wait until the accelerator has finished the operations that the program has queued."""
        device = self._used_device()
        try:
            if device is not None:
                device.synchronize()
        except Exception:  # noqa: BLE001 - the program itself will get the device's error
            return

    def _recorder(self) -> str:
        """Return the collectives that torch has recorded, as text for poprun; empty if there is no recorder."""
        try:
            return self._read_recorder().decode(errors="replace")
        except OSError:
            return ""

    def _give_way(self) -> None:
        """End the recording because the program starts its own profiler, and torch runs only one profiler."""
        if self._is_own_thread():
            self._close(PROFILES_ITSELF)
        elif self._profile is not None:
            self._profile, self._shared[0] = None, 0
            self._finish(PROFILES_ITSELF)

    def _finish(self, problem: str) -> None:
        """Stop recording, and write a file that gives poprun the number of steps and the text ``problem``."""
        self._is_over = True
        if self._forward_hook is not None:  # because the hook would slow down every call of a module
            self._forward_hook.remove()
        about = {**self._about, "pid": os.getpid(), "num_steps": self._num_steps, "problem": problem}
        try:
            with open(f"{self._file}.about", "w", encoding="utf-8") as file:
                json.dump(about, file)
        except OSError:
            return

    def end_program(self) -> None:
        """Write the recorded data if the program ends before the recording of steps has ended."""
        if self._is_own_thread():
            self._close()
        elif not self._is_over:
            begin = f"after step {self._first}" if self._first else "with the first call of a torch module"
            self._finish(f"it ended after {self._num_steps} optimizer steps, and the window begins {begin}")

    def go_on_in_child(self) -> None:
        """Record nothing in a forked child, except which functions load samples in a DataLoader worker."""
        import threading
        from traceback import walk_stack

        was_over, self._is_over, self._profile = self._is_over, True, None
        if not was_over and any(frame.f_code.co_filename.endswith(LOADS) for frame, _ in walk_stack(None)):
            threading.Thread(target=self._follow_worker, args=(threading.get_ident(),), daemon=True).start()

    def _follow_worker(self, thread: int) -> None:
        """Record every few milliseconds which function this DataLoader worker runs, while steps are recorded."""
        begun_ns, text, pause = 0, "", self._make_pause()
        while True:
            with pause:
                now = _loaded(sys._current_frames().get(thread)) if self._shared[0] else ""  # noqa: SLF001 - Python documents the function
            if now != text:
                if text:
                    self._append([os.getpid(), text, begun_ns, time.time_ns()])
                text, begun_ns = now, time.time_ns()
            time.sleep(SAMPLE_SECONDS if self._shared[0] else IDLE_SECONDS)

    def _append(self, line: list[Any]) -> None:
        try:
            with open(f"{self._file}.workers", "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError:
            return


def _loaded(frame: FrameType | None) -> str:
    """Return the function that loads a sample in ``frame``, a DataLoader worker's stack; "" if none loads."""
    from traceback import walk_stack

    above = ""
    for one, _ in walk_stack(frame):
        file = one.f_code.co_filename
        if file.endswith(FETCHES):
            return above or "fetch"
        above = f"{one.f_code.co_name} ({os.path.basename(file)})"
    return ""


class ProgramsProfilers:
    """The torch profilers that the program runs itself; ``tell`` is called before such a profiler starts."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self.own: object = None  # the recording's profiler
        self.active: set[int] = set()
        self._tell = tell

    def watch(self) -> None:
        """Make torch inform this object when a profiler begins or ends."""
        from torch.autograd.profiler import profile as inner
        from torch.profiler import profile

        for kind, name, note in (
            (profile, "prepare_trace", self._begin),
            (profile, "stop_trace", self._end),
            (inner, "__enter__", self._begin),
            (inner, "__exit__", self._end),
        ):
            setattr(kind, name, _with_note(getattr(kind, name), note))

    def _begin(self, profiler: object) -> None:
        if profiler is not self.own:
            self._tell()
            self.active.add(id(profiler))

    def _end(self, profiler: object) -> None:
        self.active.discard(id(profiler))


def _with_note(method: Callable[..., Any], note: Callable[[object], None]) -> Callable[..., Any]:
    """Return a method that first calls ``note`` with the method's object, and then works as ``method``."""
    from functools import wraps

    @wraps(method)
    def call(this: object, *args: object, **kwargs: object) -> object:
        note(this)
        return method(this, *args, **kwargs)

    return call


class Waits:
    """The record of popdist's waits for other instances; it wraps the methods that popdist calls at each wait."""

    def __init__(self) -> None:
        self._page: Any = None
        self._waits: list[list[Any]] = []  # members (empty for all), number, text, begin and end

    def begin(self) -> None:
        """Begin to record popdist's waits for other instances, if the program uses popdist."""
        progress = sys.modules.get("popdist.ground.progress")
        if progress is None:
            return
        page = self._page = progress.progress_page
        wait, end_wait = page.wait, page.end_wait

        def begin_recorded(text: str, members: Any = ()) -> None:
            wait(text, members)
            self._waits.append([list(members), page.read().num_waits, text, time.time_ns(), 0])

        def end_recorded() -> None:
            end_wait()
            if self._waits and not self._waits[-1][-1]:
                self._waits[-1][-1] = time.time_ns()

        page.wait, page.end_wait = begin_recorded, end_recorded

    def end(self) -> list[list[Any]]:
        """Stop the recording of popdist's waits for other instances, and return the recorded waits. A wait that
        has not ended is left out, because its duration is not known.
        """
        if self._page is not None:
            del self._page.wait, self._page.end_wait
            self._page = None
        return [wait for wait in self._waits if wait[-1]]
