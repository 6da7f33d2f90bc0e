"""The steps of a phased model: gradients are added and weights are updated layer by layer.

In the last micro batch of a step, as soon as a gradient is complete, it is added over all replicas, and its weight
is updated; all instances do so in the same order.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from popdist.errors import BatchError, CollectiveError, GradientError, MicroBatchError
from popdist.exchange.groups import as_words
from popdist.gradients.flat_buffers import GradientLayout, scale_flat
from popdist.gradients.memory import OldGradients
from popdist.gradients.optimizer_steps import is_used, mark_reduced
from popdist.gradients.reduction import GradientKeeper, StepAgreement
from popdist.gradients.step_headers import MeanOrSum, ModelChecks, StepChecks
from popdist.gradients.stored_gradients import StoredGradient, stored_gradient, updated_gradient
from popdist.ground.layout import ReplicaLayout
from popdist.ground.local_tensors import TensorForm, local_part, part_itself, placed_as
from popdist.job.collectives import gather_json
from popdist.optim.sharded.sharded_optimizer import digest_of_groups
from popdist.phases.phase_memory import MemoryPlace, Wanted
from popdist.phases.phased_layers import PhasePiece, check_same, writing
from popdist.phases.phased_run import PhasedRun
from popdist.phases.phased_sums import PieceGradient, PieceSum, held_weights, merges_of
from popdist.step.training.micro_batches import Nest
from popdist.step.training.model_steps import CheckMaker, ModelSteps, WholeStep
from popdist.step.training.step import LoneStep, Step


class PhasedSteps(ModelSteps):
    """The training steps of a phased model, which is in memory layer group by layer group, because it is larger
    than the memory. A step is a loop over micro batches and then the optimizer's update.
    """

    make_checks: ClassVar[CheckMaker] = lambda *_: ModelChecks()

    def __init__(self, module: nn.Module, layout: ReplicaLayout, *, seed: int | None, run: PhasedRun) -> None:
        self.run = run
        self.running: PhasedGradients | None = None  # the step before its optimizer's step has ended
        super().__init__(module, layout, seed=seed, checks_finite=False, gradient_dtype=None, norm_size=1)

    @property
    def is_unfinished(self) -> bool:
        """Whether a loop over micro batches has ended, but the call of ``optimizer.step()`` after it has not."""
        return self.running is not None and self.step is None

    def check_same(self) -> None:
        """Raise WeightsError if the program has changed the model's layers, parameters or weights in memory."""
        check_same(self.run.layers, self.module, self.run.store.weights.forms)
        self.run.check_unwritten()

    def check_forward(self) -> None:
        """Raise an error if no forward pass is allowed: only some weights are updated, or some are overwritten."""
        if self.run.store.is_torn and self.running is not None:
            raise BatchError(
                "a forward pass of a phased model after the backward pass of a step's last micro batch, which "
                "updates weights: call optimizer.step() behind the loop, and evaluate then"
            )
        self.run.store.check_whole()
        self.run.check_unwritten()

    def _check_ready(self) -> None:
        """Raise an error if the last step has not ended or the model has changed; set every ``.grad`` to None."""
        self.check_same()
        optimizer = self.run.optimizer_now()
        left = [it for it in self.run.layers.weights.values() if it.grad is not None]
        if self.is_unfinished and (optimizer.step_in_backward or not all(is_used(it.grad) for it in left)):
            leave_out = "" if optimizer.step_in_backward else ", or optimizer.zero_grad() to leave out a step"
            raise GradientError(
                "a loop over micro batches has ended, and optimizer.step() was not called before the next one: "
                f"call it after each loop, as it waits until all weights are written{leave_out}"
            )
        self.run.store.check_whole()
        for parameter in left:
            parameter.grad = None

    def _make_step(self, checks: StepChecks, old: OldGradients, accumulation: int) -> Step:
        return self._step_of(PhasedGradients(self.run, accumulation), checks, old, accumulation)

    def _begin_loop(self, asked: WholeStep) -> tuple[Step | LoneStep, list[Nest], Sequence[float]]:
        if asked.add:
            raise GradientError(
                "add=True, and a phased model uses its gradients in the loop over micro batches or writes them to "
                "its store: give all micro batches of a step to one loop"
            )
        self._check_ready()
        step, contents, counts = super()._begin_loop(asked)
        try:
            if isinstance(step, Step) and isinstance(step.keeper, PhasedGradients):
                filled = (number for number, content in enumerate(contents) if content is not None)
                self.running = step.keeper
                loop = PhasedLoop(step.agreement, asked.reduction, counts, max(filled, default=-1))
                self.running.begin_loop(loop)
        except BaseException:
            self.abandon()
            raise
        return step, contents, counts

    def abandon(self, *, index: int | None = None) -> None:
        """End the running loop over micro batches, if any, without a gradient on any instance. Never raises."""
        self.running = self.running if self.step is None else None
        super().abandon(index=index)

    def finish_step(self) -> None:
        """End the optimizer's step: update the weights, unless backward passes did so; wait for all instances."""
        run = self.run
        run.store.check_open()
        if self.running is None or self.step is not None:
            raise MicroBatchError(
                "optimizer.step() without a gradient: no loop over model.micro_batches(batch) has ended since the "
                "last call"
            )
        gradients, self.running = self.running, None  # if anything fails now: no second step on changed weights
        if not run.optimizer_now().step_in_backward:
            gradients.update_phases()
        run.memory.begin_writing()
        run.store.end_step(run.memory.wait)
        if run.store.host_size > 1:
            run.memory.forget("weights", [it for it in gradients.trained if not run.owned.issuperset(it.weights)])
        run.memory.end_step()
        run.budget.end_step(run.order)


