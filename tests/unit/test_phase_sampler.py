"""The phase that a program is in, as its stack tells it, and the page on which that is added up."""

import gc
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from popdist.data import epoch
from popdist.exchange import groups
from popdist.exchange.transport import channel
from popdist.ground import layout
from popdist.ground.progress import (
    COUNTED_BYTES,
    PAGE_BYTES,
    PhaseCounters,
    ProgressPage,
    read_places,
    read_stamps,
    read_step_ends,
)
from popdist.job import collectives
from popdist.optim import pieces
from popdist.startup import phase_sampler
from popdist.startup.phase_sampler import CollectorPause, PhaseSampler, StackReader
from popdist.startup.recording import Recording
from popdist.startup.stack_signal import PAGE_NAME

TORCH = "/env/lib/python3.11/site-packages/torch"
LOADER = (f"{TORCH}/utils/data/dataloader.py", "__next__")
FORWARD = (f"{TORCH}/nn/modules/linear.py", "forward")
BACKWARD = (f"{TORCH}/autograd/__init__.py", "backward")
STEP = (f"{TORCH}/optim/sgd.py", "step")
COLLECTIVE = (f"{TORCH}/distributed/distributed_c10d.py", "all_reduce")
INIT = (f"{TORCH}/distributed/distributed_c10d.py", "init_process_group")
SAVE = (f"{TORCH}/serialization.py", "save")
OPERATOR = (f"{TORCH}/nn/functional.py", "relu")
MINE = ("/home/me/train.py", "main")


def stack(*calls: tuple[str, str]) -> Any:
    """A stack, the first call first."""
    frame = None
    for line, (file, function) in enumerate(calls, 1):
        code = SimpleNamespace(co_filename=file, co_name=function)
        frame = SimpleNamespace(f_code=code, f_lineno=line, f_back=frame)
    return frame


@pytest.mark.parametrize(
    ("calls", "phase", "line"),
    [
        ((MINE, OPERATOR), "outside", 1),
        ((MINE, LOADER), "data", 1),
        ((MINE, LOADER, MINE), "data", 3),
        ((MINE, LOADER, FORWARD), "data", 1),  # an augmentation that is a module
        ((MINE, FORWARD, MINE, OPERATOR), "forward", 3),
        ((MINE, FORWARD, COLLECTIVE), "communication", 1),  # as FSDP gathers weights
        ((MINE, BACKWARD), "backward", 1),
        ((MINE, BACKWARD, FORWARD, MINE), "backward", 4),  # activations that are computed again
        ((MINE, STEP), "optimizer", 1),
        ((MINE, STEP, MINE, BACKWARD), "backward", 3),  # a closure
        ((MINE, SAVE), "checkpoint", 1),
        ((MINE, INIT, COLLECTIVE), "start", 1),
        ((), "outside", None),
    ],
)
def test_the_innermost_call_that_is_known_names_the_phase(
    calls: tuple[tuple[str, str], ...], phase: str, line: int | None
) -> None:
    """But for what runs inside a larger phase."""
    found, place = StackReader().read(stack(*calls))

    assert found == phase
    assert place == (None if line is None else (*MINE[:1], line, MINE[1]))


def test_messages_are_noticed() -> None:
    """Those of a pipeline, and the program's own; not those of which popdist's collectives are made."""
    reader = StackReader()
    seen = []
    channel_send = (channel.__file__, "send")
    schedule = (f"{TORCH}/distributed/pipelining/schedules.py", "_step")
    for call in (schedule, (COLLECTIVE[0], "irecv"), COLLECTIVE, channel_send):
        reader.read(stack(MINE, call))
        seen.append(reader.has_messages)

    assert seen == [True, True, False, False]


def test_popdists_own_files_are_known_by_their_folders() -> None:
    """Wherever popdist lies; none of them is the program's."""
    expected = {
        epoch: "data",
        pieces: "optimizer",
        channel: "communication",
        groups: "communication",
        collectives: "communication",
    }

    for module, phase in expected.items():
        assert phase_sampler.phases_of(str(module.__file__)) == {"": phase}, module
    assert phase_sampler.phases_of(layout.__file__) == {}
    assert not phase_sampler.is_own(layout.__file__)
    assert not phase_sampler.is_own(threading.__file__)


@pytest.fixture
def page() -> Iterator[int]:
    """A page of progress."""
    descriptor = os.memfd_create(PAGE_NAME)
    os.ftruncate(descriptor, PAGE_BYTES)
    yield descriptor
    os.close(descriptor)


