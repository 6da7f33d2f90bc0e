"""One step's gradients become the sum or the mean over all replicas of the job.

The instances speak once or twice in a step. When a loop over a whole batch starts, each says what its heaviest
micro batch weighs, without waiting for an answer: a micro batch's share of the heaviest one of the job is needed
only after the first backward pass. When the step ends, each says whether it is complete, what its micro batches
weigh, which parameters were used and which buffers changed, and only then are gradients added: in the memory of
the host, over the network, or where that was done already while the last backward pass ran. An instance that left
its loop says that instead, so nobody waits for gradients that never come. In a step that is checked, the first of
these headers carries a checksum of the weights.
"""

import operator
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, Literal, NamedTuple, TypeAlias

from torch import Tensor

from popdist.errors import (
    BackendError,
    BatchError,
    CollectiveError,
    GradientError,
    MicroBatchError,
    PopdistError,
    WeightsError,
    name_instances,
)
from popdist.gradients.batch_marks import BatchMark, refuse_other_steps, warn_of_equal_batches
from popdist.gradients.buffer_changes import NO_CHANGES, agree_on_changes, changes_of, raise_fault
from popdist.gradients.buffers import ReplicaBuffers
from popdist.gradients.exchange import add_instances
from popdist.gradients.flat_buffers import FlatGradient, GradientLayout, scale_flat
from popdist.gradients.memory import GradientMemory
from popdist.gradients.old_gradients import OldGradients
from popdist.gradients.overlap import Overlap, OverlappedSum
from popdist.gradients.partial_gradients import GradientParts, parts_of
from popdist.groups import Exchange, Group, as_floats, as_words, wait_for_first_error
from popdist.layout import ReplicaLayout
from popdist.progress import progress_page
from popdist.tree import TreeSum, finish
from popdist.weights import ParameterSums, compare_weights

MeanOrSum: TypeAlias = Literal["mean", "sum"]
"""What becomes of the weighted gradients: their sum, or that divided by the sum of the weights."""

ABANDON_SECONDS: Final = 3.0
"""How long an instance that abandons a step waits for the others to hear of it."""

_STATES: Final = ("mean", "sum", "abandoned", "not finite", "written", "fault")
"""What an instance says at the end of its step: how it wants its gradients reduced, or why it has none."""

CANNOT_SPLIT: Final = -1.0
IN_ANOTHER_LOOP: Final = -2.0
_REFUSALS: Final = {
    CANNOT_SPLIT: "could not split the batch into micro batches (see the error there)",
    IN_ANOTHER_LOOP: "began this loop in the middle of another one over the same model (see the error there)",
}
"""Said in place of the heaviest weight by an instance that has none, and what it means."""


class NotFinite(NamedTuple):
    """Where a gradient with NaN or infinity was found: the job-wide replica, and the parameter's position."""

    replica: int
    parameter: int


