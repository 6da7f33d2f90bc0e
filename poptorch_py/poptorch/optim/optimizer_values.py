"""The settings of an optimizer that a model uses: its kind, dtypes and values, of which some are constant."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch

from poptorch.optim.optimizer_kinds import SGD_KIND, OptimizerKind, kind_of, settings_of
from poptorch.optim.optimizers import SCALINGS, Optimizer

_NAMES: Final = {"lr": ("learningRate",), "betas": ("beta1", "beta2")}
"""What numbers are called in the log and in ``ipu_param``, where that is not the attribute in camel case."""


class Value(NamedTuple):
    """A number, and whether it stays as it is."""

    number: float
    is_constant: bool

    def __str__(self) -> str:
        return f"{self.number:g}{' (const)' if self.is_constant else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerValues:
    """All settings of an optimizer that a model uses."""

    kind: OptimizerKind
    # the dtypes that were asked for, by attribute; empty for an optimizer of torch
    types: Mapping[str, torch.dtype]
    moment_types: Mapping[str, torch.dtype]  # those of the state: a combined accumulator has that of the gradients
    graph: Mapping[str, Value]  # values for all parameters, by their names in the log
    groups: Sequence[Mapping[str, Value]]  # values of each group, by their names in the log

    def lines(self) -> list[str]:
        """Lines of the log: one for all parameters, and one for each group."""
        types = {_camel(name): str(dtype).removeprefix("torch.") for name, dtype in self.types.items()}
        named = ", ".join(f"{name}={value}" for name, value in {**types, **self.graph}.items())
        groups = (", ".join(f"{name}={value}" for name, value in group.items()) for group in self.groups)
        return [
            f"Updating graph optimizer with {self.kind.name} settings {named}",
            *(
                f"Updating group {i} optimizer with {self.kind.name} settings {text}"
                for i, text in enumerate(groups)
            ),
        ]


def is_subclass(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a program derived the optimizer's class."""
    kind = type(optimizer)
    return kind is not kind_of(optimizer).computed_by and "kind" not in vars(kind)


def values_of(optimizer: torch.optim.Optimizer) -> OptimizerValues:
    """The values that ``optimizer`` has now."""
    kind = kind_of(optimizer)
    scalings = {name: float(getattr(optimizer, name, default)) for name, default in SCALINGS.items()}
    scaled = scalings["loss_scaling"]
    graph = {
        **_named(optimizer, kind, optimizer.defaults, prefix="default"),
        **_named(optimizer, kind, scalings),
    }
    groups = [_named(optimizer, kind, group) for group in optimizer.param_groups]
    known = [name for name in kind.signature.parameters if name.endswith("accum_type")]
    types = {name: getattr(optimizer, name) for name in known if hasattr(optimizer, name)}
    is_combined = getattr(optimizer, "use_combined_accum", False)  # gradients are added into the velocity
    is_half = is_combined and types["accum_type"] == torch.float16
    if kind is SGD_KIND and not is_combined:
        velocity = Value(scaled, is_constant(optimizer, kind, "loss_scaling"))
        groups = [{**group, "velocityScaling": velocity} for group in groups]
    return OptimizerValues(
        kind=kind,
        types=types,
        moment_types={**types, "velocity_accum_type": torch.float16} if is_half else types,
        graph=graph,
        groups=groups,
    )


def is_constant(optimizer: torch.optim.Optimizer, kind: OptimizerKind, name: str) -> bool:
    """Whether the attribute ``name`` keeps its value: as the program says, or for torch's if it is the default."""
    if isinstance(optimizer, Optimizer):
        return optimizer.variable_attrs.isConstant(name)
    if name == "lr":
        return False
    known = settings_of(kind.computed_by.__init__)
    return name not in known or all(group.get(name) == known[name].default for group in optimizer.param_groups)


def _named(
    optimizer: torch.optim.Optimizer, kind: OptimizerKind, attributes: Mapping[str, Any], *, prefix: str = ""
) -> dict[str, Value]:
    named = {}
    for attribute in (*kind.variable, "velocity_scaling", *SCALINGS):
        if attribute in attributes:
            names = _NAMES.get(attribute, (_camel(attribute),))
            given = attributes[attribute]
            numbers = given if len(names) > 1 else (given,)
            constant = is_constant(optimizer, kind, attribute)
            for name, number in zip(names, numbers, strict=True):
                shown = prefix + name[0].upper() + name[1:] if prefix else name
                named[shown] = Value(float(number), constant)
    return named


def _camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(other.capitalize() for other in others)
