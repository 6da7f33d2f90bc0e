"""All that poprun finds out about a failed job: last words, kills by the kernel, and the probable cause."""

import errno
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from popdist.errors import name_instances
from poprun.errors import describe_error
from poprun.launch.process.limits import KillCounts
from poprun.launch.process.machine_evidence import Evidence, MemoryLimits
from poprun.makers.failures import find_device_failure
from poprun.observe.account.judgements import Verdict
from poprun.observe.account.last_words import LastWords
from poprun.observe.account.state import AGENT_KILLED, RUNTIME_KILLED, SHIM_KILLED, InstanceStatus, signal_of
from poprun.text.ranges import describe_bytes

_REFUSED: Final = re.compile(r"MemoryError|std::bad_alloc|can(?:'t|not) allocate memory", re.IGNORECASE)
_SHORTAGES: Final = {
    errno.EMFILE: re.compile(r"Too many open files|SYS_LIMITS_(?:PIPES|SOCKETS|FILES)", re.IGNORECASE),
    errno.EAGAIN: re.compile(r"Resource temporarily unavailable|SYS_LIMITS_CHILDREN", re.IGNORECASE),
}
_NO_ROOM: Final = re.compile(
    r"PMIX_ERR_FILE_WRITE_FAILURE|No space left on device|Disk quota exceeded", re.IGNORECASE
)
_NO_THREAD: Final = re.compile(r"Unable to start listen thread|thread_start failed", re.IGNORECASE)
_NO_GROUP: Final = re.compile("Default process group has not been initialized")
_THREAD_LEFT: Final = re.compile("terminate called without an active exception")
_NO_DEBUGGER: Final = "bdb.BdbQuit"  # how pdb ends a program whose input is empty
_CRASH_REPORT: Final = "Fatal Python error"
_NEARLY: Final = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """All that poprun has found out about a job that did not end well."""

    evidence: Evidence = field(default_factory=Evidence)  # facts about the machine, such as kills by the kernel
    # the last words of the instances that ended with an error, by index
    words: Mapping[int, LastWords] = field(default_factory=dict)
    launcher_words: LastWords = field(default_factory=LastWords)  # the last words of the launcher
    shortage: str = ""  # what the launcher lacked, and what to do; empty if it lacked nothing
    left_early: tuple[int, ...] = ()  # instances that had ended with 0 when the MPI launcher ended the others
    # whether the launcher has failed only because a process of the launcher was killed
    has_launcher_followed: bool = False
    verdict: Verdict = field(default_factory=Verdict)  # who is at fault
    # advice if the program ran under another Python than poprun's, which lacks a module; or empty
    other_python: str = ""

    def words_of(self, instance: int) -> LastWords:
        """Return the last words of ``instance``: the lines with which the program explained its end."""
        return self.words.get(instance, LastWords())

    def reason_of(self, failed: InstanceStatus) -> str:
        """Return the probable reason for the failure ``failed``, in words; "" if its error message explains it."""
        if self.shortage and failed.problem in (AGENT_KILLED, SHIM_KILLED):
            return self.shortage
        if self.left_early and failed.problem == SHIM_KILLED:
            return (
                f"probably by the MPI launcher, which ends a job when one process ends without MPI_Finalize: "
                f"{name_instances(self.left_early)} had ended with 0"
            )
        if self.other_python and failed.exit_code == 1:
            return self.other_python
        words = self.words_of(failed.index)
        if words.summary.startswith(_NO_DEBUGGER) and failed.index:
            return "a debugger reads the input, which only instance 0 has: debug there only, or with poprun -n 1"
        return hint(failed, words, failed.machine_evidence or self.evidence)


def find_shortage(launcher_output: Sequence[str], limits: MemoryLimits) -> str:
    """Return which resource the launcher lacked, such as processes, and the cure; "" if its output shows none.

    A launcher that cannot start a thread may lack a process, or address space for the thread's stack. If
    ``limits`` limit the address space, the text names both.
    """
    numbers = [number for number, pattern in _SHORTAGES.items() if any(map(pattern.search, launcher_output))]
    if any(map(_NO_ROOM.search, launcher_output)):
        return "it cannot write its temporary files: make room in TMPDIR, or set TMPDIR to another folder"
    if not numbers and any(map(_NO_THREAD.search, launcher_output)):
        is_limited = limits.address_space_bytes is not None
        numbers = [errno.ENOMEM, errno.EAGAIN] if is_limited else [errno.EAGAIN]
        return "; or ".join(map(describe_error, numbers))
    return describe_error(numbers[0]) if numbers else ""


