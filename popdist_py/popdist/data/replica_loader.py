"""The loader that hands out batches, and knows which was the last one that the loop received."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from popdist import context
from popdist.data.batch import Batch
from popdist.data.fetching import Fetched
from popdist.data.position import EpochPosition, ReaderState
from popdist.training_loop import training_loop


class ReplicaLoader(DataLoader[Batch]):
    """Made by ``popdist.data_loader``: a torch DataLoader whose batches are :class:`Batch` objects.

    What a loop has received and what workers have read ahead are two things. The loader counts the first, so a run
    that is resumed sees every sample once, whatever was on its way when it ended.

    Args:
        fetcher: Reads samples and makes micro batches; it is what workers get.
        position: Where the loop stands.
        accumulation: Micro batches of each replica in a step.
        options: For torch's DataLoader.
    """

    def __init__(
        self,
        fetcher: Dataset[Any],
        position: EpochPosition,
        accumulation: int,
        options: Mapping[str, Any],
    ) -> None:
        contract = context.environment().contract
        self._replicas = contract.layout.replicas_of(contract.instance_index)
        self._accumulation = accumulation
        self._position = position
        own = {"generator": torch.Generator().manual_seed(position.identity["seed"])}
        super().__init__(fetcher, batch_size=None, collate_fn=_as_it_is, **(own | dict(options)))

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override] # torch promises an iterator class of its own
        """Start the next epoch, or the rest of the one that was loaded."""
        number = self._position.start()
        self._begin()
        return self._received(super().__iter__(), number)

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one to be iterated, from its start; a no-op if it is the next one already.

        So a loop may set its epoch each time, also after :meth:`load_state_dict` in the middle of that epoch.
        """
        self._position.set_epoch(epoch)

    def state_dict(self) -> ReaderState:
        """Where the loop stands, in plain numbers: after the last batch that it received.

        Equal on all instances at the same step, whatever their workers have read ahead.
        """
        return self._position.state_dict()

    def load_state_dict(self, state: Mapping[str, int | bool]) -> None:
        """Continue where ``state`` was taken: the next iteration yields the rest of its epoch, which may be empty.

        The job may have another number of instances and replicas, and the loader another micro batch size,
        accumulation and number of workers: no sample is lost or seen twice. (Only then, and only when less than
        one sample a replica remains, may a batch of an instance be empty.)

        Raises:
            DatasetError: If ``state`` is no state of a loader, or one of another dataset length, order or seed.
        """
        self._position.load_state_dict(state)

    def _begin(self) -> None:
        """Called at each start, before anything is read."""

    def _received(self, fetched: Iterator[Fetched], number: int) -> Iterator[Batch]:
        """Count what the loop receives as read."""
        with training_loop.read_loader() as ask:
            for share, contents in fetched:
                self._position.read_to(share.stop, number)
                yield Batch.of(share, contents, self._replicas, self._accumulation)
                ask()
        self._position.end_epoch(number)


def _as_it_is(fetched: Any) -> Any:  # noqa: ANN401 - torch says so
    """The collate function of torch's DataLoader: the micro batches are made already."""
    return fetched
