"""Samplers that deal an epoch to this instance's replicas, and a loader that uses the program's own sampler.

The samples of a step are dealt by the samples' positions in the epoch's order: the dataset's order, a shuffled
order, or the order of the program's own sampler. Every instance reads this sampler to its end, and the instances
compare a checksum. The sampler may give an index several times, so the random numbers of a sample follow from the
sample's position and not from its index.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import replace
from operator import index
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from popdist.data.batch import Share
from popdist.data.epoch import (
    EpochPlan,
    EpochPosition,
    EpochReader,
    Order,
    ReaderState,
    deal_epoch,
    name_differing,
    plan_epochs,
)
from popdist.data.randomness import Reseed, isolated, sample_seeds
from popdist.data.replica_loader import ReplicaLoader
from popdist.errors import CollectiveError, DatasetError, check_flags
from popdist.exchange.groups import wait_for_first_error
from popdist.gradients.optimizer_steps import training_loop
from popdist.job import context

_DIVISORS: Final = ("num_replicas", "num_shards", "world_size", "num_processes")
"""The attributes in which samplers that divide by rank keep the number of ranks."""

_FOR_SAMPLER: Final = 2
"""The number that makes the seeds of samplers differ from the seeds of samples and collate functions."""


class ReplicaSampler(EpochReader, Sampler[list[int]]):
    """A sampler that yields, for each step, the dataset indices for all local replicas of this instance.

    Pass the sampler to a ``torch.utils.data.DataLoader`` as ``batch_sampler``, and each batch to
    ``ReplicatedModel.micro_batches`` with the same ``accumulation``. (``popdist.data_loader`` does both, collates
    each micro batch by itself, and knows how far the loop is when workers run ahead.) Which samples a replica gets
    in a step depends on the number of the job's replicas, not on the number of instances. Without ``drop_last``
    every index comes exactly once an epoch, over all instances: the samples that remain after the full steps make
    a smaller last step. If the last step has fewer samples than there are replicas, it takes samples from the step
    before. If that step has one sample for each replica, the last step joins that step.

    Every instance must make the sampler with the same arguments. The instances compare the arguments at once, or
    in the first iteration if the sampler is made before ``popdist.init()``. Each new iteration is the next epoch,
    beginning with epoch 0. Memory and start of an epoch do not depend on the length.

    Args:
        length_or_dataset: Number of samples in the dataset, or an object that has a length.
        micro_batch_size: Samples of one replica in one forward and backward pass. At least 1.
        accumulation: Micro batches whose gradients a replica adds in one step. At least 1.
        shuffle: Whether each epoch has another order; otherwise every epoch has the order of the dataset.
        seed: Seed of the orders. Must be the same on all instances.
        drop_last: Whether to leave out a remainder smaller than a full step.

    Raises:
        DatasetError: If the dataset has no length or fewer samples than the job has replicas, a size is below 1,
            or ``drop_last`` leaves no step.
        CollectiveError: If sizes, seed or length of the dataset differ between instances, or some instances do not
            make the sampler.
    """

    def __init__(
        self,
        length_or_dataset: int | Sized,
        micro_batch_size: int,
        accumulation: int = 1,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        check_flags(DatasetError, shuffle=shuffle, drop_last=drop_last)
        self._plan = plan_epochs(
            length_or_dataset, context.num_replicas(), micro_batch_size, accumulation, drop_last=drop_last
        )
        self._replicas = context.local_replicas()
        self._position = EpochPosition(
            "ReplicaSampler",
            {"length": self._plan.length, "shuffle": shuffle, "seed": seed},
            f"ReplicaSampler of {self._plan.length} samples, {micro_batch_size=}, {accumulation=}, {shuffle=}, "
            f"{seed=}, {drop_last=}",
            length_or_dataset,
        )

    def __len__(self) -> int:
        """Return the number of steps in a whole epoch, which is the same on every instance."""
        return self._plan.num_steps()

    def __iter__(self) -> Iterator[list[int]]:
        """Iterate over the next epoch, or over the rest of the epoch whose state was loaded."""
        return self._batches(self._position.start())

    def _batches(self, number: int) -> Iterator[list[int]]:
        """Yield the dataset indices of each step, and record the step's samples as read."""
        with training_loop.read_loader() as ask:
            for step, indices in deal_epoch(self._plan, self._replicas, self._position):
                self._position.read_to(step.stop, number)
                yield indices
                ask()
        self._position.end_epoch(number)


class EpochShares(Sampler[Share]):
    """A sampler that yields this instance's share of the samples of each step of the epoch."""

    _order: Order | None = None

    def __init__(self, plan: EpochPlan, position: EpochPosition) -> None:
        self._plan = plan
        self._replicas = context.local_replicas()
        self._position = position

    def __len__(self) -> int:
        return self._plan.num_steps()

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the loader's next epoch, for programs that call ``loader.sampler.set_epoch(epoch)``."""
        self._position.set_epoch(epoch)

    def __iter__(self) -> Iterator[Share]:
        steps = deal_epoch(self._plan, self._replicas, self._position, self._order)
        return self._shares(self._position.epoch, steps)

    def _shares(self, epoch: int, steps: Iterator[tuple[range, list[int]]]) -> Iterator[Share]:
        for number, (step, indices) in enumerate(steps):
            yield Share(epoch=epoch, step=number, stop=step.stop, num_samples_job=len(step), indices=indices)


