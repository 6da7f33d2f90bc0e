"""One step's gradients become the sum or the mean over all replicas of the job.

When a loop over a whole batch starts, each instance says what its heaviest micro batch weighs, and waits for no
answer before its first backward pass is over. When the step ends, each says whether it is complete, and what was
weighed, used and changed; only then are gradients added. One that left its loop says that, so nobody waits for it.
"""

import operator
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from torch import Tensor

from popdist.errors import (
    BackendError,
    BatchError,
    CollectiveError,
    GradientError,
    MicroBatchError,
    PopdistError,
    WeightsError,
)
from popdist.exchange.groups import Exchange, Group, as_words, wait_for_first_error
from popdist.gradients.buffers import ReplicaBuffers
from popdist.gradients.flat_buffers import FlatGradient, GradientLayout, add_instances, scale_flat
from popdist.gradients.memory import GradientMemory, OldGradients
from popdist.gradients.overlap import Overlap, OverlappedSum
from popdist.gradients.partial_gradients import GradientParts, parts_of
from popdist.gradients.step_headers import (
    CANNOT_SPLIT,
    NO_CHANGES,
    NO_CHECKS,
    REFUSALS,
    STATES,
    BatchPosition,
    BeginHeader,
    EndHeader,
    MeanOrSum,
    StepChecks,
    agree_on_changes,
    changes_of,
    raise_fault,
    refuse_other_positions,
)
from popdist.ground.layout import ReplicaLayout
from popdist.ground.progress import progress_page
from popdist.ground.tree import TreeSum, finish

ABANDON_SECONDS: Final = 3.0
"""How long an instance that abandons a step waits for the others to hear of it."""

NO_SAMPLES: Final = "the batches of all instances have 0 samples, so this step has no gradient"


class NotFinite(NamedTuple):
    """Where a gradient with NaN or infinity was found: the job-wide replica, and the parameter's position."""

    replica: int
    parameter: int


