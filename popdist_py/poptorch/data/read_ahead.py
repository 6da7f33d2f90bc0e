"""`AsynchronousDataAccessor`: batches read by a process beside the program, before the program asks for them.

The two speak over a pipe. The program sends credits, one for each batch that may lie ready, leaves an epoch before
its end by its number, and gives back the memory of batches that it has let go of. The process sends batches in
shared memory, each with the number of its epoch. Either one's death closes the pipe, so that neither waits for a
dead one.
"""

import contextlib
import multiprocessing
import signal
import sys
import traceback
from collections.abc import Iterable, Iterator
from itertools import chain
from multiprocessing.connection import Connection, wait
from multiprocessing.util import Finalize
from typing import Any, Final, NamedTuple

import torch
import torch.multiprocessing  # has pipes send tensors in shared memory
from torch import Tensor

from poptorch._logging import logger
from poptorch.custom_types import PARSERS, Structure, picklable_parsers, put_together, taken_apart
from poptorch.data.shared_slots import SlotReader, SlotWriter
from poptorch.enums import SharingStrategy
from poptorch.errors import Error, is_whole

_START_METHODS: Final = {
    SharingStrategy.SharedMemory: "spawn",
    SharingStrategy.FileSystem: "spawn",
    SharingStrategy.Fork: "fork",
    SharingStrategy.ForkServer: "forkserver",
}
_STOP_SECONDS: Final = 5.0

_NUM_HELD: Final = 2
"""Batches that a loop has, besides those that lie ready: the one in work and the next one."""


class _Message(NamedTuple):
    """What the reading process sends: a batch, the end of an epoch, or why it cannot go on.

    Attributes:
        epoch: Which one, from 0.
        kind: ``"ready"``, ``"batch"``, ``"end"`` or ``"failed"``.
        content: The batch; or why, in words.
    """

    epoch: int
    kind: str
    content: Any = None


class _DataBuffers(NamedTuple):
    """Places for batches.

    Attributes:
        indices_mem: 1 for each batch that lies ready, else 0; ``int32``, one for each place.
    """

    indices_mem: Tensor


class _Reader:
    """The reading process as the program sees it."""

    def __init__(
        self, batches: Iterable[Any], buffer_size: int, first_credits: int, options: dict[str, Any]
    ) -> None:
        context = multiprocessing.get_context(_START_METHODS[options["sharing_strategy"]])
        if options["sharing_strategy"] is SharingStrategy.ForkServer:
            context.set_forkserver_preload(["__main__", __name__])  # which is read once for all loaders
        self._data_buffers = _DataBuffers(torch.zeros(buffer_size, dtype=torch.int32).share_memory_())
        self._pipe, theirs = context.Pipe()
        self._num_received = 0
        self._slots = SlotReader()
        self._process = context.Process(  # type: ignore[attr-defined]  # every context has one
            target=_read,
            args=(batches, theirs, self._pipe, self._data_buffers.indices_mem, first_credits, options),
        )
        self._process.start()
        theirs.close()
        self.stop = Finalize(self, _stop, args=(self._pipe, self._process), exitpriority=10)
        logger.debug("AsynchronousDataAccessor worker process: %s", self._process.pid)

    def receive(self) -> _Message:
        """The next message, when it is there.

        Raises:
            Error: If the process has ended.
        """
        wait([self._pipe, self._process.sentinel])
        try:
            message = self._pipe.recv() if self._pipe.poll() else None
        except (EOFError, OSError):
            message = None
        if message is None:
            self._process.join()
            raise Error(f"the process that reads ahead has ended with exit code {self._process.exitcode}")
        if message.kind == "batch":
            self._data_buffers.indices_mem[self._num_received % len(self._data_buffers.indices_mem)] = 0
            self._num_received += 1
            message = message._replace(content=self._slots.read(message.content))
            for slot in self._slots.left():
                self.send("free", slot)
        return _Message(*message)

    def send(self, kind: str, number: int) -> None:
        """``"credit"`` with how many, ``"leave"`` with an epoch, or ``"free"`` with a slot."""
        with contextlib.suppress(OSError):  # the next receive says that the process has ended
            self._pipe.send((kind, number))


