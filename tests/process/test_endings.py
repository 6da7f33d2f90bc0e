"""The laws of endings beside those of `tests.faults`: what is told, what may still be done, and odd starts.

Each program leaves a grandchild in a session of its own; the suite's fixtures prove after each test that nothing
of it is left.

Holds poprun.job.agents, poprun.job.launched, poprun.job.loop, poprun.job.watchers, poprun.launch.shim,
poprun.launch.start_shim and poprun.launch.start_rank_shim.
"""

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.faults.targets import bare_interpreters, named_processes
from tests.leftovers import TOKEN_VARIABLE, processes_of
from tests.process.endings import has_met, num_notes, write_program
from tests.running import DEADLINE_SECONDS, MpiEnvironment, Poprun, run, without_stamps


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll until ``condition`` holds; fail when it does not in time."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def test_the_report_shows_the_users_own_traceback(launcher: Poprun, tmp_path: Path) -> None:
    """Without anything in the program, in at most 15 lines."""
    words = write_program(tmp_path, "ready()\nif rank == 2: raise ValueError('bad batch')\ntime.sleep(600)")

    finished = launcher("-n", "4", *words)

    told = finished.told.splitlines()
    report = told[next(number for number, line in enumerate(told) if "failed first" in line) :]
    assert finished.code == 1
    assert report[0] == "[E] instance 2 failed first: exit code 1 (host localhost, replica 2)"
    assert report[1] == "  | Traceback (most recent call last):"
    assert len(report) <= 15
    assert report[-2:] == [
        "  | ValueError: bad batch",
        "  instances 0, 1 and 3   stopped by poprun: SIGTERM",
    ]


def test_a_mistake_is_told_in_few_lines(poprun: Poprun, tmp_path: Path) -> None:
    """Equal tracebacks once, calls of libraries in a line; ``-v`` and the logs have every line."""
    script = tmp_path / "train.py"
    script.write_text("import json\ndef read():\n    return json.loads('[1,')\nread()\n")
    words = ("--launcher=local", "-n2", f"--log-dir={tmp_path}/logs", sys.executable, str(script))
    short, whole = poprun(*words), poprun("-v", *words)
    logged = [path.read_text() for path in (tmp_path / "logs").rglob("*.err.log")]

    assert len(short.err.splitlines()) <= 21
    assert short.err.count("… 3 calls of Python") == 1
    assert "same traceback as instance" in short.err
    assert f'File "{script}", line 3, in read\n' in short.err
    assert "same traceback" not in whole.err
    assert whole.err.count("in raw_decode") >= 2
    assert [text.count("in raw_decode") for text in logged] == [1] * 4


def test_who_only_lost_a_peer_does_not_give_the_exit_code(launcher: Poprun, tmp_path: Path) -> None:
    """Instance 1 closes its connections, and ends half a second after instance 0, which fails because of that."""
    text = """
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
ready()
if rank == 0:
    note("lost")
    raise RuntimeError("[gloo/transport/tcp/pair.cc:555] Connection closed by peer [127.0.0.1]:4711")
wait_for("lost", 1)
first = int(open(os.path.join(meeting, "lost-0")).read().split()[1])
while os.path.exists(f"/proc/{first}"): time.sleep(0.01)
sys.exit(9 if signal.sigtimedwait({signal.SIGTERM}, 0.5) else 7)
"""
    finished = launcher("-n", "2", *write_program(tmp_path, text))

    assert finished.code == 7
    assert "instance 1 is at fault, although instance 0 ended before it: exit code 7" in finished.told


def test_one_failing_instance_does_not_hide_the_end_of_the_good_ones(launcher: Poprun, tmp_path: Path) -> None:
    """An instance that ended well before is told of as such."""
    text = """
note("ready")
if rank == 0: sys.exit(0)
wait_for("ready", size)
if rank == 1:
    first = int(open(os.path.join(meeting, "ready-0")).read().split()[1])
    while os.path.exists(f"/proc/{first}"): time.sleep(0.01)
    sys.exit(9)
time.sleep(600)
"""
    finished = launcher("-n", "3", *write_program(tmp_path, text))

    assert finished.code == 9
    assert "ended with 0" in finished.err


def test_a_program_may_save_its_work_on_sigterm(launcher: Poprun, tmp_path: Path) -> None:
    """A program that is being stopped keeps its own children until it has ended."""
    text = """
def save(*_):
    child = subprocess.run([sys.executable, "-I", "-S", "-c", f"open('{meeting}/saved-{rank}', 'w')"])
    sys.exit(child.returncode)
signal.signal(signal.SIGTERM, save)
ready()
if rank == 1: sys.exit(4)
time.sleep(600)
"""
    finished = launcher("-n", "3", *write_program(tmp_path, text))

    assert finished.code == 4
    assert {file.name for file in (tmp_path / "meeting").glob("saved-*")} == {"saved-0", "saved-2"}


