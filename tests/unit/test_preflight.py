"""What is made of the hosts' answers.

Holds poprun.hosts.problems and poprun.launch.routes.
"""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from poprun.hosts import remote_side
from poprun.hosts.preflight import _Examiner, choose_addresses
from poprun.hosts.problems import Problem, judge_places, no_answer, render_problems
from poprun.hosts.questions import HostConnections, Replies
from poprun.launch.routes import HostRoute
from poprun.plan.request import RemoteSettings
from tests.planning import CLUSTER_NODE, planned
from tests.running import DEADLINE_SECONDS

BOTH = [("lo", "127.0.0.1"), ("eth0", "10.0.0.1"), ("ib0", "10.1.0.1"), ("lo", "::1"), ("ib0", "fd00::1")]
OLD = [("lo", "127.0.0.1"), ("eth0", "10.0.0.2")]
NEW = [("lo", "::1"), ("eth0", "fd00::3")]


def test_the_way_of_ssh_decides() -> None:
    """The address that it reached, and its family on the hosts that it need not reach."""
    choice = choose_addresses({"a": BOTH, "b": BOTH}, {"b": "fd00::1"}, None)

    assert {route.address for route in choice.routes.values()} == {"fd00::1"}
    assert choice.problems == ()


def test_all_hosts_have_one_family() -> None:
    """IPv4 where ssh took both; a host without it has a problem, or IPv6 is taken when that is what all have."""
    four = choose_addresses({"a": BOTH, "b": OLD}, {"a": "fd00::1", "b": "10.0.0.2"}, None)
    six = choose_addresses({"a": BOTH, "b": NEW}, {}, None)
    none = choose_addresses({"a": OLD, "b": NEW}, {"a": "10.0.0.2"}, None)

    assert [route.address for route in four.routes.values()] == ["10.1.0.1", "10.0.0.2"]
    assert [route.address for route in six.routes.values()] == ["fd00::1", "fd00::3"]
    assert [problem.host for problem in none.problems] == ["b"]


@pytest.mark.parametrize(("way", "job"), [("UNKNOWN 65535 UNKNOWN 65535", None), ("fd00::9 1 fd00::1 22", "7")])
def test_a_way_of_ssh_that_is_none_between_the_hosts_decides_nothing(way: str, job: str | None) -> None:
    """Over a pipe sshd knows no ends, and a step of Slurm has the user's login; first addresses are taken then."""
    remote = RemoteSettings(slurm_job=job)
    examiner = _Examiner(planned(CLUSTER_NODE, hosts=("a", "b"), num_instances=2, remote=remote), "a")
    answers = {name: {"addresses": own, "ssh": way.split()} for name, own in (("a", BOTH), ("b", OLD))}
    choice = examiner._choose(answers)

    assert {name: route.address for name, route in choice.routes.items()} == {"a": "10.0.0.1", "b": "10.0.0.2"}


def test_a_subnet_decides_before_everything() -> None:
    """On each host its first address there; the interface comes with it."""
    choice = choose_addresses({"a": BOTH, "b": OLD}, {"a": "10.0.0.1"}, "10.1.0.0/16")

    assert (choice.routes["a"].interface, choice.routes["a"].address) == ("ib0", "10.1.0.1")
    assert [problem.host for problem in choice.problems] == ["b"]


def test_hosts_with_the_same_problem_share_a_row() -> None:
    """A table for a thousand hosts is as long as it has kinds of trouble."""
    problems = [Problem(host=f"n{n}", cause="it does not answer", remedy="ssh {host} true") for n in range(1000)]
    text = render_problems([*problems, Problem(host="m", cause="other", remedy="mend {host}")], 2000)

    assert text.splitlines() == [
        "1001 of 2000 hosts cannot take part:",
        "  host      cause               remedy",
        "  n[0-999]  it does not answer  ssh HOST true",
        "  m         other               mend m",
    ]


def test_nothing_that_ssh_has_started_outlives_its_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as the ssh of a ProxyJump, which would wait for ever behind a cut link."""
    ssh = tmp_path / "ssh"
    ssh.write_text(f"#!/bin/sh\nsleep 600 &\necho $! > {tmp_path}/jump\nwait\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    async def ask() -> Replies:
        connections = HostConnections(("here", "there"), "here", RemoteSettings())
        return await connections.ask({"there": {"ask": "facts"}}, 1.0)

    _, failures = asyncio.run(ask())
    jump = int((tmp_path / "jump").read_text())
    assert list(failures) == ["there"]
    assert not psutil.pid_exists(jump) or psutil.Process(jump).status() == psutil.STATUS_ZOMBIE


def test_who_answers_ends_without_poprun() -> None:
    """Its standard input stays open on a host whose link to poprun is cut."""
    text = Path(remote_side.__file__).read_text().replace("_LONGEST_SECONDS = 300.0", "_LONGEST_SECONDS = 0.1")
    with subprocess.Popen([sys.executable, "-c", text], stdin=subprocess.PIPE) as process:
        assert process.wait(DEADLINE_SECONDS) == 1


def test_what_ssh_says_becomes_a_cause() -> None:
    """And what it says that nobody expects is shown."""
    refused = no_answer("a", 255, "a@b: Permission denied (publickey).", "/bin/python3")
    strange = no_answer("a", 255, "kex: out of luck", "/bin/python3")
    broken = no_answer("a", 3, "greeting\nno module", "/bin/python3")
    in_slurm = no_answer("a", 1, "srun: error: no", "/bin/python3", in_slurm=True)

    assert broken.cause == "/bin/python3 ended there with exit code 3: no module"
    assert in_slurm.cause == "srun could not ask it: srun: error: no"
    assert refused.cause == "ssh refuses the login"
    assert strange.cause == "ssh failed: kex: out of luck"
    assert no_answer("a", 127, "sh: no such file", "/bin/python3").cause == "there is no Python at /bin/python3"
    assert no_answer("a", None, "", "/bin/python3").cause == "it does not answer in time"


def test_each_host_is_named_once_under_whichever_of_its_names() -> None:
    """Hosts that have each other's address are one; that many have the same beside theirs says nothing."""
    bridge = ("docker0", "172.17.0.1")
    places = {"a": [*BOTH, bridge], "a-ib": [*BOTH, bridge], "b": [*OLD, bridge]}
    ways = {"a": "10.0.0.1", "a-ib": "10.1.0.1", "b": "10.0.0.2"}
    routes = {name: HostRoute(name=name, interface="eth0", address=ways[name]) for name in ways}

    assert [(it.host, it.cause) for it in judge_places(places, routes)] == [("a-ib", "it is the same host as a")]
