"""The memory of phases on a device: which thread asks the device, and what becomes of memory that is free.

The device is torch's ``meta``, whose tensors have no memory: what would be moved is only noted.

Holds popdist.phases.used_memory.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import popdist
from popdist.ground.local_tensors import TensorForm
from popdist.job import context
from popdist.parallel import phased
from popdist.phases import phased_model, store_file
from popdist.phases.phase_memory import MemoryPlace, PhaseMemory
from popdist.phases.phase_store import PhaseStore
from popdist.phases.phased_layers import find_layers, make_absent
from popdist.phases.phased_weights import move_buffers
from popdist.phases.store_file import StoreThreads

DEVICE = torch.device("meta")


@pytest.fixture(autouse=True)
def _job_of_one() -> None:
    popdist.init()


class Device:
    """Notes what a stream is asked, and what is moved behind its events."""

    def __init__(self) -> None:
        self.asked_in: list[threading.Thread] = []
        self.moved_behind: list[object] = []

    def current_stream(self, device: torch.device) -> "Device":
        """The one stream."""
        assert device == DEVICE
        return self

    def record_event(self) -> int:
        """The number of the event, of those that were recorded."""
        self.asked_in.append(threading.current_thread())
        return len(self.asked_in)

    def run(self, pieces: Sequence[Callable[[], None]]) -> None:
        """Move nothing."""
        self.moved_behind += {piece.args[-1]: None for piece in pieces}  # type: ignore[attr-defined] # partial


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """A device whose streams are ours."""
    made = Device()
    monkeypatch.setattr(torch.accelerator, "current_stream", made.current_stream)
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(empty_cache=lambda: None))
    monkeypatch.setattr(StoreThreads, "run", lambda _, pieces: made.run(pieces))
    return made


@pytest.fixture
def memory(disk_folder: Path, device: Device) -> Any:
    """The memory of two layers, one in each phase."""
    with DEVICE:
        layers = find_layers(nn.Sequential(*(nn.Linear(8, 8) for _ in range(2))), None)
    forms = {name: TensorForm.of(it) for name, it in layers.weights.items()}
    store = PhaseStore(disk_folder, forms, group=context.current_group(), device=DEVICE)
    made = PhaseMemory(layers, DEVICE)
    for piece in layers.pieces:
        made.addresses[MemoryPlace("weights", piece.index)] = [store.weights.part(piece.weights)]
    made.cut([0, 1], [0, 1])
    yield made
    made.close()
    store.close()


def test_the_thread_that_computes_asks_its_stream(memory: PhaseMemory, device: Device) -> None:
    """Before it asks for a read or a write: another thread has another current stream."""
    memory.enter(memory.phases[0], backward=False)
    memory.enter(memory.phases[1], backward=False)
    memory.write_behind(MemoryPlace("weights", 1), memory.addresses[MemoryPlace("weights", 1)][0])
    memory.wait()

    assert set(device.asked_in) == {threading.current_thread()}
    assert device.moved_behind == [1, 2, 3]  # two phases are read, one is written


def test_slots_are_given_back_before_others_are_made(memory: PhaseMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else torch keeps their memory for tensors of their sizes."""
    made: list[weakref.ref[torch.Tensor]] = []
    make_buffer = store_file.make_buffer

    def noted(num_bytes: int, device: torch.device) -> torch.Tensor:
        buffer = make_buffer(num_bytes, device)
        made.append(weakref.ref(buffer))
        return buffer

    monkeypatch.setattr("popdist.phases.phase_memory.make_buffer", noted)
    memory.cut([0, 1], [0, 1])
    found: list[list[bool]] = []
    module = SimpleNamespace(empty_cache=lambda: found.append([it() is None for it in made]))
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    memory.cut([0, 1], [0])

    assert found == [[True, True]]
    assert len(made) == 3


def test_a_model_without_weights_is_for_the_device_of_its_instance(
    disk_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one with weights for the device on which they are."""
    own, absent_on, moved_to = torch.device("cpu", 0), list[torch.device](), list[torch.device]()

    def noted(parameter: nn.Parameter, device: torch.device) -> None:
        absent_on.append(device)
        make_absent(parameter, device)

    monkeypatch.setattr(context, "device", lambda: own)
    monkeypatch.setattr(phased_model, "move_buffers", lambda _, device: moved_to.append(device))
    monkeypatch.setattr(phased_model, "make_absent", noted)
    found = []
    for place in ("meta", "cpu"):
        with torch.device(place):
            net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(2)))
        model = phased(net, phases=2, store=disk_folder)
        found.append(model.store.device)
        model.close()

    plain = torch.device("cpu")
    assert found == [own, plain]
    assert absent_on == [own] * 4 + [plain] * 4
    assert moved_to == [own]


def test_buffers_follow_the_weights() -> None:
    """One that two modules have stays one."""
    net = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    net[1].running_mean = net[0].running_mean
    move_buffers(net, DEVICE)

    assert all(buffer.is_meta for buffer in net.buffers())
    assert net[1].running_mean is net[0].running_mean
