"""The planner: it makes a job's plan from the user's request and facts about the machine or Slurm's job.

Pure: facts are arguments, and no function reads a clock, the environment or a disk. :func:`make_plan` assumes that
every host is like poprun's machine. :func:`place` binds instances to cores, and does so again if a lease gave the
job other cores.
"""

import math
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from popdist.ground.contract import NUM_THREADS
from popdist.ground.layout import Parallelism
from popdist.ground.values import dataclass
from poprun.errors import MpiNotFoundError, PlanError
from poprun.makers.maker import DEFAULT_MAKER, MAKERS
from poprun.plan.advice import advise
from poprun.plan.mpi_options import JobWords, Variables, check_instance_variables, job_words, merged
from poprun.plan.placement import Demand, HostMap, flat_map, place_instances
from poprun.plan.plan import LauncherKind, LaunchPlan, LeasedDevices
from poprun.plan.request import (
    LauncherChoice,
    LaunchRequest,
    OutputSettings,
    VipuSettings,
    check_count,
    check_counts,
    check_ending,
    check_ipus_per_replica,
    check_output,
    check_path,
    check_remote,
    check_trace,
    check_vipu,
    legal_instances,
)
from poprun.plan.topology import Allocation, Binding, Gpu, MachineFacts, MpiRuntime, ProcessPlacement
from poprun.text.ranges import check_hosts, fold_hosts

if TYPE_CHECKING:
    from poprun.plan.inventory import Cluster

DEBUG_VARIABLES: Final = (("PYTHONFAULTHANDLER", "1"), ("TORCH_DISTRIBUTED_DEBUG", "INFO"))
"""Variables that make Python print its stack after a signal, and torch print how process groups disagree."""

THIS_MACHINE: Final = "localhost"

_DEFAULT_PLACEMENT: Final = LaunchRequest().placement
_BIND_TO: Final = "bind-to"
_UNBOUND: Final = "none"


def make_plan(
    request: LaunchRequest, facts: MachineFacts, pod: "Cluster | None" = None, *, is_counted: bool = True
) -> LaunchPlan:
    """Return the plan for ``request``: everything that poprun can decide before a process starts.

    Args:
        request: What the user asked for.
        facts: What is known about the machine; every host is assumed to be like this machine.
        pod: The pod to plan for, or None to plan for this machine.
        is_counted: Whether the user gave a number of instances; if not, an allocation of Slurm gives the number.

    Raises:
        PlanError: If the counts do not fit together or a value is out of its range; the message names the nearest
            legal choices. In an allocation of Slurm: if poprun is itself one of several tasks, if a host is not in
            the allocation, or if the numbers of tasks and instances differ; the message has the options for Slurm.
        MpiNotFoundError: If the user asked for MPI and no MPI was found.
    """
    return make_advised_plan(request, facts, pod, is_counted=is_counted, are_hosts_seen=True)[0]


