"""A loader whose order is a sampler's: ``popdist.data_loader(..., sampler=WeightedRandomSampler(...))``.

What the sampler gives in an epoch is that epoch: the index at position i is its i-th, and positions are dealt to
the replicas as without a sampler. Every instance reads the whole sampler when the epoch begins, so all of them
must get the same from it; they compare a checksum. An index may come several times (drawn with replacement, or
repeated augmentation), so the random numbers of a sample follow from its position and not from its index.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import replace
from operator import index
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from popdist import context
from popdist.collectives import exchange
from popdist.data.batch import Share
from popdist.data.epoch import EpochPlan
from popdist.data.position import EpochPosition, ReaderState
from popdist.data.replica_loader import ReplicaLoader
from popdist.data.sample_randomness import Reseed, isolated, sample_seeds
from popdist.data.sampler import EpochShares
from popdist.errors import CollectiveError, DatasetError, name_instances
from popdist.groups import wait_for_first_error

_DIVISORS: Final = ("num_replicas", "num_shards", "world_size", "num_processes")
"""How samplers that divide by rank call the number of ranks."""

_FOR_SAMPLER: Final = 2
"""Tells the random numbers of a sampler from those of samples and collate functions."""


class SamplerOrder:
    """The order of one epoch: what its sampler gave.

    Args:
        sampler: What was given, for its name.
        numbers: What it gave, in its order.
        num_samples: Samples in the dataset.

    Attributes:
        checksum: A 64-bit number that differs where the indices or their order differ.

    Raises:
        DatasetError: If one of the numbers is no index of the dataset.
    """

    def __init__(self, sampler: object, numbers: list[Any], num_samples: int) -> None:
        try:
            self._indices = np.fromiter(map(index, numbers), np.int64, len(numbers))
            lowest, highest = self._indices.min(initial=0), self._indices.max(initial=0)
        except (TypeError, OverflowError):
            lowest, highest = -1, -1
        if lowest < 0 or highest >= num_samples:
            raise DatasetError(_wrong_index(sampler, numbers, num_samples))
        digest = hashlib.blake2b(self._indices.astype("<i8").tobytes(), digest_size=8).digest()
        self.checksum = int.from_bytes(digest, "little", signed=True)

    def __len__(self) -> int:
        return len(self._indices)

    def indices(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The indices at ``positions``, in their order and shape."""
        found: NDArray[np.int64] = self._indices[positions]
        return found


class SampledPosition(EpochPosition):
    """The place of a loader with a sampler; its state has the checksum of the indices of an epoch that is begun.

    Attributes:
        checksum: Of the indices of the epoch that ``num_read`` counts in; 0 if none was begun.
    """

    checksum = 0

    def state_dict(self) -> ReaderState:
        """See :meth:`EpochReader.state_dict`."""
        return super().state_dict() | {"indices": self.checksum if self.num_read else 0}

    def load_state_dict(self, state: Mapping[str, int | bool]) -> None:
        """See :meth:`EpochReader.load_state_dict`."""
        super().load_state_dict(state)
        self.checksum = int(state["indices"])

    def begin(self, order: SamplerOrder) -> None:
        """Go on in ``order``.

        Raises:
            DatasetError: If the first part of the epoch was read in another one.
        """
        if self.num_read and self.checksum != order.checksum:
            raise DatasetError(
                f"the sampler does not give the indices of epoch {self.epoch} again of which {self.num_read} were "
                "read when the state was taken, so samples would be lost or come twice: leave out its generator "
                "(data_loader then seeds what it draws from seed and epoch) or give it the state that it had when "
                f"the epoch began, and have the same dataset; or begin a new one by set_epoch({self.epoch + 1})"
            )
        self.checksum = order.checksum


