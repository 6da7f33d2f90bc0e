"""Where PopDist's compiled part has its functions: those of ``popdist`` under the same names."""

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
