"""The optimizers of torch and popdist that update a device's parameters, and their state by PopTorch's names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter

from poptorch.optim.arithmetic import arithmetic_of

_MOMENTS: Final[Mapping[str, Mapping[str, tuple[str, str]]]] = {
    "SGD": {"momentum_buffer": ("Accl1", "velocity_accum_type")},
    "RMSprop": {
        "grad_avg": ("Accl1", "first_order_momentum_accum_type"),
        "square_avg": ("Accl2", "second_order_momentum_accum_type"),
        "momentum_buffer": ("Accl3", "first_order_momentum_accum_type"),
    },
    "Adam": {
        "exp_avg": ("Accl1", "first_order_momentum_accum_type"),
        "exp_avg_sq": ("Accl2", "second_order_momentum_accum_type"),
        "max_exp_avg_sq": ("Accl3", "second_order_momentum_accum_type"),
    },
}
"""torch's name of what has a number for each element → PopTorch's, and the attribute that says its dtype."""

_STEP: Final = "step"


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePart:
    """Some parameters of a group, and what updates them.

    Attributes:
        group: Index of the group in the program's optimizer.
        kind: SGD, Adam, AdamW, RMSprop or LAMB.
        names: Of the parameters, in order.
        parameters: On the device.
        types: The dtype of what has a number for each element, by torch's name of it.
        stepper: Updates them.
    """

    group: int
    kind: str
    names: Sequence[str]
    parameters: Sequence[Parameter]
    types: Mapping[str, torch.dtype]
    stepper: torch.optim.Optimizer

    def set(self, settings: Mapping[str, Any]) -> None:
        """Give the steps from now on the settings of the group."""
        _, taken = arithmetic_of(self.kind, settings)
        self.stepper.param_groups[0].update(taken)

    def read(self) -> dict[str, Tensor]:
        """The state by PopTorch's names: text → tensor on the CPU. What there is none of yet is 0."""
        states = self.stepper.state_dict()["state"]
        read = {}
        for index, (name, parameter) in enumerate(zip(self.names, self.parameters, strict=True)):
            state = states.get(index, {})
            for moment, dtype in self.types.items():
                value = state.get(moment)
                if value is None:
                    value = torch.zeros_like(parameter, dtype=dtype, device="cpu", requires_grad=False)
                read[f"{_prefix(self.kind, moment)}___{name}"] = value.detach().to("cpu", copy=True)
            if self.kind != "SGD":
                read[f"Step___{name}"] = torch.as_tensor(state.get(_STEP, 0.0)).detach().to("cpu", copy=True)
        return read

    def write(self, named: Mapping[str, Tensor]) -> None:
        """Go on from a state that ``read`` gave; what is missing stays as it is."""
        before = self.read()
        if not any(name in named for name in before):
            return
        states = {}
        for index, (name, parameter) in enumerate(zip(self.names, self.parameters, strict=True)):
            state = {}
            for moment, dtype in self.types.items():
                text = f"{_prefix(self.kind, moment)}___{name}"
                value = torch.as_tensor(named.get(text, before[text]))
                state[moment] = value.to(parameter.device, dtype, copy=True).view(parameter.shape)
            if self.kind != "SGD":
                text = f"Step___{name}"
                state[_STEP] = torch.as_tensor(named.get(text, before[text])).clone().float().view(())
            elif not any(bool(value.any()) for value in state.values()):
                continue  # torch's first step, which has no velocity yet
            states[index] = state
        self.stepper.load_state_dict({**self.stepper.state_dict(), "state": states})


def make_part(
    *,
    group: int,
    kind: str,
    settings: Mapping[str, Any],
    types: Mapping[str, torch.dtype],
    parameters: Mapping[str, Parameter],
) -> DevicePart:
    """What updates ``parameters``, by name, with the settings of a group of the program's optimizer.

    Args:
        group: Its index.
        kind: SGD, Adam, AdamW, RMSprop or LAMB.
        settings: Of the group.
        types: Dtypes that were asked for, by attribute.
        parameters: On the device.
    """
    stepper_class, taken = arithmetic_of(kind, settings)
    stepper = stepper_class(parameters.values(), **taken)
    moments = _MOMENTS.get(kind, _MOMENTS["Adam"])
    wanted = [moment for moment in moments if _is_kept(moment, kind, settings)]
    return DevicePart(
        group=group,
        kind=kind,
        names=list(parameters),
        parameters=list(parameters.values()),
        types={moment: types.get(moments[moment][1], torch.float32) for moment in wanted},
        stepper=stepper,
    )


def _is_kept(moment: str, kind: str, settings: Mapping[str, Any]) -> bool:
    """Whether an optimizer with these settings has it."""
    match moment:
        case "momentum_buffer":
            return bool(settings["momentum"])
        case "grad_avg":
            return bool(settings["centered"])
        case "max_exp_avg_sq":
            return kind != "LAMB" and bool(settings["amsgrad"])
        case _:
            return True


def _prefix(kind: str, moment: str) -> str:
    return _MOMENTS.get(kind, _MOMENTS["Adam"])[moment][0]
