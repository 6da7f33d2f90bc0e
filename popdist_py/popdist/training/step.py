"""One step of a model on this instance: its micro batches in order, each added to the gradient of its replica."""

import operator
from dataclasses import dataclass

from torch import Tensor

from popdist.errors import BatchError
from popdist.gradients.batch_marks import BatchMark
from popdist.gradients.buffers import ReplicaBuffers
from popdist.gradients.flat_buffers import FlatGradient
from popdist.gradients.memory import GradientMemory, ModelGradients
from popdist.gradients.old_gradients import OldGradients
from popdist.gradients.reduction import GradientSum, MeanOrSum, NotFinite, not_finite_error
from popdist.progress import progress_page
from popdist.training.beside import ParametersBeside
from popdist.training.python_state import take_fault
from popdist.tree import TreeSum


class Step:
    """One step: made when it starts, given each micro batch's gradient, then finished or abandoned.

    Args:
        memory: Of the gradients of the model's parameters.
        buffers: Of the model.
        total: The step's sum over all replicas of the job.
        accumulation: Micro batches of each local replica.
        beside: The parameters of other models; None where the checks are not made that cost time.
        checks_finite: Whether to look for NaN and infinity in each micro batch's gradient.
    """

    def __init__(
        self,
        memory: GradientMemory,
        buffers: ReplicaBuffers,
        total: GradientSum,
        *,
        accumulation: int,
        beside: ParametersBeside | None,
        checks_finite: bool,
    ) -> None:
        self.accumulation = accumulation
        self.is_checked = beside is not None
        self._memory = memory
        self._gradients = memory.gradients
        self._buffers = buffers
        self._beside = beside
        self._checks_finite = checks_finite
        self._sum = total
        self._num_micro_batches = memory.layout.num_local_replicas * accumulation
        self._position = 0
        self._not_finite: NotFinite | None = None
        self._current: FlatGradient | None = None
        self._open: dict[int, _ReplicaSum] = {}
        memory.begin_step()
        if memory.layout.num_replicas > 1:
            buffers.begin_step(is_checked=self.is_checked)

    def announce(self, heaviest: float, reduction: MeanOrSum, batch: BatchMark, *, add: bool) -> None:
        """Tell the others that this instance begins a step of a whole batch, and its heaviest weight."""
        self._sum.announce(self.accumulation, heaviest, reduction, batch, add=add)

    def begin(self, index: int, weight: float) -> int:
        """Get ready for micro batch ``index``, which counts ``weight``; those left out before it have no samples.

        Returns:
            The job-wide number of its replica.
        """
        if not self._position <= index < self._num_micro_batches:
            num_local_replicas = self._memory.layout.num_local_replicas
            raise _out_of_order(index, self._position, num_local_replicas, self.accumulation)
        self._skip_to(index)
        self._current = self._next_rows()
        if self._sum.goes_early and index + 1 == self._num_micro_batches:
            self._sum.begin_last(self._sum_of_replica().rows, weight)
        return self._replica

    def take(self, parameter: Tensor) -> None:
        """A gradient of the micro batch that was begun has been accumulated in ``.grad``."""
        if self._current is not None:
            self._current.move_in(parameter, even_small=self._sum.goes_early)
            if self._sum.goes_early:
                self._sum.take(parameter)

    def collect(self, weight: float) -> None:
        """Take the gradients that the backward passes of the micro batch that was begun left in ``.grad``."""
        unit = self._sum.unit()
        if self._checks_finite and weight and self._not_finite is None:
            parameter = self._gradients.not_finite()
            self._not_finite = None if parameter is None else NotFinite(self._replica, parameter)
        rows, self._current = self._current or self._next_rows(), None
        if weight:
            self._sum.used |= self._gradients.fill(rows, times=weight / unit, clears=True)
        else:
            rows.clear()
            self._gradients.clear()
        self._push(rows, weight, has_run=True)

    def hear_of_others(self) -> None:
        """Wait until all instances have announced their steps: see :meth:`GradientSum.unit`."""
        self._sum.unit()

    def collect_in_turn(self, index: int, weight: float | None) -> None:
        """Take the gradients of micro batch ``index``, where replicas take turns; None for one without samples.

        The replicas of a group come step by step, and at each step in their order.
        """
        self._position = index
        if weight is None:
            self._skip_to(index + 1)
        else:
            self.collect(weight)

    def finish(self, reduction: MeanOrSum, *, add: bool) -> None:
        """Set ``.grad`` of each parameter, and the buffers, to those of the whole job's step."""
        self._sum.unit()
        self._skip_to(self._num_micro_batches)
        fault = self._buffers.fault or take_fault()
        if fault is None and self._beside is not None:
            fault = self._beside.fault()
        self._sum.finish(reduction, self._not_finite, fault, add=add)
        self._buffers.end_step()

    def abandon(self) -> None:
        """Leave without a gradient, and tell the others, unless all know already. Never raises."""
        self._gradients.clear()
        self._buffers.undo()
        self._buffers.end_step()
        self._sum.abandon()

    @property
    def _replica(self) -> int:
        """Job-wide number of the replica whose micro batch is next."""
        return self._memory.first_replica + self._position // self.accumulation

    def _skip_to(self, index: int) -> None:
        while self._position < index:
            rows = self._next_rows()
            rows.clear()
            self._push(rows, 0.0, has_run=False)

    def _next_rows(self) -> FlatGradient:
        return self._memory.room_for(*divmod(self._position, self.accumulation))

    def _push(self, rows: FlatGradient, weight: float, *, has_run: bool) -> None:
        """Add the next micro batch to its replica, and a finished replica to the job."""
        if self.accumulation > 1:
            replica, own = self._position // self.accumulation, self._sum_of_replica()
            own.rows.push(rows)
            own.weights.push(weight)
            own.has_run |= has_run
            if own.rows.position < self.accumulation:
                self._position += 1
                return
            del self._open[replica]
            rows, weight, has_run = own.rows.total, own.weights.total, own.has_run
        self._position += 1
        self._sum.push(rows, weight)
        self._buffers.end_replica(has_run=has_run)

    def _sum_of_replica(self) -> "_ReplicaSum":
        """What the replica whose micro batch is next has brought so far."""
        replica = self._position // self.accumulation
        if replica not in self._open:
            self._open[replica] = _ReplicaSum(
                TreeSum(self.accumulation, self._memory.add_micro_batches),
                TreeSum(self.accumulation, operator.add),
            )
        return self._open[replica]


