"""The logs of an attempt, where a process cannot easily show what happens to them."""

import os
from pathlib import Path

import pytest

from poprun.errors import LaunchError
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

    def open_few(path: str, flags: int, mode: int) -> int:
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
