"""A group: instances that exchange a header before each collective, to check that all make the same collective.

A header is a message with a fixed number of bytes. Its text is readable, such as ``all_reduce(float32[3, 4] on
cpu, op='sum')``: equal texts mean equal collectives, and different texts are the error message. After such an
error all members have read the same number of headers, so the group can still be used.
"""

import hashlib
import struct
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar
from weakref import WeakSet

from popdist.errors import BackendError, CollectiveError, Names, PopdistError, remedy_of_lone_call
from popdist.ground.progress import progress_page

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from popdist.exchange.host_memory.addition import Op
    from popdist.exchange.host_memory.host_collectives import HostCollectives
    from popdist.exchange.host_memory.host_group import HostGroup
    from popdist.exchange.transport.channel import Channel

T = TypeVar("T")

MAX_NUMBERS: Final = 32
"""Maximum number of integers in a header (the message before a collective), in addition to the header's text."""

TEXT_BYTES: Final = 248
"""Number of bytes for a header's text; a longer text is shortened and ends with a digest of the whole text."""

HEADER_BYTES: Final = 8 * (1 + MAX_NUMBERS) + TEXT_BYTES
"""Number of bytes of a header: 8 for the number of integers and a flag, 8 for each integer, and the text."""

_TEXT_AT: Final = HEADER_BYTES - TEXT_BYTES

_PREEMPTED_AT: Final = 4
"""Position of the header's byte that says whether the sender was asked to end; the bytes before are the count."""

_FORMS: Final = [struct.Struct(f"<i?3x{count}q{8 * (MAX_NUMBERS - count)}x") for count in range(1 + MAX_NUMBERS)]
"""The formats of a header's bytes before the text; the index is the number of integers in the header."""

_WORD: Final = struct.Struct("=q")
_FLOAT: Final = struct.Struct("=d")


def pack(text: str, numbers: Sequence[int] = (), *, is_preempted: bool = False) -> bytes:
    """Make the bytes of a header, a message that each instance sends before a collective, from ``text`` and up to
    ``MAX_NUMBERS`` integers of 64 bits.
    """
    count = len(numbers)
    if count > MAX_NUMBERS:
        raise ValueError(f"a header carries at most {MAX_NUMBERS} numbers, not {count}")
    try:
        return _FORMS[count].pack(count, is_preempted, *numbers) + _bytes_of(text)
    except struct.error:
        raise ValueError(f"a header carries 64-bit integers, not {list(numbers)}") from None


def unpack(received: Sequence[bytes]) -> list[list[int]] | None:
    """Return the integers in each received header (message before a collective); None if headers' texts differ."""
    first, *others = received
    if others.count(first) == len(others):  # the usual case; nobody may change the list, which is returned often
        return [_numbers_of(first)] * len(received)
    text = first[_TEXT_AT:]
    return [_numbers_of(it) for it in received] if all(it.endswith(text) for it in others) else None


def text_of(header: bytes) -> str:
    """Return the text in ``header``, the message before a collective; :func:`pack` has shortened a long text."""
    return header[_TEXT_AT:].rstrip(b"\0").decode(errors="replace")


def _numbers_of(header: bytes) -> list[int]:
    _, _, *numbers = _FORMS[header[0]].unpack_from(header)  # the first byte is enough, because the number is small
    return numbers


def are_some_preempted(received: Sequence[bytes]) -> bool:
    """Whether the sender of at least one of the messages ``received`` was asked to end, as by a preemption."""
    return any(header[_PREEMPTED_AT] for header in received)


def as_words(numbers: Iterable[float]) -> list[int]:
    """Return floats as 64-bit integers with the same bits, because a header contains only integers."""
    return [_WORD.unpack(_FLOAT.pack(number))[0] for number in numbers]


def as_floats(words: Iterable[int]) -> list[float]:
    """Return the floats whose bits :func:`as_words` has put into the integers ``words``."""
    return [_FLOAT.unpack(_WORD.pack(word))[0] for word in words]


