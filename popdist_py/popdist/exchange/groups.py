"""A group: instances that do the same collectives in the same order, and prove it by a header before each one.

A header is a fixed number of bytes. Its text is what a person would write, such as ``all_reduce(float32[3, 4] on
cpu, op='sum')``: equal texts mean equal collectives, and different ones are the message of the error. All members
have then read as many headers, so the group can be used further.
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
"""How many integers a header carries beside its text."""

TEXT_BYTES: Final = 248
"""Room for the text; a longer one is cut and ends in a digest of the whole."""

HEADER_BYTES: Final = 8 * (1 + MAX_NUMBERS) + TEXT_BYTES
"""Length of a header: a word that counts the numbers, room for them, and the text."""

_TEXT_AT: Final = HEADER_BYTES - TEXT_BYTES

_PREEMPTED_AT: Final = 4
"""The byte that says whether the sender was asked to leave; those before it count the numbers."""

_FORMS: Final = [struct.Struct(f"<i?3x{count}q{8 * (MAX_NUMBERS - count)}x") for count in range(1 + MAX_NUMBERS)]
"""Of what stands before the text, by how many numbers there are."""

_WORD: Final = struct.Struct("=q")
_FLOAT: Final = struct.Struct("=d")


def pack(text: str, numbers: Sequence[int] = (), *, is_preempted: bool = False) -> bytes:
    """A header of ``HEADER_BYTES``: what is about to be done, with at most ``MAX_NUMBERS`` 64-bit integers."""
    count = len(numbers)
    if count > MAX_NUMBERS:
        raise ValueError(f"a header carries at most {MAX_NUMBERS} numbers, not {count}")
    try:
        return _FORMS[count].pack(count, is_preempted, *numbers) + _bytes_of(text)
    except struct.error:
        raise ValueError(f"a header carries 64-bit integers, not {list(numbers)}") from None


def unpack(received: Sequence[bytes]) -> list[list[int]] | None:
    """The numbers of each of these headers, in lists not to be written into; None if their texts differ."""
    first, *others = received
    if others.count(first) == len(others):  # as most of the time
        return [_numbers_of(first)] * len(received)
    text = first[_TEXT_AT:]
    return [_numbers_of(it) for it in received] if all(it.endswith(text) for it in others) else None


def text_of(header: bytes) -> str:
    """The text of a header, cut as :func:`pack` cut it."""
    return header[_TEXT_AT:].rstrip(b"\0").decode(errors="replace")


def _numbers_of(header: bytes) -> list[int]:
    _, _, *numbers = _FORMS[header[0]].unpack_from(header)  # the first byte is enough to count them
    return numbers


def are_some_preempted(received: Sequence[bytes]) -> bool:
    """Whether the sender of one of these headers was asked to leave."""
    return any(header[_PREEMPTED_AT] for header in received)


def as_words(numbers: Iterable[float]) -> list[int]:
    """Floats as integers that a header can carry; every bit is kept."""
    return [_WORD.unpack(_FLOAT.pack(number))[0] for number in numbers]


def as_floats(words: Iterable[int]) -> list[float]:
    """Inverse of :func:`as_words`."""
    return [_FLOAT.unpack(_WORD.pack(word))[0] for word in words]


@lru_cache(maxsize=64)
def _bytes_of(text: str) -> bytes:
    """``text``, cut if need be, as it stands in a header: a step says the same in every step."""
    return _fit(text.encode()).ljust(TEXT_BYTES, b"\0")


def _fit(text: bytes) -> bytes:
    if len(text) <= TEXT_BYTES:
        return text
    digest = hashlib.sha256(text).hexdigest()[:32].encode()
    return text[: TEXT_BYTES - len(digest) - 4] + b"... " + digest


def disagreement(texts: Mapping[int, str], names: Names) -> str | None:
    """Which members of a group brought which text, one line for each; None when all texts are equal."""
    owners: dict[str, list[int]] = {}
    for instance, text in texts.items():
        owners.setdefault(text, []).append(instance)
    if len(owners) == 1:
        return None
    lines = [f"  {names.of(instances)}: {text}" for text, instances in owners.items()]
    remedy = remedy_of_lone_call(owners)
    return "\n".join(["the instances are not in the same collective:", *lines, *([remedy] if remedy else [])])


class HeaderExchange(Protocol):
    """An exchange of headers that has been started."""

    def wait(self, timeout_seconds: float | None = None) -> list[bytes]:
        """Every instance's header; after a timeout, which is a BackendError, it can be called again."""

    def peek(self) -> list[bytes] | None:
        """Every instance's header, if all have come; None if not. Neither waits nor raises."""


