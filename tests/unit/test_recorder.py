"""What torch's recorder holds is cut to what a verdict needs, and a program that does not answer holds nobody up.

Holds poprun.launch.recorder and poprun.observe.account.evidence.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingUnixStreamServer
from typing import Any

import pytest

from popdist.startup.recorder_server import read_recorder
from poprun.launch.recorder import ANSWER_SECONDS, MAX_CALLS, RecorderQuestion, cut_record, list_calls
from poprun.observe.account.evidence import Call, InstanceEvidence, read_evidence
from poprun.observe.judge.verdict import EVERYBODY


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


def record(*entries: dict[str, Any], **more: Any) -> bytes:
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

    assert call.kind == Call(name="all_reduce", sizes=((4,),), types=("float32",), number=3).kind
    assert call.kind != Call(name="all_reduce", sizes=((5,),), types=("float32",)).kind
    assert call.kind != Call(name="all_reduce", sizes=((4,),), types=("int64",)).kind
    assert call.kind != gather.kind
    assert gather.kind == Call(name="all_gather", sizes=((5,),), types=("float32",)).kind


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


def test_each_recorder_has_its_own_numbers() -> None:
    """A group may have calls of NCCL beside those of gloo; one record that is none spoils nothing."""
    config = {"pg_config": {"0": {"ranks": "[0, 1]"}}}
    both = b"\n".join((record(entry(1), **config), record(entry(7, "nccl:all_reduce"), **config)))
    groups = read_evidence({"recorder": cut_record(both)}).groups
    (alone,) = read_evidence({"recorder": cut_record(b"Handler not found\n" + both.split(b"\n")[1])}).groups

    assert [(group.name, group.calls[0].number, group.ranks) for group in groups] == [
        ("0", 1, (0, 1)),
        ("0:nccl", 7, (0, 1)),
    ]
    assert alone == groups[1]
    assert list_calls(both).keys() == {"0", "0:nccl"}
    assert EVERYBODY == ("0:nccl", "0")


ANSWERS = {"fr_trace_json": record(entry(1)), "dump_nccl_trace_json": record(entry(2, "nccl:all_reduce"))}


@pytest.fixture(params=[ANSWERS, {"fr_trace_json": ANSWERS["fr_trace_json"]}])
def served(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[int, dict[str, bytes]]]:
    """A server like torch's, with and without NCCL: the descriptor of its socket, and what it answers."""
    answers: dict[str, bytes] = request.param

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = answers.get(self.path.rpartition("/")[2])
            self.send_response(404 if body is None else 200)
            self.end_headers()
            self.wfile.write(b"Handler not found\n" if body is None else body)

        def address_string(self) -> str:
            return ""

        def log_message(self, *_: object) -> None:
            return

    with ThreadingUnixStreamServer(str(tmp_path / "s"), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        descriptor = os.open(tmp_path / "s", os.O_PATH)
        yield descriptor, answers
        os.close(descriptor)
        server.shutdown()
        thread.join()


def test_both_recorders_are_asked(served: tuple[int, dict[str, bytes]]) -> None:
    """By the agent, and by the program about itself; a torch without NCCL's answers with gloo's alone."""
    descriptor, answers = served
    question = RecorderQuestion(os.getpid(), descriptor)
    while (answer := question.answer()) is None:
        pass

    assert answer == cut_record(b"\n".join(answers.values()))
    assert len(read_evidence({"recorder": answer}).groups) == len(answers)
    assert cut_record(read_recorder(descriptor)) == answer
