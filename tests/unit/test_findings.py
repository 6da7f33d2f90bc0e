"""What is said of a program that could not say itself why it ended."""

import signal
from dataclasses import replace

import pytest

from poprun.launch.process.limits import KillCounts
from poprun.launch.process.machine_evidence import Evidence, MemoryLimits
from poprun.observe.account.last_words import LastWords
from poprun.observe.account.state import AGENT_KILLED, InstanceStatus, MemoryCurve
from poprun.observe.judge.findings import Findings, find_shortage, hint

GIBIBYTE = 2**30
NOTHING_SAID = LastWords()
UNKNOWN = Evidence()
COUNTED = Evidence(killed=KillCounts(in_group=0, on_machine=0))
KILLED_IN_GROUP = Evidence(
    killed=KillCounts(in_group=1, on_machine=1),
    limits=MemoryLimits(group_bytes=12 * GIBIBYTE, machine_bytes=64 * GIBIBYTE),
)
KILLED_ELSEWHERE = Evidence(killed=KillCounts(in_group=0, on_machine=2))
ELSEWHERE = "perhaps out of memory: the kernel killed 2 processes for want of memory, none of this control group"
THE_KERNEL_KILLED = "the kernel killed a process of this control group, which may use 12.0 GiB"
LARGE = MemoryCurve().after(1.0, 12_670_000_000)


def ended(code: int, memory: MemoryCurve = LARGE, problem: str = "") -> InstanceStatus:
    """An instance that ended with ``code``."""
    return InstanceStatus(index=0, exit_code=code, memory=memory, problem=problem)


def limited(**limits: int) -> Evidence:
    """A machine of which the limits are known, too."""
    return Evidence(killed=COUNTED.killed, limits=MemoryLimits(**limits))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[vm:9] PMIX ERROR: PMIX_ERR_SYS_LIMITS_PIPES in file x.c at line 119", "too many open files"),
        ("[proxy:0@vm] pipe error (Too many open files)", "too many open files"),
        ("BlockingIOError: [Errno 11] Resource temporarily unavailable", "too many processes"),
        ("[prterun-vm-9@0,0] Unable to start listen thread", "too many processes"),
        ("PMIX ERROR: PMIX_ERR_FILE_WRITE_FAILURE in file x.c", "it cannot write its temporary files"),
        ("mpiexec: killing job", ""),
    ],
)
def test_what_a_launcher_ran_out_of(line: str, said: str) -> None:
    """Each runtime has words of its own for it."""
    assert find_shortage(["before", line, "after"], MemoryLimits()).partition(":")[0] == said


def test_a_launcher_without_a_thread_under_a_limit_of_address_space() -> None:
    """Nothing tells which of the two was missing, so that both are named."""
    limits = MemoryLimits(address_space_bytes=2**34)

    said = find_shortage(["[prterun-vm-9@0,0] Unable to start listen thread"], limits)

    assert said.startswith("too little address space or memory: raise `ulimit -v`")
    assert "; or too many processes: raise the limit with `ulimit -u`" in said


@pytest.mark.parametrize(("instance", "said"), [(0, ""), (1, "a debugger reads the input, which only instance 0")])
def test_a_debugger_without_an_input(instance: int, said: str) -> None:
    """Where instance 0 quits its own there is nothing to say."""
    findings = Findings(words={instance: LastWords(summary="bdb.BdbQuit")})

    assert findings.reason_of(replace(ended(1), index=instance))[:49] == said


