"""The steps of one model on this instance: each is begun, computed in micro batches, and ended or abandoned."""

import contextvars
import gc
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import partial
from itertools import count
from typing import Any, ClassVar, Final, TypeVar

import torch
from torch import nn
from torch.utils.data import RandomSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from popdist import context
from popdist.data.batch import Batch
from popdist.errors import BatchError, MicroBatchError, PopdistWarning, check_flags
from popdist.gradients.batch_marks import NO_MARK, BatchMark
from popdist.gradients.buffers import ReplicaBuffers, label_of_copy
from popdist.gradients.memory import ModelGradients
from popdist.gradients.old_gradients import OldGradients
from popdist.gradients.reduction import (
    CANNOT_SPLIT,
    IN_ANOTHER_LOOP,
    GradientSum,
    MeanOrSum,
    check_reduction,
    refuse_step,
)
from popdist.layout import ReplicaLayout
from popdist.training import optimizer_steps
from popdist.training.beside import BuffersBeside, ParametersBeside
from popdist.training.checks import CheckedSteps
from popdist.training.micro_batches import Nest, Split, check_weight, digest_of, split_batch, to_device
from popdist.training.norm_meetings import NormGroups
from popdist.training.outside_step import AutomaticReduction
from popdist.training.python_state import PythonState
from popdist.training.randomness import RandomScope, ReplicaRandomness
from popdist.training.replica_turns import ReplicaTurns
from popdist.training.step import PlainStep, Step
from popdist.training_loop import training_loop
from popdist.weights import sum_parameters

LEFT: Final = (
    "the last step of this model was lost on all instances, because a loop over its micro batches was left before "
    "its end (by break, return or an exception) or raised an error, here or on another instance"
)
BESIDE: Final = (
    "the last step of this model was lost, because the loop over its micro batches ran beside another one in "
    "zip(), which does not take both to their ends: write zip(..., strict=True)"
)
"""Why a step has no gradient."""


R = TypeVar("R")

MOST_LOOKS: Final = 3
"""Models of a process for which DataLoaders and modules are looked for: a look takes about a tenth of a second."""

_numbers: Final = count(1)


def _next_label() -> str | None:
    """What the next model is called on all instances; None for one that not all of them make."""
    is_everywhere = len(context.current_group().instances) == context.environment().contract.num_instances
    return str(next(_numbers)) if is_everywhere else None


def warn_of_shuffling_loaders() -> None:
    """Warn of a DataLoader of torch's that is being read, and shuffles what each instance reads by itself."""
    for found in gc.get_objects():
        if issubclass(type(found), _BaseDataLoaderIter) and found._num_yielded:  # noqa: SLF001 - torch has no other way
            sampler = getattr(found._index_sampler, "sampler", None)  # noqa: SLF001 - as above
            if type(sampler) is RandomSampler:
                warnings.warn(
                    f"a DataLoader with shuffle=True reads all {len(sampler)} samples on each instance, while a "
                    "model trains on micro batches: unless each instance has a dataset of its own, have them "
                    "dealt by popdist.data_loader(dataset, micro_batch_size, shuffle=True)",
                    PopdistWarning,
                    stacklevel=5,
                )
                return


def call_body(body: Callable[..., R], content: Nest) -> R:
    """``body`` of a micro batch: the items of a tuple or list are its arguments, anything else the only one."""
    return body(*content) if isinstance(content, tuple | list) else body(content)


