"""What PopART programs for PopDist call: a job of one here, and a job's numbers where poprun says them."""

import pytest

from popdist import popart
from popdist.errors import ContractError
from popdist.ground.contract import Contract
from popdist.ground.environments import Environment, Launcher
from popdist.job import context
from poptorch.stubs import popart_enums


class Options:
    """As much of PopART's SessionOptions as a program reads."""


def test_a_program_learns_its_place_in_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its replicas among those of all instances, and its device."""
    job = Contract(num_instances=2, instance_index=1, local_instance_index=1, num_replicas=4, ipus_per_replica=2)
    told = Environment(launcher=Launcher.POPRUN, contract=job, says_replicas=True)
    monkeypatch.setattr(context, "environment", lambda: told)
    monkeypatch.setattr(popart, "num_replicas", lambda: job.layout.num_replicas)
    monkeypatch.setattr(popart, "num_local_replicas", lambda: job.layout.num_local_replicas)
    monkeypatch.setattr(popart, "local_replicas", lambda: range(2, 4))
    monkeypatch.setattr(popart, "getDeviceId", lambda: 1)
    options = Options()
    popart.configureSessionOptions(options)

    assert vars(options) == {
        "enableReplicatedGraphs": True,
        "replicatedGraphCount": 2,
        "enableDistributedReplicatedGraphs": True,
        "globalReplicationFactor": 4,
        "globalReplicaOffset": 2,
    }
    on_demand: object = vars(popart_enums)["DeviceConnectionType"].OnDemand
    assert popart.getDevice(2, connectionType=on_demand) == popart.Device(
        id=1, numIpus=4, connectionType=on_demand
    )
    with pytest.raises(ContractError, match="poprun gave each replica 2"):
        popart.getDevice(1)


def test_alone_a_program_has_what_it_asks_for() -> None:
    """Nobody has counted its virtual IPUs."""
    options = Options()
    popart.configureSessionOptions(options)

    assert not vars(options)["enableDistributedReplicatedGraphs"]
    assert popart.getDevice(ipus_per_replica=4).numIpus == 4
