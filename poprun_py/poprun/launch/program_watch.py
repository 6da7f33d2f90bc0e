"""The measurements that an agent makes of its program: the resources it uses, its progress, and its stacks.

The *progress page* is memory that the program inherits (`popdist.ground.progress`) and in which it writes its
progress; the agent sends the bytes to poprun. On the page a Python program names the signal at which it writes
its stacks behind the page (`popdist.startup.stack_signal`); other processes are described from /proc. Standard
library only: a bare interpreter loads this module in each shim.
"""

from __future__ import annotations

import os
import time
from _struct import calcsize, unpack

from poprun.launch.pressure import count_kills, measure_pressure, read_kernel_file
from poprun.launch.process.process_tree import (
    ProcessKey,
    catches,
    key_of,
    own_tree,
    send,
    unreaped_children,
    words_of,
)

TYPE_CHECKING = False  # not imported from typing, which loads slowly
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Collection, Iterable
    from typing import Any, Final

    from poprun.launch.messages.control import Message
    from poprun.launch.recorder import RecorderQuestion
else:
    import _signal as signal  # the module signal would load enum and more

# The numbers are from the kernel: asm/unistd_64.h of x86_64, asm-generic/unistd.h for aarch64.
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

_RUNNING = "R"
_STOPPED = ("T", "t")
_NO_CHANNEL = ("", "0")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_MAJOR_FAULTS_FIELD, _USER_TIME_FIELD, _SYSTEM_TIME_FIELD = 9, 11, 12
_RESIDENT_FIELD, _SHARED_FIELD = 1, 2
LONGEST_SECONDS = 2.0  # how long a program may take to write its stacks
_STILL_SECONDS = 0.1
_MOST_BYTES = 64 * 1024
_MOST_PROCESSES = 8
_RECORD = b"{"  # beginning of the record that a failing program writes in place of stacks
_CRASH = b"Fatal Python error: "  # beginning of the stacks that Python writes when a signal ends it
_FULL_BYTES = 64 * 1024  # a disk with less free space counts as full
_MEASUREMENT_SECONDS = 1.0
_MEASUREMENTS_PER_SEARCH = 5
_PAUSE_SECONDS = 7 * 24 * 3600.0
_PAGE_NAME = "poprun-progress"
_LOCK_WORDS = 6
_TEXT_AT = os.sysconf("SC_PAGE_SIZE")


def name_system_call(number: str, machine: str = "") -> str:
    """Return the name of the system call ``number`` on the processor type ``machine``; "" means this machine."""
    pairs = (word.split("=") for word in _NUMBERS.get(machine or os.uname().machine, "").split())
    return next((name for name, known in pairs if known == number), f"system call {number}")


def is_stopped(pid: int) -> bool:
    """Whether the process ``pid`` is stopped by a signal or a debugger, so that it handles no signals."""
    return _fields(pid).get("State", "")[:1] in _STOPPED


def describe_process(pid: int) -> str:
    """Return a line about the process ``pid``: its state, system call, wait channel in the kernel, and threads."""
    fields = _fields(pid)
    if not fields:
        return f"process {pid} has ended"
    state = fields.get("State", "?")[:1]
    parts = [_STATES.get(state, f"in state {state}")]
    if state not in _STOPPED:
        parts[0] += _system_call(pid) if state != _RUNNING else ""
        channel = read_kernel_file(f"/proc/{pid}/wchan").strip()
        parts += [f"wait channel {channel}"] if channel not in _NO_CHANNEL and state != _RUNNING else []
    num_threads = fields.get("Threads", "1")
    if num_threads != "1":
        parts.append(f"{num_threads} threads")
    return f"process {pid}: {', '.join(parts)} ({_name(pid, fields)})"


def _name(pid: int, fields: dict[str, str]) -> str:
    name = " ".join(words_of(pid)) or fields.get("Name", "?")
    printable = "".join(letter if letter.isprintable() else " " for letter in name)
    return printable if len(printable) <= _MOST_LETTERS else f"{printable[:_MOST_LETTERS]}…"


