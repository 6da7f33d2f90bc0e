"""The steps of one model on this instance: each is begun, computed in micro batches, and finished or abandoned."""

import contextvars
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, nullcontext
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, TypeAlias, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn

from popdist.data.batch import Batch, running_loops
from popdist.data.randomness import RandomScope, ReplicaRandomness
from popdist.errors import BatchError, MicroBatchError, check_flags
from popdist.gradients.buffers import ReplicaBuffers, check_buffers, label_of_copy
from popdist.gradients.kept_gradients import KeptGradients
from popdist.gradients.memory import ModelGradients, OldGradients
from popdist.gradients.optimizer_steps import training_loop, watch_optimizers
from popdist.gradients.reduction import GradientKeeper, StepAgreement, check_reduction, refuse_step
from popdist.gradients.step_headers import (
    CANNOT_SPLIT,
    IN_ANOTHER_LOOP,
    BatchPosition,
    MeanOrSum,
    ModelChecks,
    StepChecks,
)
from popdist.ground.layout import ReplicaLayout
from popdist.ground.local_tensors import is_distributed, is_fully_sharded, local_gradient
from popdist.ground.progress import AFTER_LEAVING, progress_page
from popdist.ground.torch_private import compile_scripts_at_once
from popdist.job import context
from popdist.step.training.micro_batches import (
    Nest,
    Split,
    accumulation_of,
    batches_of_loaders,
    check_weight,
    split_batch,
    to_device,
)
from popdist.step.training.norm_sync import NormGroups
from popdist.step.training.outside_step import AutomaticReduction
from popdist.step.training.replica_turns import ReplicaTurns
from popdist.step.training.step import LoneStep, Step, StepState, joint_modules, watch_scalers

if TYPE_CHECKING:
    from popdist.step.training.pipeline import Pipelines

R = TypeVar("R")

CheckMaker: TypeAlias = Callable[[nn.Module, ReplicaBuffers, ReplicaLayout], ModelChecks]

_numbers: Final = count(1)


def _next_label() -> str | None:
    """Return the next model's label, a number equal on all instances; None if only some make the model."""
    is_everywhere = (
        len(context.data_parallel_group().instances) == context.environment().contract.layout.num_instances
    )
    return str(next(_numbers)) if is_everywhere else None


def call_body(body: Callable[..., R], content: Nest) -> R:
    """Call ``body`` with the items of the tuple or list ``content``, or with any other ``content`` itself."""
    return body(*content) if isinstance(content, tuple | list) else body(content)


class WholeStep(NamedTuple):
    """The arguments of a loop over a whole batch, as ``ReplicatedModel.micro_batches`` has them."""

    batch: Nest
    accumulation: int
    reduction: MeanOrSum
    weights: Sequence[float] | None
    split: Split | None
    add: bool


