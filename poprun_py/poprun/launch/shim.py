"""The shim, which an MPI runtime or poprun starts: it forks agents and waits for their end.

A runtime starts one shim for each instance; without a runtime, poprun starts one shim for all instances. See
`host_shim` for MPI on one machine. The exit code is 0 even if a program failed, because a runtime would kill the
other instances after a failure, before poprun can stop them in order. The exit code is 1 if an agent was killed or
the process that started the shim has ended.
"""

from __future__ import annotations

import gc
import os
import select
import stat
import sys

from poprun.launch.process.process_tree import STOPPED_SECONDS, StoppedChildren
from poprun.launch.process.spawn import close_others

TYPE_CHECKING = False  # not imported from typing, which loads slowly
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable
    from typing import NoReturn

    from poprun.launch.agent import Parentage
else:
    import _signal as signal  # the module signal would load enum and more

CONTROL_ADDRESS = "POPRUN_CONTROL"
"""The variable with the control socket's address: ``tcp://HOST:PORT``, or a name in Linux's abstract namespace."""

CONTROL_KEY_FILE = "POPRUN_CONTROL_KEY_FILE"
"""The variable with the path of the file that contains the job's key, if the control socket is on the network. An
MPI runtime sends variables unencrypted, but the file came through ssh.
"""

RANK_VARIABLE = "POPRUN_RANK_VARIABLE"
"""The variable with the name of the variable in which the launcher gives a shim its rank."""

INSTANCES = "POPRUN_INSTANCES"
"""The rank variable of a shim that poprun starts itself: its first and last instance, such as ``0-3``."""

HOST_SHIM = "POPRUN_HOST_SHIM"
"""The variable with the name of the host shim's socket, in the abstract namespace, for rank shims."""

LISTENER = "POPRUN_LISTENER_FD"
"""The variable with the number of the host shim's listening descriptor, which poprun has made."""

_CONNECT_SECONDS = 5.0
_MOST_BYTES = 1024


def main(kind: type[Shim]) -> NoReturn:
    """Run a shim: fork agents, which start and end programs, and wait until they or the shim's parent end."""
    sys.excepthook = print_in_one_line
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own handler would write a traceback
    # close every descriptor that no variable names, such as the socket on which Hydra listens
    close_others({int(fd) for name, fd in os.environ.items() if name.endswith("_FD") and fd.isdecimal()})
    runtime = os.getppid()
    try:
        key_file = os.environ.get(CONTROL_KEY_FILE, "")
        key = read_key(key_file) if key_file else ""
    except OSError as error:
        sys.exit(f"poprun: no key of the job on {os.uname().nodename}: {error}")
    shim = kind(os.environ[CONTROL_ADDRESS], key, key_file, runtime)
    is_well = shim.fork_agents(read_instances(os.environ[os.environ[RANK_VARIABLE]])) and shim.wait()
    os._exit(0 if is_well else 1)  # the interpreter's own exit would take time, for which a small job would wait


def read_instances(text: str) -> range:
    """Parse the instances of a process from ``text``: only instance 2 for ``2``, instances 0 to 3 for ``0-3``."""
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


