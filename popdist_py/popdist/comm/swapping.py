"""Tensors that instances send each other directly, over connections of gloo's.

Every way between two instances is used in both directions at once. gloo's own all-to-all and all-gather use one
after the other, and take up to twice as long over a network.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def swap(
    gloo: Any,  # noqa: ANN401 - torch's stubs lack the calls that take lists of tensors
    own: int,
    instances: Sequence[int],
    sent: Sequence[Tensor],
    received: Sequence[Tensor],
) -> None:
    """Send each instance its tensor and wait for theirs.

    Args:
        gloo: The process group of the whole job.
        own: This instance.
        instances: Who takes part, this instance among them.
        sent: What goes to each of them; flat tensors of bytes.
        received: Where what each of them sends goes.

    Raises:
        RuntimeError: If an instance was lost or did not come in time.
    """
    works = []
    for peer, mine, row in zip(instances, sent, received, strict=True):
        if peer == own:
            row.copy_(mine)
        else:
            works += [gloo.recv([row], peer, 0), gloo.send([mine], peer, 0)]
    for work in works:
        work.wait()


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, as a flat tensor of bytes: every dtype travels the same way."""
    return tensor.reshape(-1).view(torch.uint8)
