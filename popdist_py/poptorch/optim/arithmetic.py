"""Which optimizer of torch or popdist computes a step of each of poptorch's, and those that neither has."""

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter

import popdist

UNCORRECTED_STEPS: Final = 2.0**40
"""In float32 a step more is the same number."""


def arithmetic_of(kind: str, settings: Mapping[str, Any]) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The class that computes the steps of a group, and the group's settings as it takes them."""
    found: type[torch.optim.Optimizer]
    if kind == "AdamW" and not settings.get("bias_correction", True):
        found = UncorrectedAdamW
    elif kind == "LAMB":
        found = popdist.optim.LAMB
    elif kind == "RMSprop" and settings.get("use_tf_variant"):
        found = TensorFlowRMSprop
    else:
        found = getattr(torch.optim, kind)
    known = _arguments_of(found.__init__)
    taken = {name: value for name, value in settings.items() if name in known}
    if kind == "LAMB":
        limit = settings["max_weight_norm"]
        taken |= {"max_weight_norm": limit or None, "trust_ratio": limit != 0}
    return found, taken


@functools.cache
def _arguments_of(constructor: Callable[..., None]) -> frozenset[str]:
    return frozenset(inspect.signature(constructor).parameters) - {"self", "params"}


def step_by_others(kind: str, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None) -> Any:  # noqa: ANN401 - what the closure gives
    """A step of ``optimizer`` by the classes that :func:`arithmetic_of` gives for its groups."""
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    for group in optimizer.param_groups:
        if group["params"]:
            found, settings = arithmetic_of(kind, group)
            other = found(group["params"], **settings)
            other.state = optimizer.state
            other.step()
    return loss


class UncorrectedAdamW(torch.optim.AdamW):
    """AdamW whose means are not divided by 1 - beta**step: that of torch, after so many steps that these are 1."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401 - a closure may give anything
        """Update the parameters that have a gradient."""
        for group in self.param_groups:
            names = ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else []))
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    zeros = {
                        name: torch.zeros_like(parameter, memory_format=torch.preserve_format) for name in names
                    }
                    self.state[parameter] = {"step": torch.tensor(UNCORRECTED_STEPS, dtype=torch.float32), **zeros}
        return super().step(closure)


class TensorFlowRMSprop(torch.optim.RMSprop):
    """RMSprop as TensorFlow has it: ``eps`` is within the square root, and the learning rate within the momentum.

    With v the running mean of the squared gradient, less the square of that of the gradient if ``centered``,
    x = lr · g / sqrt(v + eps); with momentum b ← momentum · b + x and w ← w - b, else w ← w - x. The state has
    the names and dtypes of torch.optim.RMSprop; ``foreach``, ``capturable`` and ``differentiable`` have no effect.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401 - a closure may give anything
        """Update the parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state:
                        zeros = {name: torch.zeros_like(parameter) for name in _moments_of(group)}
                        state |= {"step": torch.tensor(0.0, dtype=torch.float32), **zeros}
                    _step_of_tensorflow(group, parameter, parameter.grad, state)
        return loss


def _moments_of(group: Mapping[str, Any]) -> Sequence[str]:
    wanted = {"square_avg": True, "momentum_buffer": group["momentum"] > 0, "grad_avg": group["centered"]}
    return [name for name, is_wanted in wanted.items() if is_wanted]


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


_HALVES: Final = (torch.float16, torch.bfloat16)

_ELEMENTS_AT_ONCE: Final = 1 << 19
"""So many elements are in float32 at once, or one parameter."""


class WidenedLAMB(torch.optim.Optimizer):
    """popdist.optim.LAMB in float32, one parameter at a time, with weights and state held in half precision."""

    def __init__(
        self,
        params: Iterable[Any],  # parameters
        *,
        moments: Mapping[str, torch.dtype],  # the dtype of each moment, by torch's name of it
        rounding: str,  # "stochastic", by chance, or "nearest"
        seed: int,  # of the random bits
        **settings: Any,  # noqa: ANN401 - whatever LAMB takes
    ) -> None:
        self.grad_scale: Tensor | None = None  # what the gradients are divided by, once they are in float32
        self._inside = popdist.optim.LAMB([Parameter(torch.zeros(1, dtype=torch.float32))], **settings)
        super().__init__(params, self._inside.defaults)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for parameter in parameters:
            zeros = {name: torch.zeros_like(parameter, dtype=dtype) for name, dtype in moments.items()}
            self.state[parameter] = {"step": torch.tensor(0.0, dtype=torch.float32), **zeros}
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
        self._store(values)

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


def _together(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Divide ``parameters`` into lists that are computed in float32 at once."""
    some: list[Tensor] = []
    for parameter in parameters:
        if some and sum(it.numel() for it in some) + parameter.numel() > _ELEMENTS_AT_ONCE:
            yield some
            some = []
        some.append(parameter)
    if some:
        yield some
