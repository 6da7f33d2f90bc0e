"""Tensors lie in blocks, one behind the other, and parameters are dealt evenly."""

import torch

from popdist.ground.local_tensors import TensorForm
from popdist.phases.phased_run import deal
from popdist.phases.store_file import BLOCK_BYTES, lay_out


def test_each_tensor_begins_with_a_block() -> None:
    """In their order, without a shared block; what has no elements takes no room."""
    tensors = {
        "a": torch.zeros(1025),
        "empty": torch.zeros(0, 3),
        "b": torch.zeros(3, dtype=torch.bfloat16),
        "scalar": torch.zeros((), dtype=torch.int64),
    }
    regions = lay_out({name: TensorForm.of(tensor) for name, tensor in tensors.items()})

    assert {name: (it.start, it.num_bytes) for name, it in regions.items()} == {
        "a": (0, 4100),
        "empty": (2 * BLOCK_BYTES, 0),
        "b": (2 * BLOCK_BYTES, 6),
        "scalar": (3 * BLOCK_BYTES, 8),
    }
    assert max(it.end for it in regions.values()) == 4 * BLOCK_BYTES
    assert lay_out({}) == {}


def test_each_piece_is_dealt_evenly() -> None:
    """Within each piece as far as it goes, then over all."""
    pieces = [{"embedding": 100}, {"w1": 40, "w2": 40, "b": 1}, {"head": 3}]

    assert deal(pieces, 1) == dict.fromkeys(["embedding", "w1", "w2", "b", "head"], 0)
    assert deal(pieces, 2) == {"embedding": 0, "w1": 1, "w2": 0, "b": 1, "head": 1}
    assert deal([], 3) == {}
