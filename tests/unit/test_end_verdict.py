"""Whose failure ended a job, from what real programs have said and left behind (torch 2.13, gloo).

Holds poprun.makers.failures and poprun.observe.judge.job_end.
"""

import signal
from collections.abc import Mapping
from dataclasses import replace

import pytest

from poprun.launch.process.machine_evidence import Evidence
from poprun.observe.account.evidence import Call, GroupRecord, InstanceEvidence, StackFrame, Stacks
from poprun.observe.account.judgements import Cause, Verdict
from poprun.observe.account.last_words import LastWords, last_words
from poprun.observe.account.state import HOST_LOST, InstanceState, InstanceStatus
from poprun.observe.judge.end_verdict import awaits_culprit, combine, find_verdict_of_end, is_torn
from poprun.observe.judge.findings import Findings, hint
from poprun.observe.judge.job_end import JobEnd, exit_code, failure_at_fault

CLOSED = (
    "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by "
    "peer [127.0.0.1]:16044. This is typically caused by a remote worker crashing."
)
RESET = (
    "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error "
    "[127.0.0.1]:52623: Connection reset by peer. This is typically caused by a remote worker hanging."
)
LATE = (
    "RuntimeError: [/__w/gloo/transport/tcp/unbound_buffer.cc:72] Timed out waiting 1800000ms for recv operation"
)
LOST = (
    "popdist.errors.BackendError: instance 0, in barrier(): the connection to instance 1 was closed: it ended or "
    "was lost"
)
WORKER = "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed. "
SIZES = (
    "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
    "  what():  [enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 212 vs 8. Received data size "
    "doesn't match expected size. Is there a distributed collective mismatch in your code?"
)
PARAMETERS = (
    "RuntimeError: [1]: params[0] in this process with sizes [7] appears not to match sizes of the same param in "
    "process 0."
)
BROUGHT = (
    "popdist.errors.CollectiveError: the ranks are not in the same collective:\n"
    "  rank{}: all_reduce (sum) of 4 float32\n"
    "  rank {}: all_reduce (sum) of 5 float32"
)
MONITORED = "RuntimeError: Rank 2 failed to pass monitoredBarrier in 3000 ms"
MODELS = (
    "RuntimeError: DDP expects same model across all ranks, but Rank {} has {} params, while rank {} has "
    "inconsistent {} params."
)
LISTENS = (
    "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. "
    "port: 37369, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"
)
BROKEN = "ConnectionResetError: [Errno 104] Connection reset by peer"


def traceback(message: str, file: str = "train.py", line: int = 7) -> LastWords:
    """What Python prints of an exception that nobody caught."""
    frame = f'  File "{file}", line {line}, in <module>'
    return last_words(["Traceback (most recent call last):", frame, "    work()", *message.splitlines()])


def ended(
    index: int, code: int | None, at_seconds: float = 1.0, *, stopped: bool = False, problem: str = ""
) -> InstanceStatus:
    """An instance that has ended."""
    return InstanceStatus(
        index=index,
        state=InstanceState.ENDED,
        exit_code=code,
        exited_at_seconds=at_seconds,
        was_stopped=stopped,
        problem=problem,
    )


STOPPED = ended(0, -signal.SIGTERM, 2.0, stopped=True)
VALUE = traceback("ValueError: bad batch")

