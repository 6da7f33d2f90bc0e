"""What a process does at the moment, as far as /proc tells: for programs that show no stacks of their own.

Standard library only: the agents run this in a bare interpreter.
"""

from poprun.launch.system_calls import name_system_call
from poprun.process.tree import words_of

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