@lru_cache(maxsize=64)
def _bytes_of(text: str) -> bytes:
    """Return ``text`` as bytes of fixed length for a header, the message before a collective; cached."""
    return _fit(text.encode()).ljust(TEXT_BYTES, b"\0")


def _fit(text: bytes) -> bytes:
    if len(text) <= TEXT_BYTES:
        return text
    digest = hashlib.sha256(text).hexdigest()[:32].encode()
    return text[: TEXT_BYTES - len(digest) - 4] + b"... " + digest


def disagreement(texts: Mapping[int, str], names: Names) -> str | None:
    """Return an error message that lists which instances called which collective; None if ``texts`` are equal."""
    owners: dict[str, list[int]] = {}
    for instance, text in texts.items():
        owners.setdefault(text, []).append(instance)
    if len(owners) == 1:
        return None
    lines = [f"  {names.of(instances)}: {text}" for text, instances in owners.items()]
    remedy = remedy_of_lone_call(owners)
    return "\n".join(["the instances are not in the same collective:", *lines, *([remedy] if remedy else [])])


class HeaderExchange(Protocol):
    """A started exchange of headers: before a collective each instance sends all others a message (header)."""

    def wait(self, timeout_seconds: float | None = None) -> list[bytes]:
        """Return all instances' headers (messages). Raises BackendError if late; a later call may succeed."""

    def peek(self) -> list[bytes] | None:
        """Return all instances' headers (messages) if all have come, otherwise None. Never waits, never raises."""


class Backend(Protocol):
    """The connections over which a set of instances send each other tensors, which are dense and contiguous."""

    @property
    def instances(self) -> tuple[int, ...]:
        """The job-wide numbers of the instances that this backend connects, ascending."""

    @property
    def instance_index(self) -> int:
        """The job-wide number of this instance, which is one of :attr:`instances`."""

    @property
    def names(self) -> Names:
        """The names of the instances in messages to the user."""

    @property
    def device_kinds(self) -> frozenset[str]:
        """The kinds of devices whose tensors this backend sends: ``cpu``, ``accelerator`` or both."""

    @property
    def host_group(self) -> "HostGroup | None":
        """The group of instances that share memory, if the whole job is on one host; otherwise None."""

    @property
    def local_collectives(self) -> "HostCollectives | None":
        """The collectives among the instances of this host, if the job runs on several hosts; otherwise None."""

    def channel(self, devices: "Collection[torch.device]") -> "Channel | None":
        """Return the thread that runs collectives on ``devices``; None if the callers' threads run them."""

    def start_exchange(self, header: bytes) -> HeaderExchange:
        """Start to send ``header``, which is equally long on all instances, to all instances. Does not wait."""

    def all_reduce(self, tensor: "Tensor", op: "Op") -> None:
        """Combine all instances' flat tensors by ``op`` in place; length, dtype, device type must be equal."""

    def all_gather(self, tensor: "Tensor") -> "Tensor":
        """Return the ``tensor`` of every instance, stacked; shape, dtype and type of device must be equal."""

    def all_to_all(self, tensor: "Tensor") -> "Tensor":
        """Send ``tensor[j]`` to the *j*-th instance; return a tensor whose row *i* is from the *i*-th instance."""

    def broadcast(self, tensor: "Tensor", root: int) -> None:
        """Overwrite ``tensor`` on every instance with the ``tensor`` of instance ``root``."""

    def subgroup(self, instances: tuple[int, ...]) -> "Backend":
        """Return a backend for only ``instances``, which include this instance, over the same connections."""

    def stop_threads(self) -> None:
        """End this backend's threads at the process's end; other instances do not notice. No call may follow."""

    def close(self) -> None:
        """Close the connections of this instance; the other instances detect that this instance has left."""


def host_group_of(backend: Backend) -> "HostGroup | None":
    """Return the group of this host's instances that share memory, from ``backend``; None if there is none."""
    return backend.host_group or (
        backend.local_collectives.group if backend.local_collectives is not None else None
    )


