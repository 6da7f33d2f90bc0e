"""What `ReplicatedModel` does for its module: step after step, each micro batch as one of the replicas."""

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

from torch import nn

from popdist import context
from popdist.errors import BatchError, MicroBatchError
from popdist.gradients.model_gradients import ModelGradients
from popdist.gradients.replica_buffers import ReplicaBuffers
from popdist.gradients.step_end import Reduction, check_reduction
from popdist.training import optimizers
from popdist.training.micro_batches import Nest, Split, check_weight, split_batch, to_device
from popdist.training.outside_backward import AutomaticReduction
from popdist.training.replica_randomness import RandomScope, ReplicaRandomness
from popdist.training.step import GradientStep, PlainStep, refuse_step
from popdist.training_loop import training_loop


class Replication:
    """The steps of one module in this instance.

    Args:
        module: Its gradients and buffers are those of all replicas after each step.
        seed: Of the replicas' random states.
        checks_finite: Whether to look for NaN and infinity in each micro batch's gradient.
    """

    def __init__(self, module: nn.Module, *, seed: int, checks_finite: bool) -> None:
        contract = context.environment().contract
        self.layout = contract.layout
        self.randomness = ReplicaRandomness(seed, self.layout.replicas_of(contract.instance_index))
        self._module = module
        self._checks_finite = checks_finite
        self._prepare()

    def _prepare(self) -> None:
        """What a copy makes anew."""
        optimizers.watch()
        self._step: GradientStep | PlainStep | None = None
        self._gradients = ModelGradients(self._module)
        self._buffers = ReplicaBuffers(self._module)
        self.automatic = AutomaticReduction(
            self._module, self._gradients, self._buffers, self.layout, checks_finite=self._checks_finite
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("layout", "randomness", "_module", "_checks_finite")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._prepare()

    def begin(self, accumulation: int) -> GradientStep | PlainStep:
        """Start a step, from no gradients.

        Raises:
            MicroBatchError: If there is one already; it is abandoned on all instances.
            CollectiveError: If only a part of the job is here.
        """
        if self._step is not None:
            self.abandon()
            raise MicroBatchError(
                "a step began before the one before it had ended: end each micro_batches loop, or call "
                "reduce_gradients() after the micro batches; that step has no gradient on any instance"
            )
        training_loop.begin_step(self)
        self._step = self._make_step(accumulation)
        self.automatic.step = self._step
        optimizers.begin(self)
        return self._step

    def _make_step(self, accumulation: int) -> GradientStep | PlainStep:
        group = context.current_group()
        if self.layout.num_replicas == accumulation == 1:
            return PlainStep(group, self._gradients, checks_finite=self._checks_finite)
        return GradientStep(
            group,
            self.layout,
            memory=self._gradients.memory(group, self.layout),
            buffers=self._buffers,
            accumulation=accumulation,
            checks_finite=self._checks_finite,
        )

    def micro_batches(
        self,
        batch: Nest,
        accumulation: int,
        *,
        reduction: Reduction,
        weights: Sequence[float] | None,
        split: Split | None,
    ) -> Iterator[Nest]:
        """A whole step, as its micro batches: see ``ReplicatedModel.micro_batches``."""
        try:
            check_reduction(reduction)
            accumulation, found = split_batch(
                batch, self.layout.num_local_replicas, accumulation, split=split, weights=weights
            )
        except BatchError:
            refuse_step(context.current_group(), accumulation)
            raise
        step = self.begin(accumulation)
        try:
            step.announce(max([it.weight for it in found]), reduction)
        except BaseException:
            self.abandon()
            raise
        for index, (weight, content) in enumerate(found):
            if content is not None:
                counted = 1.0 if reduction == "sum" and weights is None else weight
                with self._enter(step, index, counted):
                    yield to_device(content, self._gradients.device)
        self.reduce(reduction)

    def micro_batch(self, index: int, weight: float, accumulation: int) -> "MicroBatchScope":
        """What to enter for micro batch ``index`` of the step; the first one starts it."""
        weight, is_first = check_weight(weight), self._step is None
        step = self._step or self.begin(accumulation)
        if step.accumulation != accumulation:
            raise BatchError(f"accumulation={accumulation} in a step that began with {step.accumulation}")
        try:
            return self._enter(step, index, weight)
        except BatchError:
            if is_first:
                self._close()
            raise

    def _enter(self, step: GradientStep | PlainStep, index: int, weight: float) -> "MicroBatchScope":
        replica = step.begin(index, weight)
        return MicroBatchScope(self, step, weight, self.randomness.of(replica, self._gradients.device))

    def reduce(self, reduction: Reduction) -> None:
        """End the step: see ``ReplicatedModel.reduce_gradients``."""
        check_reduction(reduction)
        step = self._step or self.begin(1)
        try:
            step.finish(reduction)
        except BaseException:
            self.abandon()
            raise
        self._close()

    def trains(self, parameters: set[int]) -> bool:
        """Whether a parameter of the module is among ``parameters``, which are identities."""
        return any(id(parameter) in parameters for parameter in self._module.parameters())

    def is_in(self, step: GradientStep | PlainStep) -> bool:
        """Whether ``step`` is the one that is being made."""
        return self._step is step

    def abandon(self) -> None:
        """End the step without a gradient on any instance, if there is one. Never raises."""
        if self._step is not None:
            self._step.abandon()
            self._close()

    def _close(self) -> None:
        self._step = self.automatic.step = None
        self.automatic.is_computing = False
        optimizers.end(self)
        if self.layout.num_replicas > self.layout.num_local_replicas == 1:
            self._buffers.begin_step()  # the next pass may be one outside the loop, which nothing announces


class MicroBatchScope:
    """Within it the process is one replica: its random states are in place, and its gradients are expected.

    Leaving it takes the gradients. Leaving it by an exception abandons the step on every instance.
    """

    def __init__(
        self, owner: Replication, step: GradientStep | PlainStep, weight: float, randomness: RandomScope
    ) -> None:
        self._owner = owner
        self._step = step
        self._weight = weight
        self._randomness = randomness

    def __enter__(self) -> None:
        self._randomness.__enter__()
        self._owner.automatic.is_computing = True

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._randomness.__exit__()
        if error is not None and not self._owner.is_in(self._step):
            return  # a loop that a traceback kept open: its step has been abandoned, and another may have begun
        self._owner.automatic.is_computing = False
        if error is not None:
            self._owner.abandon()
            context.current_group().fail_next(
                MicroBatchError(
                    "this instance left a micro_batches loop before its end (by break, return or an exception), "
                    "so that step has no gradient on any instance; from here on a new loop may begin"
                )
            )
            return
        try:
            self._step.collect(self._weight)
        except BaseException:
            self._owner.abandon()
            raise
