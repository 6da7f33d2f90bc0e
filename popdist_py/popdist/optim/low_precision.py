"""An optimizer whose weights and state are held in half precision, and computed in float32.

A step takes some elements at a time: it widens weights, gradients and state, has the optimizer itself step on
them, and rounds what that leaves. So there is no copy of the weights in float32. The optimizer treats each element
by itself, which is proved before, so the bits do not depend on which elements are taken together.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from copy import copy
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from popdist import context
from popdist.errors import OptimizerError, seed_number
from popdist.gradients.shards import flat_view
from popdist.optim.elementwise import (
    check_elementwise,
    check_in_training,
    has_exact_fused_kernel,
    is_known,
    quiet_step,
    signless_names,
)
from popdist.optim.pieces import PieceOptimizer, load_uncast
from popdist.optim.rounding import HALVES, Column, Place, padded, round_by_chance, round_to_nearest, widen
from popdist.optim.square_sums import in_order_of
from popdist.training.checks import is_checked

_OWN_SETTINGS: Final = ("moments", "weights", "rounding", "seed", "num_steps")
_NOT_INSIDE: Final = ("params", "param_names", "optimizer_class", *_OWN_SETTINGS)
_DTYPES: Final = {str(dtype).removeprefix("torch."): dtype for dtype in (*HALVES, torch.float32)}
_WEIGHTS: Final = "weights"
_GRADIENTS: Final = "gradients"

_ELEMENTS_AT_ONCE: Final = 1 << 19
"""What they need in float32 fits a usual last-level cache."""


class _Alike(NamedTuple):
    """Parameters that one call of the optimizer may treat together.

    Attributes:
        parameters: Of a group, on one device; what of their states is a single value is the same for all.
        places: What their elements are known by.
    """

    parameters: list[Tensor]
    places: list[Place]


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
        **kwargs: Any,  # noqa: ANN401 - whatever the optimizer takes
    ) -> None:
        _check_class(optimizer_class)
        self._optimizer_class = optimizer_class
        self._given = kwargs
        self._inside: dict[int, Optimizer] = {}
        inner = optimizer_class([Parameter(torch.zeros(1, dtype=torch.float32))], **kwargs).defaults
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
        """Those of the optimizer inside."""
        given = {name: value for name, value in defaults.items() if name not in _NOT_INSIDE}
        inside = _check_class(defaults.get("optimizer_class"))
        return check_elementwise(inside, given, _inner_settings(settings), device, asked_by="LowPrecision")

    def update(self) -> None:
        """Update the parameters that have a gradient, unless a scaler has found infinity.

        Raises:
            OptimizerError: If a gradient is sparse, or the optimizer inside keeps something that is neither a
                number for each element nor a single value.
        """
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
        """Check that a state is of this precision and of the optimizer inside.

        Raises:
            OptimizerError: If it is not.
        """
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
        """Learn which names of a state have a number for each element: its settings may be others, as amsgrad."""
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
        """What a copy has, beside what torch's optimizers have."""
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
        inside = self._inside.get(index)
        if inside is None:
            anything = Parameter(torch.zeros(1, dtype=torch.float32, device=device))
            inside = self._inside[index] = kind([{"params": [anything], **settings}], **self._given)
        kept = {} if is_known(kind) else _attributes(inside)  # it may count its steps
        aside = _Aside(inside, settings, kept, getattr(self, "grad_scale", None))
        aside.is_checked = _is_checked(group["num_steps"] + 1)
        for alike in self._alike(parameters):
            self._step_alike(aside, group, alike)
        inside.state.clear()
        group.update({name: inside.param_groups[0][name] for name in settings if name != "fused"})

    def _step_alike(self, aside: "_Aside", group: Mapping[str, Any], alike: _Alike) -> None:
        parameters, places = alike
        for parameter in parameters:
            _check_parameter(parameter, group["weights"])
        num_elements = sum(padded(parameter.numel()) for parameter in parameters)
        aside.make_room(min(num_elements, _ELEMENTS_AT_ONCE), parameters[0].device)
        before = self.state.get(parameters[0], {})

        def column(name: str, held: Iterable[Tensor]) -> Column:
            return Column(name, aside.room[name], list(held), places)

        weights = column(_WEIGHTS, parameters)
        gradients = column(_GRADIENTS, (in_order_of(_gradient_of(it), it) for it in parameters))
        moments = {
            name: column(name, (in_order_of(self.state[it][name], it) for it in parameters))
            for name, value in before.items()
            if name in self._names and isinstance(value, Tensor)
        }
        after: Mapping[str, Any] = before
        for start in range(0, num_elements, _ELEMENTS_AT_ONCE):
            elements = range(start, min(start + _ELEMENTS_AT_ONCE, num_elements))
            widen([weights, gradients, *moments.values()], elements)
            after = aside.step(len(elements), before, moments.keys())
            for name, value in after.items():
                if name in self._names and isinstance(value, Tensor):
                    aside.take(name, value)
                    if name not in moments:
                        moments[name] = column(name, (_empty(it, group["moments"]) for it in parameters))
                elif isinstance(value, Tensor) and value.numel() > 1:
                    raise OptimizerError(
                        f"{self._optimizer_class.__name__} keeps {name}, which is neither a number for each "
                        "element nor a single value, so LowPrecision cannot hold it"
                    )
            columns = [weights, *(moments[name] for name in after if name in moments)]
            if group["rounding"] == "stochastic":
                round_by_chance(columns, elements, seed=group["seed"], step=group["num_steps"])
            else:
                round_to_nearest(columns, elements)
        for number, parameter in enumerate(parameters):
            self.state[parameter] = {
                name: moments[name].held[number] if name in moments else _copy_of(value)
                for name, value in after.items()
            }

    def _alike(self, parameters: Mapping[int, Tensor]) -> list[_Alike]:
        """The parameters, by position, in their order."""
        found: list[_Alike] = []
        kind: object = None
        for position, parameter in parameters.items():
            own_kind = (parameter.device, _singles(self.state.get(parameter, {}), self._names))
            if own_kind != kind:
                found.append(_Alike([], []))
                kind = own_kind
            piece = self._pieces.get(parameter)
            place = Place(position, 0) if piece is None else Place(piece.position, piece.elements.start)
            found[-1].parameters.append(parameter)
            found[-1].places.append(place)
        return found


