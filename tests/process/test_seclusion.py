"""What a running job shows to others: no listener beyond loopback, no secret, no descriptor that is not meant."""

import os
import re
import sys
from pathlib import Path

import psutil
import pytest

from tests.process.endings import has_met, write_program
from tests.process.test_endings import wait_until
from tests.running import DEADLINE_SECONDS, Poprun, run

RUNTIMES = ("mpiexec", "mpirun", "prterun", "hydra_pmi_proxy")
"""The MPI runtimes' own programs: what these listen on is not ours to close."""

JOINS = "import popdist\npopdist.init()\nready()\nhang()"

DESCRIPTORS = """
import os
named = {value for name, value in os.environ.items() if name == "PMI_FD" or name.endswith("_DESCRIPTOR")}
found = [one for one in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{one}")]
print("open", sorted(set(found) - named - {"0", "1", "2"}))
"""


def family(root: int) -> list[psutil.Process]:
    """The process ``root`` and everything below it."""
    return [psutil.Process(root), *psutil.Process(root).children(recursive=True)]


def open_listeners(process: psutil.Process) -> set[str]:
    """The addresses beyond loopback at which ``process`` listens."""
    addresses = {
        str(connection.laddr.ip)
        for connection in process.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    return {address for address in addresses if not re.match(r"127\.|::1$|::ffff:127\.", address)}


def test_only_the_mpi_runtime_listens_beyond_loopback(launcher: Poprun, tmp_path: Path) -> None:
    """Not poprun, its agents or ``popdist.init()``; and none holds what the runtime listens on."""
    words = write_program(tmp_path, JOINS)
    with launcher.started("-n", "2", *words) as process:
        wait_until(lambda: has_met(tmp_path, 2))
        ours = [one for one in family(process.pid) if one.name() not in RUNTIMES]
        listening = [(one.cmdline(), found) for one in ours if (found := open_listeners(one))]
        process.terminate()
        process.communicate(timeout=DEADLINE_SECONDS)

    assert len(ours) >= 7
    assert listening == []


def test_no_secret_stands_in_a_command_line(launcher: Poprun, tmp_path: Path) -> None:
    """Neither one of the user's environment, nor the names and keys by which agents find poprun."""
    secret = "correct-horse-battery-staple"  # noqa: S105 - it is the one that must not be seen
    words = write_program(tmp_path, "ready()\nhang()")
    with launcher.started(
        "-n", "2", *words, env={"API_TOKEN": secret, "POPDIST_JOB_ID": "job-of-mine"}
    ) as process:
        wait_until(lambda: has_met(tmp_path, 2))
        commands = [" ".join(one.cmdline()) for one in family(process.pid)]
        ours = {
            value
            for one in family(process.pid)
            for name, value in one.environ().items()
            if name.startswith("POPRUN_CONTROL") and value
        }
        process.terminate()
        process.communicate(timeout=DEADLINE_SECONDS)

    assert ours
    assert [command for command in commands for word in (secret, *ours) if word in command] == []


def test_programs_inherit_no_descriptor_but_their_own(launcher: Poprun) -> None:
    """Neither the caller's, nor poprun's, nor the MPI runtime's: their streams, and what a variable names."""
    command = launcher.command("-n", "2", "--tag-output=no", sys.executable, "-S", "-c", DESCRIPTORS)
    finished = run(["sh", "-c", 'exec 9< /dev/null; exec "$@"', "sh", *command]).succeeded()

    assert finished.lines == ["open []"] * 2


@pytest.mark.parametrize("program", ["exit 3", "echo all is lost >&2; kill -9 $$"])
def test_a_large_job_that_fails_is_told_of_in_fifteen_lines(program: str) -> None:
    """However many instances fail together."""
    local = Poprun(options=("--launcher", "local"))
    finished = local("-n", "64", "sh", "-c", program)
    said = [line for line in finished.err.splitlines() if not line.startswith("[")]

    assert finished.code in {3, 137}
    assert 2 <= len(said) <= 15, os.linesep.join(said)
