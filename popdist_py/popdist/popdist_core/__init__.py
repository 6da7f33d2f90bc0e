"""PopDist's functions under the name of PopDist's compiled module; ``popdist`` has the same functions."""

from popdist.compat import (
    checkNumIpusPerReplica,
    finalizeBackend,
    getDeviceId,
    getInstanceIndex,
    getLocalInstanceIndex,
    getNumInstances,
    getNumIpusPerReplica,
    getNumLocalReplicas,
    getNumTotalReplicas,
    getReplicaIndexOffset,
    initializeBackend,
    isBackendInitialized,
    isPopdistEnvSet,
    synchronize,
)

__all__ = [
    "checkNumIpusPerReplica",
    "finalizeBackend",
    "getDeviceId",
    "getInstanceIndex",
    "getLocalInstanceIndex",
    "getNumInstances",
    "getNumIpusPerReplica",
    "getNumLocalReplicas",
    "getNumTotalReplicas",
    "getReplicaIndexOffset",
    "initializeBackend",
    "isBackendInitialized",
    "isPopdistEnvSet",
    "synchronize",
]
