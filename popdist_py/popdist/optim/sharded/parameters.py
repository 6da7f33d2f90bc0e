"""The parameters of a sharded optimizer, each cut into one shard for each instance, and their state.

The state is gathered into the form of an optimizer without sharding, or cut into shards.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from popdist.errors import OptimizerError
from popdist.exchange.groups import Group
from popdist.gradients.partial_gradients import PartialGradient
from popdist.gradients.shards import Ranges, deal_elements, flat_view, may_be_cut
from popdist.job.collectives import fail_together, gather_json
from popdist.optim.one_by_one import State
from popdist.optim.pieces import flat_in_order_of

Named: TypeAlias = tuple[str, Parameter]
"""A parameter of the model, with its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedParameter:
    """One parameter of the model, and this instance's shard of the parameter."""

    name: str
    whole: Parameter
    ranges: Ranges  # the elements of each instance's shard
    mine: range
    shard: Parameter  # shares memory with `whole`; the optimizer inside updates it
    address: int  # the address of `whole` when it was cut

    @property
    def content(self) -> Tensor:
        """The values of the whole parameter: a tensor in the parameter's memory, but without autograd."""
        return self.whole.detach()

    def check(self) -> None:
        """Raise OptimizerError if the parameter was moved to other memory after this optimizer cut it into shards,
        so that its shard is in the old memory, or if its gradient is sparse.
        """
        if self.whole.data_ptr() != self.address:
            raise OptimizerError(
                f"{self.name} was given other memory after ShardedOptimizer was made, as model.to() and "
                "load_state_dict(assign=True) do: make the optimizer after them"
            )
        if self.whole.grad is not None and self.whole.grad.layout != torch.strided:
            raise OptimizerError(f"the gradient of {self.name} is sparse: make it with sparse=False")

    def set_gradient(self) -> None:
        """Set the shard's gradient to the shard's part of the parameter's gradient; to None if there is none."""
        gradient = self.whole.grad
        if isinstance(gradient, PartialGradient):
            gradient = gradient.content if gradient.ranges == self.ranges else gradient.whole
        if gradient is None:
            self.shard.grad = None
        else:
            self.shard.grad = self.shard_of(gradient.detach())

    def shard_of(self, values: Tensor) -> Tensor:
        """Return the shard's elements of ``values``, which has a number for each element of the parameter."""
        flat = flat_in_order_of(values.view(self.whole.shape), self.whole)
        return flat[self.mine.start : self.mine.stop].view(self.shard.shape)


def shard_parameters(named: Sequence[Named], group: Group) -> list[ShardedParameter]:
    """Cut each parameter into one shard per instance; all instances get about equally many elements."""
    ranges: dict[str, list[range]] = {}
    for is_trained in (True, False):  # frozen parameters make no work, but may be most of a model
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
        shard = whole.detach()  # because torch chooses the dtypes of results by the number of dimensions
    can_train = shard.is_floating_point() or shard.is_complex()  # because integers have no gradient in torch
    return ShardedParameter(
        name=name,
        whole=whole,
        ranges=ranges,
        mine=mine,
        shard=Parameter(shard, requires_grad=can_train),
        address=whole.data_ptr(),
    )


def describe(named: Sequence[Named]) -> str:
    """Return the number of parameters and a digest of their names and shapes, which instances compare."""
    text = "\n".join(
        f"{name} {tuple(parameter.shape)} {parameter.stride()} {parameter.dtype} {parameter.device.type} "
        f"{parameter.requires_grad}"
        for name, parameter in named
    )
    digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    return f"{len(named)} parameters, names and shapes {digest}"


def gather_state(
    group: Group,
    sharded: Sequence[ShardedParameter],
    states: Mapping[Tensor, State],
    keys: frozenset[str],
    text: str,
) -> Iterator[tuple[ShardedParameter, State]]:
    """Yield each parameter and its state, gathered from all instances. All instances must iterate to the end."""
    with fail_together(group, f"{text}, its form", OptimizerError):
        described_here = _describe_all(sharded, states, keys)
    everybody = gather_json(group, text, described_here)
    for position, parameter in enumerate(sharded):
        owners = [instance for instance, elements in enumerate(parameter.ranges) if elements]
        described = [everybody[owner][position] for owner in owners]
        if any(other != described[0] for other in described):
            raise OptimizerError(
                f"the state of {parameter.name} is not of one step on {group.name(owners)}, of which each has "
                "a part: all instances must load a state, or none"
            )
        if described and described[0]:
            state = {key: _gather(group, parameter, states, key, value) for key, value in described[0].items()}
            yield parameter, state


def own_state(parameter: ShardedParameter, whole: State, keys: frozenset[str]) -> State:
    """Return this instance's part of a parameter's optimizer state ``whole``, copied; tensors with one number for
    each element go to the parameter's device.
    """
    device = parameter.whole.device
    return {
        key: parameter.shard_of(value).to(device, copy=True)
        if _is_of_elements(key, value, keys, parameter.whole.shape)
        else value.clone()
        if isinstance(value, Tensor)
        else value
        for key, value in whole.items()
    }


def copy_state(state: State) -> State:
    """Return a copy of the optimizer's ``state`` of one parameter, in new memory."""
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}


def _is_of_elements(key: str, value: object, keys: frozenset[str], shape: torch.Size) -> bool:
    return isinstance(value, Tensor) and (key in keys or (value.dim() > 0 and value.shape == shape))


def _describe_all(
    sharded: Sequence[ShardedParameter], states: Mapping[Tensor, State], keys: frozenset[str]
) -> list[dict[str, Any]]:
    """Return a description of the optimizer state of each parameter, as JSON values."""
    if others := set(states) - {parameter.shard for parameter in sharded}:
        raise OptimizerError(
            f"a part of the optimizer's state belongs to no parameter, so it cannot be gathered: {others}"
        )
    return [_describe(parameter, states.get(parameter.shard, {}), keys) for parameter in sharded]


def _describe(parameter: ShardedParameter, state: State, keys: frozenset[str]) -> dict[str, Any]:
    """Return a parameter's optimizer state as JSON; for a tensor with a number per element, only the dtype."""
    return {
        key: ["elements", _name(value.dtype)]
        if _is_of_elements(key, value, keys, parameter.shard.shape)
        else _single_as_json(value, f"the state {key} of {parameter.name}")
        for key, value in state.items()
    }


def _single_as_json(value: object, what: str) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return ["tensor", _name(value.dtype), list(value.shape), value.device.type, value.item()]
    if value is None or isinstance(value, bool | int | float | str):
        return ["value", value]
    raise OptimizerError(
        f"{what} is neither a number for each element nor a single value, so it cannot be gathered"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _gather(
    group: Group, parameter: ShardedParameter, states: Mapping[Tensor, State], key: str, described: Sequence[Any]
) -> Any:
    kind, *content = described
    if kind == "value":
        return content[0]
    if kind == "tensor":
        dtype, shape, device_type, number = content
        device = parameter.whole.device if device_type == parameter.whole.device.type else device_type
        return torch.full(shape, number, dtype=getattr(torch, dtype), device=device)
    whole = torch.empty_like(parameter.whole, dtype=getattr(torch, content[0]), requires_grad=False)
    flat = flat_view(whole, parameter.name)
    if parameter.mine:
        flat[parameter.mine.start : parameter.mine.stop] = states[parameter.shard][key].view(-1)
    if len(group.instances) > 1:
        for owner, elements in enumerate(parameter.ranges):
            if elements:
                group.backend.broadcast(flat[elements.start : elements.stop], owner)
    return whole
