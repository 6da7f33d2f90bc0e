"""The loader that hands out batches, and knows which was the last one that the loop received."""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from popdist import context
from popdist.data.batch import Batch, Share
from popdist.data.fetching import Fetched, MapFetcher
from popdist.data.lone_reading import warn_if_alone
from popdist.data.position import EpochPosition, EpochReader
from popdist.data.sending import SentContents
from popdist.training_loop import training_loop


class ReplicaLoader(EpochReader, DataLoader[Batch]):
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
        collate_fn = _to_the_loop if options.get("num_workers") else _as_it_is
        super().__init__(fetcher, batch_size=None, collate_fn=collate_fn, **(own | dict(options)))

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override] # torch promises an iterator class of its own
        """Start the next epoch, or the rest of the one that was loaded."""
        warn_if_alone(sys._getframe(1))  # noqa: SLF001 - there is no other way to the caller
        number = self._position.start()
        self._begin()
        return self._received(self._fetched(), number)

    def _fetched(self) -> Iterator[Fetched]:
        """What torch's iterator would give. Without workers that one takes longer than some samples do.

        It is made all the same: it checks options, and draws from the generator of those who give one.
        """
        iterator: Iterator[Any] = super().__iter__()
        is_direct = self.num_workers == 0 and not self.pin_memory and isinstance(self.dataset, MapFetcher)
        return map(self.dataset.__getitem__, self.sampler) if is_direct else iterator  # type: ignore[arg-type] # torch calls what it gives batches

    def _begin(self) -> None:
        """Prepare for a start, before anything is read."""

    def _received(self, fetched: Iterator[Fetched], number: int) -> Iterator[Batch]:
        """Count what the loop receives as read, and keep nothing of it: its memory is for the next one."""
        with training_loop.read_loader() as ask:
            for share, contents in fetched:
                self._position.read_to(share.stop, number)
                batches = [self._batch(share, contents)]
                del contents
                yield batches.pop()
                ask()
        self._position.end_epoch(number)

    def _batch(self, share: Share, contents: list[Any]) -> Batch:
        """What the loop gets of ``share``."""
        return Batch.of(share, contents, self._replicas, self._accumulation)


def _as_it_is(fetched: Any) -> Any:  # noqa: ANN401 - torch says so
    """The collate function of torch's DataLoader: the micro batches are made already."""
    return fetched


def _to_the_loop(fetched: Any) -> tuple[Share, SentContents]:  # noqa: ANN401 - as above
    """That of a worker, which sends what it returns."""
    share, contents = fetched
    return share, SentContents(contents)
