"""Where programs stand, as lines from what faulthandler writes; and the request for that to all of them.

Holds poprun.job.stack_inquiry and poprun.observe.show.standstill.
"""

import faulthandler
import os
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import popdist
from poprun.job.stack_inquiry import StackInquiry
from poprun.launch.program_watch import describe_process, find_locks, name_system_call
from poprun.observe.account.evidence import Helper, InstanceEvidence, StackFrame, Stacks, read_stacks
from poprun.observe.account.stacks import collective_of, read_lines
from poprun.observe.account.state import InstanceState, InstanceStatus
from poprun.observe.judge.hangs import Hang
from poprun.observe.show.standstill import render_stacks

TEXT = """\
Thread 0x00007f95c8b2a6c0 (most recent call first):
  File "/usr/lib/threading.py", line 331 in wait
  File "/usr/lib/threading.py", line 982 in run

Current thread 0x00007f95d0a5b740 (most recent call first):
  File "train.py", line 8 in load
  File "train.py", line 13 in <module>
"""
SOURCES = {("train.py", 8): "    time.sleep(600)\n"}
LIBRARY = os.path.dirname(popdist.__file__)  # noqa: PTH120 - as Python writes it


def read_line(file: str, line: int) -> str:
    """The source that these tests know."""
    return SOURCES.get((file, line), "")


def test_the_main_thread_comes_first_and_the_latest_call_last() -> None:
    """With the source of a line where it is known."""
    assert render_stacks({1: read_stacks(TEXT, [])}, read_line) == [
        "instance 1:",
        '  | File "train.py", line 13, in <module>',
        '  | File "train.py", line 8, in load',
        "  |   time.sleep(600)",
        "  | thread 1:",
        '  | File "/usr/lib/threading.py", line 982, in run',
        '  | File "/usr/lib/threading.py", line 331, in wait',
    ]


def test_a_thread_of_a_process_group_that_has_no_work_is_not_shown() -> None:
    """It is there in each program that has called torch's collectives; at work it is shown."""
    main = (StackFrame("train.py", 14, "<module>"),)
    idle = (
        StackFrame("/usr/lib/threading.py", 9, "run"),
        StackFrame(f"{LIBRARY}/exchange/process_group/work_queue.py", 4, "_work"),
    )
    sampler = (StackFrame(f"{LIBRARY}/startup/phase_sampler.py", 9, "run"),)
    busy = (*idle, StackFrame(f"{LIBRARY}/exchange/host_memory/barriers.py", 7, "wait"))

    assert len(render_stacks({0: Stacks(threads=(main, idle, sampler))}, read_line)) == 2
    assert render_stacks({0: Stacks(threads=(main, busy))}, read_line)[2:] == [
        "  | thread 1:",
        '  | File "/usr/lib/threading.py", line 9, in run',
        f'  | File "{LIBRARY}/exchange/process_group/work_queue.py", line 4, in _work',
        "  | … 1 calls inside popdist …",
    ]


def test_instances_that_stand_alike_are_shown_once() -> None:
    """In the order in which they are given, and of many groups the first ones."""
    waiting = Stacks(threads=((StackFrame("train.py", 14, "<module>"),),))
    sleeping = Stacks(processes=("process 7: sleeping (sleep 600)",))
    stacks = {2: sleeping, 0: waiting, 1: waiting, 3: Stacks()}

    assert render_stacks(stacks, read_line) == [
        "instance 2:",
        "  | process 7: sleeping (sleep 600)",
        "instances 0 and 1:",
        '  | File "train.py", line 14, in <module>',
        "instance 3:",
        "  | it has no process",
    ]
    assert render_stacks(stacks, read_line, 2)[-1] == "and 1 more: Ctrl-\\ shows all"


def test_the_way_inside_popdist_is_left_out() -> None:
    """It is the same wherever popdist waits; the program's own calls within it are shown."""
    inside = [StackFrame(f"{LIBRARY}/exchange/groups.py", line, "wait") for line in range(5)]
    own = StackFrame("train.py", 8, "load")

    waiting = render_stacks({0: Stacks(threads=((own, *inside),))}, read_line)
    called = render_stacks({0: Stacks(threads=((*inside, own),))}, read_line)

    assert waiting[-2:] == [
        f'  | File "{LIBRARY}/exchange/groups.py", line 0, in wait',
        "  | … 4 calls inside popdist …",
    ]
    assert len(called) == 1 + 5 + 2


@given(st.integers(1, 300), st.integers(0, 20))
def test_a_deep_stack_and_many_threads_keep_within_bounds(depth: int, num_helpers: int) -> None:
    """Both ends of the main thread are kept."""
    frames = tuple(StackFrame("train.py", line, "f") for line in range(1000, 1000 + depth))
    lines = render_stacks({0: Stacks(threads=(frames, *[frames] * num_helpers))}, read_line)

    assert len(lines) <= 1 + 25 + 4 * 6 + 1
    assert lines[1] == '  | File "train.py", line 1000, in f'
    assert any(f"line {999 + depth}," in line for line in lines[:26])


