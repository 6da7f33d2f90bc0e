"""The objects whose states are in a checkpoint; a load changes all of these objects, or it changes none."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from typing import Any, Protocol, TypeAlias, runtime_checkable

from torch import Tensor, nn
from torch.optim import Optimizer

from popdist.checkpoint.encoding import Json, entries_of, tensors_of, union
from popdist.checkpoint.parts import (
    are_named,
    cut_module,
    cut_optimizer,
    cut_randomness,
    join_optimizers,
    keys_of,
    name_parameters,
    names_of,
    parameter_names,
    rename_keys,
)
from popdist.checkpoint.stored_tensors import store_of
from popdist.checkpoint.tensor_pieces import Wanted
from popdist.data.randomness import ReplicaRandomness
from popdist.errors import CheckpointError, name_first
from popdist.gradients.buffers import check_buffers
from popdist.ground.local_tensors import TensorForm, is_distributed, local_part
from popdist.optim.sharded.sharded_optimizer import ShardedOptimizer


@runtime_checkable
class Stateful(Protocol):
    """An object that a checkpoint saves by its state, such as a module, an optimizer, a scheduler or a loader."""

    def state_dict(self) -> Any:
        """Return the object's state, which a later run needs to continue."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Load ``state_dict``, which :meth:`state_dict` has returned before, and continue from this state."""


def stateful_of(named: Mapping[str, object]) -> dict[str, Stateful]:
    """Return the objects in ``named`` that have a ``state_dict``; all other objects are plain values."""
    return {
        name: thing for name, thing in named.items() if isinstance(thing, Stateful) and not isinstance(thing, type)
    }


def replica_states_of(named: Mapping[str, object]) -> dict[str, Stateful]:
    """Return the random states of the local replicas of each model in ``named``; in the returned dict, the states
    of the model ``NAME`` have the key ``NAME.randomness``.
    """
    found = [(name, getattr(thing, "randomness", None)) for name, thing in named.items()]
    return {f"{name}.randomness": it for name, it in found if isinstance(it, ReplicaRandomness)}


def gather_sharded(named: Mapping[str, object], *, keep: bool) -> dict[str, dict[str, Any]]:
    """Gather and return the state dicts of sharded optimizers; without the parameters' states if not ``keep``."""
    sharded = {name: thing for name, thing in named.items() if isinstance(thing, ShardedOptimizer)}
    return {name: optimizer.gather_state_dict(keep=keep) for name, optimizer in sharded.items()}


def states_of(
    named: Mapping[str, object], gathered: Mapping[str, Any], *, must_have_names: bool
) -> dict[str, Any]:
    """Return the state dicts of the objects in ``named``; optimizers' states have parameters' names, if known."""
    names = parameter_names(named)
    states: dict[str, Any] = {}
    for name, thing in stateful_of(named).items():
        if isinstance(thing, nn.Module):
            check_buffers(thing)
            states[name] = rename_keys(thing.state_dict(), keys_of(thing))
            continue
        states[name] = gathered[name] if name in gathered else thing.state_dict()
        known = names_of(thing, names) if isinstance(thing, Optimizer) else None
        if known is not None:
            states[name] = name_parameters(states[name], known)
        elif must_have_names and isinstance(thing, Optimizer):
            raise CheckpointError(
                f"{name} has parameters of no module in this call, and the instances of a replica know each "
                f"other's parameters by name: name the model as well, as in save(path, model=model, {name}={name})"
            )
    return states


def join_states(named: Mapping[str, object], states: Mapping[int, Mapping[str, Json]]) -> dict[str, Json]:
    """Return encoded states of whole modules and optimizers, joined from each instance's part in ``states``."""
    joined = {}
    for name, thing in stateful_of(named).items():
        if isinstance(thing, Optimizer):
            joined[name] = join_optimizers(name, {instance: theirs[name] for instance, theirs in states.items()})
        elif isinstance(thing, nn.Module):
            joined[name] = reduce(union, [theirs[name] for theirs in states.values()])
    return joined


Owned: TypeAlias = dict[str, Any]
"""The keys that an instance has of each module, and its parameter names of each optimizer (None if unknown)."""


def owned_of(named: Mapping[str, object]) -> Owned:
    """Return what this instance has of each object: a module's state keys, or an optimizer's parameter names."""
    names = parameter_names(named)
    owned: Owned = {}
    for name, thing in stateful_of(named).items():
        if isinstance(thing, nn.Module):
            owned[name] = [*keys_of(thing).values()]
        elif isinstance(thing, Optimizer):
            owned[name] = names_of(thing, names)
    return owned


def check_fits(
    things: Mapping[str, Stateful], states: Mapping[str, Any], everybody: Sequence[Owned], where: str
) -> None:
    """Raise CheckpointError if the saved ``states`` do not fit the modules and optimizers in ``things``.

    ``states`` have forms in place of tensors; ``everybody`` has the keys and names of every instance.
    """
    for name, thing in things.items():
        if isinstance(thing, nn.Module):
            everywhere = {key for owned in everybody for key in owned[name] or ()}
            own = rename_keys(thing.state_dict(keep_vars=True), keys_of(thing))
            faults = _differing_keys(states[name], own, everywhere)
        elif isinstance(thing, Optimizer):
            faults = _differing_groups(states[name], thing, [owned[name] for owned in everybody])
        else:
            faults = []
        if faults:
            raise CheckpointError(f"{where} was saved with another {name}: {'; '.join(faults)}")


