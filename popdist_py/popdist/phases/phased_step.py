"""The steps of a phased model: gradients are added, and weights updated, layer by layer.

In the last micro batch of a step a gradient is added over all replicas, and its weights are updated, as soon as no
layer adds to it any more; all instances do so in one order.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from popdist.errors import BatchError, CollectiveError, GradientError, MicroBatchError
from popdist.exchange.groups import as_words
from popdist.gradients.buffers import ReplicaBuffers
from popdist.gradients.flat_buffers import GradientLayout
from popdist.gradients.memory import GradientMemory, OldGradients
from popdist.gradients.optimizer_steps import is_used, mark_reduced
from popdist.gradients.reduction import GradientSum
from popdist.gradients.step_headers import MeanOrSum, ModelChecks, StepChecks
from popdist.gradients.stored_gradients import stored_gradient, updated_gradient
from popdist.ground.layout import ReplicaLayout
from popdist.ground.local_tensors import TensorForm, local_part, part_itself, placed_as
from popdist.job.collectives import gather_json
from popdist.optim.sharded.sharded_optimizer import digest_of_groups
from popdist.phases.phase_memory import Address
from popdist.phases.phased_layers import PhasePiece, check_same, writing
from popdist.phases.phased_run import PhasedRun, Update
from popdist.phases.phased_sums import GradientBarrier, PieceGradient, PieceSum, held_weights, merges_of
from popdist.step.training.micro_batches import Nest
from popdist.step.training.model_steps import CheckMaker, ModelSteps, WholeStep
from popdist.step.training.step import LoneStep, Step


class PhasedSteps(ModelSteps):
    """The steps of a phased model: each is a loop over micro batches, and the optimizer's step behind it."""

    make_checks: ClassVar[CheckMaker] = lambda *_: ModelChecks()

    def __init__(self, module: nn.Module, layout: ReplicaLayout, *, seed: int | None, run: PhasedRun) -> None:
        self.run = run
        self.running: PhasedStep | None = None  # the step whose optimizer's step has not ended
        super().__init__(module, layout, seed=seed, checks_finite=False, gradient_dtype=None, norm_size=1)

    @property
    def is_unfinished(self) -> bool:
        """Whether a loop has ended, and the optimizer's step has not."""
        return self.running is not None and not self.running.is_open

    def check_same(self) -> None:
        """Check that the module has the parameters and layers that it had, as they were."""
        check_same(self.run.layers, self.module, self.run.store.weights.forms)
        self.run.check_unwritten()

    def check_forward(self) -> None:
        """Check that all weights are those of one step."""
        if self.run.store.is_torn and self.running is not None:
            raise BatchError(
                "a forward pass of a phased model after the backward pass of a step's last micro batch, which "
                "updates weights: call optimizer.step() behind the loop, and evaluate then"
            )
        self.run.store.check_whole()
        self.run.check_unwritten()

    def _check_ready(self) -> None:
        """Check that a step may begin."""
        self.check_same()
        optimizer = self.run.optimizer_now()
        left = [it for piece in self.run.layers.pieces for it in piece.parameters if it.grad is not None]
        if self.is_unfinished and (optimizer.step_in_backward or not all(is_used(it.grad) for it in left)):
            leave_out = "" if optimizer.step_in_backward else ", or optimizer.zero_grad() to leave out a step"
            raise GradientError(
                "a loop over micro batches has ended, and optimizer.step() was not called before the next one: "
                f"call it after each loop, as it waits until all weights are written{leave_out}"
            )
        self.run.store.check_whole()
        for parameter in left:
            parameter.grad = None

    def _make_step(self, checks: StepChecks, old: OldGradients, accumulation: int) -> "PhasedStep":
        return PhasedStep(self.run, self.buffers, checks, old, accumulation)

    def _begin_loop(self, asked: WholeStep) -> tuple[Step | LoneStep, list[Nest], Sequence[float]]:
        self._check_ready()
        step, contents, counts = super()._begin_loop(asked)
        try:
            if isinstance(step, PhasedStep):
                self.running = step
                filled = [number for number, content in enumerate(contents) if content is not None]
                step.begin_loop(asked.reduction, counts, max(filled, default=-1))
        except BaseException:
            self.abandon()
            raise
        return step, contents, counts

    def abandon(self, *, index: int | None = None) -> None:
        """End the step, if there is one, without a gradient on any instance. Never raises."""
        self.running = self.running if self.step is None else None
        super().abandon(index=index)

    def finish_step(self, update: Update | None = None) -> None:
        """End the optimizer's step: wait until all instances have written all weights.

        ``update`` updates those whose gradients are in the store.
        """
        run = self.run
        run.store.check_open()
        if self.running is None or self.running.is_open:
            raise MicroBatchError(
                "optimizer.step() without a gradient: no loop over model.micro_batches(batch) has ended since the "
                "last call"
            )
        step, self.running = self.running, None  # whatever fails from here on: no second step on changed weights
        if update is not None:
            step.update_phases(update)
        run.memory.begin_writing()
        run.store.end_step(run.memory.wait)
        if run.store.host_size > 1:
            run.memory.forget("weights", [it for it in step.trained if not run.owned.issuperset(it.names)])
        run.memory.end_step()
        run.budget.end_step(run.order)


