"""Words written for Open MPI's launcher do the same whatever starts the job, or are named as left out."""

from dataclasses import replace
from typing import Final

import pytest

from poprun.errors import PlanError
from poprun.launch.launchers import launch_commands
from poprun.plan.advice import advise
from poprun.plan.mpi_options import MpiWords, Variables, job_words, read_mpi_words
from poprun.plan.program_environment import program_environment
from poprun.plan.request import LauncherChoice, LaunchRequest, OutputSettings, RemoteSettings
from poprun.plan.topology import MpiKind, MpiRuntime
from tests.planning import CLUSTER_NODE, LAPTOP, MPICH, planned

KINDS: Final = (MpiKind.OPEN_MPI, MpiKind.MPICH, None)
OPEN_MPI: Final = MpiRuntime(kind=MpiKind.OPEN_MPI, path="/opt/openmpi/bin/mpirun", version="5.0.11")
OPEN_MPI_NODE: Final = replace(CLUSTER_NODE, mpi=OPEN_MPI)


def read(text: str, kind: MpiKind | None) -> MpiWords:
    """What the words of ``text`` ask for under ``kind``."""
    return read_mpi_words(text.split(), "--mpi-global-args", kind)


@pytest.mark.parametrize("kind", KINDS)
def test_what_poprun_does_itself(kind: MpiKind | None) -> None:
    """Variables, tags, a place for the output and root's permission are nothing for a launcher."""
    text = "-x A --tag-output -x B=1=2 --output-filename logs -x C= --allow-run-as-root --x D*"

    assert read(text, kind) == MpiWords(
        variables=(("A", None), ("B", "1=2"), ("C", ""), ("D*", None)),
        is_tagged=True,
        log_dir="logs",
        subnet=None,
        launcher_words=(),
        left_out=(),
    )
    assert read("--output-filename=logs -tag-output", kind).log_dir == "logs"


@pytest.mark.parametrize(
    ("text", "mpich"),
    [
        ("--mca btl_tcp_if_include eth0 --mca oob_tcp_if_include 10.1.0.0/33", ""),
        ("-mca btl tcp,self --oversubscribe --timestamp-output --report-bindings", ""),
        ("-iface lo", "-iface lo"),
        ("--bind-to none --mca x y -genv A 1", "--bind-to none -genv A 1"),
        ("mca tag-output", "mca tag-output"),
    ],
)
def test_what_is_for_the_launcher(text: str, mpich: str) -> None:
    """Open MPI's is told all of it, MPICH's what may be its own; without one all is left out. Nothing is lost."""
    by_kind = {kind: read(text, kind) for kind in KINDS}

    assert by_kind[MpiKind.OPEN_MPI].launcher_words == tuple(text.split())
    assert by_kind[MpiKind.MPICH].launcher_words == tuple(mpich.split())
    assert by_kind[None].launcher_words == ()
    for words in by_kind.values():
        assert sorted((*words.launcher_words, *words.left_out)) == sorted(text.split())


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("--tag-output -x", "--mpi-global-args: -x lacks its value"),
        ("--mca a", "--mpi-global-args: --mca lacks its value"),
        ("-x =1", "--mpi-global-args: -x '=1' names no variable: write -x NAME or -x NAME=value"),
        ("-x 2A=1", "names no variable"),
    ],
)
def test_what_is_refused(text: str, what: str) -> None:
    """A word that lacks its value would take the next one's place."""
    with pytest.raises(PlanError) as caught:
        read(text, MpiKind.OPEN_MPI)
    assert what in str(caught.value)


def test_a_plan_has_what_was_asked_for() -> None:
    """Options say it louder than words; variables reach the instances they are meant for, and poprun's stay."""
    plan = planned(
        OPEN_MPI_NODE,
        num_instances=2,
        mpi_global_args=("--tag-output", "--mca", "a", "b", "-x", "A=1", "--output-filename", "logs"),
        mpi_local_args=("-x", "A=2", "-x", "RANK=9", "-x", "PYTHONUNBUFFERED=0", "-x", "HOME"),
        instance_mpi_local_args=((1, ("-x", "A=3")), (1, ("-x", "B=4"))),
        output=OutputSettings(is_tagged=False),
    )
    first, second = (program_environment(plan, index, {}) for index in range(2))

    assert (plan.output.is_tagged, plan.output.log_dir) == (False, "logs")
    assert (plan.mpi_global_args, plan.mpi_local_args) == (("--mca", "a", "b"), ())
    assert plan.variables == (("A", "2"), ("RANK", "9"), ("PYTHONUNBUFFERED", "0"), ("HOME", None))
    assert plan.instance_variables == ((1, (("A", "3"), ("B", "4"))),)
    assert (first["A"], first["RANK"], first["PYTHONUNBUFFERED"]) == ("2", "0", "0")
    assert (second["A"], second["B"], second["RANK"]) == ("3", "4", "1")
    assert "B" not in first
    assert "HOME" not in first


