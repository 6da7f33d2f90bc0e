"""What the processes below an agent do and use, as /proc tells.

The numbers are the kernel's (asm/unistd_64.h of x86_64, asm-generic/unistd.h for aarch64).

Standard library only: the agents run this in a bare interpreter.

Standard library only: the agents run this in a bare interpreter.
"""

import os
from collections.abc import Iterable
from typing import Final, NamedTuple

from poprun.process.tree import ProcessKey, words_of

_NUMBERS: Final = {
    "x86_64": (
        "read=0 write=1 open=2 close=3 poll=7 ioctl=16 pread64=17 pwrite64=18 readv=19 writev=20 select=23 "
        "pause=34 nanosleep=35 sendfile=40 connect=42 accept=43 sendto=44 recvfrom=45 sendmsg=46 recvmsg=47 "
        "wait4=61 semop=65 msgrcv=70 fcntl=72 flock=73 fsync=74 fdatasync=75 rt_sigtimedwait=128 "
        "rt_sigsuspend=130 futex=202 io_getevents=208 restart_syscall=219 semtimedop=220 clock_nanosleep=230 "
        "epoll_wait=232 waitid=247 openat=257 pselect6=270 ppoll=271 splice=275 epoll_pwait=281 accept4=288 "
        "io_uring_enter=426 futex_waitv=449"
    ),
    "aarch64": (
        "io_getevents=4 epoll_pwait=22 fcntl=25 ioctl=29 flock=32 openat=56 close=57 read=63 write=64 "
        "readv=65 writev=66 pread64=67 pwrite64=68 sendfile=71 pselect6=72 ppoll=73 splice=76 fsync=82 "
        "fdatasync=83 waitid=95 futex=98 nanosleep=101 clock_nanosleep=115 restart_syscall=128 "
        "rt_sigsuspend=133 rt_sigtimedwait=137 msgrcv=188 semtimedop=192 semop=193 accept=202 connect=203 "
        "sendto=206 recvfrom=207 sendmsg=211 recvmsg=212 accept4=242 wait4=260 io_uring_enter=426 "
        "futex_waitv=449"
    ),
}


def name_system_call(number: str, machine: str = "") -> str:
    """What the call ``number`` is called on ``machine`` (this one, if none is named); its number when unknown."""
    pairs = (word.split("=") for word in _NUMBERS.get(machine or os.uname().machine, "").split())
    return next((name for name, known in pairs if known == number), f"system call {number}")


_MOST_LETTERS = 100
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in an uninterruptible wait",
    "T": "stopped by a signal, SIGCONT continues it",
    "t": "stopped by a debugger",
    "Z": "ended",
    "I": "idle",
}
_STOPPED = ("T", "t")
_NO_CHANNEL = ("", "0")


def is_stopped(pid: int) -> bool:
    """Whether the process is held by a signal or a debugger: then it hears no signal."""
    return _fields(pid).get("State", "")[:1] in _STOPPED


def describe_process(pid: int) -> str:
    """One line: the process, its state, the system call and the kernel's wait channel, its threads."""
    fields = _fields(pid)
    if not fields:
        return f"process {pid} has ended"
    state = fields.get("State", "?")[:1]
    parts = [_STATES.get(state, f"in state {state}")]
    if state not in _STOPPED:
        parts[0] += _system_call(pid)
        channel = _read(pid, "wchan")
        parts += [f"wait channel {channel}"] if channel not in _NO_CHANNEL else []
    num_threads = fields.get("Threads", "1")
    if num_threads != "1":
        parts.append(f"{num_threads} threads")
    return f"process {pid}: {', '.join(parts)} ({_name(pid, fields)})"


def _name(pid: int, fields: dict[str, str]) -> str:
    name = " ".join(words_of(pid)) or fields.get("Name", "?")
    printable = "".join(letter if letter.isprintable() else " " for letter in name)
    return printable if len(printable) <= _MOST_LETTERS else f"{printable[:_MOST_LETTERS]}…"


def _system_call(pid: int) -> str:
    """The call that it is in; the kernel tells it only of processes that one may trace."""
    number = _read(pid, "syscall").partition(" ")[0]
    return f" in {name_system_call(number)}" if number.isdecimal() else ""


def _fields(pid: int) -> dict[str, str]:
    """The lines of proc_pid_status(5); none when the process is gone."""
    pairs = (line.partition(":") for line in _read(pid, "status").splitlines())
    return {name: value.strip() for name, _, value in pairs}


def _read(pid: int, file: str) -> str:
    try:
        with open(f"/proc/{pid}/{file}", encoding="utf-8", errors="replace") as stream:
            return stream.read().strip()
    except OSError:
        return ""


_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_USER_TIME_FIELD, _SYSTEM_TIME_FIELD = 11, 12
_RESIDENT_FIELD, _SHARED_FIELD = 1, 2


class Usage(NamedTuple):
    """What a tree of processes uses.

    Attributes:
        memory_bytes: Resident memory; of the processes after the first, only what they share with nobody.
        cpu_seconds: Processor time of those that live, since each began.
        num_processes: How many live.
    """

    memory_bytes: int
    cpu_seconds: float
    num_processes: int


def measure(keys: Iterable[ProcessKey]) -> Usage:
    """What the processes of ``keys`` use now, parents first; those that are gone are passed over."""
    memory_bytes, cpu_ticks, num_processes = 0, 0, 0
    for key in keys:
        try:
            with open(f"/proc/{key.pid}/statm", "rb") as file:
                pages = file.read().split()
            with open(f"/proc/{key.pid}/stat", "rb") as file:
                stat = file.read()
        except OSError:
            continue
        fields = stat[stat.rindex(b")") + 2 :].split()
        cpu_ticks += int(fields[_USER_TIME_FIELD]) + int(fields[_SYSTEM_TIME_FIELD])
        shared = int(pages[_SHARED_FIELD]) if num_processes else 0
        memory_bytes += (int(pages[_RESIDENT_FIELD]) - shared) * _PAGE_BYTES
        num_processes += 1
    return Usage(memory_bytes, cpu_ticks / _TICKS_PER_SECOND, num_processes)