class GradientSum:
    """The sum of one step's gradients over all replicas of the job: begun, added to, then finished or left."""

    def __init__(
        self,
        memory: GradientMemory,
        buffers: ReplicaBuffers | None = None,
        checks: StepChecks = NO_CHECKS,
        old: OldGradients | None = None,
    ) -> None:
        check_whole_job(memory.group, memory.layout)
        self._memory = memory
        self._group = memory.group
        self._gradients = memory.gradients
        self._buffers = buffers
        self._checks = checks
        self._old = old  # None if the gradients of before belong to this step
        num_replicas, first = memory.layout.num_replicas, memory.first_replica
        self._tree: TreeSum[FlatGradient] = TreeSum(num_replicas, memory.of_replicas.add, start=first)
        self._weights: TreeSum[float] = TreeSum(num_replicas, operator.add, start=first)
        self.used = 0  # bit i: whether the i-th parameter had a gradient on this instance
        self._changes = NO_CHANGES
        self._begun: Exchange | None = None
        self._adds = False
        self._scales = False
        self._weight_scale: float | None = 1.0
        self.is_awaited = True  # whether the other instances wait for this one's word at the end of the step
        self._early: OverlappedSum | None = None

    def begin(
        self, accumulation: int, heaviest: float, reduction: MeanOrSum, position: BatchPosition, *, add: bool
    ) -> None:
        """Say to the others what this instance's heaviest micro batch weighs, and where its batch comes from."""
        self._scales = reduction == "mean"
        self._adds = add  # whether to the gradients of before
        old = self._old_number
        if len(self._group.instances) == 1:
            self._weight_scale = self._scale_of([heaviest])
            self._drop_old_unless_added([old])
            return
        overlap = self._memory.overlap
        if overlap is not None and self._parts() is None:
            self._early = overlap.begin_step(scales=self._scales)
        header = BeginHeader(
            heaviest=as_words([heaviest])[0],
            early=0 if self._early is None else self._early.number,
            old=old,
            epoch=position.epoch,
            stop=position.stop,
            checksum=self._checks.checksum,
            digest=self._checks.digest,
            num_loader_passes=self._checks.num_loader_passes,
            writes=self._checks.writes,
        )
        self._begun = self._group.start(_title(accumulation, add=add), header)
        self._weight_scale = None
        if self._early is not None:
            self._early.set_header(self._begun)
        if old and not add:
            self.weight_scale()

    def weight_scale(self, timeout_seconds: float | None = None) -> float:
        """What weights of micro batches are divided by; the first call waits until all instances have begun."""
        if self._weight_scale is None and self._begun is not None:
            try:
                self._compare_begins(self._begun.wait(timeout_seconds), timeout_seconds)
            except PopdistError:
                self.is_awaited = False
                raise
        return self._weight_scale or 1.0

    def _compare_begins(self, numbers: list[list[int]], timeout_seconds: float | None) -> None:
        first = BeginHeader._make(numbers[0])
        if not first.old and not first.digest and numbers.count(numbers[0]) == len(numbers):
            self._weight_scale = self._scale_of([first.heaviest_weight])  # as below, where all say the same
            return
        headers = [BeginHeader._make(words) for words in numbers]
        scale = self._scale_of([header.heaviest_weight for header in headers])
        refuse_other_positions(self._group, headers)
        self._drop_old_unless_added([header.old for header in headers])
        self._compare_weights(headers, timeout_seconds)
        self._weight_scale = scale
        self._checks.compare_batches(self._group, headers)

    def _compare_weights(
        self, headers: Sequence[BeginHeader] | Sequence[EndHeader], timeout_seconds: float | None = None
    ) -> None:
        self._checks.compare_weights(self._group, [header.checksum for header in headers], timeout_seconds)
        self._checks.compare_written(self._group, [header.writes for header in headers], timeout_seconds)

    def _scale_of(self, heaviest: list[float]) -> float:
        if min(heaviest) < 0:
            refusal = max(weight for weight in heaviest if weight < 0)
            refused = [instance for instance, weight in enumerate(heaviest) if weight == refusal]
            raise _lost_step(self._group, refused, REFUSALS[refusal])
        if not any(heaviest):
            raise BatchError(NO_SAMPLES)
        return max(heaviest) if self._scales else 1.0

    @property
    def _old_number(self) -> int:
        return 0 if self._old is None else self._old.number(add=self._adds)

    def _drop_old_unless_added(self, numbers: Sequence[int]) -> None:
        if self._old is not None and (self._old.kept or any(numbers)):
            told = dict(zip(self._group.instances, numbers, strict=True))
            self._old.drop_unless_added(told, add=self._adds, name=self._group.name)

    def begin_last(self, micro_batches: TreeSum[FlatGradient], weight: float) -> None:
        """Begin the last micro batch, after the ``micro_batches`` of its replica: gradients may go early."""
        if self._early is not None:
            self._early.begin_last(micro_batches, self._tree, weight)

    @property
    def goes_early(self) -> bool:
        """Whether gradients are sent while the last backward pass runs."""
        return self._early is not None

    def add_gradient(self, parameter: Tensor) -> None:
        """Send the parts of the sum that are complete now that the gradient of ``parameter`` was accumulated."""
        if self._early is not None:
            self._early.add_gradient(parameter)

    def add(self, gradient: FlatGradient, weight: float) -> None:
        """Add the next local replica's gradient, summed over its micro batches with their weights."""
        replica = self._tree.position - self._memory.first_replica
        self._tree.push(self._memory.rounded(gradient, replica))
        self._weights.push(weight)

    def finish(
        self,
        reduction: MeanOrSum,
        not_finite: NotFinite | None = None,
        fault: str | None = None,
        *,
        add: bool = False,
    ) -> None:
        """Set every ``.grad`` and every buffer to that of all replicas, or raise what one instance has found."""
        self.weight_scale()
        with self._group.undivided("the end of a step"):
            self._finish_together(reduction, not_finite, fault, add=add)

    def _finish_together(
        self, reduction: MeanOrSum, not_finite: NotFinite | None, fault: str | None, *, add: bool
    ) -> None:
        scale = self.weight_scale()
        self.is_awaited, self._adds = False, add
        parts = self._parts()
        way = 0 if self._early is None else self._early.close(self._tree.values)
        way = way if parts is None else parts.number
        self._changes = changes_of(self.used, len(self._gradients.names), self._buffers)
        state = "fault" if fault is not None else "not finite" if not_finite is not None else reduction
        numbers = self._start_end(state, way).wait()
        headers = [EndHeader._make(words[: len(EndHeader._fields)]) for words in numbers]
        weights = [words[len(EndHeader._fields) :] for words in numbers]
        self._check_states([STATES[header.state] for header in headers], not_finite, fault)
        self._drop_old_unless_added([header.old for header in headers])
        self._compare_weights(headers)
        total = self._memory.total_weight(weights)
        if reduction == "mean" and not total:
            raise BatchError("the weights of all instances' micro batches add up to 0: this step has no mean")
        digests = [header.changes for header in headers]
        changes = agree_on_changes(self._group, self._changes, digests, self._buffers)
        if len({header.way for header in headers}) > 1:
            way, parts = 0, None
        whole = self._sum(total / scale if reduction == "mean" else 1.0, parts, are_early_right=way < 0)
        num_parameters = len(self._gradients.names)
        self._gradients.set_gradients(whole, changes.mask & ((1 << num_parameters) - 1))
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
        """Say to the others, unless all know already, that there will be no gradient. Never raises."""
        try:
            if self.is_awaited:
                with suppress(PopdistError):
                    try:
                        self._send_abandonment(ABANDON_SECONDS)
                    except BackendError:
                        self._group.send_before_next(self._send_late)  # for those that come late to their loop
        finally:
            self.is_awaited = False
            self._end_early()

    def _send_late(self) -> None:
        with suppress(BatchError, CollectiveError, GradientError, WeightsError):
            self._send_abandonment(None)

    def _send_abandonment(self, timeout_seconds: float | None) -> None:
        self.weight_scale(timeout_seconds)
        with suppress(BackendError):
            self._start_end("abandoned").wait(timeout_seconds)

    def _end_early(self) -> None:
        if self._early is not None:
            self._early.end()

    def _parts(self) -> GradientParts | None:
        """The parts of the sum that the instances need; None where all of them get the whole sum."""
        if self._memory.shared is not None or len(self._group.instances) == 1:
            return None
        return parts_of(self._gradients)

    def _sum(self, over: float, parts: GradientParts | None, *, are_early_right: bool) -> FlatGradient:
        """The sum over all replicas, divided by ``over``, in wide buffers; all instances have come to it."""
        early = None if self._early is None else self._early.wait(over, are_right=are_early_right)
        if early is not None:
            return early
        if self._memory.narrow is None:
            return self._sum_at_end(over, parts)
        return self._memory.widened(self._sum_at_end(1.0, parts), over)

    def _sum_at_end(self, over: float, parts: GradientParts | None) -> FlatGradient:
        """The sum divided by ``over``, in the buffers in which it was added."""
        memory, own = self._memory, self._tree.values
        if (total := memory.sum_in_host(own, over)) is not None:
            return total
        if parts is not None:
            return parts.add(self._group, memory.layout, own, over)
        if len(self._group.instances) == 1:
            total = finish(self._tree.nodes, memory.layout.num_replicas, memory.of_replicas.add)
        else:
            total = self._sum_over_network(own)
        scale_flat(total.tensors, over=over)
        return total

    def _sum_over_network(self, own: Sequence[FlatGradient]) -> FlatGradient:
        memory = self._memory
        for nodes in zip(*(node.tensors for node in own), strict=True):
            add_instances(self._group, memory.layout, list(nodes))
        has_buffers = bool(self._gradients.flat_buffers)
        if has_buffers and memory.overlap is None and self._begun is not None:  # all instances are together here
            channel = self._group.backend.channel([buffer.device for buffer in self._gradients.flat_buffers])
            if channel is not None:
                local = self._group.backend.local_collectives
                memory.overlap = Overlap(channel, memory.layout, self._gradients, local, memory.narrow)
        return own[0]

    def _start_end(self, state: str, way: int = 0) -> Exchange:
        """Send the header that ends the step; ``state`` is one of ``STATES``."""
        has_buffers = self._buffers is not None and self._buffers.buffers
        text = f"add gradients({self._gradients}" + (f", {self._buffers})" if has_buffers else ")")
        if self._adds:
            text += " to those of before"
        is_first = self._begun is None
        header = EndHeader(
            state=STATES.index(state),
            changes=self._changes.digest,
            way=way,
            checksum=self._checks.checksum if is_first else 0,
            old=self._old_number if is_first else 0,
            writes=self._checks.writes if is_first else 0,
        )
        return self._group.start(text, [*header, *as_words(self._weights.values)])

    def _check_states(self, states: list[str], not_finite: NotFinite | None, fault: str | None) -> None:
        """Raise on every instance if one has no gradient, or they want different ones."""
        if states[0] in ("mean", "sum") and len(set(states)) == 1:
            return
        owners = {
            state: [i for i, other in zip(self._group.instances, states, strict=True) if other == state]
            for state in states
        }
        if "abandoned" in owners:
            reason = "left the micro_batches loop before its end (by break, return or an exception)"
            raise _lost_step(self._group, owners["abandoned"], reason)
        if "fault" in owners:
            raise_fault(self._group, fault)
        if "not finite" in owners:
            found = self._group.start("name the gradient that is not finite", not_finite or ()).wait()
            replica, parameter = min(numbers for numbers in found if numbers)
            raise not_finite_error(NotFinite(replica, parameter), self._gradients)
        wanted = "; ".join(f"{self._group.name(instances)}: {state}" for state, instances in owners.items())
        raise CollectiveError(f"the instances reduce their gradients in different ways: {wanted}")