def test_the_tracebacks_of_ctrl_c_are_one_line(launcher: Poprun, tmp_path: Path) -> None:
    """The logs keep them, and what a program says at Ctrl-C is shown."""
    text = """
try:
    ready()
    time.sleep(600)
finally:
    print("saved", file=sys.stderr)
"""
    words = ("--log-dir", "logs", "-n", "3", *write_program(tmp_path, text))
    with launcher.started(*words, cwd=tmp_path) as process:
        wait_until(lambda: has_met(tmp_path, 3))
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=DEADLINE_SECONDS)

    logs = "".join(file.read_text() for file in (tmp_path / "logs").rglob("*") if file.is_file())
    assert process.returncode == 130
    assert without_stamps(err).splitlines()[-1] == "[I] interrupted: instances 0 to 2"
    assert sorted(line[-6:] for line in err.splitlines() if line.startswith("[")) == [" saved"] * 3
    assert logs.count("Traceback (most recent call last):") == 3


def test_a_second_ctrl_c_kills_at_once(launcher: Poprun, tmp_path: Path) -> None:
    """Programs that ignore SIGINT and SIGTERM are gone long before their grace of ten minutes is over."""
    text = "signal.signal(signal.SIGINT, lambda *_: note('told'))\n"
    text += "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nready()\nwhile True: time.sleep(600)"

    with launcher.started("--stop-timeout", "600", "-n", "2", *write_program(tmp_path, text)) as process:
        wait_until(lambda: has_met(tmp_path, 2))
        process.send_signal(signal.SIGINT)
        wait_until(lambda: num_notes(tmp_path, "told") == 2)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=DEADLINE_SECONDS)

    assert process.returncode == 130


def test_a_missing_interpreter_is_told_as_the_shell_would(launcher: Poprun, tmp_path: Path) -> None:
    """A script whose first line names nothing that exists: 127, and the path; it is not started again."""
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)

    finished = launcher("--max-restarts", "3", "-n", "2", str(script))

    assert finished.code == 127
    assert "restart" not in finished.err
    assert f"{script} is a script for /no/such/interpreter, which is not there" in finished.err


def test_a_file_that_is_no_program(launcher: Poprun, tmp_path: Path) -> None:
    """What execve(2) calls a format error: 126, and what such a file lacks."""
    file = tmp_path / "file"
    file.write_text("echo hello\n")
    file.chmod(0o755)

    finished = launcher(str(file))

    assert finished.code == 126
    assert f"cannot run {file}: it is neither a program for this machine nor a script" in finished.err


def test_a_job_that_needs_too_many_descriptors_is_refused_and_ended() -> None:
    """What had been started by then is ended, and the user is told what to raise."""
    command = Poprun().command("--launcher", "local", "-n", "40", "sleep", "600")
    finished = run(["sh", "-c", 'ulimit -n 60 && exec "$@"', "sh", *command])

    assert finished.code == 70
    assert "ulimit -n" in finished.err
    assert "Traceback" not in finished.err


def test_words_that_the_mpi_runtime_refuses_are_shown_with_its_complaint(mpi: MpiEnvironment) -> None:
    """The job never started: 70, and the runtime's own words."""
    finished = Poprun(python=mpi.python)("--mpi-global-args", "--no-such-option", "-n", "2", "true")

    assert finished.code == 70
    assert "ended before the program" in finished.err
    assert "no-such-option" in finished.err


def youngest_of_ours(root: int, num_processes: int) -> psutil.Process:
    """The newest shim, agent or program below ``root``, as soon as there are that many."""
    family: list[psutil.Process] = []

    def has_grown() -> bool:
        sleeping = [process for process in named_processes(root, "600") if process.name() == "sleep"]
        family[:] = bare_interpreters(root) + sleeping
        return len(family) >= num_processes

    wait_until(has_grown)
    return max(family, key=lambda process: process.pid)


@pytest.mark.parametrize("num_processes", [1, 2, 3, 5, 7])
def test_whatever_is_killed_while_a_job_starts_it_ends(launcher: Poprun, num_processes: int) -> None:
    """A shim, an agent or a program, whichever came last: no waiting for it, nothing left, and no exit code 0."""
    with launcher.started("-n", "3", "sleep", "600") as process:
        youngest_of_ours(process.pid, num_processes).kill()
        process.communicate(timeout=DEADLINE_SECONDS)

    assert process.returncode > 0


KILLED = """
from poprun.__main__ import main
from poprun.launch import launchers
script = '[ -z "${PMI_RANK-$OMPI_COMM_WORLD_RANK}" ] || kill -9 $$; exec "$@"'
for name in ("SHIM_WORDS", "RANK_SHIM_WORDS"):
    setattr(launchers, name, ("sh", "-c", script, "sh", *getattr(launchers, name)))
main()
"""
"""poprun where the shims that an MPI runtime starts are killed before anybody can have seen them."""


@pytest.mark.parametrize("words", [("-n1",), ("--mpi-local-args=-wdir /", "-n2"), ("-n4",)])
def test_shims_that_nobody_has_seen_are_killed(mpi: MpiEnvironment, words: tuple[str, ...]) -> None:
    """The job ends for that reason, and not because nothing has come of its start for long."""
    finished = run([str(mpi.python), "-c", KILLED, "--launcher=mpi", *words, "sleep", "600"])

    assert finished.code == 70
    assert "the MPI runtime has started" not in finished.err