def hint(failed: InstanceStatus, words: LastWords, evidence: Evidence) -> str:
    """Return the likely reason for the failure ``failed`` on its host, such as lack of memory; "" if unknown."""
    limits = evidence.limits
    if failed.problem in (SHIM_KILLED, RUNTIME_KILLED):  # the end of the program then shows no reason
        return ""
    signum = signal.SIGKILL if failed.problem == AGENT_KILLED else signal_of(failed.exit_code or 0)
    if signum == signal.SIGKILL:
        return _killed(failed, evidence)
    if signum == signal.SIGBUS:
        return _bus_error(limits)
    if signum == signal.SIGXCPU:
        return f"its processor time was over{_after_limit(limits.cpu_seconds)}"
    if signum == signal.SIGILL:
        return "probably built for another CPU: this one lacks an instruction"
    if signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        return "sent by somebody other than poprun, such as a batch system"
    if refusal := _refused(failed, words, limits):
        return refusal
    if evidence.killed.in_group:
        return f"perhaps out of memory: {_killed_in_group(evidence)}"
    if signum == signal.SIGSEGV and not words.summary.startswith(_CRASH_REPORT):
        return "PYTHONFAULTHANDLER=1 makes Python tell where"
    return ""


def _killed(failed: InstanceStatus, evidence: Evidence) -> str:
    limits, peak_bytes = evidence.limits, failed.memory.peak_bytes
    held = f"; it held up to {describe_bytes(peak_bytes)}" if peak_bytes else ""
    if evidence.killed.in_group:
        return f"probably out of memory: {_killed_in_group(evidence)}{held}"
    if evidence.killed.on_machine:
        reason = f"out of memory: the kernel killed {_processes(evidence.killed.on_machine)} for want of memory"
        # the number of the group includes kills for which the machine, and not the group, lacked memory
        is_elsewhere = evidence.killed.in_group is not None
        return (
            f"perhaps {reason}, none of this control group{held}" if is_elsewhere else f"probably {reason}{held}"
        )
    most = min(limit for limit in (limits.group_bytes, limits.machine_bytes, 2**64) if limit is not None)
    if peak_bytes > _NEARLY * most:
        return f"probably out of memory: it held up to {describe_bytes(peak_bytes)} of {describe_bytes(most)}"
    if limits.cpu_seconds is not None:
        return f"perhaps its processor time was over{_after_limit(limits.cpu_seconds)}{held}"
    if evidence.killed == KillCounts():
        return f"by somebody other than poprun, or by the kernel for want of memory{held}"
    return f"by somebody other than poprun, and not by the kernel for want of memory{held}"


def _killed_in_group(evidence: Evidence) -> str:
    limit = evidence.limits.group_bytes
    which = "" if limit is None else f", which may use {describe_bytes(limit)}"
    return f"the kernel killed {_processes(evidence.killed.in_group or 0)} of this control group{which}"


def _bus_error(limits: MemoryLimits) -> str:
    size, free = limits.shared_bytes, limits.shared_free_bytes
    if size is None or free is None:
        return "perhaps a file that it had mapped became shorter"
    shared = f"/dev/shm, which has {describe_bytes(size)}"
    if free < (1 - _NEARLY) * size:
        return f"probably no space left in {shared}"
    return f"perhaps {shared}, was full, or a file that it had mapped became shorter"


def _refused(failed: InstanceStatus, words: LastWords, limits: MemoryLimits) -> str:
    lines = (words.summary, *words.lines)
    if any(map(_NO_GROUP.search, lines)):
        return (
            "with popdist, leave out DistributedDataParallel, as popdist.ReplicatedModel takes its place; "
            "popdist.init(torch_distributed=True) makes a process group of torch"
        )
    if any(map(_THREAD_LEFT.match, lines)):
        return (
            "a thread was left when the program ended, as gloo's threads are: call "
            "torch.distributed.destroy_process_group() in the program's last line"
        )
    if (failure := find_device_failure(lines)) is not None:
        return failure.said
    if not _REFUSED.search(" ".join(lines)):
        return ""
    held = f", and held up to {describe_bytes(failed.memory.peak_bytes)}" if failed.memory.peak_bytes else ""
    if limits.address_space_bytes is not None:
        return f"out of memory: ulimit -v lets a process have {describe_bytes(limits.address_space_bytes)}{held}"
    return f"out of memory: it asked for more than there is{held}"


def _after_limit(seconds: int | None) -> str:
    return "" if seconds is None else f": ulimit -t is {seconds} s"


def _processes(number: int) -> str:
    return "a process" if number == 1 else f"{number} processes"
