"""Passes of a phased model on this instance: which weights come when, and where the optimizer's state lies."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol, TypeAlias

from torch import Tensor, nn
from torch.nn import Parameter

from popdist.errors import BatchError, GradientError, MicroBatchError, OptimizerError
from popdist.gradients.optimizer_steps import is_used
from popdist.groups import Group
from popdist.layout import ReplicaLayout
from popdist.local_tensors import TensorForm, part_itself
from popdist.phases.phase_budget import PhaseBudget
from popdist.phases.phase_layout import deal
from popdist.phases.phase_memory import Address, PhaseMemory
from popdist.phases.phase_store import PhaseStore
from popdist.phases.phased_calls import check_same
from popdist.phases.phased_layers import CallCounts, PhasedLayers, PhasePiece, Unit, is_written, written_error
from popdist.phases.phased_sums import InstanceSums
from popsize.phases import even_cuts

if TYPE_CHECKING:
    from popdist.phases.phased_optimizer import PhasedOptimizer

Update: TypeAlias = Callable[[Parameter, Tensor, Mapping[str, Tensor]], None]
"""Updates a parameter by its gradient, with the memory of the optimizer's state for it."""


class RunningStep(Protocol):
    """A step of the model, until its optimizer's step."""

    is_open: bool  # whether its loop over micro batches runs
    trained: list[PhasePiece]

    def end_call(self, pieces: Iterable[PhasePiece]) -> None:
        """Take the gradients of ``pieces``, which are complete in this micro batch."""

    def update_phases(self, update: Update) -> None:
        """Update all weights whose gradients are in the store, phase by phase."""


