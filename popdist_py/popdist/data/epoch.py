"""Epochs: the order of samples, the division into steps, and the position of a sampler or loader.

A step takes the next positions of the epoch's order, and `popdist.ground.layout` deals the positions to the
replicas. So the samples of a replica do not depend on the instances. The index at a position is computed from the
position alone, by a Feistel network (https://en.wikipedia.org/wiki/Feistel_cipher) with a key made of seed and
epoch.
"""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import IterableDataset

from popdist.data.same_datasets import checksum_of_contents, checksum_of_subsets
from popdist.errors import (
    MOST_PARTS,
    CollectiveError,
    DatasetError,
    PopdistWarning,
    seed_number,
    whole_number,
)
from popdist.exchange.groups import Group
from popdist.ground.layout import parts
from popdist.job import context

ReaderState: TypeAlias = dict[str, int | bool]

MAX_LENGTH: Final = 2**63
NUM_ROUNDS: Final = 12
"""Rounds of the Feistel network; with fewer rounds, some orders of short ranges are visibly more frequent."""

LOOKUP_SIZE: Final = 4096
"""The number of samples in one numpy call: small for a quick start of an epoch, but large enough for speed."""

_WORD: Final = 2**64 - 1  # integers modulo 2**64 give the same order on every machine and for every numpy
GOLDEN: Final = 0x9E3779B97F4A7C15
_FIRST_FACTOR: Final = 0xBF58476D1CE4E5B9
_SECOND_FACTOR: Final = 0x94D049BB133111EB


