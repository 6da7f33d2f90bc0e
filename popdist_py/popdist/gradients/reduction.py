"""The reduction of one step's gradients to the sum or the mean over all replicas of the job.

When a loop over a whole batch starts, each instance sends the weight of its heaviest micro batch, and waits for no
answer before its first backward pass is over. When the step ends, each sends whether it is complete, and what was
weighed, used and changed; only then are gradients added. An instance that left its loop sends this, too.
"""

import operator
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
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
from popdist.exchange.groups import Exchange, Group, as_floats, as_words, wait_for_first_error
from popdist.gradients.buffers import ReplicaBuffers
from popdist.gradients.flat_buffers import GradientLayout, nodes_of
from popdist.gradients.memory import OldGradients
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
    StepChanges,
    StepChecks,
    agree_on_changes,
    changes_of,
    raise_fault,
    refuse_other_positions,
)
from popdist.ground.layout import ReplicaLayout
from popdist.ground.progress import progress_page
from popdist.ground.tree import finish

ABANDON_SECONDS: Final = 3.0
"""How long an instance that abandons a step waits until the other instances have received its message."""

NO_SAMPLES: Final = "the batches of all instances have 0 samples, so this step has no gradient"


class NotFinite(NamedTuple):
    """The place of a gradient with NaN or infinity: index of its replica in the job, index of its parameter."""

    replica: int
    parameter: int


class GradientKeeper:
    """The gradients of one step, which are kept until the optimizer's step, or used in the backward pass."""

    used = 0  # bit i: whether the i-th parameter had a gradient on this instance
    not_finite: NotFinite | None = None
    awaited: Collection[int] = ()  # Python ids of the parameters whose gradients are handled one by one

    def __init__(self, gradients: GradientLayout) -> None:
        """Make a keeper of gradients that have the layout ``gradients`` at the end of the step."""
        self.gradients = gradients

    def begin(self, *, scales: bool) -> int:  # noqa: ARG002 - subclasses use the argument
        """Begin a step; return a digest of which gradients are sent in the backward pass; 0 if none are sent."""
        return 0

    def announce(self, header: Exchange) -> None:
        """Keep ``header``, the messages that begin the step: before all have come, no gradient is sent."""

    def begin_micro_batch(self, index: int, weight: float) -> None:
        """Begin micro batch ``index`` of this instance; ``weight`` is the factor of its gradient in the mean."""
        raise NotImplementedError

    def add_gradient(self, parameter: Tensor) -> None:
        """Handle the new gradient in ``parameter.grad``, if ``awaited`` contains the parameter's ``id()``."""

    def add(self, index: int, weight: float, scale: float) -> None:
        """Add the gradients that micro batch ``index`` left in ``.grad``, times ``weight / scale``, to the sum."""
        raise NotImplementedError

    def skip(self, index: int) -> None:
        """Add zeros to the sum for micro batch ``index``, which has no samples."""

    def complete(self) -> None:
        """Handle the gradients that are still in ``.grad``; called when the step's last micro batch has ended."""

    def close(self) -> int:
        """Return a number that says how this step's gradients are added over the instances: 0 all at the step's
        end, above 0 only the elements that each instance needs, below 0 already during the backward pass.
        """
        return 0

    def finish(self, over: float, used: int, way: int) -> None:
        """Set ``.grad`` of the parameters in the mask ``used`` to the sum over replicas, divided by ``over``."""

    def clear(self) -> None:
        """Set the ``.grad`` of every trained parameter to None."""
        self.gradients.clear()

    def end(self) -> None:
        """Release the resources that the step has used. Never raises."""


