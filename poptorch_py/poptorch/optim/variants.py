"""What torch does not have: AdamW without bias correction, RMSprop as in TensorFlow, LAMB in half precision."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter

import popdist
from poptorch.errors import Error

UNCORRECTED_STEPS: Final = 2.0**40  # in float32 a step more is the same number


class UncorrectedAdamW(torch.optim.AdamW):
    """AdamW whose means are not divided by 1 - beta**step: that of torch, after so many steps that these are 1."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    names = ["exp_avg", "exp_avg_sq", *["max_exp_avg_sq"] * group["amsgrad"]]
                    self.state[parameter] = _first_state(parameter, names, num_steps=UNCORRECTED_STEPS)
        return super().step(closure)


class TensorFlowRMSprop(torch.optim.RMSprop):
    """RMSprop as TensorFlow has it: ``eps`` is within the square root, the learning rate within the momentum."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state:
                        settings = {"grad_avg": "centered", "momentum_buffer": "momentum"}
                        names = ["square_avg", *(name for name, setting in settings.items() if group[setting])]
                        state |= _first_state(parameter, names, num_steps=0.0)
                    _step_of_tensorflow(group, parameter, parameter.grad, state)


def _step_of_tensorflow(
    group: Mapping[str, Any], parameter: Tensor, gradient: Tensor, state: Mapping[str, Tensor]
) -> None:
    state["step"].add_(1)
    if group["maximize"]:
        gradient = gradient.neg()
    if group["weight_decay"]:
        gradient = gradient.add(parameter, alpha=group["weight_decay"])
    squares, kept = state["square_avg"], group["alpha"]
    squares.mul_(kept).addcmul_(gradient, gradient, value=1 - kept)
    if group["centered"]:
        mean = state["grad_avg"].lerp_(gradient, 1 - kept)
        below = squares.addcmul(mean, mean, value=-1).add_(group["eps"]).sqrt_()
    else:
        below = squares.add(group["eps"]).sqrt_()
    rate = float(group["lr"])
    if group["momentum"] > 0:
        moving = state["momentum_buffer"].mul_(group["momentum"]).addcdiv_(gradient, below, value=rate)
        parameter.sub_(moving)
    else:
        parameter.addcdiv_(gradient, below, value=-rate)


def _first_state(parameter: Tensor, names: Iterable[str], *, num_steps: float) -> dict[str, Tensor]:
    """The state of a parameter before its first step, with torch's names and dtypes."""
    zeros = {name: torch.zeros_like(parameter) for name in names}
    return {"step": torch.tensor(num_steps, dtype=torch.float32, device="cpu"), **zeros}


_HALVES: Final = (torch.float16, torch.bfloat16)


class WidenedLAMB(torch.optim.Optimizer):
    """popdist.optim.LAMB in float32, one parameter at a time, with weights and state held in half precision."""

    def __init__(
        self,
        params: Iterable[Any],  # parameters
        *,
        moments: Mapping[str, torch.dtype],  # the dtype of each moment, by torch's name of it
        rounding: str,  # "stochastic", by chance, or "nearest"
        seed: int,  # of the random bits
        **settings: Any,
    ) -> None:
        self.grad_scale: Tensor | None = None  # what the gradients are divided by, once they are in float32
        self._inside = popdist.optim.LAMB(
            [Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))], **settings
        )
        super().__init__(params, self._inside.defaults)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for parameter in parameters:
            zeros = {name: torch.zeros_like(parameter, dtype=dtype) for name, dtype in moments.items()}
            self.state[parameter] = {"step": torch.tensor(0.0, dtype=torch.float32, device="cpu"), **zeros}
        self._twins: dict[Tensor, Parameter] = {}
        if rounding == "stochastic":
            held = [tensor for it in parameters for tensor in (it, *self.state[it].values())]
            self._twins = {tensor: Parameter(tensor.detach()) for tensor in held if tensor.dtype in _HALVES}
        if self._twins and not hasattr(Tensor, "grad_dtype"):
            raise Error(f"weights or state rounded by chance need torch 2.11; this is {torch.__version__}")
        if self._twins:
            self._rounder = popdist.optim.LowPrecision(self._twins.values(), torch.optim.SGD, lr=1.0, seed=seed)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(group, parameter, parameter.grad.float())

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

    def _step(self, group: Mapping[str, Any], parameter: Tensor, gradient: Tensor) -> None:
        inside, held = self._inside, self.state[parameter]
        wide = Parameter(parameter.detach().float())  # the tensor itself, where that is in float32
        wide.grad = gradient if self.grad_scale is None else gradient / self.grad_scale
        state = {name: value.float() for name, value in held.items()}
        inside.state = defaultdict(dict, {wide: state})
        inside.param_groups[0].update({**group, "params": [wide]})
        inside.step()
        self._store({parameter: wide} | {held[name]: value for name, value in state.items()})

    def _store(self, values: Mapping[Tensor, Tensor]) -> None:
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
