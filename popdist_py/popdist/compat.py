"""PopDist's own names, for programs written for PopDist; ``popdist`` has all of these names.

New programs should use the snake_case names, which say what they count.
"""
# ruff: noqa: N802, N803, N816 - the names are PopDist's

import popdist
from popdist.errors import InstallationError
from popdist.ground.environments import Launcher
from popdist.job.context import (
    device,
    environment,
    finalize,
    init,
    instance_index,
    ipus_per_replica,
    is_initialized,
    local_instance_index,
    local_replicas,
    num_instances,
    num_local_replicas,
    num_replicas,
)

getInstanceIndex = instance_index
getNumInstances = num_instances
getNumTotalReplicas = num_replicas
getNumLocalReplicas = num_local_replicas
getNumIpusPerReplica = ipus_per_replica
getLocalInstanceIndex = local_instance_index
initializeBackend = init
finalizeBackend = finalize
isBackendInitialized = is_initialized


def isPopdistEnvSet() -> bool:
    """Whether poprun started this program; False under other launchers, although popdist can join their jobs."""
    return environment().launcher is Launcher.POPRUN


def getReplicaIndexOffset() -> int:
    """Return the job-wide index of this instance's first replica; 0 outside a job."""
    return local_replicas().start


def getDeviceId(ipusPerReplica: int = 0) -> int:
    """Return the number that this instance's device has on its host; the argument is ignored."""
    del ipusPerReplica
    try:
        index: int | None = device().index
    except InstallationError:  # a program of another framework has the devices that poprun assigned
        index = next(iter(environment().contract.devices), None)
    return local_instance_index() if index is None else index


def checkNumIpusPerReplica(numIpusPerReplica: int) -> bool:
    """Whether a replica uses ``numIpusPerReplica`` virtual IPUs (shares of devices); outside a job it uses 1."""
    return numIpusPerReplica == ipus_per_replica()


def synchronize() -> None:
    """Wait until every instance has called this function; see :func:`popdist.barrier`."""
    popdist.barrier()