class StepAgreement:
    """The messages by which all instances begin and finish one step together, or abandon it after an error."""

    def __init__(
        self,
        group: Group,
        layout: ReplicaLayout,
        keeper: GradientKeeper,
        buffers: ReplicaBuffers | None = None,
        checks: StepChecks = NO_CHECKS,
        old: OldGradients | None = None,
    ) -> None:
        check_whole_job(group, layout)
        self.group, self.layout = group, layout
        self._keeper = keeper
        self._buffers = buffers
        self._checks = checks
        self._old = old  # None if the gradients from before belong to this step
        self._begun: Exchange | None = None
        self._adds = False  # whether the step adds to the gradients from before
        self._scales = False
        self._weight_scale: float | None = 1.0
        self._is_awaited = True  # whether the other instances wait for this instance at the end of the step

    def begin(
        self, accumulation: int, heaviest: float, reduction: MeanOrSum, position: BatchPosition, *, add: bool
    ) -> None:
        """Begin the step: send all instances the position of this instance's batch in its loader, and the largest
        weight of its micro batches. A weight is the number by which a gradient is multiplied in the mean.
        """
        self._scales, self._adds = reduction == "mean", add
        old = self._old_number
        if len(self.group.instances) == 1:
            self._weight_scale = self._scale_of([heaviest])
            self._drop_old_unless_added([old])
            return
        header = BeginHeader(
            heaviest=as_words([heaviest])[0],
            early=self._keeper.begin(scales=self._scales),
            old=old,
            epoch=position.epoch,
            stop=position.stop,
            checksum=self._checks.checksum,
            digest=self._checks.digest,
            num_loader_passes=self._checks.num_loader_passes,
            writes=self._checks.writes,
        )
        self._begun = self.group.start(_title(accumulation, add=add), header)
        self._weight_scale = None
        self._keeper.announce(self._begun)
        if old and not add:
            self.weight_scale()

    def weight_scale(self, timeout_seconds: float | None = None) -> float:
        """Return the number that divides the weights of all micro batches: the largest weight in the job, or 1 for
        a sum. The first call of a step waits until all instances have begun the step.
        """
        if self._weight_scale is None and self._begun is not None:
            try:
                self._compare_begins(self._begun.wait(timeout_seconds), timeout_seconds)
            except PopdistError:
                self._is_awaited = False
                raise
        return self._weight_scale or 1.0

    def _compare_begins(self, numbers: list[list[int]], timeout_seconds: float | None) -> None:
        first = BeginHeader._make(numbers[0])
        if not first.old and not first.digest and numbers.count(numbers[0]) == len(numbers):
            self._weight_scale = self._scale_of([first.heaviest_weight])  # a faster way if all headers are equal
            return
        headers = [BeginHeader._make(words) for words in numbers]
        scale = self._scale_of([header.heaviest_weight for header in headers])
        refuse_other_positions(self.group, headers)
        self._drop_old_unless_added([header.old for header in headers])
        self._compare_weights(headers, timeout_seconds)
        self._weight_scale = scale
        self._checks.compare_batches(self.group, headers)

    def _compare_weights(
        self, headers: Sequence[BeginHeader] | Sequence[EndHeader], timeout_seconds: float | None = None
    ) -> None:
        self._checks.compare_weights(self.group, [header.checksum for header in headers], timeout_seconds)
        self._checks.compare_written(self.group, [header.writes for header in headers], timeout_seconds)

    def _scale_of(self, heaviest: list[float]) -> float:
        if min(heaviest) < 0:
            refusal = max(weight for weight in heaviest if weight < 0)
            refused = [instance for instance, weight in enumerate(heaviest) if weight == refusal]
            raise _lost_step(self.group, refused, REFUSALS[refusal])
        if not any(heaviest):
            raise BatchError(NO_SAMPLES)
        return max(heaviest) if self._scales else 1.0

    @property
    def _old_number(self) -> int:
        return 0 if self._old is None else self._old.number(add=self._adds)

    def _drop_old_unless_added(self, numbers: Sequence[int]) -> None:
        if self._old is not None and (self._old.kept or any(numbers)):
            number_of = dict(zip(self.group.instances, numbers, strict=True))
            self._old.drop_unless_added(number_of, add=self._adds, name=self.group.name)

    def divisor(self, reduction: MeanOrSum, weights: Iterable[Sequence[int]]) -> float:
        """Return the number by which the sum of the gradients is divided: for a mean, the sum of all micro
        batches' ``weights``, divided by :meth:`weight_scale`; for a sum, 1.
        """
        total = total_weight(self.layout, tuple(map(tuple, weights)))
        if reduction == "sum":
            return 1.0
        if not total:
            raise BatchError("the weights of all instances' micro batches add up to 0: this step has no mean")
        return total / self.weight_scale()

    def arrive(self, place: int, words: Sequence[int] = (), used: int = 0) -> tuple[list[list[int]], int]:
        """Wait until all instances have arrived at ``place``, a number for a point in the last backward pass.

        Returns the words of each instance, and a mask of the parameters that any instance has used. Raises
        MicroBatchError if an instance has abandoned the step.
        """
        if len(self.group.instances) == 1:
            return [[*words]], used
        self.weight_scale()
        changes = StepChanges(mask=used)
        try:
            headers, found = self._exchange_ends("goes on", place, words, changes)
            self._check_states(headers)
        except (CollectiveError, MicroBatchError):
            self._is_awaited = False
            raise
        return found, agree_on_changes(self.group, changes, [it.changes for it in headers], None).mask

    def finish(
        self, reduction: MeanOrSum, weights: Sequence[float], fault: str | None = None, *, add: bool = False
    ) -> None:
        """Set each ``.grad`` and buffer to its value over all replicas of the job. If one instance has found a
        fault in the step, raise an error on all instances.

        ``weights`` are the weights of this instance's partial sums in the tree of additions over the replicas.
        """
        self.weight_scale()
        self._keeper.complete()
        with self.group.undivided("the end of a step"):
            self._finish_together(reduction, as_words(weights), fault, add=add)

    def _finish_together(self, reduction: MeanOrSum, own: Sequence[int], fault: str | None, *, add: bool) -> None:
        self._is_awaited, self._adds = False, add
        keeper, num_parameters = self._keeper, len(self._keeper.gradients.names)
        way = keeper.close()
        changes = changes_of(keeper.used, num_parameters, self._buffers)
        state = "fault" if fault is not None else "not finite" if keeper.not_finite is not None else reduction
        headers, weights = self._exchange_ends(state, way, own, changes)
        self._check_states(headers, fault)
        self._drop_old_unless_added([header.old for header in headers])
        self._compare_weights(headers)
        over = self.divisor(reduction, weights)
        digests = [header.changes for header in headers]
        changes = agree_on_changes(self.group, changes, digests, self._buffers)
        way = way if len({header.way for header in headers}) == 1 else 0
        keeper.finish(over, changes.mask & ((1 << num_parameters) - 1), way)
        if add and self._old is not None:
            self._old.add_to_new()
        changed = changes.mask >> num_parameters
        if self._buffers is not None and (changed or changes.others):
            self._buffers.combine(self.group, self.layout, changed, changes.others)
        progress_page.count_step()
        keeper.end()

    def abandon(self) -> None:
        """Send the other instances a message that the step has failed, if they wait for its end. Never raises."""
        try:
            if self._is_awaited:
                with suppress(PopdistError):
                    try:
                        self._send_abandonment(ABANDON_SECONDS)
                    except BackendError:
                        self.group.send_before_next(self._send_late)  # some instances may begin their loop late
        finally:
            self._is_awaited = False
            self._keeper.end()

    def _send_late(self) -> None:
        with suppress(BatchError, CollectiveError, GradientError, WeightsError):
            self._send_abandonment(None)

    def _send_abandonment(self, timeout_seconds: float | None) -> None:
        self.weight_scale(timeout_seconds)
        with suppress(BackendError):
            self._start_end("abandoned").wait(timeout_seconds)

    def _exchange_ends(
        self, state: str, way: int, words: Sequence[int], changes: StepChanges = NO_CHANGES
    ) -> tuple[list[EndHeader], list[list[int]]]:
        """Exchange the messages that end the step; return each instance's `EndHeader` and further numbers."""
        size = len(EndHeader._fields)
        numbers = self._start_end(state, way, words, changes).wait()
        return [EndHeader._make(it[:size]) for it in numbers], [it[size:] for it in numbers]

    def _start_end(
        self, state: str, way: int = 0, words: Sequence[int] = (), changes: StepChanges = NO_CHANGES
    ) -> Exchange:
        """Send all instances the message that ends this instance's step; return the pending exchange."""
        has_buffers = self._buffers is not None and self._buffers.buffers
        text = f"add gradients({self._keeper.gradients}" + (f", {self._buffers})" if has_buffers else ")")
        if self._adds:
            text += " to those of before"
        is_first = self._begun is None
        header = EndHeader(
            state=STATES.index(state),
            changes=changes.digest,
            way=way,
            checksum=self._checks.checksum if is_first else 0,
            old=self._old_number if is_first else 0,
            writes=self._checks.writes if is_first else 0,
        )
        return self.group.start(text, [*header, *words])

    def _check_states(self, headers: Sequence[EndHeader], fault: str | None = None) -> None:
        """Raise an error on every instance if an instance has no gradient, or if their reductions differ."""
        states = [STATES[header.state] for header in headers]
        if {*states} == {"goes on"} and len({header.way for header in headers}) > 1:
            raise CollectiveError("the instances add the gradients of different layers: their models differ")
        if states[0] in ("mean", "sum", "goes on") and len(set(states)) == 1:
            return
        owners = {
            state: [i for i, other in zip(self.group.instances, states, strict=True) if other == state]
            for state in states
        }
        if "abandoned" in owners:
            reason = "left the micro_batches loop before its end (by break, return or an exception)"
            raise _lost_step(self.group, owners["abandoned"], reason)
        if "fault" in owners:
            raise_fault(self.group, fault)
        if "not finite" in owners:
            found = self.group.start("name the gradient that is not finite", self._keeper.not_finite or ()).wait()
            replica, parameter = min(numbers for numbers in found if numbers)
            raise not_finite_error(NotFinite(replica, parameter), self._keeper.gradients)
        ways = "; ".join(f"{self.group.name(instances)}: {state}" for state, instances in owners.items())
        raise CollectiveError(f"the instances reduce their gradients in different ways: {ways}")


