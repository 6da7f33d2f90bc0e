"""Jobs over several hosts hold virtual IPUs on each of them: on all or on none, until they have ended there."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.hosts.jobs import ROOT, HostPoprun
from tests.hosts.network import Host, Network
from tests.hosts.test_jobs import poprun_itself
from tests.leftovers import wait_until_none
from tests.process.endings import has_met, write_program
from tests.process.test_endings import wait_until
from tests.running import DEADLINE_SECONDS

POOL = "/run/pool"
"""A file of a host's own: the hosts of these tests share the rest of the file system."""

HELD = ("--pool", POOL, "--ipus-per-host", "2")
HANGS = "ready()\nhang()"
STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nready()\nhang()"


@pytest.fixture
def poprun() -> HostPoprun:
    """The command on the first host; what a job holds does not depend on the MPI runtime."""
    return HostPoprun(python=Path(sys.executable), name="mpich")


def held(network: Network) -> Mapping[str, list[str]]:
    """The virtual IPUs that jobs hold, by host."""
    found: dict[str, list[str]] = {}
    for name, host in network.hosts.items():
        if host.is_alive:
            paths = ":".join(str(ROOT / folder) for folder in ("poprun_py", "popdist_py"))
            words = ("env", f"PYTHONPATH={paths}", f"POPRUN_POOL={POOL}", "POPRUN_IPUS_PER_HOST=2")
            told = host.run(*words, sys.executable, "-m", "poprun.vipu", "list", "ipus", "--output", "json")
            names = [row["name"] for row in json.loads(told) if row["used_by"]]
            found |= {name: names} if names else {}
    return found


def test_a_job_holds_virtual_ipus_on_each_of_its_hosts(
    network: Network, poprun: HostPoprun, tmp_path: Path
) -> None:
    """While it runs they are its own there; a job that wants one too many is told by whom, and starts nowhere."""
    (tmp_path / "first").mkdir()
    words = write_program(tmp_path / "first", HANGS)
    report = tmp_path / "report.json"
    options = ("-v", *HELD, "--report", str(report), "--host=n[1-2]", "-n4")
    with poprun.started(network, *options, sys.executable, *words) as process:
        wait_until(lambda: has_met(tmp_path / "first", 4))
        seen = held(network)
        refused = poprun(network, *HELD, "--host=n[2-3]", "-n2", "true")
        beside = held(network)
        (holder,) = [line.split()[0] for line in network.hosts["n2"].processes() if "lease_holder" in line]
        network.hosts["n2"].run("kill", "-STOP", holder)  # an agent continues it at its end
        poprun_itself(process).send_signal(signal.SIGTERM)
        _, err = process.communicate()

    assert seen == beside == {"n1": ["cpu/0", "cpu/1"], "n2": ["cpu/0", "cpu/1"]}
    assert refused.code == 69
    assert "host n2: the job needs 1 virtual IPU, and 0 are free of 2 on this machine" in refused.err
    assert re.search(r"cpu/0-1: process \d+ of \w+ \(.*python", refused.err)
    assert "holds cpu/0-1 on n1, from the pool /run/pool" in err
    assert held(network) == {}
    leases = json.loads(report.read_text())["leases"]
    assert [(lease["host"], lease["held"]) for lease in leases] == [
        ("n1", ["cpu/0", "cpu/1"]),
        ("n2", ["cpu/0", "cpu/1"]),
    ]