Row = tuple[str, list[InstanceStatus], Mapping[int, LastWords], Cause, tuple[int, ...], tuple[int, ...]]
TABLE: list[Row] = [
    ("an exception", [STOPPED, ended(1, 1)], {1: VALUE, 0: traceback(CLOSED)}, Cause.EXCEPTION, (1,), ()),
    (
        "a victim ends first",
        [ended(0, 1, 1.0), ended(1, 1, 2.0)],
        {0: traceback(CLOSED), 1: VALUE},
        Cause.EXCEPTION,
        (1,),
        (0,),
    ),
    (
        "a victim ends first, and the culprit is stopped while it ends",
        [ended(0, 1, 1.0), ended(1, -15, 2.0, stopped=True)],
        {0: traceback(LOST), 1: VALUE},
        Cause.EXCEPTION,
        (1,),
        (0,),
    ),
    ("a code", [STOPPED, ended(1, 3)], {1: LastWords(), 0: traceback(RESET)}, Cause.EXIT, (1,), ()),
    ("a signal", [STOPPED, ended(1, -11)], {}, Cause.SIGNAL, (1,), ()),
    ("a worker is killed", [STOPPED, ended(1, 1)], {1: traceback(WORKER)}, Cause.HELPER, (1,), ()),
    (
        "a worker is gone",
        [STOPPED, ended(1, 1)],
        {1: traceback(BROKEN, "/usr/lib/python3.11/multiprocessing/connection.py")},
        Cause.HELPER,
        (1,),
        (),
    ),
    ("a server is gone", [STOPPED, ended(1, 1)], {1: traceback(BROKEN)}, Cause.EXCEPTION, (1,), ()),
    (
        "most end, and one goes on",
        [ended(0, 0), ended(1, 0), ended(2, 1, 2.0)],
        {2: traceback(CLOSED)},
        Cause.MISMATCH,
        (2,),
        (),
    ),
    (
        "two fail alike, and one of them is stopped while it ends",
        [STOPPED, ended(1, 1), ended(2, 1, 2.0, stopped=True)],
        {1: VALUE, 2: VALUE},
        Cause.EXCEPTION,
        (1, 2),
        (),
    ),
    (
        "does not come to a monitored barrier",
        [ended(0, 1), ended(1, 1), ended(2, -15, 2.0, stopped=True)],
        {0: traceback(MONITORED), 1: traceback(CLOSED)},
        Cause.ABSENT,
        (2,),
        (1,),
    ),
    (
        "models of several sizes",
        [ended(0, 1), ended(1, 1), ended(2, 1)],
        {
            index: traceback(MODELS.format(index, own, other, theirs))
            for index, own, other, theirs in ((0, 6, 1, 4), (1, 4, 0, 6), (2, 4, 0, 6))
        },
        Cause.MISMATCH,
        (0,),
        (1, 2),
    ),
    (
        "has the rank of another",
        [STOPPED, ended(1, 1)],
        {1: traceback(LISTENS)},
        Cause.EXCEPTION,
        (1,),
        (),
    ),
    ("no memory", [STOPPED, ended(1, 1)], {1: traceback("MemoryError")}, Cause.OUT_OF_MEMORY, (1,), ()),
    (
        "no memory on the GPU",
        [STOPPED, ended(1, 1)],
        {1: traceback("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB")},
        Cause.OUT_OF_MEMORY,
        (1,),
        (),
    ),
    (
        "a full disk",
        [STOPPED, ended(1, 1)],
        {1: traceback("OSError: [Errno 28] No space left on device")},
        Cause.FULL_DISK,
        (1,),
        (),
    ),
    (
        "ends early",
        [ended(0, 1, 2.0), ended(1, 0, 1.0)],
        {0: traceback(LOST)},
        Cause.EARLY_END,
        (1,),
        (0,),
    ),
    (
        "nobody's",
        [ended(0, 1, 1.0), ended(1, 1, 1.1)],
        {0: traceback(CLOSED), 1: traceback(RESET)},
        Cause.UNKNOWN,
        (),
        (0, 1),
    ),
    ("all alike", [ended(0, 1, 1.0), ended(1, 1, 1.1)], {0: VALUE, 1: VALUE}, Cause.EXCEPTION, (0, 1), ()),
    (
        "a host",
        [ended(0, 1, 1.0), ended(1, None, 1.1, problem=HOST_LOST)],
        {0: traceback(CLOSED)},
        Cause.LOST,
        (1,),
        (0,),
    ),
    (
        "other calls, of two",
        [ended(0, 1), ended(1, 1)],
        {index: traceback(BROUGHT.format(" 0", 1)) for index in range(2)},
        Cause.MISMATCH,
        (),
        (),
    ),
    (
        "other calls, of three",
        [ended(0, 1), ended(1, 1), ended(2, 1)],
        {index: traceback(BROUGHT.format("s 0 and 2", 1)) for index in range(3)},
        Cause.MISMATCH,
        (1,),
        (0, 2),
    ),
    ("other models, of two", [STOPPED, ended(1, 1)], {1: traceback(PARAMETERS)}, Cause.MISMATCH, (), ()),
    (
        "other models, of three",
        [STOPPED, ended(1, 1), replace(STOPPED, index=2)],
        {1: traceback(PARAMETERS)},
        Cause.MISMATCH,
        (1,),
        (),
    ),
]


