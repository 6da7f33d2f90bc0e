"""Programs that do not know us, started without MPI.

Holds poprun.hosts.probe.program and popdist.
"""

import os
import sys
from pathlib import Path

import pytest

from tests.running import Poprun

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


@pytest.fixture
def local() -> Poprun:
    """The command with the launcher that needs no MPI."""
    return Poprun(options=("--launcher", "local"))


@pytest.mark.parametrize("num_instances", [1, 2, 3, 4])
def test_any_executable_runs(local: Poprun, num_instances: int) -> None:
    """``poprun echo Hello`` says Hello once an instance, and needs nothing of the program."""
    finished = local("-n", str(num_instances), "--tag-output=no", "echo", "Hello")

    assert finished.succeeded().lines == ["Hello"] * num_instances


@pytest.mark.parametrize("num_instances", [1, 3])
def test_the_variables_of_open_mpi_are_there(local: Poprun, num_instances: int) -> None:
    """A program that reads Open MPI's variables finds its place although there is no MPI."""
    finished = local(
        "-n", str(num_instances), "--tag-output=no", sys.executable, str(EXAMPLES / "open_mpi_variables.py")
    )

    assert finished.succeeded().lines == [
        f"rank {rank} of {num_instances}, local rank {rank}: items {list(range(10))[rank::num_instances]}"
        for rank in range(num_instances)
    ]


@pytest.mark.parametrize("options", [("-n", "2"), ("-n", "1")])
def test_another_python_on_path_that_lacks_what_popruns_own_has(
    poprun: Poprun, tmp_path: Path, options: tuple[str, ...]
) -> None:
    """The report says which one ran, and the line to write; also of a program that writes past poprun."""
    (tmp_path / "train.py").write_text("import popdist\n")
    other = tmp_path / "bin" / "python"
    other.parent.mkdir()
    other.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # without its site packages
    other.chmod(0o755)
    path = {"PATH": f"{other.parent}:{os.environ['PATH']}"}

    finished = poprun("--launcher", "local", *options, "python", "train.py", env=path, cwd=tmp_path)

    assert finished.code == 1
    assert (
        f"  {other} has no popdist, and poprun's own Python has: "
        f"write poprun [OPTIONS] {sys.executable} train.py\n" in finished.told
    )


def test_a_module_that_no_python_has_is_left_to_its_traceback(poprun: Poprun, tmp_path: Path) -> None:
    """So is a failure of poprun's own Python."""
    other = tmp_path / "python"
    other.symlink_to(sys.executable)
    for python, module in ((str(other), "no_such_module"), (sys.executable, "popdist.no_such_module")):
        finished = poprun("--launcher", "local", "-n", "2", python, "-c", f"import {module}")

        assert finished.code == 1
        assert "poprun's own Python" not in finished.told