replicas_in_turn: "Final[WeakSet[object]]" = WeakSet()
"""The objects (such as models) that are now computing one of several replicas of this instance."""


def refuse_in_turn(group: T, caller: str = "a collective of popdist") -> T:
    """Return ``group``; raise CollectiveError while this instance computes one of its several replicas."""
    if replicas_in_turn:
        raise CollectiveError(
            f"{caller} within a micro batch of one of several replicas of an instance: call it outside of the "
            "micro batches, or start as many instances as replicas. It would join one replica of each instance, "
            "so the gradients would depend on the number of instances. docs/from-ddp.md has the loop for losses "
            "over all samples"
        )
    return group


FIRST_ERROR_SECONDS: Final = 1.0


def wait_for_first_error() -> None:
    """Wait 1 s, so that launchers first report the other instance's error, which caused this instance's error."""
    time.sleep(FIRST_ERROR_SECONDS)


@dataclass(slots=True, kw_only=True)
class PreemptionNotice:
    """A request to end, because the machine will be taken away; collectives pass the request to all instances."""

    is_given: bool = False  # whether this process was asked to end
    is_known: bool = False  # whether all instances know of a request; equal on all at one place of a program


class Exchange:
    """An exchange of headers, short messages with numbers, between a group's instances before a collective."""

    __slots__ = ("_group", "_numbers", "_pending", "_text", "send_later")

    def __init__(self, group: "Group", text: str, pending: HeaderExchange) -> None:
        self._group = group
        self._text = text
        self._pending = pending
        self._numbers: list[list[int]] | None = None
        self.send_later: Callable[[list[list[int]]], object] | None = None

    def finish(self) -> None:
        """Wait for the messages of all instances. If an error of a signal handler has prevented the caller from
        sending the collective's data after the messages, send the data now.
        """
        numbers, send = self.wait(), self.send_later
        self.send_later = None
        if send is not None:
            send(numbers)

    def peek(self) -> list[list[int]] | None:
        """Return the numbers in all instances' messages; None if a message is missing; [] if the texts differ."""
        if self._numbers is not None:
            return self._numbers
        received = self._pending.peek()
        if received is None:
            return None
        return unpack(received) or []

    def wait(self, timeout_seconds: float | None = None) -> list[list[int]]:
        """Wait for all instances' messages; return the numbers in each, in instance order. May be repeated."""
        if self._numbers is None:
            progress_page.wait(self._text, self._group.job_numbers)
            try:
                received = self._pending.wait(timeout_seconds)
            except BackendError as error:
                raise self._group.described(self._text, error) from error.__cause__
            finally:
                progress_page.end_wait()
            self._group.remove_unfinished(self)
            self._group.read_preemption(received)
            self._numbers = unpack(received)
            if self._numbers is None:
                texts = dict(zip(self._group.instances, map(text_of, received), strict=True))
                raise CollectiveError(disagreement(texts, self._group.backend.names))
        return self._numbers


