"""A group: instances that do the same collectives in the same order, and prove it before each one.

A :class:`Group` puts a header before every collective. Equal headers on all instances mean that the data which
follows fits; different ones raise the same error everywhere, and the group can be used further, because every
instance has taken the same number of headers.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from popdist import headers
from popdist.errors import BackendError, CollectiveError
from popdist.progress import progress_page
from popdist.transport.backend import Backend, HeaderExchange

FIRST_ERROR_SECONDS: Final = 1.0
"""How long an instance waits before it raises an error of which another one has the cause.

A launcher reports the failure that comes first, and that shall be the cause.
"""


def wait_for_first_error() -> None:
    """Wait a moment before an error of which another instance has the cause, so that it reports its own first."""
    time.sleep(FIRST_ERROR_SECONDS)


@dataclass(slots=True, kw_only=True)
class PreemptionNotice:
    """The notice that the machine is wanted back, which every header of the whole job carries.

    All members of a group have had the same exchanges when they come to the same place of the program, so there
    ``is_known`` is equal on all of them, however late each was asked.

    Attributes:
        is_given: Whether this process was asked to leave.
        is_known: Whether all instances know that one of them was.
    """

    is_given: bool = False
    is_known: bool = False


class Exchange:
    """Numbers on their way between the instances of a group; made by :meth:`Group.start`."""

    __slots__ = ("_group", "_numbers", "_pending", "_text")

    def __init__(self, group: "Group", text: str, pending: HeaderExchange) -> None:
        self._group = group
        self._text = text
        self._pending = pending
        self._numbers: list[list[int]] | None = None

    def peek(self) -> list[list[int]] | None:
        """The numbers that :meth:`wait` will return, if all have come; neither waits nor raises.

        Returns:
            None while an instance is awaited, nothing of any instance if they are not in the same collective.
        """
        if self._numbers is not None:
            return self._numbers
        received = self._pending.peek()
        if received is None:
            return None
        return headers.unpack(received) or []

    def wait(self, timeout_seconds: float | None = None) -> list[list[int]]:
        """Every instance's numbers, in the order of the group's instances. May be called again.

        Args:
            timeout_seconds: How long to wait at most; None takes the timeout given to ``popdist.init()``.

        Raises:
            CollectiveError: If the instances are not in the same collective; names who is in which.
            BackendError: If an instance was lost or did not come in time.
        """
        if self._numbers is None:
            progress_page.wait(self._text)
            try:
                received = self._pending.wait(timeout_seconds)
            except BackendError as error:
                raise self._group.described(self._text, error) from error.__cause__
            finally:
                progress_page.go_on()
            self._group.forget(self)
            self._group.read_preemption(received)
            self._numbers = headers.unpack(received)
            if self._numbers is None:
                texts = dict(zip(self._group.instances, map(headers.text_of, received), strict=True))
                raise CollectiveError(headers.disagreement(texts))
        return self._numbers


class Group:
    """The instances that take part in the collectives of this process at the moment.

    Args:
        backend: Their connections.
        num_job_instances: Instances of the whole job: a smaller group says in its headers which one it is.
        notice: What the headers carry along; None for a part of the job, which does not speak for all.

    Attributes:
        instances: Job-wide numbers of the members, ascending.
    """

    def __init__(self, backend: Backend, num_job_instances: int, notice: PreemptionNotice | None = None) -> None:
        self.backend = backend
        self.instances = backend.instances
        self._notice = notice
        self._num_job_instances = num_job_instances
        self._unfinished: list[Exchange] = []
        self._before_next: list[Callable[[], object]] = []

    def start(self, text: str, numbers: Sequence[int] = ()) -> Exchange:
        """Send a header to all members without waiting for theirs.

        Args:
            text: The collective in words; must be the same on every member.
            numbers: At most ``headers.MAX_NUMBERS`` 64-bit integers of this instance.

        Raises:
            ValueError: If there are too many numbers, or one does not fit.
            CollectiveError, BackendError: If an exchange that was started before failed.
        """
        for exchange in tuple(self._unfinished):
            exchange.wait()
        while self._before_next:
            self._before_next.pop(0)()
        if len(self.instances) < self._num_job_instances:
            text = f"{text} among {headers.name_instances(self.instances)}"
        is_preempted = self._notice is not None and self._notice.is_given
        header = headers.pack(text, numbers, is_preempted=is_preempted)
        try:
            pending = self.backend.start_exchange(header)
        except BackendError as error:
            raise self.described(text, error) from error.__cause__
        exchange = Exchange(self, text, pending)
        self._unfinished.append(exchange)
        return exchange

    def agree(self, text: str) -> None:
        """Wait until every member is in the collective ``text``.

        Raises:
            CollectiveError: If one is in another; every member raises it.
            BackendError: If one was lost or did not come in time.
        """
        self.start(text).wait()

    def send_before_next(self, tell: Callable[[], object]) -> None:
        """Have ``tell`` called before the next exchange: the others still wait for what it says."""
        self._before_next.append(tell)

    def read_preemption(self, received: Sequence[bytes]) -> None:
        """Learn from the headers of all members whether one was asked to leave."""
        notice = self._notice
        if notice is not None and not notice.is_known and headers.are_some_preempted(received):
            notice.is_known = True

    def forget(self, exchange: Exchange) -> None:
        """Take ``exchange`` off the list of those still to be waited for."""
        if exchange in self._unfinished:
            self._unfinished.remove(exchange)

    @contextmanager
    def doing(self, text: str) -> Iterator[None]:
        """Say in a backend's error what was being done."""
        try:
            yield
        except BackendError as error:
            raise self.described(text, error) from error.__cause__

    def described(self, text: str, error: BackendError) -> BackendError:
        """A backend's error that says what was being done."""
        return BackendError(f"instance {self.backend.instance_index}, in {text}: {error}")
