"""What is known of accelerators, on a machine without one: torch's answers are stand-ins.

Holds popdist.ground.accelerators, popdist.ground.accelerators.sharing and popdist.ground.accelerators.arithmetic.
"""

import ast
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

import popdist
from popdist.checkpoint.manifest import current_conditions
from popdist.errors import BackendError
from popdist.exchange.transport.channel import as_backend_error
from popdist.exchange.transport.connections import check_available
from popdist.gradients.buffers import ModelBuffer, _changed_on_accelerators, find_changed
from popdist.ground.accelerators import TYPES, accelerator, arithmetic
from popdist.ground.accelerators.sharing import are_distinct
from popdist.ground.contract import Contract
from popdist.job import context
from popdist.step.training.micro_batches import to_device
from tests.architecture.source_tree import modules, words


def stand_in(monkeypatch: pytest.MonkeyPatch, kind: str = "cuda", **known: Any) -> SimpleNamespace:
    """Have torch built for accelerators of a ``kind``, of which it sees two."""
    module = SimpleNamespace(device_count=lambda: 2, is_initialized=lambda: True, **known)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    monkeypatch.setattr(torch, "get_device_module", lambda _device: module)
    return module


def test_an_instance_computes_on_what_it_was_dealt(monkeypatch: pytest.MonkeyPatch) -> None:
    """By poprun; under another launcher the instances of a host take the devices in their order."""
    stand_in(monkeypatch, "xpu")
    dealt = Contract(num_instances=2, instance_index=1, local_instance_index=1, num_replicas=2, devices=(1,))
    first = Contract(num_instances=4, num_local_instances=4, num_replicas=4)
    third = Contract(
        num_instances=4, num_local_instances=4, instance_index=2, local_instance_index=2, num_replicas=4
    )

    assert accelerator.devices_of(dealt, are_dealt=True) == (torch.device("xpu:1"),)
    assert accelerator.devices_of(first, are_dealt=False) == (torch.device("xpu:0"),)
    assert accelerator.devices_of(first, are_dealt=True) == (torch.device("cpu"),)
    assert accelerator.devices_of(third, are_dealt=False) == (torch.device("cpu"),)


