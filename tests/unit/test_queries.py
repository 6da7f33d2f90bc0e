"""Queries and PopDist's names tell the place of this instance, with or without a job, before init().

Holds popdist.compat, popdist.job.instances and popdist.popdist_core.
"""

import pytest
import torch

import popdist
from popdist import popdist_core
from popdist.ground.contract import Contract

PLACED = Contract(
    num_instances=4,
    instance_index=3,
    num_local_instances=2,
    local_instance_index=1,
    host_index=1,
    num_replicas=16,
    ipus_per_replica=2,
    devices=(2, 3),
)


def test_outside_a_job_there_is_one_of_everything() -> None:
    """One instance, one replica, on the CPU where torch sees no CUDA device; PopDist's defaults."""
    assert (popdist.num_instances(), popdist.instance_index(), popdist.local_instance_index()) == (1, 0, 0)
    assert (popdist.num_replicas(), popdist.num_local_replicas(), popdist.ipus_per_replica()) == (1, 1, 1)
    assert popdist.local_replicas() == range(1)
    assert popdist.is_main()
    assert not popdist.isPopdistEnvSet()
    assert not popdist.isBackendInitialized()
    assert (popdist.getReplicaIndexOffset(), popdist.getDeviceId(), popdist.getDeviceId(4)) == (0, 0, 0)
    assert popdist.checkNumIpusPerReplica(1)
    assert not popdist.checkNumIpusPerReplica(2)


def test_under_poprun_the_contract_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every query follows from the contract, and so does each of PopDist's names."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for name, value in PLACED.to_env().items():
        monkeypatch.setenv(name, value)
    assert (popdist.num_instances(), popdist.getNumInstances()) == (4, 4)
    assert {vars(popdist_core)[name] is getattr(popdist, name) for name in popdist_core.__all__} == {True}
    assert (popdist.instance_index(), popdist.getInstanceIndex()) == (3, 3)
    assert (popdist.num_replicas(), popdist.getNumTotalReplicas()) == (16, 16)
    assert (popdist.num_local_replicas(), popdist.getNumLocalReplicas()) == (4, 4)
    assert (popdist.local_instance_index(), popdist.getLocalInstanceIndex()) == (1, 1)
    assert (popdist.ipus_per_replica(), popdist.getNumIpusPerReplica()) == (2, 2)
    assert (popdist.local_replicas(), popdist.getReplicaIndexOffset()) == (range(12, 16), 12)
    assert (str(popdist.device()), popdist.getDeviceId()) == ("cuda:2", 2)
    assert [str(device) for device in popdist.devices()] == ["cuda:2", "cuda:3"]
    assert popdist.isPopdistEnvSet()
    assert popdist.checkNumIpusPerReplica(2)
    assert not popdist.is_main()


def test_without_devices_an_instance_computes_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poprun that gave no CUDA device means the CPU; the device's number is then the instance's on its host."""
    for name, value in (
        Contract(num_instances=2, instance_index=1, local_instance_index=1, num_replicas=2).to_env().items()
    ):
        monkeypatch.setenv(name, value)
    assert (str(popdist.device()), popdist.getDeviceId()) == ("cpu", 1)
    assert [str(device) for device in popdist.devices()] == ["cpu"]


def test_half_a_contract_is_an_error_in_every_query(monkeypatch: pytest.MonkeyPatch) -> None:
    """A query never answers for a job that is not described."""
    monkeypatch.setenv("POPDIST_NUM_TOTAL_REPLICAS", "4")
    for query in (popdist.num_instances, popdist.device, popdist.isPopdistEnvSet, popdist.init):
        with pytest.raises(popdist.ContractError, match="POPDIST_REPLICA_INDEX_OFFSET"):
            query()


def test_what_init_cannot_do_is_refused() -> None:
    """An unknown backend lists the choices; a timeout is finite and greater than 0, checks are full or off."""
    with pytest.raises(popdist.BackendError, match=r"'mpi': choose 'gloo', 'nccl', 'xccl', or None"):
        popdist.init("mpi")
    for timeout_seconds in (0, -1.0, float("inf"), float("nan")):
        with pytest.raises(popdist.BackendError, match="greater than 0"):
            popdist.init(timeout_seconds=timeout_seconds)
    with pytest.raises(popdist.BackendError, match=r"checks='some' must be 'full' or 'off'"):
        popdist.init(checks="some")  # type: ignore[arg-type] # the subject
    assert not popdist.is_initialized()
