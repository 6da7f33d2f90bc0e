"""The functions by which PopART programs for PopDist read their place in the job, with PopDist's names.

PopART itself is not included: the program uses the session options, and a device is only a description.
"""
# ruff: noqa: N802, N803 - the names are PopDist's

from dataclasses import dataclass
from typing import Any

from popdist.compat import getDeviceId
from popdist.job import context
from popdist.job.context import local_replicas, num_local_replicas, num_replicas

__all__ = ["Device", "configureSessionOptions", "getDevice"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The index of this instance's device on its host, and the number of its virtual IPUs (cores or GPUs), for
    PopART.

    Attributes:
        id: Number of the device on its host.
        numIpus: Number of virtual IPUs of all replicas of the instance, at least 1.
        connectionType: The argument of the program, unchanged.
    """

    id: int
    numIpus: int
    connectionType: Any


def configureSessionOptions(opts: Any) -> None:
    """Write into ``opts`` how many replicas the job has, and which replicas belong to this instance.

    Args:
        opts: Any object; PopART's ``SessionOptions`` have these attributes.
    """
    opts.enableReplicatedGraphs = num_local_replicas() > 1
    opts.replicatedGraphCount = num_local_replicas()
    opts.enableDistributedReplicatedGraphs = num_replicas() > num_local_replicas()
    opts.globalReplicationFactor = num_replicas()
    opts.globalReplicaOffset = local_replicas().start


def getDevice(ipus_per_replica: int | None = None, connectionType: object = None) -> Device:
    """Return the device of this instance, a description for a PopART program.

    Args:
        ipus_per_replica: The number given to poprun; None means this number.
        connectionType: Stored unchanged.

    Raises:
        ContractError: If poprun was given another number of IPUs.
    """
    count = context.environment().ipus_of_replica(ipus_per_replica)
    return Device(id=getDeviceId(), numIpus=num_local_replicas() * count, connectionType=connectionType)
