"""One step's gradient, micro batch by micro batch: weights, accumulation, and what happens when it is abandoned.

The instances speak once or twice in a step. When a loop over a whole batch starts, each says what its heaviest
micro batch weighs, without waiting for an answer: a micro batch's share of the heaviest one of the job is needed
only after the first backward pass. When the step ends, each says that it has all its gradients, and only then are
they exchanged (`popdist.gradients.reduction`), or taken from what went before (`popdist.gradients.overlap`).

Nothing is added up and nobody is asked, so the step costs as little as can be, and its bits are those of a loop
without popdist. What it says and refuses is what `popdist.training.step` does.
"""

import operator
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Final

from torch import Tensor

from popdist.errors import BatchError, PopdistError
from popdist.gradients.buffers import ReplicaBuffers
from popdist.gradients.memory import GradientMemory, ModelGradients
from popdist.gradients.reduction import (
    GradientSum,
    NotFinite,
    Reduction,
    check_whole_job,
    lost_step,
    not_finite_error,
)
from popdist.gradients.rows import GradientRows
from popdist.groups import Exchange, Group
from popdist.headers import as_floats, as_words
from popdist.layout import ReplicaLayout
from popdist.progress import progress_page
from popdist.tree import TreeSum, finish

if TYPE_CHECKING:
    from popdist.gradients.overlap import OverlappedSum

FAREWELL_SECONDS: Final = 3.0
"""How long an instance that abandons a step waits for the others to hear of it."""

_CANNOT_SPLIT: Final = -1.0
"""Said in place of the heaviest weight."""


