"""The samplers that feed one instance's replicas, exactly once an epoch, resumable at any size."""

from collections.abc import Iterator, Sized

from torch.utils.data import Sampler

from popdist import context
from popdist.data.batch import Share
from popdist.data.epoch import EpochPlan, Order, deal_epoch, plan_epochs
from popdist.data.position import EpochPosition, EpochReader
from popdist.errors import DatasetError, check_flags
from popdist.training_loop import training_loop


class ReplicaSampler(EpochReader, Sampler[list[int]]):
    """Yields, for each step, the indices of this instance's combined batch: the samples of all its local replicas.

    Give it to a ``torch.utils.data.DataLoader`` as ``batch_sampler`` and each batch to
    ``ReplicatedModel.micro_batches``, with the same ``accumulation``. (``popdist.data_loader`` does both, collates
    each micro batch by itself, and knows where the loop stands when workers run ahead of it.) Which samples a
    replica sees in a step depends on the job's replicas, not on the instances they are dealt to. Without
    ``drop_last`` every index comes exactly once an epoch, over all instances: what remains after the full steps
    makes a smaller last step (and where that has fewer samples than there are replicas, it takes some from the
    step before, or joins it if that had only one sample a replica).

    Every instance makes it alike, which is proven when it is made, or, if that is before ``popdist.init()``, when
    it is first iterated over. Each new iteration is the next epoch, starting with epoch 0. Memory and start of an
    epoch do not depend on the length.

    Args:
        length_or_dataset: Samples in the dataset, or anything that has a length.
        micro_batch_size: Samples of one replica in one forward and backward pass. At least 1.
        accumulation: Micro batches that a replica adds up in one step. At least 1.
        shuffle: Another order in each epoch; else the order of the dataset.
        seed: Chooses the orders. Must be the same on all instances.
        drop_last: Leave out a remainder smaller than a full step.

    Raises:
        DatasetError: If the dataset has no length or fewer samples than the job has replicas, a size is below 1,
            or ``drop_last`` leaves no step.
        CollectiveError: If the instances differ in sizes, seed or length of the dataset, or do not all make it.
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
        contract = context.environment().contract
        self._plan = plan_epochs(
            length_or_dataset, contract.num_replicas, micro_batch_size, accumulation, drop_last=drop_last
        )
        self._replicas = contract.layout.replicas_of(contract.instance_index)
        self._position = EpochPosition(
            "ReplicaSampler",
            {"length": self._plan.length, "shuffle": shuffle, "seed": seed},
            f"ReplicaSampler of {self._plan.length} samples, {micro_batch_size=}, {accumulation=}, {shuffle=}, "
            f"{seed=}, {drop_last=}",
        )

    def __len__(self) -> int:
        """Steps in a whole epoch, the same on every instance."""
        return self._plan.num_steps()

    def __iter__(self) -> Iterator[list[int]]:
        """Start the next epoch, or the rest of the one that was loaded."""
        return self._batches(self._position.start())

    def _batches(self, number: int) -> Iterator[list[int]]:
        """Count what is yielded as read."""
        with training_loop.read_loader() as ask:
            for step, indices in deal_epoch(self._plan, self._replicas, self._position):
                self._position.read_to(step.stop, number)
                yield indices
                ask()
        self._position.end_epoch(number)


class EpochShares(Sampler[Share]):
    """This instance's share of each step of the epoch that is being started."""

    _order: Order | None = None

    def __init__(self, plan: EpochPlan, replicas: range, position: EpochPosition) -> None:
        self._plan = plan
        self._replicas = replicas
        self._position = position

    def __len__(self) -> int:
        return self._plan.num_steps()

    def set_epoch(self, epoch: int) -> None:
        """As the loader's, for programs that know it of DistributedSampler."""
        self._position.set_epoch(epoch)

    def __iter__(self) -> Iterator[Share]:
        steps = deal_epoch(self._plan, self._replicas, self._position, self._order)
        return self._shares(self._position.epoch, steps)

    def _shares(self, epoch: int, steps: Iterator[tuple[range, list[int]]]) -> Iterator[Share]:
        for number, (step, indices) in enumerate(steps):
            yield Share(epoch=epoch, step=number, stop=step.stop, num_samples_job=len(step), indices=indices)