def test_a_torch_that_does_not_see_what_poprun_dealt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Is named, before the program fails with words of torch's."""
    dealt = Contract(devices=(2,))
    stand_in(monkeypatch)
    with pytest.raises(
        popdist.BackendError, match=r"gave this instance accelerator 2, and torch .* sees 2 .*poprun --doctor"
    ):
        accelerator.devices_of(dealt, are_dealt=True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    with pytest.raises(popdist.BackendError, match="sees none: install"):
        accelerator.devices_of(dealt, are_dealt=True)


def test_a_checkpoint_does_not_begin_to_use_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that computes on the CPU of a machine with accelerators saves as on any other."""
    for name, value in Contract(devices=(0,)).to_env().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    assert current_conditions()["device"] == "cpu"

    module = stand_in(monkeypatch, get_device_name=lambda device: f"the best {device}")
    assert current_conditions()["device"] == "the best cuda:0"
    module.is_initialized = lambda: False
    assert current_conditions()["device"] == "cpu"


@pytest.mark.parametrize(
    ("properties", "same"),
    [
        ({"pci_domain_id": 0, "pci_bus_id": 7, "pci_device_id": 1, "uuid": "slice"}, False),
        ({"pci_domain_id": 0, "pci_bus_id": 7, "pci_device_id": 0, "uuid": "slice"}, True),  # two slices of one
        ({"uuid": "a"}, False),
        ({}, False),
    ],
)
def test_devices_are_told_apart(monkeypatch: pytest.MonkeyPatch, properties: dict[str, Any], same: bool) -> None:  # noqa: FBT001 - a parameter
    """By their place on the bus, else by their maker's names, else by their numbers; and by their host."""
    other = {"pci_domain_id": 0, "pci_bus_id": 7, "pci_device_id": 0, "uuid": "b"} if properties else {}
    found = {0: SimpleNamespace(**properties), 1: SimpleNamespace(**other)}
    stand_in(monkeypatch, get_device_properties=lambda device: found[device.index])
    first, second = (accelerator.identity_of(torch.device("cuda", i), "here") for i in (0, 1))

    assert (first == second) == same
    assert first != accelerator.identity_of(torch.device("cuda", 0), "there")


class Others:
    """The collectives of a group of which the other members bring what they are given."""

    def __init__(self, *others: Tensor) -> None:
        self.others = others
        self.brought = torch.zeros(0)

    def all_gather(self, rows: Sequence[Tensor], mine: Tensor) -> None:
        """As `popdist.exchange.host_memory.host_collectives`."""
        self.brought = mine.clone()
        for row, brought in zip(rows, (mine, *self.others), strict=True):
            row.copy_(brought)


def test_members_find_out_that_they_share_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one warns, and of devices of several kinds; one without a device has none of its own."""
    names = {0: "one kind", 1: "one kind", 2: "another"}
    stand_in(monkeypatch, get_device_name=lambda device: names[device.index])
    brought = []
    for index in names:
        alone = Others()
        assert are_distinct(alone, 1, 0, torch.device("cuda", index), "here")
        brought.append(alone.brought)
    first, second, other = brought

    assert are_distinct(Others(second), 2, 0, torch.device("cuda", 0), "here")
    with pytest.warns(popdist.PopdistWarning, match="several instances compute on one device, such as cuda:0"):
        assert not are_distinct(Others(first), 2, 0, torch.device("cuda", 0), "here")
    with pytest.warns(popdist.PopdistWarning, match="compute on another and one kind"):
        assert are_distinct(Others(other), 2, 0, torch.device("cuda", 0), "here")
    assert not are_distinct(Others(first), 2, 0, torch.device("cuda", 0), "here", warns=False)
    assert not are_distinct(Others(torch.zeros_like(first)), 2, 0, torch.device("cuda", 0), "here")


@pytest.mark.parametrize(("kind", "name"), [("mps", ""), ("cpu", ""), ("hpu", "")])
def test_devices_without_a_backend_of_their_own(kind: str, name: str) -> None:
    """Their tensors go over the memory of the host: gloo's would go there as well."""
    assert accelerator.collectives_of(kind) == name


def test_a_backend_that_this_torch_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Is refused, and so is one whose devices are not there."""
    monkeypatch.delattr(torch.distributed, "ProcessGroupNCCL", raising=False)  # of a torch for GPUs
    with pytest.raises(popdist.BackendError, match=r"cuda devices alone, and torch .* was built without nccl"):
        check_available("nccl")
    module = stand_in(monkeypatch)
    module.device_count = lambda: 0
    monkeypatch.setattr(accelerator, "collectives_of", lambda _kind: "nccl")
    with pytest.raises(popdist.BackendError, match="torch sees none on this machine"):
        check_available("nccl")
    module.device_count = lambda: 1
    check_available("nccl")
    check_available("gloo")


def test_deterministic_algorithms_are_chosen_by_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A choice by time differs between processes; and all instances must compute in the same way."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)  # a torch for GPUs names one
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    before = torch.get_num_threads()
    try:
        said = arithmetic.prepare(Contract(num_threads=1, is_deterministic=True))
    finally:
        torch.use_deterministic_algorithms(mode=False)
        torch.set_num_threads(before)
    settings: Any = torch.utils.deterministic
    assert not torch.backends.cudnn.benchmark
    assert not settings.fill_uninitialized_memory
    assert re.fullmatch("1 threads for each replica, deterministic algorithms, highest float32 products", said)

    stand_in(monkeypatch)
    assert accelerator.arithmetic_in_words() == ", convolutions in TF32"
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    assert accelerator.arithmetic_in_words() == ", convolutions in TF32 chosen by time"


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
def test_what_nccl_says_last_is_the_reason(kind: type[Exception]) -> None:
    """Its first line names a source file; without a visible device torch raises ValueError."""
    text = "NCCL error in: x.cpp:3690, invalid usage. NCCL 2.28.9\nLast error:\nDuplicate GPU detected : rank 0"
    with (
        pytest.raises(popdist.BackendError, match=r"^could not start \(Duplicate GPU detected : rank 0\)$"),
        as_backend_error("could not start"),
    ):
        raise kind(text)
    with (
        pytest.raises(popdist.BackendError, match=r"^could not start \(no GPUs found!\)$"),
        as_backend_error("could not start"),
    ):
        raise kind("ProcessGroupNCCL is only supported with GPUs.cc:no GPUs found!")


def test_a_batch_that_comes_to_the_cpu_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy to the host that nobody waits for is read before it is made."""
    asked = []

    def to(tensor: Tensor, device: torch.device, *, non_blocking: bool) -> Tensor:
        asked.append((device.type, non_blocking))
        return torch.zeros_like(tensor, device="cpu")

    monkeypatch.setattr(torch.Tensor, "to", to)
    to_device(torch.zeros(2, device="meta"), torch.device("cpu"))
    to_device(torch.zeros(2), torch.device("meta"))

    assert asked == [("cpu", False), ("meta", True)]


def test_buffers_of_accelerators_are_compared_together() -> None:
    """With the answer that one comparison for each buffer gives; NaN equals NaN, and empty ones never change."""
    nan = float("nan")
    starts = [torch.tensor(it) for it in ([1.0, nan], [0.0], [2.0, 3.0], [nan], [], [-0.0])]
    nows = [torch.tensor(it) for it in ([1.0, nan], [nan], [2.0, 4.0], [nan], [], [0.0])]
    starts += [torch.tensor([[1, 2]]), torch.tensor(7)]
    nows += [torch.tensor([[1, 2]]), torch.tensor(8)]
    pairs = {str(i): pair for i, pair in enumerate(zip(nows, starts, strict=True))}
    owner = nn.Module()
    buffers = {}
    for name, (now, start) in pairs.items():
        owner.register_buffer(f"b{name}", now)
        buffers[name] = ModelBuffer(name=name, owner=owner, key=f"b{name}", tensor=now, version=-1, start=start)

    assert sorted(_changed_on_accelerators(pairs)) == ["1", "2", "7"] == sorted(find_changed(buffers))


def test_one_folder_knows_the_makers() -> None:
    """No other code of popdist and poptorch has a word that one maker's devices alone have."""
    makers = re.compile(rf"\b_?({'|'.join(TYPES)}|nccl|xccl|hip|rocm)\b|cuda|nvidia", re.IGNORECASE)
    found = {
        f"{module.name}: {word}"
        for module in modules("popdist", "poptorch")
        if not module.name.startswith("popdist.ground.accelerators") and module.name not in RUN_ANYWHERE
        for word in _code_words(module.tree)
        if makers.search(word)
    }

    assert found == set()


RUN_ANYWHERE = words("popdist.startup.recording popdist.startup.recorder_server popdist.startup.phase_sampler")
"""What runs in any Python of a job, and cannot import the folder."""


def _code_words(tree: ast.AST) -> set[str]:
    """The names and texts of a module, docstrings left out."""
    expressions = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    docstrings = {id(it) for it in expressions if isinstance(it, ast.Constant)}
    found = set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if id(node) not in docstrings:
                found.add(text)
            case ast.Attribute(attr=name) | ast.Name(id=name):
                found.add(name)
    return found


def test_queries_of_devices_leave_the_context_alone() -> None:
    """On a machine without accelerators an instance computes on the CPU."""
    assert context.devices() == (torch.device("cpu"),) == (context.device(),)


def test_an_accelerator_without_a_device_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of torch 2.6, which raises for it."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", Mock(side_effect=RuntimeError))
    assert accelerator.found_type() is None


def test_memory_is_asked_for_by_older_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the module of the device; what no module has is refused by name."""
    monkeypatch.setattr(torch, "accelerator", SimpleNamespace())
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(memory_reserved=lambda _: 7))
    device = torch.device("cuda")
    assert accelerator.ask_memory("memory_reserved", device) == 7
    with pytest.raises(BackendError, match=r"to call max_memory_reserved of cuda needs torch 2\.9; this is "):
        accelerator.ask_memory("max_memory_reserved", device)


def test_a_stream_is_left_for_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """And for the device of before."""
    stream, made = SimpleNamespace(device="b"), Mock()
    made.current_device_index.return_value, made.current_stream.return_value = 3, "before"
    monkeypatch.setattr(torch, "accelerator", made)
    with pytest.raises(ZeroDivisionError), accelerator.in_stream(cast("Any", stream)):
        raise ZeroDivisionError
    assert [it.args for it in made.set_stream.mock_calls] == [(stream,), ("before",)]
    made.set_device_index.assert_called_once_with(3)
