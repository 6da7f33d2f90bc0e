"""What poprun says of programs that the kernel or somebody else has ended, with real faults."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

from measuring.control_group import ControlGroup

from tests.faults.targets import named_processes
from tests.process.endings import has_met, write_program
from tests.process.test_endings import wait_until
from tests.running import DEADLINE_SECONDS, Poprun, run

LIMIT_BYTES = 160 * 2**20


def test_a_program_that_the_kernel_killed_for_want_of_memory(
    limited_memory: Callable[[int], ControlGroup], tmp_path: Path
) -> None:
    """The report says so, and how much the instance held, although the program could not say anything."""
    words = write_program(tmp_path, "ready()\nif rank == 1: held = bytearray(2 ** 30)\ntime.sleep(600)")
    command = Poprun().command("--launcher", "local", "-n", "2", *words)
    group = limited_memory(LIMIT_BYTES)

    finished = run(group.command(command))

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
