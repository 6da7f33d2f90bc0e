"""Encoded states of models and optimizers: joined from a replica's instances, and cut for each instance.

Parameters have the names of the whole model on every instance. An optimizer numbers its own parameters. In a
checkpoint the optimizer's parameters have their names if the call that saved also names the model.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from torch import nn
from torch.optim import Optimizer

from popdist.checkpoint.encoding import Json, entries_of, union, with_entries
from popdist.errors import CheckpointError
from popdist.step.training.replicated_model import ReplicatedModel

Names: TypeAlias = list[list[str]]
"""The names of an optimizer's parameters, group by group."""


def keys_of(module: nn.Module) -> dict[str, str]:
    """Return a dict from the keys of ``module``'s state to the keys in the whole model, of which it is a part.

    The numbers in a ``ModuleList`` are left out if its members have different keys, as the stages of a pipeline
    do.
    """
    own = [*module.state_dict(keep_vars=True)]
    listed = module.module if isinstance(module, ReplicatedModel) else module
    short = [key.partition(".")[2] for key in own]
    is_list_of_stages = isinstance(listed, nn.ModuleList) and len({*short}) == len(short)
    return dict(zip(own, short if is_list_of_stages else own, strict=True))


def rename_keys(state: Mapping[str, Any], keys: Mapping[str, str]) -> Mapping[str, Any]:
    """Return ``state``, a module's state dict, under the keys of the whole model, as the dict ``keys`` says."""
    if all(key == name for key, name in keys.items()):
        return state
    return OrderedDict((keys[key], value) for key, value in state.items())


def parameter_names(named: Mapping[str, object]) -> dict[int, str]:
    """Return the names of the parameters of all modules in ``named``; the key is the parameter's Python id."""
    modules = [(name, thing) for name, thing in sorted(named.items()) if isinstance(thing, nn.Module)]
    found: dict[int, str] = {}
    for prefix, module in modules:
        keys = keys_of(module)
        for name, parameter in module.named_parameters():
            found.setdefault(id(parameter), f"{prefix}.{keys.get(name, name)}")
    return found


def names_of(optimizer: Optimizer, names: Mapping[int, str]) -> Names | None:
    """Return the names of the optimizer's parameters, group by group; None if a parameter has no name."""
    found = [[names.get(id(it), "") for it in group["params"]] for group in optimizer.param_groups]
    return found if all(all(group) for group in found) else None


def name_parameters(state: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """Return an optimizer's state dict with the names of parameters in place of the parameters' numbers."""
    flat = [name for group in names for name in group]
    groups = [
        {key: value for key, value in group.items() if key != "param_names"} | {"params": mine}
        for group, mine in zip(state["param_groups"], names, strict=True)
    ]
    states = {flat[key] if isinstance(key, int) else key: value for key, value in state["state"].items()}
    return {**state, "state": states, "param_groups": groups}


def join_optimizers(name: str, states: Mapping[int, Json]) -> Json:
    """Return the whole state of the optimizer ``name``, joined from the ``states`` of a replica's instances."""
    first, *others = states
    joined = states[first]
    groups = _groups(joined)
    for instance in others:
        theirs = _groups(states[instance])
        if [_settings(group) for group in theirs] != [_settings(group) for group in groups]:
            raise CheckpointError(
                f"the parameter groups of {name} are other ones on instance {instance} than on instance {first}: "
                "give all instances of a replica as many, with the same settings in the same order; one of them "
                "may be without parameters"
            )
        for group, more in zip(groups, theirs, strict=True):
            group["params"] = list(dict.fromkeys([*group["params"], *more["params"]]))
        joined = union(joined, states[instance])
    return _with_groups(joined, groups)


def cut_module(saved: Json, keys: Mapping[str, str]) -> Json:
    """Return this instance's part of a module's saved state; ``keys`` maps the part's keys to the saved keys."""
    entries = dict(entries_of(saved) or ())
    return with_entries(saved, [[key, entries[name]] for key, name in keys.items()])


def cut_optimizer(saved: Json, own: Names | None) -> Json:
    """Return the part of an optimizer's saved state for the parameters ``own``, with numbers in place of names.

    If ``own`` is None, or if the state was saved without names, the part has all parameters, in the saved order.
    """
    groups = _groups(saved)
    theirs: Names = [group["params"] for group in groups]
    if own is None or not are_named(theirs):
        own = theirs
    numbers = {name: number for number, name in enumerate(name for group in own for name in group)}
    for group, mine in zip(groups, own, strict=True):
        group["params"] = [numbers[name] for name in mine]
    known = {name for group in theirs for name in group}
    entries = dict(entries_of(saved) or ())
    states = entries_of(entries["state"]) or ()
    kept = [[numbers.get(key, key), state] for key, state in states if key in numbers or key not in known]
    entries["state"] = with_entries(entries["state"], kept)
    return _with_groups(with_entries(saved, [[key, value] for key, value in entries.items()]), groups)


def cut_randomness(saved: Json, index: int) -> Json:
    """Return, from all random states ``saved``, the state of instance number ``index`` of each replica."""
    entries = entries_of(saved) or ()
    return with_entries(
        saved, [[replica_of(key), state] for key, state in entries if key == place(replica_of(key), index)]
    )


def place(replica: str, index: int) -> str:
    """Return the name by which a checkpoint saves the random state of the instance ``index`` of ``replica``."""
    return f"{replica}.{index}" if index else replica


def replica_of(place: str) -> str:
    """Return the replica's number, as text, that is in ``place``, the name of a random state in a checkpoint."""
    return place.partition(".")[0]


def are_named(params: Sequence[Sequence[object]]) -> bool:
    """Whether an optimizer's saved parameter groups, ``params``, have names instead of parameter numbers."""
    return all(isinstance(it, str) for group in params for it in group)


def _groups(state: Json) -> list[dict[str, Json]]:
    """Return the parameter groups of an optimizer's state, each as a new dict."""
    return [dict(entries_of(group) or ()) for group in dict(entries_of(state) or ())["param_groups"]]


def _with_groups(state: Json, groups: Sequence[Mapping[str, Json]]) -> Json:
    encoded = [{"dict": [[key, value] for key, value in group.items()]} for group in groups]
    entries = [[key, encoded if key == "param_groups" else value] for key, value in entries_of(state) or ()]
    return with_entries(state, entries)


def _settings(group: Mapping[str, Json]) -> dict[str, Json]:
    return {key: value for key, value in group.items() if key != "params"}