def _system_call(pid: int) -> str:
    """Return the system call in which the process ``pid`` waits; empty if this user may not trace the process."""
    number = read_kernel_file(f"/proc/{pid}/syscall").partition(" ")[0]
    return f" in {name_system_call(number)}" if number.isdecimal() else ""


def _fields(pid: int) -> dict[str, str]:
    """Return the fields of the file /proc/PID/status for the process ``pid``; {} if the process has ended."""
    pairs = (line.partition(":") for line in read_kernel_file(f"/proc/{pid}/status").splitlines())
    return {name: value.strip() for name, _, value in pairs}


def find_locks(pids: Collection[int], locks: str = "") -> Message:
    """Return the file locks that the processes ``pids`` hold, and those they wait for, each with its holder.

    ``locks`` is the text of proc_locks(5), whose line of a waiting process has an arrow behind its number. The
    number of a file has the host's name before it, since other hosts have files of the same number.
    """
    held_files: list[str] = []
    awaited: dict[str, str] = {}
    holders: dict[str, int] = {}
    host = os.uname().nodename
    for line in (locks or read_kernel_file("/proc/locks")).splitlines():
        words = line.split()
        is_waiting = words[1:2] == ["->"]
        if len(words) < _LOCK_WORDS + is_waiting:
            continue
        pid, file = words[4 + is_waiting], f"{host} {words[5 + is_waiting]}"
        if is_waiting and int(pid) in pids:
            holder = holders.get(file, 0)  # the kernel names no process if the lock belongs to an open file
            awaited[file] = describe_process(holder) if holder > 0 else "a process that the kernel does not name"
        elif not is_waiting:
            holders[file] = int(pid)
            held_files += [file] if int(pid) in pids else []
    return {"held_locks": held_files, "awaited_locks": awaited}


def measure(keys: Iterable[ProcessKey]) -> dict[str, float]:
    """Return the memory and processor time of all processes ``keys`` together, without ended processes."""
    # the memory that processes share counts only in the first process
    memory_bytes, cpu_ticks, num_processes, num_faults, num_in_disk = 0, 0, 0, 0, 0
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
        num_faults += int(fields[_MAJOR_FAULTS_FIELD])
        num_in_disk += fields[0] == b"D"
        shared = int(pages[_SHARED_FIELD]) if num_processes else 0
        memory_bytes += (int(pages[_RESIDENT_FIELD]) - shared) * _PAGE_BYTES
        num_processes += 1
    cpu_seconds = cpu_ticks / _TICKS_PER_SECOND
    return {
        "memory_bytes": memory_bytes,
        "cpu_seconds": cpu_seconds,
        "num_processes": num_processes,
        "major_faults": num_faults,
        "num_in_disk_wait": num_in_disk,
    }


