"""Anchored tensors: what a program wants to see of a run beside its results."""

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from poptorch.enums import OutputMode
from poptorch.errors import Error

_GRADIENT: Final = "Gradient___"
_UPDATED: Final = "UpdatedVar___"
_LOSS_SCALE: Final = "finalLossScale"


class AnchoredTensors:
    """What the options anchor: a parameter by its name, its gradient, or the loss scaling, after each step.

    Args:
        anchored: Short name → long name, mode, period.
        parameters: Name → device parameter.

    Raises:
        Error: If there is no tensor of that name.
    """

    def __init__(self, anchored: Mapping[str, list[Any]], parameters: Mapping[str, nn.Parameter]) -> None:
        self._anchored = dict(anchored)
        self._parameters = dict(parameters)
        self._seen: dict[str, list[Tensor]] = {}
        for short, (long, *_) in anchored.items():
            if long != _LOSS_SCALE and _parameter_name(long) not in parameters:
                raise Error(
                    f"anchorTensor({short!r}, {long!r}): there is no tensor {long}. {_LOSS_SCALE} can be "
                    f"anchored, and for each parameter NAME its value NAME or {_UPDATED}NAME, and its gradient "
                    f"{_GRADIENT}NAME. The parameters are {', '.join(parameters)}"
                )

    def begin(self) -> None:
        """A run begins."""
        self._seen = {}

    def note(self, loss_scaling: float) -> None:
        """A step has ended, and the gradients are still there.

        Args:
            loss_scaling: That of the step.
        """
        for short, (long, *_) in self._anchored.items():
            if long == _LOSS_SCALE:
                value = torch.tensor(loss_scaling)
            else:
                parameter = self._parameters[_parameter_name(long)]
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                value = (gradient if long.startswith(_GRADIENT) else parameter).detach().clone().cpu()
            self._seen.setdefault(short, []).append(value)

    def get(self, short: str) -> Tensor:
        """What was anchored under that name in the last run: one value for each step that its mode keeps.

        Raises:
            Error: If nothing was.
        """
        if short not in self._anchored:
            raise Error(
                f"{short!r} is not the name of an anchored tensor: {', '.join(self._anchored) or 'none is'}"
            )
        if short not in self._seen:
            raise Error(f"there is no value of {short!r} yet: run the model at least once")
        values, (_, mode, period) = self._seen[short], self._anchored[short]
        if mode is OutputMode.Sum:
            return torch.stack(values).sum(0)
        if mode is OutputMode.EveryN:
            values = values[period - 1 :: period]
        elif mode is OutputMode.Final:
            values = values[-1:]
        return values[0] if len(values) == 1 else torch.stack(values)


def _parameter_name(long: str) -> str:
    """The parameter's own name, as the module has it."""
    return long.removeprefix(_GRADIENT).removeprefix(_UPDATED).removeprefix("model.")