class PhasedRun:
    """The passes of one model, of which one step at a time is trained.

    Attributes:
        names: The name of each weight, by its identity.
        owned: The names of the weights that this instance updates.
        optimizer: The model's optimizer, if there was one.
        step: The step that runs, or that the optimizer's step has not followed yet.
        order: The indices of the units, as the first forward pass called them here.
        agreed_order: The same of the first instance that has called units; None before the first step.
    """

    def __init__(self, layers: PhasedLayers, store: PhaseStore, group: Group, layout: ReplicaLayout) -> None:
        self.layers = layers
        self.store = store
        self.memory = PhaseMemory(layers, part_itself(layers.pieces[0].parameters[0]).device)
        self.device = self.memory.device
        self.names = {id(it): name for piece in layers.pieces for name, it in piece.named}
        sizes = [{name: store.weights.regions[name].num_bytes for name in it.names} for it in layers.pieces]
        owners = deal(sizes, store.host_size)
        self.owned = {name for name, owner in owners.items() if owner == store.host_index}
        self.budget = PhaseBudget(self.memory, self.owned, is_first=group.backend.instance_index == 0)
        self.optimizer: weakref.ref[PhasedOptimizer] | None = None
        self.step: RunningStep | None = None
        self.order: list[int] = []
        self.agreed_order: list[int] | None = None
        self.calls = CallCounts()
        self.sums = InstanceSums(group, layout)
        for piece in layers.pieces:
            address = Address.of(("weights", piece.index), store.weights, piece.names)
            self.memory.addresses[address.place] = [address]

    def cut(self, num_phases: int) -> None:
        """Have so many phases of about equal bytes, or as many as there are layers."""
        sizes = [
            float(sum(self.memory.size("weights", piece.index) for piece in unit.pieces))
            for unit in self.layers.units
        ]
        cuts = even_cuts(tuple(sizes), min(num_phases, len(sizes)))
        self.memory.cut([range(first, last) for first, last in pairwise((*cuts, len(sizes)))])

    # What the layers call

    @contextmanager
    def running(self, unit: Unit, *, backward: bool) -> Iterator[None]:
        """Return a context in which the weights of ``unit`` are in memory."""
        if unit.index not in self.order:
            self.order.append(unit.index)
        self.bring(unit, backward=backward)
        with self.budget.passes(unit, backward=backward):
            yield

    def bring(self, unit: Unit, *, backward: bool = False) -> None:
        """Have the weights of ``unit`` in memory until another unit needs its place."""
        self.store.check_open()
        returns = self.calls.micro_batch is not None
        self.memory.enter(self.memory.phase_of[unit.index], backward=backward, will_return=returns)

    def end_call(self, unit: Unit, cache: object) -> None:
        """Take the gradients that are complete now."""
        complete = self.calls.end(unit, cache)
        if self.step is not None:
            self.step.end_call(complete)

    # Checks

    @property
    def is_unfinished(self) -> bool:
        """Whether a loop has ended, and the optimizer's step has not."""
        return self.step is not None and not self.step.is_open

    def check_ready(self, module: nn.Module) -> None:
        """Check that a step of ``module`` may begin."""
        self.check_same(module)
        optimizer = self.optimizer_now()
        left = [it for piece in self.layers.pieces for it in piece.parameters if it.grad is not None]
        if self.is_unfinished and (optimizer.step_in_backward or not all(is_used(it.grad) for it in left)):
            leave_out = "" if optimizer.step_in_backward else ", or optimizer.zero_grad() to leave out a step"
            raise GradientError(
                "a loop over micro batches has ended, and optimizer.step() was not called before the next one: "
                f"call it after each loop, as it waits until all weights are written{leave_out}"
            )
        self.store.check_whole()
        for parameter in left:
            parameter.grad = None

    def check_same(self, module: nn.Module) -> None:
        """Check that ``module`` has the parameters and layers that it had."""
        check_same(module, self.layers, self.store.weights.forms)
        self.check_unwritten()

    def check_unwritten(self) -> None:
        """Check that nobody but the optimizer has written weights."""
        written = [name for piece in self.layers.pieces for name, it in piece.named if is_written(it)]
        if written:
            self.memory.forget("weights", self.layers.pieces)
            raise written_error(written[0])

    def check_forward(self) -> None:
        """Check that all weights are those of one step."""
        if self.store.is_torn and self.step is not None:
            raise BatchError(
                "a forward pass of a phased model after the backward pass of a step's last micro batch, which "
                "updates weights: call optimizer.step() behind the loop, and evaluate then"
            )
        self.store.check_whole()
        self.check_unwritten()

    # The optimizer

    def optimizer_now(self) -> "PhasedOptimizer":
        """Return the optimizer; an OptimizerError if there is none."""
        optimizer = None if self.optimizer is None else self.optimizer()
        if optimizer is None:
            raise OptimizerError(
                "a phased model is trained by a popdist.parallel.PhasedOptimizer(model, ...), which updates "
                "weights while they are in memory: make it before the loop, and keep it"
            )
        return optimizer

    def attach_optimizer(self, optimizer: "PhasedOptimizer") -> None:
        """Make room for the state of ``optimizer``; all instances call it."""
        self.store.check_open()
        if self.optimizer is not None and self.optimizer() is not None:
            raise OptimizerError("this model has a PhasedOptimizer already: give one optimizer all groups")
        self.memory.wait()
        forms, own = dict[str, TensorForm](), dict[int, list[str]]()
        for piece in self.layers.pieces:
            own[piece.index] = []
            for name, parameter in piece.named:
                found = {f"{name}/{key}": form for key, form in optimizer.forms_of(parameter).items()}
                forms |= found
                own[piece.index] += found if name in self.owned else ()
        stored = self.store.add("state", forms)
        for index, names in own.items():
            address = Address.of(("state", index), stored, names)
            self.memory.addresses[address.place] = [address]
        self.optimizer = weakref.ref(optimizer)
        self.memory.cut(self.memory.phases)

    def finish_step(self, update: Update | None = None) -> None:
        """End the optimizer's step: wait until all instances have written all weights.

        ``update`` updates those whose gradients are in the store.
        """
        self.store.check_open()
        if self.step is None or self.step.is_open:
            raise MicroBatchError(
                "optimizer.step() without a gradient: no loop over model.micro_batches(batch) has ended since the "
                "last call"
            )
        step, self.step = self.step, None  # whatever fails from here on: no second step on changed weights
        if update is not None:
            step.update_phases(update)
        self.memory.begin_writing()
        self.store.end_step(self.memory.wait)
        if self.store.host_size > 1:
            self.memory.forget("weights", [it for it in step.trained if not self.owned.issuperset(it.names)])
        self.memory.end_step()
        self.budget.end_step(self.order)

    def form_of(self, parameter: Parameter) -> TensorForm:
        """The form of a weight, or of the part of it that is here."""
        return self.store.weights.forms[self.names[id(parameter)]]

    def stored_state(self, parameter: Parameter) -> dict[str, Tensor]:
        """What the store has of the optimizer's state for ``parameter``."""
        self.memory.wait()
        name, state = self.names[id(parameter)], self.store.tensors["state"]
        return {key: state.mapped(f"{name}/{key}") for key in self.optimizer_now().forms_of(parameter)}

    def write_state(self, parameter: Parameter, written: Mapping[str, Tensor]) -> None:
        """Write tensors of the optimizer's state for ``parameter`` to the store."""
        name, state = self.names[id(parameter)], self.store.tensors["state"]
        for key, value in written.items():
            state.write(f"{name}/{key}", value)
        self.memory.forget("state", [it for it in self.layers.pieces if name in it.names])

    def reload(self) -> None:
        """Read all weights anew, as what is in the store was changed, and is whole."""
        self.store.end_step()
        self.memory.forget("weights", self.layers.pieces)
