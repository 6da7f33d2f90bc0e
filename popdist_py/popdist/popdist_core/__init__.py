"""The name of PopDist's compiled part, with the same functions as ``popdist``."""

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
