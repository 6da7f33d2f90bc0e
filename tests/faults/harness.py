"""Run one cell of the matrix: a launcher, a fault, real processes; and say what came of it."""

import contextlib
import os
import random
import re
import select
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from popdist.ground.contract import JOB_ID
from tests import leftovers
from tests.faults.catalogue import PATIENCE_SECONDS, Fault, Moment, Step, Target
from tests.faults.contestants import Contestant
from tests.faults.outcome import Outcome
from tests.faults.targets import find_target
from tests.process.endings import last_note_seconds, mapped_files, num_notes, write_program
from tests.running import DEADLINE_SECONDS

_FIRST_MOMENTS_SECONDS = 0.6
"""How long a start lasts: a random moment lies within."""

_BURIAL_SECONDS = 5.0
"""What the processes of others than poprun get to end when nobody is left to wait for them."""

_FIRST_SECONDS = 0.05

_LOST = "Exception ignored in"
"""Python's words when it has lost a Ctrl-C before poprun's first line ran: then it is pressed again."""

_FEWEST, _MOST = {"-n": 5, "-u": 2}, {"-n": 48, "-u": 24}
"""How few, and how many, open files or processes poprun may have then; Python needs the fewest."""

_USERS = (30_000, 60_000)
"""Numbers of users that have no processes."""

_JOB_ID = "faults"

_NAMED = re.compile(r"^\S+ \d+ POPRUN \[E\] instance (\d+) failed first", re.MULTILINE)


def run_cell(contestant: Contestant, fault: Fault, size: int, chance: random.Random) -> Outcome:
    """Run ``size`` processes under a launcher into a fault, and count what is left; that is removed then.

    Args:
        contestant: The launcher.
        fault: What goes wrong.
        size: Number of processes; at least 2.
        chance: Chooses random moments and victims.
    """
    token = uuid.uuid4().hex
    folder = Path(tempfile.mkdtemp(prefix="fault-"))
    try:
        command = _command(contestant, fault, size, folder, chance)
        with _started(contestant, fault, command, folder, token) as process:
            began = time.monotonic()
            acted = _act(process, fault, size, folder, chance)
            code, ended = _await_end(process, DEADLINE_SECONDS if contestant.is_poprun else PATIENCE_SECONDS)
        survivors = _survivors(token, fault, contestant, code)
        if fault.kills_launcher:
            ended = time.monotonic()
        failed = max(last_note_seconds(folder, "failed") or 0.0, acted or 0.0) or began
        left = [file for file in mapped_files(folder) if file.exists()]
        err = (folder / "err").read_text(errors="backslashreplace")
        named = _NAMED.search(err)
        return Outcome(
            contestant=contestant.name,
            fault=fault,
            code=code,
            named=int(named[1]) if named else None,
            seconds=ended - failed,
            survivors=tuple(map(leftovers.describe, survivors)),
            memory=tuple(sorted(map(str, left))),
            sockets=tuple(_sockets_of(process.pid)),
            err=err,
        )
    finally:
        leftovers.kill_processes_of(token)
        leftovers.wait_until_none(lambda: leftovers.processes_of(token))
        for file in mapped_files(folder):
            file.unlink(missing_ok=True)
        shutil.rmtree(folder)


def _command(contestant: Contestant, fault: Fault, size: int, folder: Path, chance: random.Random) -> list[str]:
    """The argv that starts the processes; where something is scarce, as a user whom limits bind, with one."""
    log_options = _full_logs(folder) if fault.has_full_disk else ()
    program = write_program(folder, fault.program)
    if not fault.scarce:
        return contestant.command(size, program, log_options)
    most = chance.randint(_FEWEST[fault.scarce], _MOST[fault.scarce])
    shell = ("sh", "-c", 'exec "$@"', "sh")  # access(2) knows nothing of a user who may read what root may
    limited = ["bash", "-c", f'ulimit {fault.scarce} {most} && exec "$@"', "bash"]
    command = [*limited, *contestant.command(size, program, shell)]
    if os.getuid() != 0:
        return command
    for place in (folder, folder / "meeting"):
        place.chmod(0o777)
    user = str(chance.randint(*_USERS))
    rights = ("--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search")
    return ["setpriv", "--reuid", user, "--regid", user, "--clear-groups", *rights, *command]


