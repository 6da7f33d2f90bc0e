"""The optimizer of a model: the program's, with the settings that it had at the last ``setOptimizer``."""

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter

import popdist
from poptorch._logging import logger
from poptorch.enums import ConnectionType
from poptorch.errors import Error
from poptorch.optim.automatic_scaling import AutomaticScaling
from poptorch.optim.group_stepper import GroupStepper
from poptorch.optim.optimizer_kinds import SGD_KIND, OptimizerKind, kind_of
from poptorch.optim.optimizer_values import OptimizerValues, is_subclass, values_of
from poptorch.optim.optimizers import Optimizer
from poptorch.options import Options

_EPSILON: Final = 1e-6  # what torch adds to a norm that it divides by

_FACTOR: Final = "lossScaleUpdateFactor"


def accept_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Check that a model can train with ``optimizer``; warn if the code of its class does not run."""
    kind = kind_of(optimizer)
    if is_subclass(optimizer):
        logger.warning(
            "Poptorch does not run Python optimizer code directly: a %s trains as %s, whose settings it has",
            type(optimizer).__name__,
            kind.name,
        )


class ModelOptimizer:
    """Updates a model's parameters as the program's optimizer would, with its values at the last ``update``."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,  # the program's. Its parameters that are not of the model are left alone
        parameters: Mapping[str, Parameter],  # of the model, by name
        options: Options,  # the executor's
        # whose parameters these are. With it, the state is dealt to the instances where the options ask for
        # replicated tensor sharding
        model: popdist.ReplicatedModel | None = None,
        # within it the parameters lie on the device where the steps are made; None where they always do
        placed: AbstractContextManager[object] | None = None,
    ) -> None:
        self._placed = placed or nullcontext()
        self._options = options
        self._optimizer = optimizer
        self._values = values_of(optimizer)
        self._attributes = _attributes_of(optimizer)
        names = {parameter: name for name, parameter in parameters.items()}
        groups = [{names[it]: it for it in group["params"] if it in names} for group in optimizer.param_groups]
        self._group_names = [list(group) for group in groups]
        self._parameters = [it for group in groups for it in group.values()]
        location = options.TensorLocations.location_optimizer
        if not location.get("useReplicatedTensorSharding") or popdist.num_instances() == 1:
            model = None  # each instance keeps the whole state
        kind, types = self._values.kind, self._values.moment_types
        self._steppers = [
            GroupStepper(index, kind, optimizer.param_groups[index], types, group, options, model)
            for index, group in enumerate(groups)
            if group
        ]
        self._automatic = AutomaticScaling() if options.Training.auto_loss_scaling else None
        self._seen_step: object = None
        self.has_news = True  # whether there was a step since the state was read
        for line in self._values.lines():
            logger.debug(line)
        if model is not None:
            popdist.before_execute_on_instances(self._have_state_read)
        self._serve(optimizer)
        self.load_held_state()

    @property
    def loss_scaling(self) -> float:
        """The number that the loss is multiplied by in the next step."""
        factor = 1.0 if self._automatic is None else self._automatic.factor
        return self._values.graph["lossScaling"].number * factor

    def step(self) -> None:
        """Update the parameters by the gradients of the scaled loss; automatic scaling skips infinite ones."""
        self.has_news = True
        scaling, given = self.loss_scaling, self._values.graph["lossScaling"].number
        if self._automatic is None or self._automatic.follow(self._gradients(), given):
            self._unscale(scaling)
            for stepper in self._steppers:
                stepper.step()
        if vars(self._optimizer).get("step") is not self._seen_step:
            self._show_step_to_schedulers()

    def _gradients(self) -> list[Tensor]:
        return [it.grad for it in self._parameters if it.grad is not None]

    @torch.no_grad()
    def _unscale(self, scaling: float) -> None:
        """Divide the gradients by the loss scaling, and limit the norm over all parameters."""
        limit = self._values.graph["maxGradNorm"].number
        factor: float | Tensor | None = None if scaling == 1 else 1 / scaling
        if math.isfinite(limit) and (gradients := self._gradients()):
            norms = [torch.linalg.vector_norm(it, dtype=torch.float32) for it in gradients]
            total = torch.linalg.vector_norm(torch.stack(norms)) / scaling
            factor = torch.clamp(limit / (total + _EPSILON), max=1.0) / scaling
        for stepper in self._steppers:
            stepper.scale_gradients(factor)

    def _show_step_to_schedulers(self) -> None:
        """Call, without gradients, the ``step`` that a scheduler put there: it warns of a missing one."""
        self._seen_step = vars(self._optimizer).get("step")
        if is_subclass(self._optimizer):
            return
        gradients = [(it, it.grad) for it in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        self._optimizer.step()
        for parameter, gradient in gradients:
            parameter.grad = gradient

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Use the values of ``optimizer`` from now on; the state stays."""
        self._check(optimizer)
        self._warn_of_others(optimizer)
        if optimizer is not self._optimizer:  # another object of its class
            if isinstance(self._optimizer, Optimizer):
                self._optimizer.read_state_from(None)
            self._serve(optimizer)
            self.has_news = True
            if isinstance(optimizer, Optimizer):
                self.write_state(optimizer.held_state)
        self._use_values(optimizer)

    def read_state(self) -> dict[str, dict[str, Tensor]]:
        """``ipu_state``, what the optimizer keeps for parameters, and ``ipu_param``, its values; on the CPU."""
        logger.debug("Writing optimiser state tensors from IPU to host.")
        self.has_news = False
        state = {name: value for stepper in self._steppers for name, value in stepper.read().items()}
        if self._automatic is not None:
            state[_FACTOR] = torch.tensor(self._automatic.factor, dtype=torch.float32, device="cpu")
        return {"ipu_state": state, "ipu_param": self._values_by_parameter()}

    def write_state(self, state: Mapping[str, Mapping[str, Tensor] | None]) -> None:
        """Go on from what ``read_state`` gave; what is missing in it stays as it is."""
        if given := state.get("ipu_state"):
            logger.debug("Writing optimiser state tensors from host to IPU memory.")
            with self._placed:
                for stepper in self._steppers:
                    stepper.write(given)
            if self._automatic is not None and _FACTOR in given:
                self._automatic.factor = float(given[_FACTOR])

    def load_held_state(self) -> None:
        """Go on from the state that the program loaded into its optimizer, and from its settings."""
        if isinstance(self._optimizer, Optimizer):
            self.write_state(self._optimizer.held_state)
            self._use_values(self._optimizer)

    def release(self) -> None:
        """Give the state to the program's optimizer: the model is destroyed."""
        if isinstance(self._optimizer, Optimizer):
            self._optimizer.read_device()
            self._optimizer.read_state_from(None)

    def _have_state_read(self) -> None:
        """Read the whole state while all instances do, which one alone cannot: a program may save it on one."""
        if isinstance(self._optimizer, Optimizer):
            self._optimizer.read_device()

    def _serve(self, optimizer: torch.optim.Optimizer) -> None:
        """From now on ``optimizer`` reads its state from here."""
        self._optimizer = optimizer
        if isinstance(optimizer, Optimizer) and self._options.connection_type is not ConnectionType.Never:
            optimizer.read_state_from(self)

    def _use_values(self, optimizer: torch.optim.Optimizer) -> None:
        values = values_of(optimizer)
        for before, after in zip(self._values.lines(), values.lines(), strict=True):
            if before != after:
                logger.debug(after)
        if values != self._values:
            self.has_news = True
        self._values = values
        with self._placed:
            for stepper in self._steppers:
                stepper.set(optimizer.param_groups[stepper.group])

    def _check(self, optimizer: torch.optim.Optimizer) -> None:
        values = values_of(optimizer)
        if values.kind != self._values.kind or len(values.groups) != len(self._values.groups):
            raise Error(
                f"the model is compiled with {self._values.kind.name} and {len(self._values.groups)} groups of "
                f"parameters, and setOptimizer was given {values.kind.name} and {len(values.groups)}: call "
                "destroy() first"
            )
        _check_constants(self._values, values)

    def _warn_of_others(self, optimizer: torch.optim.Optimizer) -> None:
        log = logger.debug if self._options.relax_optimizer_checks else logger.warning
        for owner, names in _attributes_of(optimizer).items():
            if new := sorted(names - self._attributes[owner]):
                self._attributes[owner] |= names
                log("Ignoring unexpected %s attribute in %s optimizer: %s", owner, type(optimizer).__name__, new)

    def _values_by_parameter(self) -> dict[str, Tensor]:
        named: dict[str, float] = {"lossScaling_FLOAT": self._values.graph["lossScaling"].number}
        for group, names in zip(self._values.groups, self._group_names, strict=True):
            for name in names:
                named |= _values_of_parameter(self._values.kind, group, name, named["lossScaling_FLOAT"])
        return {name: torch.tensor(number, dtype=torch.float32, device="cpu") for name, number in named.items()}


def _values_of_parameter(
    kind: OptimizerKind, group: Mapping[str, Any], name: str, scaling: float
) -> dict[str, float]:
    numbers = {key: value.number for key, value in group.items()}
    if kind is not SGD_KIND:
        return {f"{key}___specific___{name}": number for key, number in numbers.items()}
    rate = numbers["learningRate"] * (1 - numbers["dampening"])
    return {
        f"scaledLearningRate0___specific___{name}": rate / scaling,
        f"weightDecayScaleFactor0___specific___{name}": 1 - rate * numbers["weightDecay"],
    }


def _attributes_of(optimizer: torch.optim.Optimizer) -> dict[str, set[str]]:
    """The public attributes of an optimizer, but for methods that a scheduler puts there, and of each group."""
    settings = {name for name, value in vars(optimizer).items() if not (name.startswith("_") or callable(value))}
    found = {"optimizer": settings}
    return found | {f"group {i}": set(group) for i, group in enumerate(optimizer.param_groups)}


def _check_constants(before: OptimizerValues, after: OptimizerValues) -> None:
    pairs = [(before.graph, after.graph), *zip(before.groups, after.groups, strict=True)]
    for old, new in pairs:
        for name in old.keys() & new.keys():
            is_used = not name.startswith("default")
            if is_used and old[name].is_constant and old[name].number != new[name].number:
                raise Error(
                    f"{name} is constant, {old[name].number:g}, and setOptimizer was given {new[name].number:g}: "
                    "give it to the optimizer's constructor, or call optimizer.variable_attrs.markAsVariable "
                    "before the model is compiled"
                )
