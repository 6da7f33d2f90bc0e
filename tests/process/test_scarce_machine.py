"""Machines that lack something: files, processes, /proc, /dev/null, the loopback interface. One clear line each.

Holds poprun.launch.process.limits and poprun.launch.process.machine_evidence.
Holds poprun.errors.
"""

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.running import Finished, MpiEnvironment, Poprun, run

NOBODY = "23456"
"""A user without processes of its own: root is exempt from limits on their number."""


def own_errors(finished: Finished) -> list[str]:
    """The lines of poprun's that begin an error; nothing of ours may stand there beside them."""
    assert "Traceback" not in finished.err
    return [line for line in finished.told.splitlines() if line.startswith("[E]")]


def limited(limit: str, command: list[str]) -> list[str]:
    """The argv that runs ``command`` with a limit, in the words of bash."""
    return ["bash", "-c", f'ulimit {limit} && exec "$@"', "sh", *command]


@pytest.fixture
def without() -> list[str]:
    """The beginning of an argv that runs a script of the shell where it may unmount what it likes."""
    if os.getuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("only root may have file systems and networks of its own, by unshare")
    return ["unshare", "--mount", "--net", "sh", "-c"]


def test_poprun_raises_its_own_limit_and_not_that_of_the_programs(launcher: Poprun) -> None:
    """Four instances need more than 20 files: poprun takes what it may, a program what its user has."""
    finished = run(
        limited("-S -n 20", launcher.command("-n", "4", "--no-tag-output", "sh", "-c", "ulimit -S -n"))
    ).succeeded()

    assert finished.lines == ["20"] * 4


def test_too_few_open_files_are_named_before_anything_starts(launcher: Poprun) -> None:
    """Also where an MPI runtime would be asked for its version, and could not answer."""
    for limit, who in (("10", "poprun needs"), ("16", "2 instances need")):
        finished = run(limited(f"-n {limit}", launcher.command("-n", "2", "true")))

        assert finished.code == 70
        assert own_errors(finished)[0].startswith(f"[E] too many open files: {who} at least ")


def test_a_runtime_that_has_too_few_files_is_not_called_a_killed_shim(mpi: MpiEnvironment) -> None:
    """Poprun has enough for itself; what the runtime prints is put into words."""
    options, limit = (
        (("-n", "8", "--mpi-global-args=-prepend-rank"), 38) if mpi.name == "mpich" else (("-n", "4"), 28)
    )
    command = Poprun(python=mpi.python, options=("--launcher", "mpi")).command(*options, "true")
    finished = run(limited(f"-n {limit}", command))

    assert finished.code == 70
    assert "too many open files: raise the limit with `ulimit -n`" in own_errors(finished)[0] + finished.told
    assert "PMIX" not in finished.err
    assert "HYD" not in finished.err


@pytest.fixture
def as_nobody() -> list[str]:
    """The beginning of an argv that runs the rest as a user who may read all files and has no processes."""
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root may become another user, by setpriv")
    rights = ("--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search")
    return ["setpriv", "--reuid", NOBODY, "--regid", NOBODY, "--clear-groups", *rights]


@pytest.mark.parametrize("most", [1, 3, 6, 7])
def test_too_few_processes_are_named(as_nobody: list[str], most: int) -> None:
    """Whatever the process is that cannot be: a shim, its agent, poprun's own thread, or a program."""
    command = Poprun().command("--launcher", "local", "-n", "4", "true")
    finished = run([*as_nobody, *limited(f"-u {most}", command)])

    assert finished.code == 70
    assert "too many processes: raise the limit with `ulimit -u`" in own_errors(finished)[0]


def test_too_few_processes_for_a_runtime(as_nobody: list[str], mpi: MpiEnvironment) -> None:
    """Open MPI cannot start its own thread then."""
    command = Poprun(python=mpi.python).command("--launcher", "mpi", "-n", "4", "true")
    finished = run([*as_nobody, *limited("-u 3", command)])

    assert finished.code == 70
    assert "too many processes: raise the limit with `ulimit -u`" in own_errors(finished)[0]


@pytest.mark.parametrize("most", [20_000, 24_000, 28_000])
def test_too_little_address_space_is_no_lack_of_processes(launcher: Poprun, most: int) -> None:
    """Whatever needs it: a library, the stack of a thread. Where there is enough, the job runs."""
    finished = run(limited(f"-v {most}", launcher.command("-n", "2", "true")))

    assert finished.code in (0, 70)
    assert finished.code == 0 or "too little address space or memory: raise `ulimit -v`" in own_errors(finished)[0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("mount -t tmpfs none /proc", "there is no /proc, in which poprun finds the processes of a job"),
        ("mount -t tmpfs none /dev", "/dev/null cannot be used (No such file or directory)"),
    ],
)
def test_what_the_system_must_have(without: list[str], change: str, said: str) -> None:
    """A container that was made by hand may lack it."""
    for words in (("-n", "2", "true"), ("-n", "1", "true"), ("--doctor",)):
        finished = run([*without, f'{change} && exec "$@"', "sh", *Poprun().command(*words)])

        assert finished.code == 70
        assert said in own_errors(finished)[0]
        assert len(finished.err.splitlines()) == 1


def test_a_pool_on_a_read_only_file_system(without: list[str], tmp_path: Path) -> None:
    """It is not called another user's, whether it is there or would be made."""
    script = (
        'mount -t tmpfs none "$1" && mkdir -m 1777 "$1/pool" && mount -o remount,ro "$1" && shift && exec "$@"'
    )
    for pool in ("pool", "new"):
        words = ("--pool", str(tmp_path / pool), "--ipus-per-host", "4", "-n", "2", "true")
        finished = run([*without, script, "sh", str(tmp_path), *Poprun().command(*words)])

        assert finished.code == 74
        assert "read-only file system" in own_errors(finished)[0].lower()
        assert "POPRUN_POOL" in own_errors(finished)[0]


def test_the_monitor_without_proc(without: list[str]) -> None:
    """There jobs are found: one line that says so."""
    top = Path(sys.executable).with_name("poprun-top")
    finished = run([*without, 'mount -t tmpfs none /proc && exec "$@"', "sh", str(top)])

    assert finished.code == 1
    assert finished.err == "poprun-top: error: no jobs can be found: /proc/net/unix: No such file or directory\n"


def test_a_loopback_interface_that_is_down_is_told_at_once(without: list[str]) -> None:
    """A program that talks to nobody runs all the same."""
    finished = run([*without, 'exec "$@"', "sh", *Poprun().command("-n", "2", "true")]).succeeded()

    assert "[W] the loopback address 127.0.0.1, at which instances connect, cannot be reached" in finished.told
    assert "ip link set lo up" in finished.told