def cut(thing: Stateful, saved: Json, names: Mapping[int, str], index: int) -> Json:
    """Return this instance's part of the saved state of ``thing``; it is instance ``index`` of its replica."""
    if isinstance(thing, nn.Module):
        return cut_module(saved, keys_of(thing))
    if isinstance(thing, Optimizer):
        return cut_optimizer(saved, names_of(thing, names))
    return cut_randomness(saved, index) if isinstance(thing, ReplicaRandomness) else saved


def wanted_of(thing: Stateful, part: Json, forms: Mapping[str, TensorForm]) -> dict[str, Wanted]:
    """Return how to load each tensor in ``part``: whole, as this instance's piece of a DTensor, or into the store
    of a phased model, which is a file or memory for weights that do not fit into the model's own memory.
    """
    likes: list[tuple[Json, Any, Any]] = [(part, None, None)]
    if isinstance(thing, nn.Module):
        own = thing.state_dict(keep_vars=True)
        likes = [(value, own[key], own[key]) for key, value in entries_of(part) or ()]
    elif isinstance(thing, Optimizer):
        parameters = [it for group in thing.param_groups for it in group["params"]]
        for number, state in entries_of(dict(entries_of(part) or ())["state"]) or ():
            if isinstance(number, int):
                likes += _likes_of(thing, parameters[number], state)
    store, wanted = store_of(thing), {}
    for state, like, into in likes:
        for name in tensors_of(state):
            is_placed = is_distributed(like) and forms[name].shape == tuple(like.shape)
            is_stored = (
                store is not None
                and _form(into) == str(forms[name])
                and store.place_of(local_part(into)) is not None
            )
            wanted[name] = Wanted(
                form=forms[name], like=like if is_placed else None, into=into if is_stored else None
            )
    return wanted


def _likes_of(optimizer: Any, parameter: Tensor, state: Json) -> list[tuple[Json, Any, Any]]:
    """Return for each value of a parameter's state: the encoded value, ``parameter``, a stored tensor or None."""
    if store_of(optimizer) is None:
        return [(state, parameter, None)]
    stored = optimizer.mapped_state(parameter)
    return [(value, parameter, stored.get(key)) for key, value in entries_of(state) or ()]


def load_states(things: Mapping[str, Stateful], states: Mapping[str, Any]) -> Callable[[], None]:
    """Load each state into its object, modules last. Return a function that restores the former states of all
    objects except modules; if a load fails, this function runs at once.
    """
    before: list[Callable[[], object]] = []

    def undo() -> None:
        for give_back in before:
            with suppress(Exception):
                give_back()

    try:
        for name in sorted(things, key=lambda name: isinstance(things[name], nn.Module)):
            if not isinstance(things[name], nn.Module):
                before.append(_remember(things[name]))
            things[name].load_state_dict(states[name])
    except Exception as error:
        undo()
        error.add_note(f"while popdist.checkpoint loaded {name}")
        raise
    return undo


def _remember(thing: Stateful) -> Callable[[], object]:
    """Return a function that restores the present state of ``thing`` without communication."""
    if isinstance(thing, ShardedOptimizer):
        return thing.remember()
    if store_of(thing) is not None:  # nothing is restored, because the store is torn until the load ends
        return lambda: None
    state = thing.state_dict()
    return lambda: thing.load_state_dict(state)


def _differing_keys(saved: Mapping[str, object], own: Mapping[str, object], everywhere: set[str]) -> list[str]:
    both = [key for key in own if key in saved]
    forms = [(key, _form(saved[key]), _form(own[key])) for key in both]
    different = [f"{key} ({then} there, {now} here)" for key, then, now in forms if then != now]
    faults = _differing_names(saved, list(own), everywhere)
    return faults + ([f"different are {name_first(different, 8)}"] if different else [])


def _differing_names(saved: Iterable[str], own: Sequence[str], everywhere: set[str]) -> list[str]:
    present = {*saved}
    faults = [
        ("only the checkpoint has", [name for name in saved if name not in everywhere]),
        ("it does not have", [name for name in own if name not in present]),
    ]
    return [f"{fault} {name_first(names, 8)}" for fault, names in faults if names]


def _form(value: object) -> str:
    if isinstance(value, Tensor):
        value = TensorForm.of(value)
    return str(value) if isinstance(value, TensorForm) else "no tensor"


def _differing_groups(saved: Mapping[str, Any], optimizer: Optimizer, everybody: Sequence[Any]) -> list[str]:
    theirs = [group["params"] for group in saved.get("param_groups", ())]
    own, *_ = everybody
    if own is None or not are_named(theirs) or len(theirs) != len(own):
        then, now = [len(group) for group in theirs], [len(group["params"]) for group in optimizer.param_groups]
        if then != now:
            return [f"its groups have {then} parameters there and {now} here"]
    else:
        for number, group in enumerate(theirs):
            everywhere = {name for owned in everybody for name in owned[number]}
            if faults := _differing_names(group, own[number], everywhere):
                return [f"its group {number}: {fault}" for fault in faults]
    return [fault for group in saved["param_groups"] for fault in _differing_settings(group, optimizer)][:1]


def _differing_settings(saved: Mapping[str, object], optimizer: Optimizer) -> list[str]:
    """Return a list with an error text if a saved group has settings of another kind of optimizer; else []."""
    known = {name for group in optimizer.param_groups for name in group}
    theirs, own = (
        [name for name in saved if name not in known],
        [name for name in optimizer.defaults if name not in saved],
    )
    if not theirs or not own:  # another version of torch may have more settings, and a scheduler adds settings
        return []
    kind, then, now = type(optimizer).__name__, name_first(theirs, 8), name_first(own, 8)
    return [f"its settings are {then} there, and {kind} has {now}: make the one that was saved"]
