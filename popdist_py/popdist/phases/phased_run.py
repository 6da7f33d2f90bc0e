"""Passes and updates of a phased model on this instance: which weights come when, and what becomes of gradients.

In the last micro batch of a step a gradient is added over all replicas, and its weights are updated, as soon as no
layer adds to it any more; all instances do so in one order.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from popdist.collectives import gather_json
from popdist.errors import (
    BatchError,
    CollectiveError,
    GradientError,
    MicroBatchError,
    OptimizerError,
)
from popdist.gradients.optimizer_steps import is_used, mark_reduced
from popdist.gradients.stored_gradients import stored_gradient, updated_gradient
from popdist.groups import Group, as_words
from popdist.layout import ReplicaLayout
from popdist.local_tensors import TensorForm, local_part, part_itself, placed_as
from popdist.phases.phase_budget import PhaseBudget
from popdist.phases.phase_layout import deal
from popdist.phases.phase_memory import Content, PhaseMemory, Ranges, StoredPieces, StoredSums
from popdist.phases.phase_store import PhaseStore, StoredTensors
from popdist.phases.phased_calls import check_same
from popdist.phases.phased_layers import (
    CallCounts,
    PhasedLayers,
    PhasePiece,
    Unit,
    is_written,
    set_data,
    writing,
    written_error,
)
from popdist.phases.phased_sums import (
    InstanceSums,
    PieceGradient,
    RunningStep,
    StepSums,
    merges_of,
    node_weights,
)
from popsize.phases import even_cuts

if TYPE_CHECKING:
    from popdist.phases.phased_optimizer import PhasedOptimizer

Update: TypeAlias = Callable[[Parameter, Tensor, Mapping[str, Tensor]], None]
"""Updates a parameter by its gradient, with the memory of the optimizer's state for it."""


