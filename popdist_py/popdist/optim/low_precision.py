"""An optimizer whose weights and state are stored in half precision, and computed in float32.

A step processes some elements of a parameter at a time: it converts weights, gradients and state to float32, steps
with the inner optimizer on them, and rounds the results. So there is no copy of all weights in float32. A check
proves that the inner optimizer updates each element independently, so the bits do not depend on how a parameter is
cut.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from copy import copy
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from popdist.errors import OptimizerError, seed_number
from popdist.gradients.shards import flat_view
from popdist.job import context
from popdist.optim.elementwise import (
    check_elementwise,
    check_in_training,
    has_exact_fused_kernel,
    is_known,
    quiet_step,
    signless_names,
)
from popdist.optim.pieces import (
    PieceOptimizer,
    flat,
    flat_in_order_of,
    gradient_of,
    in_order_of,
    load_uncast,
)
from popdist.optim.rounding import HALVES, Place, round_by_chance
from popdist.step.checks.step_checks import is_checked

_OWN_SETTINGS: Final = ("moments", "weights", "rounding", "seed", "num_steps")
_NOT_INSIDE: Final = ("params", "param_names", "optimizer_class", *_OWN_SETTINGS)
_DTYPES: Final = {str(dtype).removeprefix("torch."): dtype for dtype in (*HALVES, torch.float32)}
_WEIGHTS: Final = "weights"

_ELEMENTS_AT_ONCE: Final = 1 << 19
"""Elements per call on the CPU, which fit a usual last-level cache; a multiple of 128, a block of random bits."""

_ELEMENTS_OF_ACCELERATORS: Final = 1 << 24
"""Elements of one call on an accelerator, so many that computing takes longer than launching the kernels."""


class LowPrecision(PieceOptimizer):
    """An optimizer that steps with ``optimizer_class`` in float32, but stores weights and state in half precision.

    ::

        model = popdist.ReplicatedModel(net.to(torch.bfloat16))
        optimizer = LowPrecision(model.parameters(), torch.optim.AdamW, lr=1e-3)
        optimizer = popdist.ShardedOptimizer(model, LowPrecision, optimizer_class=torch.optim.AdamW, lr=1e-3)

    If results were rounded to the nearest number, an update smaller than half the distance to the next number
    would be lost. With stochastic rounding the mean change of a weight equals the update. The random bits depend
    on the seed, the number of steps, the index of the parameter, the name of the tensor, and the index of the
    element in the whole parameter; they do not depend on instances, shards or threads. ``state_dict`` contains
    seed and number of steps.

    A ``torch.amp.GradScaler`` works with this optimizer: gradients are divided by the scale in float32, and a step
    that the scaler skips is not counted. Adam and AdamW use torch's fused kernel, unless ``foreach`` or ``fused``
    is given.

    Args:
        params: Parameters or groups of parameters, as for torch's optimizers: float16, bfloat16, or float32, which
            keeps its precision.
        optimizer_class: A class of torch or your own. It must update each element independently, as SGD and the
            Adam family do.
        moments: The dtype of elementwise state: float16, bfloat16 or float32. In float16 second moments would
            become 0, so float16 is for optimizers without second moments, such as SGD.
        weights: The dtype that all parameters must have; None accepts every dtype.
        rounding: "stochastic": up or down by chance; or "nearest", as torch rounds.
        seed: Seed of the random bits, from -2**63 to 2**64 - 1.
        **kwargs: The keyword arguments of ``optimizer_class``.

    Raises:
        OptimizerError: If a parameter or ``moments`` has another dtype, the optimizer does not update each element
            independently, or float16 cannot represent its state.
    """

    _step_supports_amp_scaling = True
    _names: frozenset[str] = frozenset()

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[Optimizer],
        *,
        moments: torch.dtype = torch.bfloat16,
        weights: torch.dtype | None = None,
        rounding: Literal["stochastic", "nearest"] = "stochastic",
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        _check_class(optimizer_class)
        self._optimizer_class = optimizer_class
        self._given = kwargs
        self._inside: dict[int, Optimizer] = {}
        inner = optimizer_class([Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))], **kwargs).defaults
        own = {"moments": moments, "weights": weights, "rounding": rounding, "seed": seed, "num_steps": 0}
        super().__init__(params, inner | _checked(own))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as torch's optimizers do, and check the group's dtypes and settings.

        Raises:
            OptimizerError: For the reasons that the class names.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group.pop("optimizer_class", None)
        try:
            group |= _checked(group)
            for parameter in group["params"]:
                _check_parameter(parameter, group["weights"])
            device = group["params"][0].device if group["params"] else torch.device("cpu")
            self._names |= check_elementwise(
                self._optimizer_class, self._given, _inner_settings(group), device, asked_by="LowPrecision"
            )
            if group["moments"] == "float16":
                self._refuse_signless(group)
        except Exception:
            del self.param_groups[-1]
            raise

    @classmethod
    def names_of_elements(
        cls, defaults: Mapping[str, Any], settings: Mapping[str, Any], device: torch.device
    ) -> frozenset[str]:
        """Return the names of the inner optimizer's state tensors with one number per parameter element."""
        arguments = {name: value for name, value in defaults.items() if name not in _NOT_INSIDE}
        inside = _check_class(defaults.get("optimizer_class"))
        return check_elementwise(inside, arguments, _inner_settings(settings), device, asked_by="LowPrecision")

    def update(self) -> None:
        """Update the parameters that have a gradient, unless a GradScaler has found infinity or NaN."""
        found_infinity = getattr(self, "found_inf", None)
        if found_infinity is not None and bool(found_infinity):
            return
        position = 0
        for index, group in enumerate(self.param_groups):
            parameters = {position + i: it for i, it in enumerate(group["params"]) if it.grad is not None}
            position += len(group["params"])
            self._step_group(index, group, parameters)
            group["num_steps"] += 1

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the saved state of a LowPrecision with the same dtypes and the same inner optimizer.

        Raises:
            OptimizerError: If the state is of another precision, or of another optimizer.
            ValueError: If the state has other parameter groups.
        """
        self.check_state(state_dict)
        states = load_uncast(self, state_dict)
        for parameter, state in states.items():
            self.state[parameter] = {
                name: torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
                if name in self._names
                else value.clone()
                if isinstance(value, Tensor)
                else value
                for name, value in state.items()
            }

    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        """Raise OptimizerError unless the state was saved with the same dtypes and the same inner optimizer."""
        for saved, group in zip(state_dict["param_groups"], self.param_groups, strict=False):
            then, now = ([it.get(name) for name in ("moments", "weights")] for it in (saved, group))
            if then[0] is None:
                raise OptimizerError(
                    f"the state is not one of LowPrecision, which holds moments in {now[0]} here: load it into "
                    "the optimizer that it was saved from"
                )
            if then[0] != now[0] or (None not in (then[1], now[1]) and then[1] != now[1]):
                raise OptimizerError(
                    f"the state is of another precision: moments={then[0]}, weights={then[1]} there, and "
                    f"moments={now[0]}, weights={now[1]} here; make LowPrecision as the one that was saved"
                )
        self._know_names(state_dict)

    def _know_names(self, state_dict: Mapping[str, Any]) -> None:
        """Record the tensor names in a saved state. Raise OptimizerError if the optimizer has no such tensor."""
        states = state_dict["state"].values()
        names = {
            name for state in states for name, it in state.items() if isinstance(it, Tensor) and it.numel() > 1
        }
        for saved, group in zip(state_dict["param_groups"], self.param_groups, strict=False):
            if not names <= self._names:
                device = next((it.device for it in group["params"]), torch.device("cpu"))
                self._names |= check_elementwise(
                    self._optimizer_class, self._given, _inner_settings(saved), device, asked_by="LowPrecision"
                )
        if unknown := sorted(names - self._names):
            raise OptimizerError(
                f"the state has {' and '.join(unknown)}, which {self._optimizer_class.__name__} does not keep: "
                "load it into LowPrecision with the optimizer that it was saved from"
            )

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes that a copy or a pickle of this optimizer contains."""
        names = ("_optimizer_class", "_given", "_names")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in names}, "_inside": {}}

    def _refuse_signless(self, group: Mapping[str, Any]) -> None:
        if names := signless_names(self._optimizer_class, self._given, _inner_settings(group)):
            raise OptimizerError(
                f"moments=torch.float16 cannot hold {' and '.join(names)} of {self._optimizer_class.__name__}, "
                "never negative and perhaps as small as the square of a gradient: they would become 0, and steps "
                "huge. Take moments=torch.bfloat16"
            )

    def _step_group(self, index: int, group: dict[str, Any], parameters: Mapping[int, Tensor]) -> None:
        if not parameters:
            return
        device = next(iter(parameters.values())).device
        settings = _inner_settings(group)
        kind: Any = self._optimizer_class
        if device.type == "cpu" and _may_be_fused(settings) and has_exact_fused_kernel(kind):
            settings["fused"] = True
        if index not in self._inside:
            anything = Parameter(torch.zeros(1, dtype=torch.float32, device=device))
            self._inside[index] = kind([{"params": [anything], **settings}], **self._given)
        inside = self._inside[index]
        inner = _InnerStep(inside, settings, getattr(self, "grad_scale", None))
        is_off = context.is_initialized() and not context.current_job().is_checked
        inner.is_checked = is_checked(group["num_steps"] + 1) and not is_off
        for position, parameter in parameters.items():
            piece = self._pieces.get(parameter)
            place = Place(position, 0) if piece is None else Place(piece.position, piece.elements.start)
            self._step_parameter(inner, group, parameter, place)
        inside.state.clear()
        group.update({name: inside.param_groups[0][name] for name in settings if name != "fused"})

    def _step_parameter(
        self, inner: "_InnerStep", group: Mapping[str, Any], parameter: Tensor, place: Place
    ) -> None:
        """Update ``parameter`` by a step of the inner optimizer, some elements at a time."""
        _check_parameter(parameter, group["weights"])
        before = self.state.get(parameter, {})
        held = {
            name: in_order_of(value, parameter)
            for name, value in before.items()
            if name in self._names and isinstance(value, Tensor)
        }
        weights, gradient = flat(parameter.detach()), flat_in_order_of(gradient_of(parameter), parameter)
        after: Mapping[str, Any] = before
        length = _ELEMENTS_AT_ONCE if parameter.is_cpu else _ELEMENTS_OF_ACCELERATORS
        for start in range(0, parameter.numel(), length):
            part = slice(start, start + length)
            state = {
                name: flat(held[name])[part].to(torch.float32) if name in held else _copy_of(value)
                for name, value in before.items()
            }
            wide, after = inner.step(weights[part].to(torch.float32), gradient[part].to(torch.float32), state)
            rows = {_WEIGHTS: (wide, weights[part])}
            for name, value in after.items():
                if name in self._names and isinstance(value, Tensor):
                    if name not in held:
                        dtype = _DTYPES[group["moments"]]
                        held[name] = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
                    rows[name] = value, flat(held[name])[part]
                elif isinstance(value, Tensor) and value.numel() > 1:
                    raise OptimizerError(
                        f"{self._optimizer_class.__name__} keeps {name}, which is neither a number for each "
                        "element nor a single value, so LowPrecision cannot hold it"
                    )
            for name, (value, narrow) in rows.items():
                _store(value, narrow, name, Place(place.position, place.first + start), group)
        self.state[parameter] = {name: held.get(name, value) for name, value in after.items()}


