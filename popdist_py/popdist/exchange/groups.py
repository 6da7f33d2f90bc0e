"""A group: instances that make the same collectives in the same order, checked by a header before each collective.

A header has a fixed number of bytes. Its text is readable, such as ``all_reduce(float32[3, 4] on cpu, op='sum')``:
equal texts mean equal collectives, and different texts are the error message. After such an error all members have
read the same number of headers, so the group can still be used.
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
"""Maximum number of integers in a header, in addition to its text."""

TEXT_BYTES: Final = 248
"""Number of bytes for the text; a longer text is shortened and ends with a digest of the whole text."""

HEADER_BYTES: Final = 8 * (1 + MAX_NUMBERS) + TEXT_BYTES
"""Number of bytes of a header: a word with the number of integers, the integers, and the text."""

_TEXT_AT: Final = HEADER_BYTES - TEXT_BYTES

_PREEMPTED_AT: Final = 4
"""The byte that says whether the sender was asked to end; the bytes before are the number of integers."""

_FORMS: Final = [struct.Struct(f"<i?3x{count}q{8 * (MAX_NUMBERS - count)}x") for count in range(1 + MAX_NUMBERS)]
"""The formats of a header's bytes before the text; the index is the number of integers."""

_WORD: Final = struct.Struct("=q")
_FLOAT: Final = struct.Struct("=d")


def pack(text: str, numbers: Sequence[int] = (), *, is_preempted: bool = False) -> bytes:
    """Make a header of ``HEADER_BYTES``: the next collective, and at most ``MAX_NUMBERS`` 64-bit integers."""
    count = len(numbers)
    if count > MAX_NUMBERS:
        raise ValueError(f"a header carries at most {MAX_NUMBERS} numbers, not {count}")
    try:
        return _FORMS[count].pack(count, is_preempted, *numbers) + _bytes_of(text)
    except struct.error:
        raise ValueError(f"a header carries 64-bit integers, not {list(numbers)}") from None


def unpack(received: Sequence[bytes]) -> list[list[int]] | None:
    """Return the numbers of each header, in lists that must not be changed; None if the texts differ."""
    first, *others = received
    if others.count(first) == len(others):  # the usual case
        return [_numbers_of(first)] * len(received)
    text = first[_TEXT_AT:]
    return [_numbers_of(it) for it in received] if all(it.endswith(text) for it in others) else None


def text_of(header: bytes) -> str:
    """Return the text of a header, as :func:`pack` has shortened it."""
    return header[_TEXT_AT:].rstrip(b"\0").decode(errors="replace")


def _numbers_of(header: bytes) -> list[int]:
    _, _, *numbers = _FORMS[header[0]].unpack_from(header)  # the first byte is enough, because the number is small
    return numbers


def are_some_preempted(received: Sequence[bytes]) -> bool:
    """Return whether a sender of the headers ``received`` was asked to end."""
    return any(header[_PREEMPTED_AT] for header in received)


def as_words(numbers: Iterable[float]) -> list[int]:
    """Return floats as integers for a header; every bit is kept."""
    return [_WORD.unpack(_FLOAT.pack(number))[0] for number in numbers]


def as_floats(words: Iterable[int]) -> list[float]:
    """Return the floats that :func:`as_words` has converted to integers."""
    return [_FLOAT.unpack(_WORD.pack(word))[0] for word in words]


@lru_cache(maxsize=64)
def _bytes_of(text: str) -> bytes:
    """Return ``text`` as the bytes of a header; cached, because every step sends the same texts."""
    return _fit(text.encode()).ljust(TEXT_BYTES, b"\0")


def _fit(text: bytes) -> bytes:
    if len(text) <= TEXT_BYTES:
        return text
    digest = hashlib.sha256(text).hexdigest()[:32].encode()
    return text[: TEXT_BYTES - len(digest) - 4] + b"... " + digest


