"""What torch's recorder holds is cut to what a verdict needs, and a program that does not answer holds nobody up.

Holds poprun.launch.recorder and poprun.job.evidence.
"""

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from poprun.job.evidence import Call, InstanceEvidence, read_evidence
from poprun.launch.recorder import ANSWER_SECONDS, MAX_CALLS, RecorderQuestion, cut_record


def entry(number: int, name: str = "gloo:all_reduce", group: str = "0", *, retired: bool = True) -> dict[str, Any]:
    """One call, as torch 2.13 has it."""
    return {
        "collective_seq_id": number,
        "input_dtypes": ["Float"],
        "input_sizes": [[4, 2]],
        "is_p2p": False,
        "p2p_seq_id": 0,
        "pg_id": int(group),
        "process_group": [group, "default_pg"],
        "profiling_name": name,
        "retired": retired,
        "state": "scheduled",
        "time_created_ns": 1_795_442_950_383_848_194 + number,
    }


def record(*entries: dict[str, Any], **more: Any) -> bytes:  # noqa: ANN401 - of many kinds
    """What the server says."""
    status = {"0": {"last_completed_collective": "9", "last_enqueued_collective": "10"}}
    return json.dumps({"entries": entries, "pg_status": status, **more}).encode()


def test_of_each_group_the_open_calls_and_the_last_ones_are_kept() -> None:
    """With how far the group is, and its ranks where torch names them."""
    entries = [entry(number, retired=number != 2) for number in range(1, 10)]
    text = record(*entries, entry(10, "gloo:barrier", retired=False), entry(1, group="7"))
    config = {"pg_config": {"0": {"ranks": "[0, 3]"}}}
    (group, other) = read_evidence({"recorder": cut_record(text)}).groups
    (named, _) = read_evidence(
        {"recorder": cut_record(text.replace(b"{", json.dumps(config)[:-1].encode() + b", ", 1))}
    ).groups

    assert [call.number for call in group.calls] == [2, *range(11 - MAX_CALLS, 11)]
    assert (group.name, group.num_called, group.num_done, group.ranks, named.ranks) == ("0", 10, 9, (), (0, 3))
    assert str(group.pending) == "all_reduce(float32[4, 2])"
    assert group.find(10) is not None
    assert (group.find(10), group.find(3)) == (group.calls[-1], None)
    assert (other.name, other.pending) == ("7", None)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b'{"entries": 3}', b'{"entries": [{}]}', record(entry(1), pg_config=3)]
)
def test_what_is_no_record_is_none(text: bytes) -> None:
    """Whatever it is."""
    assert read_evidence({"recorder": cut_record(text)}) == InstanceEvidence()


@pytest.mark.parametrize("event", [{"recorder": 3}, {"recorder": {"groups": [3, {}, "x"]}}, {"full_disks": 3}])
def test_a_malformed_event_is_no_evidence(event: dict[str, Any]) -> None:
    """And what was known before is kept."""
    before = InstanceEvidence(full_disks=("/tmp",))

    assert read_evidence(event) == InstanceEvidence()
    assert read_evidence({"full_disks": 3}, before) == before


def test_calls_that_must_agree_are_told_apart() -> None:
    """In name, type, and where all bring the same, in size."""
    call = Call(name="all_reduce", sizes=((4,),), types=("float32",))
    gather = Call(name="all_gather", sizes=((4,),), types=("float32",))

    assert call.is_like(Call(name="all_reduce", sizes=((4,),), types=("float32",), number=3))
    assert not call.is_like(Call(name="all_reduce", sizes=((5,),), types=("float32",)))
    assert not call.is_like(Call(name="all_reduce", sizes=((4,),), types=("int64",)))
    assert not call.is_like(gather)
    assert gather.is_like(Call(name="all_gather", sizes=((5,),), types=("float32",)))


def test_a_server_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    """One that takes the question and is silent, and a descriptor that leads nowhere."""
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "s"))
        silent.listen()
        descriptor = os.open(tmp_path / "s", os.O_PATH)
        began, answers = time.monotonic(), []
        question = RecorderQuestion(os.getpid(), descriptor)
        assert question.answer() is None
        while (answer := question.answer()) is None:
            pass
        answers += [answer, RecorderQuestion(os.getpid(), 1 << 20).answer()]
        os.close(descriptor)

    assert answers == [{}, {}]
    assert time.monotonic() - began >= ANSWER_SECONDS


def test_the_stack_of_a_crash_is_that_of_its_thread() -> None:
    """The main thread's, which is written last, where the one that crashed runs no Python."""
    main, other = '  File "train.py", line 7 in main', '  File "/usr/lib/queue.py", line 3 in get'
    texts = (
        (
            f"Fatal Python error: Aborted\n\nThread 0x1 (most recent call first):\n{other}\n\n"
            f"Thread 0x2 (most recent call first):\n{main}\n\nExtension modules: x"
        ),
        (
            f"Fatal Python error: Aborted\n\nCurrent thread 0x2 (most recent call first):\n{main}\n\n"
            f"Thread 0x1 (most recent call first):\n{other}\n"
        ),
    )

    assert [read_evidence({"crash": text}).crash.threads[0][0].line for text in texts] == [7, 7]
    assert read_evidence({"crash": ""}).crash.threads == ()
