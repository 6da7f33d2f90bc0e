"""The state of a sharded optimizer: gathered into the form it has without sharding, or cut into shards."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from popdist.errors import OptimizerError, name_instances
from popdist.gradients.shards import flat_view
from popdist.groups import Group
from popdist.sharded.parameters import ShardedParameter
from popdist.weights import gather_bytes

State = dict[str, Any]
"""What an optimizer keeps for one parameter: tensors with a number for each element, and single values."""


def gather_state(
    group: Group,
    sharded: Sequence[ShardedParameter],
    states: Mapping[Tensor, State],
    keys: frozenset[str],
    text: str,
) -> Iterator[tuple[ShardedParameter, State]]:
    """Yield the whole state of each parameter that has one; all instances must iterate to the end."""
    described_here = json.dumps(_describe_all(sharded, states, keys)).encode()
    everybody = [json.loads(data) for data in gather_bytes(group, text, described_here)]
    if trouble := next((said for said in everybody if isinstance(said, str)), None):
        raise OptimizerError(trouble)
    for position, parameter in enumerate(sharded):
        owners = [instance for instance, elements in enumerate(parameter.ranges) if elements]
        described = [everybody[owner][position] for owner in owners]
        if any(other != described[0] for other in described):
            raise OptimizerError(
                f"the state of {parameter.name} is not of one step on {name_instances(owners)}, of which each has "
                "a part: all instances must load a state, or none"
            )
        if described and described[0]:
            state = {key: _gather(group, parameter, states, key, value) for key, value in described[0].items()}
            yield parameter, state


def own_state(parameter: ShardedParameter, whole: State, keys: frozenset[str]) -> State:
    """This instance's part of the state of one parameter, in memory of its own."""
    return {
        key: parameter.shard_of(value).clone()
        if _is_of_elements(key, value, keys, parameter.whole.shape)
        else value.clone()
        if isinstance(value, Tensor)
        else value
        for key, value in whole.items()
    }


def copy_state(state: State) -> State:
    """A copy of ``state`` in memory of its own."""
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}


def _is_of_elements(key: str, value: object, keys: frozenset[str], shape: torch.Size) -> bool:
    return isinstance(value, Tensor) and (key in keys or (value.dim() > 0 and value.shape == shape))


def _describe_all(
    sharded: Sequence[ShardedParameter], states: Mapping[Tensor, State], keys: frozenset[str]
) -> list[dict[str, Any]] | str:
    """Describe the state of each parameter as JSON; a text says why that is not possible."""
    if others := set(states) - {parameter.shard for parameter in sharded}:
        return f"a part of the optimizer's state belongs to no parameter, so it cannot be gathered: {others}"
    try:
        return [_describe(parameter, states.get(parameter.shard, {}), keys) for parameter in sharded]
    except OptimizerError as error:
        return str(error)


def _describe(parameter: ShardedParameter, state: State, keys: frozenset[str]) -> dict[str, Any]:
    """Describe the state as JSON; of tensors with a number for each element only the dtype."""
    return {
        key: ["elements", _name(value.dtype)]
        if _is_of_elements(key, value, keys, parameter.shard.shape)
        else _single_as_json(value, f"the state {key} of {parameter.name}")
        for key, value in state.items()
    }


def _single_as_json(value: object, what: str) -> Any:  # noqa: ANN401 - JSON
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
) -> Any:  # noqa: ANN401 - a tensor or a value
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