@contextlib.contextmanager
def _started(
    contestant: Contestant, fault: Fault, command: list[str], folder: Path, token: str
) -> Iterator["subprocess.Popen[bytes]"]:
    """The launcher in a session of its own, as below a terminal; its output goes to files, or to a reader."""
    has_reader = any(step.target is Target.READER for step in fault.steps)
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        process = subprocess.Popen(
            command,
            env=os.environ | contestant.environment | {leftovers.TOKEN_VARIABLE: token, JOB_ID: _JOB_ID},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if has_reader else out,
            stderr=err,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _full_logs(folder: Path) -> tuple[str, ...]:
    """Options that have the output kept, where instance 1's log is on a full disk; only root can make one."""
    logs = folder / _JOB_ID / "0"
    logs.mkdir(parents=True)
    full = Path("/dev/full").stat()
    os.mknod(logs / "instance-1.out.log", full.st_mode, full.st_rdev)  # no link below the folder is followed
    return "--log-dir", str(folder)


def _act(
    process: "subprocess.Popen[bytes]", fault: Fault, size: int, folder: Path, chance: random.Random
) -> float | None:
    """Take the fault's steps; monotonic time of the last, or None when there is none."""
    acted = None
    for step in fault.steps:
        if step.when is Moment.RANDOM and step.target is Target.TERMINAL:
            _wait_until_in_charge(process.pid)
        _wait_for_moment(step.when, size, folder, chance)
        acted = _take(process, step, chance)
        if step.when is Moment.FIRST and _is_lost(process, folder):
            acted = _take(process, step, chance)
    return acted


def _is_lost(process: "subprocess.Popen[bytes]", folder: Path) -> bool:
    """Whether Python has lost a Ctrl-C; it says so at once."""
    said = folder / "err"
    _wait_until(lambda: _has_ended(process.pid) or said.stat().st_size > 0, PATIENCE_SECONDS)
    return not _has_ended(process.pid) and _LOST in said.read_text(errors="backslashreplace")


def _has_ended(child: int) -> bool:
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _wait_for_moment(when: Moment, size: int, folder: Path, chance: random.Random) -> None:
    if when in (Moment.RANDOM, Moment.FIRST):
        time.sleep(chance.uniform(0.0, _FIRST_MOMENTS_SECONDS if when is Moment.RANDOM else _FIRST_SECONDS))
        return
    number = size if when is Moment.READY else 1
    _wait_until(lambda: num_notes(folder, when.value) >= number)


def _wait_until_in_charge(pid: int) -> None:
    """Until Ctrl-C is poprun's to handle: Python catches it at first, poprun does not before there is a job."""
    _wait_until(lambda: _catches_interrupts(pid))
    _wait_until(lambda: not _catches_interrupts(pid) or _sockets_of(pid))


def _catches_interrupts(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (signal.SIGINT - 1) & 1)


def _wait_until(condition: Callable[[], object], timeout_seconds: float = DEADLINE_SECONDS) -> None:
    """Poll until ``condition`` holds, or the time is over: the outcome then says what is wrong."""
    deadline = time.monotonic() + timeout_seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)


def _take(process: "subprocess.Popen[bytes]", step: Step, chance: random.Random) -> float:
    """Do what ``step`` says; monotonic time just before."""
    if step.target is Target.READER and process.stdout is not None:
        process.stdout.read(1)
        acted = time.monotonic()
        process.stdout.close()
        return acted
    if step.target in (Target.LAUNCHER, Target.TERMINAL):
        acted = time.monotonic()
        (os.kill if step.target is Target.LAUNCHER else os.killpg)(process.pid, step.signum)
        return acted
    victims: list[psutil.Process] = []

    def hit() -> bool:
        victim = find_target(process.pid, step.target, chance)
        with contextlib.suppress(psutil.NoSuchProcess):
            if victim is not None:
                victims.append(victim)
                victim.send_signal(step.signum)
                return True
        return False

    _wait_until(hit)
    return time.monotonic()


def _await_end(process: "subprocess.Popen[bytes]", timeout_seconds: float) -> tuple[int | None, float]:
    """The exit code, or None at the deadline; and the monotonic time."""
    poll = select.poll()
    descriptor = os.pidfd_open(process.pid)
    poll.register(descriptor, select.POLLIN)
    has_ended = bool(poll.poll(timeout_seconds * 1000))
    ended = time.monotonic()
    os.close(descriptor)
    return (process.wait() if has_ended else None), ended


def _survivors(token: str, fault: Fault, contestant: Contestant, code: int | None) -> list[psutil.Process]:
    """Who lives on. When poprun has ended, nobody may; others, and those of a poprun that died, get some time."""
    is_buried_by_none = fault.kills_launcher or not contestant.is_poprun or (code is not None and code < 0)
    if code is not None and is_buried_by_none:
        seconds = DEADLINE_SECONDS if contestant.is_poprun else _BURIAL_SECONDS
        _wait_until(lambda: not leftovers.processes_of(token), seconds)
    return leftovers.processes_of(token)


def _sockets_of(pid: int) -> list[str]:
    """The control sockets of a poprun that has ended, which no process may hold any more."""
    lines = Path("/proc/net/unix").read_text(encoding="utf-8").splitlines()
    return [line.split()[-1] for line in lines if f"@poprun-{pid}-" in line]
