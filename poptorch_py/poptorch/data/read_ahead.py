"""`AsynchronousDataAccessor`: batches read by a worker of torch's DataLoader, before the program asks for them."""

import copy
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Final

import torch.multiprocessing
import torch.utils.data
from torch import Tensor
from torch.utils.data import IterableDataset

from popdist.errors import whole_number
from poptorch.custom_types import (
    PARSERS,
    ICustomArgParser,
    Structure,
    flatten,
    picklable_parsers,
    unflatten,
)
from poptorch.enums import SharingStrategy
from poptorch.errors import Error

_START_METHODS: Final = {
    SharingStrategy.SharedMemory: "spawn",
    SharingStrategy.FileSystem: "spawn",
    SharingStrategy.Fork: "fork",
    SharingStrategy.ForkServer: "forkserver",
}
_END: Final = object()  # in place of a batch, after the last one of an epoch


@dataclass(frozen=True, eq=False, kw_only=True)
class _Batches(IterableDataset[Any]):
    """The batches of ``source``; each iterator is an epoch."""

    source: Any  # a dataset, or a loader
    rebatched_size: int | None  # samples of a batch; None leaves batches as they are
    drop_last: bool  # leave out a last rebatched one that is smaller

    def __iter__(self) -> Iterator[Any]:
        source = self.source
        batches: Iterator[Any]
        if isinstance(source, torch.utils.data.DataLoader):
            batches = torch.utils.data.DataLoader.__iter__(source)  # that of poptorch's own may read ahead here
        elif hasattr(source, "__iter__"):
            batches = iter(source)
        else:
            batches = map(source.__getitem__, range(len(source)))
        if self.rebatched_size is None:
            return batches
        return rebatched(batches, self.rebatched_size, drop_last=self.drop_last)


def _loader_of(batches: _Batches, buffer_size: int, strategy: SharingStrategy) -> torch.utils.data.DataLoader[Any]:
    """A loader of torch whose one worker reads ``batches``, ``buffer_size`` of them ahead."""
    context = multiprocessing.get_context(_START_METHODS[strategy])
    if strategy is SharingStrategy.ForkServer:
        context.set_forkserver_preload(["__main__", __name__])  # which is read once for all loaders
    return torch.utils.data.DataLoader(
        batches,
        batch_size=None,
        num_workers=1,
        collate_fn=_unchanged,
        prefetch_factor=buffer_size,
        persistent_workers=True,
        multiprocessing_context=context,
        worker_init_fn=partial(_begin_worker, strategy=strategy, parsers=picklable_parsers()),
    )


def _unchanged(batch: Any) -> Any:
    return batch


