"""The queue of a group's collectives, which are done one after the other, as they were issued.

A synchronous call runs in the thread that makes it, unless others are still to be done. An asynchronous one runs
in the thread that waits for it, or in the group's own if nobody does soon. What follows a collective by a callback
of its future runs there, too: what is issued there has its turn at once, before what was issued later.
"""

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import Empty, SimpleQueue
from threading import Lock, RLock, Thread, get_ident
from typing import Any, Final, Literal, NoReturn, SupportsIndex, TypeVar

import torch
from torch import distributed as dist
from torch.futures import Future

from popdist.exchange.host_memory.barriers import wait_until
from popdist.exchange.host_memory.forks import call_at_exit
from popdist.ground import torch_private

_END_SECONDS: Final = 5.0
"""How long the thread may take to notice that the group has been left."""

_HAND_OVER_SECONDS: Final = 0.001
"""After this time the group's thread does what nobody waits for: beside a program that computes it is slower."""

NO_TIMEOUT: Final = timedelta(0)

T = TypeVar("T")

Results = Any  # what torch's collectives hand back: tensors, or lists of them
Outcome = Results | Callable[[], Results]
"""The results of a collective, or what makes them when somebody asks."""

_Event = Literal["issued", "wanted", "end"]


class _Work(dist.Work):
    """A collective that has or will have an outcome."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__()
        self._outcome = outcome

    def result(self) -> list[Any]:
        """What the collective changes, in the form of gloo's results."""
        return list(self._outcome() if callable(self._outcome) else self._outcome)

    def boxed(self) -> Any:
        """What a kernel returns for a collective that is done: a work of torch's own, which needs no Python."""
        return torch_private.done_work(self.result()).boxed()


