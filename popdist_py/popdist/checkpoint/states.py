"""The objects whose states a checkpoint holds; either all of them are loaded, or none is."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.optim import Optimizer

from popdist.checkpoint.encoding import TensorForm
from popdist.errors import CheckpointError, name_first
from popdist.sharded.sharded_optimizer import ShardedOptimizer
from popdist.training.replicated_model import ReplicatedModel


@runtime_checkable
class Stateful(Protocol):
    """An object that is saved by its state: module, optimizer, scheduler, scaler, sampler, loader, or your own."""

    def state_dict(self) -> Any:  # noqa: ANN401 - whatever the object takes back
        """The state that a later run needs."""

    def load_state_dict(self, state_dict: Any, /) -> Any:  # noqa: ANN401 - as above
        """Continue from such a state."""


def stateful_of(named: Mapping[str, object]) -> dict[str, Stateful]:
    """The objects in ``named`` that have a state; the others are plain values."""
    return {
        name: thing for name, thing in named.items() if isinstance(thing, Stateful) and not isinstance(thing, type)
    }


def replica_states_of(named: Mapping[str, object]) -> dict[str, Stateful]:
    """The random states of the models' replicas that this instance owns."""
    models = {name: thing for name, thing in named.items() if isinstance(thing, ReplicatedModel)}
    return {f"{name}.randomness": model.randomness for name, model in models.items()}


def gather_sharded(named: Mapping[str, object], *, keep: bool) -> dict[str, dict[str, Any]]:
    """Gather the states of sharded optimizers from all instances; only those that ``keep`` get them."""
    sharded = {name: thing for name, thing in named.items() if isinstance(thing, ShardedOptimizer)}
    return {name: optimizer.gather_state_dict(keep=keep) for name, optimizer in sharded.items()}


def check_fits(things: Mapping[str, Stateful], states: Mapping[str, Any], where: str) -> None:
    """Refuse states of other modules and optimizers than these, before anything is changed."""
    for name, thing in things.items():
        if isinstance(thing, nn.Module):
            faults = _differing_keys(states[name], thing.state_dict(keep_vars=True))
        elif isinstance(thing, Optimizer):
            faults = _differing_groups(states[name], thing)
        else:
            faults = []
        if faults:
            raise CheckpointError(f"{where} was saved with another {name}: {'; '.join(faults)}")


def load_states(things: Mapping[str, Stateful], states: Mapping[str, Any]) -> Callable[[], None]:
    """Load each state, modules last, and return a function that undoes it for all but modules."""
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
    """Return a function that restores the present state of ``thing``, without any exchange."""
    if isinstance(thing, ShardedOptimizer):
        return thing.remember()
    state = thing.state_dict()
    return lambda: thing.load_state_dict(state)


def _differing_keys(saved: Mapping[str, object], own: Mapping[str, object]) -> list[str]:
    both = [key for key in own if key in saved]
    forms = [(key, _form(saved[key]), _form(own[key])) for key in both]
    faults = [
        ("only the checkpoint has", [key for key in saved if key not in own]),
        ("it does not have", [key for key in own if key not in saved]),
        ("different are", [f"{key} ({then} there, {now} here)" for key, then, now in forms if then != now]),
    ]
    return [f"{fault} {name_first(names, 8)}" for fault, names in faults if names]


def _form(value: object) -> str:
    return str(TensorForm.of(value)) if isinstance(value, Tensor) else "no tensor"


def _differing_groups(saved: Mapping[str, Any], optimizer: Optimizer) -> list[str]:
    then = [len(group["params"]) for group in saved["param_groups"]]
    now = [len(group["params"]) for group in optimizer.param_groups]
    if then != now:
        return [f"its groups have {then} parameters there and {now} here"]
    return [fault for group in saved["param_groups"] for fault in _differing_settings(group, optimizer)][:1]


def _differing_settings(saved: Mapping[str, object], optimizer: Optimizer) -> list[str]:
    """The differences in settings if they are those of another kind of optimizer: each has some of its own."""
    known = {name for group in optimizer.param_groups for name in group}
    theirs, own = (
        [name for name in saved if name not in known],
        [name for name in optimizer.defaults if name not in saved],
    )
    if not theirs or not own:  # another version of torch knows more, and a schedule adds settings of its own
        return []
    kind, then, now = type(optimizer).__name__, name_first(theirs, 8), name_first(own, 8)
    return [f"its settings are {then} there, and {kind} has {now}: make the one that was saved"]