class Step:
    """The gradient of one step: made when it starts, fed after each backward pass, finished or abandoned.

    Args:
        group: All instances of the job.
        layout: Which replicas each of them owns.
        memory: Of the gradients of the model's parameters. The ``.grad`` of those that are trained is set to None.
        buffers: Of the model.
        accumulation: Micro batches of each local replica.
        checks_finite: Whether to look for NaN and infinity in each micro batch's gradient.
    """

    def __init__(
        self,
        group: Group,
        layout: ReplicaLayout,
        *,
        memory: GradientMemory,
        buffers: ReplicaBuffers,
        accumulation: int,
        checks_finite: bool,
    ) -> None:
        if accumulation < 1:
            raise BatchError(f"accumulation={accumulation} must be at least 1")
        self.accumulation = accumulation
        self._group = group
        self._layout = layout
        self._memory = memory
        self._gradients = memory.gradients
        self._buffers = buffers
        self._checks_finite = checks_finite
        check_whole_job(group, layout)
        self._gradients.clear()
        memory.begin()
        self._announced: Exchange | None = None
        self._overlap: OverlappedSum | None = None
        self._scales = False
        self._unit: float | None = 1.0
        self._position = 0
        self._not_finite: NotFinite | None = None
        self._is_open = True
        self._current: GradientRows | None = None
        self._begin_replica()
        if layout.num_replicas > 1:
            buffers.begin_step()

    @property
    def num_micro_batches(self) -> int:
        """Micro batches of this instance in this step, those without samples included."""
        return self._layout.num_local_replicas * self.accumulation

    @cached_property
    def _sum(self) -> GradientSum:
        return GradientSum(self._group, self._layout, self._memory, self._buffers)

    def announce(self, heaviest: float, reduction: Reduction) -> None:
        """Tell the others this instance's heaviest weight; for a mean, all are divided by the job's."""
        self._scales = reduction == "mean"
        if self._layout.num_instances == 1:
            self._group.raise_failure()
            self._set_unit([heaviest])
        else:
            self._overlap = self._memory.begin_overlap(scales=self._scales)
            offer = 0 if self._overlap is None else self._overlap.number
            self._announced = _announce(self._group, self.accumulation, heaviest, offer)
            self._unit = None
            if self._overlap is not None:
                self._overlap.listen(self._announced)

    def begin(self, index: int, weight: float) -> int:
        """Get ready for micro batch ``index``, which counts ``weight``; those left out before it have no samples.

        Returns:
            The job-wide number of its replica.

        Raises:
            BatchError: If there is no such micro batch, or it or a later one is done.
        """
        if not self._position <= index < self.num_micro_batches:
            raise out_of_order(index, self._position, self._layout.num_local_replicas, self.accumulation)
        self._skip_to(index)
        self._current = self._next_rows()
        if self._overlap is not None and index + 1 == self.num_micro_batches:
            self._overlap.begin(self._rows, self._sum.rows, weight)
        return self._replica

    def take(self, parameter: Tensor) -> None:
        """A gradient of the micro batch that was begun has been accumulated in ``.grad``."""
        if self._current is not None:
            self._current.take(parameter)
            if self._overlap is not None:
                self._overlap.take(parameter)

    def collect(self, weight: float) -> None:
        """Take the gradients that the backward passes of the micro batch that was begun left in ``.grad``.

        Raises:
            BatchError: If the whole job has no sample in this step.
            MicroBatchError: If an instance could not split its batch.
            CollectiveError, BackendError: If the instances disagree, or one was lost.
        """
        unit = self._agree_on_unit()
        if self._checks_finite and weight and self._not_finite is None:
            parameter = self._gradients.not_finite()
            self._not_finite = None if parameter is None else NotFinite(self._replica, parameter)
        rows, self._current = self._current or self._next_rows(), None
        if weight:
            self._used |= self._gradients.used()
            self._gradients.fill(rows, times=weight / unit)
        else:
            rows.clear()
        self._gradients.clear()
        self._has_run = True
        self._push(rows, weight)

    def finish(self, reduction: Reduction) -> None:
        """Set ``.grad`` of each parameter, and the buffers, to those of the whole job's step.

        Raises:
            BatchError: If the weights of the whole job add up to 0.
            GradientError: If gradients are checked and one is not finite.
            MicroBatchError: If an instance has abandoned the step or could not split its batch.
            CollectiveError, BackendError: If the instances disagree, or one was lost.
        """
        unit = self._agree_on_unit()
        self._skip_to(self.num_micro_batches)
        self._is_open = False
        self._sum.finish(reduction, unit=unit, not_finite=self._not_finite, overlap=self._overlap)
        if self._overlap is not None:
            self._overlap.end()
        elif self._announced is not None:
            self._memory.prepare_overlap()

    def abandon(self) -> None:
        """Leave without a gradient, and tell the others, unless all know already. Never raises."""
        self._gradients.clear()
        self._buffers.undo()
        try:
            if self._is_open:
                self._say_farewell()
        finally:
            self._is_open = False
            if self._overlap is not None:
                self._overlap.end()

    def _say_farewell(self) -> None:
        with suppress(PopdistError):
            if self._announced is not None:
                self._announced.wait(FAREWELL_SECONDS)
                self._agree_on_unit()
            self._sum.abandon().wait(FAREWELL_SECONDS)

    @property
    def _replica(self) -> int:
        """Job-wide number of the replica whose micro batch is next."""
        first = self._layout.replicas_of(self._group.backend.instance_index).start
        return first + self._position // self.accumulation

    def _begin_replica(self) -> None:
        self._rows: TreeSum[GradientRows] = TreeSum(self.accumulation, self._memory.add)
        self._weights: TreeSum[float] = TreeSum(self.accumulation, operator.add)
        self._used = 0
        self._has_run = False

    def _skip_to(self, index: int) -> None:
        while self._position < index:
            rows = self._next_rows()
            rows.clear()
            self._push(rows, 0.0)

    def _next_rows(self) -> GradientRows:
        return self._memory.rows_for(self._position // self.accumulation, self._position % self.accumulation)

    def _push(self, rows: GradientRows, weight: float) -> None:
        """Add the next micro batch to its replica, and a finished replica to the job."""
        self._rows.push(rows)
        self._weights.push(weight)
        self._position += 1
        if self._rows.position == self.accumulation:
            replica_sum = finish(self._rows.nodes, self.accumulation, self._memory.add)
            weights = finish(self._weights.nodes, self.accumulation, operator.add)
            self._sum.push(replica_sum, weights, self._used)
            self._buffers.end_replica(has_run=self._has_run)
            self._begin_replica()

    def _agree_on_unit(self) -> float:
        """What weights are divided by before they scale a gradient; waits for the others once, if at all."""
        if self._unit is None and self._announced is not None:
            try:
                heaviest = [weight for words in self._announced.wait() for weight in as_floats(words[:1])]
                self._set_unit(heaviest)
            except PopdistError:
                self._is_open = False
                raise
        return self._unit or 1.0

    def _set_unit(self, heaviest: list[float]) -> None:
        if refused := [instance for instance, weight in enumerate(heaviest) if weight == _CANNOT_SPLIT]:
            raise lost_step(refused, "could not split the batch into micro batches (see the error there)")
        if not any(heaviest):
            raise BatchError("the batches of all instances have 0 samples, so this step has no gradient")
        self._unit = max(heaviest) if self._scales else 1.0


def out_of_order(index: int, position: int, num_local_replicas: int, accumulation: int) -> BatchError:
    """The error of a micro batch that is not at or after ``position``, the next one of this instance."""
    return BatchError(
        f"micro_batch({index}), where {position} is the next of this instance's "
        f"{num_local_replicas * accumulation} micro batches ({num_local_replicas} local replicas x "
        f"accumulation {accumulation}): take them in order, then call reduce_gradients()"
    )


def refuse_step(group: Group, accumulation: int) -> None:
    """Tell the others, in place of a step, that this instance could not split its batch. Never raises."""
    with suppress(PopdistError):
        _announce(group, accumulation, _CANNOT_SPLIT, 0).wait(FAREWELL_SECONDS)


def _announce(group: Group, accumulation: int, heaviest: float, offer: int) -> Exchange:
    return group.start(f"micro_batches(accumulation={accumulation})", [*as_words([heaviest]), offer])


class PlainStep:
    """A step with one micro batch in the whole job: made when it starts, fed once, finished or abandoned.

    Args:
        group: The one instance of the job.
        gradients: Of the model's parameters. The ``.grad`` of those that are trained is set to None.
        checks_finite: Whether to look for NaN and infinity in the gradient.
    """

    accumulation = 1

    def __init__(self, group: Group, gradients: ModelGradients, *, checks_finite: bool) -> None:
        self._group = group
        self._gradients = gradients
        self._checks_finite = checks_finite
        self._weight: float | None = None
        gradients.clear()

    def announce(self, heaviest: float, _reduction: Reduction) -> None:
        """See that there is something to do.

        Raises:
            BatchError: If the micro batch weighs nothing.
            PopdistError: What was found where nothing could be raised.
        """
        self._group.raise_failure()
        if not heaviest:
            raise BatchError("the batches of all instances have 0 samples, so this step has no gradient")

    def begin(self, index: int, _weight: float) -> int:
        """Get ready for micro batch ``index``, which is 0; the number of its replica.

        Raises:
            BatchError: If there is no such micro batch, or it is done.
        """
        position = 0 if self._weight is None else 1
        if index or position:
            raise out_of_order(index, position, num_local_replicas=1, accumulation=1)
        return 0

    def take(self, parameter: Tensor) -> None:
        """A gradient has been accumulated: it stays where it is."""

    def collect(self, weight: float) -> None:
        """The micro batch has seen its backward passes."""
        self._weight = weight

    def finish(self, reduction: Reduction) -> None:
        """Leave each ``.grad`` as it is; for a sum, times the weight.

        Raises:
            BatchError: If there was no micro batch, or it had no weight: then there is no mean.
            GradientError: If gradients are checked and one is not finite.
        """
        if reduction == "mean" and not self._weight:
            raise BatchError("the one micro batch of this step has no weight, so this step has no gradient")
        if self._checks_finite and self._weight:
            self._check_finite()
        if reduction == "sum" and self._weight != 1:
            gradients = self._gradients.find()
            rows = gradients.make_rows()
            gradients.fill(rows, times=self._weight or 0.0)
            gradients.give(rows, gradients.used())
        progress_page.count_step()

    def _check_finite(self) -> None:
        gradients = self._gradients.find()
        parameter = gradients.not_finite()
        if parameter is not None:
            raise not_finite_error(NotFinite(0, parameter), gradients)

    def abandon(self) -> None:
        """Leave without a gradient."""
        self._gradients.clear()
