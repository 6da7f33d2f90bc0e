"""Looking at running jobs, from outside and with ``--monitor``.

Holds poprun.observe.show.monitor.top.
"""

import os
import pty
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from poprun.launch.messages.control import abstract_address, encode
from tests.process.endings import has_met, write_program
from tests.process.test_control_socket import control_socket
from tests.process.test_endings import wait_until
from tests.running import DEADLINE_SECONDS, Finished, Poprun, run

TOP = [sys.executable, "-c", "from poprun.observe.show.monitor.top import main; main()"]


def look(*words: str) -> Finished:
    """What ``poprun-top`` shows, on a wide screen."""
    return run([*TOP, *words], env={"COLUMNS": "120"})


def test_a_running_job_is_shown(poprun: Poprun, tmp_path: Path) -> None:
    """By its process id or its name; who looks leaves it as it is."""
    words = write_program(tmp_path, "print('warming up', file=sys.stderr)\nready()\ntime.sleep(600)")
    with poprun.started("-n", "2", *words, env={"POPDIST_JOB_ID": "mine"}) as process:
        wait_until(lambda: has_met(tmp_path, 2))
        wait_until(lambda: "warming up" in look(str(process.pid)).out)
        by_name = look("mine").succeeded().out
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=DEADLINE_SECONDS)

    assert f"poprun {process.pid}  job mine" in by_name
    assert "running for" in by_name
    assert [line.split()[:2] for line in by_name.splitlines() if "warming up" in line] == [
        ["0", "running"],
        ["1", "running"],
    ]
    assert process.returncode == 143


def test_a_job_that_is_not_there() -> None:
    """One sentence, and no traceback."""
    finished = look("no-such-job")

    assert (finished.code, finished.err) == (1, "poprun-top: error: no job no-such-job is running here\n")


def test_a_job_in_a_container_has_the_number_that_it_has_here(poprun: Poprun, tmp_path: Path) -> None:
    """A number of its own would be another process's here, and SIGQUIT would go there."""
    if os.getuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("only root may have process ids of its own, by unshare")
    contained = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    words = write_program(tmp_path, "ready()\ntime.sleep(600)")
    with subprocess.Popen(
        [*contained, *poprun.command(*words)], env={**os.environ, "POPDIST_JOB_ID": "boxed"}
    ) as box:
        wait_until(lambda: has_met(tmp_path, 1))
        shown = look("boxed").succeeded().out
        number = int(Path(f"/proc/{box.pid}/task/{box.pid}/children").read_text())
        inside = run([*contained, *TOP, "boxed"])
        box.kill()

    assert shown.startswith(f"poprun {number}  job boxed")
    assert inside.err == "poprun-top: error: no job boxed is running here\n"


def test_a_monitor_that_does_not_read_is_let_go(poprun: Poprun, tmp_path: Path) -> None:
    """The job is not held up by it."""
    words = write_program(tmp_path, "ready()\nsys.stdin.read()")
    with poprun.started("-n", "2", *words) as process, socket.socket(socket.AF_UNIX) as deaf:
        wait_until(lambda: has_met(tmp_path, 2))
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        deaf.connect(abstract_address(control_socket(process.pid)))
        deaf.sendall(encode({"event": "view"}))
        process.communicate("", timeout=DEADLINE_SECONDS)

    assert process.returncode == 0


def test_monitor_needs_a_terminal(poprun: Poprun) -> None:
    """A file or a pipe cannot be drawn on."""
    finished = poprun("--monitor", "--", "true")

    assert finished.code == 2
    assert "--monitor draws on a terminal" in finished.err