class GradientSum:
    """The sum of one step's gradients over all replicas of the job.

    Args:
        memory: Of the gradients, which must be the same on all instances.
        buffers: Of the model, made equal with the gradients; None leaves them alone.
        weights: Checksums of the model's parameters, which must be equal on all instances and stay so to the end
            of the step; None where the step is not checked.
        old: The gradients that were there before; None if they belong to this step.

    Attributes:
        used: The parameters that had a gradient on this instance: bit i stands for the i-th.

    Raises:
        CollectiveError: If only a part of the job is here.
    """

    def __init__(
        self,
        memory: GradientMemory,
        buffers: ReplicaBuffers | None = None,
        weights: ParameterSums | None = None,
        old: OldGradients | None = None,
    ) -> None:
        check_whole_job(memory.group, memory.layout)
        self._memory = memory
        self._group = memory.group
        self._gradients = memory.gradients
        self._buffers = buffers
        self._weight_sums = weights
        self._old = old
        num_replicas, first = memory.layout.num_replicas, memory.first_replica
        self._rows: TreeSum[FlatGradient] = TreeSum(num_replicas, memory.add_replicas, start=first)
        self._weights: TreeSum[float] = TreeSum(num_replicas, operator.add, start=first)
        self.used = 0
        self._changes = NO_CHANGES
        self._announced: Exchange | None = None
        self._adds = False
        self._scales = False
        self._unit: float | None = 1.0
        self._is_awaited = True
        self._early: OverlappedSum | None = None

    def announce(
        self, accumulation: int, heaviest: float, reduction: MeanOrSum, batch: BatchMark, *, add: bool
    ) -> None:
        """Tell the others this instance's heaviest weight; for a mean, all weights are divided by the job's.

        Args:
            accumulation: Micro batches of each replica.
            heaviest: Of this instance's micro batches.
            reduction: What becomes of the sum.
            batch: Tells the batch of this instance from those of others.
            add: Whether the step adds to the gradients of before.

        Raises:
            BatchError: If the job has one instance and no sample.
            GradientError: If this instance has gradients which nothing has used, and does not add to them.
            CollectiveError, BackendError: If what was started before has failed.
        """
        self._scales = reduction == "mean"
        self._adds = add
        number = self._number_of_old
        if len(self._group.instances) == 1:
            self._unit = self._unit_of([heaviest])
            self._settle_old([number])
            return
        overlap = self._memory.overlap
        if overlap is not None and self._parts() is None:
            self._early = overlap.begin_step(scales=self._scales)
        offer = 0 if self._early is None else self._early.number
        numbers = [*as_words([heaviest]), offer, self._weights_word, number, *batch]
        self._announced = self._group.start(_title(accumulation, add=add), numbers)
        self._unit = None
        if self._early is not None:
            self._early.set_header(self._announced)
        if number and not add:
            self.unit()

    def unit(self, timeout_seconds: float | None = None) -> float:
        """What weights are divided by before they scale a gradient; waits for the others once, if at all.

        Raises:
            BatchError: If the whole job has no sample in this step.
            MicroBatchError: If an instance could not split its batch.
            GradientError: If an instance has gradients which nothing has used.
            WeightsError: If the step is checked, and the weights of the instances differ.
            CollectiveError, BackendError: If the instances disagree, or bring batches of different steps, or one
                was lost.
        """
        if self._unit is None and self._announced is not None:
            try:
                self._hear(self._announced.wait(timeout_seconds), timeout_seconds)
            except PopdistError:
                self._is_awaited = False
                raise
        return self._unit or 1.0

    def _hear(self, told: list[list[int]], timeout_seconds: float | None) -> None:
        """All instances have announced their steps."""
        heaviest, _, _, old, digest, *_ = told[0]
        if not old and not digest and told.count(told[0]) == len(told):
            self._unit = self._unit_of(as_floats([heaviest]))  # as below, where all say the same
            return
        unit = self._unit_of(as_floats([words[0] for words in told]))
        marks = [BatchMark._make(words[4:7]) for words in told]
        refuse_other_steps(self._group, marks)
        self._settle_old([words[3] for words in told])
        compare_weights(self._group, [words[2] for words in told], self._weight_sums, timeout_seconds)
        self._unit = unit
        warn_of_equal_batches(self._group, marks)

    def _unit_of(self, heaviest: list[float]) -> float:
        if min(heaviest) < 0:
            refusal = max(weight for weight in heaviest if weight < 0)
            refused = [instance for instance, weight in enumerate(heaviest) if weight == refusal]
            raise _lost_step(refused, _REFUSALS[refusal])
        if not any(heaviest):
            raise BatchError("the batches of all instances have 0 samples, so this step has no gradient")
        return max(heaviest) if self._scales else 1.0

    @property
    def _number_of_old(self) -> int:
        return 0 if self._old is None else self._old.number(add=self._adds)

    def _settle_old(self, numbers: Sequence[int]) -> None:
        if self._old is not None and (self._old.kept or any(numbers)):
            self._old.settle(dict(zip(self._group.instances, numbers, strict=True)), add=self._adds)

    @property
    def _weights_word(self) -> int:
        return 0 if self._weight_sums is None else self._weight_sums.word

    def begin_last(self, micro_batches: TreeSum[FlatGradient], weight: float) -> None:
        """The last micro batch of this instance begins: from now on gradients may go early.

        Args:
            micro_batches: The sum of its replica's micro batches before it.
            weight: What it counts.
        """
        if self._early is not None:
            self._early.begin_last(micro_batches, self._rows, weight)

    @property
    def goes_early(self) -> bool:
        """Whether gradients are sent while the last backward pass runs."""
        return self._early is not None

    def take(self, parameter: Tensor) -> None:
        """A gradient of ``parameter`` has been accumulated."""
        if self._early is not None:
            self._early.add_gradient(parameter)

    def push(self, rows: FlatGradient, weight: float) -> None:
        """Take the next local replica's gradients, added up with their weights."""
        replica = self._rows.position - self._memory.first_replica
        self._rows.push(self._memory.rounded(rows, replica))
        self._weights.push(weight)

    def finish(
        self,
        reduction: MeanOrSum,
        not_finite: NotFinite | None = None,
        fault: str | None = None,
        *,
        add: bool = False,
    ) -> None:
        """Give every parameter its gradient over all replicas, and every buffer what the replicas made of it.

        Args:
            reduction: The same on all instances.
            not_finite: What this instance has found, if anything: then every instance raises.
            fault: What else it has found, in words.
            add: Whether it is added to the gradient of before; the same on all instances.

        Raises:
            BatchError: If the weights of the whole job add up to 0, so that there is no mean.
            GradientError: If an instance has found a gradient that is not finite, or has one of before which
                nothing has used.
            WeightsError: If the step is checked, and the weights of the instances differ, or were written since it
                began; if an instance has found a fault, or a buffer that cannot be combined.
            MicroBatchError: If another instance has left its loop, or could not split its batch.
            CollectiveError: If the instances do other things, or have other parameters.
            BackendError: If an instance was lost or did not come in time.
        """
        unit = self.unit()
        self._is_awaited, self._adds = False, add
        parts = self._parts()
        way = 0 if self._early is None else self._early.close(self._rows.values)
        way = way if parts is None else parts.number
        written = None if self._weight_sums is None else self._weight_sums.first_change()
        self._changes = changes_of(self.used, len(self._gradients.names), self._buffers)
        states = self._say(_state_of(reduction, not_finite, fault, written), way).wait()
        self._check([_STATES[state[0]] for state in states], not_finite, written, fault)
        self._settle_old([state[4] for state in states])
        compare_weights(self._group, [state[3] for state in states], self._weight_sums)
        total = self._memory.total_weight([state[5:] for state in states])
        if reduction == "mean" and not total:
            raise BatchError("the weights of all instances' micro batches add up to 0: this step has no mean")
        changes = agree_on_changes(self._group, self._changes, [state[1] for state in states], self._buffers)
        if len({state[2] for state in states}) > 1:
            way, parts = 0, None
        rows = self._add(total / unit if reduction == "mean" else 1.0, parts, are_sums_right=way < 0)
        num_parameters = len(self._gradients.names)
        self._gradients.set_gradients(rows, changes.mask & ((1 << num_parameters) - 1))
        if parts is not None:
            parts.replace_grads(self._group)
        if add and self._old is not None:
            self._old.add_to_new()
        own = changes.mask >> num_parameters
        if self._buffers is not None and (own or changes.others):
            self._buffers.combine(self._group, self._memory.layout, own, changes.others)
        progress_page.count_step()
        self._end_early()

    def abandon(self) -> None:
        """Tell the others, unless all know already, that there will be no gradient. Never raises.

        Those that come later than ``ABANDON_SECONDS`` to their loop are told before the next thing that is done
        with them.
        """
        try:
            if self._is_awaited:
                with suppress(PopdistError):
                    try:
                        self._tell_of_abandonment(ABANDON_SECONDS)
                    except BackendError:
                        self._group.send_before_next(self._tell_late)
        finally:
            self._is_awaited = False
            self._end_early()

    def _tell_late(self) -> None:
        with suppress(BatchError, CollectiveError, GradientError, WeightsError):
            self._tell_of_abandonment(None)

    def _tell_of_abandonment(self, timeout_seconds: float | None) -> None:
        self.unit(timeout_seconds)
        with suppress(BackendError):
            self._say("abandoned").wait(timeout_seconds)

    def _end_early(self) -> None:
        if self._early is not None:
            self._early.end()

    def _parts(self) -> GradientParts | None:
        """The parts of the sum that the instances need; None where all of them get the whole sum."""
        if self._memory.shared is not None or len(self._group.instances) == 1:
            return None
        return parts_of(self._gradients)

    def _add(self, over: float, parts: GradientParts | None, *, are_sums_right: bool) -> FlatGradient:
        """The sum over all replicas, divided by ``over``, in wide rows; all have said that they come to it.

        Args:
            over: The same on all instances.
            parts: What the instances need, if they have agreed to get no more.
            are_sums_right: Whether all have said that what went early is what they have now.
        """
        early = None if self._early is None else self._early.wait(over, are_right=are_sums_right)
        if early is not None:
            return early
        if self._memory.narrow is None:
            return self._add_rows(over, parts)
        return self._memory.widened(self._add_rows(1.0, parts), over)

    def _add_rows(self, over: float, parts: GradientParts | None) -> FlatGradient:
        """The sum divided by ``over``, in rows as they were added, at the end of the step."""
        memory, own = self._memory, self._rows.values
        if memory.shared is not None:
            total = memory.shared.add(own, over)
            if total is not None:
                return total
            memory.shared = None
        if parts is not None:
            return parts.add(self._group, memory.layout, own, over)
        if len(self._group.instances) == 1:
            total = finish(self._rows.nodes, memory.layout.num_replicas, memory.add_replicas)
        else:
            total = self._add_over_network(own)
        scale_flat(total.tensors, over=over)
        return total

    def _add_over_network(self, own: Sequence[FlatGradient]) -> FlatGradient:
        memory = self._memory
        for row_of_nodes in zip(*(node.tensors for node in own), strict=True):
            add_instances(self._group, memory.layout, list(row_of_nodes))
        if memory.overlap is None and self._announced is not None:  # all instances are together here
            channel = self._group.backend.channel([buffer.device for buffer in self._gradients.flat_buffers])
            if channel is not None:
                local_collectives = self._group.backend.local_collectives
                memory.overlap = Overlap(channel, memory.layout, self._gradients, local_collectives, memory.narrow)
        return own[0]

    def _say(self, state: str, way: int = 0) -> Exchange:
        """Tell the others how this instance's step has ended.

        Args:
            state: One of ``_STATES``.
            way: How the gradients are added: 0 at the end and all of them, a positive number in parts, a negative
                one for sums that are there already; the same number on all instances, or none of these.
        """
        weights = as_words(self._weights.values)
        text = f"add gradients({self._gradients}" + (f", {self._buffers})" if self._buffers else ")")
        if self._adds:
            text += " to those of before"
        first = [self._weights_word, self._number_of_old] if self._announced is None else [0, 0]
        numbers = [_STATES.index(state), self._changes.digest, way, *first]
        return self._group.start(text, [*numbers, *weights])

    def _check(
        self, states: list[str], not_finite: NotFinite | None, written: int | None, fault: str | None
    ) -> None:
        """Raise on every instance if one has no gradient, or they want different ones."""
        if states[0] in ("mean", "sum") and len(set(states)) == 1:
            return
        owners = {
            state: [i for i, other in zip(self._group.instances, states, strict=True) if other == state]
            for state in states
        }
        if "abandoned" in owners:
            reason = "left the micro_batches loop before its end (by break, return or an exception)"
            raise _lost_step(owners["abandoned"], reason)
        if "written" in owners:
            asked = [] if written is None else [written]
            found = self._group.start("name the parameter that was written", asked).wait()
            raise self._written_error(owners["written"], min(numbers for numbers in found if numbers)[0])
        if "fault" in owners:
            raise_fault(self._group, fault)
        if "not finite" in owners:
            found = self._group.start("name the gradient that is not finite", not_finite or ()).wait()
            replica, parameter = min(numbers for numbers in found if numbers)
            raise not_finite_error(NotFinite(replica, parameter), self._gradients)
        if len(owners) > 1:
            wanted = "; ".join(f"{name_instances(instances)}: {state}" for state, instances in owners.items())
            raise CollectiveError(f"the instances reduce their gradients in different ways: {wanted}")

    def _written_error(self, instances: list[int], position: int) -> WeightsError:
        sums = self._weight_sums
        name = f"parameter {position}" if sums is None else sums.names[position]
        return WeightsError(
            f"{name} was written in a micro batch, on {name_instances(instances)}: so the result depends on how "
            "many micro batches an instance computes, and this step has no gradient on any instance. Write a "
            "parameter once for all replicas, outside of the loop over micro batches (as after optimizer.step()); "
            "or make it a buffer, which is combined over the replicas"
        )