class PhasedRun:
    """The passes of one model, of which one step at a time is trained."""

    def __init__(self, layers: PhasedLayers, store: PhaseStore, group: Group, layout: ReplicaLayout) -> None:
        self.layers = layers
        self.store = store
        self.device = part_itself(layers.pieces[0].parameters[0]).device
        self.memory = PhaseMemory(layers, self.device, self._bind, self._wanted_back)
        self.names = {id(it): name for piece in layers.pieces for name, it in piece.named}
        sizes = [{name: store.weights.regions[name].num_bytes for name in it.names} for it in layers.pieces]
        owners = deal(sizes, store.host_size)
        self.owned = {name for name, owner in owners.items() if owner == store.host_index}
        self.budget = PhaseBudget(self.memory, self.owned, is_first=group.backend.instance_index == 0)
        self.optimizer: weakref.ref[PhasedOptimizer] | None = None
        self.step: RunningStep | None = None
        self.is_unfinished = False  # whether a loop has ended, and the optimizer's step has not
        self._group = group
        self._layout = layout
        self._order: list[int] = []  # units, as the first forward pass called them
        self._agreed_order: list[int] | None = None
        self._final_order: list[PhasePiece] = []
        self.calls = CallCounts()
        self._complete: set[int] = set()
        self._num_final = 0
        self._trained: list[PhasePiece] = []
        self._gradients: dict[int, PieceGradient] = {}
        self._used: list[Parameter] = []
        self._sums = InstanceSums(group, layout)
        nothing = StoredTensors(file=store.weights.file, regions={}, forms={})
        self._weights = StoredPieces(
            "weights", self.memory, store.weights, {it.index: it.names for it in layers.pieces}
        )
        self._state = StoredPieces("state", self.memory, nothing, {})
        self._kept = StoredPieces("sum", self.memory, nothing, {})  # gradients, beside sums of them
        for index, num_bytes in self._weights.num_bytes.items():
            self.memory.sizes[Content("weights", index)] = num_bytes
            self.memory.stored[Content("weights", index)] = self._weights.ranges(index)

    def cut(self, num_phases: int) -> None:
        """Have so many phases of about equal bytes, or as many as there are layers."""
        sizes = [
            float(sum(self.memory.sizes[Content("weights", piece.index)] for piece in unit.pieces))
            for unit in self.layers.units
        ]
        cuts = even_cuts(tuple(sizes), min(num_phases, len(sizes)))
        self.memory.cut([range(first, last) for first, last in pairwise((*cuts, len(sizes)))])

    # What the layers call

    @contextmanager
    def running(self, unit: Unit, *, backward: bool) -> Iterator[None]:
        """Return a context in which the weights of ``unit`` are in memory."""
        if unit.index not in self._order:
            self._order.append(unit.index)
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
        for piece in self.calls.end(unit, cache):
            if piece.index in self._gradients:
                self._end_piece(piece)

    # The steps of a loop

    def check_ready(self, module: nn.Module) -> None:
        """Check that a step of ``module`` may begin."""
        self.check_same(module)
        optimizer = self._optimizer_now()
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
            self.memory.forget(Content("weights", piece.index) for piece in self.layers.pieces)
            raise written_error(written[0])

    def check_forward(self) -> None:
        """Check that all weights are those of one step."""
        if self.store.is_torn and (self.step is not None or self.is_unfinished):
            raise BatchError(
                "a forward pass of a phased model after the backward pass of a step's last micro batch, which "
                "updates weights: call optimizer.step() behind the loop, and evaluate then"
            )
        self.store.check_whole()
        self.check_unwritten()

    def begin_step(self, step: RunningStep) -> None:
        """Begin a step: gradients of the weights that are trained now."""
        self.step, self._num_final, self._complete, self._final_order = step, 0, set(), []
        self._used = []
        self._trained = [piece for piece in self.layers.pieces if piece.is_trained]
        self._gradients = {piece.index: PieceGradient(piece.named) for piece in self._trained}
        merges, num_planes = merges_of(self._layout, self._group.backend.instance_index, step.accumulation)
        self._make_room(num_planes)
        places = StoredSums(self.memory, self._kept.stored, num_planes * self.store.host_index)
        step.sums = StepSums(self._gradients, merges, step.weights, lambda: step.scale(None), places)
        self.memory.begin_step()
        self.budget.begin_step(len(step.weights), updates_apart=not self._optimizer_now().step_in_backward)

    def _make_room(self, num_planes: int) -> None:
        """Have room in the store for so many sums of each piece, and in memory for one."""
        forms = {
            f"{plane}/{index}": TensorForm(dtype=torch.uint8, shape=(gradient.num_bytes,), stride=(1,))
            for plane in range(num_planes * self.store.host_size)
            for index, gradient in self._gradients.items()
        }
        if not self._optimizer_now().step_in_backward:
            forms |= {name: self.form_of(it) for piece in self._trained for name, it in piece.named}
        known = self._kept.stored.forms
        if all(name in known and known[name].num_bytes >= form.num_bytes for name, form in forms.items()):
            return
        stored = self.store.add("gradients", forms)
        kept = {
            it.index: [name for name in it.names if name in forms and name in self.owned] for it in self._trained
        }
        self._kept = StoredPieces("sum", self.memory, stored, kept)
        for piece in self._trained:
            length = stored.regions[f"0/{piece.index}"].length if num_planes else 0
            self.memory.sizes[Content("sum", piece.index)] = max(length, self._kept.num_bytes[piece.index])
        self.memory.cut(self.memory.phases)

    def begin_micro_batch(self, number: int) -> None:
        """Begin a micro batch that has samples; those before it that were left out have none."""
        step = self._step_now()
        step.number = number
        self.calls.begin_micro_batch()
        self._complete.clear()

    def end_micro_batch(self) -> None:
        """Take what gradients there are: layers that were not called, or not passed back, add nothing more."""
        step = self._step_now()
        self.calls.end_micro_batch()
        if step.number < step.last:
            for piece in self._trained:
                if piece.index not in self._complete:
                    self._push(piece)
        self.memory.begin_writing()

    def finish(self) -> None:
        """Make all gradients final that are not yet, and end the updates."""
        optimizer = self._optimizer_now()
        self._complete = set(self._gradients)
        self._make_final()
        self.step, self.is_unfinished = None, True  # nobody waits for gradients any more
        if optimizer.step_in_backward:
            optimizer.end_update()
        else:
            self.memory.wait()
            self.store.wait_for_host()
        self._show_gradients()

    def abandon(self) -> bool:
        """Leave the step without a gradient; whether the others know, as they wait for gradients. Never raises."""
        step, self.step, self.is_unfinished = self.step, None, False
        self.calls.end_micro_batch()
        for piece in self.layers.pieces:
            for parameter in piece.parameters:
                parameter.grad = None
        return step is not None and step.barrier.abandon(step.scale)

    def _step_now(self) -> RunningStep:
        if self.step is None:
            raise MicroBatchError("this model is in no step")
        return self.step

    def _optimizer_now(self) -> "PhasedOptimizer":
        optimizer = None if self.optimizer is None else self.optimizer()
        if optimizer is None:
            raise OptimizerError(
                "a phased model is trained by a popdist.parallel.PhasedOptimizer(model, ...), which updates "
                "weights while they are in memory: make it before the loop, and keep it"
            )
        return optimizer

    def _end_piece(self, piece: PhasePiece) -> None:
        """The gradient of ``piece`` is complete in this micro batch."""
        step = self._step_now()
        self._complete.add(piece.index)
        if step.number < step.last:
            self._push(piece)
        elif piece.units:
            self._make_final()

    def _push(self, piece: PhasePiece) -> None:
        """Add the gradients of a micro batch that is not the last one to the sums that wait."""
        self.memory.enter(self.memory.last_phase(piece), backward=True)
        step = self._step_now()
        step.sums.push(piece.index, step.number, step.number + 1)

    # Gradients of the whole job

    def _make_final(self) -> None:
        """Make those gradients final that are complete, in the order that all instances have."""
        step = self._step_now()
        if not self._final_order:
            self._agree_on_order()
        while self._num_final < len(self._final_order):
            piece = self._final_order[self._num_final]
            if piece.index not in self._complete:
                return
            if not self._num_final:
                self._begin_updates()
            self.memory.enter(self.memory.last_phase(piece), backward=True)
            self._sum_over_job(piece, step)
            self._use(piece)
            self._num_final += 1

    def _agree_on_order(self) -> None:
        """Have all instances make gradients final in one order: the layers of the first forward pass backwards."""
        if self._agreed_order is None:
            self._step_now().barrier.wait_for_others()
            orders = gather_json(self._group, "phased(), the order of the layers", self._order)
            self._agreed_order = next(filter(None, orders), [])
        known = self._agreed_order
        order = [*known, *(unit.index for unit in self.layers.units if unit.index not in known)]
        place = {unit: number for number, unit in enumerate(order)}
        self._final_order = sorted(
            self._trained, key=lambda it: min((place[unit] for unit in it.units), default=-1), reverse=True
        )

    def _begin_updates(self) -> None:
        """Learn what all micro batches of the job weigh; from now on weights are updated."""
        step, optimizer = self._step_now(), self._optimizer_now()
        scale = step.scale(None)
        weights = node_weights(self._layout, self._group.backend.instance_index, step.accumulation, step.weights)
        numbers = step.barrier.wait_for_others([optimizer.settings_number, *as_words(weights)])
        if len({settings for settings, *_ in numbers}) > 1:
            raise CollectiveError(
                "the instances have optimizers with different settings, such as lr, so they would make different "
                "weights: set the same on all of them"
            )
        total = step.total_weight([words for _, *words in numbers])
        if step.reduction == "mean" and not total:
            raise BatchError("the weights of all instances' micro batches add up to 0: this step has no mean")
        step.over = total / scale if step.reduction == "mean" else 1.0
        if optimizer.step_in_backward:
            optimizer.begin_update()
            self.store.begin_step(self.store.step + 1)

    def _sum_over_job(self, piece: PhasePiece, step: RunningStep) -> None:
        """Set every ``.grad`` of ``piece`` to that of all replicas."""
        gradient = self._gradients[piece.index]
        is_lone = len(step.weights) == self._layout.num_replicas == 1
        if is_lone and (step.reduction == "mean" or step.weights[0] == 1):
            return  # one micro batch in the whole job keeps its bits
        own = step.sums.total(piece.index, step.last)
        if len(self._group.instances) > 1:
            step.barrier.wait_for_others()
            for parts in zip(*map(gradient.parts, own), strict=True):
                self._sums.add(parts)
        gradient.set_gradients(own[0], step.over)

    def _use(self, piece: PhasePiece) -> None:
        """Update the weights of ``piece`` by their gradients, or keep these in the store."""
        optimizer = self._optimizer_now()
        gradients = {it: it.grad for it in piece.parameters if it.grad is not None and optimizer.forms_of(it)}
        if optimizer.step_in_backward:
            self._update(piece, gradients, optimizer.update)
        else:
            self._keep(piece, gradients)
        self._used += gradients
        for parameter in piece.parameters:
            parameter.grad = None

    def _show_gradients(self) -> None:
        """Let each ``.grad`` stand for the one that was used: only now, as small tensors would scatter memory."""
        is_updated = self._optimizer_now().step_in_backward
        for parameter in self._used:
            name = self.names[id(parameter)]
            if is_updated:
                parameter.grad = updated_gradient(name, parameter)
            else:
                stored = stored_gradient(name, part_itself(parameter), partial(self._stored_gradient, name))
                parameter.grad = placed_as(parameter, stored)
            if parameter.grad is not None:
                mark_reduced(parameter.grad)
        self._used = []

    @torch.no_grad()
    def _update(self, piece: PhasePiece, gradients: Mapping[Parameter, Tensor], update: Update) -> None:
        """Update those weights of ``piece`` that this instance owns, and write them behind."""
        optimizer = self._optimizer_now()
        mine = [it for it in gradients if self.names[id(it)] in self.owned]
        if not mine:
            return
        state = self._state
        self.memory.make_writable(Content("weights", piece.index))
        own = [it for name, it in piece.named if name in self.owned and optimizer.forms_of(it)]
        is_new = len(mine) == len(own) and not any(map(optimizer.has_state, own))
        views = state.room(piece.index) if is_new else state.load(piece.index)
        for parameter in mine:
            name = self.names[id(parameter)]
            forms = optimizer.forms_of(parameter)
            with self.budget.updating(piece.units), writing(parameter):
                update(parameter, gradients[parameter], {key: views[f"{name}/{key}"] for key in forms})
        self._weights.write_behind(piece.index, [self.names[id(it)] for it in mine])
        state.write_behind(piece.index)

    @torch.no_grad()
    def _keep(self, piece: PhasePiece, gradients: Mapping[Parameter, Tensor]) -> None:
        """Write the gradients of ``piece`` behind."""
        parts = {self.names[id(it)]: local_part(gradient) for it, gradient in gradients.items()}
        if len(self._step_now().weights) > 1:  # what was added may lie in the memory in which it is to wait
            parts = {name: part.clone() for name, part in parts.items()}
        room = self._kept.room(piece.index)
        for name in room.keys() & parts.keys():
            room[name].copy_(parts[name])
        self._kept.write_behind(piece.index)

    def _stored_gradient(self, name: str) -> Tensor:
        return self._kept.stored.mapped(name).to(self.device)

    @torch.no_grad()
    def _update_phases(self, update: Update) -> None:
        """Update all weights whose gradients are in the store, phase by phase."""
        self.store.begin_step(self.store.step + 1)
        for piece in self._final_order:
            own = {name: it for name, it in piece.named if name in self.owned and it.grad is not None}
            if own:
                self.memory.enter(self.memory.last_phase(piece), backward=True)
                views = self._kept.load(piece.index)
                self._update(piece, {it: views[name] for name, it in own.items()}, update)

    def finish_step(self, update: Update | None = None) -> None:
        """End the optimizer's step: wait until all instances have written all weights.

        ``update`` updates those whose gradients are in the store.
        """
        self.store.check_open()
        if not self.is_unfinished:
            raise MicroBatchError(
                "optimizer.step() without a gradient: no loop over model.micro_batches(batch) has ended since the "
                "last call"
            )
        self.is_unfinished = False  # whatever fails from here on: no second step on weights that have changed
        if update is not None:
            self._update_phases(update)
        self.memory.begin_writing()
        self.store.end_step(self.memory.wait)
        if self.store.host_size > 1:
            others = [piece for piece in self._trained if any(name not in self.owned for name in piece.names)]
            self.memory.forget(Content("weights", piece.index) for piece in others)
        self.memory.end_step()
        self.budget.end_step(self._order)

    # The optimizer's state

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
        self._state = StoredPieces("state", self.memory, self.store.add("state", forms), own)
        self.memory.sizes |= {Content("state", index): size for index, size in self._state.num_bytes.items()}
        self.optimizer = weakref.ref(optimizer)
        self.memory.cut(self.memory.phases)

    def form_of(self, parameter: Parameter) -> TensorForm:
        """The form of a weight, or of the part of it that is here."""
        return self.store.weights.forms[self.names[id(parameter)]]

    def stored_state(self, parameter: Parameter) -> dict[str, Tensor]:
        """What the store has of the optimizer's state for ``parameter``."""
        self.memory.wait()
        name, state = self.names[id(parameter)], self._state.stored
        return {key: state.mapped(f"{name}/{key}") for key in self._optimizer_now().forms_of(parameter)}

    def write_state(self, parameter: Parameter, written: Mapping[str, Tensor]) -> None:
        """Write tensors of the optimizer's state for ``parameter`` to the store."""
        name, state = self.names[id(parameter)], self._state.stored
        for key, value in written.items():
            state.write(f"{name}/{key}", value)
        self.memory.forget([Content("state", it.index) for it in self.layers.pieces if name in it.names])

    def reload(self) -> None:
        """Read all weights anew, as what is in the store was changed, and is whole."""
        self.store.end_step()
        self.memory.forget(Content("weights", piece.index) for piece in self.layers.pieces)

    def _bind(self, piece: PhasePiece, memory: Tensor) -> None:
        """Let the weights of ``piece`` be in ``memory``."""
        views = self._weights.views(piece.index, memory)
        for name, parameter in piece.named:
            set_data(parameter, views[name])

    def _wanted_back(self, piece: PhasePiece) -> list[tuple[Content, Ranges]]:
        """What a backward pass, or one of updates, needs of ``piece`` beside its weights."""
        step, index = self.step, piece.index
        wanted: list[tuple[Content, Ranges]] = []
        if index not in self._gradients:
            return wanted
        optimizer = self._optimizer_now()
        state, gradient = Content("state", index), Content("sum", index)
        is_updated = step is None or (step.number == step.last and optimizer.step_in_backward)
        may_have_state = self.memory.sizes.get(state) and any(map(optimizer.has_state, piece.parameters))
        if may_have_state and is_updated:
            wanted.append((state, self._state.ranges(index)))
        # no step runs in _update_phases()
        ranges = self._kept.ranges(index) if step is None else step.sums.awaited(index, step.number)
        wanted += [(gradient, ranges)] if ranges else []
        return wanted