def _begin_worker(_number: int, *, strategy: SharingStrategy, parsers: dict[type, ICustomArgParser]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the program's own matter
    threading.Thread(target=_end_with_program, daemon=True).start()
    PARSERS.update(parsers)
    if strategy is SharingStrategy.FileSystem:
        torch.multiprocessing.set_sharing_strategy("file_system")


def _end_with_program() -> None:
    """End the worker when the program is killed: torch's own watch sees the death of the server only."""
    program = multiprocessing.parent_process()
    if program is not None:
        program.join()
        os._exit(1)


def _check_arguments(
    dataset: Any,
    buffer_size: int,
    sharing_strategy: object,
    rebatched_size: int | None,
) -> None:
    if getattr(dataset, "_accessor", None) is not None:
        raise Error("The DataLoader already uses an AsynchronousDataAccessor: give it mode=DataLoaderMode.Sync")
    whole_number("buffer_size", buffer_size, Error)
    if rebatched_size is not None:
        whole_number("rebatched_size", rebatched_size, Error)
    if not isinstance(sharing_strategy, SharingStrategy):
        raise Error(f"sharing_strategy={sharing_strategy!r} must be a poptorch.SharingStrategy")
    if not hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__"):
        raise Error(f"AsynchronousDataAccessor takes a dataset or a loader, and was given {dataset!r}")


class AsynchronousDataAccessor:
    """Reads batches ahead, in one process that is started at once.

    Each iterator is a new epoch: one that is left early restarts the data. A loader that has workers reads ahead
    in these, as far as its ``prefetch_factor`` says.

    Args:
        dataset: Iterated in the process, once an epoch: a dataset, or a loader in Sync mode.
        buffer_size: Batches that may lie ready. At least 1.
        miss_sleep_time_in_ms: Accepted, and without effect: a batch is waited for without sleeping.
        load_indefinitely: Begin the next epoch when one has been read to its end; else when it is asked for.
        early_preload: Accepted, and without effect: all places are filled before the first iterator.
        sharing_strategy: How the process is started: forked by a server, spawned, or forked.
        rebatched_size: Join batches, and cut them to this size; None leaves them as they are.
        drop_last: Leave out a last joined batch that is smaller.
    """

    def __init__(
        self,
        dataset: Any,
        buffer_size: int = 3,
        miss_sleep_time_in_ms: float = 0.1,
        load_indefinitely: bool = True,
        early_preload: bool = False,
        sharing_strategy: SharingStrategy = SharingStrategy.ForkServer,
        rebatched_size: int | None = None,
        drop_last: bool = True,
    ) -> None:
        del miss_sleep_time_in_ms, early_preload
        _check_arguments(dataset, buffer_size, sharing_strategy, rebatched_size)
        self._dataset = dataset
        self._load_indefinitely = load_indefinitely
        has_workers = isinstance(dataset, torch.utils.data.DataLoader) and dataset.num_workers > 0
        batches = _Batches(
            source=copy.copy(dataset) if has_workers else dataset,  # workers that persist end with the copy
            rebatched_size=rebatched_size,
            drop_last=drop_last,
        )
        self._epochs: Iterable[Any] | None
        self._epochs = batches if has_workers else _loader_of(batches, buffer_size, sharing_strategy)
        self._epoch = 0
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        """Have the next epoch read; what is left of the one before is dropped."""
        if self._epochs is None:
            raise Error("the process that reads ahead has ended: terminate() was called")
        self._batches = iter(self._epochs)
        self._is_new = True

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> Iterator[Any]:
        if not self._is_new:  # the last one was left early, or is not followed by another unasked
            self._begin_epoch()
        self._is_new = False
        self._epoch += 1
        return self._batches_of(self._epoch)

    def _batches_of(self, epoch: int) -> Iterator[Any]:
        while True:
            if self._epoch != epoch:
                raise Error(
                    "this iterator has ended: another one of the loader was made, or terminate() was called"
                )
            try:
                batch = next(self._batches, _END)
            except Exception as error:
                traceback.clear_frames(error.__traceback__)  # which hold what ends the process when it is gone
                raise
            if batch is _END:
                break
            yield batch
            del batch  # and with it what holds its memory
        if self._load_indefinitely:
            self._begin_epoch()

    def terminate(self) -> None:
        """End the process. Iterators raise an ``Error`` from now on."""
        self._epochs, self._batches, self._is_new = None, iter(()), False
        self._epoch += 1


def rebatched(batches: Iterable[Any], size: int, *, drop_last: bool) -> Iterator[Any]:
    """The samples of ``batches`` in batches of ``size``, of the same structure; the last one may be smaller."""
    held: list[list[Any]] = []
    structure: Structure | None = None
    num_held = 0
    for batch in batches:
        rows: list[Any] = []
        structure = flatten(batch, rows, is_leaf=_is_texts)
        if not all(isinstance(row, list) or row.dim() for row in rows) or _holds_constants(structure):
            raise Error("batches are joined along dim 0: they must hold tensors with a dim 0, or lists of texts")
        held.append(rows)
        num_held += len(rows[0]) if rows else 0
        while num_held >= size:
            joined = [_joined(parts) for parts in zip(*held, strict=True)]
            yield unflatten(structure, iter([row[:size] for row in joined]))
            num_held -= size
            held = [[row[size:] for row in joined]] if num_held else []
    if num_held and structure is not None and not drop_last:
        yield unflatten(structure, iter([_joined(parts) for parts in zip(*held, strict=True)]))


def _is_texts(row: object) -> bool:
    """Whether it is what torch's collate function makes of texts."""
    return isinstance(row, list) and bool(row) and all(isinstance(part, str | bytes) for part in row)


def _holds_constants(structure: Structure) -> bool:
    return structure.kind is None or any(map(_holds_constants, structure.parts))


def _joined(parts: tuple[Any, ...]) -> Any:
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if isinstance(parts[0], Tensor) else list(chain(*parts))
