"""The placement of a group's ranks on hosts, and the collectives that fit it.

Processes of one boot and one network namespace may share memory; that they do is proved by mapping it.
"""

from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from torch import distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from popdist.host_memory.barriers import Names
from popdist.host_memory.forks import never_destroy_in_children
from popdist.host_memory.host_collectives import HostCollectives
from popdist.host_memory.segment_exchange import tell_all
from popdist.transport.host_messages import HostMessages
from popdist.transport.several_hosts import RankPlace, SeveralHosts

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_NETWORK: Final = Path("/proc/self/ns/net")


def machine() -> str:
    """The boot and the network that processes must have in common to share memory; empty where unknown.

    Processes of other network namespaces, such as those of another pod, cannot hand descriptors to this one.
    """
    try:
        return f"{_BOOT_ID.read_text().strip()} {_NETWORK.readlink()}"
    except OSError:
        return ""


def connect(
    store: Store, rank: int, size: int, *, timeout_seconds: float, names: Names
) -> HostCollectives | SeveralHosts:
    """Connect the ranks of a group, which all call this; the collectives that fit their hosts."""
    called = [names.of([rank]) for rank in range(size)]
    machines = tell_all(PrefixStore("machine", store), rank, called, machine(), timeout_seconds)
    num_local = ranks_of_each(machines)
    local_collectives = None
    if num_local == size or num_local > 1:
        local_collectives = HostCollectives.connect(
            store, rank, num_local, names=names, timeout_seconds=timeout_seconds
        )
    if num_local == size and local_collectives is not None:
        return local_collectives
    found = tell_all(PrefixStore("found", store), rank, called, local_collectives is not None, timeout_seconds)
    if local_collectives is not None and not all(found):
        local_collectives.close()
        local_collectives = None
    gloo: Any = dist.ProcessGroupGloo
    own = PrefixStore("messages", store)
    connected = gloo(own, rank, size, timedelta(seconds=timeout_seconds))
    never_destroy_in_children(connected)
    messages = HostMessages(connected, own, rank, names, timeout_seconds)
    num_local = 1 if local_collectives is None else num_local
    place = RankPlace(rank=rank, num_hosts=size // num_local, num_local=num_local)
    return SeveralHosts(place, messages, local_collectives)


def ranks_of_each(machines: list[str]) -> int:
    """How many ranks each machine has; 1 where they do not make up nodes of the tree."""
    if len(set(machines)) == 1 and machines[0]:
        return len(machines)
    num_local = max(1, len(machines) // len(set(machines)))
    rows = [machines[start : start + num_local] for start in range(0, len(machines), num_local)]
    is_regular = all(row == [row[0]] * num_local for row in rows) and "" not in machines
    return num_local if is_regular and num_local & (num_local - 1) == 0 else 1