HALF_LOADED = """
import os, signal, sys

from poprun.__main__ import main
from poprun.launch.process.process_tree import own_tree

class Finder:
    def find_spec(self, name, path, target=None):
        if name == "poprun.attempts":
            while len(own_tree()) < 3:
                pass
            {act}

sys.meta_path.insert(0, Finder())
main()
"""
"""poprun to which something happens when a shim and two agents run, and the module that supervises them loads."""


@pytest.mark.parametrize(
    ("act", "code"),
    [
        ("os.kill(os.getpid(), signal.SIGINT)", 130),
        ("os.kill(os.getpid(), signal.SIGTERM)", 143),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("raise MemoryError", 70),
        ("raise OSError(24, 'Too many open files')", 70),
        ("raise ModuleNotFoundError('no module poprun.attempts')", 1),
    ],
)
def test_the_supervisor_cannot_be_loaded(launcher: Poprun, act: str, code: int) -> None:
    """No program starts, and poprun ends last, unless it is killed."""
    text = HALF_LOADED.format(act=act)

    finished = run([str(launcher.python), "-c", text, *launcher.options, "-n", "2", "echo", "ran"])
    left = processes_of(os.environ[TOKEN_VARIABLE])

    assert (finished.code, finished.out) == (code, "")
    assert code < 0 or left == []


def write_script(file: Path, text: str) -> None:
    """Write a shell script that can be executed."""
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


@pytest.mark.parametrize("mpi", ["mpich"], indirect=True)
def test_a_script_that_starts_the_mpi_runtime_may_take_its_time(mpi: MpiEnvironment, tmp_path: Path) -> None:
    """The children that it has are no shims; when it ends before a shim has come, the job ends, too."""
    for launcher in mpi.python.parent.glob("mpiexec*"):
        write_script(tmp_path / launcher.name, f'[ "$1" = --version ] || sleep 1.2\n"{launcher}" "$@"')
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}

    finished = Poprun()("--launcher=mpi", "--no-tag-output", "-n2", "echo", "ran", env=env)
    killed = run([str(mpi.python), "-c", KILLED, "--launcher=mpi", "-n1", "true"], env=env)

    assert finished.succeeded().lines == ["ran", "ran"]
    assert killed.code == 70
    assert "the MPI runtime has started" not in killed.err


@pytest.mark.parametrize("mpi", ["mpich"], indirect=True)
def test_hydras_proxy_is_killed_before_it_has_started_shims(mpi: MpiEnvironment, tmp_path: Path) -> None:
    """It is all that Hydra starts here, and Hydra waits on for ever."""
    shutil.copy(mpi.mpiexec, tmp_path)
    write_script(tmp_path / "hydra_pmi_proxy", "kill -9 $$")

    finished = Poprun()("--launcher=mpi", "-n2", "true", env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})

    assert finished.code == 70
    assert "killed before it had reported" in finished.err


def test_the_shim_that_forks_all_agents_is_killed(launcher: Poprun, tmp_path: Path) -> None:
    """It is poprun's own child, under MPI on one machine, too: the job ends, and says how its parent did."""
    with launcher.started("-n", "2", *write_program(tmp_path, "ready()\ntime.sleep(600)")) as process:
        wait_until(lambda: has_met(tmp_path, 2))
        (host_shim,) = [one for one in bare_interpreters(process.pid) if one.ppid() == process.pid]
        host_shim.kill()
        process.communicate(timeout=DEADLINE_SECONDS)

    assert process.returncode == 137


def test_what_is_stopped_from_outside_obeys(launcher: Poprun, tmp_path: Path) -> None:
    """Shims, agents and the MPI launcher are continued: none keeps the job for its grace of ten minutes."""
    with launcher.started("--stop-timeout=600", "-n2", *write_program(tmp_path, "ready()\nhang()")) as process:
        wait_until(lambda: has_met(tmp_path, 2))
        launchers = psutil.Process(process.pid).children()
        for one in {*launchers, *bare_interpreters(process.pid)}:
            one.suspend()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=DEADLINE_SECONDS)

    assert process.returncode == 143


def test_ctrl_z_stops_the_programs_too(launcher: Poprun, tmp_path: Path) -> None:
    """A suspended job neither computes nor reads the terminal; ``fg`` continues all of it."""
    with launcher.started("-n", "2", *write_program(tmp_path, "ready()\ntime.sleep(600)")) as process:
        wait_until(lambda: has_met(tmp_path, 2))
        programs = named_processes(process.pid, "program.py")
        everyone = [psutil.Process(process.pid), *programs]
        process.send_signal(signal.SIGTSTP)
        wait_until(lambda: all(one.status() == psutil.STATUS_STOPPED for one in everyone))
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: all(one.status() != psutil.STATUS_STOPPED for one in everyone))
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=DEADLINE_SECONDS)

    assert process.returncode == 143
