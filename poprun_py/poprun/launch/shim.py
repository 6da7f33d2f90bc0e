"""The shim, which an MPI runtime or poprun starts: ``python -I -S shim.py``. It forks the agent and waits for it.

How the program ended is the agent's to tell, so the shim ends with 0 whatever that was: a runtime that heard of a
failure would end the other instances before they could be stopped in order. It ends with 1 when its agent was
killed or could not begin, or when the process that started it has gone (Hydra's proxy can die without mpiexec
noticing), so that the agent ends its tree.
"""

import os
import select
import signal
import stat
import sys
from contextlib import suppress
from typing import NoReturn

_SOURCE_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, _SOURCE_ROOT)

from poprun.launch.agent import HeldKey, run_agent  # noqa: E402 - a bare interpreter has to be told where it is
from poprun.messages.control import (  # noqa: E402 - as above
    CONTROL_ADDRESS,
    CONTROL_KEY_FILE,
    RANK_VARIABLE,
    ProtocolError,
    connect,
)

_CONNECT_SECONDS = 5.0
_LAST_STREAM = 2
_MOST_BYTES = 1024


def main() -> None:
    """Fork the agent, then live until it ends, the runtime's process ends, or the runtime kills this one."""
    close_unnamed()
    runtime = os.getppid()
    try:
        key = read_key(os.environ.get(CONTROL_KEY_FILE, ""))
    except OSError as error:
        sys.exit(f"poprun: no key of the job on {os.uname().nodename}: {error}")
    address, index = os.environ[CONTROL_ADDRESS], int(os.environ[os.environ[RANK_VARIABLE]])
    try:
        exit_code = live(address, key, index, runtime)
    except OSError as error:
        exit_code = error.errno or 1
    if exit_code:
        tell_of_loss(address, key.text, index, exit_code if exit_code > 1 else 0)
    sys.exit(1 if exit_code else 0)


def live(address: str, key: HeldKey, index: int, runtime: int) -> int:
    """Fork the agent and wait for it; 0 when all is well, 1 when it was killed, else an error number."""
    shim = os.getpid()
    life_reader, life_writer = os.pipe()
    agent = os.fork()
    if agent == 0:
        os.close(life_writer)
        be_agent(address, key, index, runtime, shim, life_reader)
    os.close(life_reader)
    return wait_for(agent, runtime)


def be_agent(address: str, key: HeldKey, index: int, runtime: int, shim: int, life_reader: int) -> NoReturn:
    """Be the agent to its end; the exit code of its process says why it could not begin, as an error number."""
    exit_code = 1
    try:
        exit_code = run_agent(address, key, index, runtime, shim, life_reader)
    except OSError as error:
        exit_code = error.errno or 1
    finally:
        os._exit(exit_code)


def read_key(file: str) -> HeldKey:
    """The key in ``file``, which only this user may read or write; none without a file's name."""
    if not file:
        return HeldKey("", "")
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & (stat.S_IRWXG | stat.S_IRWXO):
            raise PermissionError(f"{file} is not this user's alone")
        return HeldKey(os.read(descriptor, _MOST_BYTES).decode("ascii"), file)
    finally:
        os.close(descriptor)


def close_unnamed() -> None:
    """Close descriptors that no variable names, such as the socket on which Hydra listens."""
    kept = {int(value) for name, value in os.environ.items() if name.endswith("_FD") and value.isdecimal()}
    for name in os.listdir("/proc/self/fd"):
        if int(name) > _LAST_STREAM and int(name) not in kept:
            with suppress(OSError):  # the listing's own descriptor is closed by now
                os.close(int(name))


def tell_of_loss(address: str, key: str, index: int, number: int) -> None:
    """Say that the agent is gone: one that had not reported leaves no other trace, and Hydra says nothing.

    ``number`` is the error number that says why, or 0. Returns when poprun has heard it: then it does not take the
    end of this process for the first thing that went wrong.
    """
    try:
        link = connect(address, key, _CONNECT_SECONDS)
        link.send({"event": "agent_lost", "instance": index, "errno": number})
        link.connection.settimeout(_CONNECT_SECONDS)
        link.connection.recv(1)
        link.close()
    except (OSError, ProtocolError):
        return  # poprun is gone, too


def wait_for(agent: int, runtime: int) -> int:
    """Wait until one of the two processes has ended; 0 when the agent did so well, else 1 or its error number."""
    poll = select.poll()
    poll.register(os.pidfd_open(agent), select.POLLIN)
    try:
        poll.register(os.pidfd_open(runtime), select.POLLIN)
    except ProcessLookupError:
        return 1
    poll.poll()
    ended, status = os.waitpid(agent, os.WNOHANG)
    return max(os.waitstatus_to_exitcode(status), 0) or int(status != 0) if ended else 1


def say_in_one_line(kind: type[BaseException], error: BaseException, _: object) -> None:
    """Say why the shim itself has failed; its calls tell a user of poprun nothing."""
    sys.stderr.write(f"poprun: a shim has failed: {kind.__name__}: {error}\n")


if __name__ == "__main__":
    sys.excepthook = say_in_one_line
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own handler would write a traceback
    main()