class AsynchronousDataAccessor:
    """Reads batches ahead, in one process that is started at once.

    Each iterator is a new epoch: one that is left early restarts the data.

    Args:
        dataset: Iterated in the process, once an epoch: a dataset, or a loader in Sync mode.
        buffer_size: Batches that may lie ready. At least 1.
        miss_sleep_time_in_ms: Taken, and without effect: a batch is waited for without sleeping.
        load_indefinitely: Begin the next epoch when one has been read to its end; else when it is asked for.
        early_preload: Fill all places before the first iterator; else one.
        sharing_strategy: How the process is started: forked by a server, spawned, or forked.
        rebatched_size: Join batches, and cut them to this size; None leaves them as they are.
        drop_last: Leave out a last joined batch that is smaller.

    Raises:
        Error: If an argument is wrong, the first batch cannot be read, or ``dataset`` is read ahead already.
    """

    def __init__(
        self,
        dataset: Any,  # noqa: ANN401 - whatever can be iterated
        buffer_size: int = 3,
        miss_sleep_time_in_ms: float = 0.1,
        load_indefinitely: bool = True,
        early_preload: bool = False,
        sharing_strategy: SharingStrategy = SharingStrategy.ForkServer,
        rebatched_size: int | None = None,
        drop_last: bool = True,
    ) -> None:
        del miss_sleep_time_in_ms
        if getattr(dataset, "_accessor", None) is not None:
            raise Error(
                "The DataLoader already uses an AsynchronousDataAccessor: give it mode=DataLoaderMode.Sync"
            )
        if not is_whole(buffer_size) or buffer_size < 1:
            raise Error(f"buffer_size={buffer_size!r} must be a whole number of at least 1")
        if rebatched_size is not None and (not is_whole(rebatched_size) or rebatched_size < 1):
            raise Error(f"rebatched_size={rebatched_size!r} must be a whole number of at least 1, or None")
        if not isinstance(sharing_strategy, SharingStrategy):
            raise Error(f"sharing_strategy={sharing_strategy!r} must be a poptorch.SharingStrategy")
        if not hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__"):
            raise Error(f"AsynchronousDataAccessor takes a dataset or a loader, and was given {dataset!r}")
        self._dataset = dataset
        self._epoch = 0
        self._late_credits = 0 if early_preload else buffer_size - 1
        options = {
            "sharing_strategy": sharing_strategy,
            "load_indefinitely": load_indefinitely,
            "rebatched_size": rebatched_size,
            "drop_last": drop_last,
            "parsers": picklable_parsers(),
        }
        self._worker = _Reader(dataset, buffer_size, buffer_size - self._late_credits, options)
        if self._worker.receive().kind == "failed":
            self.terminate()
            raise Error("AsynchronousDataAccessor worker thread failed to start: the reason is printed above")

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> Iterator[Any]:
        if self._late_credits:
            self._worker.send("credit", self._late_credits)
            self._late_credits = 0
        epoch, self._epoch = self._epoch, self._epoch + 1
        self._worker.send("leave", epoch - 1)
        return self._batches(epoch)

    def _batches(self, epoch: int) -> Iterator[Any]:
        while True:
            if self._epoch != epoch + 1:
                raise Error("another iterator of this loader was made, which reads its batches now")
            message = self._worker.receive()
            if message.kind == "failed":
                raise Error(f"the process that reads ahead could not read a batch:\n{message.content}")
            if message.kind == "batch":
                self._worker.send("credit", 1)
            if message.epoch == epoch:
                if message.kind == "end":
                    return
                yield message.content
            del message  # and with it what holds the batch's memory

    def terminate(self) -> None:
        """End the process. Iterators raise an ``Error`` from now on."""
        self._worker.stop()


def _stop(pipe: Connection, process: Any) -> None:  # noqa: ANN401 - a process of any context
    """Closing the pipe ends a process that waits; one that reads is killed."""
    pipe.close()
    process.join(_STOP_SECONDS / 10)
    if process.is_alive():
        process.terminate()
        process.join(_STOP_SECONDS)
        if process.is_alive():
            process.kill()
            process.join()


