"""The agents of a job and the monitors that look at it: who is connected, and what each is told.

A monitor that does not read is let go: looking at a job never holds it up.

Only one agent for each instance may speak, and what is no message is refused, told of, and changes nothing.
"""

import os
import selectors
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from poprun.hosts.routes import JobNetwork
from poprun.job.listeners import Door, LocalDoor
from poprun.messages.control import VIEW_EVENT, Link, Message, check_event, encode

if TYPE_CHECKING:
    from poprun.messages.view import JobView

_INTERVAL_SECONDS: Final = 0.5


class Viewers:
    """The monitors of a job."""

    def __init__(self) -> None:
        self._links: list[Link] = []
        self._next_seconds = 0.0

    def add(self, link: "Link") -> None:
        """Let a monitor look from now on."""
        link.connection.setblocking(False)  # noqa: FBT003 - it takes no keywords
        self._links.append(link)
        self._next_seconds = 0.0

    def close(self) -> None:
        """Hang up: there is nothing more to see."""
        for link in self._links:
            link.close()
        self._links = []

    def are_due(self, now_seconds: float) -> bool:
        """Whether there are any, and it is time for a view."""
        return bool(self._links) and now_seconds >= self._next_seconds

    def show(self, view: "JobView", now_seconds: float) -> None:
        """Send all monitors a view."""
        self._next_seconds = now_seconds + _INTERVAL_SECONDS
        data = encode(view.to_message())
        for link in tuple(self._links):
            try:
                is_whole = link.connection.send(data, socket.MSG_NOSIGNAL) == len(data)
            except OSError:
                is_whole = False
            if not is_whole:
                self._links.remove(link)
                link.close()


LOST: Final = "lost"
"""The event that this side makes up when an agent's connection closes."""

_MOST_WARNINGS: Final = 10

Event = tuple[int, dict[str, Any]]


class AgentLinks:
    """Every agent of a job, at the end of a link.

    Args:
        num_instances: As many agents there are.
        selector: Calls back when somebody speaks: what it calls gives pairs of instance and event.
        warn: Tells the user of what was refused.
        network: Where agents of other hosts knock, and with which key; None when all are on this machine.

    Attributes:
        viewers: The monitors that came to look.
    """

    def __init__(
        self,
        num_instances: int,
        selector: selectors.BaseSelector,
        warn: Callable[[str], None],
        network: JobNetwork | None = None,
    ) -> None:
        self._num_instances = num_instances
        self._selector = selector
        self._warn = warn
        self._num_warnings = 0
        self._instance_of: dict[Link, int] = {}
        self._agents: dict[int, Link] = {}
        self._hellos: dict[int, dict[str, Any]] = {}
        self._streams: dict[int, dict[int, socket.socket]] = {}
        self._is_remote = network is not None
        self.viewers = Viewers()
        self._doors: list[Door] = [LocalDoor(selector, self._admit, self._refuse)]
        if network is not None:
            from poprun.job.listeners import RemoteDoor  # noqa: PLC0415 - jobs of one host need no cryptography

            self._doors.append(
                RemoteDoor(network.control_host, network.key.text, selector, self._admit, self._refuse)
            )

    def close(self) -> None:
        """Hang up; an agent that still lives then ends its tree."""
        self.viewers.close()
        for door in self._doors:
            door.close()
        for link in tuple(self._instance_of):
            self._drop(link)
        for streams in self._streams.values():
            for stream in streams.values():
                stream.close()

    @property
    def door(self) -> Door:
        """Where the agents knock. Monitors knock at that for processes of this machine."""
        return self._doors[-1]

    def tell(self, instance: int, order: Message, streams: list[int] | None = None) -> None:
        """Send an order, and descriptors with it. An agent that has gone is passed over: its loss is an event."""
        agent = self._agents.get(instance)
        if agent is not None and agent.fileno() >= 0:
            with suppress(OSError):
                agent.send(order, streams or ())

    def tell_all(self, order: Message) -> None:
        """Send an order to every agent that has reported."""
        for instance in self._agents:
            self.tell(instance, order)

    def take_streams(self, instance: int) -> dict[int, int]:
        """Descriptors of the sockets that are the streams of an instance of a job of several hosts."""
        return {number: stream.detach() for number, stream in self._streams.pop(instance, {}).items()}

    def _admit(self, link: Link) -> None:
        self._instance_of[link] = -1
        self._selector.register(link, selectors.EVENT_READ, lambda: self._receive(link))

    def _refuse(self, reason: str) -> None:
        self._num_warnings += 1
        if self._num_warnings <= _MOST_WARNINGS:
            self._warn(f"warning: refused: {reason}")

    def _receive(self, link: Link) -> Iterator[Event]:
        """What came over a link, as (instance, event)."""
        received = link.receive(check_event)
        if received is None:
            instance = self._drop(link)
            if instance >= 0:
                yield instance, {"event": LOST, "is_silent": link.is_silent}
            return
        for descriptor in received.descriptors:
            os.close(descriptor)
        for reason in received.refusals:
            self._refuse(reason)
        for message in received.messages:
            yield from self._take(link, message)
            if link not in self._instance_of:
                return

    def _take(self, link: Link, message: dict[str, Any]) -> Iterator[Event]:
        """Know a new link by its first message; pass on the others."""
        instance = self._instance_of[link]
        if message["event"] == VIEW_EVENT and instance < 0:
            self._selector.unregister(link)
            del self._instance_of[link]
            self.viewers.add(link)
        elif message["event"] == "stillborn" and message["instance"] in range(self._num_instances):
            self._drop(link)
            if message["instance"] not in self._agents:
                yield message["instance"], {"event": LOST, "is_silent": False}
        elif instance >= 0 and message["event"] not in ("hello", "stream"):
            yield instance, message
        elif instance >= 0 or not self._introduce(link, message):
            self._refuse(
                f"the event {message['event']} of {message.get('instance')!r:.20} at a time that is not its"
            )
            if instance < 0:
                self._drop(link)
        else:
            yield from self._welcome(message["instance"])

    def _introduce(self, link: Link, message: dict[str, Any]) -> bool:
        """Whether a link's first message is one of an instance that has not said the same before."""
        instance = message.get("instance", -1)
        if not 0 <= instance < self._num_instances:
            return False
        streams = self._streams.setdefault(instance, {})
        if message["event"] == "hello" and instance not in self._agents:
            self._instance_of[link] = instance
            self._agents[instance] = link
            self._hellos[instance] = message
            return True
        if (
            message["event"] == "stream"
            and self._is_remote
            and message["stream"] in _streams(instance) - set(streams)
        ):
            self._selector.unregister(link)
            del self._instance_of[link]
            link.connection.settimeout(None)
            streams[message["stream"]] = link.connection
            return True
        return False

    def _welcome(self, instance: int) -> Iterator[Event]:
        """Pass on the hello of an instance, once its streams are there, too."""
        has_streams = not self._is_remote or _streams(instance) == set(self._streams[instance])
        if has_streams and instance in self._hellos:
            yield instance, self._hellos.pop(instance)

    def _drop(self, link: Link) -> int:
        """Hang up; the instance that the link was of, or -1."""
        instance = self._instance_of.pop(link)
        if link.fileno() >= 0:
            self._selector.unregister(link)
            link.close()
        return instance


def _streams(instance: int) -> set[int]:
    """The numbers of the streams that an instance of a job of several hosts connects."""
    return {0, 1, 2} if instance == 0 else {1, 2}