def make_advised_plan(
    request: LaunchRequest,
    facts: MachineFacts,
    pod: "Cluster | None" = None,
    *,
    is_counted: bool,
    are_hosts_seen: bool,
) -> tuple[LaunchPlan, tuple[str, ...]]:
    """Return the plan for ``request``, and texts of advice on the plan. If ``are_hosts_seen`` is false, poprun
    inspects no other hosts, and the advice says so.
    """
    request, counts = _count(request, facts, pod, is_counted=is_counted)
    hosts, num_instances = counts.hosts, counts.num_instances
    check_settings(request, num_instances, counts.parallelism)
    mpi = _choose_mpi(request, facts)
    is_here = len(hosts) == 1 and hosts[0] in facts.host_aliases
    words = job_words(request, mpi)
    # MPICH's forker can only use this host, and does not understand words for Hydra.
    keeps_forker = is_here and not (words.global_words or words.local_words)
    variables = merged(DEBUG_VARIABLES if request.is_debugged else (), words.variables)
    check_instance_variables(words.instance_variables, num_instances)
    devices = _choose_devices(request, facts, num_instances // len(hosts), counts.ipus_per_part)
    plan = LaunchPlan(
        program=request.program,
        working_directory=request.working_directory,
        hosts=hosts,
        num_instances=num_instances,
        num_replicas=counts.num_replicas,
        parallelism=counts.parallelism,
        mapping_path=None if request.mapping is None else request.mapping.path,
        ipus_per_replica=counts.ipus_per_replica,
        cores=facts.cores,
        devices=devices,
        maker=facts.maker if devices else DEFAULT_MAKER,
        placement=_choose_placement(request),
        bindings=(),
        threads_per_replica=None,
        is_deterministic=request.is_deterministic,
        launcher=_launcher_kind(request, mpi),
        mpi=mpi if keeps_forker else mpi and replace(mpi, forker=None),
        mpi_global_args=words.global_words,
        mpi_local_args=words.local_words,
        variables=variables,
        instance_variables=words.instance_variables,
        executable_cache_path=request.executable_cache_path,
        vipu=request.vipu,
        output=_choose_output(request, words),
        ending=request.ending,
        remote=replace(request.remote, subnet=request.remote.subnet or words.subnet),
        trace=request.trace,
        is_watched=request.is_watched,
    )
    differences = _check_mapping(plan, request, facts)
    num_computing = max(num_instances, plan.num_replicas)
    threads = _choose_threads(request, facts, variables, _num_cores(plan) * len(hosts) // num_computing)
    plan = replace(plan, threads_per_replica=threads, vipu=_with_domains(plan, pod))
    plan = replace(plan, bindings=place(plan, facts))
    return plan, (*differences, *advise(plan, facts, left_out=words.left_out, are_hosts_seen=are_hosts_seen))


def _check_mapping(plan: LaunchPlan, request: LaunchRequest, facts: MachineFacts) -> tuple[str, ...]:
    """Raise PlanError if GPUs are too few for the user's mapping; return a tuple of one warning if the mapping was
    planned for other devices, otherwise ().
    """
    if request.mapping is None:
        return ()
    from poprun.plan.parallelism import check_found, other_devices

    check_found(plan, request.mapping, len(_gpus(request, facts)))
    return other_devices(plan, request.mapping, facts.gpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counts:
    """The hosts of a job, and its numbers of instances, replicas and virtual IPUs."""

    hosts: tuple[str, ...]
    num_instances: int
    num_replicas: int
    parallelism: Parallelism
    ipus_per_replica: int

    @property
    def ipus_per_part(self) -> int:
        """The number of virtual IPUs of a replica, or, if instances share replicas, of one instance's part."""
        return self.ipus_per_replica // self.parallelism.instances_per_replica


def _count(
    request: LaunchRequest, facts: MachineFacts, pod: "Cluster | None", *, is_counted: bool
) -> tuple[LaunchRequest, _Counts]:
    """Return ``request``, completed by the hosts and numbers of its mapping and of Slurm's job. Also return the
    job's hosts and its numbers of instances and replicas, which are chosen here if the user has left them open.
    """
    if request.num_replicas is not None:
        check_count("--num-replicas", request.num_replicas)
    parallelism = Parallelism()
    if request.mapping is not None or request.instances_per_replica is not None:
        from poprun.plan.parallelism import choose_parallelism, with_counts

        parallelism = choose_parallelism(request)
        request, is_counted = with_counts(request, parallelism.instances_per_replica, is_counted=is_counted)
    size = parallelism.instances_per_replica
    if facts.allocation is not None:
        request = _within_allocation(request, facts.allocation, size, is_counted=is_counted)
    hosts = request.hosts or (pod and pod.hosts) or (THIS_MACHINE,)
    _check_hosts(hosts, facts)
    if facts.allocation is None and not is_counted and size > 1:
        request = replace(request, num_instances=math.lcm(size, len(hosts)))
    ipus_per_replica = size if request.ipus_per_replica is None else request.ipus_per_replica
    check_ipus_per_replica(ipus_per_replica, size)
    num_instances = request.num_instances
    if num_instances is None:
        num_free = sum(gpu.is_free for gpu in _gpus(request, facts)) * size // ipus_per_replica
        num_in_pod = None if pod is None else len(pod.ipus) * size // ipus_per_replica // len(hosts)
        num_instances = _num_automatic(request.num_replicas, size, len(hosts), num_free, num_in_pod)
    check_counts(
        num_instances=num_instances,
        num_replicas=request.num_replicas,
        num_hosts=len(hosts),
        instances_per_replica=size,
    )
    return request, _Counts(
        hosts=hosts,
        num_instances=num_instances,
        num_replicas=request.num_replicas or num_instances // size,
        parallelism=parallelism,
        ipus_per_replica=ipus_per_replica,
    )


def place(plan: LaunchPlan, facts: MachineFacts, given: LeasedDevices | None = None) -> tuple[Binding, ...]:
    """Return which cores each of a host's instances is bound to: of the leased cores ``given``, or, for None, of
    the plan's cores.
    """
    num_local, num_cores = plan.num_instances_per_host, len((given or plan).cores)
    node_of = {gpu.name: gpu.node for gpu in facts.gpus}
    host = HostMap(cpus=facts.cpus or flat_map(facts.cores), memory_nodes=facts.memory_nodes, max_cores=num_cores)
    demand = Demand(
        num_instances=num_local,
        num_threads=plan.threads_per_replica or facts.num_user_threads or max(1, num_cores // num_local),
        near=tuple(
            frozenset(node for name in instance.devices if (node := node_of.get(name)) is not None)
            for instance in (plan.instance(index, given) for index in range(num_local if plan.devices else 0))
        ),
    )
    return place_instances(plan.placement, host, demand)


def _within_allocation(
    request: LaunchRequest, allocation: Allocation, size: int, *, is_counted: bool
) -> LaunchRequest:
    """Return ``request`` with the hosts of Slurm's job ``allocation``, and one instance for each Slurm task."""
    if allocation.task is not None:
        rank, size = allocation.task
        raise PlanError(
            f"poprun was started as task {rank} of {size} of a Slurm step, and would start the job {size} times: "
            "call it once, in the batch script or in salloc's shell, without srun; it starts the tasks itself"
        )
    hosts = _hosts(request, allocation)
    is_here = hosts == (allocation.node_here,) and request.launcher is not LauncherChoice.SRUN
    # an interactive shell is one task, but a job of this machine may have any number of instances in the shell
    is_shell = is_here and allocation.tasks_per_node == (1,)
    if not is_counted and request.num_instances is not None:
        num_tasks = 0 if is_shell else sum(_tasks(allocation, hosts))
        request = replace(request, num_instances=num_tasks or math.lcm(size, len(hosts)))
    if not is_shell:
        _check_tasks(request, allocation, hosts)
    if is_here:
        return replace(request, hosts=())
    return replace(request, hosts=hosts, remote=replace(request.remote, slurm_job=allocation.job_id))


def _hosts(request: LaunchRequest, allocation: Allocation) -> tuple[str, ...]:
    """Return the job's hosts, by default all hosts of Slurm's job. Raises PlanError if a host is not Slurm's."""
    foreign = [host for host in request.hosts if host not in allocation.nodes]
    if foreign:
        raise PlanError(
            f"--host {fold_hosts(foreign)} is not in Slurm's job {allocation.job_id}, which has "
            f"{fold_hosts(allocation.nodes)}: leave out --host to use those, or ask for it: "
            f"sbatch --nodelist={fold_hosts(request.hosts)}"
        )
    return request.hosts or allocation.nodes


def _tasks(allocation: Allocation, hosts: tuple[str, ...]) -> list[int]:
    """Return the number of Slurm's tasks on each host; [] if the user asked Slurm for no tasks."""
    by_node = dict(zip(allocation.nodes, allocation.tasks_per_node, strict=False))
    return [by_node[host] for host in hosts] if by_node else []


def _check_tasks(request: LaunchRequest, allocation: Allocation, hosts: tuple[str, ...]) -> None:
    """Raise PlanError unless Slurm's job has exactly one task for each instance, and equally many on each host."""
    tasks = _tasks(allocation, hosts)
    if not tasks:
        return
    num_nodes, num_tasks = len(hosts), sum(tasks)
    wanted = request.num_instances or num_tasks
    job, per_node = f"Slurm's job {allocation.job_id}", math.ceil(wanted / num_nodes)
    cure = f"ask for sbatch --nodes={num_nodes} --ntasks-per-node={per_node}"
    most = allocation.most_tasks_per_node
    if num_tasks < most * num_nodes and request.num_instances != num_tasks:
        raise PlanError(
            f"{job} was asked for --ntasks={num_tasks}, which counts, and for --ntasks-per-node={most} on "
            f"{num_nodes} nodes: leave out one of them, or give --num-instances {num_tasks}"
        )
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


def check_settings(asked: LaunchRequest | LaunchPlan, num_instances: int, parallelism: Parallelism) -> None:
    """Raise PlanError if a setting in a request or plan is impossible for a job of ``num_instances`` instances."""
    if asked.threads_per_replica is not None:
        check_count("--threads-per-replica", asked.threads_per_replica)
    check_output(asked.output, num_instances, has_mesh=parallelism.has_mesh)
    check_ending(asked.ending)
    check_vipu(asked.vipu, num_instances)
    check_path("--executable-cache-path", asked.executable_cache_path)
    check_remote(asked.remote)
    check_trace(asked.trace)
    needs = {"--trace": asked.trace.folder, "--hang-timeout": asked.ending.hang_timeout_seconds}
    for option in (name for name, value in needs.items() if value is not None and not asked.is_watched):
        raise PlanError(f"{option} needs what --no-watching leaves out: give one of the two")


def _check_hosts(hosts: tuple[str, ...], facts: MachineFacts) -> None:
    check_hosts(hosts)
    names_here = [host for host in hosts if host in facts.host_aliases]
    if len(names_here) > 1:
        raise PlanError(f"--host names this machine twice, as {names_here[0]} and {names_here[1]}: name it once")


def _num_automatic(
    num_replicas: int | None, size: int, num_hosts: int, num_free: int, num_in_pod: int | None
) -> int:
    """Return the number of instances that ``auto`` means if each host has free GPUs for ``num_free`` instances."""
    number = max(1, num_free) * num_hosts
    if num_replicas is not None:
        legal = legal_instances(num_replicas, num_hosts, size)
        return max((n for n in legal if n <= number or size > 1), default=number)
    # without a given number of replicas, all instances must fit into the pod
    if num_in_pod is not None:
        number = min(number, max(1, num_in_pod) * num_hosts)
    step = math.lcm(size, num_hosts)
    return max(step, number // step * step)


def _choose_mpi(request: LaunchRequest, facts: MachineFacts) -> MpiRuntime | None:
    choice = request.launcher
    if choice in (LauncherChoice.LOCAL, LauncherChoice.SRUN):
        return None
    if choice is LauncherChoice.MPI and facts.mpi is None:
        unknown = (
            f" (found {', '.join(facts.unknown_mpi)}, of a kind it does not know)" if facts.unknown_mpi else ""
        )
        raise MpiNotFoundError(
            f"--launcher mpi: there is no MPICH and no Open MPI on PATH or beside poprun's own Python{unknown}; "
            "install one with pip install 'poprun[mpich]', put your cluster's on PATH (module load), or start "
            "without MPI: --launcher local"
        )
    return facts.mpi


def _launcher_kind(request: LaunchRequest, mpi: MpiRuntime | None) -> LauncherKind:
    """Return the launcher: the user's choice, or MPI if it was found, else srun in a Slurm job, else poprun."""
    if mpi is not None:
        return LauncherKind.MPI
    is_slurm = request.launcher is LauncherChoice.SRUN or request.remote.slurm_job is not None
    return LauncherKind.SRUN if is_slurm and request.launcher is not LauncherChoice.LOCAL else LauncherKind.LOCAL


def _with_domains(plan: LaunchPlan, pod: "Cluster | None") -> VipuSettings:
    """Return the plan's settings for virtual IPUs, completed by the number of IPU-Link domains (linked IPUs)."""
    vipu = plan.vipu
    if vipu.num_ilds is None and vipu.ipus_per_host is None and pod is None:
        return vipu
    from poprun.plan.domains import check_counted, num_ilds

    check_counted(plan)
    return replace(vipu, num_ilds=num_ilds(plan, pod))


def _gpus(request: LaunchRequest, facts: MachineFacts) -> tuple[Gpu, ...]:
    """Return the GPUs of this machine that the job may use, at most as many as ``--ipus-per-host``."""
    return () if request.vipu.is_offline else facts.gpus[: request.vipu.ipus_per_host]


def _choose_devices(
    request: LaunchRequest, facts: MachineFacts, num_instances: int, num_each: int
) -> tuple[str, ...]:
    """Choose the GPUs of a host, free GPUs first; return their names in the order of all GPUs of the machine.

    The host has ``num_instances`` instances, each of which needs ``num_each`` devices. If there are too few
    devices, instances share all devices if the user allows this; otherwise the result is ().
    """
    gpus, count = _gpus(request, facts), num_instances * num_each
    slices = [gpu.name for gpu in gpus if MAKERS[facts.maker].is_slice(gpu.name)]
    if slices and num_each > 1:
        raise PlanError(
            f"an instance needs {num_each} devices, and {slices[0]} is a slice of one, of which a process sees "
            f"one only: give fewer --ipus-per-replica, or name whole devices in {MAKERS[facts.maker].mask}"
        )
    if request.vipu.shares_devices and num_each <= len(gpus):
        count = min(count, len(gpus))
    if count > len(gpus):
        return ()
    by_need = sorted(range(len(gpus)), key=lambda slot: (not gpus[slot].is_free, slot))
    return tuple(gpus[slot].name for slot in sorted(by_need[:count]))


def _num_cores(plan: LaunchPlan) -> int:
    """Return on how many cores of a host the job computes: all, or a part in proportion to its virtual IPUs."""
    counted, num_cores = plan.vipu.ipus_per_host, len(plan.cores)
    if plan.devices or counted is None:
        return num_cores
    return max(1, num_cores * plan.num_ipus_per_host // counted)


def _choose_threads(request: LaunchRequest, facts: MachineFacts, variables: Variables, share: int) -> int | None:
    """Return the number of threads of each replica; None if poprun keeps the user's ``OMP_NUM_THREADS``."""
    if request.threads_per_replica is not None:
        return request.threads_per_replica
    asked = dict(variables).get(NUM_THREADS)
    if asked is not None:
        return int(asked) if asked.isdecimal() and int(asked) else None
    return None if facts.user_num_threads else max(1, share)


def _choose_output(request: LaunchRequest, words: JobWords) -> OutputSettings:
    """Return the request's settings for output; MPI options in ``words`` fill in settings that are missing."""
    asked = request.output
    is_tagged = True if asked.is_tagged is None and words.is_tagged else asked.is_tagged
    return replace(asked, is_tagged=is_tagged, log_dir=asked.log_dir or words.log_dir)


def _choose_placement(request: LaunchRequest) -> ProcessPlacement:
    """Return the policy by which poprun binds instances to cores; DISABLED if the user has not chosen a policy,
    and has passed an MPI option with which the MPI launcher itself binds the instances.
    """
    words = [part for word in (*request.mpi_global_args, *request.mpi_local_args) for part in word.split("=", 1)]
    binds = any(word.lstrip("-") == _BIND_TO and bound.lower() != _UNBOUND for word, bound in pairwise(words))
    return ProcessPlacement.DISABLED if binds and request.placement is _DEFAULT_PLACEMENT else request.placement
