"""What poprun says of programs that the kernel or somebody else has ended, with real faults."""

import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.targets import named_processes
from tests.process.endings import has_met, write_program
from tests.process.test_endings import wait_until
from tests.running import DEADLINE_SECONDS, Poprun, run

CGROUPS = Path("/sys/fs/cgroup")
LIMIT_BYTES = 160 * 2**20


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group with little memory, which processes may be put into."""
    group = _memory_folder() / f"poprun-test-{uuid.uuid4().hex}"
    is_unified = (CGROUPS / "cgroup.controllers").exists()
    limits = ("memory.max", "memory.swap.max") if is_unified else ("memory.limit_in_bytes",)
    try:
        group.mkdir()
        (group / limits[0]).write_text(str(LIMIT_BYTES))
    except OSError as error:
        if group.exists():
            group.rmdir()
        pytest.skip(f"no control group can be made here: {error}")
    for name in limits[1:]:
        if (group / name).exists():
            (group / name).write_text("0")
    yield group
    wait_until(lambda: not (group / "cgroup.procs").read_text())
    group.rmdir()


def _memory_folder() -> Path:
    """Where the groups around this process are, or their root when its own name is one from outside."""
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers in ("", "memory"):
            root = CGROUPS / controllers
            own = root / name.strip("/")
            if (own / "cgroup.procs").exists() and (controllers or (CGROUPS / "cgroup.controllers").exists()):
                return own
    pytest.skip("this machine has no control groups for memory")


def test_a_program_that_the_kernel_killed_for_want_of_memory(small_group: Path, tmp_path: Path) -> None:
    """The report says so, and how much the instance held, although the program could not say anything."""
    words = write_program(tmp_path, "ready()\nif rank == 1: held = bytearray(2 ** 30)\ntime.sleep(600)")
    command = Poprun().command("--launcher", "local", "-n", "2", *words)
    enter = f'echo $$ > {small_group}/cgroup.procs && exec "$@"'

    finished = run(["sh", "-c", enter, "sh", *command])

    assert finished.code == 137
    assert "instance 1 failed first: SIGKILL, killed" in finished.err
    assert "probably out of memory: the kernel killed a process of this control group, " in finished.err
    assert "which may use 160 MiB; it held up to 1" in finished.err


def test_a_program_that_somebody_else_killed(poprun: Poprun, tmp_path: Path) -> None:
    """Poprun says that it was not itself, and does not blame the memory."""
    words = write_program(tmp_path, "ready()\ntime.sleep(600)")
    with poprun.started("--launcher", "local", "-n", "2", *words) as process:
        wait_until(lambda: has_met(tmp_path, 2))
        named_processes(process.pid, "program.py")[-1].kill()
        _, err = process.communicate(timeout=DEADLINE_SECONDS)

    assert process.returncode == 137
    assert "by somebody other than poprun, " in err


def test_a_limit_on_the_address_space(poprun: Poprun) -> None:
    """What ``ulimit -v`` refused is told together with the limit."""
    command = poprun.command("--launcher", "local", "-n", "2", sys.executable, "-c", "bytearray(2 ** 34)")

    finished = run(["sh", "-c", 'ulimit -v 4000000 && exec "$@"', "sh", *command])

    assert finished.code == 1
    assert "  | MemoryError" in finished.err
    assert "out of memory: ulimit -v lets a process have 3.8 GiB" in finished.err


def test_a_bus_error(poprun: Poprun, tmp_path: Path) -> None:
    """A file that shrinks under a program that has mapped it."""
    text = """
import mmap, os, sys
with open(sys.argv[1], "wb+") as file:
    file.truncate(2 ** 16)
    page = mmap.mmap(file.fileno(), 2 ** 16)
    file.truncate(0)
    page[2 ** 15]
"""
    finished = poprun("--launcher", "local", sys.executable, "-c", text, os.fspath(tmp_path / "mapped"))

    assert finished.code == 135
    assert "the program failed: SIGBUS, bus error" in finished.err
    assert "a file that it had mapped became shorter" in finished.err