@pytest.mark.parametrize(
    ("status", "evidence", "said"),
    [
        (
            ended(-9),
            KILLED_IN_GROUP,
            f"probably out of memory: {THE_KERNEL_KILLED}; it held up to 11.8 GiB",
        ),
        (
            ended(-9, problem=AGENT_KILLED),
            KILLED_ELSEWHERE,
            f"{ELSEWHERE}; it held up to 11.8 GiB",
        ),
        (
            replace(ended(-signal.SIGKILL), memory=LARGE),
            Evidence(killed=KillCounts(in_group=None, on_machine=2)),
            "probably out of memory: the kernel killed 2 processes for want of memory; it held up to 11.8 GiB",
        ),
        (
            ended(137),
            limited(group_bytes=12 * GIBIBYTE),
            "probably out of memory: it held up to 11.8 GiB of 12.0 GiB",
        ),
        (
            ended(-9),
            COUNTED,
            "by somebody other than poprun, and not by the kernel for want of memory; it held up to 11.8 GiB",
        ),
        (
            ended(-9, memory=MemoryCurve()),
            UNKNOWN,
            "by somebody other than poprun, or by the kernel for want of memory",
        ),
        (
            ended(-9, memory=MemoryCurve()),
            limited(cpu_seconds=60),
            "perhaps its processor time was over: ulimit -t is 60 s",
        ),
        (ended(-signal.SIGXCPU), limited(cpu_seconds=60), "its processor time was over: ulimit -t is 60 s"),
        (
            ended(-signal.SIGBUS),
            limited(shared_bytes=64 * 2**20, shared_free_bytes=0),
            "probably no space left in /dev/shm, which has 64.0 MiB",
        ),
        (
            ended(-signal.SIGBUS),
            limited(shared_bytes=64 * 2**20, shared_free_bytes=2**25),
            "perhaps /dev/shm, which has 64.0 MiB, was full, or a file that it had mapped became shorter",
        ),
        (ended(-signal.SIGBUS), UNKNOWN, "perhaps a file that it had mapped became shorter"),
        (ended(-signal.SIGILL), UNKNOWN, "probably built for another CPU: this one lacks an instruction"),
        (ended(-signal.SIGTERM), UNKNOWN, "sent by somebody other than poprun, such as a batch system"),
        (ended(-signal.SIGSEGV), UNKNOWN, "PYTHONFAULTHANDLER=1 makes Python tell where"),
        (
            ended(1),
            KILLED_IN_GROUP,
            f"perhaps out of memory: {THE_KERNEL_KILLED}",
        ),
        (ended(1), KILLED_ELSEWHERE, ""),
        (ended(-signal.SIGABRT), COUNTED, ""),
    ],
)
def test_a_signal_is_explained(status: InstanceStatus, evidence: Evidence, said: str) -> None:
    """By what the kernel has counted and what the instance held; never more certain than that."""
    assert hint(status, NOTHING_SAID, evidence) == said


def test_an_allocation_that_was_refused_is_explained() -> None:
    """With the limit, if there is one."""
    words = LastWords(summary="MemoryError")

    assert hint(ended(1), words, limited(address_space_bytes=4 * GIBIBYTE)) == (
        "out of memory: ulimit -v lets a process have 4.0 GiB, and held up to 11.8 GiB"
    )
    assert hint(ended(-signal.SIGABRT, memory=MemoryCurve()), LastWords(lines=("std::bad_alloc",)), COUNTED) == (
        "out of memory: it asked for more than there is"
    )


def test_a_crash_that_told_where_needs_no_hint() -> None:
    """Python's own report of a crash is there."""
    assert hint(ended(-11), LastWords(summary="Fatal Python error: Segmentation fault"), COUNTED) == ""


def test_a_thread_that_was_left_at_the_end_is_named() -> None:
    """With the call that ends gloo's threads; another abort of C++ says for itself why it came."""
    left = LastWords(lines=("terminate called without an active exception",))
    thrown = LastWords(lines=("terminate called after throwing an instance of 'int'",))

    assert "destroy_process_group() in the program's last line" in hint(ended(-signal.SIGABRT), left, UNKNOWN)
    assert hint(ended(-signal.SIGABRT), thrown, UNKNOWN) == ""


def test_a_group_of_torch_that_popdist_does_not_make_is_named() -> None:
    """The text of torch asks for another call than the one that a program of popdist needs."""
    said = (
        "ValueError: Default process group has not been initialized, please make sure to call init_process_group."
    )

    assert "popdist.init(torch_distributed=True)" in hint(ended(1), LastWords(summary=said), UNKNOWN)
