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
    opened: list[int] = []
    closed: list[int] = []
    real_open, real_close = os.open, os.close

    def open_few(path: str, flags: int, mode: int = 0o777) -> int:
        if len(opened) == 3:
            raise OSError(24, "Too many open files", path)
        opened.append(real_open(path, flags, mode))
        return opened[-1]

    def close(descriptor: int) -> None:
        closed.append(descriptor)
        real_close(descriptor)

    monkeypatch.setattr(os, "open", open_few)
    monkeypatch.setattr(os, "close", close)
    with pytest.raises(LaunchError) as caught:
        LogFiles(str(tmp_path), "job", 0, 700, print)

    assert str(caught.value) == (
        "cannot open the logs of 700 instances: Too many open files; raise the limit with `ulimit -n`"
    )
    assert closed == opened


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

    with pytest.raises(PlanError, match="another user" if kind == "link" else "No such device"):
        LogFiles(str(tmp_path / "logs"), "job", 0, 1, print)
    assert (tmp_path / "precious").read_text() == "secret"
