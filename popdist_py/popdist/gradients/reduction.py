"""The end of a step: the instances tell each other how it went, and only then add what they have.

Each says whether its step is complete, what its micro batches weigh, which parameters were used and which buffers
changed. An instance that left its loop says that in place of it, so nobody waits for gradients that never come.
"""

import hashlib
import operator
import time
from typing import Final, Literal, NamedTuple, TypeAlias

import torch

from popdist.errors import BatchError, CollectiveError, GradientError, MicroBatchError
from popdist.gradients.buffers import ReplicaBuffers
from popdist.gradients.exchange import nodes_of
from popdist.gradients.memory import GradientMemory
from popdist.gradients.overlap import OverlappedSum
from popdist.gradients.rows import FlatGradients, GradientRows
from popdist.groups import Exchange, Group
from popdist.headers import as_floats, as_words, name_instances
from popdist.layout import ReplicaLayout
from popdist.progress import progress_page
from popdist.tree import TreeSum, finish

Reduction: TypeAlias = Literal["mean", "sum"]
"""What becomes of the weighted gradients: their sum, or that divided by the sum of the weights."""

COURTESY_SECONDS: Final = 1.0

_STATES: Final = ("mean", "sum", "abandoned", "not finite")
"""What an instance says at the end of its step: how it wants its gradients reduced, or why it has none."""


class NotFinite(NamedTuple):
    """Where a gradient with NaN or infinity was found: the job-wide replica, and the parameter's position."""

    replica: int
    parameter: int


def lost_step(instances: list[int], reason: str) -> MicroBatchError:
    """The error of a step that ``instances`` have spoiled, after a moment in which they can end with their own.

    A launcher reports the failure that comes first, and the cause is theirs.
    """
    time.sleep(COURTESY_SECONDS)
    return MicroBatchError(f"{name_instances(instances)} {reason}, so this step has no gradient on any instance")


def check_reduction(reduction: str) -> None:
    """See that ``reduction`` is one.

    Raises:
        BatchError: If it is not.
    """
    if reduction not in ("mean", "sum"):
        raise BatchError(f"reduction={reduction!r} must be 'mean' or 'sum'")


def check_whole_job(group: Group, layout: ReplicaLayout) -> None:
    """See that nobody is missing.

    Raises:
        CollectiveError: If ``group`` is only a part of the job.
    """
    if len(group.instances) < layout.num_instances:
        raise CollectiveError(
            f"gradients are added over all {layout.num_instances} instances of the job, but this code runs on "
            f"{name_instances(group.instances)} only: call it outside execute_on_instances"
        )


