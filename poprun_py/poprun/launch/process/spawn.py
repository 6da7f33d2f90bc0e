"""The start of processes: with chosen descriptors, an end when the parent dies, and a time limit for answers.

The module `subprocess` is not used, because its import takes longer than the usual question at the start of a job.
Each shim of an MPI job loads this module in a bare interpreter, so it imports little of the standard library.
"""

from __future__ import annotations

import errno
import os
import resource
import select
import time

TYPE_CHECKING = False  # not imported from typing, which loads slowly
if TYPE_CHECKING:
    import signal
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from threading import Thread
    from typing import NamedTuple, NoReturn
else:
    import _signal as signal  # the module signal would load enum and more

    from poprun.launch.process import NamedTuple

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_MPOL_BIND = 2
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""The system call set_mempolicy, which the C library lacks, by processor (unistd_64.h, asm-generic/unistd.h)."""

# Every Python ignores the first two signals, agents ignore the others; exec keeps a signal ignored.
_TO_DEFAULT = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGHUP)
_NUM_STREAMS = 3
_READ_BYTES = 64 * 1024
_LEAST_STACK_BYTES = 2**21  # stack of a thread without ``ulimit -s``: pthread_create(3)


def become_subreaper() -> None:
    """Make this process adopt every descendant whose parent dies, so that no descendant escapes."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(signum: int) -> None:
    """Make the kernel send ``signum`` to this process when the *thread* that forked this process ends."""
    _prctl(_PR_SET_PDEATHSIG, signum)