class _InnerStep:
    """One step of the inner optimizer on a parameter group; each call updates some elements of a parameter."""

    def __init__(self, optimizer: Optimizer, settings: Mapping[str, Any], scale: Tensor | None) -> None:
        self.is_checked = False  # whether the next call checks that elements are independent
        self._optimizer = optimizer
        self._settings = settings
        self._factor = None if scale is None else 1 / float(scale)
        # the program's own optimizer may count its steps, so each call begins with the attributes before the step
        self._attributes = {} if is_known(type(optimizer)) else _attributes(optimizer)

    def step(self, weights: Tensor, gradient: Tensor, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """Step on some elements of a parameter, given in float32; return their new weights and new state."""
        inside = self._optimizer
        vars(inside).update({name: copy(value) for name, value in self._attributes.items()})
        parameter = Parameter(weights)
        parameter.grad = gradient if self._factor is None else gradient * self._factor
        inside.param_groups[0]["params"] = [parameter]
        inside.param_groups[0].update(self._settings)
        inside.state = defaultdict(dict, {parameter: state} if state else {})
        if self.is_checked:
            self.is_checked = False
            check_in_training(inside, asked_by="LowPrecision")
        quiet_step(inside)
        return parameter.detach(), dict(inside.state.get(parameter, {}))


def _store(wide: Tensor, held: Tensor, name: str, place: Place, group: Mapping[str, Any]) -> None:
    """Store the new weights or state ``wide`` in the tensor ``held``, rounded to the dtype of ``held``."""
    wide = wide.detach().reshape(-1).to(torch.float32)
    if held.dtype in HALVES and group["rounding"] == "stochastic":
        round_by_chance(wide, held, name, place, seed=group["seed"], step=group["num_steps"])
    elif held.data_ptr() != wide.data_ptr():
        held.copy_(wide)


def _copy_of(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _attributes(optimizer: Optimizer) -> dict[str, Any]:
    return {name: copy(it) for name, it in vars(optimizer).items() if name not in ("state", "param_groups")}


def _may_be_fused(settings: Mapping[str, Any]) -> bool:
    """Whether popdist may choose torch's fused kernel: the program chose no kernel, and no setting prevents it."""
    is_open = "fused" in settings and settings["fused"] is None and settings.get("foreach") is None
    return is_open and not settings.get("capturable") and not settings.get("differentiable")


def _check_class(optimizer_class: object) -> type[Optimizer]:
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        is_made = isinstance(optimizer_class, Optimizer)
        shown = f"{type(optimizer_class).__name__}(...)" if is_made else repr(optimizer_class)
        raise OptimizerError(
            f"optimizer_class={shown} must be a class of optimizers, which LowPrecision steps with, "
            "such as torch.optim.AdamW"
        )
    return optimizer_class


def _inner_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a parameter group for the inner optimizer, without LowPrecision's own settings."""
    return {name: value for name, value in group.items() if name not in _NOT_INSIDE}


def _checked(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Check LowPrecision's own settings; return them with the dtypes as names, which checkpoints can store."""
    moments, weights, rounding = settings["moments"], settings["weights"], settings["rounding"]
    if rounding not in ("stochastic", "nearest"):
        raise OptimizerError(f"rounding={rounding!r} must be 'stochastic' or 'nearest'")
    return {
        "moments": _name_of("moments", moments),
        "weights": None if weights is None else _name_of("weights", weights),
        "rounding": rounding,
        "seed": seed_number(settings["seed"], OptimizerError),
        "num_steps": settings["num_steps"],
    }


def _name_of(what: str, dtype: object) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        known = ", ".join(f"torch.{it}" for it in _DTYPES)
        raise OptimizerError(
            f"{what}={dtype} must be one of {known}: it holds fractions, and is computed in float32"
        )
    return name


def _check_parameter(parameter: Tensor, weights: str | None) -> None:
    shape, name = tuple(parameter.shape), str(parameter.dtype).removeprefix("torch.")
    if name not in _DTYPES or weights not in (None, name):
        expected = f"torch.{weights}" if weights else "float16, bfloat16 or float32"
        other = ", or leave out weights= to take each parameter as it is" if name in _DTYPES else ""
        raise OptimizerError(
            f"a parameter of shape {shape} is {parameter.dtype}, and LowPrecision was asked for weights in "
            f"{expected}: convert the model first, as by model.to(torch.bfloat16){other}"
        )
    if not parameter.is_contiguous():
        flat_view(parameter.detach(), f"a parameter of shape {shape}")