class PendingWork(_Work):
    """A collective that is done later, by the group's thread or the one that waits for it."""

    def __init__(self, outcome: Outcome, queue: "WorkQueue") -> None:
        super().__init__(outcome)
        self._future: Future[Results] = Future()
        self._queue = queue

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait until the collective is done, or RuntimeError after ``timeout``, if not 0; it goes on then."""
        seconds = timeout.total_seconds()
        if seconds <= 0:
            self._queue.advance(self._future.done)
        elif not wait_until(self._future.done, seconds):
            raise RuntimeError(f"timeout: the collective was not done within {seconds:g} seconds")
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        """Whether the collective is done, or has failed."""
        return self._future.done()

    def is_success(self) -> bool:
        """Whether the collective is done and has not failed."""
        return self._future.done() and self.exception() is None

    def exception(self) -> BaseException | None:
        """What the collective raised; None where it has not, and while it is not done."""
        if not self._future.done():
            return None
        try:
            self._future.value()
        except Exception as error:  # noqa: BLE001 - whatever it was is the answer
            return error
        return None

    def get_future(self) -> Any:
        """A future of :meth:`result`."""
        self._queue.begin()
        return self._future

    def finish(self, error: BaseException | None) -> None:
        """Finish the future, with what the collective or the making of its results raised, or with these."""
        try:
            if error is None:
                self._future.set_result(self.result())
                return
        except Exception as caught:  # noqa: BLE001 - it is raised where the work is waited for
            error = caught
        torch_private.set_failure(self._future, _Failure(error), _Failure.reveal)


class _Failure:
    """The value of a future whose collective failed; who asks it for tensors gets the error."""

    # torch's C++ pickles a value to find its tensors, of which DistributedDataParallel's reducer takes the first:
    # an exception as the value, which torch's ``set_exception`` sets, would end the process there.

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def reveal(self) -> NoReturn:
        """Raise the error: the answer of the future's ``wait`` and ``value``."""
        raise self._error

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Raise the error."""
        raise self._error


class DoneWork(_Work):
    """A collective that was done when its call returned."""

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """True at once: there is nothing to wait for."""
        del timeout
        return True

    def is_completed(self) -> bool:
        """True."""
        return True

    is_success = is_completed

    def exception(self) -> None:
        """None."""

    def get_future(self) -> Any:
        """A future of :meth:`result`, which is done."""
        future: Future[Results] = Future()
        future.set_result(self.result())
        return future


class WorkQueue:
    """The collectives of one group, and the thread that does those that are not done at once."""

    def __init__(self, abort: Callable[[], None]) -> None:
        self._abort = abort  # ends a wait that is going on in the thread, with an error
        self._tasks: deque[tuple[PendingWork, Callable[..., None], Sequence[Any]]] = deque()
        self._events: SimpleQueue[_Event] = SimpleQueue()
        self._thread: Thread | None = None
        self._turn, self._issue = RLock(), Lock()  # held to do a collective and what follows it, and to issue one
        self._doer: int | None = None  # the thread that does one
        self._pending: set[PendingWork] = set()
        _queues.add(self)

    def run(
        self, do: Callable[..., None], arguments: Sequence[Any], outcome: Outcome, *, is_async: bool
    ) -> dist.Work:
        """Do the collective ``do(*arguments)`` in its turn: now, or if ``is_async`` perhaps later."""
        if not is_async and not self._pending:
            with self._turn:
                outside_inference(do, *arguments)
            return DoneWork(outcome)
        work = PendingWork(outcome, self)
        is_callback = self._doer == get_ident()
        with self._issue:
            self._pending.add(work)
            if not is_callback:
                self._tasks.append((work, do, arguments))
                self._start()
                self._events.put("issued")
        if is_callback:
            self._finish(work, do, arguments)
        if not is_async:
            work.wait()
        return work

    @property
    def is_idle(self) -> bool:
        """Whether no collective that was issued is still to be done."""
        return not self._pending

    def advance(self, is_done: Callable[[], bool]) -> None:
        """Do in this thread what was issued, until ``is_done()``; another thread that is at it goes on."""
        while self._tasks and not is_done() and self._turn.acquire(blocking=False):
            try:
                self._do_next()
            finally:
                self._turn.release()

    def begin(self) -> None:
        """Have the thread do what was issued."""
        self._events.put("wanted")

    def stop(self) -> None:
        """End the thread: a collective that is not begun fails, and one that is going on is broken off."""
        if self._thread is not None:
            self._abort()
            self._events.put("end")
            self._thread.join(_END_SECONDS)
            self._thread = None

    def _start(self) -> None:
        if self._thread is None:
            self._thread = Thread(target=self._work, daemon=True, name="popdist")
            self._thread.start()

    def _work(self) -> None:
        goes_on = True
        while goes_on:
            goes_on = self._next_event() != "end"
            while self._tasks:
                with self._turn:
                    self._do_next()

    def _next_event(self) -> _Event:
        """Wait until there is something to do that no other thread does."""
        event = self._events.get()
        while event == "issued" and len(self._tasks) <= 1:
            try:
                event = self._events.get(timeout=_HAND_OVER_SECONDS)
            except Empty:
                break
        return event

    def _do_next(self) -> None:
        if self._tasks:
            before, self._doer = self._doer, get_ident()
            outside_inference(self._finish, *self._tasks.popleft())
            self._doer = before

    def _finish(self, work: PendingWork, do: Callable[..., None], arguments: Sequence[Any]) -> None:
        error: BaseException | None = None
        try:
            do(*arguments)
        except BaseException as caught:  # noqa: BLE001 - it is raised where the work is waited for
            error = caught
        self._pending.discard(work)
        work.finish(error)
        del error  # which knows this frame, and with it the tensors


def outside_inference(do: Callable[..., T], *arguments: Any) -> T:
    """Call ``do``; what it keeps for later calls must not be of inference mode."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(mode=False):
            return do(*arguments)
    return do(*arguments)


_queues: "weakref.WeakSet[WorkQueue]" = weakref.WeakSet()


def are_all_idle() -> bool:
    """Whether all collectives of this process that were handed to a thread are done."""
    return all(queue.is_idle for queue in list(_queues))


def _stop_all() -> None:
    """A thread that lets go of a tensor when the interpreter is gone would abort the process."""
    for queue in list(_queues):
        queue.stop()


call_at_exit(_stop_all)
