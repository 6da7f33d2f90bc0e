"""The plan: everything that poprun will do for a job, as one frozen value.

A plan contains counts and ranges, not one item per instance, so that a plan for a thousand hosts is small;
:meth:`LaunchPlan.instance` computes one instance. `poprun.plan.plan_file` writes a plan as JSON and reads it; a
plan that was written and read starts the same processes.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import field
from enum import StrEnum
from typing import Final

from popdist.ground.contract import Contract, Endpoint
from popdist.ground.layout import Parallelism, ReplicaLayout, ReplicaPart
from popdist.ground.values import dataclass
from poprun.makers.maker import DEFAULT_MAKER, MAKERS
from poprun.plan.mpi_options import Variables
from poprun.plan.request import (
    NO_TRACE,
    EndingSettings,
    OutputSettings,
    RemoteSettings,
    TraceSettings,
    VipuSettings,
)
from poprun.plan.topology import Binding, MpiRuntime, ProcessPlacement
from poprun.text import IF_USED
from poprun.text.ranges import Hosts

_NOT_SHARED: Final = Parallelism()
_NO_VIPU: Final = VipuSettings()


class LauncherKind(StrEnum):
    """The way in which poprun starts the instances of a job: with MPI, with Slurm's srun, or itself."""

    MPI = "mpi"
    LOCAL = "local"
    SRUN = "srun"


