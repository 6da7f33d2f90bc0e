"""PopTorch's optimizers: those of torch with loss scaling, dtypes of their state, and variable attributes."""

import copy
import inspect
import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Final, Protocol

import torch
from torch import Tensor

from popdist.errors import as_float
from poptorch._logging import logger
from poptorch.errors import Error
from poptorch.optim.optimizer_kinds import (
    ADAM_KIND,
    ADAMW_KIND,
    LAMB_KIND,
    RMSPROP_KIND,
    SGD_KIND,
    OptimizerKind,
)

_STATES: Final = ("ipu_state", "ipu_param")

SCALINGS: Final = {"loss_scaling": 1.0, "max_grad_norm": math.inf}
"""Attributes for all parameters, and what they are unless they are given, or for an optimizer of torch."""

_OF_VELOCITIES: Final = ("velocity_scaling", "use_combined_accum")
"""Arguments of SGD that torch's does not have."""


class StateHolder(Protocol):
    """The model that trains with an optimizer, and has its state."""

    has_news: bool  # whether it has made a step since its state was read

    def read_state(self) -> dict[str, dict[str, Tensor]]:
        """The state, as ``ipu_state`` and ``ipu_param``."""

    def load_held_state(self) -> None:
        """Go on from the state that was loaded into the optimizer."""


class VariableAttributes:
    """Which attributes of an optimizer are variable, for all its groups, of those that can be."""

    def __init__(self, variable_attributes: Iterable[str], allowed_attributes: Iterable[str]) -> None:
        self._allowed_attributes = list(allowed_attributes)
        self._variable_attributes = [name for name in variable_attributes if name in self._allowed_attributes]

    def isConstant(self, attr: str) -> bool:
        """Whether ``attr`` keeps its value while a model runs."""
        return attr not in self._variable_attributes

    def allow(self, attr: str) -> None:
        """Let ``attr`` be an attribute that can be variable."""
        self._allowed_attributes = [*self._allowed_attributes, attr]

    def markAsConstant(self, attr: str) -> None:
        """Keep the value of ``attr``, one of those that can be variable."""
        self._check(attr)
        self._variable_attributes = [name for name in self._variable_attributes if name != attr]

    def markAsVariable(self, attr: str) -> None:
        """Let ``setOptimizer`` change ``attr``, one of those that can be variable."""
        self._check(attr)
        if self.isConstant(attr):
            self._variable_attributes = [*self._variable_attributes, attr]

    def _check(self, attr: str) -> None:
        if attr not in self._allowed_attributes:
            allowed = ", ".join(self._allowed_attributes)
            raise AssertionError(f"{attr!r} is no attribute that can be variable: choose from {allowed}")


