"""The folders of killed Open MPI launchers are removed, and nothing else.

Holds poprun.launch.mpi_leftovers.
"""

import os
import subprocess
from pathlib import Path

import pytest

from poprun.launch.mpi_leftovers import remove_abandoned_sessions, session_parent


def ended_process() -> int:
    """The id of a process that has ended."""
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return process.pid


def make_session(parent: Path, pid: int, host: str = os.uname().nodename) -> Path:
    """A folder as PRRTE makes it."""
    folder = parent / f"ompi.{pid}"
    (folder / "0").mkdir(parents=True)
    (folder / f"pmix.{host}.tool").write_text("prterun")
    return folder


def test_the_folder_of_a_launcher_that_has_ended_is_removed(tmp_path: Path) -> None:
    """The next launcher may get the same process id."""
    folder = make_session(tmp_path, ended_process())

    assert remove_abandoned_sessions(str(tmp_path)) == [str(folder)]
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_running_launcher_is_left_alone(tmp_path: Path) -> None:
    """Another job runs in it."""
    make_session(tmp_path, os.getpid())

    assert remove_abandoned_sessions(str(tmp_path)) == []


def test_folders_of_others_are_left_alone(tmp_path: Path) -> None:
    """Those of another machine, links, and what only looks alike."""
    pid = ended_process()
    make_session(tmp_path / "elsewhere", pid)
    (tmp_path / f"ompi.{pid}").symlink_to(tmp_path / "elsewhere" / f"ompi.{pid}")
    make_session(tmp_path, pid + 100_000_000, host="another")
    (tmp_path / "ompi.conf").mkdir()

    assert remove_abandoned_sessions(str(tmp_path)) == []


@pytest.mark.parametrize(
    ("environ", "parent"),
    [({}, "/tmp"), ({"TMP": "/a", "TEMP": "/b"}, "/b"), ({"TMPDIR": "/c", "TMP": "/a"}, "/c")],
)
def test_the_parent_is_where_the_launcher_looks(environ: dict[str, str], parent: str) -> None:
    """PRRTE reads three variables."""
    assert session_parent(environ) == parent


def test_a_parent_that_is_not_there_has_no_folders(tmp_path: Path) -> None:
    """There is nothing to look at."""
    assert remove_abandoned_sessions(str(tmp_path / "none")) == []
