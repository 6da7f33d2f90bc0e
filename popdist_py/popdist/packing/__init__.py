"""Packing: several sequences share one row of the batch, so that little time goes into padding.

>>> from popdist.packing import Packing, lpfhp
"""

from popdist.ground.installation import needs_torch
from popdist.packing.collation import (
    Collator,
    Packed,
    attention_mask,
    label_counts,
    packed_betas,
    token_mean,
    unpack,
)
from popdist.packing.linear_programme import nnlshp, optimal
from popdist.packing.packed_loader import PackedBatch, PackedMicroBatch, Packing
from popdist.packing.strategies import PackingStrategy, lpfhp, spfhp, unpacked
from popdist.packing.stream_packing import PackedStream, StreamRow, pack_stream

__all__ = [
    "Collator",
    "Packed",
    "PackedBatch",
    "PackedMicroBatch",
    "PackedStream",
    "Packing",
    "PackingStrategy",
    "StreamRow",
    "attention_mask",
    "label_counts",
    "lpfhp",
    "nnlshp",
    "optimal",
    "pack_stream",
    "packed_betas",
    "spfhp",
    "token_mean",
    "unpack",
    "unpacked",
]

del needs_torch  # the import raises an error without torch, and has no other use
