"""An optimizer whose weights and state are held in half precision, and computed in float32.

A step takes some elements of a parameter at a time: it widens weights, gradients and state, has the optimizer
itself step on them, and rounds what that leaves. So there is no copy of the weights in float32. The optimizer
treats each element by itself, which is proved before, so the bits do not depend on how a parameter is cut.
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
"""So many elements in float32 fit a usual last-level cache; a multiple of 128, the block of random bits."""

_ELEMENTS_OF_ACCELERATORS: Final = 1 << 24
"""So many elements keep an accelerator busy for longer than the host needs to launch the kernels of a step."""


class LowPrecision(PieceOptimizer):
    """Steps with ``optimizer_class`` in float32, and holds weights and state in half precision.

    ::

        model = popdist.ReplicatedModel(net.to(torch.bfloat16))
        optimizer = LowPrecision(model.parameters(), torch.optim.AdamW, lr=1e-3)
        optimizer = popdist.ShardedOptimizer(model, LowPrecision, optimizer_class=torch.optim.AdamW, lr=1e-3)

    An update that is smaller than half the distance to the next number is lost when it is rounded to the nearest
    one. Rounded by chance, the weights move by the update in the mean. The random bits belong to the seed, the
    number of steps made, the place of the parameter in the groups, the tensor, and the number of the element in
    the whole parameter. So they depend on no split of the job, no shard and no thread. ``state_dict`` holds seed
    and number of steps.

    A ``torch.amp.GradScaler`` works on it: gradients are divided by the scale in float32, and a step that it skips
    is not counted. Adam and AdamW run as torch's fused kernel, unless ``foreach`` or ``fused`` is given.

    Args:
        params: Parameters or groups of them, as torch's optimizers take them: float16, bfloat16, or float32, which
            stays as it is.
        optimizer_class: Of torch or your own. It must treat each element by itself, as SGD and the Adam family
            do.
        moments: What the state is held in, where it has a number for each element: float16, bfloat16 or float32.
            In float16 second moments would become 0, so it is for optimizers without them, such as SGD.
        weights: The dtype that all parameters must have; None takes each as it is.
        rounding: "stochastic", by chance, or "nearest", as torch rounds.
        seed: Of the random bits, from -2**63 to 2**64 - 1.
        **kwargs: The keyword arguments of ``optimizer_class``.

    Raises:
        OptimizerError: If a parameter or ``moments`` has another dtype, the optimizer does not treat each element
            by itself, or float16 cannot hold its state.
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
        """Add a group of parameters, as torch's optimizers do.

        Raises:
            OptimizerError: As for the class.
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
        """The same names as those of the optimizer inside."""
        given = {name: value for name, value in defaults.items() if name not in _NOT_INSIDE}
        inside = _check_class(defaults.get("optimizer_class"))
        return check_elementwise(inside, given, _inner_settings(settings), device, asked_by="LowPrecision")

    def update(self) -> None:
        """Update the parameters that have a gradient, unless a scaler has found infinity."""
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
        """Go on from a state of a LowPrecision of the same precision and of the same optimizer.

        Raises:
            OptimizerError: If the state is of another precision, or of another optimizer.
            ValueError: If it has other groups.
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
        """Raise an OptimizerError unless a state is of this precision and of the optimizer inside."""
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
        """Add the names in a saved state that have a number for each element, as ``amsgrad`` adds one."""
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
        """The attributes that a copy or pickle has beside those of torch's optimizers."""
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
        """Step on ``parameter``, some elements at a time."""
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
            made, after = inner.step(weights[part].to(torch.float32), gradient[part].to(torch.float32), state)
            rows = {_WEIGHTS: (made, weights[part])}
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
    """A step of the optimizer inside on a group's parameters, made in several calls on some elements each."""

    def __init__(self, optimizer: Optimizer, settings: Mapping[str, Any], scale: Tensor | None) -> None:
        self.is_checked = False  # whether the next call shows that it treats each element by itself
        self._optimizer = optimizer
        self._settings = settings
        self._factor = None if scale is None else 1 / float(scale)
        # One of the program's own may count its steps: each call begins with the attributes of before.
        self._attributes = {} if is_known(type(optimizer)) else _attributes(optimizer)

    def step(self, weights: Tensor, gradient: Tensor, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """Step on these elements, perhaps in place, and return the weights and the state."""
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
    """Round ``wide`` into ``held``, which may be the same memory if it is in float32."""
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
    """Whether the settings leave the choice between torch's kernels open."""
    is_open = "fused" in settings and settings["fused"] is None and settings.get("foreach") is None
    return is_open and not settings.get("capturable") and not settings.get("differentiable")


def _check_class(optimizer_class: object) -> type[Optimizer]:
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        is_made = isinstance(optimizer_class, Optimizer)
        given = f"{type(optimizer_class).__name__}(...)" if is_made else repr(optimizer_class)
        raise OptimizerError(
            f"optimizer_class={given} must be a class of optimizers, which LowPrecision steps with, "
            "such as torch.optim.AdamW"
        )
    return optimizer_class


def _inner_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a group that belong to the optimizer inside."""
    return {name: value for name, value in group.items() if name not in _NOT_INSIDE}


def _checked(settings: Mapping[str, Any]) -> dict[str, Any]:
    """LowPrecision's own settings, checked, with names in place of dtypes, as a checkpoint needs them."""
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
        wanted = f"torch.{weights}" if weights else "float16, bfloat16 or float32"
        other = ", or leave out weights= to take each parameter as it is" if name in _DTYPES else ""
        raise OptimizerError(
            f"a parameter of shape {shape} is {parameter.dtype}, and LowPrecision was asked for weights in "
            f"{wanted}: convert the model first, as by model.to(torch.bfloat16){other}"
        )
    if not parameter.is_contiguous():
        flat_view(parameter.detach(), f"a parameter of shape {shape}")
