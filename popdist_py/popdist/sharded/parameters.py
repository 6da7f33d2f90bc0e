"""The parameters of a sharded optimizer, each cut into one shard for each instance."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from popdist.errors import OptimizerError
from popdist.gradients.partial_gradients import PartialGradient
from popdist.gradients.shards import Ranges, deal_elements, flat_like, flat_view, may_be_cut
from popdist.groups import Group

Named: TypeAlias = tuple[str, Parameter]
"""A name and its parameter of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedParameter:
    """One parameter of the model, and this instance's shard of it."""

    name: str
    whole: Parameter
    ranges: Ranges  # the elements of each instance's shard
    mine: range
    shard: Parameter  # shares memory with `whole`; the optimizer inside updates it
    address: int  # of `whole` when it was cut

    @property
    def content(self) -> Tensor:
        """``whole`` without gradient, in the same memory."""
        return self.whole.detach()

    def check(self) -> None:
        """Check that the parameter still has the memory of its shards, and that its gradient is dense."""
        if self.whole.data_ptr() != self.address:
            raise OptimizerError(
                f"{self.name} was given other memory after ShardedOptimizer was made, as model.to() and "
                "load_state_dict(assign=True) do: make the optimizer after them"
            )
        if self.whole.grad is not None and self.whole.grad.layout != torch.strided:
            raise OptimizerError(f"the gradient of {self.name} is sparse: make it with sparse=False")

    def lend_gradient(self) -> None:
        """Set the shard's gradient to its part of the parameter's, or to None."""
        gradient = self.whole.grad
        if isinstance(gradient, PartialGradient):
            gradient = gradient.content if gradient.ranges == self.ranges else gradient.whole
        if gradient is None:
            self.shard.grad = None
        else:
            self.shard.grad = self.shard_of(gradient.detach())

    def shard_of(self, values: Tensor) -> Tensor:
        """The part of ``values``, which has a number for each element of ``whole``, that belongs to the shard."""
        flat = flat_like(values.view(self.whole.shape), self.whole, self.name)
        return flat[self.mine.start : self.mine.stop].view(self.shard.shape)


def shard_parameters(named: Sequence[Named], group: Group) -> list[ShardedParameter]:
    """Cut parameters into one shard for each instance of ``group``; all instances get about as much.

    Those that are trained now are cut apart from the frozen ones, so that all instances get as much work: frozen
    parameters have no state and may be most of a model.
    """
    ranges: dict[str, list[range]] = {}
    for is_trained in (True, False):
        some = [pair for pair in named if pair[1].requires_grad is is_trained]
        sizes = [whole.numel() for _, whole in some]
        may_cut = [may_be_cut(whole) for _, whole in some]
        shares = deal_elements(sizes, len(group.instances), may_cut=may_cut)
        ranges |= {name: owned for (name, _), *owned in zip(some, *shares, strict=True)}
    return [_shard(name, whole, tuple(ranges[name]), group.backend.instance_index) for name, whole in named]


def _shard(name: str, whole: Parameter, ranges: Ranges, instance: int) -> ShardedParameter:
    mine = ranges[instance]
    shard = flat_view(whole.detach(), name)[mine.start : mine.stop]
    if not whole.dim() and mine:
        shard = whole.detach()  # torch picks the dtypes of operations by the number of dimensions
    can_train = shard.is_floating_point() or shard.is_complex()  # torch refuses it of whole numbers
    return ShardedParameter(
        name=name,
        whole=whole,
        ranges=ranges,
        mine=mine,
        shard=Parameter(shard, requires_grad=can_train),
        address=whole.data_ptr(),
    )


def describe(named: Sequence[Named]) -> str:
    """A text that must be the same on all instances: the number of parameters and a digest of names and shapes."""
    text = "\n".join(
        f"{name} {tuple(parameter.shape)} {parameter.stride()} {parameter.dtype} {parameter.device.type} "
        f"{parameter.requires_grad}"
        for name, parameter in named
    )
    digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    return f"{len(named)} parameters, names and shapes {digest}"
