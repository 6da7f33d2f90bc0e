"""The optimizer of torch or popdist that computes the steps of a group of parameters, and its state."""

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter

import popdist
from poptorch._logging import logger
from poptorch.errors import Error
from poptorch.options import Options

_UNCORRECTED_STEPS: Final = 2.0**40  # in float32 a step more is the same number

_EXACT: Final = (torch.float32, torch.float64)

_SEEDS_OF_A_JOB: Final = 1 << 62

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


class GroupStepper:
    """Updates the parameters of one group of the program's optimizer."""

    def __init__(
        self,
        group: int,  # its index
        kind: str,  # SGD, Adam, AdamW, RMSprop or LAMB
        settings: Mapping[str, Any],  # of the group
        types: Mapping[str, torch.dtype],  # dtypes of the state that were asked for, by attribute
        parameters: Mapping[str, Parameter],  # those of the group that the model has, by name; at least one
        options: Options,  # say how half precision is rounded
        model: popdist.ReplicatedModel | None,  # whose instances share the state; None where each keeps all of it
    ) -> None:
        self.group = group
        self._kind = kind
        self._types = types
        self._parameters = parameters
        self._counts_steps = kind == "LAMB" or (kind != "SGD" and bool(settings.get("bias_correction", True)))
        moments = _moments_of(kind, settings, types)
        own = list(parameters.values())
        self._inside = _optimizer_of(kind, settings, own, moments, options, model, group)
        self._scales_itself = _scales_gradients(self._inside)
        self.step = self._inside.step
        if kind != "SGD" and {*self._moments().values()} != {torch.float32}:
            self._load(self.read())  # so that the state has the dtypes asked for, not those of torch

    def set(self, settings: Mapping[str, Any]) -> None:
        """Use the settings of the group from the next step on."""
        before = self._moments()
        _, known = class_of_group(self._kind, settings)
        self._inside.param_groups[0].update(known)
        if self._kind != "SGD" and self._moments().keys() - before.keys():
            self._load(self.read())

    def scale_gradients(self, factor: float | Tensor | None) -> None:
        """Have the next step multiply its gradients by ``factor``, in float32; None: leave them as they are."""
        if self._scales_itself:
            vars(self._inside)["grad_scale"] = (
                None if factor is None else 1 / torch.as_tensor(factor, dtype=torch.float32)
            )
        elif factor is not None:
            gradients = [it.grad for it in self._parameters.values() if it.grad is not None]
            torch._foreach_mul_(gradients, factor)

    def read(self) -> dict[str, Tensor]:
        """The state by PopTorch's names: text → tensor on the CPU. What there is none of yet is 0."""
        states = self._inside.state_dict()["state"]
        moments = self._moments()
        read = {}
        for index, (name, parameter) in enumerate(self._parameters.items()):
            state = states.get(index, {})
            for moment, dtype in moments.items():
                value = state.get(moment)
                if value is None:
                    value = torch.zeros_like(parameter, dtype=dtype, device="cpu", requires_grad=False)
                read[self._text(moment, name)] = value.detach().to("cpu", copy=True)
            if self._counts_steps:
                step = torch.as_tensor(state.get("step", 0.0), dtype=torch.float32)
                read[f"Step___{name}"] = step.detach().to("cpu", copy=True)
        return read

    def write(self, named: Mapping[str, Tensor]) -> None:
        """Go on from a state that ``read`` gave; what is missing stays as it is."""
        before = self.read()
        if found := {name: torch.as_tensor(named[name]) for name in before if name in named}:
            self._load({**before, **found})

    def _load(self, named: Mapping[str, Tensor]) -> None:
        moments = self._moments()
        states: dict[int, dict[str, Tensor]] = {}
        for index, (name, parameter) in enumerate(self._parameters.items()):
            state = {
                moment: named[self._text(moment, name)]
                .to(parameter.device, dtype, copy=True)
                .view(parameter.shape)
                for moment, dtype in moments.items()
            }
            if self._counts_steps:
                state["step"] = named[f"Step___{name}"].clone().float().view(())
            elif self._kind != "SGD":
                state["step"] = torch.tensor(_UNCORRECTED_STEPS, dtype=torch.float32, device="cpu")
            elif not any(bool(value.any()) for value in state.values()):
                continue  # torch's first step, which has no velocity yet
            states[index] = state
        self._inside.load_state_dict({**self._inside.state_dict(), "state": states})

    def _moments(self) -> dict[str, torch.dtype]:
        return _moments_of(self._kind, self._inside.param_groups[0], self._types)

    def _text(self, moment: str, name: str) -> str:
        return f"{_MOMENTS[self._kind][moment][0]}___{name}"


