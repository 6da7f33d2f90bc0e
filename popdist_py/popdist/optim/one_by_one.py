"""Optimizers that step on one parameter at a time; results are bitwise equal to a step on all parameters.

So a parameter, its gradient and its state need be in memory only during the parameter's update. A check on small
tensors first proves that an optimizer's update of a parameter needs only the tensors of that parameter.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from popdist.errors import OptimizerError
from popdist.optim.elementwise import REASONS, is_known, quiet_step
from popdist.optim.pieces import Piece, PieceOptimizer

State = dict[str, Any]
"""The state of an optimizer for one parameter."""

Kind: TypeAlias = tuple[tuple[int, ...], torch.dtype, torch.device]
"""Shape, dtype and device of a parameter."""

OF_SCALERS: Final = ("grad_scale", "found_inf")
"""Attributes that a GradScaler sets on an optimizer for one step."""

_MIXING: Final = [name for name, reason in REASONS.items() if reason.endswith("over all parameters")]

_FACTORS: Final = (1.0, 1e4, 1.0, 1e-6, 0.0, 1.0)
"""Factors by which the gradients of successive steps of the check are multiplied."""

_INSTEAD: Final = "take one that updates each parameter by that parameter's own tensors, such as AdamW"

_RATE: Final = 0.01
_MOST_SIDE: Final = 8
"""Maximum length of a side of a tensor in the check."""


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an optimizer's parameter group: all entries except the parameters."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


class OneByOne:
    """An optimizer that updates a group's parameters one by one; results are bitwise equal to a step on all.

    ``make`` makes the optimizer with one group of the given parameters; ``kinds`` has the shapes, dtypes and
    devices of the parameters.
    """

    def __init__(self, make: Callable[[list[Parameter]], Optimizer], kinds: Iterable[Kind]) -> None:
        samples = _samples(kinds)
        self._make = make
        try:
            self._inner = make([Parameter(sample.clone()) for sample in samples])
        except Exception as error:
            error.add_note(f"It was made of small tensors like the parameters: {[(*it.shape,) for it in samples]}")
            raise
        self._makes_state_early = bool(self._inner.state)
        self._clear()
        self._first = self.settings, _attributes_of(self._inner)
        self._settings: dict[str, Any] = {}
        self._attributes: dict[str, Any] = {}
        self._after: dict[str, Any] | None = None
        self._prove(make([Parameter(sample) for sample in samples]))
        self._reset()

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the optimizer's parameter group, without the parameters."""
        return settings_of(self._inner.param_groups[0])

    @property
    def optimizer(self) -> Optimizer:
        """The torch optimizer that makes the steps; it has no parameters between the steps."""
        return self._inner

    def first_state(self, parameter: Parameter) -> State:
        """Return the state that the optimizer makes in a first step on ``parameter``; reset the optimizer."""
        self.begin(self.settings)
        state = self.step(parameter, {}, 0)
        self._reset()
        return state

    def begin(self, settings: Mapping[str, Any], **attributes: object) -> None:
        """Begin a step with these settings of the parameter group and these attributes of the optimizer."""
        for name in OF_SCALERS:
            vars(self._inner).pop(name, None)
        self._settings = dict(settings)
        self._attributes = {**_attributes_of(self._inner), **attributes}
        self._after = None

    def step(self, parameter: Parameter, state: State, position: int) -> State:
        """Update ``parameter``, whose index among all parameters is ``position``; return the new state."""
        inner = self._inner
        vars(inner).update({name: _copy_of(value) for name, value in self._attributes.items()})
        inner.param_groups[0] = {"params": [parameter], **self._settings}
        inner.state = defaultdict(dict, {parameter: state} if state else {})
        if self._makes_state_early and not state:
            inner.state.update(self._make([parameter]).state)
        if isinstance(inner, PieceOptimizer):
            size = parameter.numel()
            inner.place({parameter: Piece(position=position, elements=range(size), num_elements=size)}, None)
        quiet_step(inner)
        self._after = self.settings
        return self._taken_state(parameter)

    def end(self) -> dict[str, Any]:
        """End the step; return the group's settings after the step, or an empty dict if no step was begun."""
        if self._settings and self._after is None and not is_known(type(self._inner)):
            self._inner.param_groups[0] = {"params": [], **self._settings}
            quiet_step(self._inner)  # because an optimizer that counts its steps must count this step
            self._after = self.settings
        settings, self._settings, self._after = self._after or self._settings, {}, None
        return settings

    def load(self, parameter: Parameter, settings: Mapping[str, Any], state: State) -> State:
        """Load ``state`` for ``parameter`` into the optimizer; return the state that the optimizer made of it."""
        self._inner.param_groups[0]["params"] = [parameter]
        self._inner.load_state_dict({"state": {0: state}, "param_groups": [{**settings, "params": [0]}]})
        return self._taken_state(parameter)

    def _taken_state(self, parameter: Parameter) -> State:
        state: State = dict(self._inner.state.get(parameter, {}))
        self._clear()
        return state

    def _clear(self) -> None:
        self._inner.state = defaultdict(dict)
        self._inner.param_groups[0]["params"] = []

    def _reset(self) -> None:
        """Restore the settings and attributes that the optimizer had before its first step."""
        settings, attributes = self._first
        self._inner.param_groups[0] = {"params": [], **settings}
        vars(self._inner).update(attributes)

    def _prove(self, joint: Optimizer) -> None:
        """Raise OptimizerError unless steps on one parameter at a time are bitwise equal to steps on all."""
        reason = next((REASONS[it.__name__] for it in type(joint).__mro__ if it.__name__ in _MIXING), None)
        together: list[Parameter] = joint.param_groups[0]["params"]
        apart = [Parameter(parameter.detach().clone()) for parameter in together]
        try:
            self._train(joint, together, apart)
        except Exception as error:
            raise OptimizerError(f"it {reason or f'failed in a step: {error}'}; {_INSTEAD}") from error
        if not all(map(_are_equal, together, apart)):
            reason = reason or "updates several parameters together to other bits than one after the other"
            raise OptimizerError(f"it {reason}; {_INSTEAD}")

    def _train(self, joint: Optimizer, together: Sequence[Parameter], apart: Sequence[Parameter]) -> None:
        """Train the parameters ``together`` with ``joint``, all in a step, and the copies ``apart`` one by one."""
        numbers = torch.Generator().manual_seed(0)
        if "lr" in joint.param_groups[0]:
            joint.param_groups[0]["lr"] = _RATE
        settings, states = settings_of(joint.param_groups[0]), [State() for _ in apart]
        for factor in _FACTORS:
            for one, other in zip(together, apart, strict=True):
                drawn = torch.randn(one.shape, dtype=torch.float32, generator=numbers, device="cpu") * factor
                one.grad, other.grad = drawn.to(one, copy=True), drawn.to(one, copy=True)
            quiet_step(joint)
            self.begin(settings)
            states = [self.step(*both, position) for position, both in enumerate(zip(apart, states, strict=True))]
            settings = self.end()


def _samples(kinds: Iterable[Kind]) -> list[Tensor]:
    """Return small tensors, at least two, with the dtypes, devices and shortened shapes of the parameters."""
    small = dict.fromkeys(
        (tuple(min(side, _MOST_SIDE) for side in shape), dtype, device) for shape, dtype, device in kinds
    )
    chosen = [*small] or [((_MOST_SIDE,), torch.float32, torch.device("cpu"))]
    return [
        torch.linspace(-1.0, 1.5, math.prod(shape), dtype=torch.float32, device="cpu")
        .view(shape)
        .to(device, dtype)
        for shape, dtype, device in (chosen * 2 if len(chosen) == 1 else chosen)
    ]


def _are_equal(one: Tensor, other: Tensor) -> bool:
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _attributes_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return the attributes, such as a step count, of an optimizer that is not torch's; {} for torch's own."""
    if is_known(type(optimizer)) or isinstance(optimizer, PieceOptimizer):
        return {}
    return {name: _copy_of(it) for name, it in vars(optimizer).items() if name not in ("state", "param_groups")}


def _copy_of(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else copy(value)
