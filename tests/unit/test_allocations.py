"""Inside an allocation of Slurm: what a request leaves open is answered, and what does not fit is an error."""

from dataclasses import replace

import pytest

from poprun.errors import PlanError
from poprun.hosts.probe.machine import find_allocation
from poprun.plan.planner import make_plan
from poprun.plan.request import LaunchRequest
from poprun.plan.topology import Allocation
from tests.planning import CLUSTER_NODE

SALLOC = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_NTASKS": "4",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_JOB_CPUS_PER_NODE": "8(x2)",
    "SLURM_GPUS_PER_NODE": "a100:4",
}
ALLOCATION = Allocation(
    job_id="7",
    nodes=("n1", "n2"),
    tasks_per_node=(2, 2),
    cpus_per_node=(8, 8),
    num_gpus_per_node=4,
)
NODE = replace(CLUSTER_NODE, hostname="login", mpi=None)
UNEVEN = Allocation(job_id="7", nodes=("n1", "n2"), tasks_per_node=(3, 1))


def test_an_allocation_is_read_from_its_variables() -> None:
    """Nodes, tasks, processors and GPUs, as salloc tells them."""
    assert find_allocation(SALLOC) == ALLOCATION


def test_a_batch_script_knows_its_node() -> None:
    """And is no task, though Slurm gives it a rank."""
    found = find_allocation(SALLOC | {"SLURMD_NODENAME": "n1", "SLURM_PROCID": "0"})
    assert found is not None
    assert found.node_here == "n1"
    assert found.task is None


@pytest.mark.parametrize("env", [{}, {"SLURM_CONF": "/etc/slurm.conf"}, {"SLURM_JOB_ID": "7"}])
def test_outside_of_slurm_there_is_none(env: dict[str, str]) -> None:
    """Stray variables are no allocation."""
    assert find_allocation(env) is None


def test_tasks_that_nobody_asked_for_are_not_counted() -> None:
    """Slurm sets a count for each node all the same."""
    found = find_allocation({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_TASKS_PER_NODE": "8"})
    assert found is not None
    assert found.tasks_per_node == ()


def test_a_damaged_variable_is_named() -> None:
    """It is Slurm's own form or none."""
    with pytest.raises(PlanError, match="SLURM_TASKS_PER_NODE='many' is not of Slurm's form"):
        find_allocation(SALLOC | {"SLURM_TASKS_PER_NODE": "many"})


def test_hosts_and_count_come_from_slurm() -> None:
    """`poprun train.py` in an allocation uses all of it."""
    plan = make_plan(LaunchRequest(), NODE.within(ALLOCATION), is_counted=False)
    assert (plan.hosts, plan.num_instances) == (("n1", "n2"), 4)


def test_without_tasks_each_node_has_one_instance() -> None:
    """As `sbatch --nodes=2` alone would start."""
    free = Allocation(job_id="7", nodes=("n1", "n2"))
    assert make_plan(LaunchRequest(), NODE.within(free), is_counted=False).num_instances == 2
    assert make_plan(LaunchRequest(num_instances=8), NODE.within(free), is_counted=True).num_instances == 8


def test_a_job_of_this_node_is_one_of_this_machine() -> None:
    """It needs no launcher that reaches other nodes."""
    single = Allocation(job_id="7", nodes=("n1",), node_here="n1", tasks_per_node=(4,))
    plan = make_plan(LaunchRequest(), NODE.within(single), is_counted=False)
    assert (plan.hosts, plan.num_instances) == (("localhost",), 4)


def test_an_interactive_shell_may_start_as_many_as_it_likes() -> None:
    """`srun --gres=gpu:4 --pty bash` is one task, and its GPUs are for all of them."""
    shell = Allocation(job_id="7", nodes=("n1",), node_here="n1", tasks_per_node=(1,))
    assert make_plan(LaunchRequest(num_instances=4), NODE.within(shell), is_counted=True).num_instances == 4


def test_some_of_the_nodes_have_their_own_tasks() -> None:
    """`--host` chooses among those of the allocation."""
    plan = make_plan(LaunchRequest(hosts=("n2",)), NODE.within(ALLOCATION), is_counted=False)
    assert (plan.hosts, plan.num_instances) == (("n2",), 2)


def test_outside_of_slurm_nothing_changes() -> None:
    """The request is the user's, and the machine is as it is."""
    assert CLUSTER_NODE.within(None) == CLUSTER_NODE
    assert make_plan(LaunchRequest(num_instances=3), CLUSTER_NODE).num_instances == 3


@pytest.mark.parametrize(
    ("request_", "allocation", "words"),
    [
        (
            LaunchRequest(num_instances=8),
            ALLOCATION,
            (
                "--num-instances 8 does not fit Slurm's job 7, which has 4 tasks on 2 nodes: "
                "ask for sbatch --nodes=2 --ntasks-per-node=4, or leave out --num-instances to start 4"
            ),
        ),
        (
            LaunchRequest(),
            replace(ALLOCATION, tasks_per_node=(1, 1), most_tasks_per_node=2),
            (
                "Slurm's job 7 was asked for --ntasks=2, which counts, and for --ntasks-per-node=2 on 2 nodes: "
                "leave out one of them, or give --num-instances 2"
            ),
        ),
        (
            LaunchRequest(num_instances=4),
            UNEVEN,
            (
                "Slurm's job 7 has 1 to 3 tasks on each of 2 nodes, and a job equally many instances on each: "
                "ask for sbatch --nodes=2 --ntasks-per-node=2"
            ),
        ),
        (
            LaunchRequest(num_instances=4, hosts=("n1", "n7")),
            ALLOCATION,
            (
                "--host n7 is not in Slurm's job 7, which has n[1-2]: "
                "leave out --host to use those, or ask for it: sbatch --nodelist=n[1,7]"
            ),
        ),
        (
            LaunchRequest(num_instances=4),
            replace(ALLOCATION, task=(1, 4)),
            (
                "poprun was started as task 1 of 4 of a Slurm step, and would start the job 4 times: "
                "call it once, in the batch script or in salloc's shell, without srun; it starts the tasks itself"
            ),
        ),
    ],
)
def test_what_does_not_fit_is_an_error(request_: LaunchRequest, allocation: Allocation, words: str) -> None:
    """With the words that ask Slurm for it."""
    with pytest.raises(PlanError) as error:
        make_plan(request_, NODE.within(allocation))
    assert str(error.value) == words