class PhasedLoop(NamedTuple):
    """One loop over the micro batches of a step, with the factor of each micro batch in the mean gradient."""

    agreement: StepAgreement
    reduction: MeanOrSum
    weights: Sequence[float]  # the weight of each micro batch of this instance
    last: int  # the index of the last micro batch that has samples; -1 if none has


class PhasedGradients(GradientKeeper):
    """The gradients of one step of a phased model. A complete gradient updates its weight, or is stored."""

    _loop: PhasedLoop
    trained: list[PhasePiece]

    def __init__(self, run: PhasedRun, accumulation: int) -> None:
        super().__init__(GradientLayout(()))  # when the step ends, no gradient is in memory
        self._run = run
        self._accumulation = accumulation
        self._sums: dict[int, PieceSum] = {}  # by the index of the piece
        self._complete: set[int] = set()  # pieces whose gradients are complete in this micro batch
        self._left: deque[PhasePiece] | None = None  # pieces without final gradients, in the agreed order
        self._used: list[Parameter] = []
        self._number = -1  # the index of the micro batch that runs, or ran last
        self._is_loop_over = False
        self._over: float | None = None  # the divisor of the sums; None while no gradient is final

    def begin_loop(self, loop: PhasedLoop) -> None:
        """Begin the loop over a step's micro batches: make room for gradient sums in memory and in the store."""
        run, group = self._run, self._run.sums.group
        self._loop = loop
        self.trained = [piece for piece in run.layers.pieces if piece.is_trained]
        gradients = {piece.index: PieceGradient(piece.weights.items()) for piece in self.trained}
        merges, num_planes = merges_of(run.sums.layout, group.backend.instance_index, self._accumulation)
        self._make_room(gradients, num_planes)
        for index, gradient in gradients.items():
            place = MemoryPlace("sum", index)
            planes = run.memory.addresses.get(place, [])[1:]
            self._sums[index] = PieceSum(gradient, merges, self._times, place, planes, run.memory)
        run.use_complete, run.memory.wanted_back = self._use_complete, self._wanted_back
        run.memory.begin_step()
        run.budget.begin_step(len(loop.weights), updates_apart=not run.optimizer_now().step_in_backward)

    def _times(self, number: int) -> float:
        """Return the factor by which gradients of micro batch ``number`` are multiplied before they are added."""
        return self._loop.weights[number] / self._loop.agreement.weight_scale()

    def _make_room(self, gradients: Mapping[int, PieceGradient], num_planes: int) -> None:
        """Make room for partial sums of gradients. Each group of weights gets one sum in memory and, for each
        instance of the host, ``num_planes`` sums in the store (a file or memory).
        """
        run, store = self._run, self._run.store
        forms = {
            f"{plane}/{index}": TensorForm(dtype=torch.uint8, shape=(gradient.num_bytes,), stride=(1,))
            for plane in range(num_planes * store.host_size)
            for index, gradient in gradients.items()
        }
        if not run.optimizer_now().step_in_backward:
            forms |= {name: store.weights.forms[name] for piece in self.trained for name in piece.weights}
        known = store.tensors["gradients"].forms if "gradients" in store.tensors else {}
        if all(name in known and known[name].num_bytes >= form.num_bytes for name, form in forms.items()):
            return
        run.memory.wait()
        stored = store.add("gradients", forms)
        own_planes = range(num_planes * store.host_index, num_planes * (store.host_index + 1))
        for piece in self.trained:
            kept = [name for name in piece.weights if name in forms and name in run.owned]
            names = [kept, *([f"{plane}/{piece.index}"] for plane in own_planes)]
            run.memory.addresses[MemoryPlace("sum", piece.index)] = [stored.part(it) for it in names]
        run.memory.place_anew()

    def begin_micro_batch(self, index: int, weight: float) -> None:  # noqa: ARG002 - the loop passes the weight to every kind of step
        """Begin the micro batch with the index ``index``. The loop calls this method only for micro batches that
        have samples.
        """
        self._number = index
        self._run.calls.begin_micro_batch()
        self._complete.clear()

    def add(self, index: int, weight: float, scale: float) -> None:  # noqa: ARG002 - the loop passes both to every kind of step
        """End a micro batch. Unless it is the last, add its remaining gradients (unused layers) to the sums."""
        self._run.calls.end_micro_batch()
        if index != self._loop.last:
            for piece in self.trained:
                if piece.index not in self._complete:
                    self._push(piece, index)
        self._run.memory.begin_writing()

    def _use_complete(self, pieces: Iterable[PhasePiece]) -> None:
        """Add the complete gradients of the weights ``pieces`` to gradient sums. In the last micro batch, also
        update the weights with each final sum, or write the sum to the store if ``step_in_backward`` is False.
        """
        for piece in pieces:
            if piece.index in self._sums:
                self._complete.add(piece.index)
                if self._number != self._loop.last:
                    self._push(piece, self._number)
                elif piece.units:
                    self._make_final()

    def complete(self) -> None:
        """End the loop: add the remaining gradients over all replicas; then update weights, or store the sums."""
        run, optimizer = self._run, self._run.optimizer_now()
        self._complete = set(self._sums)
        self._make_final()
        if optimizer.step_in_backward:
            optimizer.end_update()
        else:
            run.memory.wait()
            run.store.wait_for_host()
        self._show_gradients()

    def clear(self) -> None:
        """End the loop over micro batches, update no weight, and set every ``.grad`` to None."""
        self._run.calls.end_micro_batch()
        for parameter in self._run.layers.weights.values():
            parameter.grad = None

    def _wanted_back(self, piece: PhasePiece) -> Wanted:
        """Return the stored optimizer state and gradient sum that a pass over the weights ``piece`` needs."""
        if piece.index not in self._sums:
            return {}
        optimizer, addresses = self._run.optimizer_now(), self._run.memory.addresses
        state, sums = MemoryPlace("state", piece.index), MemoryPlace("sum", piece.index)
        is_updated = self._is_loop_over or (self._number == self._loop.last and optimizer.step_in_backward)
        has_state = is_updated and not optimizer.state.keys().isdisjoint(piece.weights.values())
        wanted = {state: addresses[state][0]} if has_state else {}
        if self._is_loop_over:
            return {**wanted, sums: addresses[sums][0]}
        return {**wanted, **self._sums[piece.index].awaited(self._number)}

    def _enter(self, piece: PhasePiece) -> None:
        """Read into memory the layers whose backward pass completes the gradients of the weights ``piece``."""
        self._run.memory.enter(self._run.memory.last_phase(piece), backward=True)

    def _push(self, piece: PhasePiece, number: int) -> None:
        """Add the gradients of the weights ``piece`` in micro batch ``number`` (not the last) to partial sums."""
        self._enter(piece)
        self._sums[piece.index].push(number, number + 1)

    def _make_final(self) -> None:
        """Add complete gradients over all replicas, in the order that all instances have agreed on. Update the
        weights with each sum, or write the sum to the store for ``optimizer.step()``.
        """
        left = self._left = self._agreed_order() if self._left is None else self._left
        while left and left[0].index in self._complete:
            over = self._over = self._begin_updates() if self._over is None else self._over
            self._enter(left[0])
            self._sum_over_job(self._sums[left[0].index], over)
            self._use(left[0])
            left.popleft()

    def _agreed_order(self) -> deque[PhasePiece]:
        """Return the trained weights, grouped by layers, in an order equal on all instances, last layer first."""
        run = self._run
        if run.agreed_order is None:
            self._loop.agreement.arrive(len(self.trained))
            orders = gather_json(run.sums.group, "phased(), the order of the layers", run.order)
            run.agreed_order = next(filter(None, orders), [])
        known = run.agreed_order
        order = [*known, *(unit.index for unit in run.layers.units if unit.index not in known)]
        place = {unit: number for number, unit in enumerate(order)}
        return deque(
            sorted(self.trained, key=lambda it: min((place[unit] for unit in it.units), default=-1), reverse=True)
        )

    def _begin_updates(self) -> float:
        """Begin the optimizer's updates if they run in the backward pass; return the divisor of gradient sums.
        Raise CollectiveError if the optimizers of the instances have different settings.
        """
        run, optimizer, loop = self._run, self._run.optimizer_now(), self._loop
        instance = run.sums.group.backend.instance_index
        *_, weights = held_weights(run.sums.layout, instance, self._accumulation, loop.weights)
        settings_number = digest_of_groups(optimizer.param_groups, optimizer.defaults)
        numbers, _ = loop.agreement.arrive(len(self.trained), [settings_number, *as_words(weights)])
        if len({settings for settings, *_ in numbers}) > 1:
            raise CollectiveError(
                "the instances have optimizers with different settings, such as lr, so they would make different "
                "weights: set the same on all of them"
            )
        over = loop.agreement.divisor(loop.reduction, [words for _, *words in numbers])
        if optimizer.step_in_backward:
            optimizer.begin_update()
            run.store.begin_step(run.store.step + 1)
        return over

    @torch.no_grad()
    def _sum_over_job(self, own: PieceSum, over: float) -> None:
        """Add the instances' gradient sums, here ``own``; set each ``.grad`` to the total divided by ``over``."""
        sums, loop = self._run.sums, self._loop
        is_lone = len(loop.weights) == sums.layout.num_replicas == 1
        if is_lone and (loop.reduction == "mean" or loop.weights[0] == 1):
            return  # one micro batch in the whole job keeps its bits
        nodes = own.total(loop.last)
        _, used = loop.agreement.arrive(len(self._left or ()), used=own.used)
        if len(sums.group.instances) > 1:
            for parts in zip(*map(own.gradient.parts, nodes), strict=True):
                sums.add(parts)
        scale_flat(own.gradient.parts(nodes[0]), over=over)
        own.gradient.layout.set_gradients(own.gradient.gradient(nodes[0]), used)

    def _use(self, piece: PhasePiece) -> None:
        """Use final gradients: update the weights ``piece``, or store the gradients for ``optimizer.step()``."""
        optimizer = self._run.optimizer_now()
        gradients = {
            it: it.grad for it in piece.weights.values() if it.grad is not None and optimizer.forms_of(it)
        }
        if optimizer.step_in_backward:
            self._update(piece, gradients)
        else:
            self._keep(piece, gradients)
        self._used += gradients
        for parameter in piece.weights.values():
            parameter.grad = None

    @torch.no_grad()
    def _update(self, piece: PhasePiece, gradients: Mapping[Parameter, Tensor]) -> None:
        """Update the part of the weights ``piece`` that this instance has to update; write it to the store."""
        run, optimizer, memory = self._run, self._run.optimizer_now(), self._run.memory
        owned = {it: name for name, it in piece.weights.items() if name in run.owned and optimizer.forms_of(it)}
        updated = {it: name for it, name in owned.items() if it in gradients}
        if not updated:
            return
        at = MemoryPlace("weights", piece.index)
        state_at = MemoryPlace("state", piece.index)
        (weights,), (state,) = memory.addresses[at], memory.addresses[state_at]
        memory.room(at)  # waits until no earlier write reads the weights
        is_new = len(updated) == len(owned) and optimizer.state.keys().isdisjoint(owned)
        views = state.views(memory.room(state_at) if is_new else memory.load(state_at, state))
        for parameter, name in updated.items():
            with run.budget.updating(piece.units), writing(parameter):
                forms = optimizer.forms_of(parameter)
                optimizer.update(parameter, gradients[parameter], {key: views[f"{name}/{key}"] for key in forms})
        memory.write_behind(at, weights, updated.values())
        memory.write_behind(state_at, state)

    @torch.no_grad()
    def _keep(self, piece: PhasePiece, gradients: Mapping[Parameter, Tensor]) -> None:
        """Copy the gradients of the weights ``piece`` to memory, which a thread later writes to the store."""
        memory = self._run.memory
        parts = {self._run.names[id(it)]: local_part(gradient) for it, gradient in gradients.items()}
        place = MemoryPlace("sum", piece.index)
        kept = memory.addresses[place][0]
        views = kept.views(memory.room(place))
        for name in views.keys() & parts.keys():
            views[name].copy_(parts[name])
        memory.write_behind(place, kept)

    def _show_gradients(self) -> None:
        """Set each ``.grad`` to a placeholder without memory. Its first use reads the gradient from the store or,
        if the gradient has already updated its weight, raises an error.
        """
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
        return self._run.store.tensors["gradients"].mapped(name).to(self._run.store.device)

    @torch.no_grad()
    def update_phases(self) -> None:
        """Update all weights that have a ``.grad``, one group of layers after the other. To a gradient in the
        store, first apply the changes that the program has made to ``.grad``, such as clipping.
        """
        run, optimizer, self._is_loop_over = self._run, self._run.optimizer_now(), True
        optimizer.begin_update()
        run.store.begin_step(run.store.step + 1)
        for piece in self._agreed_order():
            owned = {it: name for name, it in piece.weights.items() if name in run.owned and it.grad is not None}
            if owned:
                self._enter(piece)
                kept = run.memory.addresses[MemoryPlace("sum", piece.index)][0]
                views = kept.views(run.memory.load(MemoryPlace("sum", piece.index), kept))
                gradients = {it: local_part(it.grad) for it in owned}
                for it, gradient in gradients.items():
                    if isinstance(gradient, StoredGradient):
                        gradients[it] = gradient.apply_changes(views[owned[it]])
                self._update(piece, gradients)
        optimizer.end_update()
