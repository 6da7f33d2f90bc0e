"""The optimizer of a phased model: it updates one parameter at a time, while this parameter is in memory.

The optimizer's state of a parameter lies in the model's store: tensors as they are, and small values, such as the
number of steps, in a record.
"""

import json
import reprlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from popdist.errors import OptimizerError, check_flags
from popdist.ground import torch_private
from popdist.ground.local_tensors import TensorForm, is_distributed, local_part, placed_as
from popdist.optim.elementwise import check_elementwise
from popdist.optim.one_by_one import OF_SCALERS, OneByOne, State, settings_of
from popdist.optim.pieces import PieceOptimizer, load_uncast, refuse_distributed

RECORD: Final = "record"
"""The name of the tensor that holds a parameter's small values, as JSON."""

_VALUE_BYTES: Final = 64
"""The bytes of a record for each small value: the longest number of torch takes 25 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _StateForm:
    """The layout of the optimizer's state for parameters of one shape and dtype: tensors and small values."""

    tensors: dict[str, TensorForm]
    values: State  # small values after a first step: tensors of one element, numbers and None
    names: tuple[str, ...]  # the names of all tensors and values, in the optimizer's order

    @classmethod
    def of(cls, state: State, device: torch.device) -> "_StateForm":
        """Return the layout of ``state``. Raise OptimizerError if a store cannot hold a value of ``state``."""
        tensors, values = dict[str, TensorForm](), State()
        for name, value in state.items():
            is_tensor = isinstance(value, Tensor)
            if value is None or isinstance(value, bool | int | float) or (is_tensor and _is_small(value)):
                values[name] = value
            elif is_tensor and value.device == device and value.layout == torch.strided:
                tensors[name] = TensorForm.of(value)
            else:
                kind = f"tensor of layout {value.layout} on {value.device}" if is_tensor else type(value).__name__
                raise OptimizerError(
                    f"its state {name} is a {kind}: the store holds tensors on the device of their parameter, "
                    "numbers and None"
                )
        return cls(tensors=tensors, values=values, names=tuple(state))

    @property
    def stored(self) -> dict[str, TensorForm]:
        """The layout of each tensor that the store holds for a parameter: large state tensors, and the record."""
        length = _VALUE_BYTES * (1 + len(self.values))
        return {**self.tensors, RECORD: TensorForm(dtype=torch.uint8, shape=(length,), stride=(1,))}

    def fits(self, state: State) -> bool:
        """Whether the new state ``state`` of a parameter has the names, shapes and dtypes of this layout."""
        kinds = {name: (form.shape, form.dtype) for name, form in self.tensors.items()}
        kinds |= {name: _kind_of(value) for name, value in self.values.items()}
        return {name: _kind_of(value) for name, value in state.items()} == kinds

    def may_load(self, saved: State) -> bool:
        """Whether ``saved`` has only names of this layout, and its large tensors have this layout's shapes."""
        shapes = {name: getattr(value, "shape", None) for name, value in saved.items()}
        fit = [shapes.get(name, form.shape) == form.shape for name, form in self.tensors.items()]
        return {*saved} <= {*self.names} and all(fit)

    def write_record(self, record: Tensor, state: State) -> None:
        """Write the small values (numbers, None) of ``state`` as JSON to ``record``, a tensor of bytes."""
        values = [state[name].item() if isinstance(state[name], Tensor) else state[name] for name in self.values]
        text = json.dumps(values).encode().ljust(len(record))
        record.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))

    def read_record(self, record: Tensor) -> State | None:
        """Return the small values, by name, from the JSON in ``record``; None if ``record`` is still empty."""
        if not record[0]:
            return None
        return {
            name: torch.full_like(like, value) if isinstance(like, Tensor) else value
            for (name, like), value in zip(self.values.items(), json.loads(bytes(record.tolist())), strict=True)
        }


def _is_small(value: Tensor) -> bool:
    """Whether ``value`` has one element and is not complex, so that JSON can store it as a number."""
    return value.numel() == 1 and not value.is_complex()


def _kind_of(value: object) -> Any:
    """Return the shape and dtype of a tensor with several elements; for other values, whether they are tensors."""
    if isinstance(value, Tensor) and not _is_small(value):
        return tuple(value.shape), value.dtype
    return isinstance(value, Tensor)


class _Place(NamedTuple):
    """A parameter's name, its index among all parameters of the optimizer, its group, and its state's layout."""

    name: str
    position: int  # the index in all groups together
    group: int
    form: _StateForm