@dataclass(frozen=True, slots=True, kw_only=True)
class Places(Parallelism):
    """The location of each instance for messages: its part of a replica, and its host if there are several."""

    hosts: Sequence[str] = ()  # each with the same number of instances; empty if the job has only one host
    num_per_host: int = 1

    def hosts_of(self, instances: Iterable[int]) -> tuple[str, ...]:
        """Return the names of the hosts on which ``instances`` run; () if the job has only one host."""
        numbers = {index // self.num_per_host for index in instances} if self.hosts else ()
        return tuple(self.hosts[number] for number in sorted(numbers))

    def describe(self, instances: Iterable[int]) -> str:
        """Return a text with the host and part of a replica that all ``instances`` share; "" if there is none."""
        instances = tuple(instances)
        hosts = self.hosts_of(instances)
        host = f"host {hosts[0]}" if len(hosts) == 1 else ""
        return ", ".join(filter(None, (host, Parallelism.describe(self, instances))))


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFacts:
    """The values that poprun chooses when a job starts, such as addresses and ports, and passes to programs."""

    job_id: str = ""  # the same for all instances and all attempts of a job
    restart_count: int = 0  # number of restarts of the job until now
    master: Endpoint | None = None  # address at which torch's store of the program will listen
    store: Endpoint | None = None  # address at which popdist's store listens
    coordinator: Endpoint | None = None  # address at which JAX's coordinator will listen
    workers: Sequence[Endpoint] = ()  # address of each instance's TensorFlow worker
    # leased devices on the instance's host, in slot order; empty without a lease
    devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedDevices:
    """The GPUs and cores that a job has leased on one host, and uses instead of the plan's GPUs and cores."""

    devices: tuple[str, ...]  # GPUs or slices of GPUs, in slot order
    cores: tuple[int, ...]  # cores of the host, ascending
    bindings: tuple[Binding, ...]  # the cores and memory nodes to which instances are bound


@dataclass(frozen=True, slots=True, kw_only=True)
class InstancePlan:
    """The plan of one instance: its host, replicas, virtual IPUs, GPUs and cores."""

    index: int  # among all instances
    host: str
    host_index: int  # index of the host among the hosts of the plan
    local_index: int  # index among the instances of the host
    replicas: range  # global indices of its replicas, also of a replica that it shares
    part: ReplicaPart  # the part of a replica that it has
    # its virtual IPUs, numbered from 0 on its host, in the order of its replicas
    ipus: range
    # indices of its devices among ``visible``, for all its replicas; empty on the CPU
    ordinals: tuple[int, ...]
    devices: tuple[str, ...]  # names of its devices on the host
    visible: tuple[str, ...]  # names of the devices that its program sees
    is_sharing: bool  # whether another instance of the host also computes on one of its devices
    # cores of its virtual IPUs, which its replicas use in turn; empty if it has devices
    cores: tuple[int, ...]
    binding: Binding | None  # the cores and memory nodes of its process


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """Everything that poprun decides about a job before the first process starts.

    All hosts are alike: each host runs ``num_instances / len(hosts)`` instances and has the same number of virtual
    IPUs, GPUs and cores.

    Attributes:
        program: argv of every instance; empty only in a dry run.
        working_directory: Absolute path in which every instance starts.
        hosts: Names, in order of host index. At least one.
        num_instances: Processes in the job, a multiple of the number of hosts.
        num_replicas: Model replicas in the job, a multiple of ``num_instances``; if instances share a replica,
            ``num_instances`` is a multiple of ``num_replicas``.
        parallelism: How several instances share one replica.
        mapping_path: Absolute path of the file with the mapping that was asked for, or None.
        ipus_per_replica: Virtual IPUs of one replica; each of its instances has the same number, at least 1.
        cores: Cores of each host, ascending.
        devices: Devices that the job uses on each host, in slot order; empty if the job computes on the CPU. There
            are fewer devices than the instances need if instances share devices.
        maker: Name of the devices' maker in `poprun.makers`.
        placement: How the instances were placed on the cores.
        bindings: The cores and memory nodes of each host's instances; each instance is in one binding, or none is.
        threads_per_replica: Value of ``OMP_NUM_THREADS``; None leaves the user's value.
        is_deterministic: Whether torch uses only deterministic algorithms.
        launcher: How the processes are started.
        mpi: The MPI runtime that starts the processes, or None with another launcher.
        mpi_global_args: Extra words for the MPI launcher, before its process count; none with the local launcher.
        mpi_local_args: Extra words for the MPI launcher, after its process count; none with the local launcher.
        variables: Variables of all programs, names and values; None means the value in poprun's environment.
        instance_variables: Pairs of an instance and its own variables, which override ``variables``.
        executable_cache_path: Directory for compiled programs, absolute or below ``working_directory``, or None.
        vipu: Settings for the pool of virtual IPUs.
        output: Settings for showing and keeping the programs' output.
        ending: Time limits, restarts and reports of the job.
        remote: How poprun reaches the hosts.
        trace: Settings of a trace; ``NO_TRACE`` for no trace.
        is_watched: Whether poprun observes the programs: their steps, calls and stacks.
    """

    program: tuple[str, ...]
    working_directory: str
    hosts: Hosts
    num_instances: int
    num_replicas: int
    parallelism: Parallelism = field(default=_NOT_SHARED, metadata=IF_USED)
    mapping_path: str | None = field(default=None, metadata=IF_USED)
    ipus_per_replica: int
    cores: tuple[int, ...]
    devices: tuple[str, ...]
    placement: ProcessPlacement
    bindings: tuple[Binding, ...]
    threads_per_replica: int | None
    is_deterministic: bool
    launcher: LauncherKind
    mpi: MpiRuntime | None
    mpi_global_args: tuple[str, ...]
    mpi_local_args: tuple[str, ...]
    variables: Variables
    instance_variables: tuple[tuple[int, Variables], ...]
    executable_cache_path: str | None
    vipu: VipuSettings = field(default=_NO_VIPU, metadata=IF_USED)
    output: OutputSettings
    ending: EndingSettings
    remote: RemoteSettings
    trace: TraceSettings = field(default=NO_TRACE, metadata=IF_USED)
    is_watched: bool = field(default=True, metadata=IF_USED)
    maker: str = field(default=DEFAULT_MAKER, metadata=IF_USED)

    def trace_parts(self, job_id: str, restart_count: int) -> str:
        """Return the folder of one start of the job, in which its programs write recordings for a trace."""
        folder = os.path.join(self.working_directory, self.trace.folder or "")
        return os.path.join(folder, f".parts-{job_id}-{restart_count}")

    @property
    def layout(self) -> ReplicaLayout:
        """The distribution of replicas over instances; instances that share a replica count as one instance."""
        number = self.num_instances // self.parallelism.instances_per_replica
        return ReplicaLayout(num_instances=number, num_replicas=self.num_replicas)

    @property
    def num_instances_per_host(self) -> int:
        """The number of instances on each host."""
        return self.num_instances // len(self.hosts)

    @property
    def places(self) -> Places:
        """The location of each instance for messages: its part of a replica, and its host."""
        shared = self.parallelism
        return Places(
            instances_per_replica=shared.instances_per_replica,
            tensor=shared.tensor,
            pipeline=shared.pipeline,
            hosts=self.hosts if len(self.hosts) > 1 else (),
            num_per_host=self.num_instances_per_host,
        )

    @property
    def num_ipus_per_instance(self) -> int:
        """The number of virtual IPUs of each instance, for all its replicas or its part of a shared replica."""
        return self.layout.num_local_replicas * self.num_devices_per_instance

    @property
    def num_devices_per_instance(self) -> int:
        """The number of GPUs of an instance: for one replica or a part of one; its replicas use them in turn."""
        return self.ipus_per_replica // self.parallelism.instances_per_replica

    @property
    def num_ipus_per_host(self) -> int:
        """The number of virtual IPUs that the job uses on each host."""
        return self.num_instances_per_host * self.num_ipus_per_instance

    @property
    def num_gpus_needed(self) -> int:
        """The number of GPUs that a host needs if no two instances share a GPU."""
        return self.num_instances_per_host * self.num_devices_per_instance

    @property
    def num_gpus_per_host(self) -> int:
        """The number of GPUs that the job uses on each host; if it uses none, the number that it would need."""
        return len(self.devices) or self.num_gpus_needed

    @property
    def shares_devices(self) -> bool:
        """Whether instances of a host share GPUs: GPUs are too few, or are slices of larger GPUs."""
        maker = MAKERS[self.maker]
        is_shared = len(self.devices) < self.num_gpus_needed or any(map(maker.is_slice, self.devices))
        return bool(self.devices) and self.num_instances_per_host > 1 and is_shared

    @property
    def num_ilds(self) -> int:
        """The number of IPU-Link domains (groups of linked IPUs) of the job; all have equally many instances."""
        return self.vipu.num_ilds or 1

    def ild_of(self, instance: int) -> int:
        """Return the index of the IPU-Link domain (group of linked IPUs) of the instance ``instance``."""
        return instance * self.num_ilds // self.num_instances

    @property
    def asks_server(self) -> bool:
        """Whether the job leases its virtual IPUs from a server (option ``--vipu-server-host``)."""
        return self.vipu.server_host is not None and not self.vipu.is_offline

    @property
    def leases_ipus(self) -> bool:
        """Whether the job leases virtual IPUs (a pod's, or CPU cores) from the pool folders of its hosts."""
        vipu = self.vipu
        if vipu.is_offline or self.asks_server:
            return False
        is_named = vipu.partition or vipu.pool or vipu.ipus_per_host is not None
        return bool(vipu.pod or (is_named and not self.devices))

    @property
    def takes_lease(self) -> bool:
        """Whether the job leases GPUs or virtual IPUs from its hosts' pools (files that list all leases)."""
        return bool(self.devices) or self.leases_ipus

    @property
    def owns_cores(self) -> bool:
        """Whether the instances are bound to cores that no other job may use."""
        return bool(self.bindings) and self.placement in (ProcessPlacement.CORE, ProcessPlacement.COMPACT)

    @property
    def has_curves(self) -> bool:
        """Whether poprun measures the job while it runs, because the user wants a report or metrics."""
        return bool(self.ending.report_files) or self.ending.metrics_port is not None

    @property
    def is_tagged(self) -> bool:
        """Whether each line of output starts with a tag that names its instance."""
        if self.output.is_tagged is not None:
            return self.output.is_tagged
        return self.num_instances > 1 or self.output.tag_format is not None

    @property
    def cache_directory(self) -> str | None:
        """The absolute path of the directory in which programs cache compiled code; None if the user gave none."""
        path = self.executable_cache_path
        return None if path is None else os.path.join(self.working_directory, path)

    def passed_names(self, index: int | None = None) -> frozenset[str]:
        """Return the names of poprun's variables that the user passes to instance ``index``, or (None) to all."""
        return frozenset(name for name, value in self._asked_variables(index) if value is None)

    def variables_of(self, index: int) -> dict[str, str]:
        """Return the environment variables that the user set to a value for instance ``index``."""
        return {name: value for name, value in self._asked_variables(index) if value is not None}

    def _asked_variables(self, index: int | None) -> Iterator[tuple[str, str | None]]:
        """Yield (name, value) of each variable that the user set for all instances, then for instance ``index``.
        The value None means that the instance gets the value of poprun's own variable.
        """
        yield from self.variables
        for instance, variables in self.instance_variables:
            if instance == index:
                yield from variables

    @property
    def named_devices(self) -> LeasedDevices:
        """The GPUs and cores in the plan, which the job uses unless a lease gives it other GPUs and cores."""
        return LeasedDevices(devices=self.devices, cores=self.cores, bindings=self.bindings)

    def instance(self, index: int, given: LeasedDevices | None = None) -> InstancePlan:
        """Return the plan of instance ``index``; ``given`` are the leased GPUs and cores of its host, if any.

        Raises:
            ValueError: If there is no such instance.
        """
        given = given or self.named_devices
        part = self.parallelism.part_of(index)
        host_index, local_index = divmod(index, self.num_instances_per_host)
        first_ipu = local_index * self.num_ipus_per_instance
        dealt = ordinals = self._dealt(local_index, len(given.devices))
        devices, visible = tuple(given.devices[number] for number in dealt), given.devices
        if any(map(MAKERS[self.maker].is_slice, visible)):  # a program would see only the first slice
            ordinals, visible = tuple(range(len(devices))), devices
        binding = next((binding for binding in given.bindings if binding.holds(local_index)), None)
        cores = self._share_of(given.cores, local_index) if binding is None else binding.share_of(local_index)
        return InstancePlan(
            index=index,
            host=self.hosts[host_index],
            host_index=host_index,
            local_index=local_index,
            replicas=self.layout.replicas_of(part.replica),
            part=part,
            ipus=range(first_ipu, first_ipu + self.num_ipus_per_instance),
            ordinals=ordinals,
            devices=devices,
            visible=visible,
            is_sharing=any(number + len(given.devices) < self.num_gpus_needed for number in dealt),
            cores=() if given.devices else cores,
            binding=binding,
        )

    def _dealt(self, local_index: int, num_devices: int) -> tuple[int, ...]:
        """Return the indices of an instance's GPUs on its host; if GPUs are too few, instances share them."""
        first, count = local_index * self.num_devices_per_instance, self.num_devices_per_instance
        return tuple(number % num_devices for number in range(first, first + count)) if num_devices else ()

    def replicas_of(self, instances: range) -> range:
        """Return the range of all replicas that the range ``instances`` has, wholly or in part."""
        first, last = self.instance(instances[0]), self.instance(instances[-1])
        return range(first.replicas.start, last.replicas.stop)

    def instances(self) -> Iterator[InstancePlan]:
        """Return an iterator over the plans of all instances, in the order of their indices."""
        return map(self.instance, range(self.num_instances))

    def _share_of(self, cores: tuple[int, ...], local_index: int) -> tuple[int, ...]:
        """Return an instance's equal part of a host's ``cores``; if cores are too few, instances share a core."""
        count, num_cores = self.num_instances_per_host, len(cores)
        first = local_index * num_cores // count
        last = max(first + 1, (local_index + 1) * num_cores // count)
        return cores[first:last]

    def contract(self, index: int, start: StartFacts | None = None) -> Contract:
        """Return the contract of instance ``index``: all values that its program gets in environment variables."""
        start = start or StartFacts()
        instance = self.instance(index)
        return Contract(
            num_instances=self.num_instances,
            instance_index=index,
            num_local_instances=self.num_instances_per_host,
            local_instance_index=instance.local_index,
            host_index=instance.host_index,
            num_replicas=self.num_replicas,
            parallelism=self.parallelism,
            mapping_path=self.mapping_path,
            ipus_per_replica=self.ipus_per_replica,
            devices=instance.ordinals,
            device_type=MAKERS[self.maker].device_type if self.devices else "",
            shares_device=self.shares_devices,
            job_id=start.job_id,
            restart_count=start.restart_count,
            master=start.master,
            store=start.store,
            executable_cache_path=self.cache_directory,
            num_threads=self.threads_per_replica,
            is_deterministic=self.is_deterministic,
        )