class Backend(Protocol):
    """A set of instances that can reach each other, for dense and contiguous tensors."""

    @property
    def instances(self) -> tuple[int, ...]:
        """Job-wide numbers of the instances in this set, ascending."""

    @property
    def instance_index(self) -> int:
        """Job-wide number of this instance, one of :attr:`instances`."""

    @property
    def names(self) -> Names:
        """What the instances are called in messages."""

    @property
    def device_kinds(self) -> frozenset[str]:
        """Kinds of the devices whose tensors can be sent: ``cpu``, ``accelerator``."""

    @property
    def host_group(self) -> "HostGroup | None":
        """The memory that all instances of the job share; None where there is none, and for a part of the job."""

    @property
    def local_collectives(self) -> "HostCollectives | None":
        """Collectives among the instances of this host, in a job of several hosts; else None."""

    def channel(self, devices: "Collection[torch.device]") -> "Channel | None":
        """A channel for tensors on ``devices`` while the program sends others; all instances call it."""

    def start_exchange(self, header: bytes) -> HeaderExchange:
        """Send a header to every instance, which must each send one as long; does not wait for them."""

    def all_reduce(self, tensor: "Tensor", op: "Op") -> None:
        """Combine every instance's flat ``tensor``, of the same length, dtype and type of device, in place."""

    def all_gather(self, tensor: "Tensor") -> "Tensor":
        """Every instance's ``tensor``, of the same shape, dtype and type of device, stacked."""

    def all_to_all(self, tensor: "Tensor") -> "Tensor":
        """Row *j* goes to the *j*-th instance of the set; row *i* of the result came from the *i*-th."""

    def broadcast(self, tensor: "Tensor", root: int) -> None:
        """Overwrite ``tensor`` with that of instance ``root``."""

    def subgroup(self, instances: tuple[int, ...]) -> "Backend":
        """The same connections, limited to ``instances``, of which this instance must be one."""

    def stop_threads(self) -> None:
        """Get ready for the end of the process without letting the others notice; nothing can be sent any more."""

    def close(self) -> None:
        """Drop the connections; the others see that this instance has left."""


def host_group_of(backend: Backend) -> "HostGroup | None":
    """The instances that share this one's memory: all of the job, or those of its host; None where none do."""
    return backend.host_group or (
        backend.local_collectives.group if backend.local_collectives is not None else None
    )


replicas_in_turn: "Final[WeakSet[object]]" = WeakSet()
"""What computes one of several replicas of this instance at the moment."""


def refuse_in_turn(group: T, caller: str = "a collective of popdist") -> T:
    """Return ``group``; a CollectiveError while one of several replicas computes: not all would take part."""
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
    """Wait a moment before an error of which another instance has the cause: a launcher reports the first one."""
    time.sleep(FIRST_ERROR_SECONDS)


@dataclass(slots=True, kw_only=True)
class PreemptionNotice:
    """A request to leave, because the machine is wanted back; every header of the whole job carries it."""

    is_given: bool = False  # whether this process was asked
    is_known: bool = False  # whether all instances know that one was: equal on all at the same place of a program