class Optimizer(torch.optim.Optimizer):
    """What poptorch's optimizers have beside torch's.

    Attributes:
        loss_scaling: What the loss is multiplied by before the gradients are computed, and they are divided by.
        accum_type: The dtype that programs ask for to add gradients in. They are added in float32.
        first_order_momentum_accum_type: What the mean of gradients is held in, and the momentum of RMSprop:
            torch.float16 or torch.float32.
        second_order_momentum_accum_type: What the mean of squared gradients is held in.
        max_grad_norm: Gradients whose norm over all parameters is larger are scaled down to it.
        variable_attrs: Which attributes ``setOptimizer`` may change.
    """

    loss_scaling: float
    accum_type: torch.dtype
    max_grad_norm: float
    variable_attrs: VariableAttributes

    _holder: Callable[[], StateHolder | None] = staticmethod(lambda: None)  # the model that trains with it
    kind: ClassVar[OptimizerKind]
    __signature__: ClassVar[inspect.Signature]  # of the constructor, as the table of kinds has it

    def __init_subclass__(cls, kind: OptimizerKind | None = None) -> None:
        super().__init_subclass__()
        if kind is not None:
            cls.kind, cls.__signature__ = kind, kind.signature

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        bound = self.kind.signature.bind(*arguments, **settings)
        bound.apply_defaults()
        taken = bound.arguments
        params = taken.pop("params")
        scalings = {name: taken.pop(name) for name in SCALINGS}
        types = {name: taken.pop(name) for name in [*taken] if name.endswith("accum_type")}
        given = {name: value for name, value in taken.items() if value is not None}
        for name in (*self.kind.variable, "velocity_scaling"):
            if name in given:
                _check_number(name, given[name])
        _check_norm(given.get("max_weight_norm", 0))
        attributes = {
            **{name: _positive(name, scalings[name], otherwise) for name, otherwise in SCALINGS.items()},
            **{name: _accumulated(name, dtype) for name, dtype in types.items()},
        }
        self._held: dict[str, dict[str, Tensor] | None] = dict.fromkeys(_STATES)
        self._own = ("_own", "_held", "variable_attrs", *attributes)
        variable = ["lr", *given, *(name for name, value in scalings.items() if value is not None)]
        self.variable_attrs = VariableAttributes(dict.fromkeys(variable), [*self.kind.variable, *scalings])
        own = {name: given.pop(name, value) for name, value in self.kind.defaults.items()}
        given = {name: value for name, value in given.items() if name not in _OF_VELOCITIES}
        if isinstance(self, self.kind.computed_by):
            super().__init__(params, **given)
        else:
            torch.optim.Optimizer.__init__(self, params, own)
        self.__dict__.update(attributes)
        for name, value in own.items():
            self._add_setting(name, value)

    def read_state_from(self, holder: StateHolder | None) -> None:
        """From now on ``holder`` has the state, as a model that trains; None: nobody."""
        self._holder = (lambda: None) if holder is None else weakref.ref(holder)

    @property
    def held_state(self) -> dict[str, dict[str, Tensor] | None]:
        """The state that was read or loaded last, as ``ipu_state`` and ``ipu_param``."""
        return self._held

    def state_dict(self) -> dict[str, Any]:
        """torch's, with ``ipu_state`` and ``ipu_param``: text → tensor, of the model that trains with it.

        Both are None before a model was compiled with this optimizer.
        """
        self.read_device()
        return {**super().state_dict(), **{name: held and dict(held) for name, held in self._held.items()}}

    def read_device(self) -> None:
        """Read the state of the model that trains with this optimizer, if there is one."""
        holder = self._holder()
        if holder is not None and holder.has_news:
            self._held = {**holder.read_state()}
        elif any(self._held.values()):
            logger.debug("Using cached optimiser state dict")

    def has_state(self) -> bool:
        """Whether there is a state of a model that was read or loaded."""
        return any(held is not None for held in self._held.values())

    def get_state_dict(self) -> dict[str, Any]:
        """``ipu_state`` and ``ipu_param`` alone, as ``state_dict()`` has them."""
        state = self.state_dict()
        return {name: state[name] for name in _STATES}

    def set_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``get_state_dict()`` gave. Names may be missing in both."""
        self._held = {name: state.get(name) and dict(state[name]) for name in _STATES}
        holder = self._holder()
        if holder is not None:
            holder.load_held_state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that ``state_dict()`` of a poptorch optimizer gave.

        Names may be missing in ``ipu_state`` and ``ipu_param``.
        """
        if not isinstance(state, Mapping):
            raise Error(f"load_state_dict takes what state_dict() gave, and was given {state!r}")
        if lacking := [name for name in _STATES if name not in state]:
            raise RuntimeError(
                f"Only IPU optimizer states can be loaded: this one has no {' and no '.join(lacking)}. Take it "
                "from state_dict() of an optimizer of poptorch.optim"
            )
        super().load_state_dict({name: value for name, value in state.items() if name not in _STATES})
        self.set_state_dict(state)

    def __getstate__(self) -> dict[str, Any]:
        """The attributes of a copy, with which no model trains."""
        return {**super().__getstate__(), **{name: copy.copy(vars(self)[name]) for name in self._own}}

    def _add_setting(self, name: str, value: object) -> None:
        """A setting of groups that torch's class does not have."""
        self.defaults[name] = value
        for group in self.param_groups:
            group.setdefault(name, value)


