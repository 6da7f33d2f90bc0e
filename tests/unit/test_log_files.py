"""The logs of an attempt, where a process cannot easily show what happens to them."""

import os
from pathlib import Path

import pytest

from poprun.errors import LaunchError, PlanError
from poprun.job.output.log_files import LogFiles


def test_a_file_system_that_writes_late_cuts_a_log_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so when the log is closed; all logs are closed, and a second problem is counted."""
    told: list[str] = []
    logs = LogFiles(str(tmp_path), "job", 0, 2, told.append)
    close = os.close

    def full(descriptor: int) -> None:
        close(descriptor)
        raise OSError(122, "Disk quota exceeded")

    monkeypatch.setattr(os, "close", full)
    logs.close()

    first = tmp_path / "job" / "0" / "instance-0.out.log"
    assert told == [
        f"warning: {first} is cut off: Disk quota exceeded; the job goes on without it",
        f"warning: 4 logs in {first.parent} are cut off",
    ]


def test_too_many_logs_are_told_of_and_none_is_left_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the limit."""
    real_open, num_opened = os.open, 0

    def open_few(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        nonlocal num_opened
        num_opened += path.endswith(".log")
        if num_opened > 3:
            raise OSError(24, "Too many open files", path)
        return real_open(path, flags, mode, dir_fd=dir_fd)

    before = set(Path("/proc/self/fd").iterdir())
    monkeypatch.setattr(os, "open", open_few)
    with pytest.raises(LaunchError) as caught:
        LogFiles(str(tmp_path), "job", 0, 700, print)

    assert str(caught.value) == (
        "cannot open the logs of 700 instances: Too many open files; raise the limit with `ulimit -n`"
    )
    assert set(Path("/proc/self/fd").iterdir()) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user, too")
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_log_goes_nowhere_else(tmp_path: Path, kind: str) -> None:
    """Another user's link in a folder for all is not followed, and his pipe keeps nobody waiting."""
    (tmp_path / "precious").write_text("secret")
    folder = tmp_path / "logs" / "job" / "0"
    folder.mkdir(parents=True)
    log = folder / "instance-0.out.log"
    log.symlink_to(tmp_path / "precious") if kind == "link" else os.mkfifo(log)
    os.lchown(log, 54321, -1)

    with pytest.raises(PlanError, match="it is a symbolic link" if kind == "link" else "No such device"):
        LogFiles(str(tmp_path / "logs"), "job", 0, 1, print)
    assert (tmp_path / "precious").read_text() == "secret"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user, too")
@pytest.mark.parametrize("place", ["logs", "logs/job", "logs/job/0"])
def test_logs_lie_in_no_folder_that_another_users_link_names(tmp_path: Path, place: str) -> None:
    """Neither where the link is the folder that was named, nor where it was planted beneath it."""
    (tmp_path / "target").mkdir()
    link = tmp_path / place
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(tmp_path / "target")
    os.lchown(link, 54321, -1)

    with pytest.raises(PlanError, match=f"{link}.* a symbolic link") as caught:
        LogFiles(str(tmp_path / "logs"), "job", 0, 1, print)
    assert list((tmp_path / "target").iterdir()) == []
    if place == "logs":
        assert f"if you mean what it names, give {tmp_path / 'target'}" in str(caught.value)


def test_a_link_of_ones_own_to_the_folder_is_followed(tmp_path: Path) -> None:
    """As a folder on another disk is often named; beneath it no link is followed."""
    (tmp_path / "target").mkdir()
    (tmp_path / "logs").symlink_to("target")
    LogFiles(str(tmp_path / "logs"), "job", 0, 1, print).close()

    assert (tmp_path / "target" / "job" / "0" / "instance-0.err.log").exists()
    (tmp_path / "target" / "other").symlink_to("job")
    with pytest.raises(PlanError, match=r"cannot make .*/target/other \(it is a symbolic link\)"):
        LogFiles(str(tmp_path / "logs"), "other", 0, 1, print)
