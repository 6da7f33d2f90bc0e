"""A channel: a thread that runs collectives one after another while the program computes.

A channel has its own connections, because the order of its collectives and of the program's collectives is not
fixed. On the CPU a collective consists of messages. Any thread may start a message, and the channel waits for it,
so that the next message is already being sent. On an accelerator a collective runs in a stream of the channel, and
no CPU thread waits.
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
from popdist.ground.torch_private_groups import gather_into

T = TypeVar("T")


@contextmanager
def as_backend_error(what: str) -> Iterator[None]:
    """A context for a wait for other instances: torch's errors become BackendErrors that begin with ``what``.

    NCCL gives the reason only in the last line of its error. If no device is visible, torch raises ValueError.
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
"""Seconds that the channel's thread may take to end after the channel was closed."""

_NUM_LOOKS: Final = 5
_LOOK_SECONDS: Final = 0.2


FollowUp = Callable[[], None]
"""The last part of a collective, which the channel's thread runs when there is no newer collective."""


class ChannelWork(NamedTuple):
    """Work for a channel's thread: a function, the tensors it uses, and the event after which these are ready."""

    do: Callable[[], FollowUp | None]
    tensors: Sequence[Tensor]
    is_ready: torch.Event | None


class Channel:
    """A thread with its own connections to all instances; it runs functions in the order of the calls of
    ``issue``.

    The queue, the counts and the failure belong together: the thread and its users read and change them in turns.
    """

    def __init__(
        self,
        process_group: Any,
        num_instances: int,
        instance_index: int,
        *,
        abort: Callable[[Any], None],  # ends waits of the process group with errors, on all instances
        name_lost: Callable[[], str],
        local_collectives: HostCollectives | None = None,
    ) -> None:
        self.num_issued = 0  # equal on all instances while the channel is in use
        self.is_in_use = False  # then only the channel's user may issue collectives
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
        """Whether a collective of this channel has failed or was aborted; then all later collectives fail too."""
        return self._failure is not None

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the accelerator tensors of all instances, stacked in instance order. Only a function that a
        caller has passed to :meth:`issue` may call this method.
        """
        gathered = tensor.new_empty((self._num_instances, *tensor.shape))
        gather_into(self._process_group, as_bytes(gathered), as_bytes(tensor))
        return gathered

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """Send ``tensor[j]`` to each instance *j*; return a tensor whose row *i* is from instance *i*. Only a
        function that a caller has passed to :meth:`issue` may call this method.
        """
        received = torch.empty_like(tensor)
        self._process_group.alltoall_base(as_bytes(received), as_bytes(tensor), [], []).wait()
        return received

    @contextmanager
    def posting(self) -> Iterator[None]:
        """A context for ``send`` and ``receive``: a lost connection raises no error there, only in later waits."""
        try:
            yield
        except RuntimeError as error:
            self._fail(error)

    def receive(self, row: Tensor, instance: int, tag: int) -> list[dist.Work]:
        """Start to receive ``instance``'s next message with ``tag`` into ``row``; return the works to wait for."""
        return self._message("recv", row, instance, tag)

    def send(self, row: Tensor, instance: int, tag: int) -> list[dist.Work]:
        """Start to send ``row`` to ``instance``, which must receive with ``tag``; return the works to wait for."""
        return self._message("send", row, instance, tag)

    def _message(self, way: str, row: Tensor, instance: int, tag: int) -> list[dist.Work]:
        if self._process_group is None or not len(row):
            return []
        return [getattr(self._process_group, way)([as_bytes(row)], instance, tag)]

    def issue(self, do: Callable[[], FollowUp | None], tensors: Sequence[Tensor]) -> None:
        """Make the channel's thread call ``do`` after all work issued before. Does not wait and does not raise."""
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
        """Wait until the first ``number`` functions that callers have passed to :meth:`issue` are done; if None,
        all functions. Raises BackendError if a function has failed.
        """
        with as_backend_error("the gradients of the other instances did not come"):
            number = self.num_issued if number is None else number
            with self._progress:
                self._progress.wait_for(lambda: self._num_done >= number)
            if self._failure is not None:
                if (loss := self._loss()) is not None:
                    raise loss from self._failure
                raise self._failure
        for device, stream in self._streams.items():  # so that later computations wait for the results
            torch.accelerator.current_stream(device).wait_stream(stream)

    def wait_until_idle(self) -> None:
        """Wait until all issued work is done or has failed; never raises."""
        with self._progress:
            self._progress.wait_for(lambda: self._num_done >= self.num_issued)

    def _loss(self) -> BackendError | None:
        """Return an error that names all lost instances; None if no connection is found closed within a second."""
        for _ in range(_NUM_LOOKS):
            if lost := self._name_lost():
                return BackendError(f"the connection to {lost} was closed: it ended or was lost")
            time.sleep(_LOOK_SECONDS)
        return None

    def abort(self) -> None:
        """Make all unfinished and all later work of this channel fail, here and on the other instances."""
        self._failure = self._failure or BackendError("the exchange of gradients was broken off")
        with suppress(RuntimeError):
            self._abort(self._process_group)
        if self.local_collectives is not None:
            self.local_collectives.abort()

    def close(self) -> None:
        """End the channel's thread; abort unfinished collectives, for which an accelerator would wait for ever."""
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
        except RuntimeError:  # after an error of the accelerator no operation waits
            return True

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self.abort()

    def _work(self) -> None:
        """Run issued functions in order; while no function waits, run the last parts of started collectives."""
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
            del work  # because a tensor in this variable would live too long
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
        except BaseException as error:  # noqa: BLE001 - the thread that waits for the work raises this error
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
    """Do nothing; a collective that has no last part has this function as its last part in the queue."""