def test_monitor_draws_in_place_of_the_lines_and_wipes_itself_off(poprun: Poprun, tmp_path: Path) -> None:
    """What remains on the terminal is the report of a failure; no module of the working directory is imported."""
    for name in ("poprun", "popdist", "click", "rich"):
        (tmp_path / f"{name}.py").write_text("import pathlib; pathlib.Path('was_imported').touch()")
    text = "import os, sys, time; print('a line', file=sys.stderr); time.sleep(2); sys.exit(3)"
    ours, theirs = pty.openpty()
    command = poprun.command("--monitor", "--launcher=local", "-n", "2", sys.executable, "-P", "-c", text)
    command.insert(1, "-P")
    with subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=tmp_path,
        env=dict(os.environ) | {"COLUMNS": "100", "TERM": "xterm"},
    ) as process:
        os.close(theirs)
        seen = b""
        try:
            while chunk := os.read(ours, 4096):
                seen += chunk
        except OSError:  # the last process has closed the terminal
            pass
        process.wait(DEADLINE_SECONDS)
    os.close(ours)
    screen = seen.decode(errors="replace")

    assert not (tmp_path / "was_imported").exists()
    assert process.returncode == 3
    assert "2 instances" in screen
    assert "[0] a line" not in screen.partition("failed first")[0]
    assert screen.rindex("\x1b[?25h") < screen.index("failed first")


@contextmanager
def on_terminal(terminal: int, *command: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A command on a terminal; it is killed when the test fails, which would wait for its end otherwise."""
    environ = dict(os.environ) | {"COLUMNS": "100", "TERM": "xterm"}
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=environ) as process:
        try:
            yield process
        except BaseException:
            process.kill()
            raise


def read_terminal(descriptor: int, text: str) -> str:
    """What is written to a terminal until ``text`` stands in it."""
    seen = b""
    while text.encode() not in seen:
        assert select.select([descriptor], [], [], DEADLINE_SECONDS)[0], f"{text!r} is not in {seen!r}"
        try:
            seen += os.read(descriptor, 4096)
        except OSError:  # the last process has closed it
            pytest.fail(f"{text!r} is not in {seen!r}")
    return seen.decode(errors="replace")


def test_the_live_view_shows_stacks_above_the_table(poprun: Poprun, tmp_path: Path) -> None:
    """At SIGQUIT, in the monitor of a job's own terminal and in that of another one; each goes on drawing."""
    program = tmp_path / "nap.py"
    program.write_text("import time\ntime.sleep(600)\n")
    place = f'File "{program}", line 2'
    (ours, theirs), (top_ours, top_theirs) = pty.openpty(), pty.openpty()
    command = poprun.command("--monitor", "--launcher=local", "-n", "2", sys.executable, str(program))
    with on_terminal(theirs, *command) as job:
        read_terminal(ours, "running for")
        with on_terminal(top_theirs, str(poprun.python.with_name("poprun-top")), str(job.pid)) as other:
            read_terminal(top_ours, "running for")
            other.send_signal(signal.SIGQUIT)
            for terminal in (ours, top_ours):
                shown = read_terminal(terminal, place)
                assert "where the instances stand" in shown
                read_terminal(terminal, "running for")
            other.send_signal(signal.SIGINT)
            assert other.wait(DEADLINE_SECONDS) == 0
        job.send_signal(signal.SIGINT)
        assert job.wait(DEADLINE_SECONDS) == 130
    for descriptor in (ours, theirs, top_ours, top_theirs):
        os.close(descriptor)


def test_one_of_several_jobs_is_chosen_by_the_arrow_keys(poprun: Poprun) -> None:
    """On a terminal; elsewhere the jobs are listed, and one is to be named. Jobs of others may run, too."""
    words = ("--launcher=local", "sleep", "600")
    ours, theirs = pty.openpty()
    with poprun.started(*words) as first, poprun.started(*words) as second:
        jobs = sorted((first.pid, second.pid))
        wait_until(lambda: all(f"  {pid}  " in look().out for pid in jobs))
        with on_terminal(theirs, str(poprun.python.with_name("poprun-top"))) as chooser:
            listed = re.findall(r"(.) (\d+)  ", read_terminal(ours, f"  {jobs[1]}  "))
            assert [row for row, (mark, _) in enumerate(listed) if mark == ">"] == [0]
            os.write(ours, b"\x1b[B" * [int(pid) for _, pid in listed].index(jobs[1]))
            read_terminal(ours, f"> {jobs[1]}")
            os.write(ours, b"\r")
            assert str(jobs[1]) in read_terminal(ours, "running for")
            chooser.send_signal(signal.SIGINT)
            assert chooser.wait(DEADLINE_SECONDS) == 0
        for job in (first, second):
            job.send_signal(signal.SIGINT)
            job.communicate(timeout=DEADLINE_SECONDS)
    os.close(ours)
    os.close(theirs)
