"""popdist: the replica library: one training script, any number of instances and replicas, bitwise equal results.

Each public name imports its module at its first use: ``import popdist`` alone imports no torch, so that queries
such as ``popdist.num_replicas()`` are cheap. Inside functions popdist imports only torch and what needs torch,
other packages that a user may lack, and modules that take seconds. `popdist.startup`, which runs in every Python
of a job, imports most modules inside functions.
"""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # for type checkers and editors, the same names as in the table below
    from popdist import accelerate as accelerate
    from popdist import checkpoint as checkpoint
    from popdist import optim as optim
    from popdist import packing as packing
    from popdist import parallel as parallel
    from popdist import popdist_core as popdist_core
    from popdist import poptorch as poptorch
    from popdist import transformers as transformers
    from popdist.compat import checkNumIpusPerReplica as checkNumIpusPerReplica
    from popdist.compat import finalizeBackend as finalizeBackend
    from popdist.compat import getDeviceId as getDeviceId
    from popdist.compat import getInstanceIndex as getInstanceIndex
    from popdist.compat import getLocalInstanceIndex as getLocalInstanceIndex
    from popdist.compat import getNumInstances as getNumInstances
    from popdist.compat import getNumIpusPerReplica as getNumIpusPerReplica
    from popdist.compat import getNumLocalReplicas as getNumLocalReplicas
    from popdist.compat import getNumTotalReplicas as getNumTotalReplicas
    from popdist.compat import getReplicaIndexOffset as getReplicaIndexOffset
    from popdist.compat import initializeBackend as initializeBackend
    from popdist.compat import isBackendInitialized as isBackendInitialized
    from popdist.compat import isPopdistEnvSet as isPopdistEnvSet
    from popdist.compat import synchronize as synchronize
    from popdist.data.data_loader import data_loader as data_loader
    from popdist.data.dealt_streams import shard_iterable as shard_iterable
    from popdist.data.sampler import ReplicaSampler as ReplicaSampler
    from popdist.errors import BackendError as BackendError
    from popdist.errors import BatchError as BatchError
    from popdist.errors import CheckpointError as CheckpointError
    from popdist.errors import CollectiveError as CollectiveError
    from popdist.errors import ContractError as ContractError
    from popdist.errors import DatasetError as DatasetError
    from popdist.errors import DescriptionError as DescriptionError
    from popdist.errors import GradientError as GradientError
    from popdist.errors import InstallationError as InstallationError
    from popdist.errors import LaunchError as LaunchError
    from popdist.errors import MicroBatchError as MicroBatchError
    from popdist.errors import NotInitializedError as NotInitializedError
    from popdist.errors import OnnxError as OnnxError
    from popdist.errors import OptimizerError as OptimizerError
    from popdist.errors import PopdistError as PopdistError
    from popdist.errors import PopdistWarning as PopdistWarning
    from popdist.errors import StoreError as StoreError
    from popdist.errors import WeightsError as WeightsError
    from popdist.gradients.clipping import clip_grad_norm_ as clip_grad_norm_
    from popdist.job.collectives import all_gather as all_gather
    from popdist.job.collectives import all_reduce as all_reduce
    from popdist.job.collectives import barrier as barrier
    from popdist.job.collectives import broadcast as broadcast
    from popdist.job.collectives import broadcast_object as broadcast_object
    from popdist.job.collectives import gather as gather
    from popdist.job.collectives import shared_empty as shared_empty
    from popdist.job.context import device as device
    from popdist.job.context import devices as devices
    from popdist.job.context import finalize as finalize
    from popdist.job.context import init as init
    from popdist.job.context import instance_index as instance_index
    from popdist.job.context import ipus_per_replica as ipus_per_replica
    from popdist.job.context import is_initialized as is_initialized
    from popdist.job.context import job_id as job_id
    from popdist.job.context import local_instance_index as local_instance_index
    from popdist.job.context import local_replicas as local_replicas
    from popdist.job.context import num_instances as num_instances
    from popdist.job.context import num_local_replicas as num_local_replicas
    from popdist.job.context import num_replicas as num_replicas
    from popdist.job.context import replica_index as replica_index
    from popdist.job.instances import before_execute_on_instances as before_execute_on_instances
    from popdist.job.instances import execute_on_instances as execute_on_instances
    from popdist.job.instances import first_on_host as first_on_host
    from popdist.job.instances import is_main as is_main
    from popdist.job.weights import broadcast_weights as broadcast_weights
    from popdist.job.weights import checksum as checksum
    from popdist.launching.launch_function import launch as launch
    from popdist.metrics.mean import Mean as Mean
    from popdist.metrics.mean import weighted_mean as weighted_mean
    from popdist.metrics.reported_numbers import on_report as on_report
    from popdist.metrics.reported_numbers import report as report
    from popdist.optim.sharded.sharded_optimizer import ShardedOptimizer as ShardedOptimizer
    from popdist.parallel.mesh import device_mesh as device_mesh
    from popdist.step.preemption import check_preemption as check_preemption
    from popdist.step.preemption import on_preemption as on_preemption
    from popdist.step.training.batch_norm import update_bn as update_bn
    from popdist.step.training.outside_step import all_reduce_gradients as all_reduce_gradients
    from popdist.step.training.replicated_model import ReplicatedModel as ReplicatedModel

    __version__: str

