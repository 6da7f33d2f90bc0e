"""Which optimizer updates parameters on the device, and its state there by PopTorch's names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter

import popdist
from poptorch._logging import logger
from poptorch.optim.arithmetic import UNCORRECTED_STEPS, WidenedLAMB, arithmetic_of
from poptorch.options import Options

_EXACT: Final = (torch.float32, torch.float64)

_SEEDS_OF_A_JOB: Final = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """How the state lies.

    Attributes:
        model: Whose parameters are updated; None if the state is not dealt to instances.
        rounding: "stochastic" or "nearest".
        seed: Of the random bits.
    """

    model: popdist.ReplicatedModel | None
    rounding: str
    seed: int

    @classmethod
    def of(cls, options: Options, model: popdist.ReplicatedModel | None) -> "Placement":
        """As the options say."""
        location = options.TensorLocations.location_optimizer
        is_sharded = bool(location.get("useReplicatedTensorSharding")) and popdist.num_instances() > 1
        return cls(
            model=model if is_sharded else None,
            rounding="stochastic" if options.Precision.stochastic_rounding else "nearest",
            seed=options.random_seed if options.exists("random_seed") else 0,
        )


def make_stepper(
    kind: str,
    settings: Mapping[str, Any],
    parameters: Sequence[Parameter],
    moments: Mapping[str, torch.dtype],
    placement: Placement,
    number: int,
) -> torch.optim.Optimizer:
    """The optimizer that updates ``parameters``.

    Args:
        kind: SGD, Adam, AdamW, RMSprop or LAMB.
        settings: Of their group.
        parameters: At least one, on the device.
        moments: The dtype of what has a number for each element, by torch's name of it.
        placement: How the state lies.
        number: Of the group: each has other random bits.
    """
    found, taken = arithmetic_of(kind, settings)
    is_exact = all(it.dtype in _EXACT for it in parameters) and set(moments.values()) <= {torch.float32}
    own: dict[str, Any] = {
        "rounding": placement.rounding,
        "seed": (placement.seed + number * 0x9E3779B97F4A7C15) % _SEEDS_OF_A_JOB,
    }
    if not is_exact and found is popdist.optim.LAMB:
        if placement.model is not None:
            logger.debug("LAMB in half precision takes whole parameters: its state is not sharded")
        return WidenedLAMB(parameters, moments=moments, **own, **taken)
    if not is_exact:
        first = next(iter(moments.values()), torch.float32)
        held = first if set(moments.values()) == {first} and kind == "SGD" else torch.float32
        taken |= {"optimizer_class": found, "moments": held, **own}
        found = popdist.optim.LowPrecision
    if placement.model is not None:
        return popdist.ShardedOptimizer(placement.model, found, parameters, **taken)
    return found(parameters, **taken)


def scales_gradients(stepper: torch.optim.Optimizer) -> bool:
    """Whether ``stepper`` divides gradients by its ``grad_scale``, once they are in float32."""
    if isinstance(stepper, popdist.ShardedOptimizer):
        return "moments" in stepper.param_groups[0]
    return isinstance(stepper, WidenedLAMB | popdist.optim.LowPrecision)


_FIRST: Final = "first_order_momentum_accum_type"
_SECOND: Final = "second_order_momentum_accum_type"

_ADAM: Final = {
    "exp_avg": ("Accl1", _FIRST),
    "exp_avg_sq": ("Accl2", _SECOND),
    "max_exp_avg_sq": ("Accl3", _SECOND),
}

_MOMENTS: Final[Mapping[str, Mapping[str, tuple[str, str]]]] = {
    "SGD": {"momentum_buffer": ("Accl1", "velocity_accum_type")},
    "RMSprop": {
        "grad_avg": ("Accl1", _FIRST),
        "square_avg": ("Accl2", _SECOND),
        "momentum_buffer": ("Accl3", _FIRST),
    },
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "LAMB": _ADAM,
}
"""torch's name of what has a number for each element → PopTorch's, and the attribute that says its dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePart:
    """Some parameters of a group, and what updates them.

    Attributes:
        group: Index of the group in the program's optimizer.
        kind: SGD, Adam, AdamW, RMSprop or LAMB.
        names: Of the parameters, in order.
        parameters: On the device.
        types: The dtypes that were asked for, by attribute.
        counts_steps: Whether the number of steps is a part of the state.
        stepper: Updates the parameters.
    """

    group: int
    kind: str
    names: Sequence[str]
    parameters: Sequence[Parameter]
    types: Mapping[str, torch.dtype]
    counts_steps: bool
    stepper: torch.optim.Optimizer

    def begin(self) -> None:
        """Have a state before the first step where its dtypes are not those that the stepper would choose."""
        if self.kind != "SGD" and set(self._moments().values()) != {torch.float32}:
            self._load(self.read())

    def set(self, settings: Mapping[str, Any]) -> None:
        """Give the steps from now on the settings of the group."""
        before = self._moments()
        _, taken = arithmetic_of(self.kind, settings)
        self.stepper.param_groups[0].update(taken)
        if self.kind != "SGD" and self._moments().keys() - before.keys():
            self._load(self.read())

    def scale_gradients(self, factor: float | Tensor | None) -> None:
        """Have the next step multiply its gradients by ``factor``, in float32; None: leave them as they are."""
        if scales_gradients(self.stepper):
            self.stepper.__dict__["grad_scale"] = (
                None if factor is None else 1 / torch.as_tensor(factor, dtype=torch.float32)
            )
        elif factor is not None:
            gradients = [it.grad for it in self.parameters if it.grad is not None]
            torch._foreach_mul_(gradients, factor)

    def state_bytes(self) -> dict[str, int]:
        """What is kept for each parameter, by name, from the first step on."""
        element = sum(dtype.itemsize for dtype in self._moments().values())
        count = torch.float32.itemsize if self.counts_steps else 0
        return {name: it.numel() * element + count for name, it in zip(self.names, self.parameters, strict=True)}

    def read(self) -> dict[str, Tensor]:
        """The state by PopTorch's names: text → tensor on the CPU. What there is none of yet is 0."""
        states = self.stepper.state_dict()["state"]
        moments = self._moments()
        read = {}
        for index, (name, parameter) in enumerate(zip(self.names, self.parameters, strict=True)):
            state = states.get(index, {})
            for moment, dtype in moments.items():
                value = state.get(moment)
                if value is None:
                    value = torch.zeros_like(parameter, dtype=dtype, device="cpu", requires_grad=False)
                read[self._text(moment, name)] = value.detach().to("cpu", copy=True)
            if self.counts_steps:
                read[f"Step___{name}"] = (
                    torch.as_tensor(state.get("step", 0.0), dtype=torch.float32).detach().to("cpu", copy=True)
                )
        return read

    def write(self, named: Mapping[str, Tensor]) -> None:
        """Go on from a state that ``read`` gave; what is missing stays as it is."""
        before = self.read()
        if found := {name: torch.as_tensor(named[name]) for name in before if name in named}:
            self._load({**before, **found})

    def _load(self, named: Mapping[str, Tensor]) -> None:
        moments = self._moments()
        states: dict[int, dict[str, Tensor]] = {}
        for index, (name, parameter) in enumerate(zip(self.names, self.parameters, strict=True)):
            state = {
                moment: named[self._text(moment, name)]
                .to(parameter.device, dtype, copy=True)
                .view(parameter.shape)
                for moment, dtype in moments.items()
            }
            if self.counts_steps:
                state["step"] = named[f"Step___{name}"].clone().float().view(())
            elif self.kind != "SGD":
                state["step"] = torch.tensor(UNCORRECTED_STEPS, dtype=torch.float32)
            elif not any(bool(value.any()) for value in state.values()):
                continue  # torch's first step, which has no velocity yet
            states[index] = state
        self.stepper.load_state_dict({**self.stepper.state_dict(), "state": states})

    def _moments(self) -> dict[str, torch.dtype]:
        return _moments_of(self.kind, self.stepper.param_groups[0], self.types)

    def _text(self, moment: str, name: str) -> str:
        return f"{_MOMENTS[self.kind][moment][0]}___{name}"


