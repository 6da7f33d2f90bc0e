"""What several instances may expect of the store that they share."""

import os
from functools import partial
from pathlib import Path

import pytest
import torch

import popdist
from popdist.ground.local_tensors import TensorForm
from popdist.job import context
from popdist.phases.phase_store import PhaseStore
from popdist.phases.store_file import BLOCK_BYTES, make_buffer
from tests.running import DEADLINE_SECONDS

FORMS = {"weight": TensorForm.of(torch.zeros(1024)), "bias": TensorForm.of(torch.zeros(3))}


def run_all(folder: Path) -> tuple[list[int], list[list[int]]]:
    """All laws; the numbers of this instance among those that share, and what the stores held in the end."""
    popdist.init(timeout_seconds=DEADLINE_SECONDS)
    index, size = popdist.instance_index(), popdist.num_instances()
    found = [_shared(place, index, size) for place in (str(folder / "shared"), "host")]
    apart = PhaseStore(folder / f"{index}", FORMS, group=context.current_group(), device=torch.device("cpu"))
    numbers = [apart.host_index, apart.host_size]
    apart.close()
    return numbers, found


def _shared(place: str, index: int, size: int) -> list[int]:
    store = PhaseStore(place, FORMS, group=context.current_group(), device=torch.device("cpu"))
    assert (store.host_index, store.host_size) == (index, size)
    store.begin_step(1)
    own = make_buffer(BLOCK_BYTES).fill_(index + 1)
    store.end_step(partial(store.weights.file.write, index * BLOCK_BYTES, own))
    back = make_buffer(BLOCK_BYTES)
    store.weights.file.read((size - 1 - index) * BLOCK_BYTES, back)
    store.wait_for_host()

    too_large = {"weight": TensorForm(dtype=torch.float32, shape=(1 << 50,), stride=(1,))}
    with pytest.raises(popdist.StoreError, match=f"needs {4 << 50} bytes"):  # on each, though one has tried
        store.add("gradients", too_large)
    if index == 0:
        os.truncate(store.weights.file.descriptor, 0)
    failing = None if index else partial(store.weights.file.read, 0, own)
    with pytest.raises(popdist.StoreError, match="instance 0 failed: " if index else "ends at byte 0"):
        store.end_step(failing)
    store.close()
    return [int(back[0]), int(back[-1])]