class GradientSum:
    """The gradient over all replicas of the job, while this instance's replicas bring theirs.

    Args:
        group: All instances of the job.
        layout: Which replicas each of them owns.
        memory: Of the gradients of the parameters, which must be the same on all instances.
        buffers: Of the model; None leaves them alone.

    Raises:
        CollectiveError: If ``group`` is only a part of the job.
    """

    def __init__(
        self, group: Group, layout: ReplicaLayout, memory: GradientMemory, buffers: ReplicaBuffers | None = None
    ) -> None:
        check_whole_job(group, layout)
        self._group = group
        self._layout = layout
        self._memory = memory
        self._gradients = memory.gradients
        self._buffers = buffers
        first = layout.replicas_of(group.backend.instance_index).start
        self._rows: TreeSum[GradientRows] = TreeSum(layout.num_replicas, memory.add, start=first)
        self._weights: TreeSum[float] = TreeSum(layout.num_replicas, operator.add, start=first)
        self._used = 0

    def push(self, rows: GradientRows, weight: float, used: int) -> None:
        """Take the next local replica's gradients, added up with their weights, and the parameters it ``used``."""
        self._rows.push(rows)
        self._weights.push(weight)
        self._used |= used

    @property
    def rows(self) -> TreeSum[GradientRows]:
        """What the local replicas have brought so far."""
        return self._rows

    def finish(
        self,
        reduction: Reduction,
        *,
        unit: float = 1.0,
        not_finite: NotFinite | None = None,
        overlap: OverlappedSum | None = None,
    ) -> None:
        """Give every parameter its gradient over all replicas, and every buffer what the replicas made of it.

        Args:
            reduction: ``"mean"`` or ``"sum"``; the same on all instances.
            unit: What the gradients were multiplied by is their weight over this; the same on all instances.
            not_finite: What this instance has found, if anything: then every instance raises.
            overlap: What has gone early, if it could.

        Raises:
            BatchError: If the weights of the whole job add up to 0, so that there is no mean.
            GradientError: If an instance has found a gradient that is not finite.
            MicroBatchError: If another instance has left its loop before the end.
            CollectiveError: If the instances do other things, or have other parameters.
            BackendError: If an instance was lost or did not come in time.
        """
        parts = self._memory.parts()
        way = 0 if overlap is None else overlap.close(list(self._rows.nodes.values()))
        way = way if parts is None else parts.number
        states = self._announce(reduction if not_finite is None else "not finite", way).wait()
        self._check([_STATES[state[0]] for state in states], not_finite)
        total = self._total_weight([state[3:] for state in states])
        if reduction == "mean" and not total:
            raise BatchError("the weights of all instances' micro batches add up to 0: this step has no mean")
        mask = self._mask if len({state[1] for state in states}) == 1 else self._gather_mask()
        is_one_way = len({state[2] for state in states}) == 1
        parts = parts if is_one_way else None
        early = None if overlap is None else overlap.wait(are_right=is_one_way and way < 0)
        over = total / unit if reduction == "mean" else 1.0
        rows = self._memory.finish(self._rows.nodes, over, parts, early)
        num_parameters = len(self._gradients.names)
        self._gradients.give(rows, mask & ((1 << num_parameters) - 1))
        if parts is not None:
            parts.cover(self._group)
        if self._buffers is not None and mask >> num_parameters:
            self._buffers.combine(self._group, self._layout, mask >> num_parameters)
        progress_page.count_step()

    def abandon(self) -> Exchange:
        """Tell the others, in place of :meth:`finish`, that there will be no gradient; does not wait for them."""
        return self._announce("abandoned")

    @property
    def _mask(self) -> int:
        """Which parameters were used and, above them, which buffers were changed."""
        return self._used | (self._buffers.changed() << len(self._gradients.names) if self._buffers else 0)

    def _mask_as_bytes(self) -> bytes:
        num_bits = len(self._gradients.names) + len(self._buffers or ())
        return self._mask.to_bytes(num_bits // 8 + 1, "little")

    def _announce(self, state: str, way: int = 0) -> Exchange:
        """``way`` is how the gradients are added: 0 for all of them at the end, or what tells the other ones."""
        digest = hashlib.blake2b(self._mask_as_bytes(), digest_size=7).digest()
        weights = as_words(self._weights.nodes.values())
        text = f"add gradients({self._gradients}" + (f", {self._buffers})" if self._buffers else ")")
        numbers = [_STATES.index(state), int.from_bytes(digest, "little"), way]
        return self._group.start(text, [*numbers, *weights])

    def _check(self, states: list[str], not_finite: NotFinite | None) -> None:
        """Raise on every instance if one has no gradient, or they want different ones."""
        owners = {
            state: [i for i, it in zip(self._group.instances, states, strict=True) if it == state]
            for state in states
        }
        if "abandoned" in owners:
            raise lost_step(
                owners["abandoned"],
                "left the micro_batches loop before its end (by break, return or an exception)",
            )
        if "not finite" in owners:
            self._raise_not_finite(not_finite)
        if len(owners) > 1:
            wanted = "; ".join(f"{name_instances(instances)}: {state}" for state, instances in owners.items())
            raise CollectiveError(f"the instances reduce their gradients in different ways: {wanted}")

    def _raise_not_finite(self, own: NotFinite | None) -> None:
        found = self._group.start("name the gradient that is not finite", own or ()).wait()
        replica, parameter = min(numbers for numbers in found if numbers)
        raise not_finite_error(NotFinite(replica, parameter), self._gradients)

    def _total_weight(self, weights: list[list[int]]) -> float:
        """The weights of the whole job, added in the order of the gradients: equal bits for every split."""
        partials = {
            node: weight
            for instance, words in enumerate(weights)
            for node, weight in zip(nodes_of(self._layout, instance), as_floats(words), strict=True)
        }
        return finish(partials, self._layout.num_replicas, operator.add)

    def _gather_mask(self) -> int:
        own = torch.frombuffer(bytearray(self._mask_as_bytes()), dtype=torch.uint8)
        mask = 0
        for row in self._group.backend.all_gather(own):
            mask |= int.from_bytes(row.numpy().tobytes(), "little")
        return mask


def not_finite_error(found: NotFinite, gradients: FlatGradients) -> GradientError:
    """The error that names the parameter and the replica."""
    return GradientError(
        f"the gradient of {gradients.names[found.parameter]} on replica {found.replica} holds NaN or infinity, so "
        "this step has no gradient on any instance"
    )
