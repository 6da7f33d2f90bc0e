"""``--log-dir``: what every program wrote, byte for byte, in a file of its own."""

import hashlib
import sys
from pathlib import Path

import pytest

from tests.process.endings import write_program
from tests.running import Poprun, run

JOB = {"POPDIST_JOB_ID": "trial"}

FLOOD = """
import hashlib, os
rank, num_bytes = int(os.environ["RANK"]), 8_000_000
lines = b"".join(b"%d %d %s\\n" % (rank, n, b"x" * (n * (rank + 3) % 150)) for n in range(10_000))
flood = (lines * (num_bytes // len(lines) + 1))[: num_bytes - 1] + b"\\n"
view = memoryview(flood)
while view:
    view = view[os.write(1, view) :]
print(rank, hashlib.sha256(flood).hexdigest(), file=open(f"sum-{rank}", "w"))
"""


def log(folder: Path, instance: int, stream: str = "out", attempt: int = 0) -> Path:
    """A log of the job ``trial`` below ``folder``."""
    return folder / "trial" / str(attempt) / f"instance-{instance}.{stream}.log"


def test_each_stream_has_its_log(launcher: Poprun, tmp_path: Path) -> None:
    """Without tags, of all instances, shown or not; the last line is as the program left it."""
    text = r"import os, sys; print('a', os.environ['RANK']); sys.stderr.write('\r50%\r100%')"
    words = ("-n", "3", "--log-dir", "logs", "--only-output-from-instance", "1", sys.executable, "-c", text)

    finished = launcher(*words, env=JOB, cwd=tmp_path).succeeded()

    assert finished.out == "[1] a 1\n"
    for rank in range(3):
        assert log(tmp_path / "logs", rank).read_bytes() == b"a %d\n" % rank
        assert log(tmp_path / "logs", rank, "err").read_bytes() == b"\r50%\r100%"


def test_a_flood_arrives_byte_for_byte(poprun: Poprun, tmp_path: Path) -> None:
    """64 MB of eight instances, both in the logs and behind their tags in poprun's own output."""
    command = poprun.command("-n", "8", "--launcher=local", "--log-dir=logs", sys.executable, "-c", FLOOD)
    run(["sh", "-c", '"$@" > out', "sh", *command], env=JOB, cwd=tmp_path).succeeded()

    shown = {rank: hashlib.sha256() for rank in range(8)}
    with (tmp_path / "out").open("rb") as lines:
        for line in lines:
            tag, _, text = line.partition(b"] ")
            shown[int(tag.removeprefix(b"["))].update(text)
    for rank in range(8):
        wanted = (tmp_path / f"sum-{rank}").read_text().split()[1]
        assert hashlib.sha256(log(tmp_path / "logs", rank).read_bytes()).hexdigest() == wanted
        assert shown[rank].hexdigest() == wanted


def test_one_instance_is_shown_as_it_writes(launcher: Poprun, tmp_path: Path) -> None:
    """Its bytes are not held back until a line is whole; it reads the terminal's input, and has no terminal."""
    text = "import os, sys; sys.stdout.write('name? '); print(input() + '!', os.isatty(1), end='')"
    finished = launcher("--log-dir", str(tmp_path), sys.executable, "-c", text, stdin="me\n", env=JOB)

    assert finished.succeeded().out == "name? me! False"
    assert log(tmp_path, 0).read_text() == "name? me! False"


def test_the_last_words_of_a_killed_program_are_shown_and_logged(launcher: Poprun, tmp_path: Path) -> None:
    """Also when a process that it left behind still holds its output."""
    text = """
import os, subprocess, sys
if os.environ["RANK"] == "0":
    subprocess.Popen(["sleep", "60"], start_new_session=True)
    os.write(1, b"half a li")
    os.kill(os.getpid(), 9)
sys.stdin.read()
"""
    finished = launcher("-n", "2", "--log-dir", str(tmp_path), sys.executable, "-c", text, env=JOB)

    assert finished.code == 137
    assert finished.out == "[0] half a li\n"
    assert log(tmp_path, 0).read_bytes() == b"half a li"


def test_every_attempt_has_its_logs(poprun: Poprun, tmp_path: Path) -> None:
    """Numbered from 0."""
    text = "import os, sys; count = os.environ['POPDIST_RESTART_COUNT']; print(count); sys.exit(count == '0')"
    words = ("--launcher=local", "--max-restarts=1", "--log-dir", str(tmp_path), sys.executable, "-c", text)

    poprun(*words, env=JOB).succeeded()

    assert [log(tmp_path, 0, attempt=attempt).read_text() for attempt in range(2)] == ["0\n", "1\n"]


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/nowhere"])
def test_a_folder_that_cannot_be_made_is_told_before_the_start(poprun: Poprun, tmp_path: Path, place: str) -> None:
    """Nothing runs, and one sentence says what to do."""
    (tmp_path / "file").touch()
    program = write_program(tmp_path, "open('ran', 'w')")

    finished = poprun("-n", "2", "--launcher=local", "--log-dir", place, *program, cwd=tmp_path)

    assert finished.code == 2
    assert finished.err.count("\n") == 1
    assert f"--log-dir {tmp_path / place}: cannot make {tmp_path / place}" in finished.err
    assert "name a directory that you may write to" in finished.err
    assert not (tmp_path / "ran").exists()


def test_a_job_whose_name_is_a_path_has_no_logs(poprun: Poprun, tmp_path: Path) -> None:
    """They would lie anywhere."""
    finished = poprun("--log-dir", str(tmp_path), "true", env={"POPDIST_JOB_ID": "../x"})

    assert finished.code == 2
    assert "a job called '../x' can have no folder: set another POPDIST_JOB_ID" in finished.err


def test_a_limit_on_files_cuts_the_logs_only(poprun: Poprun, tmp_path: Path) -> None:
    """Under ``ulimit -f`` each log ends at the limit, and the programs notice nothing."""
    command = poprun.command("-n", "2", "--launcher=local", "--log-dir", str(tmp_path), sys.executable, "-c")
    text = "import os; os.write(1, (b'x' * 99 + b'\\n') * 2000)"
    finished = run(["bash", "-c", 'ulimit -f 8; "$@"', "bash", *command, text], env=JOB).succeeded()

    assert finished.out.count("x" * 99 + "\n") == 4000
    assert "is cut off: File too large; the job goes on without it" in finished.err
    assert "[W] 2 logs in " in finished.told
    assert [log(tmp_path, rank).stat().st_size for rank in range(2)] == [8192, 8192]