def disagreement(texts: Mapping[int, str], names: Names) -> str | None:
    """Return which members sent which text, one line for each text; None if all texts are equal."""
    owners: dict[str, list[int]] = {}
    for instance, text in texts.items():
        owners.setdefault(text, []).append(instance)
    if len(owners) == 1:
        return None
    lines = [f"  {names.of(instances)}: {text}" for text, instances in owners.items()]
    remedy = remedy_of_lone_call(owners)
    return "\n".join(["the instances are not in the same collective:", *lines, *([remedy] if remedy else [])])


class HeaderExchange(Protocol):
    """An exchange of headers that was started."""

    def wait(self, timeout_seconds: float | None = None) -> list[bytes]:
        """Return all instances' headers. Raises BackendError after a timeout; may then be called again."""

    def peek(self) -> list[bytes] | None:
        """Return all instances' headers if they have arrived; otherwise None. Never waits, never raises."""


class Backend(Protocol):
    """A set of instances that can send dense and contiguous tensors to each other."""

    @property
    def instances(self) -> tuple[int, ...]:
        """Job-wide numbers of the instances in this set, ascending."""

    @property
    def instance_index(self) -> int:
        """Job-wide number of this instance, a member of :attr:`instances`."""

    @property
    def names(self) -> Names:
        """The names of the instances in messages."""

    @property
    def device_kinds(self) -> frozenset[str]:
        """The kinds of devices whose tensors can be sent: ``cpu``, ``accelerator``."""

    @property
    def host_group(self) -> "HostGroup | None":
        """The shared memory of all instances of the job; None if there is none, and for a part of the job."""

    @property
    def local_collectives(self) -> "HostCollectives | None":
        """The collectives among this host's instances in a job of several hosts; None in other jobs."""

    def channel(self, devices: "Collection[torch.device]") -> "Channel | None":
        """Return a channel for tensors on ``devices`` that works in parallel. All instances must call this."""

    def start_exchange(self, header: bytes) -> HeaderExchange:
        """Start sending a header to every instance; all headers must have equal length. Does not wait."""

    def all_reduce(self, tensor: "Tensor", op: "Op") -> None:
        """Combine the flat ``tensor`` of every instance in place; length, dtype and device type must be equal."""

    def all_gather(self, tensor: "Tensor") -> "Tensor":
        """Return every instance's ``tensor``, stacked; shape, dtype and type of device must be equal."""

    def all_to_all(self, tensor: "Tensor") -> "Tensor":
        """Send row *j* to the *j*-th instance of the set; return a tensor whose row *i* is from the *i*-th."""

    def broadcast(self, tensor: "Tensor", root: int) -> None:
        """Overwrite ``tensor`` with the tensor of instance ``root``."""

    def subgroup(self, instances: tuple[int, ...]) -> "Backend":
        """Return a backend with the same connections for only ``instances``, which must include this one."""

    def stop_threads(self) -> None:
        """Prepare for the end of the process, unseen by other instances; afterwards nothing can be sent."""

    def close(self) -> None:
        """Close the connections; the other instances detect this."""


def host_group_of(backend: Backend) -> "HostGroup | None":
    """Return the group of instances that share memory with this instance; None if there is no such group."""
    return backend.host_group or (
        backend.local_collectives.group if backend.local_collectives is not None else None
    )


replicas_in_turn: "Final[WeakSet[object]]" = WeakSet()
"""The objects that now compute one of several replicas of this instance."""


def refuse_in_turn(group: T, caller: str = "a collective of popdist") -> T:
    """Return ``group``. Raises CollectiveError while one of several replicas of this instance computes."""
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
    """Wait a moment before an error that another instance caused, because launchers report the first error."""
    time.sleep(FIRST_ERROR_SECONDS)


@dataclass(slots=True, kw_only=True)
class PreemptionNotice:
    """A request to end, because the machine will be taken away; every header of the whole job contains it."""

    is_given: bool = False  # whether this process was asked to end
    is_known: bool = False  # whether all instances know of a request; equal on all at one place of a program