@given(st.text() | st.text(alphabet='Thread 0x12\n File"", line in (most recent call first):'))
def test_any_text_is_read(text: str) -> None:
    """A program may write what it likes behind its page."""
    render_stacks({0: read_stacks(text, [])}, read_line)


def test_what_this_python_writes_is_understood() -> None:
    """The form is no promise of faulthandler's, so it is looked at here."""
    begun, release = threading.Event(), threading.Event()

    def wait_for_release() -> None:
        begun.set()
        release.wait()

    helper = threading.Thread(target=wait_for_release)
    helper.start()
    begun.wait()
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        release.set()
        helper.join()
        file.seek(0)
        stacks = read_stacks(file.read(), [])

    assert stacks.threads[0][-1].function == "test_what_this_python_writes_is_understood"
    others = [frame.function for thread in stacks.threads[1:] for frame in thread]
    assert "wait_for_release" in others


def test_a_process_in_words() -> None:
    """This one runs; one that is gone has ended; an unknown call keeps its number."""
    assert describe_process(os.getpid()).startswith(f"process {os.getpid()}: running")
    assert describe_process(2**22 + 1) == f"process {2**22 + 1} has ended"
    assert name_system_call("230", "x86_64") == "clock_nanosleep"
    assert name_system_call("115", "aarch64") == "clock_nanosleep"
    assert name_system_call("999", "x86_64") == "system call 999"
    assert name_system_call("1", "riscv64") == "system call 1"


TORCH = "/env/python3.11/site-packages/torch"
POPDIST = "/env/python3.11/site-packages/popdist"


@pytest.mark.parametrize(
    ("frames", "call"),
    [
        ([("train.py", "main")], ""),
        ([], ""),
        ([("train.py", "main"), (f"{TORCH}/nn/functional.py", "linear")], ""),
        (
            [
                ("train.py", "main"),
                (f"{TORCH}/distributed/c10d_logger.py", "wrapper"),
                (f"{TORCH}/distributed/distributed_c10d.py", "all_gather_object"),
                (f"{TORCH}/distributed/c10d_logger.py", "wrapper"),
                (f"{TORCH}/distributed/distributed_c10d.py", "all_gather"),
            ],
            "all_gather_object() of torch.distributed",
        ),
        (
            [("train.py", "main"), (f"{TORCH}/nn/parallel/distributed.py", "_sync_buffers")],
            "_sync_buffers() of torch.distributed",
        ),
        (
            [("train.py", "main"), (f"{TORCH}/_tensor.py", "backward"), (f"{TORCH}/autograd/graph.py", "_engine")],
            "backward() of torch",
        ),
        ([(f"{TORCH}/distributed/run.py", "main"), ("train.py", "main")], ""),
        (
            [
                ("train.py", "main"),
                (f"{TORCH}/distributed/distributed_c10d.py", "all_reduce"),
                (f"{POPDIST}/exchange/process_group/torch_process_group.py", "allreduce"),
                (f"{POPDIST}/exchange/host_memory/waiting.py", "wait"),
                ("/usr/lib/python3.11/threading.py", "wait"),
            ],
            "all_reduce() of torch.distributed",
        ),
        (
            [
                (f"{TORCH}/autograd/graph.py", "_engine"),
                (f"{POPDIST}/exchange/process_group/work_queue.py", "wait"),
            ],
            "backward() of torch",
        ),
        (
            [
                ("train.py", "main"),
                (f"{POPDIST}/exchange/process_group/work_queue.py", "wait"),
                (f"{TORCH}/futures/__init__.py", "wait"),
            ],
            "wait() of the backend popdist",
        ),
        (
            [
                ("train.py", "main"),
                (f"{POPDIST}/step/training/pipeline.py", "run"),
                (f"{TORCH}/distributed/pipelining/schedules.py", "step"),
                (f"{TORCH}/distributed/pipelining/schedules.py", "_wait_batch_p2p"),
                (f"{POPDIST}/exchange/process_group/message_calls.py", "wait"),
                ("/usr/lib/python3.11/threading.py", "wait"),
            ],
            "step() of torch.distributed.pipelining",
        ),
        (
            [
                ("train.py", "main"),
                ("/v/site-packages/jax/experimental/multihost_utils.py", "sync_global_devices"),
                ("/v/site-packages/jax/experimental/multihost_utils.py", "process_allgather"),
                ("/v/site-packages/jax/_src/pjit.py", "cache_miss"),
            ],
            "sync_global_devices() of jax",
        ),
        ([("/v/site-packages/jax/experimental/multihost_utils.py", "assert_equal"), ("train.py", "main")], ""),
        ([(f"{POPDIST}/exchange/process_group/work_queue.py", "wait"), ("train.py", "main")], ""),
        ([("train.py", "main"), ("/usr/lib/python3.11/threading.py", "wait")], ""),
    ],
)
def test_the_collective_of_torch_in_which_a_program_stands(frames: list[tuple[str, str]], call: str) -> None:
    """That which the program called, whatever it calls inside; nothing where the latest call is its own."""
    main = tuple(StackFrame(file, 1, function) for file, function in frames)

    assert collective_of(Stacks(threads=(main,) if main else ())) == call


