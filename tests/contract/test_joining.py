"""Popdist joins the job it finds itself in: poprun's, torchrun's, Open MPI's or Hydra's, or one of its own.

Holds popdist.exchange.transport.rendezvous and popdist.exchange.process_group.default_group.
"""

import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from poprun.plan.emit import emit_job
from poprun.text.screen import EmitKind
from tests.contract import default_group_laws, joining_program
from tests.contract.forked_calls import ForkedWorlds
from tests.contract.laws import laws_of
from tests.planning import planned
from tests.running import DEADLINE_SECONDS, Finished, MpiEnvironment, Poprun, run

PROGRAM = Path(__file__).parent / "joining_program.py"


NAMES = ("mpich", "openmpi")

JOINED = "2 [0, 1] [0, 1] False {{'127.0.0.1'}} {}"

PLAIN = "popdist popdist 6.0"


def mpiexec(mpi: MpiEnvironment, *what: str, python: Path | None = None, store: str = "") -> Finished:
    """The program under an MPI's own launcher, run by that environment's Python or another one."""
    options = ["--oversubscribe"] if mpi.name == "openmpi" else []
    return run(
        [str(mpi.mpiexec), *options, "-n", "2", str(python or mpi.python), str(PROGRAM), *what],
        env={"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "PLAIN_STORE": store},
    )


@pytest.fixture
def joined(forked_world: ForkedWorlds) -> str:
    """What each of two instances prints; its checksum is that of one instance with two replicas."""
    (weights,) = forked_world(
        joining_program.trained, num_instances=1, num_replicas=2, timeout_seconds=DEADLINE_SECONDS
    )
    return JOINED.format(weights)


def test_ranks_of_torchrun_are_instances(joined: str) -> None:
    """`torchrun train.py` is one job with one replica for each rank, over loopback; its weights are the same.

    And groups of the program's own, on the backend ``popdist`` and on gloo, meet at torchrun's store, too, without
    a disturbance.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    finished = run([*torchrun, str(PROGRAM), "plain", "join", "init_first"], env={"OMP_NUM_THREADS": "1"})
    assert finished.succeeded().lines == sorted([joined, "2.0 2.0", PLAIN] * 2)


def test_ranks_of_mpiexec_are_instances(mpi: MpiEnvironment, joined: str, tmp_path: Path) -> None:
    """`mpiexec -n 2 python train.py`, too, and the backend ``popdist`` is there for a plain program."""
    finished = mpiexec(mpi, "plain", "join_mpi", store=str(tmp_path / "store"))
    assert finished.succeeded().lines == [joined] * 2 + [PLAIN] * 2


def test_an_mpi_that_is_not_mpi4pys_is_named(
    mpi_environments: dict[str, MpiEnvironment], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One MPI's mpiexec and another MPI's mpi4py: the error names that MPI and says what to do."""
    if len(mpi_environments) < len(NAMES):
        pytest.skip("one of the two MPI environments is absent: scripts/test makes it")
    monkeypatch.setenv("OMPI_MCA_btl", "self")  # Hydra kills the ranks before Open MPI can remove shared memory
    mixed = mpiexec(mpi_environments["mpich"], "join", python=mpi_environments["openmpi"].python)
    assert mixed.code != 0
    assert "of 2, but mpi4py sees rank 0 of 1: it uses another MPI (Open MPI" in mixed.err


def test_an_exception_ends_a_job_under_mpiexec(mpi: MpiEnvironment) -> None:
    """One instance raises: the one that waits for it is told, and MPI's own end does not hang."""
    finished = mpiexec(mpi, "fail")
    assert finished.code != 0
    assert "ValueError: this instance cannot go on" in finished.err
    assert "BackendError: instance 0, in barrier(): the connection to instance 1 was closed" in finished.err


@pytest.mark.parametrize("program", [joining_program.init_first, joining_program.init_last])
def test_a_program_keeps_its_default_group(forked_world: ForkedWorlds, program: Callable[[], str]) -> None:
    """popdist.init() and init_process_group() work together, in both orders."""
    assert forked_world(program, num_instances=2, timeout_seconds=DEADLINE_SECONDS) == ["2.0 2.0"] * 2


@pytest.mark.parametrize("num_instances", [1, 2, 4])
def test_the_default_group_of_torch(forked_world: ForkedWorlds, num_instances: int) -> None:
    """Every law of default_group_laws.py, on every instance."""
    counts = forked_world(
        default_group_laws.run_all, num_instances=num_instances, timeout_seconds=DEADLINE_SECONDS
    )
    assert counts == [len(laws_of(default_group_laws))] * num_instances


def test_the_default_group_is_left_to_the_end_of_the_program(poprun: Poprun) -> None:
    """Without finalize(): the job ends, and one that fails is named, not those that wait for it.

    One on the backend ``popdist``, which has been destroyed, leaves no trace.
    """
    options = ["--launcher", "local", "--tag-output=no", "-n", "2", sys.executable, str(PROGRAM)]
    assert poprun(*options, "plain", "torch_helpers").succeeded().lines == ["2.0"] * 2 + [PLAIN] * 2
    failed = poprun(*options, "torch_helpers_fail")
    assert failed.code == 1
    assert "instance 1 failed first" in failed.err


def test_four_variables_are_enough(forked_world: ForkedWorlds) -> None:
    """Without any launcher, ranks that were told where to meet are a job."""
    told = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    environments = [told | {"RANK": str(rank)} for rank in range(2)]

    assert forked_world.in_environments(joining_program.init_first, environments) == ["2.0 2.0"] * 2


def test_pods_of_an_indexed_job_are_instances(forked_world: ForkedWorlds) -> None:
    """What the pods of a JobSet are told makes them one job, with as many replicas as the plan gave it."""
    plan = planned(num_instances=2, num_replicas=4, program=("train",))
    manifest = yaml.safe_load(emit_job(plan, EmitKind.JOBSET, image="image"))
    pod = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    told = {it["name"]: it["value"] for it in pod["containers"][0]["env"] if "value" in it}
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    environments = [told | {"JOB_COMPLETION_INDEX": str(index)} for index in range(2)]
    places = forked_world.in_environments(joining_program.place, environments)

    assert [place[:-1] for place in places] == [(4, [0, 1], [0, 0], False)] * 2


def free_port() -> str:
    """One on which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        return str(held.getsockname()[1])


WRAPPER = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))"
"""What a program such as ``conda run`` is: it closes inherited descriptors."""

BOTH = """
import sys, psutil, torch, torch.distributed as dist, popdist
starts = [popdist.init, lambda: dist.init_process_group("gloo")]
for start in starts[:: int(sys.argv[1])]:
    start()
kept = torch.ones(1)
dist.all_reduce(kept)
found = [it.laddr.ip for it in psutil.Process().net_connections("tcp") if it.status == "LISTEN"]
print(kept.item(), popdist.all_reduce(torch.ones(1)).item(), "listens", *sorted({*found}))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("order", ["1", "-1"])
def test_a_program_between_poprun_and_python_may_close_descriptors(poprun: Poprun, order: str) -> None:
    """A store serves popdist and torch; it listens on loopback, if popdist is the first of the two."""
    program = [sys.executable, "-c", WRAPPER, sys.executable, "-c", BOTH, order]
    finished = poprun("--launcher", "local", "-n", "2", "--tag-output=no", *program).succeeded()
    lines = finished.out.splitlines()
    assert [line.partition(" listens")[0] for line in lines] == ["2.0 2.0"] * 2
    assert order == "-1" or all(line.endswith(("listens", "listens 127.0.0.1")) for line in lines)


def test_a_lost_store_socket_is_named(poprun: Poprun) -> None:
    """Whoever closes the socket alone is told."""
    closes = (
        "import os, sys; name = 'POPDIST_STORE_DESCRIPTOR'\n"
        "name in os.environ and os.close(int(os.environ[name])); os.execv(sys.argv[1], sys.argv[1:])"
    )
    program = [sys.executable, "-c", closes, sys.executable, str(PROGRAM), "join"]
    finished = poprun("--launcher", "local", "-n", "2", *program)
    assert finished.code == 1
    assert "BackendError: instance 0 should serve POPDIST_STORE=127.0.0.1:" in finished.err
    assert "keep inherited descriptors open" in finished.err
