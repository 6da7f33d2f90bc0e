"""What a task of ``srun`` is told, and what its shell is not.

Holds popdist.ground.environments.slurm.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popdist.errors import ContractError
from popdist.ground.contract import Endpoint, read_node_counts
from popdist.ground.environments import Launcher, detect
from popdist.ground.environments.slurm import first_node, read_slurm, store_ports

TASK = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "3,1",
    "SLURM_STEP_NODELIST": "n[1-2]",
}
SHELL = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_NODELIST": "n[1-2]"}


def test_a_task_is_an_instance() -> None:
    """With its place on its node, however uneven the nodes are."""
    found = detect(TASK)
    job = found.contract
    assert found.launcher is Launcher.SLURM
    assert (job.instance_index, job.num_instances, job.num_replicas) == (3, 4, 4)
    assert (job.host_index, job.local_instance_index, job.num_local_instances) == (1, 0, 1)
    assert (job.job_id, job.master) == ("7.0", None)


def test_the_users_own_meeting_place_is_taken() -> None:
    """As batch scripts of torch programs export it."""
    job = read_slurm(TASK | {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"})
    assert job is not None
    assert job.master == Endpoint(host="n1", port=29500)


def test_a_batch_script_is_no_task() -> None:
    """It would wait for tasks that nobody starts."""
    assert detect(SHELL).launcher is Launcher.NONE


@pytest.mark.parametrize(
    ("inner", "launcher"),
    [
        ({"PMI_RANK": "1", "PMI_SIZE": "8"}, Launcher.HYDRA),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "8"}, Launcher.OPEN_MPI),
        ({"RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "n1", "MASTER_PORT": "1"}, Launcher.TORCHRUN),
    ],
)
def test_launchers_that_are_tasks_themselves_come_first(inner: dict[str, str], launcher: Launcher) -> None:
    """One torchrun a node, or Hydra's proxies."""
    found = detect(TASK | inner)
    assert found.launcher is launcher
    assert found.contract.num_instances == 8


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"SLURM_PROCID": "4"}, "SLURM_PROCID=4 is not below SLURM_STEP_NUM_TASKS=4"),
        ({"SLURM_NODEID": "2"}, "has no such node"),
        ({"SLURM_STEP_TASKS_PER_NODE": "3;1"}, "not of Slurm's form"),
        ({"SLURM_LOCALID": "x"}, "SLURM_LOCALID='x' must be a whole number"),
    ],
)
def test_contradictions_are_errors(wrong: dict[str, str], words: str) -> None:
    """Each names the variable."""
    with pytest.raises(ContractError, match=words):
        detect(TASK | wrong)


@pytest.mark.parametrize(("text", "counts"), [("4", (4,)), ("2(x3),1", (2, 2, 2, 1)), ("3,1", (3, 1))])
def test_tasks_of_each_node(text: str, counts: tuple[int, ...]) -> None:
    """Slurm folds equal neighbours."""
    assert read_node_counts({"N": text}, "N") == counts


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n[1-2]", "n1"),
        ("a-[01-04,7]-ib,b", "a-01-ib"),
        ("r[2,4]n[8-9]", "r2n8"),
        ("x,y", "x"),
        ("", ""),
    ],
)
def test_the_first_node_of_a_list(nodes: str, first: str) -> None:
    """Brackets hold numbers and ranges."""
    assert first_node(nodes) == first


@given(st.integers(1, 10**9), st.integers(0, 10**6))
def test_a_step_has_ports_of_its_own(job: int, step: int) -> None:
    """Different from each other, below those of outgoing connections, and the same wherever they are asked for."""
    ports = store_ports(f"{job}.{step}")
    assert ports == store_ports(f"{job}.{step}")
    assert len(set(ports)) == len(ports) == 8
    assert all(1024 <= port < 32_768 for port in ports)
    assert ports[0] != store_ports(f"{job + 1}.{step}")[0]