class Exchange:
    """An exchange of numbers between the instances of a group; :meth:`Group.start` makes it."""

    __slots__ = ("_group", "_numbers", "_pending", "_text", "send_later")

    def __init__(self, group: "Group", text: str, pending: HeaderExchange) -> None:
        self._group = group
        self._text = text
        self._pending = pending
        self._numbers: list[list[int]] | None = None
        self.send_later: Callable[[list[list[int]]], object] | None = None

    def finish(self) -> None:
        """Wait for the numbers, then send the data of a collective that was interrupted before sending."""
        numbers, send = self.wait(), self.send_later
        self.send_later = None
        if send is not None:
            send(numbers)

    def peek(self) -> list[list[int]] | None:
        """Return the numbers for :meth:`wait` if all have arrived, else None; an empty list if texts differ."""
        if self._numbers is not None:
            return self._numbers
        received = self._pending.peek()
        if received is None:
            return None
        return unpack(received) or []

    def wait(self, timeout_seconds: float | None = None) -> list[list[int]]:
        """Return every instance's numbers, in the order of the group's instances. May be called again."""
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
    """The instances that now take part in the collectives of this process."""

    def __init__(
        self,
        backend: Backend,
        notice: PreemptionNotice | None = None,
        *,
        job_numbers: tuple[int, ...] = (),
        whole: "Group | None" = None,
    ) -> None:
        """``job_numbers`` are the job-wide numbers of the members if the group is not the whole job."""
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
        """Start sending a header to all members, without waiting; ``text`` must be equal on all members."""
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
        """Make a group of the members ``instances``, ascending, with the same connections.

        Headers of such a group contain no preemption notice.
        """
        is_whole_job = not self.job_numbers and instances == self.instances
        numbers = zip(self.instances, self.job_numbers or self.instances, strict=True)
        job_numbers = () if is_whole_job else tuple(number for it, number in numbers if it in instances)
        return Group(self.backend.subgroup(instances), job_numbers=job_numbers, whole=self)

    def name(self, instances: Iterable[int] | None) -> str:
        """Return the names of the members ``instances`` as text; for None, the names of all members."""
        if instances is None:
            return self.backend.names.of(self.instances, max_runs=None)
        return self.backend.names.of(instances)

    def agree(self, text: str) -> None:
        """Wait until every member is in the collective ``text``. Raises CollectiveError if texts differ."""
        self.start(text).wait()

    def run(
        self,
        text: str,
        send: Callable[[Any, list[list[int]]], T],
        data: Any,
        numbers: Sequence[int] = (),
    ) -> T:
        """Run a collective: when all members are in it, call ``send`` with ``data`` and all members' numbers."""
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
        """A context in which the error of a signal handler makes this instance leave the job.

        It must leave, because the other instances wait for the rest of the data.
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
        """Call ``send`` before the next exchange, because other instances wait for what ``send`` sends."""
        self._before_next.append(send)

    def read_preemption(self, received: Sequence[bytes]) -> None:
        """Read from the headers of all members whether a member was asked to end."""
        notice = self._notice
        if notice is not None and not notice.is_known and are_some_preempted(received):
            notice.is_known = True

    def remove_unfinished(self, exchange: Exchange) -> None:
        """Remove ``exchange`` from the exchanges that the next exchange waits for."""
        if exchange in self._unfinished:
            self._unfinished.remove(exchange)

    @contextmanager
    def doing(self, text: str) -> Iterator[None]:
        """A context in which the errors of a backend also name the operation ``text``."""
        try:
            yield
        except BackendError as error:
            raise self.described(text, error) from error.__cause__

    def described(self, text: str, error: BackendError) -> BackendError:
        """Return a backend's error with this instance and the operation ``text`` added."""
        return BackendError(f"{self.name([self.backend.instance_index])}, in {text}: {error}")
