"""A channel: a thread that does collectives one after the other while the program goes on.

A channel has connections of its own, because nothing says in which order its collectives come between those of the
program. All instances of the job issue as many, in the same order and with tensors that fit; nothing proves that
here. Two instances send to each other at the same time; gloo's own all-to-all and all-gather use one direction
after the other, and take up to twice as long over a network.

A collective of CUDA tensors runs in a stream of the channel and waits there for what was computed before it was
issued; the host waits for neither. Memory that it uses is not given to others before it is done with it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from threading import Condition, Thread
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from popdist.errors import BackendError
from popdist.headers import name_instances
from popdist.host_memory.host_collectives import as_bytes
from popdist.host_memory.waiting import wait_until
from popdist.progress import progress_page


@contextmanager
def as_backend_error(what: str) -> Iterator[None]:
    """Wait for other instances in the block: an error of torch's becomes a BackendError that begins with ``what``.

    Torch raises RuntimeError and subclasses of it for everything that goes wrong on the way.
    """
    progress_page.wait_again()
    try:
        yield
    except BackendError:
        raise
    except RuntimeError as error:
        reason = str(error).partition(". ")[0].splitlines()[0]
        raise BackendError(f"{what} ({reason.rpartition('.cc:')[2]})") from error
    finally:
        progress_page.go_on()


def swap(
    gloo: Any,  # noqa: ANN401 - torch's stubs lack the calls that take lists of tensors
    own: int,
    instances: Sequence[int],
    sent: Sequence[Tensor],
    received: Sequence[Tensor],
) -> None:
    """Send each instance its tensor and wait for theirs."""
    works = []
    for peer, mine, row in zip(instances, sent, received, strict=True):
        if peer == own:
            row.copy_(mine)
        else:
            works += [gloo.recv([row], peer, 0), gloo.send([mine], peer, 0)]
    for work in works:
        work.wait()


END_SECONDS: Final = 5.0
"""How long the thread may take to notice that the channel was closed."""

_NUM_LOOKS: Final = 5
_LOOK_SECONDS: Final = 0.2


class ChannelWork(NamedTuple):
    """Collectives that the thread is asked to do.

    Attributes:
        do: Does one or more collectives.
        tensors: What ``do`` reads and writes, all on one device.
        is_ready: On CUDA, the event after which the tensors may be read and written; None on the CPU.
    """

    do: Callable[[], None]
    tensors: Sequence[Tensor]
    is_ready: torch.cuda.Event | None


class Channel:
    """A thread with connections to all instances of the job, which does collectives as they were issued.

    Args:
        process_group: A process group of torch's own that nobody else uses.
        num_instances: Instances in the job.
        instance_index: This instance.
        break_off: Ends the waits of that process group with errors, here and on the other instances.
        find_lost: Asks which instances are known to be lost.

    Attributes:
        num_issued: How often something was issued; the same on all instances when they agree to issue more.
        is_taken: Whether somebody still has something to issue; nobody else may begin then.
    """

    def __init__(
        self,
        process_group: Any,  # noqa: ANN401 - torch's stubs lack the calls that take lists of tensors
        num_instances: int,
        instance_index: int,
        *,
        break_off: Callable[[Any], None],
        find_lost: Callable[[], list[int]],
    ) -> None:
        self.num_issued = 0
        self.is_taken = False
        self._process_group = process_group
        self._num_instances = num_instances
        self._instance_index = instance_index
        self._break_off = break_off
        self._find_lost = find_lost
        self._works: SimpleQueue[ChannelWork | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._progress = Condition()
        self._num_done = 0
        self._failure: BaseException | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @property
    def is_broken(self) -> bool:
        """Whether a collective has failed or was broken off: then all that come after it fail, too."""
        return self._failure is not None

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Every instance's ``tensor``, stacked; called by what is issued."""
        gathered = tensor.new_empty((self._num_instances, *tensor.shape))
        mine, rows = as_bytes(tensor), [as_bytes(row) for row in gathered]
        if tensor.is_cuda:
            self._process_group.allgather(rows, mine).wait()
        else:
            self._swap([mine] * len(rows), rows)
        return gathered

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """Row *j* goes to instance *j*; row *i* of the result came from instance *i*; called by what is issued."""
        received = torch.empty_like(tensor)
        if tensor.is_cuda:
            self._process_group.alltoall_base(as_bytes(received), as_bytes(tensor), [], []).wait()
        else:
            self._swap([as_bytes(row) for row in tensor], [as_bytes(row) for row in received])
        return received

    def _swap(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        swap(self._process_group, self._instance_index, range(self._num_instances), sent, received)

    def issue(self, do: Callable[[], None], tensors: Sequence[Tensor]) -> None:
        """Have the thread call ``do``, after all that was issued before it; does not wait and does not raise.

        Nothing is done once the channel was closed.

        Args:
            do: Calls :meth:`all_gather` and :meth:`all_to_all`.
            tensors: What it reads and writes, at least one and all on one device; left alone until then.
        """
        if self._process_group is None:
            return
        device = tensors[0].device
        is_ready = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        self.num_issued += 1
        self._works.put(ChannelWork(do, tensors, is_ready))
        if self._thread is None:
            self._thread = Thread(target=self._work, daemon=True, name="popdist-channel")
            self._thread.start()

    def wait(self) -> None:
        """Wait until all that was issued is done; on CUDA, have what is computed from now on wait for it.

        Raises:
            BackendError: If it has failed.
        """
        with as_backend_error("the gradients of the other instances did not come"):
            with self._progress:
                self._progress.wait_for(lambda: self._num_done == self.num_issued)
            if self._failure is not None:
                if (loss := self._loss()) is not None:
                    raise loss from self._failure
                raise self._failure
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)

    def _loss(self) -> BackendError | None:
        """An error that names the lost instances; the connections of a process are closed one after the other."""
        for _ in range(_NUM_LOOKS):
            if lost := self._find_lost():
                return BackendError(f"the connection to {name_instances(lost)} was closed: it ended or was lost")
            time.sleep(_LOOK_SECONDS)
        return None

    def break_off(self) -> None:
        """Have everything fail that is not done yet, here and on the other instances, and all that comes later."""
        self._failure = self._failure or BackendError("the exchange of gradients was broken off")
        with suppress(RuntimeError):
            self._break_off(self._process_group)

    def close(self) -> None:
        """End the thread, and what still waits for an instance; on CUDA such a wait would outlast the program."""
        if self._thread is not None:
            if self._num_done < self.num_issued or not wait_until(self._is_idle, END_SECONDS):
                self.break_off()
            self._works.put(None)
            self._thread.join(END_SECONDS)
        self._thread = self._process_group = None
        self._failure = self._failure or BackendError("this instance has left the job")

    def _is_idle(self) -> bool:
        try:
            return all(stream.query() for stream in self._streams.values())
        except RuntimeError:  # after an error of CUDA's nothing waits any more
            return True

    def _work(self) -> None:
        while (work := self._works.get()) is not None:
            try:
                if self._failure is None:
                    self._run(work)
            except BaseException as error:  # noqa: BLE001 - it is raised where the work is waited for
                self._failure = self._failure or error
                self.break_off()
            del work  # a tensor that is held on to would outlive its last use
            with self._progress:
                self._num_done += 1
                self._progress.notify_all()

    def _run(self, work: ChannelWork) -> None:
        if work.is_ready is None:
            work.do()
            return
        device = work.tensors[0].device
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        with torch.cuda.stream(stream):
            stream.wait_event(work.is_ready)
            work.do()
            for tensor in work.tensors:
                tensor.record_stream(stream)
