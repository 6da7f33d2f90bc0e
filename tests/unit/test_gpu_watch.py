"""What ``nvidia-smi`` prints of a job's GPUs, by a stand-in for it."""

import os
import signal
import time
from pathlib import Path

import pytest

from poprun.makers.maker import NVIDIA
from poprun.observe.account.curves import JobCurves
from poprun.observe.account.gpu_watch import GpuReading, GpuWatch

STAND_IN = """#!/bin/sh
printf '0, GPU-aa, 37, 1024\\n1, GPU-bb, [N/A], 2048\\n2, GPU-cc, 100'
printf ', 4096\\nFailed to read\\n'
exec sleep 600
"""


@pytest.mark.parametrize(
    ("line", "busy", "num_bytes"),
    [
        ("0, GPU-a, 37, 2", 0.37, 2 * 2**20),
        ("0, GPU-a, [N/A], [Not Supported]", None, None),
        ("0,GPU-a,0,0", 0.0, 0.0),
    ],
)
def test_a_line_is_a_reading(line: str, busy: float | None, num_bytes: float | None) -> None:
    """What a device does not tell is left open."""
    assert GpuReading.read(line) == GpuReading(names=("0", "GPU-a"), busy_share=busy, memory_bytes=num_bytes)


def test_other_lines_are_none() -> None:
    """Such as those of a driver in trouble."""
    assert [GpuReading.read(line) for line in ("", "No devices were found", "a, b, c")] == [None] * 3


def test_devices_become_curves_of_their_instances(tmp_path: Path) -> None:
    """By number or by the beginning of a uuid; several of one instance each have a curve."""
    (tmp_path / "nvidia-smi").write_text(STAND_IN)
    (tmp_path / "nvidia-smi").chmod(0o755)
    curves = JobCurves(3, 0.0)
    devices: dict[int, tuple[str, ...]] = {0: ("1",), 1: ("0", "GPU-c"), 2: ()}
    watch = GpuWatch(NVIDIA.watch, devices, {"PATH": f"{tmp_path}:{os.environ['PATH']}"}, curves)
    while "gpu_2_memory" not in curves.instances[1].by_name:
        watch.update(1.0)
        time.sleep(0.01)
    watch.close()
    assert watch._process is not None
    assert os.waitstatus_to_exitcode(os.waitpid(watch._process.pid, 0)[1]) == -signal.SIGTERM

    lasts = [{name: curve.last for name, curve in one.by_name.items()} for one in curves.instances]
    assert lasts == [
        {"gpu_memory": 2048.0 * 2**20},
        {"gpu_0_busy": 0.37, "gpu_0_memory": 2.0**30, "gpu_2_busy": 1.0, "gpu_2_memory": 2.0**32},
        {},
    ]


def test_a_host_without_the_program_has_no_such_curves() -> None:
    """It is no error."""
    curves = JobCurves(1, 0.0)
    watch = GpuWatch(NVIDIA.watch, {0: ("0",)}, {"PATH": "/nowhere"}, curves)
    watch.update(1.0)
    watch.close()

    assert curves.instances[0].by_name == {}