@pytest.mark.parametrize(
    ("statuses", "words", "cause", "culprits", "victims"),
    [row[1:] for row in TABLE],
    ids=[row[0] for row in TABLE],
)
def test_the_table(
    statuses: list[InstanceStatus],
    words: Mapping[int, LastWords],
    cause: Cause,
    culprits: tuple[int, ...],
    victims: tuple[int, ...],
) -> None:
    """One row, one verdict."""
    verdict = find_verdict_of_end(statuses, words, {}, {})

    assert (verdict.cause, verdict.culprits, verdict.victims) == (cause, culprits, victims)
    assert verdict.torn_down == tuple(it.index for it in statuses if it.was_stopped)


NCCL_WITHOUT_ROOM = """\
Traceback (most recent call last):
  File "/home/me/train.py", line 7, in <module>
    dist.all_reduce(x)
torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:93, unhandled system error, NCCL version 2.28.9
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
Last error:
Error while creating shared memory segment /dev/shm/nccl-aBcDeF (size 9637888), error: No space left on device (28)
"""
ASSERTION = (
    "/pytorch/aten/src/ATen/native/cuda/Indexing.cu:1290: indexSelectLargeIndex: block: [0,0,0], thread: [39,0,0] "
    "Assertion `srcIndex < srcSelectDimSize` failed."
)
ASSERTED = f"""\
{ASSERTION}
Traceback (most recent call last):
  File "/home/me/train.py", line 9, in <module>
    main()
  File "/home/me/train.py", line 7, in main
    step(loss)
  File "/home/me/train.py", line 3, in step
    loss.item()
torch.AcceleratorError: CUDA error: device-side assert triggered
CUDA kernel errors might be asynchronously reported at some other API call.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""
MISALIGNED = """\
Traceback (most recent call last):
  File "/home/me/failing.py", line 55, in <module>
    main()
  File "/home/me/failing.py", line 49, in main
    fail(sys.argv[1], device)
  File "/home/me/failing.py", line 35, in fail
    wait_for(device)
