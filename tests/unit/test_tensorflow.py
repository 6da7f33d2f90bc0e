"""What TensorFlow programs for PopDist call, with a TensorFlow that only keeps what it is told."""

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from popdist.errors import ContractError
from popdist.ground.contract import Contract
from popdist.ground.environments import Environment, Launcher

VISIBLE: list[Any] = []


@pytest.fixture
def popdist_tensorflow(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module, in instance 1 of 2 with two devices each."""
    config = SimpleNamespace(
        list_physical_devices=lambda _: ["a", "b", "c", "d"],
        set_visible_devices=lambda devices, _: VISIBLE.append(devices),
    )
    strategies = SimpleNamespace(MultiWorkerMirroredStrategy=object)
    monkeypatch.setitem(sys.modules, "tensorflow", SimpleNamespace(config=config, distribute=strategies))
    job = Contract(
        num_instances=2,
        instance_index=1,
        local_instance_index=1,
        num_local_instances=2,
        num_replicas=2,
        ipus_per_replica=2,
        devices=(2, 3),
    )
    module = importlib.import_module("popdist.tensorflow")
    told = Environment(launcher=Launcher.POPRUN, contract=job, says_replicas=True)
    monkeypatch.setattr(module, "environment", lambda: told)
    yield module
    sys.modules.pop("popdist.tensorflow")
    VISIBLE.clear()


def test_an_instance_has_its_own_devices_and_place(popdist_tensorflow: ModuleType) -> None:
    """An IPUConfig's place in the job is written; any other object comes back as it is."""
    distribution = SimpleNamespace()
    config = SimpleNamespace(
        select_ipus=None, experimental=SimpleNamespace(multi_replica_distribution=distribution)
    )
    assert popdist_tensorflow.set_ipu_config(config, 2) is config
    assert (config.select_ipus, distribution.process_count, distribution.process_index) == (1, 2, 1)
    assert VISIBLE == [["c", "d"]]
    assert popdist_tensorflow.set_ipu_config(None, configure_device=False) is None
    assert VISIBLE == [["c", "d"]]


def test_another_number_of_ipus_is_refused(popdist_tensorflow: ModuleType) -> None:
    """With the option that gives it."""
    with pytest.raises(ContractError, match=r"=1, and poprun gave each replica 2: .* --ipus-per-replica 1,"):
        popdist_tensorflow.set_ipu_config(None, ipus_per_replica=1)
