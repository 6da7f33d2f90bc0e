"""The control sockets of a job, at which agents and monitors connect to poprun, and these connections (links).

Only one agent for each instance may send events. poprun refuses data that is no message, and logs a warning. On
one machine the kernel names the user at the other end; other hosts prove that they know the key (`key_proofs`).
"""

import os
import selectors
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from popdist.ground.values import dataclass
from poprun.errors import LaunchError, describe_error
from poprun.launch.messages.control import (
    LOST,
    Link,
    Message,
    abstract_address,
    check_event,
    notice_death,
    peer_user,
    tcp_address,
)
from poprun.text.screen import log

if TYPE_CHECKING:
    from poprun.job.key_proofs import KeyProofs
    from poprun.job.monitors import Viewers
    from poprun.launch.routes import JobNetwork

_TALK_SECONDS: Final = 5.0  # how long an agent may take to receive a message
_MOST_REASONS: Final = 10

Event = tuple[int, dict[str, Any]]


class Stranger:
    """A process that has connected to poprun but has not sent its first message, which says what process it is."""


@dataclass(frozen=True, slots=True)
class IntroducedAgent:
    """An agent (the process that starts and watches an instance) that has said in its first message who it is."""

    instance: int


class AgentLinks:
    """poprun's connections to the agents that watch a job's instances, and to the monitors that show the job."""

    def __init__(self, num_instances: int, selector: selectors.BaseSelector, network: "JobNetwork | None") -> None:
        self._num_instances = num_instances
        self._selector = selector  # has for each connection a function that yields the received events
        self._refusals: set[str] = set()
        self._peers: dict[Link, Stranger | IntroducedAgent] = {}
        self._agents: dict[int, Link] = {}
        self._hellos: dict[int, dict[str, Any]] = {}
        self._streams: dict[int, dict[int, socket.socket]] = {}
        self._listeners: list[socket.socket] = []
        self._proofs: KeyProofs | None = None
        self.viewers: Viewers | None = None  # the connected monitors; None until the first monitor connects
        self.address = self._listen_here()  # the address of the control socket, which the shims get
        if network is not None:
            self.address = self._listen_to_hosts(network)

    def close(self) -> None:
        """Close the connections to agents and monitors. Each agent (instance's parent) then ends its instance."""
        if self.viewers is not None:
            self.viewers.close()
        if self._proofs is not None:
            self._proofs.close()
        for listener in tuple(self._listeners):
            self._stop_listening(listener)
        for link in tuple(self._peers):
            self._drop(link)
        for streams in self._streams.values():
            for stream in streams.values():
                stream.close()

    def send_order(self, instance: int, order: Message, streams: list[int] | None = None) -> None:
        """Send ``order`` and the descriptors ``streams`` to the parent of ``instance``, if it is connected."""
        agent = self._agents.get(instance)
        if agent is not None and agent.fileno() >= 0:
            with suppress(OSError):
                agent.send(order, descriptors=streams or ())

    def send_to_all(self, order: Message) -> None:
        """Send ``order`` to the agents (parent processes) of all instances that have connected to poprun."""
        for instance in self._agents:
            self.send_order(instance, order)

    def hang_up(self, instance: int) -> None:
        """Close the connection to the frozen parent of ``instance``, which ends the instance if it runs again."""
        self._drop(self._agents[instance])

    def take_streams(self, instance: int) -> dict[int, int]:
        """Return an instance's standard streams as {0, 1 or 2: socket's descriptor}; {} for a job on one host."""
        return {number: stream.detach() for number, stream in self._streams.pop(instance, {}).items()}

    def _listen_here(self) -> str:
        """Begin to listen for processes of this machine on a unix socket; return the name of the socket."""
        name = f"poprun-{os.getpid()}-{os.urandom(16).hex()}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(abstract_address(name))
        listener.listen(socket.SOMAXCONN)
        self._listen(listener, self._accept_process)
        return name

    def _listen_to_hosts(self, network: "JobNetwork") -> str:
        """Begin to listen for processes of other hosts on a TCP socket; return the address of the socket."""
        from poprun.job.key_proofs import KeyProofs

        self._proofs = KeyProofs(network.key.text, self._selector, self._admit, self._refuse)
        host = network.control_host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family, backlog=socket.SOMAXCONN)
        self._listen(listener, self._proofs.begin)
        return tcp_address(host, listener.getsockname()[1])

    def _listen(self, listener: socket.socket, handle: Callable[[socket.socket], None]) -> None:
        def accept() -> tuple[()]:
            try:
                connection = listener.accept()[0]
            except OSError as error:
                reason = describe_error(error.errno or 0)
                if len(self._agents) < self._num_instances:
                    raise LaunchError(f"cannot hear an agent: {reason}") from None
                self._stop_listening(listener)  # the programs already run and need no new connection
                log(f"warning: no monitor can connect to this job any more: {reason}")
            else:
                handle(connection)
            return ()

        self._listeners.append(listener)
        self._selector.register(listener, selectors.EVENT_READ, accept)

    def _stop_listening(self, listener: socket.socket) -> None:
        self._listeners.remove(listener)
        self._selector.unregister(listener)
        listener.close()

    def _accept_process(self, connection: socket.socket) -> None:
        if peer_user(connection) == os.getuid():
            self._admit(Link(connection))
        else:
            connection.close()
            self._refuse("a process of another user connected to the control socket")

    def _admit(self, link: Link) -> None:
        link.connection.settimeout(_TALK_SECONDS)
        self._peers[link] = Stranger()
        self._selector.register(link, selectors.EVENT_READ, partial(self._receive, link))

    def _refuse(self, reason: str) -> None:
        """Warn that data was refused, but only once for each ``reason``, so that nobody can flood the terminal."""
        if reason not in self._refusals and len(self._refusals) < _MOST_REASONS:
            self._refusals.add(reason)
            log(f"warning: refused: {reason}")

    def _receive(self, link: Link) -> Iterator[Event]:
        """Receive data from the connection ``link``; yield (instance, message) for each message of an agent."""
        received = link.receive(check_event)
        if received is None:
            peer = self._drop(link)
            if isinstance(peer, IntroducedAgent):
                yield peer.instance, {"event": LOST, "is_silent": link.is_sealed}
            return
        for descriptor in received.descriptors:
            os.close(descriptor)
        for reason in received.refusals:
            self._refuse(reason)
        for message in received.messages:
            match self._peers.get(link):
                case Stranger():
                    yield from self._introduce(link, message)
                case IntroducedAgent(instance) if message["event"] not in ("hello", "stream"):
                    yield instance, message
                case IntroducedAgent():
                    self._refuse_event(message)

    def _introduce(self, link: Link, message: dict[str, Any]) -> Iterator[Event]:
        """Identify by its first ``message`` the process connected by ``link``; yield the message if an agent
        (parent of an instance) sent it, but not if a monitor did.
        """
        match message:
            case {"event": "view"}:
                self._stop_receiving(link)
                self._add_viewer(link)
            case {"event": "agent_lost" | "runtime_lost" as kind, "instance": index} if self._is_instance(index):
                self._drop(link)
                if kind == "runtime_lost" or index not in self._agents or link.is_sealed:
                    yield index, message
            case {"event": "hello", "instance": index} if self._is_instance(index) and index not in self._agents:
                self._peers[link] = IntroducedAgent(index)
                self._agents[index] = link
                self._hellos[index] = message
                if link.is_sealed:
                    notice_death(link.connection)
                yield from self._pass_hello_on(index)
            case {"event": "stream", "instance": index, "stream": number} if self._awaits_stream(index, number):
                self._stop_receiving(link)
                link.connection.settimeout(None)
                self._streams.setdefault(index, {})[number] = link.connection
                yield from self._pass_hello_on(index)
            case _:
                self._refuse_event(message)
                self._drop(link)

    def _refuse_event(self, message: dict[str, Any]) -> None:
        sender = f"{message.get('instance')!r:.20}"
        self._refuse(f"the event {message['event']} of {sender} at a time that is not its")

    def _is_instance(self, index: int) -> bool:
        return index in range(self._num_instances)

    def _pass_hello_on(self, instance: int) -> Iterator[Event]:
        """Yield the first message (hello) of an instance's parent once the instance's streams are connected."""
        if instance in self._hellos and not self._missing_streams(instance):
            yield instance, self._hellos.pop(instance)

    def _missing_streams(self, instance: int) -> set[int]:
        """Return which standard streams (0 to 2) of ``instance`` are not connected; none for a job on one host."""
        if self._proofs is None:
            return set()
        return ({0, 1, 2} if instance == 0 else {1, 2}) - set(self._streams.get(instance, ()))

    def _awaits_stream(self, instance: int, number: int) -> bool:
        return self._is_instance(instance) and number in self._missing_streams(instance)

    def _add_viewer(self, link: Link) -> None:
        from poprun.job.monitors import Viewers

        self.viewers = self.viewers or Viewers()
        self.viewers.add(link)

    def _stop_receiving(self, link: Link) -> None:
        """Stop receiving messages from the connection ``link``, but leave the connection open."""
        self._selector.unregister(link)
        del self._peers[link]

    def _drop(self, link: Link) -> Stranger | IntroducedAgent:
        """Close the connection ``link``; return its other end: an instance's agent, or a process still unknown."""
        peer = self._peers.pop(link)
        if link.fileno() >= 0:
            self._selector.unregister(link)
            link.close()
        return peer
