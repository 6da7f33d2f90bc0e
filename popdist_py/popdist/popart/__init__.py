"""What PopART programs for PopDist call to learn their place in the job, under PopDist's names.

PopART itself is not here: what is set in session options is for the program, and a device is a description.
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
    """The device of one instance.

    Attributes:
        id: Its number on its host.
        numIpus: Virtual IPUs of all replicas of the instance, at least 1.
        connectionType: What the program has asked for, as it is.
    """

    id: int
    numIpus: int
    connectionType: Any


def configureSessionOptions(opts: Any) -> None:
    """Write into ``opts`` how many replicas the job has, and which of them are this instance's.

    Args:
        opts: Any object; PopART's ``SessionOptions`` have these attributes.
    """
    opts.enableReplicatedGraphs = num_local_replicas() > 1
    opts.replicatedGraphCount = num_local_replicas()
    opts.enableDistributedReplicatedGraphs = num_replicas() > num_local_replicas()
    opts.globalReplicationFactor = num_replicas()
    opts.globalReplicaOffset = local_replicas().start


def getDevice(ipus_per_replica: int | None = None, connectionType: object = None) -> Device:
    """The device of this instance.

    Args:
        ipus_per_replica: As poprun was told; None takes that.
        connectionType: Kept as it is.

    Raises:
        ContractError: If poprun was told another number of IPUs.
    """
    count = context.environment().ipus_of_replica(ipus_per_replica)
    return Device(id=getDeviceId(), numIpus=num_local_replicas() * count, connectionType=connectionType)
