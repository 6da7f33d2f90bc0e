"""The shim, which an MPI runtime or poprun starts. It forks agents and waits for them.

A runtime starts one for each instance; without one, poprun starts a single shim for all. See `host_shim` for MPI
on one machine. It ends with 0 however its program ended: a runtime would end the other instances at a failure,
before they could be stopped in order. It ends with 1 when an agent was killed, or what started the shim has gone.
"""

from __future__ import annotations

import gc
import os
import select
import stat
import sys

from poprun.launch.process.process_tree import STOPPED_SECONDS, StoppedChildren
from poprun.launch.process.spawn import close_others

TYPE_CHECKING = False  # as typing has it
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable
    from typing import NoReturn

    from poprun.launch.agent import Parentage
else:
    import _signal as signal  # signal itself loads enum and more

CONTROL_ADDRESS = "POPRUN_CONTROL"
"""Variable that tells a shim where the control socket is: ``tcp://HOST:PORT``, or a name in the abstract namespace
of this machine, which leaves no file behind."""

CONTROL_KEY_FILE = "POPRUN_CONTROL_KEY_FILE"
"""Variable that tells a shim which file of its host holds the job's key, where the control socket is one of the
network: an MPI runtime sends the variable over it as it is, and the file came through ssh."""

RANK_VARIABLE = "POPRUN_RANK_VARIABLE"
"""Variable that tells a shim the name of the variable in which its launcher tells it its rank."""

INSTANCES = "POPRUN_INSTANCES"
"""The rank variable of the shim that poprun starts itself: its first and its last instance, as in ``0-3``."""

HOST_SHIM = "POPRUN_HOST_SHIM"
"""Variable that tells a rank shim the name of the host shim's socket, in the abstract namespace."""

LISTENER = "POPRUN_LISTENER_FD"
"""Variable that tells the host shim which of its descriptors is that socket: poprun has made it."""

_CONNECT_SECONDS = 5.0
_MOST_BYTES = 1024


def main(kind: type[Shim]) -> NoReturn:
    """Fork the agents, then live until they end, the runtime's process ends, or the runtime kills this one."""
    sys.excepthook = print_in_one_line
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own handler would write a traceback
    # what no variable names is closed, such as the socket on which Hydra listens
    close_others({int(fd) for name, fd in os.environ.items() if name.endswith("_FD") and fd.isdecimal()})
    runtime = os.getppid()
    try:
        key_file = os.environ.get(CONTROL_KEY_FILE, "")
        key = read_key(key_file) if key_file else ""
    except OSError as error:
        sys.exit(f"poprun: no key of the job on {os.uname().nodename}: {error}")
    shim = kind(os.environ[CONTROL_ADDRESS], key, key_file, runtime)
    is_well = shim.fork_agents(read_instances(os.environ[os.environ[RANK_VARIABLE]])) and shim.wait()
    os._exit(0 if is_well else 1)  # nothing is left to be torn down, and a job of few instances would wait for it


def read_instances(text: str) -> range:
    """The instances whose agents a shim forks: ``2`` is its rank, ``0-3`` are all of a job without a runtime."""
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