class ModelSteps:
    """The steps of one module on this instance, one at a time.

    Args:
        module: Its gradients and buffers are those of all replicas after each step.
        layout: Which replicas of the model each instance owns.
        seed: Of the replicas' random states; None for the program's own.
        checks_finite: Whether to look for NaN and infinity in each micro batch's gradient.
        gradient_dtype: What gradients are rounded to; None for nothing.
        norm_size: Replicas whose batch norm layers share statistics.

    Attributes:
        num_looks: For how many models of this process DataLoaders were looked for.
        num_looks_beside: For how many modules were looked for that nothing wraps.
    """

    num_looks: ClassVar[int] = 0
    num_looks_beside: ClassVar[int] = 0

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
        self.randomness = ReplicaRandomness(seed, layout.replicas_of(context.instance_index()))
        self._module = module
        self._checks_finite = checks_finite
        self._gradient_dtype = gradient_dtype
        self._norm_size = norm_size
        self._label = _next_label()
        self._prepare()
        self._join()

    def _join(self) -> None:
        """All instances have this model: it is not a copy that one of them has made for itself."""
        self._is_joint = True
        optimizer_steps.join(self, self._module)

    def _prepare(self) -> None:
        """Make what a copy makes anew."""
        optimizer_steps.watch()
        self._mark = optimizer_steps.StepMark(self, self._module)
        self._num_local_replicas = self.layout.num_local_replicas
        self.step: Step | PlainStep | None = None
        self._left_at: int | None = None
        self._has_looked = self._is_joint = False
        self.gradients = ModelGradients(self._module, self._gradient_dtype)
        self.buffers = ReplicaBuffers(self._module, self._label)
        self._python_state = PythonState(self._module)
        self._checked_steps = CheckedSteps()
        self._norm_groups = NormGroups(self._norm_size, self.layout) if self._norm_size > 1 else None
        self.automatic = AutomaticReduction(
            self._module,
            self.gradients,
            self.buffers,
            self.layout,
            self._checked_steps,
            checks_finite=self._checks_finite,
        )
        self._is_alone_among_others = self.layout.num_replicas > self.layout.num_local_replicas == 1
        if self._is_alone_among_others:
            self.buffers.begin_pass()

    def __getstate__(self) -> dict[str, Any]:
        kept = ("layout", "randomness", "_module", "_checks_finite", "_gradient_dtype", "_norm_size", "_label")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._label = label_of_copy(self._label)
        self._prepare()

    def forward(self, forward: Callable[[], R]) -> R:
        """Call ``forward``, the module's own, and see what it changes beside its result."""
        is_outside = not RandomScope.is_entered()
        if is_outside and not self._module.training:
            return forward()
        if self._checked_steps.is_next_checked() and self._python_state.looks(self._checked_steps.number):
            forward = partial(self._python_state.watch, forward)
        return self.buffers.run_outside(forward) if is_outside else forward()

    def begin(self, accumulation: int) -> Step | PlainStep:
        """Start a step, from no gradients."""
        training_loop.begin_step(self._mark)
        is_checked, checks_finite = self._checked_steps.is_next_checked(), self._checks_finite
        old = OldGradients(self._module, self.gradients)
        if self.layout.num_replicas == accumulation == 1 and self._gradient_dtype is None:
            self.step = PlainStep(self.gradients, old, is_checked=is_checked, checks_finite=checks_finite)
        else:
            weights = beside = None
            if is_checked and self.layout.num_replicas > 1:
                weights = sum_parameters(self._module)
                beside = ParametersBeside(self._module, self.buffers.other_modules())
            memory = self.gradients.memory(context.current_group(), self.layout)
            self.step = Step(
                memory,
                self.buffers,
                GradientSum(memory, self.buffers if self.layout.num_replicas > 1 else None, weights, old),
                accumulation=accumulation,
                beside=beside,
                checks_finite=checks_finite,
            )
        self.automatic.step = self.step
        self._left_at = None
        self._mark.begin()
        return self.step

    def micro_batches(
        self,
        batch: Nest,
        accumulation: int,
        *,
        reduction: MeanOrSum,
        weights: Sequence[float] | None,
        split: Split | None,
        add: bool,
    ) -> Generator[Nest, None, None]:
        """A whole step, as its micro batches: see ``ReplicatedModel.micro_batches``."""
        if self._norm_groups is not None and self.layout.num_local_replicas > 1:
            raise self._norm_error("micro_batches()")
        num_entered = MicroBatchScope.num_entered
        step, contents, counts = self._open(batch, accumulation, reduction, weights, split, add)
        beside = BuffersBeside() if step.is_checked and self._looks_beside() else None
        for index, content in enumerate(contents):
            if content is not None:
                with MicroBatchScope(self, step, index, counts[index]):
                    if self._norm_groups is None:
                        yield to_device(content, self.gradients.device)
                    else:
                        with self._norm_groups.turn(index):
                            yield to_device(content, self.gradients.device)
        self._finish(reduction, add=add)
        if beside is not None:
            beside.warn()
        if MicroBatchScope.are_open:
            MicroBatchScope.mark_beside(num_entered)

    def _open(
        self,
        batch: Nest,
        accumulation: int,
        reduction: MeanOrSum,
        weights: Sequence[float] | None,
        split: Split | None,
        add: bool,  # noqa: FBT001 - as the others
    ) -> tuple[Step | PlainStep, list[Nest], Sequence[float]]:
        """Begin the step of a whole batch: its micro batches, and what each counts."""
        try:
            if reduction != "mean":
                check_reduction(reduction)
            if add:
                check_flags(BatchError, add=add)
            accumulation, contents, counts = split_batch(
                batch, self._num_local_replicas, accumulation, split=split, weights=weights
            )
            if self._norm_groups is not None:
                self._norm_groups.check_batch(contents, counts)
        except BatchError:
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
        step = self.begin(accumulation)
        try:
            mark = NO_MARK if self.layout.num_instances == 1 else self._mark_of(batch, is_checked=step.is_checked)
            step.announce(max(counts), reduction, mark, add=add)
            if reduction == "sum" and weights is None:
                counts = [float(content is not None) for content in contents]
            if self._norm_groups is not None:
                step.hear_of_others()
                self._norm_groups.begin_step(context.current_group(), counts, accumulation)
        except BaseException:
            self.abandon()
            raise
        return step, contents, counts

    def run_micro_batches(  # noqa: PLR0913 - those of micro_batches(), and the function
        self,
        batch: Nest,
        body: Callable[..., R],
        accumulation: int,
        *,
        reduction: MeanOrSum,
        weights: Sequence[float] | None,
        split: Split | None,
        add: bool,
    ) -> list[R]:
        """A whole step, with ``body`` called for each micro batch: see ``ReplicatedModel.run_micro_batches``."""
        if self._norm_groups is None or self.layout.num_local_replicas == 1:
            micro_batches = self.micro_batches(
                batch, accumulation, reduction=reduction, weights=weights, split=split, add=add
            )
            with closing(micro_batches):  # which a traceback would keep open
                return [contextvars.copy_context().run(call_body, body, content) for content in micro_batches]
        step, contents, counts = self._open(batch, accumulation, reduction, weights, split, add)
        beside = BuffersBeside() if step.is_checked and self._looks_beside() else None
        try:
            self.automatic.begin_computing()
            turns: ReplicaTurns[R] = ReplicaTurns(step, self.randomness, self.buffers, self.gradients)
            device = self.gradients.device
            bodies = [None if it is None else partial(call_body, body, to_device(it, device)) for it in contents]
            results = turns.run_all(self._norm_groups, bodies, counts)
        except BaseException:
            self.abandon()
            raise
        self._finish(reduction, add=add)
        if beside is not None:
            beside.warn()
        return results

    def _norm_error(self, call: str) -> BatchError:
        number = self.layout.num_local_replicas
        owned = f"{number} replica{'s' * (number > 1)}"
        return BatchError(
            f"{call} with batch_norm_group_size={self._norm_size} and {owned} in each instance: replicas of "
            "a group wait for each other at each batch norm layer. Write the inside of the loop as a function of "
            "one replica's micro batch, and call model.run_micro_batches(batch, body)"
        )

    def _looks_beside(self) -> bool:
        """Whether to look for modules that nothing wraps: in a model's first step, once for a few models."""
        if context.instance_index() or self.layout.num_replicas == 1:
            return False
        if self._checked_steps.number > 1 or ModelSteps.num_looks_beside == MOST_LOOKS:
            return False
        ModelSteps.num_looks_beside += 1
        return True

    def _mark_of(self, batch: Nest, *, is_checked: bool) -> BatchMark:
        """What tells ``batch`` from those of the other instances."""
        if isinstance(batch, Batch):
            return BatchMark(epoch=batch.epoch, stop=batch.stop)
        return BatchMark(digest=self._look_at(batch)) if is_checked else NO_MARK

    def _look_at(self, batch: Nest) -> int:
        """A digest of a batch that popdist has not dealt; once, a warning if each instance reads all data."""
        if hasattr(batch, "micro_batches"):
            return 0
        is_first = context.environment().contract.instance_index == 0
        if is_first and not self._has_looked and ModelSteps.num_looks < MOST_LOOKS:
            ModelSteps.num_looks += 1
            warn_of_shuffling_loaders()
        self._has_looked = True
        return digest_of(batch)

    def micro_batch(self, index: int, weight: float, accumulation: int) -> "MicroBatchScope":
        """What to enter for micro batch ``index`` of the step; the first one starts it."""
        if self._norm_groups is not None:
            raise self._norm_error("micro_batch()")
        weight, is_first = check_weight(weight), self.step is None
        if is_first and self._left_at is not None and index > self._left_at:
            raise self._left_error()
        step = self.step or self.begin(accumulation)
        if step.accumulation != accumulation:
            raise BatchError(f"accumulation={accumulation} in a step that began with {step.accumulation}")
        try:
            return MicroBatchScope(self, step, index, weight, is_alone=True)
        except BatchError:
            if is_first:
                self._end()
            raise

    def finish(self, reduction: MeanOrSum, *, add: bool) -> None:
        """End the step with the gradient of all replicas: see ``ReplicatedModel.reduce_gradients``."""
        check_reduction(reduction)
        check_flags(BatchError, add=add)
        self._finish(reduction, add=add)

    def _finish(self, reduction: MeanOrSum, *, add: bool) -> None:
        if self.step is None and self._left_at is not None:
            error, self._left_at = self._left_error(), None
            raise error
        step = self.step or self.begin(1)
        try:
            step.finish(reduction, add=add)
        except BaseException:
            self.abandon()
            raise
        self._checked_steps.end_step()
        if not self._is_joint:
            self._join()
        self._end()

    def abandon(self, reason: str = LEFT) -> None:
        """End the step without a gradient on any instance, if there is one. Never raises."""
        if self.step is not None:
            if self._norm_groups is not None:
                self._norm_groups.leave()
            self.step.abandon()
            self._end()
            self._mark.lose(reason)

    def leave(self, index: int | None, reason: str) -> None:
        """Abandon the step in micro batch ``index`` of a loop of the program's own; None in ``micro_batches``."""
        self._left_at = index
        self.abandon(reason)

    def _refuse(self, accumulation: int, refusal: float, *, add: bool) -> None:
        """Make no step, nor the one that is open, and tell the others so; there are no gradients anywhere."""
        self.abandon()
        self.gradients.remove()
        refuse_step(context.current_group(), accumulation, refusal, add=add)
        self._mark.lose(LEFT)

    def _left_error(self) -> MicroBatchError:
        return MicroBatchError(
            f"micro batch {self._left_at} of this step was left by an exception, so the step has no gradient on "
            "any instance: catch the exception outside the whole step, and begin the next one with micro_batch(0)"
        )

    def _end(self) -> None:
        self.step = self.automatic.step = None
        if self.automatic.is_computing:
            self.automatic.end_computing()
        self._mark.end()
        if self._is_alone_among_others:
            self.buffers.begin_pass()  # the next pass may be one outside the loop, which nothing announces


