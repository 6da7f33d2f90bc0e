"""The exchange of values between the replicas of a batch norm group: at each layer, forward and backward.

The participants of a group, which are its replicas with samples, each pass an array in each call and get the
arrays of all participants. The participants of one instance take turns, and the last participant exchanges for all
of them: first where each participant is, then the arrays, or an error for all. An instance that leaves its step
sends this to the other instances, so that no instance waits for a replica that has left.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar, Final, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from popdist.errors import BatchError, MicroBatchError, PopdistError, whole_number
from popdist.exchange.groups import Group, wait_for_first_error
from popdist.ground.layout import ReplicaLayout
from popdist.job.collectives import gather_bytes

Kind = Literal["forward", "backward", "end", "left"]

ReplicaValues: TypeAlias = NDArray[np.float64]
"""The array that a replica passes to an exchange."""

GroupValues: TypeAlias = NDArray[np.float64]
"""The arrays of all participants, as rows."""

_KINDS: Final[tuple[Kind, ...]] = ("forward", "backward", "end", "left")

_TEXT: Final = "exchange among batch norm groups"

_WEIGHTS: Final = "exchange the weights of micro batches"

_layers: Final[dict[int, str]] = {}
"""The names of grouped layers, for messages; the key is the layer's number."""


def layer_number(name: str) -> int:
    """Return a number for the layer ``name``, equal on all instances."""
    number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little")
    _layers[number] = name
    return number


class SyncPoint(NamedTuple):
    """The point at which a replica waits for its batch norm group: a pass of a layer, or the end of the step."""

    kind: Kind
    layer: int = 0  # the number of the layer; 0 for no layer
    width: int = 0

    def __str__(self) -> str:
        """Return the replica's position in words, such as ``has ended its micro batch``, for an error message."""
        if self.kind == "end":
            return "has ended its micro batch"
        if self.kind == "left":
            return "has left its micro batch (by break, return or an exception; see the error there)"
        return f"is in the {self.kind} pass of {_layers.get(self.layer, 'another layer')}"


END: Final = SyncPoint("end")
LEFT: Final = SyncPoint("left")


class GroupSync:
    """The exchanges of values in one batch norm group during one micro batch."""

    def __init__(
        self,
        weights: Mapping[int, float],  # the participants' weights; the key is the job-wide replica
        local: Sequence[int],  # the participants of this instance
        group: Group | None,  # the instances with participants; None if this is the only instance
        owners: Sequence[Sequence[int]],  # the participants of each instance in ``group``
    ) -> None:
        heaviest = max(weights.values(), default=1.0)
        self.local = local
        self.shares = {replica: weight / heaviest for replica, weight in weights.items()}
        self.is_over = not local
        self._group = group
        self._owners = owners
        self._points: dict[int, SyncPoint] = {}
        self._values: dict[int, ReplicaValues] = {}
        self._found: GroupValues = np.empty((0, 0))
        self._trouble: PopdistError | None = None
        self._is_cancelled = False

    def arrive(self, replica: int, point: SyncPoint, values: ReplicaValues | None = None) -> None:
        """Record that ``replica`` waits at ``point``; once all replicas of this instance and batch norm group
        wait, exchange their arrays with the other instances.
        """
        if self.is_over:
            return
        if self._is_cancelled:
            point, values = LEFT, None
        self._points[replica] = point
        if values is not None:
            self._values[replica] = values
        if len(self._points) < len(self.local):
            return
        points, arrays = self._points, [self._values[it] for it in sorted(self._values)]
        self._points, self._values = {}, {}
        try:
            self._found = self._exchange(points, arrays)
        except PopdistError as error:
            self.is_over, self._trouble = True, error
        if point.kind in ("end", "left"):
            self.is_over = True

    def values(self) -> GroupValues:
        """Return the arrays of the last exchange, one from each replica of the batch norm group, by replica."""
        self.check()
        return self._found

    def check(self) -> None:
        """Raise the error that has ended the exchanges of this batch norm group; do nothing without an error."""
        if self._trouble is not None:
            raise type(self._trouble)(*self._trouble.args) from self._trouble.__cause__

    def abandon(self) -> None:
        """Tell the group's other instances, if they may wait, that this instance has left. Never raises."""
        if not self.is_over:
            points = dict.fromkeys(self.local, LEFT)
            self.is_over = True
            with suppress(PopdistError):
                self._exchange(points, [])

    def cancel(self) -> None:
        """Make all local replicas of the batch norm group raise an error at their next layer; do not wait."""
        self._is_cancelled = True

    def has_ended_by(self, error: BaseException) -> bool:
        """Whether ``error`` is the error that has ended the exchanges of all replicas in the batch norm group."""
        return self._trouble is not None and error.args == self._trouble.args

    def _exchange(self, points: Mapping[int, SyncPoint], arrays: Sequence[ReplicaValues]) -> GroupValues:
        if self._group is None:
            _check(points)
            return np.array(arrays)
        shown = _first_and_first_other(points)
        numbers = [
            n for it in shown for n in (it, _KINDS.index(points[it].kind), points[it].layer, points[it].width)
        ]
        with self._group.undivided(_TEXT):
            headers = self._group.start(_TEXT, numbers).wait()
            is_quick = len(shown) == 1 and LEFT not in points.values()
            if not is_quick or any(words[1:] != numbers[1:] for words in headers):
                _check(_points_in(headers), own=points)
            if not arrays:
                return self._found
            mine = np.zeros((max(map(len, self._owners)), len(arrays[0])))
            mine[: len(arrays)] = arrays
            gathered = self._group.backend.all_gather(torch.from_numpy(mine)).numpy()
        return np.concatenate([its[: len(owned)] for owned, its in zip(self._owners, gathered, strict=True)])


