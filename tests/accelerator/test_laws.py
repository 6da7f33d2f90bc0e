"""popdist trains on the simulated accelerator as it does on the CPU, and orders all that it computes there."""

from pathlib import Path

import pytest

from tests.accelerator import device_training
from tests.accelerator.build import library
from tests.contract.forked_calls import ForkedWorlds
from tests.running import DEADLINE_SECONDS

_NUM_REPLICAS = 4

_OTHER_ON_CPU = {"low_precision", "recomputed"}
"""Recipes with bits of their own on a device: torch has other kernels on a CPU, or random numbers are others."""


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """Compile before any instance waits for another."""
    library()


def _weights(  # noqa: PLR0913 - as a recipe is started
    forked_world: ForkedWorlds,
    recipe: str,
    device_type: str,
    num_instances: int,
    *,
    num_devices: int = 4,
    is_direct: bool = False,
    disk_folder: Path | None = None,
) -> set[str]:
    is_of_torch = recipe in device_training.OF_TORCH
    return set(
        forked_world(
            device_training.train,
            *(recipe, device_type, num_devices, is_direct, disk_folder),
            num_instances=num_instances,
            num_replicas=num_instances if is_of_torch else _NUM_REPLICAS,
            timeout_seconds=DEADLINE_SECONDS,
        )
    )


@pytest.mark.parametrize("recipe", device_training.OF_POPDIST)
def test_weights_are_those_of_the_cpu(recipe: str, forked_world: ForkedWorlds, disk_folder: Path) -> None:
    """For any number of instances, over the host's memory and over a backend like NCCL."""
    found = _weights(forked_world, recipe, "simulated", 1)
    assert len(found) == 1
    assert _weights(forked_world, recipe, "simulated", 2) == found
    assert _weights(forked_world, recipe, "simulated", 4, is_direct=True) == found
    on_cpu = _weights(forked_world, recipe, "cpu", 1, disk_folder=disk_folder)
    assert (on_cpu == found) == (recipe not in _OTHER_ON_CPU)


@pytest.mark.parametrize("recipe", device_training.OF_TORCH)
def test_torch_trains_as_on_the_cpu(recipe: str, forked_world: ForkedWorlds) -> None:
    """DDP and FSDP2, over the backend popdist."""
    found = _weights(forked_world, recipe, "simulated", 2)
    assert len(found) == 1
    assert _weights(forked_world, recipe, "cpu", 2) == found


def test_instances_may_share_a_device(forked_world: ForkedWorlds) -> None:
    """Then their tensors go over the host's memory, and the weights are the same."""
    found = _weights(forked_world, "plain", "simulated", 2, num_devices=1, is_direct=True)
    assert found == _weights(forked_world, "plain", "cpu", 1)


@pytest.mark.parametrize(
    ("before", "after"), [("simulated", "cpu"), ("cpu", "simulated"), ("simulated", "simulated")]
)
def test_a_checkpoint_goes_on_elsewhere(
    before: str, after: str, tmp_path: Path, forked_world: ForkedWorlds
) -> None:
    """On another kind of device, with another number of instances."""
    folder = tmp_path / "checkpoint"
    worlds = (before, 1), (after, 2)
    found = [
        set(
            forked_world(
                device_training.go_on,
                *(folder, kind),
                num_instances=number,
                num_replicas=_NUM_REPLICAS,
                timeout_seconds=DEADLINE_SECONDS,
            )
        )
        for kind, number in worlds
    ]
    assert [len(weights) for weights in found] == [1, 1]
    assert found[0] != found[1]


def test_a_large_parameter_takes_no_more_kernels_than_a_small_one(forked_world: ForkedWorlds) -> None:
    """A CPU works on parts that fit its cache, and a device would wait for the kernels of each part."""
    (counts,) = forked_world(
        device_training.num_kernels_of_low_precision,
        "simulated",
        num_instances=1,
        timeout_seconds=DEADLINE_SECONDS,
    )
    assert counts[0] == counts[1] < 1000
