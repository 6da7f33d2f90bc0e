"""Passes of a phased model on this instance: which weights come when, and where the optimizer's state lies."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol, TypeAlias

from torch import Tensor
from torch.nn import Parameter

from popdist.errors import OptimizerError
from popdist.exchange.groups import Group
from popdist.ground.layout import ReplicaLayout
from popdist.ground.local_tensors import TensorForm
from popdist.phases.phase_budget import PhaseBudget
from popdist.phases.phase_memory import MemoryPlace, PhaseMemory, Wanted
from popdist.phases.phase_store import PhaseStore
from popdist.phases.phased_layers import CallCounts, PhasedLayers, PhasePiece, Unit, is_written, written_error
from popdist.phases.phased_sums import InstanceSums
from popsize.phases import even_cuts

if TYPE_CHECKING:
    from popdist.phases.phased_optimizer import PhasedOptimizer

Update: TypeAlias = Callable[[Parameter, Tensor, Mapping[str, Tensor]], None]
"""Updates a parameter by its gradient, with the memory of the optimizer's state for it."""


class StepGradientUse(Protocol):
    """How one step uses its gradients in the backward pass."""

    def wanted_back(self, piece: PhasePiece) -> Wanted:
        """Return what a backward pass, or one of updates, needs of ``piece`` beside its weights."""

    def use_complete(self, pieces: Iterable[PhasePiece]) -> None:
        """Use the gradients of ``pieces``, which are complete in the micro batch that runs."""


class PhasedRun:
    """The passes of one model, of which one step at a time is trained.

    Attributes:
        names: The name of each weight, by its identity.
        owned: The names of the weights that this instance updates.
        optimizer: The model's optimizer, if there was one.
        gradients: Those of the step that runs or ran last.
        order: The indices of the units, as the first forward pass called them here.
        agreed_order: The same of the first instance that has called units; None before the first step.
    """

    def __init__(self, layers: PhasedLayers, store: PhaseStore, group: Group, layout: ReplicaLayout) -> None:
        self.layers = layers
        self.store = store
        self.memory = PhaseMemory(layers, store.device, self._wanted_back)
        self.names = {id(it): name for piece in layers.pieces for name, it in piece.named}
        sizes = [{name: store.weights.regions[name].num_bytes for name in it.names} for it in layers.pieces]
        owners = deal(sizes, store.host_size)
        self.owned = {name for name, owner in owners.items() if owner == store.host_index}
        self.budget = PhaseBudget(self.memory, self.owned, is_first=group.backend.instance_index == 0)
        self.optimizer: weakref.ref[PhasedOptimizer] | None = None
        self.order: list[int] = []
        self.agreed_order: list[int] | None = None
        self.calls = CallCounts()
        self.sums = InstanceSums(group, layout)
        self.gradients: StepGradientUse | None = None
        for piece in layers.pieces:
            self.memory.addresses[MemoryPlace("weights", piece.index)] = [store.weights.part(piece.names)]

    def _wanted_back(self, piece: PhasePiece) -> Wanted:
        return {} if self.gradients is None else self.gradients.wanted_back(piece)

    def cut(self, num_phases: int) -> None:
        """Have so many phases of about equal bytes, or as many as there are layers."""
        sizes = [
            float(sum(self.memory.size("weights", piece.index) for piece in unit.pieces))
            for unit in self.layers.units
        ]
        cuts = even_cuts(tuple(sizes), min(num_phases, len(sizes)))
        self.memory.cut([range(first, last) for first, last in pairwise((*cuts, len(sizes)))])

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
        self.memory.enter(self.memory.phase_of(unit.index), backward=backward, will_return=returns)

    def end_call(self, unit: Unit, cache: object) -> None:
        """Use the gradients that are complete now."""
        complete = self.calls.end(unit, cache)
        if self.gradients is not None:
            self.gradients.use_complete(complete)

    def check_unwritten(self) -> None:
        """Check that nobody but the optimizer has written weights."""
        written = [name for piece in self.layers.pieces for name, it in piece.named if is_written(it)]
        if written:
            self.memory.forget("weights", self.layers.pieces)
            raise written_error(written[0])

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
            self.memory.addresses[MemoryPlace("state", index)] = [stored.part(names)]
        self.optimizer = weakref.ref(optimizer)
        self.memory.place_anew()

    def form_of(self, parameter: Parameter) -> TensorForm:
        """Return the form of a weight, or of this instance's part of the weight."""
        return self.store.weights.forms[self.names[id(parameter)]]

    def stored_state(self, parameter: Parameter) -> dict[str, Tensor]:
        """Return the tensors of the optimizer's state for ``parameter`` that are in the store."""
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
        """Read all weights anew, because the weights in the store have changed, and mark the store as whole."""
        self.store.end_step()
        self.memory.forget("weights", self.layers.pieces)


def deal(units: Sequence[Mapping[str, int]], num_instances: int) -> dict[str, int]:
    """Give each parameter to one of a host's instances; within each unit they get about as many bytes.

    A unit maps the names of its parameters to their bytes. The largest ones are dealt first, each to the instance
    that has least: of this unit, then of all, then the first.
    """
    owners: dict[str, int] = {}
    in_all = [0] * num_instances
    for unit in units:
        in_unit = [0] * num_instances
        for name in sorted(unit, key=lambda name: -unit[name]):
            if name in owners:  # tied with a parameter of an earlier unit
                continue
            owner = min(range(num_instances), key=lambda index: (in_unit[index], in_all[index], index))
            owners[name] = owner
            in_unit[owner] += unit[name]
            in_all[owner] += unit[name]
    return owners
