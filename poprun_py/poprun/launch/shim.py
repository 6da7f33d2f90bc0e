"""The shim, which an MPI runtime or poprun starts. It forks agents and waits for them.

A runtime starts one for each instance. Without one, poprun starts a single shim, which forks the agents of all
instances: only the first of them waits for Python to start.

How a program ended is its agent's to tell, so the shim ends with 0 whatever that was: a runtime that heard of a
failure would end the other instances before they could be stopped in order. It ends with 1 when an agent was
killed or could not begin, or when the process that started it has gone (Hydra's proxy can die without mpiexec
noticing), so that the agents end their trees.
"""

from __future__ import annotations

import gc
import os
import select
import stat
import sys

TYPE_CHECKING = False  # as typing has it
if TYPE_CHECKING:
    import signal
    from typing import NoReturn
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

_CONNECT_SECONDS = 5.0
_LAST_STREAM = 2
_MOST_BYTES = 1024


def main() -> NoReturn:
    """Fork the agents, then live until they end, the runtime's process ends, or the runtime kills this one."""
    sys.excepthook = say_in_one_line
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own handler would write a traceback
    close_unnamed()
    runtime = os.getppid()
    try:
        key_file = os.environ.get(CONTROL_KEY_FILE, "")
        key = read_key(key_file) if key_file else ""
    except OSError as error:
        sys.exit(f"poprun: no key of the job on {os.uname().nodename}: {error}")
    shim = Shim(os.environ[CONTROL_ADDRESS], key, key_file, runtime)
    is_well = shim.fork_agents(read_instances(os.environ[os.environ[RANK_VARIABLE]])) and shim.wait()
    os._exit(0 if is_well else 1)  # nothing is left to be torn down, and a job of few instances would wait for it


def read_instances(text: str) -> range:
    """The instances whose agents a shim forks: ``2`` is its rank, ``0-3`` are all of a job without a runtime."""
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


class Shim:
    """The shim: its agents, and the pipe that they hold the other end of as long as it lives.

    Args:
        address: Where poprun listens.
        key: The job's key; empty where the kernel knows the agents.
        key_file: Where it was read.
        runtime: The process that started this one.
    """

    def __init__(self, address: str, key: str, key_file: str, runtime: int) -> None:
        self._address = address
        self._key = key
        self._key_file = key_file
        self._runtime = runtime
        self._agents: dict[int, int] = {}

    def fork_agents(self, instances: range) -> bool:
        """Fork an agent for each of ``instances``; whether there could be as many, else poprun was told.

        What agents need is loaded once for all of them; the only one loads it itself, which leaves less to copy.
        """
        life_reader, life_writer = os.pipe()
        if len(instances) > 1:
            _load_agent()
        for index in instances:
            try:
                agent = os.fork()
            except OSError as error:
                self._tell_of_loss(index, error.errno or 0)
                return False
            if agent == 0:
                os.close(life_writer)
                self._be_agent(index, life_reader)
            self._agents[agent] = index
        os.close(life_reader)
        return True

    def _be_agent(self, index: int, life_reader: int) -> NoReturn:
        """Be an agent to its end; the exit code of its process says why it could not begin, as an error number."""
        exit_code = 1
        try:
            _load_agent()
            from poprun.launch.agent import HeldKey, run_agent  # noqa: PLC0415 - where there are several, it was loaded

            key = HeldKey(self._key, self._key_file)
            exit_code = run_agent(self._address, key, index, self._runtime, os.getppid(), life_reader)
        except OSError as error:
            exit_code = error.errno or 1
        except Exception as error:  # noqa: BLE001 - it ends here, and nobody else would tell
            say_in_one_line(type(error), error, None)
        finally:
            os._exit(exit_code)

    def wait(self) -> bool:
        """Wait until every agent has ended, or the runtime's process; whether each agent ended by itself."""
        poll = select.poll()
        try:
            ends = {os.pidfd_open(agent): agent for agent in self._agents}
            runtime = os.pidfd_open(self._runtime)
        except OSError as error:  # the runtime's process is gone, or there are too many files
            self._tell_of_all(0 if isinstance(error, ProcessLookupError) else error.errno or 0)
            return False
        for end in (*ends, runtime):
            poll.register(end, select.POLLIN)
        is_well = True
        while self._agents:
            for end, _ in poll.poll():
                if end == runtime:
                    self._tell_of_all(0)
                    return False
                poll.unregister(end)
                is_well &= self._note_end(ends[end])
        return is_well

    def _note_end(self, agent: int) -> bool:
        """Reap an agent; whether it ended by itself, else poprun is told."""
        index = self._agents.pop(agent)
        _, status = os.waitpid(agent, 0)
        if status:
            exit_code = os.waitstatus_to_exitcode(status)
            self._tell_of_loss(index, exit_code if exit_code > 1 else 0)
        return status == 0

    def _tell_of_all(self, number: int) -> None:
        for index in self._agents.values():
            self._tell_of_loss(index, number)

    def _tell_of_loss(self, index: int, number: int) -> None:
        """Say that an agent is gone: one that had not reported leaves no other trace, and Hydra says nothing.

        ``number`` is the error number that says why, or 0. Returns when poprun has heard it: then it does not take
        the end of this process for the first thing that went wrong.
        """
        from poprun.messages.control import connect  # noqa: PLC0415 - agents are hardly ever lost
        from poprun.messages.json_lines import ProtocolError  # noqa: PLC0415 - as above

        try:
            link = connect(self._address, self._key, _CONNECT_SECONDS)
            link.send({"event": "agent_lost", "instance": index, "errno": number})
            link.connection.settimeout(_CONNECT_SECONDS)
            link.connection.recv(1)
            link.close()
        except (OSError, ProtocolError):
            return  # poprun is gone, too


def _load_agent() -> None:
    """Load all that an agent needs to start a program; a later collection does not write on it."""
    import _ctypes  # noqa: F401, PLC0415 - see fork_agents

    import poprun.launch.agent  # noqa: F401, PLC0415 - see fork_agents

    gc.freeze()
    gc.enable()


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


def close_unnamed() -> None:
    """Close descriptors that no variable names, such as the socket on which Hydra listens."""
    kept = {int(value) for name, value in os.environ.items() if name.endswith("_FD") and value.isdecimal()}
    for name in os.listdir("/proc/self/fd"):
        if int(name) > _LAST_STREAM and int(name) not in kept:
            try:
                os.close(int(name))
            except OSError:  # the listing's own descriptor is closed by now
                continue


def say_in_one_line(kind: type[BaseException], error: BaseException, _: object) -> None:
    """Say why the shim itself has failed; its calls tell a user of poprun nothing."""
    sys.stderr.write(f"poprun: a shim has failed: {kind.__name__}: {error}\n")
