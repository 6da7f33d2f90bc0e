"""Where the replicas of a batch norm group meet: at each layer, forward and backward, and at the end.

A group is ``size`` consecutive replicas. Those of them that have samples in a micro batch, its participants, call
the same layers in the same order, and each brings a row of numbers to each call. The rows of all participants come
back in the order of the replicas, so whatever is made of them has the same bits for every split into instances.

Participants of one instance take turns (`popdist.training.replica_turns`): the last one of them meets the other
instances for all. These say in a header where they are before any data goes: at which layer, at the end of the
micro batch, or gone. Only if all are at the same place the rows follow; else the meetings of this micro batch are
over, on all of them, with an error that names replicas and layers. An instance that leaves its step says so in
each meeting in which others still expect it. So nobody waits for a replica that does not come.
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
from popdist.groups import Group, wait_for_first_error
from popdist.layout import ReplicaLayout
from popdist.weights import gather_bytes

Kind = Literal["forward", "backward", "end", "left"]

ReplicaValues: TypeAlias = NDArray[np.float64]
"""What a replica brings to a meeting."""

GroupValues: TypeAlias = NDArray[np.float64]
"""Those of all participants, one below the other."""

_KINDS: Final[tuple[Kind, ...]] = ("forward", "backward", "end", "left")

_TEXT: Final = "a meeting of batch norm groups"

_WEIGHTS: Final = "tell the weights of micro batches"

_layers: Final[dict[int, str]] = {}
"""The layers of this process that meet, by their numbers: what they are called in messages."""


def layer_number(name: str) -> int:
    """A number that stands for the layer ``name`` on all instances."""
    number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little")
    _layers[number] = name
    return number


class SyncPoint(NamedTuple):
    """Where a replica stands.

    Attributes:
        kind: In which pass it is; at the end of its micro batch; or gone without it.
        layer: The number of the layer that it calls; 0 for none.
        width: How many numbers it brings.
    """

    kind: Kind
    layer: int = 0
    width: int = 0

    def __str__(self) -> str:
        """In words, after the replica's name."""
        if self.kind == "end":
            return "has ended its micro batch"
        if self.kind == "left":
            return "has left its micro batch (by break, return or an exception; see the error there)"
        return f"is in the {self.kind} pass of {_layers.get(self.layer, 'another layer')}"


END: Final = SyncPoint("end")
LEFT: Final = SyncPoint("left")


class GroupSync:
    """The meetings of one group in one micro batch.

    Args:
        weights: Of its participants, by job-wide number of the replica; greater than 0.
        local: Those of this instance, ascending.
        group: The instances that have participants; None where it is this one alone.
        owners: Those of each of these instances, ascending.

    Attributes:
        local: As given.
        shares: What each participant counts, over the heaviest of them.
        is_over: Whether there will be no other meeting.
    """

    def __init__(
        self,
        weights: Mapping[int, float],
        local: Sequence[int],
        group: Group | None,
        owners: Sequence[Sequence[int]],
    ) -> None:
        heaviest = max(weights.values(), default=1.0)
        self.local = local
        self.shares = {replica: weight / heaviest for replica, weight in weights.items()}
        self.is_over = not local
        self._group = group
        self._owners = owners
        self._stops: dict[int, SyncPoint] = {}
        self._rows: dict[int, ReplicaValues] = {}
        self._found: GroupValues = np.empty((0, 0))
        self._trouble: PopdistError | None = None
        self._is_cancelled = False

    def arrive(self, replica: int, stop: SyncPoint, row: ReplicaValues | None = None) -> None:
        """A local participant comes to ``stop`` with its row; the last of them meets the other instances."""
        if self.is_over:
            return
        if self._is_cancelled:
            stop, row = LEFT, None
        self._stops[replica] = stop
        if row is not None:
            self._rows[replica] = row
        if len(self._stops) < len(self.local):
            return
        stops, rows = self._stops, [self._rows[it] for it in sorted(self._rows)]
        self._stops, self._rows = {}, {}
        try:
            self._found = self._exchange(stops, rows)
        except PopdistError as error:
            self.is_over, self._trouble = True, error
        if stop.kind in ("end", "left"):
            self.is_over = True

    def rows(self) -> GroupValues:
        """The rows of all participants, in the order of the replicas, when all local ones have come.

        Raises:
            MicroBatchError: If the participants do not all call this layer.
            BackendError: If an instance was lost or did not come in time.
        """
        self.check()
        return self._found

    def check(self) -> None:
        """Raise what has ended the meetings, if it was not the end of the micro batch."""
        if self._trouble is not None:
            raise type(self._trouble)(*self._trouble.args) from self._trouble.__cause__

    def abandon(self) -> None:
        """Tell the other instances, if they may still come, that this one is gone. Never raises."""
        if not self.is_over:
            stops = dict.fromkeys(self.local, LEFT)
            self.is_over = True
            with suppress(PopdistError):
                self._exchange(stops, [])

    def cancel(self) -> None:
        """Have all local participants raise an error wherever they come to next; waits for nobody."""
        self._is_cancelled = True

    def is_cause(self, error: BaseException) -> bool:
        """Whether ``error`` is the one that has ended the meetings, of which a replica may know the cause."""
        return self._trouble is not None and error.args == self._trouble.args

    def _exchange(self, stops: Mapping[int, SyncPoint], rows: Sequence[ReplicaValues]) -> GroupValues:
        if self._group is None:
            _check(stops)
            return np.array(rows)
        shown = _first_and_first_other(stops)
        numbers = [n for it in shown for n in (it, _KINDS.index(stops[it].kind), stops[it].layer, stops[it].width)]
        told = self._group.start(_TEXT, numbers).wait()
        is_quick = len(shown) == 1 and LEFT not in stops.values()
        if not is_quick or any(words[1:] != numbers[1:] for words in told):
            _check(_stops_in(told), own=stops)
        if not rows:
            return self._found
        mine = np.zeros((max(map(len, self._owners)), len(rows[0])))
        mine[: len(rows)] = rows
        gathered = self._group.backend.all_gather(torch.from_numpy(mine)).numpy()
        return np.concatenate([its[: len(owned)] for owned, its in zip(self._owners, gathered, strict=True)])