def test_what_is_looked_at_is_added_up_on_the_page(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds, places and steps; what comes before the first phase is the start."""
    main = threading.get_ident()
    sampler = PhaseSampler(page, main)
    for calls in ((MINE,), (MINE, FORWARD, MINE), (MINE, FORWARD, MINE), (MINE, BACKWARD), (MINE,)):
        monkeypatch.setattr(sys, "_current_frames", lambda calls=calls: {main: stack(*calls)})
        sampler.inspect()
    sampler.count_step()
    assert sampler.num_steps == 1
    sampler.collections.record("start", {})
    sampler.collections.record("stop", {})
    sampler.inspect()
    os.close(sampler.process)
    seen = os.pread(page, PAGE_BYTES, 0)
    counters = PhaseCounters.read(seen)

    assert counters is not None
    assert {name for name, seconds in counters.seconds.items() if seconds} == {
        *("start", "forward", "backward", "outside")
    }
    assert counters.num_optimizer_steps == 1
    assert 0.0 < counters.gc_seconds < sum(counters.seconds.values())
    assert len(read_step_ends(seen)) == 1
    assert read_places(seen) == {
        "forward": "/home/me/train.py:3",
        "backward": "/home/me/train.py:1",
        "outside": "/home/me/train.py:1",
    }
    assert PhaseCounters.read(seen[: COUNTED_BYTES - 1]) is None
    assert PhaseCounters.read(bytes(PAGE_BYTES)) is None


def test_who_wants_a_core_does_not_wait(page: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward pass that uses no processor is a wait only where its thread sleeps."""
    main = threading.get_ident()
    monkeypatch.setattr(sys, "_current_frames", lambda: {main: stack(MINE, BACKWARD)})
    monkeypatch.setattr(time, "clock_gettime", lambda _: 0.0)
    for state, waits in (("R", False), ("S", True)):
        file = tmp_path / state
        file.write_text(f"7 (python) {state} 1")
        sampler = PhaseSampler(page, main)
        os.close(sampler.process)
        sampler.process = os.open(file, os.O_RDONLY)
        sampler.inspect()
        os.close(sampler.process)
        counters = PhaseCounters.read(os.pread(page, PAGE_BYTES, 0))

        assert counters is not None
        assert (counters.idle_backward_seconds > 0.0) == waits


class Device:
    """As much of ``torch.cuda`` as is looked at."""

    __name__ = "torch.cuda"

    def __init__(self, *, is_used: bool) -> None:
        self.is_initialized = lambda: is_used
        self.num_waits = 0

    def synchronize(self) -> None:
        """Count it."""
        self.num_waits += 1


@pytest.mark.parametrize("is_used", [True, False])
def test_a_backward_pass_on_a_device_is_no_wait(
    page: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_used: bool
) -> None:
    """There the main thread sleeps while the device works, also in a job of one instance."""
    main, sleeping = threading.get_ident(), tmp_path / "stat"
    sleeping.write_text("7 (python) S 1")
    monkeypatch.setattr(sys, "_current_frames", lambda: {main: stack(MINE, BACKWARD)})
    monkeypatch.setattr(time, "clock_gettime", lambda _: 0.0)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=Device(is_used=is_used)))
    sampler = PhaseSampler(page, main)
    os.close(sampler.process)
    sampler.process = os.open(sleeping, os.O_RDONLY)
    sampler.inspect()
    os.close(sampler.process)
    counters = PhaseCounters.read(os.pread(page, PAGE_BYTES, 0))

    assert counters is not None
    assert counters.seconds["backward"] > 0.0
    assert (counters.idle_backward_seconds == 0.0) == is_used


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize("device", [Device(is_used=True), None])
def test_a_window_of_a_trace_has_what_a_device_does_in_it(tmp_path: Path, device: Device | None) -> None:
    """It waits for the device before it begins and ends; on the CPU there is nothing to wait for."""
    settings = {"file": str(tmp_path / "one"), "steps": [1, 2], "seconds": None}
    recording = Recording(settings, lambda: b"{}\n", CollectorPause, lambda: device)
    recording._open()
    num_begun = 0 if device is None else device.num_waits
    recording._close()
    about = json.loads((tmp_path / "one.about").read_text())

    assert about["problem"] == ""
    assert about["begun_ns"] < about["ended_ns"]
    if device is not None:
        assert (num_begun, device.num_waits) == (1, 2)


@pytest.fixture
def thresholds() -> Iterator[tuple[int, ...]]:
    """Those of a program whose garbage is collected all the time."""
    before = gc.get_threshold()
    gc.set_threshold(1, 7, 8)
    yield gc.get_threshold()
    gc.set_threshold(*before)


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other Pythons do not collect when frames are read")
def test_nothing_is_collected_while_frames_are_read(thresholds: tuple[int, ...]) -> None:
    """Those of another thread; the thresholds stay the program's, also in a child that is forked in between."""
    main, pause, collections = threading.get_ident(), CollectorPause(), [0]

    def note(*_: object) -> None:
        collections[0] += 1

    def read() -> int:
        before = collections[0]
        StackReader().read(sys._current_frames()[main])
        return collections[0] - before

    gc.callbacks.append(note)
    with ThreadPoolExecutor(1) as pool:
        without = pool.submit(read).result()
        with pause:
            assert pool.submit(read).result() == 0
    gc.callbacks.remove(note)
    assert without > 0
    with pause:
        child = os.fork()
        if child == 0:
            os._exit(int(gc.get_threshold() != thresholds))
    assert os.waitpid(child, 0)[1] == 0
    assert gc.get_threshold() == thresholds
    with pause:
        gc.set_threshold(5)
    assert gc.get_threshold()[0] == 5


def test_popdists_collectives_leave_their_moments_and_its_loaders_their_samples() -> None:
    """The last ones of each group, numbered from 1 in it."""
    memory = bytearray(PAGE_BYTES)
    written = ProgressPage(memoryview(memory))
    for number in range(300):
        written.wait("all_reduce", () if number % 2 else (0, 1))
    written.count_samples(3)
    written.count_samples(4)
    stamps = list(read_stamps(bytes(memory)).values())

    assert sorted(map(len, stamps)) == [63, 63]
    assert [max(moments) for moments in stamps] == [150, 150]
    assert all(list(dict(sorted(it.items())).values()) == sorted(it.values()) for it in stamps)
