"""The choice of the virtual IPUs that a machine's pool leases to jobs, and checks of names that a user gave."""

from collections.abc import Sequence

from poprun.errors import PartitionError, PlanError, UsageError
from poprun.plan.inventory import Cluster, cpu_cluster, gpu_cluster
from poprun.plan.pods import named_pod, on_machine, read_pod
from poprun.plan.topology import Gpu
from poprun.text.input_files import read_text
from poprun.text.ranges import fold_hosts


def choose_cluster(
    hostname: str,
    gpus: Sequence[Gpu],
    num_cores: int,
    *,
    ipus_per_host: int | None = None,
    pod: Cluster | None = None,
) -> Cluster:
    """Return a machine's virtual IPUs: its part of ``pod`` if given, else its GPUs, else parts of its CPU."""
    if pod is not None:
        return on_machine(pod, (hostname, hostname.partition(".")[0]))
    if not gpus:
        return cpu_cluster(hostname, ipus_per_host, num_cores)
    return gpu_cluster(hostname, gpus[:ipus_per_host])


def pod_of(text: str) -> Cluster:
    """Return the virtual IPUs of the pod ``text``: a name such as ``POD16``, or a YAML file that describes it."""
    pod = named_pod(text)
    if pod is not None:
        return pod
    try:
        description = read_text(text, "pod")
    except UsageError as error:
        raise PlanError(f"{error}: give a name such as POD16, or a YAML file") from None
    return read_pod(description, text)


def check_names(ours: Cluster, allocation: str | None, cluster: str | None = None) -> None:
    """Raise PartitionError if the cluster ``ours`` is not called ``cluster``, or has no part ``allocation``."""
    if cluster is not None and cluster != ours.name:
        raise PartitionError(f"there is no cluster {cluster}: there is {ours.name}")
    if allocation is not None and allocation not in ours.allocations:
        known = ", ".join(ours.allocations)
        raise PartitionError(
            f"there is no allocation {allocation}: {f'there is {known}' if known else 'there is none'}"
        )


def check_hosts_of(cluster: Cluster, hosts: Sequence[str]) -> None:
    """Raise PlanError if the cluster of virtual IPUs lists its hosts, and one of ``hosts`` is not listed."""
    strangers = [host for host in hosts if host not in cluster.hosts]
    if cluster.hosts and strangers:
        raise PlanError(
            f"the job runs on {', '.join(strangers)}, and the hosts of {cluster.name} are "
            f"{fold_hosts(cluster.hosts)}: choose among them with --host"
        )
