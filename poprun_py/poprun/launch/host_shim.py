"""The host shim: the shim of an MPI job on one machine, which forks the agents of all instances.

A *rank shim* for each instance (`start_rank_shim`) sends the host shim what the MPI runtime gave it: its
environment, and the descriptor that MPICH names in the environment. So no instance waits for a Python that loads
what agents need. The agent gets the connection, so that it notices the end of the rank shim, and the rank shim
notices the agent's end.
"""

from __future__ import annotations

import _thread
import os
import sys

from poprun.launch.agent import Parentage
from poprun.launch.messages.control import peer_process, peer_user, receive_descriptors
from poprun.launch.process.process_tree import environment_of
from poprun.launch.process.spawn import thread_shortage
from poprun.launch.shim import LISTENER, Shim, load_agent

TYPE_CHECKING = False  # not imported from typing, which loads slowly
if TYPE_CHECKING:
    import socket
else:
    import _socket as socket  # the module socket would load enum, selectors and more

_MOST_BYTES = 64
_MOST_DESCRIPTORS = 1
_NUM_PROBED = 2  # one rank shim and its agent must have room


class HostShim(Shim):
    """A process that forks for each instance on its machine an agent, which starts and ends the program."""

    _listener: socket.socket

    def fork_agents(self, instances: range) -> bool:
        """Prepare to fork an agent for each MPI process that connects; return False if no process can start."""
        self._awaited = set(instances)
        if not has_room():  # a runtime without room for processes may report nothing
            self._lose_all(thread_shortage())
            return False
        load_agent()
        self._listener = socket.socket(fileno=int(os.environ[LISTENER]))
        self._on_readable(self._listener.fileno(), self._accept)
        return True

    def _accept(self) -> None:
        try:
            descriptor, _ = self._listener._accept()  # type: ignore[attr-defined]  # noqa: SLF001 - the socket class in C has only _accept
        except OSError as error:
            self._lose_all(error.errno or 0)
            return
        connection = socket.socket(fileno=descriptor)
        if peer_user(connection) == os.getuid():
            self._on_readable(descriptor, lambda: self._receive_handover(connection))

    def _receive_handover(self, connection: socket.socket) -> None:
        """Receive an MPI process's rank and descriptors, fork the agent of this rank, and close ``connection``."""
        self._ignore(connection.fileno())
        descriptors: list[int] = []
        try:
            data, descriptors = receive_descriptors(connection, _MOST_BYTES, _MOST_DESCRIPTORS)
            if data:  # no data: the rank shim was killed first
                self._take_over(connection, data.decode().split(), descriptors)
        except (OSError, ValueError) as error:
            sys.stderr.write(f"poprun: a shim was refused: {error}\n")
        for descriptor in (*descriptors, connection.detach()):
            os.close(descriptor)

    def _take_over(self, connection: socket.socket, words: list[str], descriptors: list[int]) -> None:
        """Fork an agent, the parent of the program, for an MPI process. This process has sent ``words``: its rank,
        its parent's process id, and the environment variables that get the numbers of the ``descriptors``.
        """
        rank, parent, *names = words
        index, runtime, shim = int(rank), int(parent), peer_process(connection)
        if index not in self._awaited:
            raise ValueError(f"process {shim} is not that of an awaited instance")
        environment = environment_of(shim) | dict(zip(names, map(str, descriptors), strict=True))
        try:
            end = end_of(runtime)  # mpiexec does not notice if Hydra's proxy dies
        except OSError as error:
            self._report_loss(index, error.errno or 0)
            raise
        self._awaited.remove(index)
        if not self._awaited:
            self._ignore(self._listener.fileno())
            self._listener.close()
        report = connection.fileno()
        agent = self._fork_agent(index, lambda: Parentage(shim, runtime, (report, end), environment), report)
        os.close(end)
        if agent is not None:
            self._await_end(agent)


def has_room() -> bool:
    """Whether the kernel lets this user start two more processes; this is tried by starting two threads."""
    gate = _thread.allocate_lock()
    started = []
    with gate:  # so that all threads live at the same time
        try:
            for _ in range(_NUM_PROBED):
                has_ended = _thread.allocate_lock()
                has_ended.acquire()
                _thread.start_new_thread(_pass, (gate, has_ended))
                started.append(has_ended)
        except RuntimeError:  # Python's error if no more threads are possible
            pass
    for has_ended in started:
        has_ended.acquire()
    return len(started) == _NUM_PROBED


def _pass(gate: _thread.LockType, has_ended: _thread.LockType) -> None:
    with gate:
        has_ended.release()


def end_of(process: int) -> int:
    """Return a descriptor that becomes readable when ``process`` ends, at once if there is no such process."""
    try:
        return os.pidfd_open(process)
    except ProcessLookupError:
        reader, writer = os.pipe()
        os.close(writer)
        return reader
