"""What the machine keeps from a process: the kernel's numbers, of both versions of control groups."""

import os
from collections.abc import Mapping
from pathlib import Path

from poprun.launch.pressure import measure_pressure, room_bytes, throttled_seconds


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Write texts into files below ``folder``."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_the_time_of_a_throttled_group_is_that_of_the_tightest_around_it(tmp_path: Path) -> None:
    """Version 1 counts nanoseconds, version 2 microseconds; what is not there counts nothing."""
    write_files(
        tmp_path,
        {
            "cpu/job/cpu.stat": "nr_periods 9\nthrottled_time 1500000000\n",
            "cpu/job/one/cpu.stat": "throttled_time 0\n",
            "two/cpu.stat": "usage_usec 7\nthrottled_usec 2500000\n",
            "cpu.stat": "throttled_usec 500000\n",
        },
    )

    assert throttled_seconds("4:memory:/\n2:cpu,cpuacct:/job/one\n", str(tmp_path)) == 1.5
    assert throttled_seconds("0::/two/three\n", str(tmp_path)) == 2.5
    assert throttled_seconds("0::/\n", str(tmp_path)) == 0.5  # of a container, which is in its own group's root


def test_the_room_is_what_the_tightest_group_or_the_machine_has_left(tmp_path: Path) -> None:
    """The cache of files that nobody reads makes room."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:    8 kB\n")
    write_files(
        tmp_path,
        {
            "memory/job/memory.limit_in_bytes": "5000\n",
            "memory/job/memory.usage_in_bytes": "3000\n",
            "memory/job/memory.stat": "total_inactive_file 1000\n",
            "two/memory.max": "max\n",
            "two/memory.current": "7000\n",
            "container/memory.max": "6000\n",
            "container/memory.current": "1000\n",
        },
    )

    assert room_bytes("4:memory:/job/one\n", str(tmp_path), str(meminfo)) == 3000
    assert room_bytes("0::/two\n", str(tmp_path), str(meminfo)) == 8192
    assert room_bytes("0::/\n", str(tmp_path / "container"), str(meminfo)) == 5000
    assert room_bytes("", str(tmp_path), str(tmp_path / "none")) == 0


def test_a_process_that_is_gone_has_no_totals() -> None:
    """Nor has one that nobody announced."""
    assert measure_pressure(0) == {}
    assert measure_pressure(os.getpid()).keys() == {"run_delay_seconds", "throttled_seconds", "room_bytes"}
    assert measure_pressure(2**22 + 1)["run_delay_seconds"] == 0.0