@pytest.mark.parametrize("kind", KINDS)
def test_a_network_for_the_hosts(kind: MpiKind | None) -> None:
    """A subnet is the job's, and nothing is left out; Open MPI is told, too. --host-subnet says it louder."""
    words = ("--mca", "oob_tcp_if_include", "10.1.0.0/16", "--mca", "btl_tcp_if_include", "10.1.2.3/16")
    mpi = {MpiKind.OPEN_MPI: OPEN_MPI, MpiKind.MPICH: MPICH, None: None}[kind]
    node = replace(CLUSTER_NODE, mpi=mpi)

    assert read(" ".join(words), kind).left_out == ()
    assert read(" ".join(words), kind).launcher_words == (words if kind is MpiKind.OPEN_MPI else ())
    assert planned(node, mpi_global_args=words).remote.subnet == "10.1.0.0/16"
    louder = planned(node, mpi_global_args=words, remote=RemoteSettings(subnet="10.2.0.0/16"))
    assert louder.remote.subnet == "10.2.0.0/16"


def test_threads_that_are_asked_for_as_a_variable() -> None:
    """They are the threads of a replica, which cores are shared out by."""
    plan = planned(CLUSTER_NODE, mpi_local_args=("-x", "OMP_NUM_THREADS=3"))

    assert plan.threads_per_replica == 3
    assert program_environment(plan, 0, {})["OMP_NUM_THREADS"] == "3"


def test_variables_need_no_hydra() -> None:
    """Words that poprun heeds itself leave MPICH's forker in place."""
    node = replace(CLUSTER_NODE, mpi=replace(MPICH, forker="/opt/mpich/bin/mpiexec.gforker"))
    words = ("-x", "A=1", "--tag-output", "--mca", "a", "b")
    _, command = launch_commands(planned(node, mpi_global_args=words))

    assert command.words[:3] == ("/opt/mpich/bin/mpiexec.gforker", "-n", "1")


def test_an_instance_that_is_not_there() -> None:
    """It is refused with those that are."""
    with pytest.raises(PlanError, match="--instance-mpi-local-args 2: there is no such instance"):
        planned(num_instances=2, instance_mpi_local_args=((2, ("-x", "A=1")),))


@pytest.mark.parametrize(
    ("mpi", "what"),
    [
        (None, "--mca a 'b c': left out, there is no MPI launcher that could be told"),
        (MPICH, "--mca a 'b c': left out, these are words for Open MPI and MPICH starts the job"),
        (OPEN_MPI, None),
    ],
)
def test_what_is_left_out_is_told(mpi: MpiRuntime | None, what: str | None) -> None:
    """With its reason, and what works."""
    request = LaunchRequest(mpi_global_args=("--mca", "a", "b c"), launcher=LauncherChoice.AUTO)
    advice = advise(planned(replace(LAPTOP, mpi=mpi)), LAPTOP, left_out=job_words(request, mpi).left_out)

    assert len(advice) == (what is not None)
    assert "".join(advice).startswith(what or "")


def test_words_for_one_instance() -> None:
    """One launcher starts all of them, so only variables can be one instance's."""
    request = LaunchRequest(instance_mpi_local_args=((0, ("--mca", "a", "b", "-x", "A=1")),))
    words = job_words(request, OPEN_MPI)

    assert words.left_out == ("--mca", "a", "b")
    (advice,) = advise(planned(replace(LAPTOP, mpi=OPEN_MPI)), LAPTOP, left_out=words.left_out)
    assert "one launcher starts all instances" in advice


@pytest.mark.parametrize(
    ("words", "variables", "left"),
    [
        ("A=--b=1", (("A", "--b=1"),), ()),
        ("-x A B=2 --tag-output C=3", (("A", None), ("B", "2"), ("C", "3")), ()),
        ("--unknown A=1", (), ("--unknown", "A=1")),
        ("--unknown 1 A=1", (), ("--unknown", "1", "A=1")),
        ("word", (), ("word",)),
    ],
)
def test_a_variable_without_its_x(words: str, variables: Variables, left: tuple[str, ...]) -> None:
    """It is one where no launcher's own option stands before it, whose value it may be."""
    found = read(words, MpiKind.MPICH)

    assert (found.variables, found.launcher_words) == (variables, left)