class StackQuestion:
    """A request to a program and its helper processes to write their stacks into memory shared with poprun."""

    def __init__(self, page: int, text_at: int, pid: int, signum: int, most_helpers: int = 0) -> None:
        self._page = page
        self._text_at = text_at
        self._signum = signum
        self._deadline_seconds = time.monotonic() + LONGEST_SECONDS
        self._num_bytes = 0
        self._grown_at_seconds = 0.0
        self._text = ""
        self._helpers: list[Message] = []
        self._asked_process: ProcessKey | None = None
        self._helpers_to_ask = [key for key in own_tree() if key.pid != pid][:most_helpers] if pid else []
        self._is_about_helpers = False
        self._ask(pid)

    def answer(self) -> Message | None:
        """Return the message for poprun with all requested stacks; None while a process may still write some."""
        while not self._is_about_helpers or self._asked_process is not None or self._helpers_to_ask:
            if self._asked_process is not None and not self._is_complete(time.monotonic()):
                return None
            self._ask_next()
        processes = [] if self._text else _describe_tree()
        event: Message = {"event": "stacks", "text": self._text, "processes": processes, "helpers": self._helpers}
        tree = {key.pid for key in own_tree()}
        return {**event, **find_locks(tree), "ended_children": unreaped_children(tree)}

    def _ask(self, pid: int) -> None:
        """Send the process ``pid`` the signal to write its stacks, unless it is stopped or has no handler."""
        self._asked_process = _process_to_ask(self._page, pid, self._signum)
        self._num_bytes = 0
        if self._asked_process is not None:
            os.ftruncate(self._page, self._text_at)
            os.lseek(self._page, self._text_at, os.SEEK_SET)  # the program's descriptor shares the offset
            send([self._asked_process], self._signum)

    def _ask_next(self) -> None:
        """Store the stacks that the asked process has written, and ask the next helper process for its stacks."""
        text = b""
        if self._asked_process is not None:
            text = os.pread(self._page, _MOST_BYTES, self._text_at)
            if not text.startswith(_RECORD):
                os.ftruncate(self._page, self._text_at)
                os.lseek(self._page, self._text_at, os.SEEK_SET)  # where Python writes its stacks if it crashes
        stacks = "" if text.startswith(_RECORD) else text.decode(errors="replace")
        if self._is_about_helpers:
            self._helpers[-1]["text"] = stacks
        else:
            self._text, self._is_about_helpers = stacks, True
        self._asked_process = None
        if self._helpers_to_ask:
            pid = self._helpers_to_ask.pop(0).pid
            self._helpers.append({"pid": pid, "text": "", "process": describe_process(pid)})
            self._ask(pid)

    def _is_complete(self, now_seconds: float) -> bool:
        num_bytes = os.fstat(self._page).st_size - self._text_at
        if num_bytes > self._num_bytes:
            self._num_bytes, self._grown_at_seconds = num_bytes, now_seconds
        is_still = num_bytes > 0 and now_seconds >= self._grown_at_seconds + _STILL_SECONDS
        return is_still or now_seconds >= self._deadline_seconds


class ProgramQuestion:
    """A request to a program for its stacks and for the collectives in torch's flight recorder."""

    def __init__(
        self,
        stacks: StackQuestion | None,
        recorder: RecorderQuestion | None,
        to_event: Callable[[Message, Message], Message],
    ) -> None:
        self._stacks = stacks
        self._recorder = recorder
        self._to_event = to_event  # makes the event from both answers
        self._stacks_event: Message | None = {} if stacks is None else None
        self._record: Message | None = {} if recorder is None else None

    def answer(self) -> Message | None:
        """Return the message for poprun with stacks and collectives; None until the program has answered."""
        if self._recorder is not None and self._record is None:
            self._record = self._recorder.answer()
        if self._stacks is not None and self._stacks_event is None:
            self._stacks_event = self._stacks.answer()
        if self._stacks_event is None or self._record is None:
            return None
        return self._to_event(self._stacks_event, self._record)


def _is_full(place: str) -> bool:
    """Whether the disk with the folder ``place`` has almost no free bytes, or no room for one more file."""
    try:
        disk = os.statvfs(place)
    except OSError:
        return False
    return disk.f_bavail * disk.f_frsize < _FULL_BYTES or (disk.f_files > 0 and disk.f_favail == 0)


def _describe_tree() -> list[str]:
    """Return one line about each process of the program, parents first; at most 8, and the number of others."""
    tree = own_tree()
    lines = [describe_process(key.pid) for key in tree[:_MOST_PROCESSES]]
    num_left = len(tree) - len(lines)
    return [*lines, f"and {num_left} more processes"] if num_left else lines


def _process_to_ask(page: int, pid: int, signum: int) -> ProcessKey | None:
    """Return the id and start time of the process ``pid`` if it can write its stacks: it is a running descendant,
    handles ``signum``, and has open the memory file ``page``, into which it writes. Return None if not.
    """
    key = key_of(pid) if pid else None
    if key is None or key not in own_tree() or not catches(pid, signum) or is_stopped(pid):
        return None
    try:
        its_page, own_page = os.stat(f"/proc/{pid}/fd/{page}"), os.fstat(page)
    except OSError:
        return None
    return key if os.path.samestat(its_page, own_page) else None


