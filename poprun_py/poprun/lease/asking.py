"""What a job wishes for of the virtual IPUs of its host, as they are at the moment."""

import socket
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from poprun.errors import PlanError
from poprun.plan.inventory import Cluster, VirtualIpu, size_of_partition
from poprun.plan.plan import LaunchPlan
from poprun.plan.topology import Gpu
from poprun.pool.clusters import allocation_of, check_names, choose_cluster, pod_of
from poprun.pool.requests import PartitionWish, Wish

FindGpus = Callable[[], Sequence[Gpu]]


class IpuAsker:
    """What a job wishes for, as the machine is at the moment."""

    def __init__(self, plan: LaunchPlan, gpus: Sequence[Gpu], find_gpus: FindGpus, *, is_fixed: bool) -> None:
        self.plan = plan
        self._find_gpus = find_gpus
        self._is_fixed = is_fixed
        self.cluster = self._cluster_of(gpus)
        self._check()

    def wish(self, *, looks_again: bool = False) -> Wish:
        """The wish; GPUs are looked at again for processes outside the pool where that is asked for."""
        if looks_again and self.plan.devices:
            self.cluster = self._cluster_of(self._find_gpus())
        vipu = self.plan.vipu
        if vipu.partition is None:
            return Wish(num_ipus=self.plan.num_slots_per_host, choose=self._choose(self.plan.num_slots_per_host))
        used = size_of_partition(self.plan.num_slots_per_host)
        without_turns = size_of_partition(
            self.plan.num_replicas // len(self.plan.hosts) * self.plan.ipus_per_replica
        )
        return Wish(
            num_ipus=self.plan.num_slots_per_host,
            choose=self._choose(used),
            partition=PartitionWish(
                name=vipu.partition,
                fitting=range(used, without_turns + 1),
                cluster=self.cluster.name,
                allocation=self._allocation or "",
                is_temporary=vipu.removes_partition,
                may_change=vipu.updates_partition,
                resets=vipu.resets_partition,
                is_known=self._is_known,
            ),
        )

    @property
    def waits_for_others(self) -> bool:
        """Whether processes outside the pool hold memory on GPUs that the job might use."""
        return not self.plan.vipu.shares_devices and any(ipu.occupants for ipu in self.cluster.ipus)

    def _cluster_of(self, gpus: Sequence[Gpu]) -> Cluster:
        vipu = self.plan.vipu
        is_counted = vipu.ipus_per_host is not None
        cluster = choose_cluster(
            socket.gethostname(),
            gpus if self.plan.devices else (),
            len(self.plan.cores),
            ipus_per_host=vipu.ipus_per_host
            if is_counted or vipu.partition or self.plan.devices
            else self._num_cores(),
            pod=None if vipu.pod is None else pod_of(vipu.pod),
        )
        if not self.plan.devices:
            return cluster
        return replace(cluster, ipus=tuple(ipu for ipu in cluster.ipus if ipu.device))  # a pod may have more

    def _num_cores(self) -> int:
        """A CPU that nobody has counted has a slot for each core; a job that uses more takes all there are."""
        return max(len(self.plan.cores), self.plan.num_slots_per_host)

    def _check(self) -> None:
        check_names(self.cluster, self._allocation)
        needed, there = self.plan.num_slots_per_host, len(self.cluster.part(self._allocation))
        if not self.cluster.is_open and needed > there:
            where = (
                f"allocation {self._allocation} of {self.cluster.name}" if self._allocation else self.cluster.name
            )
            raise PlanError(f"the job needs {needed} virtual IPUs, and {where} has {there} of them here")

    def _choose(self, num_ipus: int) -> Callable[[Collection[str]], tuple[VirtualIpu, ...]]:
        pick = (
            self._pick_fixed
            if self._is_fixed and self.plan.devices
            else self.cluster.pick(num_ipus, self._allocation)
        )
        occupied = {ipu.name for ipu in self.cluster.ipus if ipu.occupants and not self.plan.vipu.shares_devices}
        return lambda taken: pick(occupied.union(taken))

    @property
    def _allocation(self) -> str | None:
        """The part of the pod to take IPUs from; a machine that is no pod has none, whatever is asked for."""
        return None if self.plan.vipu.pod is None else allocation_of(self.cluster, self.plan.vipu)

    def _pick_fixed(self, taken: Collection[str]) -> tuple[VirtualIpu, ...]:
        by_device = {ipu.device: ipu for ipu in self.cluster.ipus}
        wanted = tuple(by_device[device] for device in self.plan.devices if device in by_device)
        return wanted if not any(ipu.name in taken for ipu in wanted) else ()

    def _is_known(self, name: str) -> bool:
        return self.cluster.is_open or any(ipu.name == name for ipu in self.cluster.ipus)