class Order(Protocol):
    """The order of a dataset's samples in one epoch."""

    def indices(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the dataset indices of the samples at ``positions``, in the order and shape of ``positions``."""


class Permutation:
    """The shuffled order of ``length`` sample indices in one epoch, in constant memory."""

    def __init__(self, length: int, *, seed: int, epoch: int) -> None:
        if not 0 <= length <= MAX_LENGTH:
            raise ValueError(f"length={length} must be 0 to 2**63")
        self._length = length
        num_bits = max(2, (length - 1).bit_length())
        self._low_bits = np.uint64(num_bits // 2)
        self._low_mask = np.uint64((1 << num_bits // 2) - 1)
        self._high_mask = np.uint64((1 << num_bits - num_bits // 2) - 1)
        self._keys = [np.uint64(key) for key in round_keys(length, seed, epoch)]

    def indices(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the dataset indices at ``positions`` of the shuffled order, in the shape of ``positions``. Raises
        IndexError if a position is not in ``range(length)``.
        """
        if positions.size and not 0 <= positions.min() <= positions.max() < self._length:
            raise IndexError(f"positions {positions.min()} to {positions.max()} leave the range of {self._length}")
        values = self._mix(positions.ravel().astype(np.uint64))
        outside = np.flatnonzero(values >= self._length)
        while outside.size:  # mixing until each value is in the range keeps the bijection
            values[outside] = self._mix(values[outside])
            outside = outside[values[outside] >= self._length]
        return values.astype(np.int64).reshape(positions.shape)

    def _mix(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return ``values`` permuted by the Feistel network, a bijection of the numbers below a power of two."""
        low, high = values & self._low_mask, values >> self._low_bits
        for even_key, odd_key in zip(self._keys[::2], self._keys[1::2], strict=True):
            low ^= scramble(high + even_key) & self._low_mask
            high ^= scramble(low + odd_key) & self._high_mask
        return (high << self._low_bits) | low


def scramble(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix the bits of each 64-bit word in place by the last steps of SplitMix64, and return ``words``."""
    words ^= words >> np.uint64(30)
    words *= np.uint64(_FIRST_FACTOR)
    words ^= words >> np.uint64(27)
    words *= np.uint64(_SECOND_FACTOR)
    words ^= words >> np.uint64(31)
    return words


def _scramble_word(word: int) -> int:
    """Return the 64-bit ``word`` after the bit mixing of SplitMix64, as :func:`scramble` for an array."""
    return int(scramble(np.array([word & _WORD], dtype=np.uint64))[0])


def round_keys(*ingredients: int) -> list[int]:
    """Make the ``NUM_ROUNDS`` 64-bit keys of a Feistel network; any change of an argument changes every key."""
    state = 0
    for ingredient in ingredients:
        state = _scramble_word(state + ingredient + GOLDEN)
    return [_scramble_word(state + count * GOLDEN) for count in range(1, NUM_ROUNDS + 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPlan:
    """The division of an epoch of ``length`` samples into steps; in each step every replica has a sample."""

    length: int
    num_replicas: int
    samples_per_replica: int  # samples of a replica in a full step: micro batch size times accumulation
    drop_last: bool = False

    @property
    def samples_per_step(self) -> int:
        """Number of samples of a full step, over all replicas of the job."""
        return self.num_replicas * self.samples_per_replica

    def num_steps(self, position: int = 0) -> int:
        """Return the number of steps from ``position`` to the end of the epoch."""
        full, rest = divmod(max(self.length - position, 0), self.samples_per_step)
        has_own_step = rest and not self.drop_last and (self.samples_per_replica > 1 or not full)
        return full + bool(has_own_step)

    def steps(self, position: int = 0) -> Iterator[range]:
        """Yield, for each step from ``position`` on, the range of the epoch's positions that all replicas read."""
        while (size := self._step_size(self.length - position)) > 0:
            yield range(position, position + size)
            position += size

    def positions_of(self, replicas: range, step: range) -> range:
        """Return the positions in ``step`` that belong to ``replicas``, as one range, which may be empty."""
        return parts(step, replicas, self.num_replicas)

    def _step_size(self, remaining: int) -> int:
        # If the last step has too few samples for all replicas, it takes samples of the step before, or joins the
        # step before if that step has only one sample for each replica.
        full = self.samples_per_step
        if remaining < full:
            return 0 if self.drop_last else remaining
        if self.drop_last or not full < remaining < full + self.num_replicas:
            return full
        return remaining if self.samples_per_replica == 1 else remaining - self.num_replicas


class EpochPosition:
    """The position of one reader (a sampler or a loader) in its endless sequence of epochs."""

    def __init__(self, reader: str, identity: ReaderState, agreement: str, dataset: object = None) -> None:
        """Begin at epoch 0. A loaded state must have the same ``identity`` (such as the seed) as this position,
        and all instances must pass an equal ``agreement``, the text that they compare.
        """
        self.identity = identity | {"seed": seed_number(identity["seed"], DatasetError)}
        self._subsets = checksum_of_subsets(dataset)
        self._contents = checksum_of_contents(dataset)
        if self._subsets:
            self.identity["subsets"] = self._subsets
        self.epoch = 0
        self.num_read = 0
        self._reader = reader
        self._is_running = False
        self._number = 0  # number of the iteration, because reads of an older iteration no longer count
        self._agreement: str | None = agreement
        self._agree()

    def _agree(self) -> None:
        """Check once, after ``init()``, that all instances pass equal arguments (as text) and an equal dataset."""
        if self._agreement is not None and context.is_initialized():
            agreement, self._agreement = self._agreement, None
            group = context.data_parallel_group()
            checksums = group.start(agreement, [self._subsets, self._contents]).wait()
            if differing := name_differing(group, [subsets for subsets, _ in checksums]):
                raise CollectiveError(
                    f"{agreement}: the Subset in its dataset has other indices on {differing}, so samples would "
                    "come twice and never. random_split() draws them from torch's generator, which each instance "
                    "seeds for itself: write random_split(dataset, lengths, torch.Generator().manual_seed(0)); "
                    "other indices, too, must come from one seed or from popdist.broadcast_object()"
                )
            differing = name_differing(group, [contents for _, contents in checksums])
            if differing and context.current_job().is_checked and context.instance_index() == 0:
                warnings.warn(
                    f"{agreement}: the first samples of its dataset are others on {differing}. Each replica reads "
                    "its part of one dataset, which all instances must have alike. The usual reason is data drawn "
                    "at random after torch.manual_seed(rank): draw the data with one seed, or read the data from "
                    "one file, on all instances",
                    PopdistWarning,
                    stacklevel=5,
                )

    def start(self) -> int:
        """Begin the next epoch, or continue a loaded epoch; return the iteration's number for :meth:`read_to`."""
        self._agree()
        if self._is_running:
            self._jump(self.epoch + 1)
        self._is_running = True
        self._number += 1
        return self._number

    def read_to(self, position: int, number: int) -> None:
        """Record that the samples before ``position`` are read, unless an iteration after ``number`` has begun."""
        if number == self._number:
            self.num_read = position

    def end_epoch(self, number: int) -> None:
        """Record that the epoch is read to its end, unless an iteration after ``number`` has begun."""
        if number == self._number:
            self._jump(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next epoch, as :meth:`EpochReader.set_epoch` describes."""
        epoch = whole_number("epoch", epoch, DatasetError, minimum=0)
        if self._is_running or epoch != self.epoch:
            self._jump(epoch)
        self._number += 1

    def state_dict(self) -> ReaderState:
        """Return the epoch, the position in it, and the order's identity (such as the seed) as numbers."""
        return self.identity | {"epoch": self.epoch, "position": self.num_read}

    def load_state_dict(self, state: Mapping[str, int | bool]) -> None:
        """Continue from ``state``. Raise DatasetError if its identity, such as the seed, is not this reader's."""
        own = self.state_dict()
        if not _is_state(state, own):
            raise DatasetError(f"{state!r} is no state of a {self._reader}, such as {own}")
        if differing := [name for name in self.identity if state[name] != own[name]]:
            loaded, found = ({name: values[name] for name in differing} for values in (state, own))
            raise DatasetError(
                f"the state was taken with {loaded}, this {self._reader} has {found}: a position in one order "
                "means nothing in the other; make it as it was made then, or start a new epoch"
            )
        self._jump(int(state["epoch"]))
        self.num_read = int(state["position"])
        self._number += 1

    def _jump(self, epoch: int) -> None:
        self.epoch, self.num_read, self._is_running = epoch, 0, False


def name_differing(group: Group, values: Sequence[int]) -> str:
    """Return text that groups the instances by their value in ``values``; empty if all values are equal."""
    owners: dict[int, list[int]] = {}
    for instance, value in zip(group.instances, values, strict=True):
        owners.setdefault(value, []).append(instance)
    return " than on ".join(map(group.name, owners.values())) if len(owners) > 1 else ""


class EpochReader:
    """The public methods of samplers and loaders: ``set_epoch``, ``state_dict`` and ``load_state_dict``."""

    _position: EpochPosition

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next epoch, from its start; do nothing if ``epoch`` is the next epoch already.

        So a loop may call the method before each epoch, also after :meth:`load_state_dict` in the middle of the
        epoch. Raises DatasetError if ``epoch`` is no whole number of at least 0.
        """
        self._position.set_epoch(epoch)

    def state_dict(self) -> ReaderState:
        """Return epoch and position as plain numbers, which are equal on all instances at the same step.

        A loader counts the batches that the loop has received, however far its workers have read ahead. A sampler
        counts what the sampler has yielded. Workers of a DataLoader run ahead of the loop, so use no workers with
        a sampler.
        """
        return self._position.state_dict()

    def load_state_dict(self, state: Mapping[str, int | bool]) -> None:
        """Continue from the position ``state``: the next iteration yields the rest of that epoch.

        The number of instances, replicas and workers, the micro batch size and the accumulation may be different
        now: no sample is lost or seen twice. (Only then, and only if less than one sample a replica remains, the
        batch of an instance may be empty.) Raises DatasetError if ``state`` is no state of such a reader, or
        belongs to another dataset length, order or seed.
        """
        self._position.load_state_dict(state)


def _is_state(state: object, own: ReaderState) -> bool:
    """Whether ``state`` has the keys of the reader's state ``own``, only whole numbers, and a valid position."""
    if not isinstance(state, Mapping) or state.keys() != own.keys():
        return False
    if not all(isinstance(value, int) for value in state.values()):
        return False
    return bool(state["epoch"] >= 0 and 0 <= state["position"] <= own.get("length", math.inf))


def plan_epochs(
    length_or_dataset: int | Sized,
    num_replicas: int,
    micro_batch_size: int,
    accumulation: int,
    *,
    drop_last: bool,
) -> EpochPlan:
    """Return the plan that divides a dataset's epochs into steps; raise DatasetError if an epoch has no step."""
    check_sizes(micro_batch_size, accumulation)
    plan = EpochPlan(
        length=length_of(length_or_dataset, num_replicas),
        num_replicas=num_replicas,
        samples_per_replica=micro_batch_size * accumulation,
        drop_last=drop_last,
    )
    if not plan.num_steps():
        raise DatasetError(
            f"drop_last=True leaves nothing of {plan.length} samples: a step takes {plan.samples_per_step} "
            f"({num_replicas} replicas x {micro_batch_size} samples x accumulation {accumulation}), so choose "
            "smaller ones or keep the last"
        )
    return plan


def check_sizes(micro_batch_size: int, accumulation: int) -> None:
    """Raise DatasetError unless ``micro_batch_size`` and ``accumulation`` are whole numbers of at least 1."""
    whole_number("micro_batch_size", micro_batch_size, DatasetError)
    whole_number("accumulation", accumulation, DatasetError, maximum=MOST_PARTS)


def deal_epoch(
    plan: EpochPlan, replicas: range, position: EpochPosition, order: Order | None = None
) -> Iterator[tuple[range, list[int]]]:
    """Yield each remaining step's range of positions in the epoch, and its dataset indices for ``replicas``."""
    if order is None and position.identity["shuffle"]:
        order = Permutation(plan.length, seed=position.identity["seed"], epoch=position.epoch)
    return _deal(plan, replicas, plan.steps(position.num_read), order)


def _deal(
    plan: EpochPlan, replicas: range, steps: Iterator[range], order: Order | None
) -> Iterator[tuple[range, list[int]]]:
    num_steps = max(1, LOOKUP_SIZE // (plan.samples_per_replica * len(replicas)))
    while ahead := list(islice(steps, num_steps)):
        shares = [plan.positions_of(replicas, step) for step in ahead]
        positions = np.concatenate([np.arange(share.start, share.stop, dtype=np.int64) for share in shares])
        indices, stop = (positions if order is None else order.indices(positions)).tolist(), 0
        for step, share in zip(ahead, shares, strict=True):
            start, stop = stop, stop + len(share)
            yield step, indices[start:stop]


def length_of(length_or_dataset: Any, num_replicas: int = 1) -> int:
    """Return a dataset's number of samples; raise DatasetError if unknown or less than ``num_replicas``."""
    if isinstance(length_or_dataset, IterableDataset):
        raise DatasetError(
            f"{type(length_or_dataset).__name__} is a stream, which has no samples at indices: give it to "
            "popdist.data_loader as popdist.shard_iterable(stream)"
        )
    try:
        is_length = isinstance(length_or_dataset, int) and not isinstance(length_or_dataset, bool)
        length: int = length_or_dataset if is_length else len(length_or_dataset)
    except (TypeError, NotImplementedError) as error:
        raise DatasetError(
            f"{type(length_or_dataset).__name__} has no length: pass a number or a map-style dataset, and give a "
            "stream to popdist.data_loader as popdist.shard_iterable(stream)"
        ) from error
    if length < 1:
        raise DatasetError(f"a dataset of {length} samples has nothing to deal: look at where it is made")
    if length < num_replicas:
        raise DatasetError(
            f"a dataset of {length} samples is shorter than the job's {num_replicas} replicas, so some would "
            f"never have a sample: use at most --num-replicas {length}"
        )
    return length
