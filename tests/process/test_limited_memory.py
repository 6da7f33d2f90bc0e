"""Models in phases train within a limit of memory that the kernel enforces."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from measuring.control_group import ControlGroup
from measuring.trainings import Training, started

MIB = 2**20
LIMIT_BYTES = 440 * MIB


def test_a_model_larger_than_its_control_group_trains(
    limited_memory: Callable[[int], ControlGroup], disk_folder: Path
) -> None:
    """It is larger than the limit, without torch; its weights have the bits of the model in memory."""
    folder = str(disk_folder)
    memory_bytes = LIMIT_BYTES - 20 * MIB
    training = Training(
        way="phases", layers=18, width=384, tokens=16, folder=folder, memory_bytes=memory_bytes, threads=1
    )
    group = limited_memory(LIMIT_BYTES)
    sums = []
    for it, within in ((training, group), (replace(training, way="memory"), None)):
        with started(it, within) as process:
            for _ in range(3):  # the third one with the phases that were planned
                process.step()
            sums.append(process.checksum())

    assert 4 * training.weights_bytes > LIMIT_BYTES
    assert group.num_killed == 0
    assert sums[0] == sums[1]