def tree_sum_of_values(values: GroupValues) -> ReplicaValues:
    """Return the sum of the rows of ``values``, added as a binary tree: first pairs, then pairs of sums."""
    while len(values) > 1:
        rest = values[len(values) // 2 * 2 :]
        pairs = values[0 : len(values) - len(rest) : 2] + values[1::2]
        values = np.concatenate([pairs, rest]) if len(rest) else pairs
    total: ReplicaValues = values[0]
    return total


def _first_and_first_other(points: Mapping[int, SyncPoint]) -> list[int]:
    """Return the first replica in ``points``, and the first replica that waits at a different point, if any."""
    first = min(points)
    others = [it for it in sorted(points) if points[it] != points[first]]
    return [first, *others[:1]]


def _points_in(headers: Sequence[Sequence[int]]) -> dict[int, SyncPoint]:
    """Return the point at which each replica waits, from all instances' messages of four numbers per replica."""
    found = [words[i : i + 4] for words in headers for i in range(0, len(words), 4)]
    return {replica: SyncPoint(_KINDS[kind], layer, width) for replica, kind, layer, width in found}


def _check(points: Mapping[int, SyncPoint], own: Mapping[int, SyncPoint] | None = None) -> None:
    """Raise MicroBatchError unless all replicas wait at the same point (layer and pass); if another instance has
    failed, wait first until its own error has appeared.
    """
    if len(set(points.values())) == 1 and next(iter(points.values())) != LEFT:
        return
    if own is not None and LEFT in points.values() and LEFT not in own.values():
        wait_for_first_error()
    first, *rest = [
        next(it for it in sorted(points) if points[it] == point) for point in sorted(set(points.values()))
    ]
    places = "; ".join(f"replica {it} {points[it]}" for it in [first, *rest])
    raise MicroBatchError(
        f"the replicas of a batch norm group wait for each other, and {places}. All of them call the same layers, "
        "equally often, forward and backward; this step has no gradient on any instance"
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NormTurn:
    """The replica that computes now, and the exchanges of its batch norm group, which batch norm layers use."""

    size: int
    replica: int
    sync: GroupSync
    pass_on: Callable[[], None] = lambda: None  # lets other local replicas run until the next turn

    current: ClassVar["NormTurn | None"] = None

    def __enter__(self) -> None:
        NormTurn.current = self

    def __exit__(self, kind: object, *_error: object) -> None:
        """Record that the replica has ended its micro batch, or has left the micro batch because of an error."""
        if NormTurn.current is self:
            NormTurn.current = None
        self.sync.arrive(self.replica, END if kind is None else LEFT)
        if kind is None:
            self.sync.check()

    @property
    def share(self) -> float:
        """The weight of the replica in the step's loss, divided by the largest weight in its batch norm group."""
        return self.sync.shares[self.replica]

    def sync_values(self, point: SyncPoint, values: ReplicaValues) -> GroupValues:
        """Exchange ``values`` in the batch norm group, and return the arrays of all its replicas. Raise
        MicroBatchError if a replica does not take part.
        """
        self.sync.check()
        if self.sync.is_over:
            raise MicroBatchError(
                f"replica {self.replica} {point} after its micro batch has ended, where the others of its "
                "batch norm group do not wait for it: call backward() within the loop, or in the function that "
                "run_micro_batches() calls, and not on what comes out of it"
            )
        self.sync.arrive(self.replica, point, values)
        if not self.sync.is_over:
            self.pass_on()
        return self.sync.values()


class LocalMicroBatches(NamedTuple):
    """The micro batches that this instance computes together, one for each replica in a batch norm group."""

    replicas: range
    step: int
    sync: GroupSync


class NormGroups:
    """The batch norm groups of one model, and the micro batches of the open step on this instance, in order."""

    def __init__(self, size: int, layout: ReplicaLayout) -> None:
        self.size = size
        self.plan: list[LocalMicroBatches] = []
        self._layout = layout
        self._whole: Group | None = None
        self._parts: dict[tuple[int, ...], Group] = {}

    def check_batch(self, contents: Sequence[object], weights: Sequence[float]) -> None:
        """Raise BatchError if a micro batch with samples, which enter the statistics, has the weight 0."""
        for index, (content, weight) in enumerate(zip(contents, weights, strict=True)):
            if content is not None and not weight:
                raise BatchError(
                    f"micro batch {index} has samples and weighs 0, and with batch_norm_group_size={self.size} "
                    "its samples count in the statistics of others: leave them out (None in what split gives), or "
                    "give it a weight"
                )

    def begin_step(self, group: Group, weights: Sequence[float], accumulation: int) -> None:
        """Send to all instances the factors ``weights`` of this instance's micro batches; an empty one has 0."""
        data = torch.tensor(weights, dtype=torch.float64, device="cpu").numpy().tobytes()
        gathered = b"".join(gather_bytes(group, _WEIGHTS, data))
        by_replica = torch.frombuffer(bytearray(gathered), dtype=torch.float64).view(-1, accumulation).tolist()
        own = self._layout.replicas_of(group.backend.instance_index)
        plan = []
        for first in range(own.start // self.size * self.size, own.stop, self.size):
            members = range(first, first + self.size)
            replicas = range(max(first, own.start), min(members.stop, own.stop))
            for step in range(accumulation):
                counted = {it: by_replica[it][step] for it in members if by_replica[it][step]}
                plan.append(LocalMicroBatches(replicas, step, self._sync_of(group, counted, own)))
        self.plan = plan

    def _sync_of(self, group: Group, weights: Mapping[int, float], own: range) -> GroupSync:
        owners: dict[int, list[int]] = {}
        for replica in weights:
            owners.setdefault(replica // self._layout.num_local_replicas, []).append(replica)
        local = [replica for replica in weights if replica in own]
        part = self._part(group, tuple(owners)) if local and len(owners) > 1 else None
        return GroupSync(weights, local, part, list(owners.values()))

    def _part(self, group: Group, instances: tuple[int, ...]) -> Group:
        if self._whole is not group:
            self._whole, self._parts = group, {}
        if instances not in self._parts:
            self._parts[instances] = group.limited_to(instances)
        return self._parts[instances]

    def turn(self, index: int) -> NormTurn:
        """Return a context for batch norm layers in micro batch ``index`` of the only replica of this instance."""
        part = self.plan[index]
        return NormTurn(size=self.size, replica=part.replicas.start, sync=part.sync)

    def abandon(self) -> None:
        """Tell all instances that may wait for this instance that this instance has left. Never raises."""
        for part in self.plan:
            part.sync.abandon()
        self.plan = []


def check_group_size(size: object, num_replicas: int) -> int:
    """Return the size of batch norm groups as int; raise BatchError unless it divides the number of replicas."""
    size = whole_number("batch_norm_group_size", size, BatchError)
    if num_replicas % size:
        fitting = [it for it in range(1, num_replicas + 1) if num_replicas % it == 0]
        below, above = [it for it in fitting if it < size][-1], [it for it in fitting if it > size][:1]
        nearest = " and ".join(map(str, [below, *above]))
        raise BatchError(
            f"batch_norm_group_size={size} does not divide the {num_replicas} replicas of the job: the nearest "
            f"that {'does is' if not above else 'do are'} {nearest}"
        )
    return size