_NAMES_OF_MODULES = {
    "job.collectives": "all_gather all_reduce barrier broadcast broadcast_object gather shared_empty",
    "compat": (
        "checkNumIpusPerReplica finalizeBackend getDeviceId getInstanceIndex getLocalInstanceIndex "
        "getNumInstances getNumIpusPerReplica getNumLocalReplicas getNumTotalReplicas getReplicaIndexOffset "
        "initializeBackend isBackendInitialized isPopdistEnvSet synchronize"
    ),
    "job.context": (
        "device devices finalize init instance_index ipus_per_replica is_initialized job_id local_instance_index "
        "local_replicas num_instances num_local_replicas num_replicas replica_index"
    ),
    "data.data_loader": "data_loader",
    "data.sampler": "ReplicaSampler",
    "data.dealt_streams": "shard_iterable",
    "errors": (
        "BackendError BatchError CheckpointError CollectiveError ContractError DatasetError "
        "DescriptionError GradientError InstallationError LaunchError MicroBatchError NotInitializedError "
        "OnnxError OptimizerError PopdistError PopdistWarning StoreError WeightsError"
    ),
    "gradients.clipping": "clip_grad_norm_",
    "job.instances": "before_execute_on_instances execute_on_instances first_on_host is_main",
    "launching.launch_function": "launch",
    "metrics.mean": "Mean weighted_mean",
    "parallel.mesh": "device_mesh",
    "step.preemption": "check_preemption on_preemption",
    "metrics.reported_numbers": "on_report report",
    "step.training.batch_norm": "update_bn",
    "step.training.outside_step": "all_reduce_gradients",
    "step.training.replicated_model": "ReplicatedModel",
    "optim.sharded.sharded_optimizer": "ShardedOptimizer",
    "job.weights": "broadcast_weights checksum",
}
"""The public names of each module."""

_MODULE_OF = {name: f"popdist.{module}" for module, names in _NAMES_OF_MODULES.items() for name in names.split()}

_BY_RANK = "instance_index(), the number of this process; popdist.replica_index() is that of its replica"
_BY_SIZE = "num_instances(), the number of processes; popdist.num_replicas() is that of the replicas"
_MEANT = {
    **dict.fromkeys(("rank", "get_rank", "instance_id"), _BY_RANK),
    **dict.fromkeys(
        ("local_rank", "get_local_rank"), "local_instance_index(), the number of this process on its host"
    ),
    **dict.fromkeys(("size", "world_size", "get_world_size"), _BY_SIZE),
}
"""For names that other libraries use, the names of popdist to write instead."""

_WITHOUT_TORCH = ("compat", "job.context", "errors", "job.instances", "launching", "metrics.reported_numbers")
"""Prefixes of the modules that need no torch."""

_OF_TRAINING = tuple(f"popdist.{it}" for it in ("job.collectives", "data.", "parallel.", "step.training."))
"""Prefixes of the modules that programs use if they train with torch."""

_PUBLIC_FOLDERS = ("checkpoint", "optim", "packing", "parallel", "popdist_core", "poptorch")

_FOR_OTHER_LIBRARIES = ("accelerate", "transformers")
"""Modules that import a library of the same name, so that they are not part of ``from popdist import *``."""

_PUBLIC = [*_MODULE_OF, "__version__", *_PUBLIC_FOLDERS]

if not TYPE_CHECKING:  # type checkers use the imports above
    __all__ = list(_PUBLIC)

_PROGRESS_DESCRIPTOR = "POPDIST_PROGRESS_DESCRIPTOR"
"""The name in `popdist.ground.contract`, repeated so that a program that imports torch loads few modules."""

if _PROGRESS_DESCRIPTOR in os.environ:  # without this variable no agent reads the progress, as in poprun itself
    import_module("popdist.ground.progress").begin()


def __getattr__(name: str) -> object:
    if name in (*_PUBLIC_FOLDERS, *_FOR_OTHER_LIBRARIES):
        return import_module(f"popdist.{name}")
    if name == "__version__":
        return import_module("popdist.ground.contract").VERSION
    if name not in _MODULE_OF:
        meant = f": write popdist.{_MEANT[name]}" if name in _MEANT else ""
        raise AttributeError(f"module 'popdist' has no attribute {name!r}{meant}")
    if not _MODULE_OF[name].removeprefix("popdist.").startswith(_WITHOUT_TORCH):
        import_module("popdist.ground.installation.needs_torch")
    module = import_module(_MODULE_OF[name])
    is_training = module.__name__.startswith(_OF_TRAINING)
    if is_training or (name == "init" and "torch" in sys.modules):  # init() without torch does not need the checks
        import_module("popdist.step.checks")  # training code does not import the checks
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted(_PUBLIC)