class Exchange:
    """Numbers on their way between the instances of a group; made by :meth:`Group.start`."""

    __slots__ = ("_group", "_numbers", "_pending", "_text", "send_later")

    def __init__(self, group: "Group", text: str, pending: HeaderExchange) -> None:
        self._group = group
        self._text = text
        self._pending = pending
        self._numbers: list[list[int]] | None = None
        self.send_later: Callable[[list[list[int]]], object] | None = None

    def finish(self) -> None:
        """Wait for the numbers, and send what a collective that was interrupted here has not sent."""
        numbers, send = self.wait(), self.send_later
        self.send_later = None
        if send is not None:
            send(numbers)

    def peek(self) -> list[list[int]] | None:
        """The numbers that :meth:`wait` will return, if all have come; an empty list if texts differ."""
        if self._numbers is not None:
            return self._numbers
        received = self._pending.peek()
        if received is None:
            return None
        return unpack(received) or []

    def wait(self, timeout_seconds: float | None = None) -> list[list[int]]:
        """Every instance's numbers, in the order of the group's instances. May be called again."""
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
    """The instances that take part in the collectives of this process at the moment."""

    def __init__(
        self,
        backend: Backend,
        notice: PreemptionNotice | None = None,
        *,
        job_numbers: tuple[int, ...] = (),
        whole: "Group | None" = None,
    ) -> None:
        """``job_numbers`` are those of the members in the job, if they are not the whole job."""
        self.backend = backend
        self.instances = backend.instances
        self.job_numbers = job_numbers
        self.num_bytes = 0  # of tensors, that its collectives have sent
        self.is_limited = whole is not None  # by the program, within ``execute_on_instances``
        self._notice = notice
        self._place = backend.names.place if whole is None or not job_numbers else f" among {self.name(None)}"
        self._unfinished: list[Exchange] = []
        self._before_next: list[Callable[[], object]] = []
        self._ends: list[str] = [] if whole is None else whole._ends  # noqa: SLF001 - why it has left the job

    def start(self, text: str, numbers: Sequence[int] = ()) -> Exchange:
        """Send a header to all members without waiting for theirs; ``text`` is the same on every member."""
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
        """Some of the members, ascending, over the same connections; their headers carry no preemption notice."""
        is_whole_job = not self.job_numbers and instances == self.instances
        numbers = zip(self.instances, self.job_numbers or self.instances, strict=True)
        job_numbers = () if is_whole_job else tuple(number for it, number in numbers if it in instances)
        return Group(self.backend.subgroup(instances), job_numbers=job_numbers, whole=self)

    def name(self, instances: Iterable[int] | None) -> str:
        """Some members in words, or all of them, each."""
        if instances is None:
            return self.backend.names.of(self.instances, max_runs=None)
        return self.backend.names.of(instances)

    def agree(self, text: str) -> None:
        """Wait until every member is in the collective ``text``; a CollectiveError if one is in another."""
        self.start(text).wait()

    def run(
        self,
        text: str,
        send: Callable[[Any, list[list[int]]], T],
        data: Any,
        numbers: Sequence[int] = (),
    ) -> T:
        """Do a collective: when all members are in it, ``send`` exchanges the data, and gets all their numbers."""
        self.num_bytes += getattr(data, "nbytes", 0)
        exchange = self.start(text, numbers)
        try:
            received = exchange.wait()
        except (BackendError, CollectiveError):
            raise
        except BaseException:  # of a signal handler: the collective is done before the next one
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
        """Leave the job if the error of a signal handler ends the block: the others wait for the rest of it."""
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
        """Call ``send`` before the next exchange: the others still wait for what it sends."""
        self._before_next.append(send)

    def read_preemption(self, received: Sequence[bytes]) -> None:
        """Learn from the headers of all members whether one was asked to leave."""
        notice = self._notice
        if notice is not None and not notice.is_known and are_some_preempted(received):
            notice.is_known = True

    def remove_unfinished(self, exchange: Exchange) -> None:
        """Remove ``exchange`` from those that the next one waits for."""
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
        return BackendError(f"{self.name([self.backend.instance_index])}, in {text}: {error}")