class ModelSteps:
    """The steps of one module on this instance, one at a time."""

    make_checks: ClassVar[CheckMaker] = lambda *_: ModelChecks()
    """The function that makes the checks of a model's steps; `popdist.step.checks` replaces it."""

    def __init__(
        self,
        module: nn.Module,
        layout: ReplicaLayout,
        *,
        seed: int | None,
        checks_finite: bool,
        gradient_dtype: torch.dtype | None,
        norm_size: int,
    ) -> None:
        self.layout = layout
        contract = context.environment().contract
        self.randomness = ReplicaRandomness(
            seed,
            layout.replicas_of(contract.data_parallel_index),
            stage=contract.replica_part.stage if contract.parallelism.has_mesh else 0,
        )
        self.module = module
        self._checks_finite = checks_finite
        self._gradient_dtype = gradient_dtype
        self._norm_size = norm_size
        self._label = _next_label()
        self._prepare()
        joint_modules[self] = self._state.reference  # a copy, perhaps made on one instance alone, is not recorded

    def _prepare(self) -> None:
        """Make the attributes that a copy of this object must not share with the original, such as the step."""
        watch_optimizers()
        watch_scalers()
        if self.layout.num_replicas > 1:
            compile_scripts_at_once()
        self._state = StepState(self, self.module)
        self.step: Step | LoneStep | None = None
        self._left_at: int | None = None
        self._has_left = False
        self._is_distributed = any(map(is_distributed, self.module.parameters()))
        self.gradients = ModelGradients(self.module, self._gradient_dtype)
        self.buffers = ReplicaBuffers(self.module, self._label)
        self._checks = type(self).make_checks(self.module, self.buffers, self.layout)
        self._norm_groups = NormGroups(self._norm_size, self.layout) if self._norm_size > 1 else None
        self.automatic = AutomaticReduction(
            self.module,
            self.gradients,
            self.buffers,
            self.layout,
            self._checks,
            checks_finite=self._checks_finite,
        )
        self.pipelines: Pipelines = WeakKeyDictionary()
        self._has_one_local_replica = self.layout.num_replicas > self.layout.num_local_replicas == 1
        if self._has_one_local_replica:
            self.buffers.begin_pass()

    def __getstate__(self) -> dict[str, Any]:
        check_buffers(self.module)
        kept = ("layout", "randomness", "module", "_checks_finite", "_gradient_dtype", "_norm_size", "_label")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._label = label_of_copy(self._label)
        self._prepare()

    def forward(self, forward: "partial[R]") -> R:
        """Call the module's ``forward`` and return its result; record the buffers and attributes that change."""
        is_outside = not RandomScope.is_entered()
        if is_outside and torch.is_grad_enabled():
            self._checks.note_inputs((*forward.args, *forward.keywords.values()))
        if not self.module.training and (is_outside or not torch.is_grad_enabled()):
            return forward()
        if is_outside and not torch.is_grad_enabled():
            forward = partial(self._checks.watch_evaluation, forward)
        watched = partial(self._checks.watch, forward)
        return self.buffers.run_outside(watched) if is_outside else watched()

    def micro_batches(self, asked: WholeStep) -> Generator[Nest, None, None]:
        """Yield the micro batches of a whole step: see ``ReplicatedModel.micro_batches``."""
        if self._norm_groups is not None and self.layout.num_local_replicas > 1:
            raise self._norm_error("micro_batches()")
        step, contents, counts = self._begin_loop(asked)
        for index, content in enumerate(contents):
            if content is not None:
                turn = nullcontext() if self._norm_groups is None else self._norm_groups.turn(index)
                with self._scope_of_loop(step, index, counts[index]), turn:
                    yield to_device(content, self.gradients.device)
        self._finish(asked.reduction, add=asked.add)

    def _scope_of_loop(self, step: Step | LoneStep, index: int, count: float) -> "MicroBatchScope":
        try:
            return MicroBatchScope(self, step, index, count)
        except BaseException:  # such as a lack of memory for the gradients
            if self.step is step:
                self.abandon()
            raise

    def run_micro_batches(self, asked: WholeStep, body: Callable[..., R]) -> list[R]:
        """Run a whole step, calling ``body`` for each micro batch: see ``ReplicatedModel.run_micro_batches``."""
        if self._norm_groups is None or self.layout.num_local_replicas == 1:
            with closing(self.micro_batches(asked)) as micro_batches:  # a traceback would keep it open
                return [contextvars.copy_context().run(call_body, body, content) for content in micro_batches]
        step, contents, counts = self._begin_loop(asked)
        try:
            self.automatic.begin_computing()
            several = cast("Step", step)  # several replicas never have a LoneStep
            turns: ReplicaTurns[R] = ReplicaTurns(several, self.randomness, self.buffers, self.gradients)
            device = self.gradients.device
            bodies = [None if it is None else partial(call_body, body, to_device(it, device)) for it in contents]
            results = turns.run_all(self._norm_groups, bodies, counts)
            self.automatic.refuse_collectives()
            self.automatic.end_computing()
        except BaseException:
            self.abandon()
            raise
        self._finish(asked.reduction, add=asked.add)
        return results

    def micro_batch(self, index: int, weight: float, accumulation: int) -> "MicroBatchScope":
        """Return a context for micro batch ``index`` of the step; the first micro batch starts the step."""
        if self._norm_groups is not None:
            raise self._norm_error("micro_batch()")
        weight, is_first = check_weight(weight), self.step is None
        if is_first and self._left_at is not None and index > self._left_at:
            raise self._left_error()
        step = self.step or self._begin(accumulation, None)
        if step.accumulation != accumulation:
            raise BatchError(f"accumulation={accumulation} in a step that began with {step.accumulation}")
        try:
            return MicroBatchScope(self, step, index, weight, is_alone=True)
        except BatchError:
            if is_first:
                self._end()
            raise

    def reduce_gradients(self, reduction: MeanOrSum, *, add: bool) -> None:
        """End the step with the gradient of all replicas: see ``ReplicatedModel.reduce_gradients``."""
        check_reduction(reduction)
        check_flags(BatchError, add=add)
        self._finish(reduction, add=add)

    def _begin_loop(self, asked: WholeStep) -> tuple[Step | LoneStep, list[Nest], Sequence[float]]:
        """Begin the step of a whole batch; return the step, its micro batches, and the weight of each."""
        batch, accumulation, reduction, weights, split, add = asked
        try:
            check_reduction(reduction)
            if add:
                check_flags(BatchError, add=add)
            accumulation, contents, counts = split_batch(
                batch, self.layout.num_local_replicas, accumulation, split=split, weights=weights
            )
            progress_page.count_samples(int(sum(counts)) if weights is None else 0)
            if self._norm_groups is not None:
                self._norm_groups.check_batch(contents, counts)
        except BatchError:
            if split is None:
                accumulation = accumulation_of(batch, self.layout.num_local_replicas, accumulation)
            self._refuse(accumulation, CANNOT_SPLIT, add=add)
            raise
        if self.step is not None:
            self._refuse(accumulation, IN_ANOTHER_LOOP, add=add)
            raise MicroBatchError(
                "a step began before the one before it had ended: end each micro_batches loop of a model before "
                "the next one, or call reduce_gradients() after the micro batches; neither of the two steps has a "
                "gradient on any instance. To train on two batches at once, put them into one loop: "
                "model.micro_batches((first, second))"
            )
        step = self._begin(accumulation, batch)
        try:
            position = BatchPosition()
            running_loops[self] = dealt = batches_of_loaders(batch)
            if dealt and isinstance(dealt[0], Batch) and self.layout.num_instances > 1:
                position = BatchPosition(epoch=dealt[0].epoch, stop=dealt[0].stop)
            step.begin(max(counts), reduction, position, add=add)
            if reduction == "sum" and weights is None:
                counts = [float(content is not None) for content in contents]
            if self._norm_groups is not None and isinstance(step, Step):
                step.wait_for_others()
                self._norm_groups.begin_step(context.data_parallel_group(), counts, accumulation)
            step.checks.begin_loop()
        except BaseException:
            self.abandon()
            raise
        return step, contents, counts

    def _begin(self, accumulation: int, batch: Nest) -> Step | LoneStep:
        """Begin a step after removing old gradients; ``batch`` is None if micro batches come one by one."""
        if self._has_left:  # all other parts of the replica must have left the step before a new one
            self._has_left = False
            context.current_group().limited_to(tuple(context.instances_of_replica())).agree(AFTER_LEAVING)
        training_loop.begin_step(self._state)
        if self._is_distributed:
            self._reshard()
        old = OldGradients(self.module, self.gradients)
        self.step = self._make_step(self._checks.begin_step(batch), old, accumulation)
        self.automatic.step = self.step
        self._left_at = None
        self._state.begin()
        return self.step

    def _make_step(self, checks: StepChecks, old: OldGradients, accumulation: int) -> Step | LoneStep:
        """Make the object of a new step, with ``accumulation`` micro batches of each local replica."""
        if self.layout.num_replicas == accumulation == 1 and self._gradient_dtype is None:
            return LoneStep(self.gradients, old, checks, checks_finite=self._checks_finite)
        memory = self.gradients.memory(context.data_parallel_group(), self.layout)
        keeper = KeptGradients(memory, accumulation=accumulation, checks_finite=self._checks_finite)
        return self._step_of(keeper, checks, old, accumulation)

    def _step_of(self, keeper: GradientKeeper, checks: StepChecks, old: OldGradients, accumulation: int) -> Step:
        """Return the object of a new step; the object ``keeper`` adds gradients, and stores or applies them."""
        buffers = self.buffers if self.layout.num_replicas > 1 else None
        group = context.data_parallel_group()
        agreement = StepAgreement(group, self.layout, keeper, buffers, checks, old)
        return Step(
            keeper,
            agreement,
            self.buffers,
            checks,
            accumulation=accumulation,
            checks_finite=self._checks_finite,
        )

    def _reshard(self) -> None:
        """Make ``fully_shard`` modules use shards again, if a forward pass has left their weights whole."""
        part: Any
        for part in self.module.modules():
            if is_fully_sharded(part):
                part.reshard()

    def _finish(self, reduction: MeanOrSum, *, add: bool) -> None:
        if self.step is None and self._left_at is not None:
            error, self._left_at = self._left_error(), None
            raise error
        step = self.step or self._begin(1, None)
        try:
            step.finish(reduction, add=add)
        except BaseException:
            self.abandon()
            raise
        if self._is_distributed:
            for parameter in self.module.parameters():
                local_gradient(parameter)  # a lone micro batch's gradient may be placed differently
        self._checks.end_step()
        joint_modules.setdefault(self, self._state.reference)
        self._end(is_complete=True)

    def abandon(self, *, index: int | None = None) -> None:
        """End the step, if there is one, without a gradient on any instance. Never raises."""
        if index is not None:  # an exception left the program's own loop
            self._left_at = index
        if self.step is not None:
            self._has_left = context.environment().contract.parallelism.is_shared
            if self._norm_groups is not None:
                self._norm_groups.abandon()
            self.step.abandon()
            self._end()
            self._state.lose()

    def _end(self, *, is_complete: bool = False) -> None:
        step, self.step, self.automatic.step = self.step, None, None
        running_loops.pop(self, None)
        if self.automatic.is_computing:
            self.automatic.end_computing()
        self._state.end()
        if self._has_one_local_replica:
            self.buffers.begin_pass()  # nothing announces a next pass outside the loop
        if step is not None:
            step.checks.end_loop(is_complete=is_complete)

    def _refuse(self, accumulation: int, refusal: float, *, add: bool) -> None:
        """Begin no step: abandon the open one, remove all gradients, and send ``refusal`` to all instances."""
        self.abandon()
        self.gradients.remove()
        refuse_step(context.data_parallel_group(), accumulation, refusal, add=add)
        self._state.lose()

    def _left_error(self) -> MicroBatchError:
        return MicroBatchError(
            f"micro batch {self._left_at} of this step was left by an exception, so the step has no gradient on "
            "any instance: catch the exception outside the whole step, and begin the next one with micro_batch(0)"
        )

    def _norm_error(self, call: str) -> BatchError:
        number = self.layout.num_local_replicas
        owned = f"{number} replica{'s' * (number > 1)}"
        return BatchError(
            f"{call} with batch_norm_group_size={self._norm_size} and {owned} in each instance: replicas of "
            "a group wait for each other at each batch norm layer. Write the inside of the loop as a function of "
            "one replica's micro batch, and call model.run_micro_batches(batch, body)"
        )


class MicroBatchScope:
    """A context in which the process runs one micro batch; its end adds the gradients, or abandons the step."""

    __slots__ = ("_index", "_randomness", "_step", "_steps", "_weight")

    def __init__(
        self, steps: ModelSteps, step: Step | LoneStep, index: int, weight: float, *, is_alone: bool = False
    ) -> None:
        self._steps = steps
        self._step = step
        self._index = index if is_alone else None
        self._weight = weight
        self._randomness = steps.randomness.of(step.begin_micro_batch(index, weight), steps.gradients.device)

    def __enter__(self) -> None:
        self._randomness.__enter__()
        self._steps.automatic.begin_computing()

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._randomness.__exit__(None, None, None)
        if error is not None and self._steps.step is not self._step:
            return  # a traceback kept the loop open: its step was abandoned, and another step may have begun
        if error is not None:
            self._steps.automatic.end_computing()
            self._steps.abandon(index=self._index)
            return
        try:
            self._steps.automatic.refuse_collectives()
            self._steps.automatic.end_computing()
            self._step.add(self._weight)
        except BaseException:
            self._steps.abandon()
            raise