class PhasedOptimizer(Optimizer):
    """An optimizer for a phased model: ``optimizer_class`` updates one parameter at a time, while it is in memory.

    ::

        model = popdist.parallel.phased(model, memory="2 GB", store="/data/store")
        optimizer = popdist.parallel.PhasedOptimizer(model, torch.optim.AdamW, lr=1e-3)

    The weights are bitwise equal to weights that ``optimizer_class`` trains in memory. Use it like any optimizer,
    with parameter groups, schedulers and ``state_dict``. A parameter is updated in the backward pass of a step's
    last micro batch, as soon as its gradient is complete, with the learning rate of that moment; ``step()`` waits
    until all is written. So gradients are never in memory together, and reading ``.grad`` raises an error.

    Args:
        model: A model from ``popdist.parallel.phased``, which has one optimizer at a time.
        optimizer_class: A class of torch, of ``popdist.optim`` or your own. Its update of a parameter needs only
            the tensors of this parameter, as in SGD, the Adam family, LAMB, LARS and Muon.
        params: Parameters of the model, or parameter groups, as torch's optimizers take them; None means all.
        step_in_backward: False if you need all gradients before the step, for ``clip_grad_norm_`` or a GradScaler.
            Gradients then go to the store, ``.grad`` reads them from there, and ``step()`` makes one pass more
            over weights, gradients and state. You may scale and clip a ``.grad`` in place by numbers.
        **defaults: The keyword arguments of ``optimizer_class``.

    Raises:
        OptimizerError: If the optimizer mixes parameters, as LBFGS does, or keeps what a store cannot hold; if a
            parameter is not the model's, or is a DTensor and the optimizer needs whole parameters.
        StoreError: If there is no room for the state.
    """

    def __init__(
        self,
        model: Any,
        optimizer_class: type[Optimizer],
        /,
        params: Iterable[Any] | None = None,
        *,
        step_in_backward: bool = True,
        **defaults: Any,
    ) -> None:
        check_flags(OptimizerError, step_in_backward=step_in_backward)
        self._steps: Any = getattr(model, "phased_steps", None)
        if self._steps is None:
            raise OptimizerError(
                f"PhasedOptimizer takes a model from popdist.parallel.phased(), not a {type(model).__name__}"
            )
        self._run: Any = self._steps.run
        self._steps.check_same()
        given: object = optimizer_class
        if not (isinstance(given, type) and issubclass(given, Optimizer)):
            raise OptimizerError(f"PhasedOptimizer takes a class of optimizers, not {optimizer_class!r}")
        if not step_in_backward and not torch_private.has_wrapper_tensors:
            raise OptimizerError(
                f"torch {torch.__version__} lacks tensors without memory: leave out step_in_backward=False"
            )
        self.step_in_backward = step_in_backward
        self._optimizer_class = optimizer_class
        self._given = defaults
        self._steppers: list[OneByOne] = []
        self._places: dict[Tensor, _Place] = {}
        self._is_complete = False
        super().__init__(model.parameters() if params is None else params, defaults)
        self.defaults = self._steppers[0].optimizer.defaults
        self._is_complete = True
        self._run.attach_optimizer(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the optimizer. After the constructor, every call raises OptimizerError.

        Raises:
            OptimizerError: As for the class; after the constructor, because the store has no room for more states.
        """
        if self._is_complete:
            raise OptimizerError(
                "a PhasedOptimizer has all its groups from the start, as the store has room for their states "
                "only: give PhasedOptimizer(params=[...]) all groups that the model is ever to train"
            )
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        parameters, settings = group["params"], settings_of(group)
        for parameter in parameters:
            if id(parameter) not in self._run.names:
                raise OptimizerError(
                    f"a parameter of shape {tuple(parameter.shape)} is none of the model's: give PhasedOptimizer "
                    "parameters of the model that popdist.parallel.phased() has returned"
                )
        self._check_distributed(parameters, settings)

        def make(some: list[Parameter]) -> Optimizer:
            return self._optimizer_class([{**settings, "params": some}], **self._given)

        names = [self._run.names[id(parameter)] for parameter in parameters]
        weight_forms = [self.store.weights.forms[name] for name in names]
        kinds = [(form, local_part(it).device) for form, it in zip(weight_forms, parameters, strict=True)]
        try:
            stepper = OneByOne(make, [(form.shape, form.dtype, device) for form, device in kinds])
            forms = {kind: _form_of_state(stepper, *kind) for kind in dict.fromkeys(kinds)}
        except OptimizerError as error:
            raise OptimizerError(
                f"PhasedOptimizer cannot step with {self._optimizer_class.__name__}: {error}"
            ) from error.__cause__
        self._steppers.append(stepper)
        for name in settings:
            del group[name]
        group |= stepper.settings
        for parameter, name, kind in zip(parameters, names, kinds, strict=True):
            self._places[parameter] = _Place(
                name=name,
                position=len(self._places),
                group=len(self.param_groups) - 1,
                form=forms[kind],
            )

    def _check_distributed(self, parameters: Sequence[Tensor], settings: Mapping[str, Any]) -> None:
        """Raise OptimizerError if a parameter is a DTensor, and the optimizer needs whole parameters."""
        if cut := [parameter for parameter in parameters if is_distributed(parameter)]:
            if issubclass(self._optimizer_class, PieceOptimizer):
                refuse_distributed(self._optimizer_class.__name__, cut)
            device = local_part(cut[0]).device
            check_elementwise(self._optimizer_class, self._given, settings, device, asked_by="PhasedOptimizer")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """End the optimizer's step: wait until all weights and states are written. All instances call this.

        With ``step_in_backward=False``, update each parameter whose ``.grad`` is not None before.

        Raises:
            OptimizerError: If a closure is given, which would run the model once more.
            MicroBatchError: If no ``micro_batches`` loop has ended since the last call.
            StoreError: If the store could not be read or written.
            Exception: Any error of ``optimizer_class``.
        """
        if closure is not None:
            raise OptimizerError(
                "PhasedOptimizer.step(closure): the parameters are updated in the backward pass of "
                "model.micro_batches(), so call step() without a closure after that loop"
            )
        self._steps.finish_step()

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002, FBT001, FBT002 - torch's method has this signature
        """Set the ``.grad`` of all parameters to None; ignore ``set_to_none``, as zeros would need memory."""
        for parameter in self._places:
            parameter.grad = None

    def forms_of(self, parameter: Tensor) -> dict[str, TensorForm]:
        """Return the layouts of the state tensors that the store has for ``parameter``; {} if no group has it."""
        place = self._places.get(parameter)
        return {} if place is None else place.form.stored

    def begin_update(self) -> None:
        """Begin the updates of one step, with the settings, such as lr, that the parameter groups have now."""
        handed = {name: it for name, it in vars(self).items() if name in OF_SCALERS}
        for stepper, group in zip(self._steppers, self.param_groups, strict=True):
            stepper.begin(settings_of(group), **handed)

    @torch.no_grad()
    def update(self, parameter: Parameter, gradient: Tensor, state: Mapping[str, Tensor]) -> None:
        """Update ``parameter`` by ``gradient``, and write its new optimizer state to the tensors ``state``."""
        place = self._places[parameter]
        form, weights = place.form, local_part(parameter)
        held: State = {}
        if parameter in self.state:
            held = {name: self.state[parameter].get(name, state.get(name)) for name in form.names}
        detached = Parameter(weights.detach(), requires_grad=True)
        detached.grad = local_part(gradient)
        new_state = self._steppers[place.group].step(detached, held, place.position)
        if detached.data_ptr() != weights.data_ptr():
            weights.copy_(detached)
        if not new_state:
            return
        if not form.fits(new_state):
            self._refuse_state(place, new_state)
        for name in form.tensors:
            if new_state[name] is not state[name]:
                state[name].copy_(new_state[name])
        self.state[parameter] = {name: new_state[name] for name in form.values}
        form.write_record(state[RECORD], new_state)

    def end_update(self) -> None:
        """End the updates of one step; copy settings that ``optimizer_class`` changed to the parameter groups."""
        for stepper, group in zip(self._steppers, self.param_groups, strict=True):
            group.update(stepper.end())

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict that ``optimizer_class`` would return for the model in memory.

        Its tensors are read from the store only when used, and the next step changes them: save the state before.
        """
        small_values = self.state
        whole = {parameter: self._whole_state(parameter) for parameter in self._places}
        self.state = defaultdict(dict, {parameter: state for parameter, state in whole.items() if state})
        try:
            return super().state_dict()
        finally:
            self.state = small_values

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the optimizer state ``state_dict``, also one that ``optimizer_class`` saved: write it to the store.

        Raises:
            OptimizerError: If ``state_dict`` is no state, or belongs to another optimizer or other settings.
            ValueError: If ``state_dict`` has other parameter groups.
            StoreError: If the store could not be written.
        """
        given: object = state_dict
        if not isinstance(given, Mapping) or "param_groups" not in given:
            raise OptimizerError(f"{reprlib.repr(given)} is no state_dict() of an optimizer")
        before = {"param_groups": [dict(group) for group in self.param_groups], "state": self.state}
        try:
            states = {
                parameter: {name: local_part(value) for name, value in state.items()}
                for parameter, state in load_uncast(self, state_dict).items()
            }
            for parameter, place in self._places.items():
                if not place.form.may_load(saved := states.get(parameter, {})):
                    self._refuse_state(place, saved)
            for parameter, place in self._places.items():
                settings = settings_of(state_dict["param_groups"][place.group])
                self._load(parameter, place, settings, states.get(parameter, {}))
        except OptimizerError:
            self.__setstate__(before)
            raise

    def _load(self, parameter: Tensor, place: _Place, settings: Mapping[str, Any], saved: State) -> None:
        """Write the ``saved`` state of ``parameter`` to the store, except tensors that are mapped from there."""
        form = place.form
        record = torch.zeros(form.stored[RECORD].shape, dtype=torch.uint8, device="cpu")
        written = {RECORD: record}
        if saved:
            weights = local_part(parameter)
            nowhere = torch.zeros((), dtype=weights.dtype, device=weights.device).expand(weights.shape)
            new_state = self._steppers[place.group].load(Parameter(nowhere), settings, saved)
            if not form.fits(new_state):
                self._refuse_state(place, new_state)
            self.state[parameter] = {name: deepcopy(new_state[name]) for name in form.values}
            form.write_record(record, new_state)
            stored, place_of = self.mapped_state(parameter), self.store.place_of
            written |= {
                name: new_state[name] for name in form.tensors if place_of(saved[name]) != place_of(stored[name])
            }
        for name, value in written.items():
            self.store.tensors["state"].write(f"{place.name}/{name}", value)
        self._run.memory.forget("state", [it for it in self._run.layers.pieces if place.name in it.weights])

    def mapped_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state tensors of ``parameter``, and the record of its small values, mapped from the store."""
        self._run.memory.wait()
        place, state = self._places[parameter], self.store.tensors["state"]
        return {name: state.mapped(f"{place.name}/{name}") for name in place.form.stored}

    @property
    def store(self) -> Any:
        """The store: the file or memory that has the phased model's weights and this optimizer's state."""
        return self._run.store

    def __reduce__(self) -> Any:
        raise OptimizerError(
            "a PhasedOptimizer cannot be copied or pickled: its state lies in the store of its model. Take its "
            "state_dict(), or popdist.checkpoint.save()"
        )

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether the optimizer, and not torch's GradScaler, divides gradients by the scale and skips steps."""
        return any(torch_private.divides_gradients(it.optimizer) for it in self._steppers)

    def _whole_state(self, parameter: Tensor) -> State:
        """Return the optimizer's state of ``parameter`` from the store; empty before the first update."""
        form, stored = self._places[parameter].form, self.mapped_state(parameter)
        values = form.read_record(stored[RECORD])
        if values is None:
            return {}
        return {
            name: values[name] if name in values else placed_as(parameter, stored[name]) for name in form.names
        }

    def _refuse_state(self, place: _Place, state: State) -> NoReturn:
        """Raise OptimizerError: the names or tensors of ``state`` are not those for which the store has room."""
        raise OptimizerError(
            f"{self._optimizer_class.__name__} has {_in_words(state)} for {place.name}, and the store has room "
            f"for {_in_words(dict.fromkeys(place.form.names))}, as PhasedOptimizer was made with other settings: "
            "make it with those that it is to have"
        )


def _in_words(state: State) -> str:
    return (
        ", ".join(
            f"{name} {tuple(value.shape)}" if isinstance(value, Tensor) and value.numel() > 1 else name
            for name, value in state.items()
        )
        or "no state"
    )


def _form_of_state(stepper: OneByOne, form: TensorForm, device: torch.device) -> _StateForm:
    """Return the layout of the state that the optimizer's first step makes for a parameter of layout ``form``."""
    weights, gradient = (
        form.view(torch.zeros(form.num_bytes, dtype=torch.uint8, device=device)) for _ in range(2)
    )
    parameter = Parameter(weights)
    parameter.grad = gradient
    return _StateForm.of(stepper.first_state(parameter), device)