def _step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
    """Update the parameters by the classes that the settings of their groups ask for."""
    kind = self.kind
    if all(isinstance(self, kind.class_of(group)) for group in self.param_groups):
        return kind.computed_by.step(self, closure)
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    for group in self.param_groups:
        if group["params"]:
            other: Any = kind.class_of(group)
            stepping = other(group["params"], **kind.arguments_of(group))
            stepping.state = self.state
            stepping.step()
    return loss


class SGD(Optimizer, torch.optim.SGD, kind=SGD_KIND):
    """torch.optim.SGD.

    Args:
        velocity_scaling: Accepted with ``use_combined_accum``, and without effect: the velocity is computed in
            float32.
        use_combined_accum: Whether gradients are added into the velocity. The numbers are the same.
        velocity_accum_type: What the velocity is held in: torch.float16 or torch.float32.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        given = self.kind.signature.bind(*arguments, **settings).arguments
        self.use_combined_accum: bool = given.get("use_combined_accum", False)
        self._own += ("use_combined_accum",)
        scaling = given.get("velocity_scaling")
        if self.use_combined_accum:
            self._add_setting("velocity_scaling", _positive("velocity_scaling", scaling, 1.0))
            self.variable_attrs.allow("velocity_scaling")
            if scaling is not None:
                self.variable_attrs.markAsVariable("velocity_scaling")
        elif scaling is not None:
            logger.warning("velocity_scaling is only used with use_combined_accum=True: it is loss_scaling now")

    @property
    def velocity_scaling(self) -> float:
        """The factor of the velocity: the groups' value if accumulators are combined, else ``loss_scaling``."""
        found: float = self.defaults.get("velocity_scaling", self.loss_scaling)
        return found


class Adam(Optimizer, torch.optim.Adam, kind=ADAM_KIND):
    """torch.optim.Adam."""


class AdamW(Optimizer, torch.optim.AdamW, kind=ADAMW_KIND):
    """torch.optim.AdamW.

    Args:
        bias_correction: Whether both means are divided by 1 - beta**step.
    """

    step = _step


class RMSprop(Optimizer, torch.optim.RMSprop, kind=RMSPROP_KIND):
    """torch.optim.RMSprop.

    Args:
        use_tf_variant: Whether ``eps`` is within the square root and the learning rate within the momentum, as in
            TensorFlow.
    """

    step = _step

    @property
    def use_tf_variant(self) -> bool:
        """Whether steps are TensorFlow's."""
        return bool(self.defaults["use_tf_variant"])


class LAMB(Optimizer, torch.optim.Optimizer, kind=LAMB_KIND):
    """LAMB, algorithm 2 of arXiv 1904.00962, as ``popdist.optim.LAMB`` computes it.

    Args:
        bias_correction: Whether both means are divided by 1 - beta**step.
        max_weight_norm: The largest norm that a parameter counts with; 0 for updates that are not scaled by norms.
    """

    step = _step


def _check_number(name: str, value: object) -> None:
    """Refuse what torch would compare with a number, and say so in words that name neither."""
    parts = value if name == "betas" and isinstance(value, tuple | list) else (value,)
    wanted = "two finite numbers" if name == "betas" else "a finite number"
    if len(parts) != (2 if name == "betas" else 1) or not all(map(_is_finite, parts)):
        raise Error(f"{name} must be {wanted}, and is {value!r}")


def _check_norm(largest: float) -> None:
    if not largest >= 0:
        raise Error(
            f"max_weight_norm={largest} must be a norm: 0 is for updates that no norm scales, and larger ones "
            "limit it"
        )


def _is_finite(value: object) -> bool:
    return type(value) is not bool and math.isfinite(as_float(value))


def _positive(name: str, value: Any, otherwise: float) -> float:
    if value is None:
        return otherwise
    if isinstance(value, bool) or not _is_finite(value) or not value > 0:
        raise Error(f"{name} must be a finite number above 0, and is {value!r}")
    return float(value)


def _accumulated(name: str, dtype: torch.dtype | None) -> torch.dtype:
    if dtype not in (None, torch.float16, torch.float32):
        raise AssertionError(f"{name} must be torch.float16 or torch.float32, and is {dtype}")
    return torch.float32 if dtype is None else dtype
