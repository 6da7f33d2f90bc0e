"""What each of N instances on this machine's CPU reaches."""

import json
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from popdist import BackendError
from popdist.parallel.measures import cpu_speed
from popsize.hardware import machines_of
from tests.running import DEADLINE_SECONDS


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """The program, as poprun-size runs it."""
    command = [sys.executable, "-m", "popdist.parallel.measures.cpu_speed", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)


@pytest.mark.parametrize("number", [1, 2, 4])
def test_it_prints_a_machine(number: int, tmp_path: Path) -> None:
    """So many devices on one host, each speed above zero; popsize reads it. A disk only if one is named."""
    done = run(str(number), *(["--store", str(tmp_path)] if number > 1 else []))
    assert (done.returncode, done.stderr) == (0, "")
    machine = machines_of({"here": json.loads(done.stdout)}, "here")["here"]

    assert (machine.num_devices, machine.devices_per_host) == (number, number)
    assert machine.link_bytes_per_second == machine.network_bytes_per_second > 0
    assert machine.device.memory_bytes > 2**20
    assert machine.device.memory_bytes_per_second > 0
    assert 0 < machine.device.operator_seconds < 0.1
    assert not machine.device.launches_ahead
    assert (machine.device.streaming_bytes > 0) == (number > 1)
    assert (machine.device.streaming_bytes_per_second > 0) == (number > 1)
    assert (machine.device.streaming_write_bytes_per_second > 0) == (number > 1)
    assert list(tmp_path.iterdir()) == []
    assert set(machine.device.flops) == {"fp32", "bf16"}
    assert all(speed > 0 for speed in machine.device.flops.values())


def test_it_plans_for_this_cpu(tmp_path: Path) -> None:
    """poprun-size measures the CPU and ranks mappings to it, with no module of the working directory."""
    (tmp_path / "popdist.py").write_text("raise SystemExit('it was imported')")
    model = "--model gpt layers=4 hidden=256 heads=4 sequence=128 --global-batch 8 --precision fp32"
    words = f"--cpu 2 {model} --format json".split()
    command = [sys.executable, "-P", "-c", "from poprun.size import main; main()", *words]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)


@pytest.mark.parametrize("word", ["0", "-1", "two", "100000"])
def test_a_wrong_number_is_refused(word: str) -> None:
    """In one line behind the usage, without a traceback."""
    done = run(word)

    assert done.returncode == 2
    assert "N" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_process_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are stopped, and none is left behind."""
    monkeypatch.setattr(cpu_speed, "_link_rate", Mock(side_effect=ValueError("no such link")))
    with pytest.raises(BackendError, match="ValueError: no such link"):
        cpu_speed.measure(2)


def test_late_processes_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits longer than the limit."""
    monkeypatch.setattr(cpu_speed, "_LIMIT_SECONDS", 0.1)
    monkeypatch.setattr(cpu_speed, "_speeds", lambda *_: time.sleep(DEADLINE_SECONDS))
    with pytest.raises(BackendError, match=r"not measured in 0\.1 seconds"):
        cpu_speed.measure(2)