class _Sending:
    """The program as the reading process sees it."""

    def __init__(self, pipe: Connection, indices_mem: Tensor, num_credits: int) -> None:
        self._pipe = pipe
        self._indices_mem = indices_mem
        self._credits = num_credits
        self._num_sent = 0
        self._slots = SlotWriter(len(indices_mem) + _NUM_HELD)
        self._left = -1

    def send(self, epoch: int, batch: Any) -> bool:  # noqa: ANN401 - whatever a dataset gives
        """Send a batch when there is a place for it; False where nobody wants the epoch any more."""
        while self._pipe.poll() or not (self._credits or epoch <= self._left):
            self._listen()
        if epoch <= self._left:
            return False
        self._credits -= 1
        written = self._slots.write(batch)
        self._indices_mem[self._num_sent % len(self._indices_mem)] = 1
        self._num_sent += 1
        self._pipe.send(_Message(epoch, "batch", written))
        return True

    def tell(self, epoch: int, kind: str, content: str = "") -> None:
        """Send anything else."""
        self._pipe.send(_Message(epoch, kind, content))

    def wait_for(self, epoch: int) -> None:
        """Until the program asks for ``epoch``."""
        while self._left < epoch - 1:
            self._listen()

    def serve(self) -> None:
        """Stay until the program closes its end: it fetches the memory of batches from this process.

        Raises:
            EOFError: Then.
        """
        while True:
            self._listen()

    def _listen(self) -> None:
        kind, number = self._pipe.recv()
        if kind == "credit":
            self._credits += number
        elif kind == "free":
            self._slots.free(number)
        else:
            self._left = max(self._left, number)


def _read(
    batches: Iterable[Any],
    pipe: Connection,
    theirs: Connection,
    indices_mem: Tensor,
    num_credits: int,
    options: dict[str, Any],
) -> None:
    """The reading process, until the program closes its end of the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)  # the program computes meanwhile; torch's own workers do the same
    theirs.close()
    PARSERS.update(options["parsers"])
    if options["sharing_strategy"] is SharingStrategy.FileSystem:
        torch.multiprocessing.set_sharing_strategy("file_system")
    sending = _Sending(pipe, indices_mem, num_credits)
    with contextlib.suppress(EOFError, OSError):  # the program has ended or wants no more
        try:
            _read_epochs(batches, sending, options)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise
        except Exception:  # noqa: BLE001 - whatever a dataset raises
            traceback.print_exc()
            sys.stderr.flush()
            sending.tell(-1, "failed", traceback.format_exc())
            sending.serve()


def _read_epochs(batches: Iterable[Any], sending: _Sending, options: dict[str, Any]) -> None:
    epoch = 0
    is_ready = False
    while True:
        read = iter(batches if hasattr(batches, "__iter__") else _samples(batches))
        if options["rebatched_size"] is not None:
            read = rebatched(read, options["rebatched_size"], drop_last=options["drop_last"])
        for batch in read:
            if not is_ready:
                sending.tell(epoch, "ready")
                is_ready = True
            if not sending.send(epoch, batch):
                break
        else:
            if not is_ready:
                sending.tell(epoch, "ready")
                is_ready = True
            sending.tell(epoch, "end")
        epoch += 1
        if not options["load_indefinitely"] or not is_ready:
            sending.wait_for(epoch)


def _samples(dataset: Any) -> Iterator[Any]:  # noqa: ANN401 - a dataset that has items and a length
    return (dataset[index] for index in range(len(dataset)))


def rebatched(batches: Iterable[Any], size: int, *, drop_last: bool) -> Iterator[Any]:
    """The samples of ``batches`` in batches of ``size``, of the same structure; the last one may be smaller.

    Raises:
        Error: If there is something else in a batch than tensors with a dim 0, and lists of texts.
    """
    held: list[list[Any]] = []
    structure: Structure | None = None
    num_held = 0
    for batch in batches:
        rows: list[Any] = []
        structure = taken_apart(batch, rows, is_leaf=_is_texts)
        if not all(isinstance(row, list) or row.dim() for row in rows) or _holds_constants(structure):
            raise Error("batches are joined along dim 0: they must hold tensors with a dim 0, or lists of texts")
        held.append(rows)
        num_held += len(rows[0]) if rows else 0
        while num_held >= size:
            joined = [_joined(parts) for parts in zip(*held, strict=True)]
            yield put_together(structure, iter([row[:size] for row in joined]))
            num_held -= size
            held = [[row[size:] for row in joined]] if num_held else []
    if num_held and structure is not None and not drop_last:
        yield put_together(structure, iter([_joined(parts) for parts in zip(*held, strict=True)]))


def _is_texts(row: object) -> bool:
    """Whether it is what torch's collate function makes of texts."""
    return isinstance(row, list) and bool(row) and all(isinstance(part, str | bytes) for part in row)


def _holds_constants(structure: Structure) -> bool:
    return structure.kind is None or any(map(_holds_constants, structure.parts))


def _joined(parts: tuple[Any, ...]) -> Any:  # noqa: ANN401 - of the same kind
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if isinstance(parts[0], Tensor) else list(chain(*parts))