def make_part(
    group: int,
    kind: str,
    settings: Mapping[str, Any],
    types: Mapping[str, torch.dtype],
    parameters: Mapping[str, Parameter],
    placement: Placement,
) -> DevicePart:
    """What updates ``parameters``, by name, with the settings of a group of the program's optimizer.

    Args:
        group: Its index.
        kind: SGD, Adam, AdamW, RMSprop or LAMB.
        settings: Of the group.
        types: Dtypes that were asked for, by attribute.
        parameters: On the device, at least one.
        placement: How the state lies.
    """
    own = list(parameters.values())
    moments = _moments_of(kind, settings, types)
    part = DevicePart(
        group=group,
        kind=kind,
        names=list(parameters),
        parameters=own,
        types=types,
        counts_steps=kind == "LAMB" or (kind != "SGD" and bool(settings.get("bias_correction", True))),
        stepper=make_stepper(kind, settings, own, moments, placement, group),
    )
    part.begin()
    return part


def _moments_of(
    kind: str, settings: Mapping[str, Any], types: Mapping[str, torch.dtype]
) -> dict[str, torch.dtype]:
    """What an optimizer with these settings has a number in for each element, and the dtype that was asked for."""
    is_kept = {
        "momentum_buffer": bool(settings.get("momentum")),
        "grad_avg": bool(settings.get("centered")),
        "max_exp_avg_sq": bool(settings.get("amsgrad")),
    }
    moments = _MOMENTS[kind].items()
    return {it: types.get(asked, torch.float32) for it, (_, asked) in moments if is_kept.get(it, True)}