class SampledShares(EpochShares):
    """This instance's share of each step, in the order that a sampler gives for each epoch.

    Args:
        sampler: Iterated over once for each epoch.
        epochs: How as many samples as the dataset has would be dealt.
        replicas: Of this instance.
        position: Where the loop stands.
    """

    def __init__(
        self, sampler: Iterable[int], epochs: EpochPlan, replicas: range, position: SampledPosition
    ) -> None:
        super().__init__(epochs, replicas, position)
        self._sampler = sampler
        self._num_samples = epochs.length
        self._sampled_position = position

    def __len__(self) -> int:
        if self._order is None:
            if not isinstance(self._sampler, Sized):
                raise TypeError(
                    f"{type(self._sampler).__name__} has no length, so its loader has none before its first epoch"
                )
            return replace(self._plan, length=len(self._sampler)).num_steps()
        return super().__len__()

    def begin(self) -> None:
        """Read the sampler for the epoch that begins, on all instances alike.

        Raises:
            DatasetError: If it gives something else than indices of the dataset, or too few to deal.
            CollectiveError: If it gives others on another instance, or fails there.
        """
        order = self._read_together()
        plan = replace(self._plan, length=len(order))
        least = plan.samples_per_step if plan.drop_last else plan.num_replicas
        if plan.length < least:
            what = "a full step, with drop_last=True" if plan.drop_last else "one for each replica"
            raise DatasetError(
                f"{type(self._sampler).__name__} gave {plan.length} indices in epoch {self._position.epoch}, and "
                f"the job needs at least {least}: {what}"
            )
        self._sampled_position.begin(order)
        self._plan, self._order = plan, order

    def __iter__(self) -> Iterator[Share]:
        return self._with_positions(self._plan, super().__iter__())

    def _with_positions(self, plan: EpochPlan, shares: Iterator[Share]) -> Iterator[Share]:
        for share in shares:
            step = range(share.stop - share.num_samples_job, share.stop)
            yield share._replace(positions=plan.positions_of(self._replicas, step))

    def _read_together(self) -> SamplerOrder:
        """What the sampler gives in this epoch, on every instance."""
        if not context.is_initialized() or len(context.current_group().instances) == 1:
            return self._read()
        name, epoch = type(self._sampler).__name__, self._position.epoch
        text = f"data_loader with a sampler, {name}, epoch {epoch} from position {self._position.num_read}"
        try:
            order = self._read()
        except Exception:
            exchange([], text)
            raise
        told = exchange([order.checksum], text).wait()
        instances = context.current_group().instances
        if failed := [number for number, found in zip(instances, told, strict=True) if not found]:
            wait_for_first_error()
            raise CollectiveError(
                f"{name} failed on {name_instances(failed)} in epoch {epoch} (see the error there)"
            )
        groups: dict[int, list[int]] = {}
        for number, (checksum,) in zip(instances, told, strict=True):
            groups.setdefault(checksum, []).append(number)
        if len(groups) > 1:
            raise CollectiveError(_differing(name, epoch, list(groups.values())))
        return order

    def _read(self) -> SamplerOrder:
        """What the sampler gives in this epoch, with the process's generators set from seed and epoch."""
        epoch = self._position.epoch
        (seed,) = sample_seeds([0], seed=self._position.identity["seed"], epoch=epoch, what=_FOR_SAMPLER)

        def read(reseed: Reseed) -> list[Any]:
            reseed(seed)
            if hasattr(self._sampler, "set_epoch"):
                self._sampler.set_epoch(epoch)
            return list(self._sampler)

        return SamplerOrder(self._sampler, isolated(read), self._num_samples)


class SampledLoader(ReplicaLoader):
    """A loader in the order of a sampler.

    Args:
        fetcher: Reads samples.
        shares: What it reads.
        position: Where the loop stands.
        accumulation: Micro batches of each replica in a step.
        options: For torch's DataLoader.
    """

    def __init__(
        self,
        fetcher: Dataset[Any],
        shares: SampledShares,
        position: SampledPosition,
        accumulation: int,
        options: Mapping[str, Any],
    ) -> None:
        self._shares = shares
        super().__init__(fetcher, position, accumulation, {"sampler": shares, **options})

    def _begin(self) -> None:
        self._shares.begin()


def check_sampler(sampler: object) -> None:
    """Refuse what gives no whole epoch on each instance, again and again.

    Raises:
        DatasetError: If it cannot be iterated over, or only once, or divides by rank itself.
    """
    name = type(sampler).__name__
    if not hasattr(sampler, "__iter__") and not hasattr(sampler, "__getitem__"):
        raise DatasetError(f"sampler={sampler!r} cannot be iterated over: it must give indices of the dataset")
    if isinstance(sampler, Iterator):
        raise DatasetError(
            f"sampler: {name} is an iterator, which ends with its first epoch: give what can be iterated over "
            "again, such as a list or a Sampler"
        )
    for divisor in _DIVISORS:
        count = getattr(sampler, divisor, 1)
        if isinstance(count, int) and count != 1:
            rank = ", rank=0" if hasattr(sampler, "rank") else ""
            raise DatasetError(
                f"{name} divides by rank itself ({divisor}={count}), and data_loader deals what the whole sampler "
                f"gives to the replicas: write {name}(..., {divisor}=1{rank})"
            )


def _wrong_index(sampler: object, numbers: list[Any], num_samples: int) -> str:
    """What is wrong with the first of ``numbers`` that is no index."""
    place, wrong = next((place, it) for place, it in enumerate(numbers) if not _is_index(it, num_samples))
    batch = "; a sampler of batches is none of indices" if isinstance(wrong, list | tuple) else ""
    return (
        f"{type(sampler).__name__} gave {wrong!r} at position {place}, and an index of this dataset is a whole "
        f"number from 0 to {num_samples - 1}{batch}"
    )


def _is_index(number: object, num_samples: int) -> bool:
    try:
        return 0 <= index(number) < num_samples  # type: ignore[arg-type] # what is asked
    except TypeError:
        return False


def _differing(name: str, epoch: int, groups: list[list[int]]) -> str:
    found = " than on ".join(name_instances(group) for group in groups)
    return (
        f"{name} gave other indices in epoch {epoch} on {found}: it must give the same on every instance. "
        "data_loader seeds Python's, numpy's and torch's own generators from seed and epoch for it; give a "
        "generator of the sampler's own the same state everywhere, and make it from the same data"
    )