def test_lines_are_read_where_there_are_any(tmp_path: Path) -> None:
    """Bare, and fit for a terminal; what is no file is not waited for."""
    program, pipe = tmp_path / "train.py", tmp_path / "pipe"
    program.write_text("import time\n    time.sleep(600)  # \x1b[2J\n")
    os.mkfifo(pipe)
    places = ((str(program), 99), (str(pipe), 1), (str(tmp_path), 1), ("<string>", 1))
    stacks = Stacks(threads=(tuple(StackFrame(*place, "f") for place in places),))
    worker = Stacks(threads=((StackFrame(str(program), 2, "read"),),))
    helper = Helper(pid=9, process="", stacks=worker)

    found = read_lines([InstanceEvidence(stacks=stacks), InstanceEvidence(helpers=(helper,))])

    assert found(str(program), 2) == "time.sleep(600)  #  [2J"
    assert [found(*place) for place in places] == [""] * 4


RUNNING = [InstanceStatus(index=index, state=InstanceState.RUNNING) for index in range(3)]
ENDED = [replace(status, state=InstanceState.ENDED) for status in RUNNING]


def ask(statuses: list[InstanceStatus], asked: list[int] | None = None, hang: Hang | None = None) -> StackInquiry:
    """An inquiry at time 0; whom it asks is noted in ``asked``."""
    noted = [] if asked is None else asked
    return StackInquiry(statuses, 0.0, lambda instance, _order: noted.append(instance), hang)


def told(inquiry: StackInquiry, statuses: list[InstanceStatus], *answered: int) -> str:
    """What is said when some have answered, each with a process and no stacks, and all had been asked before."""
    evidence = {index: InstanceEvidence(stacks=Stacks(processes=(f"process {index}",))) for index in range(3)}
    for index in answered:
        inquiry.note_answer(index)
    return inquiry.text(statuses, evidence, read_line)


def test_it_is_said_when_all_have_answered() -> None:
    """Only those that run are asked."""
    asked: list[int] = []
    statuses = [*RUNNING[:2], ENDED[2]]
    inquiry = ask(statuses, asked)
    inquiry.note_answer(0)
    assert not inquiry.is_over(statuses, 1.0)

    said = told(inquiry, statuses, 1)

    assert asked == [0, 1]
    assert inquiry.is_over(statuses, 1.0)
    assert said == (
        "where the instances stand, the latest call last\n"
        "  instance 0:\n    | process 0\n  instance 1:\n    | process 1"
    )


def test_nobody_is_waited_for_too_long() -> None:
    """One that does not answer in time, and one that ends meanwhile, are told as such."""
    inquiry = ask(RUNNING)
    statuses = [*RUNNING[:2], ENDED[2]]
    said = told(inquiry, statuses, 0)

    assert not inquiry.is_over(statuses, 3.9)
    assert inquiry.is_over(statuses, 4.0)
    assert "instance 1:\n    | no answer" in said
    assert "instance 2:\n    | it has ended" in said


def test_nobody_is_asked_when_nobody_runs() -> None:
    """It is said at once."""
    assert told(ask(ENDED), ENDED) == "no program runs"


def test_whoever_did_not_arrive_is_shown_first() -> None:
    """Of a hang."""
    inquiry = ask(RUNNING, hang=Hang(idle_seconds=5, waiting={"barrier()": (0, 1)}, absent=(2,)))
    said = told(inquiry, RUNNING, 0, 1, 2)

    assert said.splitlines()[0] == "no progress for 5 s: instances 0 and 1 wait in barrier()"
    assert said.index("process 2") < said.index("process 0") < said.index("process 1")
    assert said.endswith("the job goes on: an instance that compiles or saves for long looks the same")


LOCKS = """\
1: FLOCK  ADVISORY  WRITE 100 fd:00:7 0 EOF
1: -> FLOCK  ADVISORY  WRITE 200 fd:00:7 0 EOF
2: POSIX  ADVISORY  WRITE 200 fd:00:8 0 EOF
3: OFDLCK ADVISORY  WRITE -1 fd:00:9 0 EOF
3: -> OFDLCK ADVISORY  WRITE 200 fd:00:9 0 EOF
4: of another kernel
"""


def test_locks_of_files_are_read_with_who_holds_them() -> None:
    """Each file with its host; a lock of an open file has no process."""
    host = os.uname().nodename

    assert find_locks({100}, LOCKS) == {"held_locks": [f"{host} fd:00:7"], "awaited_locks": {}}
    found: Any = find_locks({200}, LOCKS)
    assert found["held_locks"] == [f"{host} fd:00:8"]
    assert list(found["awaited_locks"]) == [f"{host} fd:00:7", f"{host} fd:00:9"]
    assert found["awaited_locks"][f"{host} fd:00:9"] == "a process that the kernel does not name"