class Group:
    """A set of instances that make collectives together; each time they check that all make the same call."""

    def __init__(
        self,
        backend: Backend,
        notice: PreemptionNotice | None = None,
        *,
        job_numbers: tuple[int, ...] = (),
        whole: "Group | None" = None,
    ) -> None:
        """Make a group; ``job_numbers`` has the members' job-wide numbers if the group is a part of the job."""
        self.backend = backend
        self.instances = backend.instances
        self.job_numbers = job_numbers
        self.num_bytes = 0  # of the tensors that its collectives have sent
        self.is_limited = whole is not None  # by the program, inside ``execute_on_instances``
        self._notice = notice
        self._place = backend.names.place if whole is None or not job_numbers else f" among {self.name(None)}"
        self._unfinished: list[Exchange] = []
        self._before_next: list[Callable[[], object]] = []
        self._ends: list[str] = [] if whole is None else whole._ends  # noqa: SLF001 - its reason for leaving the job

    def start(self, text: str, numbers: Sequence[int] = ()) -> Exchange:
        """Start to send a header, a message with the collective's ``text``, to the group; return the exchange."""
        if self._ends:
            raise CollectiveError(f"{text}: {self._ends[0]}")
        for exchange in tuple(self._unfinished):
            exchange.finish()
        while self._before_next:
            self._before_next.pop(0)()
        text += self._place
        is_preempted = self._notice is not None and self._notice.is_given
        header = pack(text, numbers, is_preempted=is_preempted)
        try:
            pending = self.backend.start_exchange(header)
        except BackendError as error:
            raise self.described(text, error) from error.__cause__
        exchange = Exchange(self, text, pending)
        self._unfinished.append(exchange)
        return exchange

    def limited_to(self, instances: tuple[int, ...]) -> "Group":
        """Make a group of only ``instances`` of this group, ascending, over the same connections; the messages
        before its collectives pass on no request to end.
        """
        is_whole_job = not self.job_numbers and instances == self.instances
        numbers = zip(self.instances, self.job_numbers or self.instances, strict=True)
        job_numbers = () if is_whole_job else tuple(number for it, number in numbers if it in instances)
        return Group(self.backend.subgroup(instances), job_numbers=job_numbers, whole=self)

    def name(self, instances: Iterable[int] | None) -> str:
        """Return the names of the group's instances ``instances`` as text; for None, the names of all."""
        if instances is None:
            return self.backend.names.of(self.instances, max_runs=None)
        return self.backend.names.of(instances)

    def agree(self, text: str) -> None:
        """Wait until all instances have called the collective ``text``; raise CollectiveError if texts differ."""
        self.start(text).wait()

    def run(
        self,
        text: str,
        send: Callable[[Any, list[list[int]]], T],
        data: Any,
        numbers: Sequence[int] = (),
    ) -> T:
        """Exchange messages with all instances; return ``send(data, numbers)`` with all messages' numbers."""
        self.num_bytes += getattr(data, "nbytes", 0)
        exchange = self.start(text, numbers)
        try:
            received = exchange.wait()
        except (BackendError, CollectiveError):
            raise
        except BaseException:  # a signal handler's error; the collective is finished before the next collective
            exchange.send_later = partial(self._send, text, send, deepcopy(data))
            raise
        return self._send(text, send, data, received)

    def _send(
        self, text: str, send: Callable[[Any, list[list[int]]], T], data: object, received: list[list[int]]
    ) -> T:
        with self.undivided(text):
            return send(data, received)

    @contextmanager
    def undivided(self, text: str) -> Iterator[None]:
        """A context for sending data. If a signal handler raises an error in the context, this instance leaves the
        job, because the other instances wait for the rest of the data.
        """
        try:
            yield
        except PopdistError:
            raise
        except BaseException as error:
            if len(self.instances) > 1:
                self._ends.append(
                    f"{text} was interrupted here by {type(error).__name__} while the instances exchanged its "
                    "data, so this instance has left the job: let no signal handler raise an error in a collective"
                )
                self.backend.close()
            raise

    def send_before_next(self, send: Callable[[], object]) -> None:
        """Make this group call ``send`` once before its next exchange of messages: others need this data."""
        self._before_next.append(send)

    def read_preemption(self, received: Sequence[bytes]) -> None:
        """Read from the messages of all instances whether an instance was asked to end, and record the request."""
        notice = self._notice
        if notice is not None and not notice.is_known and are_some_preempted(received):
            notice.is_known = True

    def remove_unfinished(self, exchange: Exchange) -> None:
        """Remove ``exchange``, which has ended, from the exchanges for which the next collective must wait."""
        if exchange in self._unfinished:
            self._unfinished.remove(exchange)

    @contextmanager
    def doing(self, text: str) -> Iterator[None]:
        """A context in which the message of a BackendError also names this instance and the operation ``text``."""
        try:
            yield
        except BackendError as error:
            raise self.described(text, error) from error.__cause__

    def described(self, text: str, error: BackendError) -> BackendError:
        """Return ``error`` as a BackendError whose message also names this instance and the operation ``text``."""
        return BackendError(f"{self.name([self.backend.instance_index])}, in {text}: {error}")