class PhasedStep(Step):
    """One step of a phased model: its end tells the others how far it came, and has no gradients left to add."""

    def __init__(
        self, run: PhasedRun, buffers: ReplicaBuffers, checks: StepChecks, old: OldGradients, accumulation: int
    ) -> None:
        self._run = run
        self._group, self._layout = run.sums.group, run.sums.layout
        memory = GradientMemory(self._group, self._layout, GradientLayout(()))
        total = GradientSum(memory, buffers if self._layout.num_replicas > 1 else None, checks, old)
        super().__init__(memory, buffers, total, checks, accumulation=accumulation, checks_finite=False)
        self.is_open = False
        self._barrier = GradientBarrier(self._group)
        self._sums: dict[int, PieceSum] = {}  # by piece
        self._complete: set[int] = set()  # pieces whose gradients are complete in this micro batch
        self._order: list[PhasePiece] = []  # in which gradients become final, on all instances
        self._num_final = 0
        self._used: list[Parameter] = []
        self._number = -1  # of the micro batch that runs, or ran last
        self._over = 1.0

    def begin_loop(self, reduction: MeanOrSum, weights: Sequence[float], last: int) -> None:
        """Begin the loop, with what each micro batch weighs, and the last one that has samples."""
        self._reduction, self._weights, self._last = reduction, weights, last
        run = self._run
        self.is_open = True
        self.trained = [piece for piece in run.layers.pieces if piece.is_trained]
        gradients = {piece.index: PieceGradient(piece.named) for piece in self.trained}
        merges, num_planes = merges_of(self._layout, self._group.backend.instance_index, self.accumulation)
        self._make_room(gradients, num_planes)
        for index, gradient in gradients.items():
            planes = run.memory.addresses.get(("sum", index), [])[1:]
            scale = self._sum.weight_scale
            self._sums[index] = PieceSum(gradient, merges, weights, scale, planes, run.memory)
        run.memory.wanted_back, run.take_gradients = self._wanted_back, self._take_gradients
        run.memory.begin_step()
        run.budget.begin_step(len(weights), updates_apart=not run.optimizer_now().step_in_backward)

    def _make_room(self, gradients: Mapping[int, PieceGradient], num_planes: int) -> None:
        """Have room in the store for so many sums of each piece, and in memory for one."""
        run, store = self._run, self._run.store
        forms = {
            f"{plane}/{index}": TensorForm(dtype=torch.uint8, shape=(gradient.num_bytes,), stride=(1,))
            for plane in range(num_planes * store.host_size)
            for index, gradient in gradients.items()
        }
        if not run.optimizer_now().step_in_backward:
            forms |= {name: run.form_of(it) for piece in self.trained for name, it in piece.named}
        known = store.tensors["gradients"].forms if "gradients" in store.tensors else {}
        if all(name in known and known[name].num_bytes >= form.num_bytes for name, form in forms.items()):
            return
        stored = store.add("gradients", forms)
        own = range(num_planes * store.host_index, num_planes * (store.host_index + 1))
        for piece in self.trained:
            kept = [name for name in piece.names if name in forms and name in run.owned]
            names = [kept, *([f"{plane}/{piece.index}"] for plane in own)]
            run.memory.addresses["sum", piece.index] = [
                Address.of(("sum", piece.index), stored, it) for it in names
            ]
        run.memory.cut(run.memory.phases)

    def begin_micro_batch(self, index: int, weight: float) -> int:
        """Begin micro batch ``index``, which has samples; gives its replica in the job."""
        replica = super().begin_micro_batch(index, weight)
        self._number = index
        self._run.calls.begin_micro_batch()
        self._complete.clear()
        return replica

    def add(self, weight: float) -> None:
        """Take what gradients there are: layers that were not called, or not passed back, add nothing more."""
        self._run.calls.end_micro_batch()
        if self._number < self._last:
            for piece in self.trained:
                if piece.index not in self._complete:
                    self._push(piece)
        self._run.memory.begin_writing()
        super().add(weight)

    def _take_gradients(self, pieces: Iterable[PhasePiece]) -> None:
        """Take the gradients of ``pieces``, which are complete in this micro batch."""
        for piece in pieces:
            if piece.index in self._sums:
                self._complete.add(piece.index)
                if self._number < self._last:
                    self._push(piece)
                elif piece.units:
                    self._make_final()

    def finish(self, reduction: MeanOrSum, *, add: bool) -> None:
        """Make all gradients final, and the buffers those of the whole job's step."""
        self._sum.weight_scale()
        run, optimizer = self._run, self._run.optimizer_now()
        self._complete = set(self._sums)
        self._make_final()
        self.is_open = False  # nobody waits for gradients any more
        if optimizer.step_in_backward:
            optimizer.end_update()
        else:
            run.memory.wait()
            run.store.wait_for_host()
        self._show_gradients()
        super().finish(reduction, add=add)

    def abandon(self) -> None:
        """Leave without gradients, and say so to the others, unless all know already. Never raises."""
        if self.is_open and self._barrier.abandon(self._sum.weight_scale):
            self._sum.is_awaited = False  # they know that there is no gradient
        self.is_open = False
        self._run.calls.end_micro_batch()
        for piece in self._run.layers.pieces:
            for parameter in piece.parameters:
                parameter.grad = None
        super().abandon()

    def _wanted_back(self, piece: PhasePiece) -> list[Address]:
        """Return what a backward pass, or one of updates, needs of ``piece`` beside its weights."""
        if piece.index not in self._sums:
            return []
        optimizer, addresses = self._run.optimizer_now(), self._run.memory.addresses
        is_updated = not self.is_open or (self._number == self._last and optimizer.step_in_backward)
        has_state = is_updated and not optimizer.state.keys().isdisjoint(piece.parameters)
        if self.is_open:
            gradient = self._sums[piece.index].awaited(self._number)
        else:
            gradient = addresses["sum", piece.index][:1]
        return [*(addresses["state", piece.index] if has_state else ()), *gradient]

    def _enter(self, piece: PhasePiece) -> None:
        """Have the phase in memory in which the gradient of ``piece`` is complete."""
        self._run.memory.enter(self._run.memory.last_phase(piece), backward=True)

    def _push(self, piece: PhasePiece) -> None:
        """Add the gradients of a micro batch that is not the last one to the sums that wait."""
        self._enter(piece)
        self._sums[piece.index].push(self._number, self._number + 1)

    def _make_final(self) -> None:
        """Make those gradients final that are complete, in the order that all instances have."""
        if not self._order:
            self._agree_on_order()
        while self._num_final < len(self._order):
            piece = self._order[self._num_final]
            if piece.index not in self._complete:
                return
            if not self._num_final:
                self._begin_updates()
            self._enter(piece)
            self._sum_over_job(self._sums[piece.index])
            self._use(piece)
            self._num_final += 1

    def _agree_on_order(self) -> None:
        """Have all instances make gradients final in one order: the layers of the first forward pass backwards."""
        run = self._run
        if run.agreed_order is None:
            self._barrier.wait_for_others()
            orders = gather_json(self._group, "phased(), the order of the layers", run.order)
            run.agreed_order = next(filter(None, orders), [])
        known = run.agreed_order
        order = [*known, *(unit.index for unit in run.layers.units if unit.index not in known)]
        place = {unit: number for number, unit in enumerate(order)}
        self._order = sorted(
            self.trained, key=lambda it: min((place[unit] for unit in it.units), default=-1), reverse=True
        )

    def _begin_updates(self) -> None:
        """Learn what all micro batches of the job weigh; from now on weights are updated."""
        run, optimizer = self._run, self._run.optimizer_now()
        scale = self._sum.weight_scale()
        instance = self._group.backend.instance_index
        *_, weights = held_weights(self._layout, instance, self.accumulation, self._weights)
        settings_number = digest_of_groups(optimizer.param_groups, optimizer.defaults)
        numbers = self._barrier.wait_for_others([settings_number, *as_words(weights)])
        if len({settings for settings, *_ in numbers}) > 1:
            raise CollectiveError(
                "the instances have optimizers with different settings, such as lr, so they would make different "
                "weights: set the same on all of them"
            )
        total = self._memory.total_weight([words for _, *words in numbers])
        if self._reduction == "mean" and not total:
            raise BatchError("the weights of all instances' micro batches add up to 0: this step has no mean")
        self._over = total / scale if self._reduction == "mean" else 1.0
        if optimizer.step_in_backward:
            optimizer.begin_update()
            run.store.begin_step(run.store.step + 1)

    def _sum_over_job(self, own: PieceSum) -> None:
        """Set every ``.grad`` of a piece to that of all replicas."""
        is_lone = len(self._weights) == self._layout.num_replicas == 1
        if is_lone and (self._reduction == "mean" or self._weights[0] == 1):
            return  # one micro batch in the whole job keeps its bits
        nodes = own.total(self._last)
        if len(self._group.instances) > 1:
            self._barrier.wait_for_others()
            for parts in zip(*map(own.gradient.parts, nodes), strict=True):
                self._run.sums.add(parts)
        own.gradient.set_gradients(nodes[0], self._over)

    def _use(self, piece: PhasePiece) -> None:
        """Update the weights of ``piece`` by their gradients, or keep these in the store."""
        optimizer = self._run.optimizer_now()
        gradients = {it: it.grad for it in piece.parameters if it.grad is not None and optimizer.forms_of(it)}
        if optimizer.step_in_backward:
            self._update(piece, gradients, optimizer.update)
        else:
            self._keep(piece, gradients)
        self._used += gradients
        for parameter in piece.parameters:
            parameter.grad = None

    @torch.no_grad()
    def _update(self, piece: PhasePiece, gradients: Mapping[Parameter, Tensor], update: Update) -> None:
        """Update those weights of ``piece`` that this instance owns, and write them behind."""
        run, optimizer, memory = self._run, self._run.optimizer_now(), self._run.memory
        own = {it: name for name, it in piece.named if name in run.owned and optimizer.forms_of(it)}
        mine = {it: name for it, name in own.items() if it in gradients}
        if not mine:
            return
        (weights,), (state,) = memory.addresses["weights", piece.index], memory.addresses["state", piece.index]
        memory.room(weights.place)  # waits for what is still written of them
        is_new = len(mine) == len(own) and optimizer.state.keys().isdisjoint(own)
        views = state.views(memory.room(state.place) if is_new else memory.load(state))
        for parameter, name in mine.items():
            with run.budget.updating(piece.units), writing(parameter):
                forms = optimizer.forms_of(parameter)
                update(parameter, gradients[parameter], {key: views[f"{name}/{key}"] for key in forms})
        memory.write_behind(weights, mine.values())
        memory.write_behind(state)

    @torch.no_grad()
    def _keep(self, piece: PhasePiece, gradients: Mapping[Parameter, Tensor]) -> None:
        """Write the gradients of ``piece`` behind."""
        memory = self._run.memory
        parts = {self._run.names[id(it)]: local_part(gradient) for it, gradient in gradients.items()}
        if len(self._weights) > 1:  # what was added may lie in the memory in which it is to wait
            parts = {name: part.clone() for name, part in parts.items()}
        kept = memory.addresses["sum", piece.index][0]
        views = kept.views(memory.room(kept.place))
        for name in views.keys() & parts.keys():
            views[name].copy_(parts[name])
        memory.write_behind(kept)

    def _show_gradients(self) -> None:
        """Let each ``.grad`` stand for the one that was used: only now, as small tensors would scatter memory."""
        is_updated = self._run.optimizer_now().step_in_backward
        for parameter in self._used:
            name = self._run.names[id(parameter)]
            if is_updated:
                parameter.grad = updated_gradient(name, parameter)
            else:
                stored = stored_gradient(name, part_itself(parameter), partial(self._stored_gradient, name))
                parameter.grad = placed_as(parameter, stored)
            if parameter.grad is not None:
                mark_reduced(parameter.grad)
        self._used = []

    def _stored_gradient(self, name: str) -> Tensor:
        return self._run.store.tensors["gradients"].mapped(name).to(self._run.device)

    @torch.no_grad()
    def update_phases(self, update: Update) -> None:
        """Update all weights whose gradients are in the store, phase by phase."""
        run = self._run
        run.store.begin_step(run.store.step + 1)
        for piece in self._order:
            own = {it: name for name, it in piece.named if name in run.owned and it.grad is not None}
            if own:
                self._enter(piece)
                kept = run.memory.addresses["sum", piece.index][0]
                views = kept.views(run.memory.load(kept))
                self._update(piece, {it: views[name] for it, name in own.items()}, update)