class _Aside:
    """The optimizer inside, and memory in float32 for what it steps on.

    Args:
        optimizer: The one inside.
        settings: Of the group that it steps for.
        kept: Its attributes before the step, where it has others than torch's.
        scale: Of the gradients, by a scaler.

    Attributes:
        room: A row in float32 for each tensor, by its name.
        is_checked: Whether the next step shows that it treats each element by itself.
    """

    def __init__(
        self, optimizer: Optimizer, settings: Mapping[str, Any], kept: Mapping[str, Any], scale: Tensor | None
    ) -> None:
        self._optimizer = optimizer
        self._settings = settings
        self._kept = kept
        self._scale = scale
        self._has_stepped = False
        self.room: dict[str, Tensor] = {}
        self.is_checked = False

    def make_room(self, num_elements: int, device: torch.device) -> None:
        """For that many elements of each tensor: zeros; what nothing is written into is computed, and not used."""
        if self.room and self.room[_WEIGHTS].device == device and len(self.room[_WEIGHTS]) >= num_elements:
            return
        self.room = _Room(num_elements, device)

    def step(self, num_elements: int, state: Mapping[str, Any], moments: Collection[str]) -> dict[str, Any]:
        """Step on the first elements of the room; the weights are there afterwards.

        Args:
            num_elements: How many.
            state: The optimizer's, of one parameter; what is in ``moments`` is in the room.
            moments: The names of what has a number for each element.

        Returns:
            The state after the step.
        """
        inside = self._optimizer
        if self._has_stepped:
            vars(inside).update({name: copy(it) for name, it in self._kept.items()})
        weights = Parameter(self.room[_WEIGHTS][:num_elements])
        weights.grad = self.room[_GRADIENTS][:num_elements]
        if self._scale is not None:
            weights.grad.mul_(1 / float(self._scale))
        own = {
            name: self.room[name][:num_elements] if name in moments else _copy_of(value)
            for name, value in state.items()
        }
        inside.param_groups[0]["params"] = [weights]
        inside.param_groups[0].update(self._settings)
        inside.state = defaultdict(dict, {weights: own} if own else {})
        if self.is_checked and not self._has_stepped:
            check_in_training(inside, asked_by="LowPrecision")
        quiet_step(inside)
        self._has_stepped = True
        self.take(_WEIGHTS, weights.detach())
        after: dict[str, Any] = inside.state.get(weights, {})
        return after

    def take(self, name: str, value: Tensor) -> None:
        """Have ``value`` in the room, if the optimizer has not written there."""
        row = self.room[name][: value.numel()]
        if value.data_ptr() != row.data_ptr() or value.dtype != row.dtype:
            row.copy_(value.view(-1))


