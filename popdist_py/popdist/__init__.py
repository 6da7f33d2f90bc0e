"""popdist: the replica library. One training script, as many instances and replicas, the numerics of one process.

The names below load their modules when they are first used: ``import popdist`` alone imports no torch, so queries
such as ``popdist.num_replicas()`` are cheap.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from popdist import checkpoint
    from popdist.collectives import (
        all_gather,
        all_reduce,
        barrier,
        broadcast,
        broadcast_object,
        gather,
        weighted_mean,
    )
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
    from popdist.context import (
        device,
        devices,
        finalize,
        init,
        instance_index,
        ipus_per_replica,
        is_initialized,
        job_id,
        local_instance_index,
        local_replicas,
        num_instances,
        num_local_replicas,
        num_replicas,
    )
    from popdist.data.data_loader import data_loader
    from popdist.data.sampler import ReplicaSampler
    from popdist.data.streams import shard_iterable
    from popdist.errors import (
        BackendError,
        BatchError,
        CheckpointError,
        CollectiveError,
        ContractError,
        DatasetError,
        GradientError,
        MicroBatchError,
        NotInitializedError,
        OptimizerError,
        PopdistError,
        PopdistWarning,
        WeightsError,
        WorldError,
    )
    from popdist.instances import execute_on_instances, first_on_host, is_main
    from popdist.preemption import check_preemption, on_preemption
    from popdist.progress import report
    from popdist.sharded.sharded_optimizer import ShardedOptimizer
    from popdist.training.backward import all_reduce_gradients
    from popdist.training.replicated_model import ReplicatedModel
    from popdist.weights import broadcast_weights, checksum

    __version__: str

_NAMES = {
    "collectives": "all_gather all_reduce barrier broadcast broadcast_object gather weighted_mean",
    "compat": (
        "checkNumIpusPerReplica finalizeBackend getDeviceId getInstanceIndex getLocalInstanceIndex "
        "getNumInstances getNumIpusPerReplica getNumLocalReplicas getNumTotalReplicas getReplicaIndexOffset "
        "initializeBackend isBackendInitialized isPopdistEnvSet synchronize"
    ),
    "context": (
        "device devices finalize init instance_index ipus_per_replica is_initialized job_id local_instance_index "
        "local_replicas num_instances num_local_replicas num_replicas"
    ),
    "data.data_loader": "data_loader",
    "data.sampler": "ReplicaSampler",
    "data.streams": "shard_iterable",
    "errors": (
        "BackendError BatchError CheckpointError CollectiveError ContractError DatasetError GradientError "
        "MicroBatchError NotInitializedError OptimizerError PopdistError PopdistWarning WeightsError WorldError"
    ),
    "instances": "execute_on_instances first_on_host is_main",
    "preemption": "check_preemption on_preemption",
    "progress": "report",
    "training.backward": "all_reduce_gradients",
    "training.replicated_model": "ReplicatedModel",
    "sharded.sharded_optimizer": "ShardedOptimizer",
    "weights": "broadcast_weights checksum",
}
_MODULES = frozenset({"checkpoint"})
_PROGRESS_DESCRIPTOR = "POPDIST_PROGRESS_DESCRIPTOR"
"""As `popdist.contract` has it: every program that imports torch comes by here, and loads no more than it must."""
if _PROGRESS_DESCRIPTOR in os.environ:  # else there is nobody to tell, as in poprun itself
    import_module("popdist.progress").begin()
_MODULE_OF = {name: f"popdist.{module}" for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "BackendError",
    "BatchError",
    "CheckpointError",
    "CollectiveError",
    "ContractError",
    "DatasetError",
    "GradientError",
    "MicroBatchError",
    "NotInitializedError",
    "OptimizerError",
    "PopdistError",
    "PopdistWarning",
    "ReplicaSampler",
    "ReplicatedModel",
    "ShardedOptimizer",
    "WeightsError",
    "WorldError",
    "__version__",
    "all_gather",
    "all_reduce",
    "all_reduce_gradients",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_weights",
    "checkNumIpusPerReplica",
    "check_preemption",
    "checkpoint",
    "checksum",
    "data_loader",
    "device",
    "devices",
    "execute_on_instances",
    "finalize",
    "finalizeBackend",
    "first_on_host",
    "gather",
    "getDeviceId",
    "getInstanceIndex",
    "getLocalInstanceIndex",
    "getNumInstances",
    "getNumIpusPerReplica",
    "getNumLocalReplicas",
    "getNumTotalReplicas",
    "getReplicaIndexOffset",
    "init",
    "initializeBackend",
    "instance_index",
    "ipus_per_replica",
    "isBackendInitialized",
    "isPopdistEnvSet",
    "is_initialized",
    "is_main",
    "job_id",
    "local_instance_index",
    "local_replicas",
    "num_instances",
    "num_local_replicas",
    "num_replicas",
    "on_preemption",
    "report",
    "shard_iterable",
    "synchronize",
    "weighted_mean",
]


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(f"popdist.{name}")
    if name == "__version__":
        return import_module("popdist.contract").VERSION
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'popdist' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
