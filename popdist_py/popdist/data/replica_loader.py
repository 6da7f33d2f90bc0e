"""What loaders have in common: they hand out batches, and know which was the last one that the loop received."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from popdist import context
from popdist.data.batch import Batch
from popdist.data.fetching import Fetched
from popdist.data.position import Agreement, EpochPosition, ReaderState
from popdist.training_loop import training_loop


class ReplicaLoader(DataLoader[Batch]):
    """Made by ``popdist.data_loader``: a torch DataLoader whose batches are :class:`Batch` objects.

    What a loop has received and what workers have read ahead are two things. The loader counts the first, so a run
    that is resumed sees every sample once, whatever was on its way when it ended.

    Args:
        fetcher: Reads samples and makes micro batches; it is what workers get.
        progress: Where the loop stands.
        accumulation: Micro batches of each replica in a step.
        agreement: That all instances have made this loader.
        options: For torch's DataLoader.
    """

    def __init__(
        self,
        fetcher: Dataset[Any],
        progress: EpochPosition,
        accumulation: int,
        agreement: Agreement,
        options: Mapping[str, Any],
    ) -> None:
        contract = context.environment().contract
        self._replicas = contract.layout.replicas_of(contract.instance_index)
        self._accumulation = accumulation
        self._progress = progress
        self._agreement = agreement
        self._num_starts = 0
        own = {"generator": torch.Generator().manual_seed(progress.identity["seed"])}
        super().__init__(fetcher, batch_size=None, collate_fn=_as_it_is, **(own | dict(options)))

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override] # torch promises an iterator class of its own
        """Start the next epoch, or the rest of the one that was loaded."""
        self._agreement.prove()
        self._progress.start()
        self._num_starts += 1
        self._begin()
        return self._received(super().__iter__(), self._num_starts)

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one to be iterated, from its start; a no-op if it is the next one already.

        So a loop may set its epoch each time, also after :meth:`load_state_dict` in the middle of that epoch.
        """
        self._progress.set_epoch(epoch)
        self._num_starts += 1

    def state_dict(self) -> ReaderState:
        """Where the loop stands, in plain numbers: after the last batch that it received.

        Equal on all instances at the same step, whatever their workers have read ahead.
        """
        return self._progress.state_dict()

    def load_state_dict(self, state: Mapping[str, int | bool]) -> None:
        """Continue where ``state`` was taken: the next iteration yields the rest of its epoch, which may be empty.

        The job may have another number of instances and replicas, and the loader another micro batch size,
        accumulation and number of workers: no sample is lost or seen twice. (Only then, and only when less than
        one sample a replica remains, may a batch of an instance be empty.)

        Raises:
            DatasetError: If ``state`` is no state of a loader, or one of another dataset length, order or seed.
        """
        self._progress.load_state_dict(state)
        self._num_starts += 1

    def _begin(self) -> None:
        """Called at each start, before anything is read."""

    def _received(self, fetched: Iterator[Fetched], start: int) -> Iterator[Batch]:
        """Count what the loop receives, as long as no other place was started, set or loaded since."""
        with training_loop.read_loader() as loop:
            for share, contents in fetched:
                if start == self._num_starts:
                    self._progress.position = share.stop
                yield Batch.of(share, contents, self._replicas, self._accumulation)
                loop.next_batch()
        if start == self._num_starts:
            self._progress.jump(self._progress.epoch + 1)


def _as_it_is(fetched: Any) -> Any:  # noqa: ANN401 - torch says so
    """The collate function of torch's DataLoader: the micro batches are made already."""
    return fetched