def refuse_step(group: Group, accumulation: int, refusal: float = CANNOT_SPLIT, *, add: bool) -> None:
    """Tell the others, in place of a step, that this instance cannot make it. Never raises."""
    with suppress(PopdistError):
        numbers = [*as_words([refusal]), 0, 0, 0, *BatchMark()]
        group.start(_title(accumulation, add=add), numbers).wait(ABANDON_SECONDS)


def _title(accumulation: int, *, add: bool) -> str:
    return f"micro_batches(accumulation={accumulation}" + (", add=True)" if add else ")")


def check_reduction(reduction: str) -> None:
    """Check that ``reduction`` is ``"mean"`` or ``"sum"``.

    Raises:
        BatchError: If it is neither.
    """
    if reduction not in ("mean", "sum"):
        raise BatchError(f"reduction={reduction!r} must be 'mean' or 'sum'")


def check_whole_job(group: Group, layout: ReplicaLayout) -> None:
    """Check that ``group`` is the whole job.

    Raises:
        CollectiveError: If ``group`` is only a part of the job.
    """
    if len(group.instances) < layout.num_instances:
        raise CollectiveError(
            f"gradients are added over all {layout.num_instances} instances of the job, but this code runs on "
            f"{name_instances(group.instances)} only: call it outside execute_on_instances"
        )


def _state_of(reduction: MeanOrSum, not_finite: NotFinite | None, fault: str | None, written: int | None) -> str:
    """What an instance says of its step, one of ``_STATES``: what it has found, or else how it reduces."""
    if written is not None:
        return "written"
    if fault is not None:
        return "fault"
    return reduction if not_finite is None else "not finite"


def _lost_step(instances: list[int], reason: str) -> MicroBatchError:
    """The error of a step that ``instances`` have spoiled, after a moment in which they can end with their own."""
    wait_for_first_error()
    return MicroBatchError(
        f"{name_instances(instances)} {reason}, so this step has no gradient on any instance; if all instances "
        "catch what they raise, the next loop works on all of them"
    )


def not_finite_error(found: NotFinite, gradients: GradientLayout) -> GradientError:
    """The error that names the parameter and the replica."""
    return GradientError(
        f"the gradient of {gradients.names[found.parameter]} on replica {found.replica} holds NaN or infinity, so "
        "this step has no gradient on any instance"
    )
