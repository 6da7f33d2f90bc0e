"""The queue of a process group's collectives, which run one after another in the order of the calls.

A synchronous call runs in the calling thread, unless earlier calls are not finished. An asynchronous call runs in
the thread that waits for it, or, if no thread soon waits, in the group's own thread. Callbacks of the future
run in that thread: a collective that a callback calls runs at once, before collectives that were called later.
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
from popdist.ground import torch_private_groups

_END_SECONDS: Final = 5.0
"""Seconds that the group's thread may take to end after this rank has left the group."""

_HAND_OVER_SECONDS: Final = 0.001
"""Seconds until the group's thread runs a call for which no thread waits; a waiting thread is faster."""

NO_TIMEOUT: Final = timedelta(0)

T = TypeVar("T")

Results = Any  # results of torch's collectives: tensors, or lists of tensors
Outcome = Results | Callable[[], Results]
"""The results of a collective, or a function that makes the results on request."""

_Event = Literal["issued", "wanted", "end"]


class _Work(dist.Work):
    """The work of a collective: a handle for waiting, with the results or a function that makes the results."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__()
        self._outcome = outcome

    def result(self) -> list[Any]:
        """Return the tensors that the collective writes, in the form of the results of gloo's works."""
        return list(self._outcome() if callable(self._outcome) else self._outcome)

    def boxed(self) -> Any:
        """Return a finished ``Work`` of torch's own class as a ScriptObject, as an operator's kernel must."""
        return torch_private_groups.done_work(self.result()).boxed()


class PendingWork(_Work):
    """A collective that runs later, in the group's thread or in the thread that waits for the collective."""

    def __init__(self, outcome: Outcome, queue: "WorkQueue") -> None:
        super().__init__(outcome)
        self._future: Future[Results] = Future()
        self._queue = queue

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait for the collective. Raises RuntimeError after a ``timeout`` above 0; the collective still runs."""
        seconds = timeout.total_seconds()
        if seconds <= 0:
            self._queue.advance(self._future.done)
        elif not wait_until(self._future.done, seconds):
            raise RuntimeError(f"timeout: the collective was not done within {seconds:g} seconds")
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        """Whether the collective is done or has failed."""
        return self._future.done()

    def is_success(self) -> bool:
        """Whether the collective is done without an error."""
        return self._future.done() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return the error of the collective; None if the collective has not failed or is not done."""
        if not self._future.done():
            return None
        try:
            self._future.value()
        except Exception as error:  # noqa: BLE001 - any error of the collective is returned
            return error
        return None

    def get_future(self) -> Any:
        """Return a future of the collective's results, and make the group's thread run the collective."""
        self._queue.begin()
        return self._future

    def finish(self, error: BaseException | None) -> None:
        """Finish the future with ``error``; if ``error`` is None, with the results of the collective."""
        try:
            if error is None:
                self._future.set_result(self.result())
                return
        except Exception as caught:  # noqa: BLE001 - the thread that waits for the work raises this error
            error = caught
        torch_private_groups.set_failure(self._future, _Failure(error), _Failure.reveal)


class _Failure:
    """The value of the future of a failed collective; reading tensors from this value raises the error."""

    # Torch's C++ code pickles a value to find its tensors; DistributedDataParallel's reducer uses the first
    # tensor. With an exception as the value, which torch's ``set_exception`` sets, the process would end there.

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def reveal(self) -> NoReturn:
        """Raise the collective's error when the future's ``wait`` or ``value`` is called."""
        raise self._error

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Raise the collective's error when torch's C++ code pickles this value in search of its tensors."""
        raise self._error


class DoneWork(_Work):
    """The work of a collective that had already ended when its call returned."""

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Return True at once, because the collective is done."""
        del timeout
        return True

    def is_completed(self) -> bool:
        """Return True, because the collective is done."""
        return True

    is_success = is_completed

    def exception(self) -> None:
        """Return None, because the collective has not failed."""

    def get_future(self) -> Any:
        """Return a finished future with the collective's results."""
        future: Future[Results] = Future()
        future.set_result(self.result())
        return future


class WorkQueue:
    """The queue of one group's collectives, with a thread that runs collectives for which nobody waits."""

    def __init__(self, abort: Callable[[], None]) -> None:
        self._abort = abort  # ends a running wait of the thread, with an error
        self._tasks: deque[tuple[PendingWork, Callable[..., None], Sequence[Any]]] = deque()
        self._events: SimpleQueue[_Event] = SimpleQueue()
        self._thread: Thread | None = None
        self._turn, self._issue = RLock(), Lock()  # to run a collective with callbacks; to add a collective
        self._doer: int | None = None  # the thread that now runs a collective
        self._pending: set[PendingWork] = set()
        _queues.add(self)

    def run(
        self, do: Callable[..., None], arguments: Sequence[Any], outcome: Outcome, *, is_async: bool
    ) -> dist.Work:
        """Run the collective ``do(*arguments)`` after all earlier collectives of the group; return its ``Work``.
        If ``is_async``, return before the collective has run, which a thread then does.
        """
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
        """Whether all collectives of this queue that were called are finished."""
        return not self._pending

    def advance(self, is_done: Callable[[], bool]) -> None:
        """Run queued collectives in this thread until ``is_done()``; stop if another thread runs the queue."""
        while self._tasks and not is_done() and self._turn.acquire(blocking=False):
            try:
                self._do_next()
            finally:
                self._turn.release()

    def begin(self) -> None:
        """Make the group's thread run the queued collectives now, without leaving them to a waiting thread."""
        self._events.put("wanted")

    def stop(self) -> None:
        """End the group's thread: the running collective is aborted, and the collectives in the queue fail."""
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
        """Wait until the group's thread has to run a collective or to end; return the event that has come."""
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
        except BaseException as caught:  # noqa: BLE001 - the thread that waits for the work raises this error
            error = caught
        self._pending.discard(work)
        work.finish(error)
        del error  # because the error refers to this frame, which refers to the tensors


def outside_inference(do: Callable[..., T], *arguments: Any) -> T:
    """Call ``do`` outside of inference mode, because later calls could not use tensors of inference mode."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(mode=False):
            return do(*arguments)
    return do(*arguments)


_queues: "weakref.WeakSet[WorkQueue]" = weakref.WeakSet()


def are_all_idle() -> bool:
    """Whether all collectives of all popdist groups in this process are finished."""
    return all(queue.is_idle for queue in list(_queues))


def _stop_all() -> None:
    """Stop the threads of all queues: a thread that frees a tensor after Python's end aborts the process."""
    for queue in list(_queues):
        queue.stop()


call_at_exit(_stop_all)