class Shim:
    """The shim: its agents, and the pipe that they hold the other end of as long as it lives."""

    def __init__(self, address: str, key: str, key_file: str, runtime: int) -> None:
        self._address = address
        self._key = key
        self._key_file = key_file
        self._runtime = runtime
        self._agents: dict[int, int] = {}
        self._awaited: set[int] = set()
        self._is_well = True
        self._poll = select.poll()
        self._handlers: dict[int, Callable[[], None]] = {}

    def fork_agents(self, instances: range) -> bool:
        """Fork an agent for each of ``instances``; whether that succeeded, else poprun was told."""
        life_reader, life_writer = os.pipe()

        def make_parentage() -> Parentage:
            from poprun.launch.agent import Parentage

            os.close(life_writer)
            return Parentage(os.getppid(), self._runtime, (life_reader,), os.environ)

        if len(instances) > 1:  # else the only agent loads it, which leaves less to copy
            load_agent()
        for index in instances:
            if self._fork_agent(index, make_parentage) is None:
                return False
        os.close(life_reader)
        return True

    def _fork_agent(self, index: int, make_parentage: Callable[[], Parentage], report: int = -1) -> int | None:
        """Fork the agent of instance ``index``, which writes to ``report`` when it ends well; its id, or None."""
        try:
            agent = os.fork()
        except OSError as error:
            self._report_loss(index, error.errno or 0)
            return None
        if agent == 0:
            self._be_agent(index, make_parentage, report)
        self._agents[agent] = index
        return agent

    def _be_agent(self, index: int, make_parentage: Callable[[], Parentage], report: int) -> NoReturn:
        """Run an agent to its end; its exit code is the error number if it could not begin."""
        exit_code = 1
        try:
            for descriptor in self._handlers:
                os.close(descriptor)
            load_agent()
            from poprun.launch.agent import HeldKey, run_agent

            exit_code = run_agent(self._address, HeldKey(self._key, self._key_file), index, make_parentage())
            if exit_code == 0 and report >= 0:
                _report_end(report)
        except OSError as error:
            exit_code = error.errno or 1
        except Exception as error:  # noqa: BLE001 - it ends here, and nobody else would tell
            print_in_one_line(type(error), error, None)
        finally:
            os._exit(exit_code)

    def wait(self) -> bool:
        """Wait until every agent has ended, or the runtime's process; whether each agent ended by itself."""
        try:
            self._on_readable(os.pidfd_open(self._runtime), self._lose_runtime)
            for agent in self._agents:
                self._await_end(agent)
        except ProcessLookupError:
            self._lose_runtime()
        except OSError as error:  # there are too many files
            self._lose_all(error.errno or 0)
        stopped = StoppedChildren()
        while self._agents or self._awaited:
            for descriptor, _ in self._poll.poll(STOPPED_SECONDS * 1000)[:1]:  # another's number may be used again
                self._handlers[descriptor]()
            stopped.continue_them()
        return self._is_well

    def _on_readable(self, descriptor: int, act: Callable[[], None]) -> None:
        """Call ``act`` whenever there is something to read from ``descriptor``."""
        self._handlers[descriptor] = act
        self._poll.register(descriptor, select.POLLIN)

    def _ignore(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)
        del self._handlers[descriptor]

    def _await_end(self, agent: int) -> None:
        """Have an agent reaped as soon as it has ended."""
        end = os.pidfd_open(agent)

        def note_end() -> None:
            self._ignore(end)
            os.close(end)
            self._note_end(agent)

        self._on_readable(end, note_end)

    def _note_end(self, agent: int) -> None:
        """Reap an agent, and report it to poprun if it did not end by itself."""
        index = self._agents.pop(agent)
        _, status = os.waitpid(agent, 0)
        if status:
            self._is_well = False
            exit_code = os.waitstatus_to_exitcode(status)
            self._report_loss(index, exit_code if exit_code > 1 else 0)

    def _lose_runtime(self) -> None:
        """Report to poprun that the process which started this one is gone; agents that lose their shim end."""
        self._lose_all(0, "runtime_lost")

    def _lose_all(self, number: int, event: str = "agent_lost") -> None:
        """Report all agents to poprun as lost, with an error number, and stop waiting for them."""
        self._is_well = False
        for index in (*self._agents.values(), *self._awaited):
            self._report_loss(index, number, event)
        self._agents.clear()
        self._awaited.clear()

    def _report_loss(self, index: int, number: int, event: str = "agent_lost") -> None:
        """Report to poprun that an agent is lost, with an error number or 0, and wait until it has heard."""
        # else poprun would take the end of this process for the first thing that went wrong
        from poprun.launch.messages import ProtocolError
        from poprun.launch.messages.control import connect

        try:
            link = connect(self._address, self._key, _CONNECT_SECONDS)
            link.send({"event": event, "instance": index, "errno": number})
            link.connection.settimeout(_CONNECT_SECONDS)
            link.connection.recv(1)
            link.close()
        except (OSError, ProtocolError):
            return  # poprun is gone, too


def load_agent() -> None:
    """Load all that an agent needs to start a program; a later collection does not write on it."""
    import _ctypes  # noqa: F401 - see fork_agents

    import poprun.launch.agent  # noqa: F401 - see fork_agents

    gc.freeze()
    gc.enable()


def _report_end(report: int) -> None:
    try:
        os.write(report, b"\0")
    except OSError:  # who would hear it is gone
        return


def read_key(file: str) -> str:
    """The key in ``file``, which only this user may read or write."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & (stat.S_IRWXG | stat.S_IRWXO):
            raise PermissionError(f"{file} is not this user's alone")
        return os.read(descriptor, _MOST_BYTES).decode("ascii")
    finally:
        os.close(descriptor)


def print_in_one_line(kind: type[BaseException], error: BaseException, _: object) -> None:
    """Print why the shim itself has failed, without a traceback, which would not help a user of poprun."""
    sys.stderr.write(f"poprun: a shim has failed: {kind.__name__}: {error}\n")
