"""Machines: names, pods, files; and what is said of those that are none.

Holds popsize.hardware.
"""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popsize.errors import MachineError
from popsize.hardware import DEVICES, GIB, is_called, machines_of, named_machine

FIGURES: dict[str, Any] = {
    "memory_gib": 32,
    "tflops": {"fp32": 10, "bf16": 100},
    "memory_gb_per_second": 900,
    "devices_per_host": 4,
    "link_gb_per_second": 100,
    "network_gb_per_second": 50,
}


@pytest.mark.parametrize(
    ("text", "device", "number", "per_host"),
    [
        ("64xA100-80GB", "A100-80GB", 64, 8),
        ("8xH100", "H100-80GB", 8, 8),
        ("h200", "H200-141GB", 1, 8),
        ("POD16", "GC200", 16, 16),
        ("POD256", "GC200", 256, 64),
        ("4xPOD64", "GC200", 256, 64),
    ],
)
def test_a_name_is_a_machine(text: str, device: str, number: int, per_host: int) -> None:
    """A count, a device or a pod, and how many share the fast links."""
    machine = named_machine(text)

    assert (machine.device.name, machine.num_devices, machine.devices_per_host) == (device, number, per_host)


@given(st.sampled_from(sorted(DEVICES)), st.integers(1, 10**6))
def test_every_device_comes_in_any_number(name: str, number: int) -> None:
    """All its figures are positive."""
    machine = named_machine(f"{number}x{name}")

    assert machine.num_devices == number
    assert min(machine.link_bytes_per_second, machine.network_bytes_per_second) > 0
    assert all(machine.device.flops_at(precision) > 0 for precision in ("fp32", "tf32", "fp16", "bf16", "fp8"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("8xA1000", "no machine is called 'A1000': nearest are A100"),
        ("0xA100", "'0xA100' has no device"),
        ("POD6", "'POD6' is no pod: an IPU-Machine has four IPUs"),
        ("", "no machine is called ''"),
    ],
)
def test_what_is_no_machine_is_said(text: str, said: str) -> None:
    """With the nearest names."""
    with pytest.raises(MachineError, match=re.escape(said)):
        named_machine(text)


def test_a_file_describes_other_machines() -> None:
    """By their name, with a count before it."""
    machines = machines_of({"box": FIGURES}, "machines.yaml")
    machine = named_machine("16xbox", machines)

    assert machine.num_devices == 16
    assert machine.devices_per_host == 4
    assert machine.device.memory_bytes == 32 * GIB
    assert machine.device.flops_at("fp8") == 100e12
    assert machine.device.flops_at("tf32") == 10e12
    assert machine.device.launches_ahead
    assert named_machine("box", machines).num_devices == 1


@pytest.mark.parametrize(
    ("tables", "said"), [(None, "no machines are described"), ({"box": 8}, "box has no figures")]
)
def test_a_file_that_describes_no_machine_is_named(tables: object, said: str) -> None:
    """With the machine."""
    with pytest.raises(MachineError, match=f"m.yaml: {said}"):
        machines_of(tables, "m.yaml")


@pytest.mark.parametrize("figure", ["memory_gib", "tflops", "memory_gb_per_second", "link_gb_per_second"])
def test_a_figure_that_lacks_is_named(figure: str) -> None:
    """Each of those that nothing else can stand for."""
    less = {name: value for name, value in FIGURES.items() if name != figure}

    with pytest.raises(MachineError, match=f"box needs {figure}"):
        machines_of({"box": less}, "machines.yaml")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cores": 8}, "has cores, which says nothing about a machine"),
        ({"network_gb_per_second": 0}, "needs network_gb_per_second, a number of 1e-06 or more; it is 0"),
        ({"memory_gib": "32"}, "needs memory_gib, a number of 1e-06 or more; it is '32'"),
        ({"memory_gib": -1}, "needs memory_gib"),
        ({"memory_gib": float("nan")}, "needs memory_gib"),
        ({"memory_gib": 10**400}, "needs memory_gib"),
        ({"tflops": "many"}, "needs tflops: a number, or one for each of fp32"),
        ({"tflops": {}}, "needs tflops"),
        ({"tflops": {"fp16": True}}, "needs tflops"),
        ({"tflops": {"fp16": float("inf")}}, "needs tflops"),
        ({"tflops": {"fp12": 1}}, "needs tflops"),
        ({"streaming_gib": 64}, "has streaming_gib and needs streaming_gb_per_second"),
        ({"num_devices": float("inf")}, "needs num_devices, a whole number of 1 or more; it is inf"),
        ({"num_devices": 0.5}, "needs num_devices"),
        ({"num_devices": 1.5}, "needs num_devices"),
        ({"devices_per_host": 0}, "needs devices_per_host"),
    ],
)
def test_a_figure_that_no_machine_has_is_refused(changes: dict[str, Any], said: str) -> None:
    """None of them becomes a division by zero later."""
    with pytest.raises(MachineError, match=re.escape(f"m.yaml: box {said}")):
        machines_of({"box": {**FIGURES, **changes}}, "m.yaml")


def test_a_machine_has_a_name_that_can_be_printed() -> None:
    """It stands in tables and pictures."""
    with pytest.raises(MachineError, match="letters that cannot be printed"):
        machines_of({"\x1b[31m": FIGURES}, "m.yaml")


@pytest.mark.parametrize(
    ("machine", "asked", "found"),
    [
        ("A100", None, "bf16"),
        ("POD16", None, "fp16"),
        ("POD16", "fp32", "fp32"),
        ("H100", "fp8", "fp8"),
        ("POD16", "bf16", ""),
        ("A100", "fp8", ""),
    ],
)
def test_a_device_computes_in_what_it_has_units_for(machine: str, asked: str | None, found: str) -> None:
    """Another precision never takes the place of one that was asked for."""
    device = named_machine(machine).device
    if found:
        assert device.precision(asked) == found
    else:
        with pytest.raises(MachineError, match=f"precision={asked}: it is one of fp32, .* on {device.name}"):
            device.precision(asked)


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("NVIDIA A100-SXM4-80GB", ["A100-40GB", "A100-80GB"]),
        ("NVIDIA H100 80GB HBM3", ["H100-80GB", "H100-96GB"]),
        ("NVIDIA H100 PCIe", ["H100-PCIe-80GB"]),
        ("NVIDIA H100 NVL", ["H100-NVL-94GB"]),
        ("NVIDIA A100-PCIE-40GB", ["A100-40GB", "A100-80GB"]),
        ("NVIDIA RTX A1000", []),
        ("NVIDIA GH200 480GB", []),
        ("", []),
    ],
)
def test_a_device_is_known_by_the_whole_name_of_its_kind(model: str, names: list[str]) -> None:
    """What the driver calls it; other kinds have names that hold it."""
    assert [name for name in DEVICES if is_called(name, model)] == names
