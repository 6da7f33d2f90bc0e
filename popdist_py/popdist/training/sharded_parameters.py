"""The parameters of a sharded optimizer, each cut into one piece for each instance."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import Parameter

from popdist.errors import OptimizerError
from popdist.groups import Group
from popdist.training.shards import deal_elements, flat_like, flat_view, may_be_cut


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedParameter:
    """One parameter and its pieces.

    Attributes:
        name: For messages.
        whole: The parameter of the model.
        ranges: For each instance the elements it has, in the order of memory; empty for none.
        mine: Those of this instance.
        shard: This instance's piece, which shares memory with ``whole``: what the optimizer inside updates.
        address: Where ``whole`` was.
    """

    name: str
    whole: Parameter
    ranges: tuple[range, ...]
    mine: range
    shard: Parameter
    address: int

    def check(self) -> None:
        """See that the parameter is where its pieces are, and that its gradient is dense.

        Raises:
            OptimizerError: If it was given other memory, or the gradient is sparse.
        """
        if self.whole.data_ptr() != self.address:
            raise OptimizerError(
                f"{self.name} was given other memory after ShardedOptimizer was made, as model.to() and "
                "load_state_dict(assign=True) do: make the optimizer after them"
            )
        if self.whole.grad is not None and self.whole.grad.layout != torch.strided:
            raise OptimizerError(f"the gradient of {self.name} is sparse: make it with sparse=False")

    def lend_gradient(self) -> None:
        """Give the piece its part of the gradient; None where there is none."""
        gradient = self.whole.grad
        if gradient is None:
            self.shard.grad = None
        else:
            flat = flat_like(gradient.detach(), self.whole, self.name)
            self.shard.grad = flat[self.mine.start : self.mine.stop]


def shard_parameters(named: Sequence[tuple[str, Parameter]], group: Group) -> list[ShardedParameter]:
    """Cut parameters into one piece of about equal size for each instance of ``group``.

    Raises:
        OptimizerError: If the memory of one has gaps or overlaps.
    """
    wholes = [parameter for _, parameter in named]
    may_cut = [may_be_cut(it) for it in wholes]
    shares = deal_elements([it.numel() for it in wholes], len(group.instances), may_cut=may_cut)
    sharded = []
    for (name, whole), *ranges in zip(named, *shares, strict=True):
        mine = ranges[group.backend.instance_index]
        piece = flat_view(whole.detach(), name)[mine.start : mine.stop]
        sharded.append(
            ShardedParameter(
                name=name,
                whole=whole,
                ranges=tuple(ranges),
                mine=mine,
                shard=Parameter(piece),
                address=whole.data_ptr(),
            )
        )
    return sharded