class Shim:
    """A small process that forks agents, which start and end programs; its end wakes the agents by a pipe."""

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
        """Fork an agent, the parent of a program, for each of ``instances``; return False if a fork fails."""
        life_reader, life_writer = os.pipe()

        def make_parentage() -> Parentage:
            from poprun.launch.agent import Parentage

            os.close(life_writer)
            return Parentage(os.getppid(), self._runtime, (life_reader,), os.environ)

        if len(instances) > 1:  # a single agent loads the module itself, so that fork copies less
            load_agent()
        for index in instances:
            if self._fork_agent(index, make_parentage) is None:
                return False
        os.close(life_reader)
        return True

    def _fork_agent(
        self, index: int, make_parentage: Callable[[], Parentage], report: int | None = None
    ) -> int | None:
        """Fork the agent that runs the program of instance ``index``; return its id, or None if the fork fails."""
        try:
            agent = os.fork()
        except OSError as error:
            self._report_loss(index, error.errno or 0)
            return None
        if agent == 0:
            self._be_agent(index, make_parentage, report)
        self._agents[agent] = index
        return agent

    def _be_agent(self, index: int, make_parentage: Callable[[], Parentage], report: int | None) -> NoReturn:
        """Run an agent in this forked process, and exit with 0, or with an error number if it could not begin."""
        exit_code = 1
        try:
            for descriptor in self._handlers:
                os.close(descriptor)
            load_agent()
            from poprun.launch.agent import HeldKey, run_agent

            exit_code = run_agent(self._address, HeldKey(self._key, self._key_file), index, make_parentage())
            if exit_code == 0 and report is not None:
                _report_end(report)
        except OSError as error:
            exit_code = error.errno or 1
        except Exception as error:  # noqa: BLE001 - the process ends now, so it must print every error
            print_in_one_line(type(error), error, None)
        finally:
            os._exit(exit_code)

    def wait(self) -> bool:
        """Wait until all agents (child processes) or the parent end; return whether all agents exited with 0."""
        try:
            self._on_readable(os.pidfd_open(self._runtime), self._lose_runtime)
            for agent in self._agents:
                self._await_end(agent)
        except ProcessLookupError:
            self._lose_runtime()
        except OSError as error:  # too many files are open
            self._lose_all(error.errno or 0)
        stopped = StoppedChildren()
        while self._agents or self._awaited:
            for descriptor, _ in self._poll.poll(STOPPED_SECONDS * 1000)[:1]:  # a handler may reuse a descriptor
                self._handlers[descriptor]()
            stopped.continue_them()
        return self._is_well

    def _on_readable(self, descriptor: int, act: Callable[[], None]) -> None:
        """Call ``act`` in :meth:`wait` whenever ``descriptor`` becomes readable."""
        self._handlers[descriptor] = act
        self._poll.register(descriptor, select.POLLIN)

    def _ignore(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)
        del self._handlers[descriptor]

    def _await_end(self, agent: int) -> None:
        """Let :meth:`wait` reap the agent, the child with the process id ``agent``, as soon as it has ended."""
        end = os.pidfd_open(agent)

        def note_end() -> None:
            self._ignore(end)
            os.close(end)
            self._note_end(agent)

        self._on_readable(end, note_end)

    def _note_end(self, agent: int) -> None:
        """Reap an ended agent; if it failed or was killed, report to poprun that its instance lost its agent."""
        index = self._agents.pop(agent)
        _, status = os.waitpid(agent, 0)
        if status:
            self._is_well = False
            exit_code = os.waitstatus_to_exitcode(status)
            self._report_loss(index, exit_code if exit_code > 1 else 0)

    def _lose_runtime(self) -> None:
        """Report to poprun that this process's parent has ended; then this process and its agents also end."""
        self._lose_all(0, "runtime_lost")

    def _lose_all(self, number: int, event: str = "agent_lost") -> None:
        """Report all agents (child processes) to poprun as lost, with an error number or 0; await none of them."""
        self._is_well = False
        for index in (*self._agents.values(), *self._awaited):
            self._report_loss(index, number, event)
        self._agents.clear()
        self._awaited.clear()

    def _report_loss(self, index: int, number: int, event: str = "agent_lost") -> None:
        """Report an agent (child process) to poprun as lost, with an error number or 0; wait for the receipt."""
        # without waiting, poprun would think that the end of this process was the first failure
        from poprun.launch.messages import ProtocolError
        from poprun.launch.messages.control import connect

        try:
            link = connect(self._address, self._key, _CONNECT_SECONDS)
            link.send({"event": event, "instance": index, "errno": number})
            link.connection.settimeout(_CONNECT_SECONDS)
            link.connection.recv(1)
            link.close()
        except (OSError, ProtocolError):
            return  # poprun is gone as well


def load_agent() -> None:
    """Load the modules of an agent, and freeze the garbage collector, so that forked agents share the memory."""
    import _ctypes  # noqa: F401 - loaded before the fork, so that agents share it

    import poprun.launch.agent  # noqa: F401 - loaded before the fork, so that agents share it

    gc.freeze()
    gc.enable()


def _report_end(report: int) -> None:
    try:
        os.write(report, b"\0")
    except OSError:  # the reader is gone
        return


def read_key(file: str) -> str:
    """Return the job's key in ``file``. Raises PermissionError if another user can read or write the file."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & (stat.S_IRWXG | stat.S_IRWXO):
            raise PermissionError(f"{file} is not this user's alone")
        return os.read(descriptor, _MOST_BYTES).decode("ascii")
    finally:
        os.close(descriptor)


def print_in_one_line(kind: type[BaseException], error: BaseException, _: object) -> None:
    """Print in one line the exception that ends this process; a traceback would not help a user of poprun."""
    sys.stderr.write(f"poprun: a shim has failed: {kind.__name__}: {error}\n")