@dataclass(slots=True)
class _ReplicaSum:
    """What the micro batches of one replica have brought: gradients, weights, and whether one had samples."""

    rows: TreeSum[FlatGradient]
    weights: TreeSum[float]
    has_run: bool = False


def _out_of_order(index: int, position: int, num_local_replicas: int, accumulation: int) -> BatchError:
    """The error of a micro batch that is not at or after ``position``, the next one of this instance."""
    return BatchError(
        f"micro_batch({index}), where {position} is the next of this instance's "
        f"{num_local_replicas * accumulation} micro batches ({num_local_replicas} local replicas x "
        f"accumulation {accumulation}): take them in order, then call reduce_gradients()"
    )


class PlainStep:
    """A step with one micro batch in the whole job, used as :class:`Step`.

    Nothing is added up and nobody is asked, so it costs as little as can be, and its bits are those of a loop
    without popdist.

    Args:
        gradients: Of the model's parameters.
        old: Those of before, which have been taken away.
        is_checked: Whether the checks are made that cost time.
        checks_finite: Whether to look for NaN and infinity in the gradient.
    """

    __slots__ = ("_checks_finite", "_gradients", "_old", "_weight", "is_checked")

    accumulation = 1

    def __init__(
        self, gradients: ModelGradients, old: OldGradients, *, is_checked: bool, checks_finite: bool
    ) -> None:
        self.is_checked = is_checked
        self._gradients = gradients
        self._old = old
        self._checks_finite = checks_finite
        self._weight: float | None = None

    def announce(self, heaviest: float, _reduction: MeanOrSum, _batch: BatchMark, *, add: bool) -> None:
        """Check that the micro batch weighs something, and what becomes of the gradients of before."""
        if self._old.kept:
            self._settle_old(add=add)
        if not heaviest:
            raise BatchError("the batches of all instances have 0 samples, so this step has no gradient")

    def hear_of_others(self) -> None:
        """There are no others."""

    def collect_in_turn(self, _index: int, weight: float | None) -> None:
        """The one replica of the job takes turns with nobody."""
        self.collect(weight or 0.0)

    def begin(self, index: int, _weight: float) -> int:
        """Get ready for micro batch ``index``, which is 0; the number of its replica."""
        if index or self._weight is not None:
            position = 0 if self._weight is None else 1
            raise _out_of_order(index, position, num_local_replicas=1, accumulation=1)
        return 0

    def take(self, parameter: Tensor) -> None:
        """A gradient has been accumulated; nothing is done with it."""

    def collect(self, weight: float) -> None:
        """The micro batch has seen its backward passes."""
        self._weight = weight

    def finish(self, reduction: MeanOrSum, *, add: bool) -> None:
        """Leave each ``.grad`` as it is; for a sum, times the weight."""
        if self._old.kept:
            self._settle_old(add=add)
        if reduction == "mean" and not self._weight:
            raise BatchError("the one micro batch of this step has no weight, so this step has no gradient")
        if self._checks_finite and self._weight:
            gradients = self._gradients.layout()
            parameter = gradients.not_finite()
            if parameter is not None:
                raise not_finite_error(NotFinite(0, parameter), gradients)
        if reduction == "sum" and self._weight != 1:
            gradients = self._gradients.layout()
            rows = gradients.make_wide()
            gradients.fill(rows, times=self._weight or 0.0)
            gradients.set_gradients(rows, gradients.used())
        if add:
            self._old.add_to_new()
        progress_page.count_step()

    def _settle_old(self, *, add: bool) -> None:
        if number := self._old.number(add=add):
            self._old.settle({0: number}, add=add)

    def abandon(self) -> None:
        """Leave without a gradient."""
        self._gradients.remove()