torch.AcceleratorError: CUDA error: misaligned address
Search for `cudaErrorMisalignedAddress' in https://docs.nvidia.com/cuda/cuda-runtime-api/ \
for more information.
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace may be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Device-side assertion tracking was not enabled by user.
"""
FULL = """\
Traceback (most recent call last):
  File "/home/me/train.py", line 9, in <module>
    net(x)
torch.OutOfMemoryError: {} out of memory. Tried to allocate 200.00 GiB. GPU 0 has a total capacity of 79.11 GiB \
of which 78.60 GiB is free. Including non-PyTorch memory, this process has 520.00 MiB memory in use.
"""


@pytest.mark.parametrize(
    ("text", "cause", "said", "advice"),
    [
        (NCCL_WITHOUT_ROOM, Cause.FULL_DISK, "NCCL has found no room in /dev/shm", "--shm-size 8g"),
        (MISALIGNED, Cause.EXCEPTION, "misaligned address on its device", "CUDA_LAUNCH_BLOCKING=1"),
        (ASSERTED, Cause.EXCEPTION, ASSERTION, "CUDA_LAUNCH_BLOCKING=1"),
        *(
            (
                FULL.format(kind),
                Cause.OUT_OF_MEMORY,
                "out of memory on GPU 0: it asked for 200.00 GiB, of 79.11 GiB there 78.60 GiB are free",
                "popdist.parallel.recompute",
            )
            for kind in ("CUDA", "HIP", "XPU")
        ),
    ],
)
def test_a_failure_on_a_device_is_told_with_its_remedy(text: str, cause: Cause, said: str, advice: str) -> None:
    """With the numbers of the message, not those of the host's memory; whose device it is is the culprit."""
    words = last_words(text.splitlines())
    verdict = find_verdict_of_end([STOPPED, ended(1, 1)], {1: words}, {}, {})

    assert (verdict.cause, verdict.culprits, verdict.victims) == (cause, (1,), ())
    assert advice in verdict.advice
    assert hint(ended(1, 1), words, Evidence()) == said
    if cause is Cause.EXCEPTION:
        assert words.lines[0] == (ASSERTION if said == ASSERTION else "Traceback (most recent call last):")
        assert words.lines[-1].startswith("torch.AcceleratorError: ")  # and not what torch adds to each of them
        assert not any("more call" in line for line in words.lines)


def test_a_call_of_one_instance_alone_is_told_with_its_remedy() -> None:
    """After the others have ended, and where they do something else; other ends keep their advice."""
    save = "checkpoint.save('out', keep=3, step=None, model)"
    brought = BROUGHT.format(" 0", 1).replace("all_reduce (sum) of 4 float32", save)
    ends: list[tuple[int, str]] = [
        (0, LOST.replace("barrier()", save)),
        (0, LOST.replace("barrier()", "step")),
        (1, brought),
    ]
    late, uneven, different = (
        find_verdict_of_end([ended(0, 1, 2.0), ended(1, code, 1.0)], {0: traceback(words)}, {}, {}).advice
        for code, words in ends
    )

    assert late == different
    assert late.startswith("call checkpoint.save() on all instances, outside of `if popdist.is_main():`; only the")
    assert "join.Join" in uneven


def called(*sizes: int) -> InstanceEvidence:
    """One whose all_reduces were of these sizes."""
    calls = tuple(
        Call(name="all_reduce", number=number, sizes=((size,),), types=("float32",))
        for number, size in enumerate(sizes, 1)
    )
    return InstanceEvidence(
        groups=(GroupRecord(name="0", num_called=len(calls), num_done=len(calls), calls=calls),)
    )


def test_calls_of_other_sizes_are_compared() -> None:
    """In gloo one of the two is aborted, and what it called is not known; else both calls are shown."""
    statuses, words = [STOPPED, ended(1, -signal.SIGABRT)], {1: last_words(SIZES.splitlines())}
    crash = InstanceEvidence(crash=Stacks(threads=((StackFrame("train.py", 9, "main"),),)))
    known = find_verdict_of_end(statuses, words, {}, {0: called(4, 4), 1: called(4, 7)})
    unknown = find_verdict_of_end(statuses, words, {}, {0: called(4, 4), 1: crash})
    groups = "/v/site-packages/torch/distributed/distributed_c10d.py"
    stack = (StackFrame("train.py", 9, "main"), StackFrame(groups, 3151, "all_reduce"))
    called_so = InstanceEvidence(crash=Stacks(threads=(stack,)))
    stands = find_verdict_of_end(statuses, words, {}, {0: called(4, 4), 1: called_so})

    assert {known.cause, unknown.cause} == {Cause.MISMATCH}
    assert (known.culprits, unknown.culprits) == ((), ())
    assert known.details[1:] == ("  instance 0: all_reduce(float32[4])", "  instance 1: all_reduce(float32[7])")
    assert unknown.details == (
        "instance 0: all_reduce(float32[4])",
        "instance 1: its call is not known, at train.py:9",
    )
    assert stands.details[1] == "instance 1: all_reduce() of torch.distributed, at train.py:9"


def test_who_was_waited_for_until_the_others_gave_up() -> None:
    """It has called fewer collectives, and was alive when the first of them failed."""
    statuses = [ended(0, 1), ended(1, -15, 2.0, stopped=True)]
    frames = Stacks(threads=((StackFrame("train.py", 9, "main"),),))
    verdict = find_verdict_of_end(
        statuses, {0: traceback(LATE)}, {}, {0: called(4, 4), 1: replace(called(4), stacks=frames)}
    )

    assert (verdict.cause, verdict.culprits, verdict.victims) == (Cause.ABSENT, (1,), (0,))
    assert verdict.details[1] == "instance 1 stood at train.py:9"


def test_the_machine_knows_more_than_the_code() -> None:
    """Of a killed program that was out of memory, of a full disk, and of a crash."""
    crash = InstanceEvidence(crash=Stacks(threads=((StackFrame("train.py", 9, "main"),),)))
    full = InstanceEvidence(full_disks=("/data",))
    killed = find_verdict_of_end([ended(0, -9)], {}, {0: "probably out of memory: the kernel killed it"}, {})
    crashed = find_verdict_of_end([ended(0, -11)], {}, {}, {0: crash})
    wrote = find_verdict_of_end([ended(0, 1)], {0: traceback("OSError: [Errno 28] No space")}, {}, {0: full})

    assert killed.cause is Cause.OUT_OF_MEMORY
    assert (crashed.cause, crashed.details) == (Cause.SIGNAL, ("it stood at train.py:9",))
    assert (wrote.cause, wrote.details) == (Cause.FULL_DISK, ("no space left in /data",))
    assert not is_torn(None)


def test_who_fails_slowly_in_a_hang_has_failed() -> None:
    """It had printed its traceback when the job was stopped because nothing went on; another one is left alone."""
    hung = Verdict(cause=Cause.ABSENT, culprits=(1,), victims=(0,))
    statuses = [STOPPED, replace(STOPPED, index=1)]
    words = {0: LastWords(), 1: VALUE}
    found = combine(hung, find_verdict_of_end(statuses, words, {}, {}), words)
    nothing = combine(hung, find_verdict_of_end(statuses, {}, {}, {}), {})

    assert (found.cause, found.culprits, found.victims) == (Cause.EXCEPTION, (1,), (0,))
    assert found.details == ("instance 1 had failed, and was about to end: ValueError: bad batch, at train.py:7",)
    assert nothing is hung
    assert combine(Verdict(), found, words).culprits == (1,)
    assert combine(replace(hung, culprits=(0,)), found, words).culprits == (0,)


def test_a_peer_gets_time_to_end_by_itself() -> None:
    """While all that failed have only lost a connection, for two seconds; not where nothing is known of them."""
    lost, own = traceback(CLOSED).lines, VALUE.lines
    failed = {0: ended(0, 1, 10.0)}
    both = failed | {1: ended(1, 7, 10.5)}

    assert awaits_culprit(failed, {0: lost}, 11.9)
    assert not awaits_culprit(failed, {0: lost}, 12.0)
    assert not awaits_culprit(failed, {0: own}, 10.1)
    assert not awaits_culprit(failed, {}, 10.1)
    assert not awaits_culprit(both, {0: lost, 1: own}, 10.6)
    assert not awaits_culprit({0: replace(failed[0], problem="its agent was killed")}, {0: lost}, 10.1)


def test_the_exit_code_is_the_culprits() -> None:
    """Also where a victim has ended before; the first failure's where the culprit ended well, or is not known."""
    victim, culprit = ended(0, 1, 1.0), ended(1, 7, 2.0)
    found = find_verdict_of_end([victim, culprit], {0: traceback(CLOSED), 1: LastWords()}, {}, {})
    end = JobEnd(statuses=[victim, culprit])
    told = replace(end, findings=Findings(verdict=found))

    assert found.culprits == (1,)
    assert (exit_code(end), exit_code(told)) == (1, 7)
    assert failure_at_fault(told) is culprit
    assert exit_code(replace(told, statuses=[victim, replace(culprit, exit_code=0)])) == 1