class SamplerOrder:
    """The order of one epoch: the indices from the program's sampler, and a 64-bit checksum of the indices."""

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
        """Return the indices that the program's sampler gave at ``positions``, in the shape of ``positions``."""
        found: NDArray[np.int64] = self._indices[positions]
        return found


class SampledPosition(EpochPosition):
    """The position of a loader with a sampler; its state also has a checksum of the present epoch's indices."""

    checksum = 0

    def state_dict(self) -> ReaderState:
        """Return the loader's position and a checksum of the epoch's sample indices (0 before the first step)."""
        return super().state_dict() | {"indices": self.checksum if self.num_read else 0}

    def load_state_dict(self, state: Mapping[str, int | bool]) -> None:
        """Continue from the position ``state``, and keep its checksum of the epoch's sample indices."""
        super().load_state_dict(state)
        self.checksum = int(state["indices"])

    def begin(self, order: SamplerOrder) -> None:
        """Begin the epoch in ``order``. Raise DatasetError if the loaded position belongs to another order."""
        if self.num_read and self.checksum != order.checksum:
            raise DatasetError(
                f"the sampler does not give the indices of epoch {self.epoch} again of which {self.num_read} were "
                "read when the state was taken, so samples would be lost or come twice: leave out its generator "
                "(data_loader then seeds what it draws from seed and epoch) or give it the state that it had when "
                f"the epoch began, and have the same dataset; or begin a new one by set_epoch({self.epoch + 1})"
            )
        self.checksum = order.checksum


class SampledShares(EpochShares):
    """A sampler that yields this instance's share of each step, in the order of the program's sampler."""

    def __init__(self, sampler: Iterable[int], epochs: EpochPlan, position: SampledPosition) -> None:
        super().__init__(epochs, position)
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
        """Read the program's sampler for the next epoch; raise CollectiveError if instances get other indices."""
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
        """Read the sampler on every instance, and check that all instances get the same indices."""
        if not context.is_initialized() or len((group := context.data_parallel_group()).instances) == 1:
            return self._read()
        name, epoch = type(self._sampler).__name__, self._position.epoch
        text = f"data_loader with a sampler, {name}, epoch {epoch} from position {self._position.num_read}"
        try:
            order = self._read()
        except Exception:
            group.start(text)
            raise
        headers = group.start(text, [order.checksum]).wait()
        if failed := [number for number, found in zip(group.instances, headers, strict=True) if not found]:
            wait_for_first_error()
            raise CollectiveError(f"{name} failed on {group.name(failed)} in epoch {epoch} (see the error there)")
        if differing := name_differing(group, [checksum for (checksum,) in headers]):
            raise CollectiveError(
                f"{name} gave other indices in epoch {epoch} on {differing}: it must give the same on every "
                "instance. data_loader seeds Python's, numpy's and torch's own generators from seed and epoch for "
                "it; give a generator of the sampler's own the same state everywhere, and make it from the same "
                "data"
            )
        return order

    def _read(self) -> SamplerOrder:
        """Read the program's sampler to its end; first seed the process's generators for this epoch."""
        epoch = self._position.epoch
        (seed,) = sample_seeds([0], seed=self._position.identity["seed"], epoch=epoch, what=_FOR_SAMPLER)

        def read(reseed: Reseed) -> list[Any]:
            reseed(seed)
            if hasattr(self._sampler, "set_epoch"):
                self._sampler.set_epoch(epoch)
            return list(self._sampler)

        return SamplerOrder(self._sampler, isolated(read), self._num_samples)


class SampledLoader(ReplicaLoader):
    """A loader that reads the samples in the order of the program's sampler."""

    sampler: SampledShares

    def _begin(self) -> None:
        self.sampler.begin()


def check_sampler(sampler: object) -> None:
    """Raise DatasetError if ``sampler`` cannot be iterated over repeatedly, or yields only one rank's indices."""
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
    """Return the error message about the first entry of ``numbers`` that is no index of the dataset."""
    place, wrong = next((place, it) for place, it in enumerate(numbers) if not _is_index(it, num_samples))
    batch = "; a sampler of batches is none of indices" if isinstance(wrong, list | tuple) else ""
    return (
        f"{type(sampler).__name__} gave {wrong!r} at position {place}, and an index of this dataset is a whole "
        f"number from 0 to {num_samples - 1}{batch}"
    )


def _is_index(number: object, num_samples: int) -> bool:
    try:
        return 0 <= index(number) < num_samples  # type: ignore[arg-type] # index() raises a TypeError for other types
    except TypeError:
        return False