class ProgramWatch:
    """The measurements of a program by its parent process, the agent: progress, and use of resources."""

    _page: int  # the descriptor of the progress page, from `open_page` on

    def __init__(self) -> None:
        self._order: dict[str, Any] = {}  # the ``start`` order
        self._places: list[str] = []  # folders in which the program writes files
        self._numbers: int | None = None  # the descriptor of the pipe of numbers; None if there is none
        self._kills: list[int | None] = []
        self._unfinished_line = b""
        self._question: ProgramQuestion | None = None
        self._counters: Message = {}
        self._tree: list[ProcessKey] = []
        self._num_measurements = 0
        self._next_seconds = 0.0

    def open_page(self, order: dict[str, Any]) -> int:
        """Create the progress page, memory in which the program writes its progress; return its descriptor."""
        self._order = order
        self._page = os.memfd_create(_PAGE_NAME)
        os.ftruncate(self._page, _TEXT_AT)
        return self._page

    def open_numbers(self) -> int:
        """Create a pipe for numbers that the program reports, such as the loss; return its end for writing."""
        self._numbers, writer = os.pipe()
        os.set_blocking(self._numbers, False)
        os.set_blocking(writer, False)
        return writer

    def begin(self, temporary: str) -> None:
        """Begin to measure the started program; ``temporary`` is the program's folder for temporary files."""
        self._places = [self._order["working_directory"], temporary, "/dev/shm"]
        self._set_next_measurement()
        self._kills = count_kills(read_kernel_file("/proc/self/cgroup"))

    def machine_event(self) -> Message:
        """Return a message for poprun: how many processes the kernel killed on this host, and memory limits."""
        from poprun.launch.process.limits import KillCounts
        from poprun.launch.process.machine_evidence import evidence_since

        evidence = evidence_since(KillCounts(*self._kills))
        limits = {name: getattr(evidence.limits, name) for name in evidence.limits.__slots__}
        return {"event": "machine", "killed": list(evidence.killed), "limits": limits}

    def pause_or_resume(self, signum: int) -> None:
        """Pause the measurements at SIGSTOP, because a stopped poprun reads none; resume them at SIGCONT."""
        if signum == signal.SIGSTOP:
            self._next_seconds = time.monotonic() + _PAUSE_SECONDS
        elif signum == signal.SIGCONT:
            self._set_next_measurement()

    def _set_next_measurement(self) -> None:
        """Set the next measurement to the next whole second, so that all agents measure at the same time."""
        self._next_seconds = time.monotonic() + _MEASUREMENT_SECONDS - time.time() % _MEASUREMENT_SECONDS

    def is_due(self) -> bool:
        """Whether it is time for the next measurement of the program."""
        return time.monotonic() >= self._next_seconds

    def patience_seconds(self) -> float:
        """Return the number of seconds until the next measurement of the program."""
        return max(0.0, self._next_seconds - time.monotonic())

    def last_event(self) -> Message:
        """Return the message for poprun with the last progress that the program wrote before its end."""
        return {"event": "stats", "progress": self._read_page(), **self._read_numbers()}

    def remains(self) -> Message:
        """Return evidence about a failed program: its last collectives or its crash stacks, and full disks."""
        evidence: Message = {"full_disks": [place for place in self._places if _is_full(place)]}
        text = os.pread(self._page, os.fstat(self._page).st_size, _TEXT_AT)
        if text.startswith(_RECORD):
            from poprun.launch.recorder import cut_record

            evidence["recorder"] = cut_record(text)
        elif text.startswith(_CRASH):
            evidence["crash"] = text[:_MOST_BYTES].decode(errors="replace")
        return evidence

    def measure(self) -> Message:
        """Measure the program; return the message for poprun with the program's memory and processor time, its
        progress, and the numbers that the program has reported, such as the loss.
        """
        self._set_next_measurement()
        if self._num_measurements % _MEASUREMENTS_PER_SEARCH == 0:
            self._tree = own_tree()
            # the start order names the module that reads the counters
            reader = __import__(self._order["counters"], fromlist=("read_counters",))
            self._counters = reader.read_counters(self._read_announcement()[0])
        self._num_measurements += 1
        progress = self._read_page()  # read first, because progress changes fastest
        pressure = measure_pressure(self._read_announcement()[0])
        facts = {**measure(self._tree), **pressure, "counters": self._counters}
        return {"event": "stats", **facts, "progress": progress, **self._read_numbers()}

    @property
    def is_asked(self) -> bool:
        """Whether the program has not yet answered a request for its stacks or its collectives."""
        return self._question is not None

    def answer(self) -> Message | None:
        """Return the message for poprun with the program's stacks or collectives; None before its answer."""
        event = None if self._question is None else self._question.answer()
        if event:
            self._question = None
        return event

    def ask_for_stacks(self, most_helpers: int) -> None:
        """Request the stacks of the program and of at most ``most_helpers`` helper processes, and the collectives
        in torch's flight recorder. :meth:`answer` returns the answer later.
        """
        self._question = ProgramQuestion(
            self._question_for_stacks(most_helpers),
            self._question_for_recorder(is_about_moments=False),
            lambda stacks, record: {**stacks, "recorder": record},
        )

    def ask_for_calls(self, most_helpers: int) -> None:
        """Request the times of the program's last collectives; if ``most_helpers`` is above 0, also the stacks of
        the program and of at most so many helper processes. :meth:`answer` returns the answer later.
        """
        self._question = ProgramQuestion(
            self._question_for_stacks(most_helpers) if most_helpers else None,
            self._question_for_recorder(is_about_moments=True),
            lambda stacks, groups: {
                "event": "calls",
                "groups": groups,
                "page": os.pread(self._page, _TEXT_AT, 0).hex(),
                "stacks": stacks,
            },
        )

    def uses_jax(self) -> bool:
        """Whether the program uses JAX: it has asked for the address of JAX's coordinator in the job."""
        return self._read_hook_report()[1]

    def _question_for_stacks(self, most_helpers: int) -> StackQuestion:
        pid, signum = self._read_announcement()
        return StackQuestion(self._page, _TEXT_AT, pid, signum, most_helpers)

    def _question_for_recorder(self, *, is_about_moments: bool) -> RecorderQuestion | None:
        """Return a request to torch's flight recorder; None if the program has no recorder, or is stopped."""
        pid, descriptor = self._read_announcement()[0], self._read_hook_report()[0]
        if not descriptor or is_stopped(pid):
            return None
        from poprun.launch.recorder import RecorderQuestion

        return RecorderQuestion(pid, descriptor, is_about_moments=is_about_moments)

    def _read_announcement(self) -> tuple[int, int]:
        """Return the id of the program's Python process and the signal that requests its stacks; else 0, 0."""
        at, form = self._order["announcement_at"], self._order["announcement_format"]
        pid, signum = unpack(form, os.pread(self._page, calcsize(form), at))
        return pid, signum

    def _read_hook_report(self) -> tuple[int, bool]:
        """Return the program's descriptor for torch's flight recorder (0: none), and whether it uses JAX."""
        descriptor, uses_jax = unpack("=i?", os.pread(self._page, calcsize("=i?"), self._order["recorder_at"]))
        return descriptor, uses_jax

    def _read_page(self) -> str:
        return os.pread(self._page, self._order["progress_bytes"], 0).hex()

    def _read_numbers(self) -> Message:
        """Return the program's newly reported numbers, such as the loss, and the time of this read; {} if none."""
        try:
            data = os.read(self._numbers, _MOST_BYTES) if self._numbers is not None else b""
        except BlockingIOError:
            return {}
        lines, _, self._unfinished_line = (self._unfinished_line + data).rpartition(b"\n")
        return {"numbers": lines.decode(errors="replace"), "read_at_seconds": time.monotonic()} if lines else {}
