"""Start a process: its own session, its own streams, no descriptor that it does not need.

poprun starts the launcher's commands with it, and each agent its program. Standard library only: the agents run
this in a bare interpreter.
"""

import errno
import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, NoReturn

from poprun.process.linux import die_with_parent

# The first two are ignored by every Python, the others by agents; an ignored signal stays so across exec.
_TO_DEFAULT = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGHUP)
_NUM_STREAMS = 3


class ProcessStart(NamedTuple):
    """A process to be started.

    Attributes:
        words: Its argv; the first is a path or a name on PATH.
        working_directory: Where it starts.
        environment: Its whole environment.
        streams: The three descriptors that become its standard input, output and error.
        death_signal: What the kernel sends it when the process that starts it dies.
        kept: Further descriptors that it inherits under their own numbers.
    """

    words: Sequence[str]
    working_directory: str
    environment: Mapping[str, str]
    streams: Sequence[int]
    death_signal: int
    kept: Iterable[int] = ()


def start_process(start: ProcessStart) -> int:
    """Fork and execute; the process id, which is also the id of the new session and group.

    Must be called from the main thread: the death signal comes when the *thread* that forked ends.

    Raises:
        OSError: If the program cannot be executed, with its path or the working directory as file name.
    """
    reader, writer = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _become(start, parent, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        problem = pipe.read()
    if problem:
        os.waitpid(pid, 0)
        number, _, place = problem.decode(errors="replace").partition(" ")
        raise OSError(int(number), os.strerror(int(number)), place)
    return pid


def _become(start: ProcessStart, parent: int, failure_pipe: int) -> NoReturn:
    place = start.working_directory
    try:
        os.setsid()
        die_with_parent(start.death_signal)
        if os.getppid() != parent:  # it died between the fork and the line above
            os._exit(1)
        _arrange_descriptors(start.streams, set(start.kept), failure_pipe)
        signal.set_wakeup_fd(-1)
        for signum in _TO_DEFAULT:
            signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.chdir(place)
        place = start.words[0]
        os.execvpe(place, list(start.words), dict(start.environment))  # noqa: S606 - starting programs is the purpose
    except (OSError, ValueError) as error:  # a word that no program can be given is a ValueError
        number = error.errno if isinstance(error, OSError) else errno.EINVAL
        os.write(failure_pipe, f"{number} {place}".encode(errors="replace"))
    finally:
        os._exit(127)


def _arrange_descriptors(streams: Sequence[int], kept: set[int], failure_pipe: int) -> None:
    # First out of the way of 0, 1 and 2, so that no stream is overwritten before it is moved.
    moved = [os.dup(descriptor) for descriptor in streams]
    for number, descriptor in enumerate(moved):
        os.dup2(descriptor, number)
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        if descriptor >= _NUM_STREAMS and descriptor not in kept and descriptor != failure_pipe:
            with suppress(OSError):  # the listing's own descriptor is closed by now
                os.close(descriptor)
    for descriptor in kept:
        os.set_inheritable(descriptor, True)  # noqa: FBT003 - it takes no keywords