@lru_cache(maxsize=16)
def total_weight(layout: ReplicaLayout, weights: tuple[tuple[int, ...], ...]) -> float:
    """Return the sum of all micro batches' weights in the job, added in the same order as the gradients."""
    partials = {
        node: weight
        for instance, words in enumerate(weights)
        for node, weight in zip(nodes_of(layout, instance), as_floats(words), strict=True)
    }
    return finish(partials, layout.num_replicas, operator.add)


def refuse_step(group: Group, accumulation: int, refusal: float = CANNOT_SPLIT, *, add: bool) -> None:
    """Tell all instances, when they begin a step, that this instance cannot make the step. Never raises."""
    with suppress(PopdistError):
        header = BeginHeader(heaviest=as_words([refusal])[0])
        group.start(_title(accumulation, add=add), header).wait(ABANDON_SECONDS)


def _title(accumulation: int, *, add: bool) -> str:
    return f"micro_batches(accumulation={accumulation}" + (", add=True)" if add else ")")


def check_reduction(reduction: str) -> None:
    """Raise BatchError if ``reduction`` is not ``"mean"`` or ``"sum"``."""
    if reduction not in ("mean", "sum"):
        raise BatchError(f"reduction={reduction!r} must be 'mean' or 'sum'")


def check_whole_job(group: Group, layout: ReplicaLayout) -> None:
    """Raise CollectiveError if ``group`` does not have all instances of the job."""
    if len(group.instances) < layout.num_instances:
        everybody = f"{layout.num_instances} {group.backend.names.noun}s"
        raise CollectiveError(
            f"gradients are added over all {everybody} of the job, but this code runs on "
            f"{group.name(group.instances)} only: call it outside execute_on_instances"
        )


def _lost_step(group: Group, instances: list[int], reason: str) -> MicroBatchError:
    """Wait 1 s, so that ``instances`` raise their errors first; return an error: they have failed the step."""
    wait_for_first_error()
    return MicroBatchError(
        f"{group.name(instances)} {reason}, so this step has no gradient on any instance; if all instances "
        "catch what they raise, the next loop works on all of them"
    )


def not_finite_error(found: NotFinite, gradients: GradientLayout) -> GradientError:
    """Return the error that names the parameter and the replica of a gradient with NaN or infinity."""
    return GradientError(
        f"the gradient of {gradients.names[found.parameter]} on replica {found.replica} holds NaN or infinity, so "
        "this step has no gradient on any instance. Lower the learning rate, or catch GradientError on all "
        "instances and go on with the next batch"
    )
