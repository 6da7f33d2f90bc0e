"""Command lines as people write them for PopRun plan here as they stand.

Each is the shape of one that is published somewhere: its options, in their order and spelling, with the names of
hosts, partitions, variables and programs changed.
"""

import shlex
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest

from poprun.__main__ import run_command
from poprun.cli.command_line import read_command_line
from poprun.plan.mpi_options import job_words
from poprun.plan.plan import LaunchPlan
from poprun.plan.plan_file import read_plan
from poprun.plan.planner import make_plan
from poprun.plan.request import LaunchRequest
from poprun.plan.topology import MpiKind, MpiRuntime
from tests.planning import CLUSTER_NODE, MPICH

OPEN_MPI: Final = MpiRuntime(kind=MpiKind.OPEN_MPI, path="/opt/openmpi/bin/mpirun", version="5.0.11")

SHAPES: Final = Path(__file__).with_suffix("").with_name("real_command_lines.txt").read_text(encoding="utf-8")


def _lines() -> list[tuple[str, tuple[int, ...]]]:
    """Each command line, with the counts above it."""
    blocks = (block.partition("\n") for block in SHAPES.split("\n\n")[1:])
    return [(line, tuple(map(int, counts.split()))) for counts, _, line in blocks]


LINES: Final = _lines()


def asked(line: str) -> LaunchRequest:
    """The request of a command line."""
    name, *words = shlex.split(line.replace(" \\\n", " "))
    found = read_command_line(words, {})
    assert name == "poprun"
    assert found.program
    return found.request(("/bin/program",), "/home/me")


def plan_of(request: LaunchRequest, mpi: MpiRuntime | None) -> LaunchPlan:
    """The plan for ``request`` on hosts with ``mpi``."""
    return make_plan(request, replace(CLUSTER_NODE, mpi=mpi))


@pytest.mark.parametrize("mpi", [MPICH, OPEN_MPI, None], ids=["mpich", "open_mpi", "local"])
@pytest.mark.parametrize(("line", "counts"), LINES, ids=range(len(LINES)))
def test_it_plans_as_it_stands(line: str, counts: tuple[int, ...], mpi: MpiRuntime | None) -> None:
    """Hosts, instances, replicas and IPUs are those that it asks for, whatever starts the job."""
    plan = plan_of(asked(line), mpi)

    assert (len(plan.hosts), plan.num_instances, plan.num_replicas, plan.ipus_per_replica) == counts


@pytest.mark.parametrize("mpi", [MPICH, None], ids=["mpich", "local"])
@pytest.mark.parametrize(("line", "counts"), LINES, ids=range(len(LINES)))
def test_only_interfaces_are_left_out(line: str, counts: tuple[int, ...], mpi: MpiRuntime | None) -> None:
    """Every variable reaches the plan; without Open MPI only the name of an interface is lost, and no subnet."""
    request = asked(line)
    words = job_words(request, mpi)
    num_variables = len({word.partition("=")[0] for word in _variables(request)})

    assert set(words.left_out) <= {"--mca", "btl_tcp_if_include", "eno1"}
    assert words.subnet == ("10.1.0.0/16" if "if_include 10.1.0.0/16" in line else words.subnet)
    assert len(words.variables) == num_variables
    assert (words.global_words, words.local_words) == ((), ())


def _variables(request: LaunchRequest) -> list[str]:
    """What stands behind -x, and one line's variable that has none before it."""
    words = [*request.mpi_global_args, *request.mpi_local_args]
    pairs = list(pairwise(("", *words)))
    behind_x = [word for before, word in pairs if before == "-x"]
    return [*behind_x, *(word for before, word in pairs if word.startswith("FLAGS=") and before != "-x")]


def test_a_dry_run_shows_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    """From words to a printed plan, on this machine as it is; nobody is asked whether such hosts are there."""
    for line, counts in LINES:
        _, *words = shlex.split(line.replace(" \\\n", " "))

        assert run_command(["--dry-run", "--topology-format=json", *words]) == 0, line
        plan = read_plan(capsys.readouterr().out, "stdout")
        assert (len(plan.hosts), plan.num_instances, plan.num_replicas, plan.ipus_per_replica) == counts