class MicroBatchScope:
    """Within it the process is one replica: its random states are in place, and its gradients are expected.

    Leaving it takes the gradients. Leaving it by an exception abandons the step on every instance.

    Attributes:
        num_entered: How many were entered so far in this process.
        are_open: Those that are entered and not left.
        number: Which of them this one is, from 1.
        leaving: Why the step is lost if this one is left by an exception.
    """

    __slots__ = ("_index", "_randomness", "_step", "_steps", "_weight", "leaving", "number")

    num_entered: ClassVar[int] = 0
    are_open: ClassVar[list["MicroBatchScope"]] = []

    def __init__(
        self, steps: ModelSteps, step: Step | PlainStep, index: int, weight: float, *, is_alone: bool = False
    ) -> None:
        self._steps = steps
        self._step = step
        self._index = index if is_alone else None
        self._weight = weight
        self._randomness = steps.randomness.of(step.begin(index, weight), steps.gradients.device)
        self.number = 0
        self.leaving = LEFT

    @classmethod
    def mark_beside(cls, num_entered: int) -> None:
        """A loop has ended that began after ``num_entered`` scopes: those entered since are of loops beside it."""
        for scope in cls.are_open:
            if scope.number > num_entered:
                scope.leaving = BESIDE

    def __enter__(self) -> None:
        self._randomness.__enter__()
        self._steps.automatic.begin_computing()
        MicroBatchScope.num_entered += 1
        self.number = MicroBatchScope.num_entered
        self.are_open.append(self)

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self.are_open.remove(self)
        self._randomness.__exit__()
        if error is not None and self._steps.step is not self._step:
            return  # a loop that a traceback kept open: its step has been abandoned, and another may have begun
        self._steps.automatic.end_computing()
        if error is not None:
            self._steps.leave(self._index, self.leaving)
            return
        try:
            self._step.collect(self._weight)
        except BaseException:
            self._steps.abandon()
            raise
