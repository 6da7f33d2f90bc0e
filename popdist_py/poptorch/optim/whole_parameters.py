"""LAMB for half precision: it scales an update by norms of the whole parameter, so it takes whole parameters."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter

import popdist

_HALVES: Final = (torch.float16, torch.bfloat16)

_ELEMENTS_AT_ONCE: Final = 1 << 19
"""So many elements are in float32 at once, or one parameter."""


class WidenedLAMB(torch.optim.Optimizer):
    """popdist.optim.LAMB in float32, one parameter at a time, with weights and state held in half precision.

    Args:
        params: Parameters.
        moments: The dtype of each moment, by torch's name of it.
        rounding: "stochastic", by chance, or "nearest".
        seed: Of the random bits.
        **settings: Of popdist.optim.LAMB.

    Attributes:
        grad_scale: What the gradients are divided by, once they are in float32.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        moments: Mapping[str, torch.dtype],
        rounding: str,
        seed: int,
        **settings: Any,  # noqa: ANN401 - whatever LAMB takes
    ) -> None:
        self.grad_scale: Tensor | None = None
        self._inside = popdist.optim.LAMB([Parameter(torch.zeros(1))], **settings)
        super().__init__(params, self._inside.defaults)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for parameter in parameters:
            zeros = {name: torch.zeros_like(parameter, dtype=dtype) for name, dtype in moments.items()}
            self.state[parameter] = {"step": torch.tensor(0.0), **zeros}
        self._twins: dict[Tensor, Parameter] = {}
        if rounding == "stochastic":
            held = [tensor for it in parameters for tensor in (it, *self.state[it].values())]
            self._twins = {tensor: Parameter(tensor.detach()) for tensor in held if tensor.dtype in _HALVES}
        if self._twins:
            self._rounder = popdist.optim.LowPrecision(self._twins.values(), torch.optim.SGD, lr=1.0, seed=seed)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401 - as torch's
        """Update the parameters that have a gradient."""
        del closure
        for group in self.param_groups:
            for parameters in _together([it for it in group["params"] if it.grad is not None]):
                self._step(group, parameters)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state of the same dtypes."""
        mine = self.state
        super().load_state_dict({**state_dict, "state": {}})
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, state in state_dict["state"].items():
            for name, value in state.items():
                mine[parameters[index]][name].copy_(value)
        self.state = mine

    def _step(self, group: Mapping[str, Any], parameters: Sequence[Tensor]) -> None:
        inside = self._inside
        inside.state = defaultdict(dict)
        values: dict[Tensor, Tensor] = {}
        for parameter in parameters:
            wide = Parameter(parameter.detach().float())
            wide.grad = parameter.grad.float() if parameter.grad is not None else None
            state = self.state[parameter]
            inside.state[wide] = {
                name: value.float() for name, value in state.items()
            }  # float32 is changed in place
            values |= {parameter: wide} | {state[name]: value for name, value in inside.state[wide].items()}
        wides: list[Any] = list(inside.state)
        inside.param_groups[0].update({**group, "params": wides})
        if self.grad_scale is not None:
            torch._foreach_div_([wide.grad for wide in wides], self.grad_scale)
        inside.step()
        self._hold(values)

    def _hold(self, values: Mapping[Tensor, Tensor]) -> None:
        """Round each value to where it is held."""
        rounded = []
        for held, value in values.items():
            twin = self._twins.get(held)
            if twin is None:
                held.copy_(value)
            else:  # a step of SGD from 0, with a learning rate of 1, along the value
                held.zero_()
                twin.grad_dtype = torch.float32
                twin.grad = value.detach().neg()
                rounded.append(twin)
        if rounded:
            self._rounder.step()
        for twin in rounded:
            twin.grad = None


def _together(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Parameters that are widened at once."""
    some: list[Tensor] = []
    for parameter in parameters:
        if some and sum(it.numel() for it in some) + parameter.numel() > _ELEMENTS_AT_ONCE:
            yield some
            some = []
        some.append(parameter)
    if some:
        yield some