def refuse_step(group: Group, accumulation: int, refusal: float = CANNOT_SPLIT, *, add: bool) -> None:
    """Say to the others, in place of a step, that this instance cannot make it. Never raises."""
    with suppress(PopdistError):
        header = BeginHeader(heaviest=as_words([refusal])[0])
        group.start(_title(accumulation, add=add), header).wait(ABANDON_SECONDS)


def _title(accumulation: int, *, add: bool) -> str:
    return f"micro_batches(accumulation={accumulation}" + (", add=True)" if add else ")")


def check_reduction(reduction: str) -> None:
    """Check that ``reduction`` is ``"mean"`` or ``"sum"``."""
    if reduction not in ("mean", "sum"):
        raise BatchError(f"reduction={reduction!r} must be 'mean' or 'sum'")


def check_whole_job(group: Group, layout: ReplicaLayout) -> None:
    """Check that ``group`` is the whole job."""
    if len(group.instances) < layout.num_instances:
        everybody = f"{layout.num_instances} {group.backend.names.noun}s"
        raise CollectiveError(
            f"gradients are added over all {everybody} of the job, but this code runs on "
            f"{group.name(group.instances)} only: call it outside execute_on_instances"
        )


def _lost_step(group: Group, instances: list[int], reason: str) -> MicroBatchError:
    """The error of a step that ``instances`` have spoiled, after a moment in which they can end with their own."""
    wait_for_first_error()
    return MicroBatchError(
        f"{group.name(instances)} {reason}, so this step has no gradient on any instance; if all instances "
        "catch what they raise, the next loop works on all of them"
    )


def not_finite_error(found: NotFinite, gradients: GradientLayout) -> GradientError:
    """The error that names the parameter and the replica."""
    return GradientError(
        f"the gradient of {gradients.names[found.parameter]} on replica {found.replica} holds NaN or infinity, so "
        "this step has no gradient on any instance"
    )