def _optimizer_of(
    kind: str,
    settings: Mapping[str, Any],
    parameters: Sequence[Parameter],
    moments: Mapping[str, torch.dtype],
    options: Options,
    model: popdist.ReplicatedModel | None,
    number: int,
) -> torch.optim.Optimizer:
    """The optimizer of torch or popdist that updates ``parameters``; ``number`` is that of their group."""
    found, known = class_of_group(kind, settings)
    is_exact = all(it.dtype in _EXACT for it in parameters) and set(moments.values()) <= {torch.float32}
    seed: int = options.random_seed if options.exists("random_seed") else 0
    own: dict[str, Any] = {
        "rounding": "stochastic" if options.Precision.stochastic_rounding else "nearest",
        "seed": (seed + number * 0x9E3779B97F4A7C15) % _SEEDS_OF_A_JOB,  # other bits for each group
    }
    if not is_exact and found is popdist.optim.LAMB:
        if model is not None:
            logger.debug("LAMB in half precision needs whole parameters: its state is not sharded")
        return WidenedLAMB(parameters, moments=moments, **own, **known)
    if not is_exact:
        first = next(iter(moments.values()), torch.float32)
        held = first if set(moments.values()) == {first} and kind == "SGD" else torch.float32
        known |= {"optimizer_class": found, "moments": held, **own}
        found = popdist.optim.LowPrecision
    if model is not None:
        return popdist.ShardedOptimizer(model, found, parameters, **known)
    return found(parameters, **known)


def _scales_gradients(inside: torch.optim.Optimizer) -> bool:
    """Whether an optimizer divides gradients by its ``grad_scale``, once they are in float32."""
    if isinstance(inside, popdist.ShardedOptimizer):
        return "moments" in inside.param_groups[0]
    return isinstance(inside, WidenedLAMB | popdist.optim.LowPrecision)


def _moments_of(
    kind: str, settings: Mapping[str, Any], types: Mapping[str, torch.dtype]
) -> dict[str, torch.dtype]:
    """The moments that an optimizer with these settings keeps for each element, with the dtypes asked for."""
    is_kept = {
        "momentum_buffer": bool(settings.get("momentum")),
        "grad_avg": bool(settings.get("centered")),
        "max_exp_avg_sq": bool(settings.get("amsgrad")),
    }
    moments = _MOMENTS[kind].items()
    return {it: types.get(asked, torch.float32) for it, (_, asked) in moments if is_kept.get(it, True)}


def _first_state(
    kind: str, settings: Mapping[str, Any], parameter: Tensor, *, num_steps: float
) -> dict[str, Tensor]:
    """The state of a parameter before its first step, with torch's names and dtypes."""
    zeros = {name: torch.zeros_like(parameter) for name in _moments_of(kind, settings, {})}
    return {"step": torch.tensor(num_steps, dtype=torch.float32, device="cpu"), **zeros}


def class_of_group(kind: str, settings: Mapping[str, Any]) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
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


def step_by_others(kind: str, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None) -> Any:
    """A step of ``optimizer`` by the classes that :func:`class_of_group` gives for its groups."""
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    for group in optimizer.param_groups:
        if group["params"]:
            found, settings = class_of_group(kind, group)
            other = found(group["params"], **settings)
            other.state = optimizer.state
            other.step()
    return loss


class UncorrectedAdamW(torch.optim.AdamW):
    """AdamW whose means are not divided by 1 - beta**step: that of torch, after so many steps that these are 1."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    self.state[parameter] = _first_state("AdamW", group, parameter, num_steps=_UNCORRECTED_STEPS)
        return super().step(closure)


class TensorFlowRMSprop(torch.optim.RMSprop):
    """RMSprop as TensorFlow has it: ``eps`` is within the square root, the learning rate within the momentum."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
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
                        state |= _first_state("RMSprop", group, parameter, num_steps=0.0)
                    _step_of_tensorflow(group, parameter, parameter.grad, state)
        return loss


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

_ELEMENTS_AT_ONCE: Final = 1 << 19  # so many elements are in float32 at once, or one parameter


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
