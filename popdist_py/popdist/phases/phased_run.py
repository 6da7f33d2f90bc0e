"""Passes of a phased model on one instance: which weights are read when, and where the optimizer's state lies."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from popdist.errors import OptimizerError, WeightsError
from popdist.exchange.groups import Group
from popdist.ground.layout import ReplicaLayout
from popdist.phases.phase_budget import PhaseBudget
from popdist.phases.phase_memory import MemoryPlace, PhaseMemory
from popdist.phases.phase_store import PhaseStore
from popdist.phases.phased_layers import CallCounts, PhasedLayers, PhasePiece, Unit, is_written
from popdist.phases.phased_sums import InstanceSums
from popsize.phases import even_cuts

if TYPE_CHECKING:
    from popdist.phases.phased_optimizer import PhasedOptimizer


class PhasedRun:
    """The parts that one phased model's passes share: layers, memory, store, gradients and optimizer.

    Attributes:
        names: The name of each weight, by the ``id()`` of its parameter.
        owned: The names of the weights that this instance updates.
        optimizer: A weak reference to the model's optimizer; None before there was an optimizer.
        use_complete: Uses gradients that a backward pass has completed; the last begun step has set this function.
        order: The indices of the layers, in the order in which this instance's first forward pass called them.
        agreed_order: The order of the first instance that has called layers; None before the first step.
    """

    def __init__(self, layers: PhasedLayers, store: PhaseStore, group: Group, layout: ReplicaLayout) -> None:
        self.layers = layers
        self.store = store
        self.memory = PhaseMemory(layers, store.device)
        self.names = {id(it): name for name, it in layers.weights.items()}
        sizes = [{name: store.weights.regions[name].num_bytes for name in it.weights} for it in layers.pieces]
        owners = deal(sizes, store.host_size)
        self.owned = {name for name, owner in owners.items() if owner == store.host_index}
        self.budget = PhaseBudget(self.memory, self.owned, is_first=group.backend.instance_index == 0)
        self.optimizer: weakref.ref[PhasedOptimizer] | None = None
        self.order: list[int] = []
        self.agreed_order: list[int] | None = None
        self.calls = CallCounts()
        self.sums = InstanceSums(group, layout)
        self.use_complete: Callable[[Iterable[PhasePiece]], None] = lambda _: None
        for piece in layers.pieces:
            self.memory.addresses[MemoryPlace("weights", piece.index)] = [store.weights.part(piece.weights)]

    def cut(self, num_phases: int) -> None:
        """Divide the layers into ``num_phases`` groups of about equal bytes, at most one group per layer."""
        sizes = [
            float(sum(self.memory.size("weights", piece.index) for piece in unit.pieces))
            for unit in self.layers.units
        ]
        self.memory.cut(range(len(sizes)), even_cuts(tuple(sizes), min(num_phases, len(sizes))))

    @contextmanager
    def running(self, unit: Unit, *, backward: bool) -> Iterator[None]:
        """A context in which the layer ``unit`` computes, with its weights in memory."""
        if unit.index not in self.order:
            self.order.append(unit.index)
        self.bring(unit, backward=backward)
        with self.budget.passes(unit, backward=backward):
            yield

    def bring(self, unit: Unit, *, backward: bool = False) -> None:
        """Read the weights of the layer ``unit`` into memory; they stay until other layers need the memory."""
        self.store.check_open()
        phase = next(it for it in self.memory.phases if unit.index in it.units)
        self.memory.enter(phase, backward=backward, will_return=self.calls.micro_batch is not None)

    def check_unwritten(self) -> None:
        """Check that the optimizer alone has written weights. Raise WeightsError if the program wrote weights."""
        if written := [name for name, it in self.layers.weights.items() if is_written(it)]:
            self.memory.forget("weights", self.layers.pieces)
            raise WeightsError(
                f"{written[0]} was written in place, as by torch.nn.init, copy_() or .data, and the write is "
                "lost: the weights of a phased model lie in its store. Change them before phased(), by "
                "load_state_dict() or by the optimizer"
            )

    def optimizer_now(self) -> "PhasedOptimizer":
        """Return the optimizer of the model. Raise OptimizerError if there is none."""
        optimizer = None if self.optimizer is None else self.optimizer()
        if optimizer is None:
            raise OptimizerError(
                "a phased model is trained by a popdist.parallel.PhasedOptimizer(model, ...), which updates "
                "weights while they are in memory: make it before the loop, and keep it"
            )
        return optimizer

    def attach_optimizer(self, optimizer: "PhasedOptimizer") -> None:
        """Make room in the store and in memory for the state of ``optimizer``; all instances make this call."""
        self.store.check_open()
        if self.optimizer is not None and self.optimizer() is not None:
            raise OptimizerError("this model has a PhasedOptimizer already: give one optimizer all groups")
        self.memory.wait()
        forms_of = {name: optimizer.forms_of(parameter) for name, parameter in self.layers.weights.items()}
        stored = self.store.add(
            "state", {f"{name}/{key}": form for name, forms in forms_of.items() for key, form in forms.items()}
        )
        for piece in self.layers.pieces:
            owned = [f"{name}/{key}" for name in piece.weights if name in self.owned for key in forms_of[name]]
            self.memory.addresses[MemoryPlace("state", piece.index)] = [stored.part(owned)]
        self.optimizer = weakref.ref(optimizer)
        self.memory.place_anew()


def deal(pieces: Sequence[Mapping[str, int]], num_instances: int) -> dict[str, int]:
    """Return a dict from each parameter's name to the index of the host's instance that updates the parameter;
    all instances have about equal bytes of each piece (weights that the same layers use).

    Each of ``pieces`` maps names of parameters, which no other piece has, to bytes. The largest parameter is dealt
    first, to the instance that has least bytes of this piece; if instances are equal, least bytes of all, then to
    the first.
    """
    owners: dict[str, int] = {}
    in_all = [0] * num_instances
    for piece in pieces:
        in_piece = [0] * num_instances
        for name in sorted(piece, key=lambda name: -piece[name]):
            owner = min(range(num_instances), key=lambda index: (in_piece[index], in_all[index], index))
            owners[name] = owner
            in_piece[owner] += piece[name]
            in_all[owner] += piece[name]
    return owners
