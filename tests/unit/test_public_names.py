"""The public names of popdist are a list, each of them is there, and asking for them is cheap."""

import inspect
import re
import subprocess
import sys

import pytest

import popdist

PUBLIC = """
BackendError BatchError CheckpointError CollectiveError ContractError DatasetError DescriptionError
GradientError InstallationError LaunchError MicroBatchError NotInitializedError OnnxError OptimizerError
PopdistError PopdistWarning StoreError WeightsError
checkpoint optim packing parallel popdist_core poptorch check_preemption on_preemption on_report
Mean ReplicaSampler ReplicatedModel ShardedOptimizer
broadcast_object data_loader first_on_host gather job_id shard_iterable
all_gather all_reduce all_reduce_gradients barrier broadcast broadcast_weights checksum device device_mesh devices
before_execute_on_instances clip_grad_norm_ execute_on_instances finalize init instance_index ipus_per_replica
is_initialized is_main launch local_instance_index local_replicas num_instances num_local_replicas num_replicas
replica_index report shared_empty update_bn weighted_mean
checkNumIpusPerReplica finalizeBackend getDeviceId getInstanceIndex getLocalInstanceIndex getNumInstances
getNumIpusPerReplica getNumLocalReplicas getNumTotalReplicas getReplicaIndexOffset initializeBackend
isBackendInitialized isPopdistEnvSet synchronize
__version__
""".split()  # noqa: SIM905 - fifty names read best as text

WITHOUT_TORCH = """
import sys
import popdist
popdist.isPopdistEnvSet(), popdist.getInstanceIndex(), popdist.local_replicas(), popdist.is_main
print(sorted({"torch", "numpy", "mpi4py", "rich", "poprun"} & set(sys.modules)))
"""


def test_all_is_pinned() -> None:
    """A name is added to or taken from the public ones on purpose, here."""
    assert sorted(vars(popdist)["__all__"]) == sorted(PUBLIC)
    assert len(set(PUBLIC)) == len(PUBLIC)


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_name_is_there_and_documented(name: str) -> None:
    """Each name loads, is listed by dir(), and says what it is."""
    value = getattr(popdist, name)
    assert name in dir(popdist)
    assert isinstance(value, str) or inspect.getdoc(value)


def test_an_unknown_name_is_an_attribute_error() -> None:
    """A name that is not public fails as in any module."""
    with pytest.raises(AttributeError, match="module 'popdist' has no attribute 'allReduce'"):
        _ = popdist.allReduce


@pytest.mark.parametrize(
    ("name", "meant"),
    [("rank", "instance_index()"), ("local_rank", "local_instance_index()"), ("world_size", "num_instances()")],
)
def test_names_of_other_libraries_have_an_answer(name: str, meant: str) -> None:
    """What to write, and that replicas are counted by another call."""
    with pytest.raises(
        AttributeError, match=re.escape(f"no attribute {name!r}: write popdist.{meant}, the number")
    ):
        getattr(popdist, name)


def test_queries_load_nothing_heavy() -> None:
    """In a fresh interpreter, import popdist and its queries load neither torch nor MPI."""
    finished = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=True)
    assert finished.stdout == "[]\n"