def take_memory_from(nodes: Collection[int]) -> None:
    """Let the kernel take this process's memory only from the NUMA nodes ``nodes``. Raises OSError on failure."""
    import ctypes

    number = _SET_MEMPOLICY.get(os.uname().machine)
    if number is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    mask = sum(1 << node for node in nodes).to_bytes(8 * (max(nodes) // 64 + 1), "little")
    c_library = ctypes.CDLL(None, use_errno=True)
    # The kernel reads one bit less than the argument says.
    if c_library.syscall(number, _MPOL_BIND, mask, ctypes.c_ulong(8 * len(mask) + 1)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _prctl(option: int, argument: int) -> None:
    # Only the part of ctypes that calls functions: all of ctypes takes longer to load than a shim takes to start.
    from _ctypes import call_function, dlopen, dlsym

    this_program = dlopen(None, os.RTLD_NOW)  # type: ignore[arg-type] # dlopen(3) has no name for the program
    call_function(dlsym(this_program, "prctl"), (option, argument, 0, 0, 0))


class ProcessStart(NamedTuple):
    """The description of a process to start: its argv, working directory, environment, descriptors and limits."""

    words: Sequence[str]  # its argv; the first is a path or a name on PATH
    working_directory: str  # directory in which it starts
    environment: Mapping[str, str]  # its complete environment
    streams: Sequence[int]  # the three descriptors that become its standard input, output and error
    death_signal: int  # the signal that it gets when the starting process dies
    kept: Iterable[int] = ()  # other descriptors that it inherits with unchanged numbers
    open_files: int = 0  # its soft limit of open files; 0: the starting process's limit


def start_process(start: ProcessStart) -> int:
    """Start a process and return its id. Raises OSError, whose filename is the program or folder that failed."""
    # only from the main thread, because the death signal comes when the *thread* that forked ends
    parent = os.getpid()
    pipe: tuple[int, ...] = ()
    try:
        pipe = reader, writer = os.pipe()
        pid = os.fork()
    except OSError as error:
        for descriptor in pipe:
            os.close(descriptor)
        raise OSError(error.errno, error.strerror, start.words[0]) from None
    if pid == 0:
        _run_child(start, parent, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as failure:
        problem = failure.read()
    if problem:
        os.waitpid(pid, 0)
        number, _, place = problem.decode(errors="replace").partition(" ")
        raise OSError(int(number), os.strerror(int(number)), place)
    return pid


def _run_child(start: ProcessStart, parent: int, failure_pipe: int) -> NoReturn:
    place = start.words[0]
    try:
        os.setsid()
        die_with_parent(start.death_signal)
        if os.getppid() != parent:  # the parent died before die_with_parent was called
            os._exit(1)
        _arrange_descriptors(start.streams, set(start.kept), failure_pipe)
        signal.set_wakeup_fd(-1)
        for signum in _TO_DEFAULT:
            signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        if start.open_files > 0:
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (start.open_files, hard))
        place = start.working_directory
        os.chdir(place)
        place = start.words[0]
        os.execvpe(place, list(start.words), dict(start.environment))  # noqa: S606 - starting programs is the purpose
    except (OSError, ValueError) as error:  # a word with a NUL byte gives a ValueError
        number = error.errno if isinstance(error, OSError) else errno.EINVAL
        os.write(failure_pipe, f"{number} {place}".encode(errors="replace"))
    finally:
        os._exit(127)


def _arrange_descriptors(streams: Sequence[int], kept: set[int], failure_pipe: int) -> None:
    # First copy the streams to other numbers than 0, 1 and 2, so that no stream is overwritten before its move.
    moved = [os.dup(descriptor) for descriptor in streams]
    for number, descriptor in enumerate(moved):
        os.dup2(descriptor, number)
    close_others({*kept, failure_pipe})
    for descriptor in kept:
        os.set_inheritable(descriptor, True)  # noqa: FBT003 - the function takes no keywords


def close_others(kept: Collection[int]) -> None:
    """Close all descriptors of this process except its standard streams and the descriptors ``kept``."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) >= _NUM_STREAMS and int(name) not in kept:
            try:
                os.close(int(name))
            except OSError:  # the descriptor of listdir itself is already closed
                continue


def start_thread(thread: Thread) -> None:
    """Start ``thread``. Raises OSError, not Python's RuntimeError, if no more threads are possible."""
    try:
        thread.start()
    except RuntimeError:
        number = thread_shortage()
        raise OSError(number, os.strerror(number)) from None


def thread_shortage() -> int:
    """Return the error number for a failed thread start: ENOMEM if address space was too small, else EAGAIN."""
    limit, stack = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_STACK))
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    has_room = limit == resource.RLIM_INFINITY or used + max(stack, _LEAST_STACK_BYTES) < limit
    return errno.EAGAIN if has_room else errno.ENOMEM


class Answer(NamedTuple):
    """The result of a program that poprun ran: its output and exit code, or why it could not run."""

    text: str  # its output on both streams; or why the program could not run
    code: int | None  # its exit code, negative for a signal; None if it could not run or took too long


def answer_of(words: Sequence[str], timeout_seconds: float) -> str | None:
    """Run the program with the argv ``words``; return all that it prints, None if it fails or takes too long."""
    (answer,) = answers_of((words,), timeout_seconds, os.environ)
    return answer.text if answer.code == 0 else None


def answers_of(
    commands: Sequence[Sequence[str]], timeout_seconds: float, environment: Mapping[str, str]
) -> list[Answer]:
    """Run all ``commands`` at the same time; return each one's output and exit code, or that it took too long."""
    deadline_seconds = time.monotonic() + timeout_seconds
    started = [_start_command(words, environment) for words in commands]
    return [
        it if isinstance(it, Answer) else _await_answer(*it, deadline_seconds, timeout_seconds) for it in started
    ]


def _start_command(words: Sequence[str], environment: Mapping[str, str]) -> Answer | tuple[int, int]:
    """Start a program; return its process id and its output's descriptor, or the error as an `Answer`."""
    reader, writer = os.pipe()
    null = os.open(os.devnull, os.O_RDONLY)
    try:
        start = ProcessStart(words, "/", environment, (null, writer, writer), signal.SIGKILL)
        return start_process(start), reader
    except OSError as error:
        os.close(reader)
        return Answer(error.strerror or str(error), None)
    finally:
        os.close(writer)
        os.close(null)


def _await_answer(pid: int, reader: int, deadline_seconds: float, timeout_seconds: float) -> Answer:
    """Wait for the end of a program, return its output and exit code; kill the program if it takes too long."""
    end = os.pidfd_open(pid)
    text = _read_all(reader, deadline_seconds).decode(errors="replace")
    is_late = not _is_ready(end, deadline_seconds)
    if is_late:
        os.killpg(pid, signal.SIGKILL)
    for descriptor in (reader, end):
        os.close(descriptor)
    _, status = os.waitpid(pid, 0)
    if is_late:
        return Answer(f"no answer within {timeout_seconds:g} s", None)
    return Answer(text, os.waitstatus_to_exitcode(status))


def _read_all(reader: int, deadline_seconds: float) -> bytes:
    answer = b""
    while _is_ready(reader, deadline_seconds) and (data := os.read(reader, _READ_BYTES)):
        answer += data
    return answer


def _is_ready(descriptor: int, deadline_seconds: float) -> bool:
    return bool(select.select((descriptor,), (), (), max(0.0, deadline_seconds - time.monotonic()))[0])
