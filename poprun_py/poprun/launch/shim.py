"""The shim, which an MPI runtime or poprun starts: ``python -I -S shim.py``. It forks the agent and waits for it.

How the program ended is the agent's to tell, so the shim ends with 0 whatever that was: a runtime that heard of a
failure would end the other instances before they could be stopped in order. It ends with 1 when its agent was
killed, or when the process that started it has gone (Hydra's proxy can die without mpiexec noticing), so that the
agent ends its tree.
"""

import os
import select
import stat
import sys
from contextlib import suppress

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
    runtime, shim = os.getppid(), os.getpid()
    try:
        key = read_key(os.environ.get(CONTROL_KEY_FILE, ""))
    except OSError as error:
        sys.exit(f"poprun: no key of the job on {os.uname().nodename}: {error}")
    address, index = os.environ[CONTROL_ADDRESS], int(os.environ[os.environ[RANK_VARIABLE]])
    life_reader, life_writer = os.pipe()
    agent = os.fork()
    if agent == 0:
        os.close(life_writer)
        os._exit(run_agent(address, key, index, runtime, shim, life_reader))
    os.close(life_reader)
    exit_code = wait_for(agent, runtime)
    if exit_code:
        tell_of_loss(address, key.text, index)
    sys.exit(exit_code)


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


def tell_of_loss(address: str, key: str, index: int) -> None:
    """Say that the agent is gone: one that had not reported leaves no other trace, and Hydra says nothing."""
    try:
        link = connect(address, key, _CONNECT_SECONDS)
        link.send({"event": "agent_lost", "instance": index})
        link.close()
    except (OSError, ProtocolError):
        return  # poprun is gone, too


def wait_for(agent: int, runtime: int) -> int:
    """Wait until one of the two processes has ended; this process's exit code."""
    poll = select.poll()
    poll.register(os.pidfd_open(agent), select.POLLIN)
    try:
        poll.register(os.pidfd_open(runtime), select.POLLIN)
    except ProcessLookupError:
        return 1
    poll.poll()
    ended, status = os.waitpid(agent, os.WNOHANG)
    return 0 if ended and status == 0 else 1


if __name__ == "__main__":
    main()