def test_jobs_that_name_the_same_hosts_in_another_order_all_get_their_turn(
    network: Network, poprun: HostPoprun
) -> None:
    """Each job needs all of both hosts: whoever waits holds nothing that the one it waits for still needs."""
    options = ("--wait-for-devices", *HELD, "--ipus-per-replica=2", "-n2")
    orders = ("n1,n2", "n2,n1", "n2,n1")
    jobs = [
        subprocess.Popen(
            poprun.words(network, (*options, f"--host={order}", "echo", "done")),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for order in orders
    ]
    told = [job.communicate(timeout=DEADLINE_SECONDS) for job in jobs]

    assert [job.returncode for job in jobs] == [0] * len(jobs), told
    assert [out.count("done") for out, _ in told] == [2] * len(jobs)
    assert held(network) == {}


def test_a_killed_poprun_leaves_the_lease_to_the_agents_until_the_programs_have_ended(
    network: Network, poprun: HostPoprun, tmp_path: Path
) -> None:
    """SIGKILL of poprun frees a host when its programs have ended, and not before."""
    words = write_program(tmp_path, STUBBORN)
    options = (*HELD, "--host=n[1-2]", "-n2", "--stop-timeout=20")
    with poprun.started(network, *options, sys.executable, *words) as process:
        wait_until(lambda: has_met(tmp_path, 2))
        poprun_itself(process).send_signal(signal.SIGKILL)
        wait_until(lambda: not [line for line in network.hosts["n2"].processes() if "lease_holder" in line])
        still_held = held(network)
        for host in network.hosts.values():
            end_programs(host, words[0])
        process.communicate()

    assert still_held == {"n1": ["cpu/0"], "n2": ["cpu/0"]}
    assert wait_until_none(lambda: list(held(network))) == []


def test_a_lost_link_frees_both_sides(own_network: Network, poprun: HostPoprun, tmp_path: Path) -> None:
    """The agents beyond the cut end their programs, then who keeps the lease there."""
    words = write_program(tmp_path, HANGS)
    options = (*HELD, "--host=n[1-2]", "-n2", "--stop-timeout=1")
    with poprun.started(own_network, *options, sys.executable, *words) as process:
        wait_until(lambda: has_met(tmp_path, 2))
        own_network.hosts["n2"].cut()
        _, err = process.communicate()

    assert process.returncode == 68, err
    assert wait_until_none(lambda: list(held(own_network))) == []


def test_each_host_gives_the_gpus_that_it_has_free(
    own_network: Network, poprun: HostPoprun, tmp_path: Path
) -> None:
    """Programs see what their own host has given: a GPU that somebody uses there stays out of it."""
    for name, host in own_network.hosts.items():
        command = tmp_path / f"nvidia-smi-{name}"
        used = "GPU-a, 2" if name == "n2" else ""  # which is not above poprun, as 1 is
        command.write_text(
            "#!/bin/sh\n"
            f'case "$*" in *query-compute*) echo "{used}" ;; *) printf "0, GPU-a\\n1, GPU-b\\n" ;; esac\n'
        )
        command.chmod(0o755)
        host.run("mount", "-t", "tmpfs", "none", "/usr/local/sbin")
        host.run("cp", str(command), "/usr/local/sbin/nvidia-smi")
    program = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['POPDIST_DEVICES'])"
    words = ("--pool", POOL, "--host=n[1-3]", "-n3", sys.executable, "-c", program)

    folders = ("/usr/local/sbin", str(Path(sys.executable).parent), os.environ["PATH"])
    finished = poprun(own_network, "-v", *words, env={"PATH": os.pathsep.join(folders)})

    assert finished.succeeded().lines == [f"[{n}] {gpu} 0" for n, gpu in enumerate("010")]
    assert "holds GPU 1 on n2" in finished.err


def end_programs(host: Host, script: str) -> None:
    """Kill a script wherever it runs on a host."""
    for line in host.processes():
        number, _, words = line.partition(" ")
        if words.endswith(script) or f"{script} " in words:
            host.run("kill", "-KILL", number)


def test_a_job_that_is_started_again_still_holds_its_ipus(
    network: Network, poprun: HostPoprun, tmp_path: Path
) -> None:
    """Who keeps the lease outlives an attempt, and the next one's agents come to the same lease."""
    words = write_program(tmp_path, "ready()\nsys.exit(7) if os.environ['POPDIST_RESTART_COUNT'] == '0' else None")
    report = tmp_path / "report.json"
    options = ("--max-restarts=1", "--report", str(report), *HELD, "--host=n[1-2]", "-n2")
    poprun(network, *options, sys.executable, *words).succeeded()

    found = json.loads(report.read_text())
    assert [attempt["exit_code"] for attempt in found["attempts"]] == [7, 0]
    assert [attempt["survivors"] for attempt in found["attempts"]] == [[], []]
    assert held(network) == {}


def test_a_host_that_comes_back_gives_its_ipus_anew(
    own_network: Network, poprun: HostPoprun, tmp_path: Path
) -> None:
    """Who kept the lease beyond the cut has ended with the programs there; the restart takes it again."""
    words = write_program(tmp_path, "ready()\nhang() if os.environ['POPDIST_RESTART_COUNT'] == '0' else None")
    options = ("--max-restarts=8", *HELD, "--host=n[1-2]", "-n2", "--stop-timeout=1")
    with poprun.started(own_network, *options, sys.executable, *words) as process:
        wait_until(lambda: has_met(tmp_path, 2))
        own_network.hosts["n2"].cut()
        assert process.stderr is not None
        told = next(line for line in process.stderr if "restart 1 of at most 8" in line)
        own_network.hosts["n2"].mend()
        _, err = process.communicate()

    assert process.returncode == 0, told + err
    assert wait_until_none(lambda: list(held(own_network))) == []
