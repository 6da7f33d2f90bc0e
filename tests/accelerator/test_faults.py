"""The simulated accelerator finds planted faults, and nothing in the same programs without them."""

import shutil
import sys

import pytest

from tests.running import run

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the accelerator is compiled by g++")

_RACE = "RuntimeError: simulated race: "

_ENDS = {
    "side_stream_begins_too_early": f"{_RACE}aten::mul in stream 2 of simulated:0 reads memory that aten::fill_",
    "result_is_not_waited_for": f"{_RACE}aten::add in the default stream of simulated:0 reads memory",
    "operand_is_overwritten": f"{_RACE}aten::zero_ in the default stream of simulated:0 writes memory that",
    "event_is_recorded_before_the_work": f"{_RACE}aten::add in the default stream of simulated:0 reads memory",
    "copy_goes_in_another_stream": f"{_RACE}aten::add in the default stream of simulated:0 reads memory",
    "late_copy_is_read": "AssertionError: 2 was computed, nan was found",
    "late_copy_is_not_asked_for": "AssertionError: 2 was computed, nan was found",
    "source_is_changed": f"{_RACE}the host changed the source of a copy to the device",
    "target_is_changed": f"{_RACE}the host wrote where a copy from the device",
    "buffer_of_two_streams": f"{_RACE}a copy from the host in stream 2 of simulated:0 reads the host",
    "host_reads_device_memory": "signal 11",
    "freed_memory_is_reused": f"{_RACE}aten::fill_ in the default stream of simulated:0 writes memory that",
    "new_memory_is_read": "AssertionError: 1 was computed, nan was found",
    "hook_does_not_wait": f"{_RACE}aten::mul in stream 2 of simulated:0 reads memory that aten::mul",
    "backward_of_a_side_stream": f"{_RACE}a copy to the host in the default stream of simulated:0 reads memory",
}


@pytest.fixture(scope="module")
def ends() -> dict[tuple[str, str], str]:
    """How each program ended, with its fault and without."""
    finished = run([sys.executable, "-m", "tests.accelerator.faults"]).succeeded()
    lines = [line.split("\t") for line in finished.out.splitlines()]
    return {(name, kind): end for name, kind, end in lines}


def test_each_program_is_known(ends: dict[tuple[str, str], str]) -> None:
    """No program is left out."""
    assert {name for name, _kind in ends} == set(_ENDS)


@pytest.mark.parametrize("name", _ENDS)
def test_fault_is_found(name: str, ends: dict[tuple[str, str], str]) -> None:
    """A program with a fault ends as the fault demands; without the fault, the program passes."""
    assert ends[name, "faulty"].startswith(_ENDS[name])
    assert ends[name, "right"] == "passed"
