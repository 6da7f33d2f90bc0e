"""What an instance sends early: a copy of gradients that have come, as the end of the step makes them.

The copy has the bits that the end of the step will have if nobody changes the gradients until then.
"""

import torch
from torch import Tensor

from popdist.gradients.flat_gradients import GradientRows
from popdist.gradients.overlap import Overlap
from popdist.tree import TreeSum


class Publishing:
    """Makes what is sent, during the last micro batch."""

    def __init__(
        self,
        overlap: Overlap,
        micro_batches: TreeSum[GradientRows],
        replicas: TreeSum[GradientRows],
        weight: float,
    ) -> None:
        self._overlap = overlap
        self._micro_batches = micro_batches
        self._replicas = replicas
        self._weight = weight
        self._is_blocked = False
        devices = {kind.device for kind in overlap.gradients.kinds if kind.device.type == "cuda"}
        self._streams = {device: torch.cuda.current_stream(device) for device in devices}

    def look_at(self, parameter: Tensor) -> None:
        """See whether a gradient that has come may be read in this stream: else all wait for the end."""
        self._is_blocked |= not self._is_in_order(parameter.device) or (
            parameter.grad is not None and parameter.grad.layout != torch.strided
        )

    def can_read(self, number: int) -> bool:
        """Whether the gradients of a bucket may be read here and now."""
        kind = self._overlap.gradients.kinds[self._overlap.buckets[number].kind]
        return not self._is_blocked and self._is_in_order(kind.device)

    @torch.no_grad()
    def partials_of(self, number: int, unit: float) -> list[Tensor]:
        """This instance's part of the tree over all replicas, as the end of the step will have it.

        Args:
            number: Of the bucket, whose gradients are complete.
            unit: What weights are divided by.
        """
        bucket, published = self._overlap.buckets[number], self._overlap.published
        for parameter in self._overlap.members[number]:
            slot = published.slots[id(parameter)]
            slot.zero_() if parameter.grad is None else slot.copy_(parameter.grad)
        row = published.rows[bucket.kind][bucket.run]
        if self._weight != unit:
            row.mul_(self._weight / unit)

        def part(rows: GradientRows) -> Tensor:
            return rows.rows[bucket.kind][bucket.run]

        micro_batches = self._micro_batches.of_part(part, _add)
        micro_batches.push(row)
        replicas = self._replicas.of_part(part, _add)
        (replica,) = micro_batches.nodes.values()
        replicas.push(replica)
        return list(replicas.nodes.values())

    def _is_in_order(self, device: torch.device) -> bool:
        """Whether this thread computes on ``device`` in the stream in which the micro batch began, for itself."""
        if device not in self._streams:
            return True
        is_same = torch.cuda.current_stream(device) == self._streams[device]
        return is_same and not torch.cuda.is_current_stream_capturing()


def _add(left: Tensor, right: Tensor) -> Tensor:
    """The sum, in place of ``right``, which is this step's: ``left`` is still needed where it is."""
    return torch.add(left, right, out=right)
