"""A channel: a thread that does collectives one after the other while the program goes on.

It has connections of its own, because nothing says in which order its collectives come between those of the
program. On the CPU a collective is made of messages, which any thread may begin and for which this one waits: so
the next one is on its way meanwhile. On an accelerator it runs in a stream of the channel, and no
host waits.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Condition, Thread
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from popdist.errors import BackendError
from popdist.exchange.host_memory.barriers import wait_until
from popdist.exchange.host_memory.host_collectives import HostCollectives, as_bytes
from popdist.ground.accelerators import accelerator
from popdist.ground.progress import progress_page

T = TypeVar("T")


@contextmanager
def as_backend_error(what: str) -> Iterator[None]:
    """Wait for other instances in the block: an error of torch's becomes a BackendError after ``what``.

    NCCL says why only in the last line of its error. Without a visible device torch raises ValueError.
    """
    progress_page.wait_again()
    try:
        yield
    except BackendError:
        raise
    except (RuntimeError, ValueError) as error:
        _, _, last = str(error).partition("Last error:")
        reason = last.strip() or str(error).partition(". ")[0].rpartition(".cc:")[2]
        raise BackendError(f"{what} ({reason.splitlines()[0]})") from error
    finally:
        progress_page.end_wait()


END_SECONDS: Final = 5.0
"""How long the thread may take to notice that the channel was closed."""

_NUM_LOOKS: Final = 5
_LOOK_SECONDS: Final = 0.2


FollowUp = Callable[[], None]
"""The rest of a collective, to which the thread comes when nothing newer is to be done."""


class ChannelWork(NamedTuple):
    """Collectives for the thread, on tensors of one device; an accelerator's may be used after ``is_ready``."""

    do: Callable[[], FollowUp | None]
    tensors: Sequence[Tensor]
    is_ready: torch.Event | None


