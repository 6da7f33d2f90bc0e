"""A request inside an allocation of Slurm, which answers what it leaves open; what contradicts it is an error.

Pure. Slurm has given nodes and tasks before poprun is called; a job that does not fit them would wait for ever, or
run where nobody asked for it.
"""

import math
from dataclasses import replace

from poprun.errors import PlanError
from poprun.plan.request import LauncherChoice, LaunchRequest
from poprun.plan.topology import Allocation, Gpu, MachineFacts
from poprun.text.host_names import fold_hosts


def within(request: LaunchRequest, allocation: Allocation | None, *, is_counted: bool) -> LaunchRequest:
    """``request`` with the hosts and the number of instances of ``allocation``.

    One task is one instance. An allocation of this one node leaves the hosts as they are: the job is one of this
    machine, and may have any number of instances in the one task of an interactive shell.

    Args:
        request: What the user asked for.
        allocation: What Slurm has given; None outside Slurm.
        is_counted: Whether the user asked for a number of instances.

    Raises:
        PlanError: If poprun is itself one of several tasks, a host is not in the allocation, or the tasks are not
            as many as the instances, or not equally many on each node. The message has the words for Slurm.
    """
    if allocation is None:
        return request
    if allocation.task is not None:
        rank, size = allocation.task
        raise PlanError(
            f"poprun was started as task {rank} of {size} of a Slurm step, and would start the job {size} times: "
            "call it once, in the batch script or in salloc's shell, without srun; it starts the tasks itself"
        )
    hosts = _hosts(request, allocation)
    if not is_counted and request.num_instances is not None:
        request = replace(request, num_instances=sum(_tasks(allocation, hosts)) or len(hosts))
    is_here = hosts == (allocation.node_here,) and request.launcher is not LauncherChoice.SRUN
    if not (is_here and allocation.tasks_per_node == (1,)):
        _check_tasks(request, allocation, hosts)
    if is_here:
        return replace(request, hosts=())
    return replace(request, hosts=hosts, remote=replace(request.remote, slurm_job=allocation.job_id))


def facts_within(facts: MachineFacts, allocation: Allocation | None) -> MachineFacts:
    """What each node of ``allocation`` is taken to have, where poprun runs on none of them and cannot look."""
    if allocation is None or allocation.node_here is not None or facts.hostname in allocation.nodes:
        return facts
    cores = tuple(range(min(allocation.cpus_per_node, default=len(facts.cores))))
    gpus = tuple(Gpu(name=str(index)) for index in range(allocation.num_gpus_per_node))
    return replace(facts, cores=cores, cpus=(), memory_nodes=(), gpus=gpus)


def _hosts(request: LaunchRequest, allocation: Allocation) -> tuple[str, ...]:
    foreign = [host for host in request.hosts if host not in allocation.nodes]
    if foreign:
        raise PlanError(
            f"--host {fold_hosts(foreign)} is not in Slurm's job {allocation.job_id}, which has "
            f"{fold_hosts(allocation.nodes)}: leave out --host to use those, or ask for it: "
            f"sbatch --nodelist={fold_hosts(request.hosts)}"
        )
    return request.hosts or allocation.nodes


def _tasks(allocation: Allocation, hosts: tuple[str, ...]) -> list[int]:
    """The tasks of each of ``hosts``; none where nobody asked Slurm for tasks."""
    by_node = dict(zip(allocation.nodes, allocation.tasks_per_node, strict=False))
    return [by_node[host] for host in hosts] if by_node else []


def _check_tasks(request: LaunchRequest, allocation: Allocation, hosts: tuple[str, ...]) -> None:
    tasks = _tasks(allocation, hosts)
    if not tasks:
        return
    num_nodes, num_tasks = len(hosts), sum(tasks)
    wanted = request.num_instances or num_tasks
    job, per_node = f"Slurm's job {allocation.job_id}", math.ceil(wanted / num_nodes)
    cure = f"ask for sbatch --nodes={num_nodes} --ntasks-per-node={per_node}"
    if len(set(tasks)) > 1:
        raise PlanError(
            f"{job} has {min(tasks)} to {max(tasks)} tasks on each of {num_nodes} nodes, and a job equally many "
            f"instances on each: {cure}"
        )
    if wanted != num_tasks:
        possible = cure if wanted % num_nodes == 0 else f"ask for a multiple of {num_nodes}"
        raise PlanError(
            f"--num-instances {wanted} does not fit {job}, which has {num_tasks} tasks on {num_nodes} nodes: "
            f"{possible}, or leave out --num-instances to start {num_tasks}"
        )
