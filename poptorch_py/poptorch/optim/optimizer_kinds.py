"""The table of optimizers: of each kind its arguments, what can vary, its state, and what computes its steps."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Final, NamedTuple

import torch

import popdist
from poptorch.errors import Error
from poptorch.optim.variants import TensorFlowRMSprop, UncorrectedAdamW

MAX_WEIGHT_NORM: Final = 65500.0
"""LAMB's largest norm of a parameter, about the largest number that half precision has."""

_FIRST: Final = "first_order_momentum_accum_type"
_SECOND: Final = "second_order_momentum_accum_type"
_DEFAULTS: Final = {"use_combined_accum": False, _FIRST: torch.float32, _SECOND: torch.float32}
"""Defaults of a constructor's arguments that are not None; None stands for torch's default."""


class Moment(NamedTuple):
    """What an optimizer keeps of a parameter: a number for each element."""

    name: str  # PopTorch's, such as Accl1
    type_name: str  # the attribute that says its dtype
    setting: str | None = None  # of a group; where it is false there is no such moment. None for always


class Variant(NamedTuple):
    """A class that computes the steps of groups with a setting that torch's class does not have."""

    setting: str
    value: bool  # of the setting, for which the class computes; the default is the other one
    computed_by: type[torch.optim.Optimizer]


@dataclass(frozen=True, kw_only=True, eq=False)
class OptimizerKind:
    """A kind of optimizer."""

    name: str
    computed_by: type[torch.optim.Optimizer]
    arguments: str  # of PopTorch's constructor in their order, after the parameters; lr! is one without a default
    variable: Sequence[str]  # settings of a group that can be variable, all of them numbers
    moments: Mapping[str, Moment]  # by torch's names
    variant: Variant | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)  # settings that are not those of ``computed_by``

    @cached_property
    def signature(self) -> inspect.Signature:
        """That of PopTorch's constructor."""
        parameters = [inspect.Parameter("params", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
        for argument in self.arguments.split():
            name = argument.removesuffix("!")
            default = inspect.Parameter.empty if name != argument else _DEFAULTS.get(name)
            parameters.append(inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default))
        return inspect.Signature(parameters)

    def class_of(self, settings: Mapping[str, Any]) -> type[torch.optim.Optimizer]:
        """The class that computes the steps of a group with these settings."""
        variant = self.variant
        if variant is not None and bool(settings.get(variant.setting, not variant.value)) is variant.value:
            return variant.computed_by
        return self.computed_by

    def arguments_of(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """A group's settings as its class takes them."""
        known = settings_of(self.class_of(settings).__init__)
        taken = {name: value for name, value in settings.items() if name in known}
        if "max_weight_norm" in taken:
            limit = taken["max_weight_norm"]
            taken |= {"max_weight_norm": limit or None, "trust_ratio": limit != 0}
        return taken

    def moment_types(
        self, settings: Mapping[str, Any], types: Mapping[str, torch.dtype]
    ) -> dict[str, torch.dtype]:
        """The moments that a group with these settings keeps, by torch's names, with the dtypes asked for."""
        return {
            name: types.get(moment.type_name, torch.float32)
            for name, moment in self.moments.items()
            if moment.setting is None or settings.get(moment.setting)
        }


@cache
def settings_of(constructor: Callable[..., None]) -> Mapping[str, inspect.Parameter]:
    """The settings that the constructor of torch's or popdist's class takes."""
    parameters = inspect.signature(constructor).parameters
    return {name: it for name, it in parameters.items() if name not in ("self", "params")}


_OF_ADAM: Final = {
    "exp_avg": Moment("Accl1", _FIRST),
    "exp_avg_sq": Moment("Accl2", _SECOND),
    "max_exp_avg_sq": Moment("Accl3", _SECOND, "amsgrad"),
}
_OF_RMSPROP: Final = {
    "grad_avg": Moment("Accl1", _FIRST, "centered"),
    "square_avg": Moment("Accl2", _SECOND),
    "momentum_buffer": Moment("Accl3", _FIRST, "momentum"),
}
_TYPES: Final = f"accum_type {_FIRST} {_SECOND}"
_OF_GROUPS: Final = ("lr", "betas", "eps", "weight_decay")

SGD_KIND: Final = OptimizerKind(
    name="SGD",
    computed_by=torch.optim.SGD,
    arguments="lr! momentum dampening weight_decay nesterov maximize foreach differentiable loss_scaling"
    " velocity_scaling use_combined_accum accum_type velocity_accum_type max_grad_norm",
    variable=("lr", "momentum", "dampening", "weight_decay"),
    moments={"momentum_buffer": Moment("Accl1", "velocity_accum_type", "momentum")},
)
ADAMW_KIND: Final = OptimizerKind(
    name="AdamW",
    computed_by=torch.optim.AdamW,
    arguments="lr betas eps weight_decay amsgrad maximize foreach capturable differentiable fused loss_scaling"
    f" bias_correction {_TYPES} max_grad_norm",
    variable=_OF_GROUPS,
    moments=_OF_ADAM,
    variant=Variant("bias_correction", value=False, computed_by=UncorrectedAdamW),
    defaults={"bias_correction": True},
)
ADAM_KIND: Final = OptimizerKind(
    name="Adam",
    computed_by=torch.optim.Adam,
    arguments="lr betas eps weight_decay amsgrad foreach maximize capturable differentiable fused loss_scaling"
    f" {_TYPES} max_grad_norm",
    variable=_OF_GROUPS,
    moments=_OF_ADAM,
)
RMSPROP_KIND: Final = OptimizerKind(
    name="RMSprop",
    computed_by=torch.optim.RMSprop,
    arguments="lr alpha eps weight_decay momentum centered foreach maximize differentiable loss_scaling"
    f" {_TYPES} use_tf_variant max_grad_norm",
    variable=("lr", "alpha", "eps", "weight_decay", "momentum"),
    moments=_OF_RMSPROP,
    variant=Variant("use_tf_variant", value=True, computed_by=TensorFlowRMSprop),
    defaults={"use_tf_variant": False},
)
LAMB_KIND: Final = OptimizerKind(
    name="LAMB",
    computed_by=popdist.optim.LAMB,
    arguments=f"lr betas eps weight_decay bias_correction loss_scaling max_weight_norm {_TYPES} max_grad_norm",
    variable=(*_OF_GROUPS, "max_weight_norm"),
    moments=_OF_ADAM,
    defaults={
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.01,
        "bias_correction": True,
        "max_weight_norm": MAX_WEIGHT_NORM,
    },
)
KINDS: Final = (SGD_KIND, ADAMW_KIND, ADAM_KIND, RMSPROP_KIND, LAMB_KIND)
"""AdamW comes before Adam, from which torch derives it."""


def kind_of(optimizer: torch.optim.Optimizer) -> OptimizerKind:
    """The kind of ``optimizer``, which is torch's or poptorch's; an Error for others."""
    for kind in KINDS:
        is_torchs = kind is not LAMB_KIND and isinstance(optimizer, kind.computed_by)
        if is_torchs or getattr(optimizer, "kind", None) is kind:
            return kind
    names = ", ".join(f"poptorch.optim.{kind.name}" for kind in KINDS)
    raise Error(
        f"trainingModel cannot train with a {type(optimizer).__name__}: take {names}, or the one of that name in "
        "torch.optim"
    )