class _Room(dict[str, Tensor]):
    """A row of zeros in float32 for each name.

    Args:
        num_elements: Of each.
        device: Of all.
    """

    def __init__(self, num_elements: int, device: torch.device) -> None:
        super().__init__()
        self._num_elements = num_elements
        self._device = device

    def __missing__(self, name: str) -> Tensor:
        self[name] = torch.zeros(self._num_elements, dtype=torch.float32, device=self._device)
        return self[name]


def _copy_of(value: Any) -> Any:  # noqa: ANN401 - whatever an optimizer keeps
    return value.clone() if isinstance(value, Tensor) else value


def _attributes(optimizer: Optimizer) -> dict[str, Any]:
    return {name: copy(it) for name, it in vars(optimizer).items() if name not in ("state", "param_groups")}


def _may_be_fused(settings: Mapping[str, Any]) -> bool:
    """Whether the choice of the kernel is left open."""
    is_open = "fused" in settings and settings["fused"] is None and settings.get("foreach") is None
    return is_open and not settings.get("capturable") and not settings.get("differentiable")


def _gradient_of(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    if gradient is None or gradient.layout != torch.strided:
        raise OptimizerError(
            f"the gradient of a parameter of shape {tuple(parameter.shape)} is sparse: make it with sparse=False"
        )
    return gradient


def _singles(state: Mapping[str, Any], names: frozenset[str]) -> tuple[tuple[str, object], ...]:
    """What of a state is one value for the whole parameter, and of the rest the names."""
    return tuple(
        (name, None if name in names and isinstance(it, Tensor) else it.item() if isinstance(it, Tensor) else it)
        for name, it in state.items()
    )


def _empty(parameter: Tensor, dtype: str) -> Tensor:
    return torch.empty_like(parameter, dtype=_DTYPES[dtype], requires_grad=False)


def _check_class(optimizer_class: object) -> type[Optimizer]:
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        is_made = isinstance(optimizer_class, Optimizer)
        given = f"{type(optimizer_class).__name__}(...)" if is_made else repr(optimizer_class)
        raise OptimizerError(
            f"optimizer_class={given} must be a class of optimizers, which LowPrecision steps with, "
            "such as torch.optim.AdamW"
        )
    return optimizer_class


def _is_checked(number: int) -> bool:
    is_off = context.is_initialized() and not context.current_job().is_checked
    return is_checked(number) and not is_off


def _inner_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a group that belong to the optimizer inside."""
    return {name: value for name, value in group.items() if name not in _NOT_INSIDE}


def _checked(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Our own settings with the names of dtypes, which a checkpoint can hold."""
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