class Channel:
    """A thread with connections to all instances of the job, which does collectives as they were issued."""

    def __init__(
        self,
        process_group: Any,
        num_instances: int,
        instance_index: int,
        *,
        abort: Callable[[Any], None],  # ends the waits of the group with errors, here and on the other instances
        name_lost: Callable[[], str],
        local_collectives: HostCollectives | None = None,
    ) -> None:
        self.num_issued = 0  # the same on all instances while it is in use
        self.is_in_use = False  # then only its user may issue something
        self._process_group = process_group
        self._num_instances = num_instances
        self.instance_index = instance_index
        self._abort = abort
        self._name_lost = name_lost
        self.local_collectives = local_collectives
        self._works: SimpleQueue[ChannelWork | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._progress = Condition()
        self._num_done = 0
        self._failure: BaseException | None = None
        self._streams: dict[torch.device, torch.Stream] = {}

    @property
    def is_broken(self) -> bool:
        """Whether a collective has failed or was broken off: then all that come after it fail, too."""
        return self._failure is not None

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Every instance's ``tensor`` of an accelerator, stacked; called by what is issued."""
        gathered = tensor.new_empty((self._num_instances, *tensor.shape))
        self._process_group._allgather_base(as_bytes(gathered), as_bytes(tensor)).wait()  # noqa: SLF001 - torch's name
        return gathered

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """Row *j* goes to instance *j*; row *i* of the result came from instance *i*; called by what is issued."""
        received = torch.empty_like(tensor)
        self._process_group.alltoall_base(as_bytes(received), as_bytes(tensor), [], []).wait()
        return received

    @contextmanager
    def posting(self) -> Iterator[None]:
        """Begin messages in the block, which raises nothing: on a connection that failed, what is issued fails."""
        try:
            yield
        except RuntimeError as error:
            self._fail(error)

    def receive(self, row: Tensor, instance: int, tag: int) -> list[dist.Work]:
        """Post a receive for the next message of an instance with this tag; what to wait for."""
        return self._message("recv", row, instance, tag)

    def send(self, row: Tensor, instance: int, tag: int) -> list[dist.Work]:
        """Send a message, which goes when the instance has posted a receive for it; what to wait for."""
        return self._message("send", row, instance, tag)

    def _message(self, way: str, row: Tensor, instance: int, tag: int) -> list[dist.Work]:
        if self._process_group is None or not len(row):
            return []
        return [getattr(self._process_group, way)([as_bytes(row)], instance, tag)]

    def issue(self, do: Callable[[], FollowUp | None], tensors: Sequence[Tensor]) -> None:
        """Have the thread call ``do``, after all that was issued before it; does not wait and does not raise."""
        if self._process_group is None:
            return
        device = tensors[0].device
        is_ready = None if device.type == "cpu" else torch.accelerator.current_stream(device).record_event()
        self.num_issued += 1
        self._works.put(ChannelWork(do, tensors, is_ready))
        if self._thread is None:
            self._thread = Thread(target=self._work, daemon=True, name="popdist-channel")
            self._thread.start()

    def wait(self, number: int | None = None) -> None:
        """Wait until what was issued is done, up to ``number``; raises BackendError if it has failed."""
        with as_backend_error("the gradients of the other instances did not come"):
            number = self.num_issued if number is None else number
            with self._progress:
                self._progress.wait_for(lambda: self._num_done >= number)
            if self._failure is not None:
                if (loss := self._loss()) is not None:
                    raise loss from self._failure
                raise self._failure
        for device, stream in self._streams.items():  # what is computed later waits for it
            torch.accelerator.current_stream(device).wait_stream(stream)

    def wait_until_idle(self) -> None:
        """Wait until all that was issued is done, or has failed; never raises."""
        with self._progress:
            self._progress.wait_for(lambda: self._num_done >= self.num_issued)

    def _loss(self) -> BackendError | None:
        """An error that names the lost instances; the connections of a process are closed one after the other."""
        for _ in range(_NUM_LOOKS):
            if lost := self._name_lost():
                return BackendError(f"the connection to {lost} was closed: it ended or was lost")
            time.sleep(_LOOK_SECONDS)
        return None

    def abort(self) -> None:
        """Have everything fail that is not done yet, here and on the other instances, and all that comes later."""
        self._failure = self._failure or BackendError("the exchange of gradients was broken off")
        with suppress(RuntimeError):
            self._abort(self._process_group)
        if self.local_collectives is not None:
            self.local_collectives.abort()

    def close(self) -> None:
        """End the thread, and what still waits for an instance: an accelerator waits after the program's end."""
        if self._thread is not None:
            if self._num_done < self.num_issued or not wait_until(self._is_idle, END_SECONDS):
                self.abort()
            self._works.put(None)
            self._thread.join(END_SECONDS)
        self._thread = self._process_group = None
        self._failure = self._failure or BackendError("this instance has left the job")

    def _is_idle(self) -> bool:
        try:
            return all(stream.query() for stream in self._streams.values())
        except RuntimeError:  # after an error of the accelerator nothing waits any more
            return True

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self.abort()

    def _work(self) -> None:
        """Do what is issued; what remains of it is done in its order, when nothing newer is there."""
        follow_ups: deque[FollowUp] = deque()
        is_open = True
        while is_open or follow_ups:
            try:
                work = self._works.get(block=not follow_ups)
            except Empty:
                self._do(follow_ups.popleft())
                self._count()
                continue
            if work is None:
                is_open = False
                continue
            follow_up = self._do(partial(self._run, work))
            del work  # a tensor that is held on to would outlive its last use
            if follow_up is None and not follow_ups:
                self._count()
            else:
                follow_ups.append(follow_up or _do_nothing)

    def _count(self) -> None:
        with self._progress:
            self._num_done += 1
            self._progress.notify_all()

    def _do(self, do: Callable[[], T]) -> T | None:
        try:
            return do() if self._failure is None else None
        except BaseException as error:  # noqa: BLE001 - it is raised where the work is waited for
            self._fail(error)
            return None

    def _run(self, work: ChannelWork) -> FollowUp | None:
        if work.is_ready is None:
            return work.do()
        device = work.tensors[0].device
        if device not in self._streams:
            self._streams[device] = torch.Stream(device)
        stream = self._streams[device]
        with accelerator.in_stream(stream):
            stream.wait_event(work.is_ready)
            work.do()
            for tensor in work.tensors:
                tensor.record_stream(stream)
        return None


def _do_nothing() -> None:
    """What remains of a collective that is done."""