def tree_sum_of_values(rows: GroupValues) -> ReplicaValues:
    """The sum of at least one row, in the tree of `popdist.tree` over their numbers."""
    while len(rows) > 1:
        rest = rows[len(rows) // 2 * 2 :]
        pairs = rows[0 : len(rows) - len(rest) : 2] + rows[1::2]
        rows = np.concatenate([pairs, rest]) if len(rest) else pairs
    total: ReplicaValues = rows[0]
    return total


def _first_and_first_other(stops: Mapping[int, SyncPoint]) -> list[int]:
    """The first replica, and the first that stands elsewhere or has left, if there is one."""
    first = min(stops)
    others = [it for it in sorted(stops) if stops[it] != stops[first]]
    return [first, *others[:1]]


def _stops_in(told: Sequence[Sequence[int]]) -> dict[int, SyncPoint]:
    """Where replicas stand, by their numbers: four numbers for each of them, from every instance."""
    found = [words[i : i + 4] for words in told for i in range(0, len(words), 4)]
    return {replica: SyncPoint(_KINDS[kind], layer, width) for replica, kind, layer, width in found}


def _check(stops: Mapping[int, SyncPoint], own: Mapping[int, SyncPoint] | None = None) -> None:
    """Raise unless all replicas stand at the same place; first wait a moment if another instance has the cause."""
    if len(set(stops.values())) == 1 and next(iter(stops.values())) != LEFT:
        return
    if own is not None and LEFT in stops.values() and LEFT not in own.values():
        wait_for_first_error()
    first, *rest = [next(it for it in sorted(stops) if stops[it] == stop) for stop in sorted(set(stops.values()))]
    told = "; ".join(f"replica {it} {stops[it]}" for it in [first, *rest])
    raise MicroBatchError(
        f"the replicas of a batch norm group wait for each other, and {told}. All of them call the same layers, "
        "equally often, forward and backward; this step has no gradient on any instance"
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NormTurn:
    """The replica that computes now, as far as its batch norm layers are concerned.

    Attributes:
        size: Replicas of its group.
        replica: Its job-wide number.
        meeting: Where it meets the others.
        pass_on: Lets the other local participants run, and returns when it is this one's turn again.
    """

    size: int
    replica: int
    sync: GroupSync
    pass_on: Callable[[], None] = lambda: None

    current: ClassVar["NormTurn | None"] = None

    def __enter__(self) -> None:
        NormTurn.current = self

    def __exit__(self, kind: object, *_error: object) -> None:
        """End the micro batch, or leave it by an error.

        Raises:
            MicroBatchError, BackendError: As :meth:`meet`.
        """
        if NormTurn.current is self:
            NormTurn.current = None
        self.sync.arrive(self.replica, END if kind is None else LEFT)
        if kind is None:
            self.sync.check()

    @property
    def share(self) -> float:
        """What the replica counts in the step's loss, over the heaviest participant of its group."""
        return self.sync.shares[self.replica]

    def sync_values(self, stop: SyncPoint, row: ReplicaValues) -> GroupValues:
        """The rows of all participants of the group, in their order, when all of them have come to ``stop``.

        Args:
            stop: A layer, forward or backward.
            row: What the replica brings, as long as ``stop`` says.

        Raises:
            MicroBatchError: If one of them comes to another layer, ends its micro batch or leaves it.
            BackendError: If an instance was lost or did not come in time.
        """
        self.sync.check()
        if self.sync.is_over:
            raise MicroBatchError(
                f"replica {self.replica} {stop} after its micro batch has ended, where it cannot meet the others "
                "of its batch norm group: call backward() within the loop, or in the function that "
                "run_micro_batches() calls, and not on what comes out of it"
            )
        self.sync.arrive(self.replica, stop, row)
        if not self.sync.is_over:
            self.pass_on()
        return self.sync.rows()


class LocalMicroBatches(NamedTuple):
    """What this instance computes at once: a micro batch of each local replica of one group.

    Attributes:
        replicas: Job-wide numbers of the local replicas of the group.
        step: Which of their micro batches it is.
        meeting: Of those that have samples in it.
    """

    replicas: range
    step: int
    sync: GroupSync


class NormGroups:
    """The batch norm groups of one model, from the point of view of this instance.

    Args:
        size: Replicas of a group; divides those of the job.
        layout: Of the job.

    Attributes:
        size: As given.
        plan: What this instance computes in the step that is open, in order.
    """

    def __init__(self, size: int, layout: ReplicaLayout) -> None:
        self.size = size
        self.plan: list[LocalMicroBatches] = []
        self._layout = layout
        self._whole: Group | None = None
        self._parts: dict[tuple[int, ...], Group] = {}

    def check_batch(self, contents: Sequence[object], weights: Sequence[float]) -> None:
        """Check that each micro batch with samples counts.

        Raises:
            BatchError: If one weighs nothing: then its gradient cannot be told from the statistics it is part of.
        """
        for index, (content, weight) in enumerate(zip(contents, weights, strict=True)):
            if content is not None and not weight:
                raise BatchError(
                    f"micro batch {index} has samples and weighs 0, and with batch_norm_group_size={self.size} "
                    "its samples count in the statistics of others: leave them out (None in what split gives), or "
                    "give it a weight"
                )

    def begin_step(self, group: Group, weights: Sequence[float], accumulation: int) -> None:
        """Learn which replicas have samples, of all instances; each has announced its step and heard of theirs.

        Args:
            group: All instances of the job.
            weights: What each micro batch of this instance counts, replica by replica; 0 without samples.
            accumulation: Micro batches of each replica.

        Raises:
            CollectiveError, BackendError: If the instances do other things, or one was lost.
        """
        data = torch.tensor(weights, dtype=torch.float64).numpy().tobytes()
        told = b"".join(gather_bytes(group, _WEIGHTS, data))
        by_replica = torch.frombuffer(bytearray(told), dtype=torch.float64).view(-1, accumulation).tolist()
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
            self._parts[instances] = Group(group.backend.subgroup(instances), self._layout.num_instances)
        return self._parts[instances]

    def turn(self, index: int) -> NormTurn:
        """What to enter for micro batch ``index`` of an instance that has one replica."""
        part = self.plan[index]
        return NormTurn(size=self.size, replica=part.replicas.start, sync=part.sync)

    def leave(self) -> None:
        """The step is lost: tell those that may still come to a meeting with this instance. Never raises."""
        for part in self.plan:
            part.sync.abandon()
        self.plan = []


def check_group_size(size: object, num_replicas: int) -> int:
    """``size`` as the number of replicas whose batch norm layers share statistics.

    Raises:
        BatchError: If it is no whole number from 1 up that divides the replicas of the job.
    """
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
