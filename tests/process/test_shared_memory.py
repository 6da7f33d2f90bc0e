"""What killed MPI programs leave in shared memory is removed, and nothing else."""

import subprocess
import sys
from pathlib import Path

import pytest

from poprun.launch import mpi_leftovers
from poprun.launch.mpi_leftovers import remove_abandoned

MAP = """
import mmap, sys
with open(sys.argv[1], "r+b") as file:
    memory = mmap.mmap(file.fileno(), 0)
print("mapped", flush=True)
sys.stdin.read()
"""
OPEN = "import sys; file = open(sys.argv[1]); print('open', flush=True); sys.stdin.read()"


@pytest.fixture
def rest(tmp_path: Path) -> Path:
    """A file as MPICH makes it."""
    file = tmp_path / "mpich_shm_0123abcd_0"
    file.write_bytes(bytes(4096))
    return file


def test_a_rest_of_the_job_is_removed(rest: Path) -> None:
    """Nobody has it open or mapped, so nobody can want it."""
    assert remove_abandoned(60.0, str(rest.parent)) == [str(rest)]
    assert not rest.exists()


@pytest.mark.parametrize("program", [MAP, OPEN])
def test_what_a_process_uses_is_left_alone(rest: Path, program: str) -> None:
    """Another job's file is as young as this one's; it goes when its last user has ended."""
    with subprocess.Popen(
        [sys.executable, "-c", program, rest], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as user:
        assert user.stdout is not None
        assert user.stdout.readline()
        assert remove_abandoned(60.0, str(rest.parent)) == []
        user.communicate()

    assert remove_abandoned(60.0, str(rest.parent)) == [str(rest)]


def test_what_is_older_than_the_job_is_left_alone(rest: Path) -> None:
    """The job cannot have made it."""
    assert remove_abandoned(-60.0, str(rest.parent)) == []


@pytest.mark.parametrize("name", ["dataset", "torch_1234_0", "psm_0123", "my_mpich_shm_0"])
def test_files_of_other_makers_are_left_alone(tmp_path: Path, name: str) -> None:
    """Some people keep a dataset in shared memory from job to job."""
    (tmp_path / name).write_bytes(bytes(1))
    (tmp_path / "mpich_shm_folder").mkdir()

    assert remove_abandoned(60.0, str(tmp_path)) == []


def test_nothing_is_removed_that_invisible_processes_may_use(rest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container that shares the host's memory sees the host's files, and not who uses them."""
    monkeypatch.setattr(mpi_leftovers, "_FIRST_PROCESS_SPACE", "another")
    monkeypatch.setattr(mpi_leftovers, "_FIRST_MEMORY_SPACE", str(Path("/proc/self/ns/ipc").readlink()))

    assert remove_abandoned(60.0, str(rest.parent)) == []


def test_a_machine_without_shared_memory_has_no_rests(tmp_path: Path) -> None:
    """There is nothing to look at."""
    assert remove_abandoned(60.0, str(tmp_path / "none")) == []
