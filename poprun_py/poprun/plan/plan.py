"""The plan: what poprun will do, as one frozen value.

A plan states counts and ranges, not items, so a plan for a thousand hosts is as small as one for a laptop;
:meth:`LaunchPlan.instance` works out one instance of it on demand. It is written as JSON and read back by
`poprun.plan.plan_file`; a plan that was written and read starts the same processes.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from popdist.ground.contract import Contract, Endpoint
from popdist.ground.layout import Parallelism, ReplicaLayout, ReplicaPart
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
    """How the instances of a plan are started."""

    MPI = "mpi"
    LOCAL = "local"
    SRUN = "srun"


@dataclass(frozen=True, slots=True, kw_only=True)
class Places(Parallelism):
    """Where instances are: their parts of replicas, and their hosts where there are several."""

    hosts: Sequence[str] = ()  # of all instances, each with as many as the others; none where there is one host
    num_per_host: int = 1

    def hosts_of(self, instances: Iterable[int]) -> tuple[str, ...]:
        """The hosts of ``instances``, in order; none where there is one host."""
        numbers = {index // self.num_per_host for index in instances} if self.hosts else ()
        return tuple(self.hosts[number] for number in sorted(numbers))

    def describe(self, instances: Iterable[int]) -> str:
        """What the places of ``instances`` have in common, with their host."""
        instances = tuple(instances)
        hosts = self.hosts_of(instances)
        host = f"host {hosts[0]}" if len(hosts) == 1 else ""
        return ", ".join(filter(None, (host, Parallelism.describe(self, instances))))


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFacts:
    """What programs are told and a plan does not know: it is decided when the job starts."""

    job_id: str = ""  # the same for all instances and all attempts of a job
    restart_count: int = 0  # how often the job has been started again
    master: Endpoint | None = None  # where torch's own store of the program will listen
    store: Endpoint | None = None  # where popdist's store listens
    coordinator: Endpoint | None = None  # where JAX's coordinator will listen
    workers: Sequence[Endpoint] = ()  # where TensorFlow's worker of each instance will listen
    # devices that leases gave the job on the instance's host, in slot order; else empty
    devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedDevices:
    """The devices and cores that leases gave a job on one host, in place of those that its plan names."""

    devices: tuple[str, ...]  # GPUs or their slices, in slot order
    cores: tuple[int, ...]  # cores of the host, ascending
    bindings: tuple[Binding, ...]  # what the instances are bound to


@dataclass(frozen=True, slots=True, kw_only=True)
class InstancePlan:
    """One process of a plan."""

    index: int  # among all instances
    host: str
    host_index: int  # of that host among those of the plan
    local_index: int  # among the instances of its host
    replicas: range  # global indices of its replicas; of the one that it has a part of, where instances share them
    part: ReplicaPart  # which part of which replica it holds
    # its virtual IPUs, numbered from 0 on its host: those of its first replica, then those of the next
    ipus: range
    # its devices, as numbers among those that its program sees, for all its replicas; empty on the CPU
    ordinals: tuple[int, ...]
    devices: tuple[str, ...]  # names of the same devices on that host
    visible: tuple[str, ...]  # names of the devices that its program sees
    is_sharing: bool  # whether other instances of its host compute on one of its devices, too
    # cores that its virtual IPUs stand for, on which its replicas take turns; empty with devices
    cores: tuple[int, ...]
    binding: Binding | None  # what its process is bound to


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """Everything that is decided before the first process starts.

    All hosts are alike: each runs ``num_instances / len(hosts)`` instances on as many virtual IPUs, GPUs, cores.

    Attributes:
        program: argv of every instance; empty only in a dry run.
        working_directory: Absolute path in which every instance starts.
        hosts: Names, in order of host index. At least one.
        num_instances: Processes in the job, a multiple of the number of hosts.
        num_replicas: Model replicas in the job: a multiple of ``num_instances``, or these a multiple of it.
        parallelism: How several instances share one replica, where they do.
        mapping_path: Absolute path of the file with the mapping that was asked for, or None.
        ipus_per_replica: Virtual IPUs of one replica. Its instances have equally many of them, at least 1 each.
        cores: Cores of each host, ascending.
        devices: Devices that the job uses on each host, in slot order, fewer than its instances need where these
            share them; empty when it computes on the CPU.
        maker: Who has made them, as `poprun.makers` calls it.
        placement: How the instances were placed on the cores.
        bindings: What the instances of each host are bound to; each of them is in one, or there is none at all.
        threads_per_replica: Value of ``OMP_NUM_THREADS``; None leaves the one that the user set.
        is_deterministic: Whether torch is to use deterministic algorithms only.
        launcher: How the processes are started.
        mpi: The runtime that starts them, or None with the local launcher.
        mpi_global_args: Extra words for the MPI launcher, before its process count; none with the local launcher.
        mpi_local_args: Extra words for the MPI launcher, after its process count; none with the local launcher.
        variables: Variables of all programs, names and values; None is the value that poprun finds.
        instance_variables: Pairs of an instance and variables of its own, which win over those of all.
        executable_cache_path: Directory for compiled programs, absolute or below ``working_directory``, or None.
        vipu: What is asked of the pool of virtual IPUs.
        output: What is shown and kept of what the programs print.
        ending: When the job ends other than by itself, and what is told of it.
        remote: How the hosts are reached.
        trace: What is recorded for a trace, if anything is.
        is_watched: Whether poprun looks into the programs: their steps, calls and stacks.
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
        """The folder in which the programs of an attempt leave what they have recorded."""
        folder = os.path.join(self.working_directory, self.trace.folder or "")
        return os.path.join(folder, f".parts-{job_id}-{restart_count}")

    @property
    def layout(self) -> ReplicaLayout:
        """Which replicas each of the instances owns that hold the same part of theirs, in the order of these."""
        number = self.num_instances // self.parallelism.instances_per_replica
        return ReplicaLayout(num_instances=number, num_replicas=self.num_replicas)

    @property
    def num_instances_per_host(self) -> int:
        """Processes on each host."""
        return self.num_instances // len(self.hosts)

    @property
    def places(self) -> Places:
        """Where its instances are, for words about them."""
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
        """Virtual IPUs of each instance: every replica, or part of one, has its own."""
        return self.layout.num_local_replicas * self.num_devices_per_instance

    @property
    def num_devices_per_instance(self) -> int:
        """Devices that each instance needs: its replicas take turns on them."""
        return self.ipus_per_replica // self.parallelism.instances_per_replica

    @property
    def num_ipus_per_host(self) -> int:
        """Virtual IPUs that the job uses on each host."""
        return self.num_instances_per_host * self.num_ipus_per_instance

    @property
    def num_gpus_needed(self) -> int:
        """Devices of each host with which every instance has its own."""
        return self.num_instances_per_host * self.num_devices_per_instance

    @property
    def num_gpus_per_host(self) -> int:
        """Devices that the job uses on each host, or would use if there were as many."""
        return len(self.devices) or self.num_gpus_needed

    @property
    def shares_devices(self) -> bool:
        """Whether instances compute on the same device, or on slices of devices."""
        maker = MAKERS[self.maker]
        is_shared = len(self.devices) < self.num_gpus_needed or any(map(maker.is_slice, self.devices))
        return bool(self.devices) and self.num_instances_per_host > 1 and is_shared

    @property
    def num_ilds(self) -> int:
        """IPU-Link domains of the job; each has equally many instances, with consecutive indices."""
        return self.vipu.num_ilds or 1

    def ild_of(self, instance: int) -> int:
        """The IPU-Link domain of an instance, among those of the job."""
        return instance * self.num_ilds // self.num_instances

    @property
    def asks_server(self) -> bool:
        """Whether the job takes its virtual IPUs from a server."""
        return self.vipu.server_host is not None and not self.vipu.is_offline

    @property
    def leases_ipus(self) -> bool:
        """Whether the job leases virtual IPUs from the pools of its hosts, for a pod or on a CPU."""
        vipu = self.vipu
        if vipu.is_offline or self.asks_server:
            return False
        is_named = vipu.partition or vipu.pool or vipu.ipus_per_host is not None
        return bool(vipu.pod or (is_named and not self.devices))

    @property
    def takes_lease(self) -> bool:
        """Whether the job leases GPUs or virtual IPUs from the pools of its hosts."""
        return bool(self.devices) or self.leases_ipus

    @property
    def owns_cores(self) -> bool:
        """Whether the instances have cores that no other job may have."""
        return bool(self.bindings) and self.placement in (ProcessPlacement.CORE, ProcessPlacement.COMPACT)

    @property
    def has_curves(self) -> bool:
        """Whether somebody asked for what is measured in the course of the job."""
        return bool(self.ending.report_files) or self.ending.metrics_port is not None

    @property
    def is_tagged(self) -> bool:
        """Whether lines of output carry their instance."""
        if self.output.is_tagged is not None:
            return self.output.is_tagged
        return self.num_instances > 1 or self.output.tag_format is not None

    @property
    def cache_directory(self) -> str | None:
        """Absolute path of the directory for compiled programs, or None."""
        path = self.executable_cache_path
        return None if path is None else os.path.join(self.working_directory, path)

    def passed_names(self, index: int | None = None) -> frozenset[str]:
        """The variables whose values poprun passes on to instance ``index``, or to all instances."""
        return frozenset(name for name, value in self._asked_variables(index) if value is None)

    def variables_of(self, index: int) -> dict[str, str]:
        """The variables to which the user gave a value for instance ``index``."""
        return {name: value for name, value in self._asked_variables(index) if value is not None}

    def _asked_variables(self, index: int | None) -> Iterator[tuple[str, str | None]]:
        """The variables of all programs, then those of instance ``index``, which win."""
        yield from self.variables
        for instance, variables in self.instance_variables:
            if instance == index:
                yield from variables

    @property
    def named_devices(self) -> LeasedDevices:
        """The devices and cores that the plan names: what it runs on without a lease that gives others."""
        return LeasedDevices(devices=self.devices, cores=self.cores, bindings=self.bindings)

    def instance(self, index: int, given: LeasedDevices | None = None) -> InstancePlan:
        """Where instance ``index`` runs and what it owns; ``given`` is what leases gave the job on its host.

        Raises:
            ValueError: If there is no such instance.
        """
        given = given or self.named_devices
        part = self.parallelism.part_of(index)
        host_index, local_index = divmod(index, self.num_instances_per_host)
        first_ipu = local_index * self.num_ipus_per_instance
        dealt = ordinals = self._dealt(local_index, len(given.devices))
        devices, visible = tuple(given.devices[number] for number in dealt), given.devices
        if any(map(MAKERS[self.maker].is_slice, visible)):  # of several slices a program would see the first one
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
        """The numbers of the devices of an instance, among those of its host; dealt in turn if they are shared."""
        first, count = local_index * self.num_devices_per_instance, self.num_devices_per_instance
        return tuple(number % num_devices for number in range(first, first + count)) if num_devices else ()

    def replicas_of(self, instances: range) -> range:
        """The replicas of which consecutive ``instances``, at least one, hold all or a part."""
        first, last = self.instance(instances[0]), self.instance(instances[-1])
        return range(first.replicas.start, last.replicas.stop)

    def instances(self) -> Iterator[InstancePlan]:
        """Every instance, in order."""
        return map(self.instance, range(self.num_instances))

    def _share_of(self, cores: tuple[int, ...], local_index: int) -> tuple[int, ...]:
        """The share of a host's ``cores`` that one of its instances has; too few cores are shared by several."""
        count, num_cores = self.num_instances_per_host, len(cores)
        first = local_index * num_cores // count
        last = max(first + 1, (local_index + 1) * num_cores // count)
        return cores[first:last]

    def contract(self, index: int, start: StartFacts | None = None) -> Contract:
        """The contract of instance ``index``: what its program is told about the job and its start."""
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
