"""The end of an agent's tree: asked first, killed at one deadline, whoever asks how often. And its questions.

Holds poprun.launch.tree_ending.
"""

import os
import signal
import socket
import time
from collections.abc import Iterable
from contextlib import ExitStack, closing

import pytest

from poprun.launch import program_watch, tree_ending
from poprun.launch.agent import Agent, HeldKey, HeldPorts, Parentage
from poprun.launch.messages.control import Link
from poprun.launch.process.process_tree import ProcessKey
from poprun.launch.program_watch import ProgramWatch
from poprun.launch.tree_ending import TreeEnding

PROGRAM = 4_000_001
"""Above every process id that the kernel gives: nothing here reaches a process."""

TREE = [ProcessKey(PROGRAM, 0)]


class World:
    """A clock, a tree of processes, and what was sent to them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_seconds = 100.0
        self.tree = TREE
        self.sent: list[int] = []
        monkeypatch.setattr(time, "monotonic", lambda: self.now_seconds)
        monkeypatch.setattr(tree_ending, "own_tree", lambda: self.tree)
        monkeypatch.setattr(tree_ending, "send", lambda _, signum: self.sent.append(signum))
        monkeypatch.setattr(tree_ending, "terminate", self._terminate)
        monkeypatch.setattr(os, "kill", lambda _, signum: self.sent.append(signum))
        monkeypatch.setattr(os, "killpg", lambda _, signum: self.sent.append(signum))

    def _terminate(self, keys: Iterable[ProcessKey]) -> None:
        self.sent += [signal.SIGTERM for _ in keys]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """One that holds the program."""
    return World(monkeypatch)


def test_a_program_is_asked_and_continued_and_killed_at_its_deadline(world: World) -> None:
    """A program that is stopped could not end in order otherwise."""
    ending = TreeEnding()
    ending.grace_seconds = 7.0
    ending.stop(PROGRAM)
    assert world.sent == [signal.SIGTERM, signal.SIGCONT]

    world.now_seconds += 6.9
    assert not ending.is_over(PROGRAM)
    assert world.sent == [signal.SIGTERM, signal.SIGCONT]
    world.now_seconds += 0.1
    assert not ending.is_over(PROGRAM)
    assert world.sent[2:] == [signal.SIGKILL]
    world.tree = []
    assert ending.is_over(None)


def test_who_asks_again_moves_no_deadline(world: World) -> None:
    """Neither a second request, nor the end of the program before its children's."""
    ending = TreeEnding()
    ending.grace_seconds = 7.0
    ending.stop(PROGRAM)
    world.now_seconds += 6.5
    ending.stop(PROGRAM)
    ending.end_leftovers(after_good_end=True)
    world.sent.clear()
    world.now_seconds += 0.5

    assert not ending.is_over(None)
    assert world.sent == [signal.SIGKILL]


def test_what_a_good_end_leaves_running_has_time_and_is_named(world: World) -> None:
    """It is asked to end after the program's own time only, and named before and then."""
    ending = TreeEnding()
    ending.grace_seconds = 7.0
    ending.end_leftovers(after_good_end=True)
    told = []
    for seconds in (0.5, 1.0, 5.0, 0.5, 0.9, 0.1):
        world.now_seconds += seconds
        assert not ending.is_over(None)
        told.append((ending.news() or {}).get("is_ended"))

    assert told == [None, False, None, True, None, None]
    assert world.sent == [signal.SIGTERM, signal.SIGKILL]
    world.tree = []
    assert ending.is_over(None)


def test_a_failure_elsewhere_ends_at_once_what_a_good_end_has_left(world: World) -> None:
    """It is asked, and has a moment, as what any failed program leaves."""
    ending = TreeEnding()
    ending.end_leftovers(after_good_end=True)
    ending.stop(None)

    assert world.sent == [signal.SIGTERM]
    world.now_seconds += 1.0
    assert not ending.is_over(None)
    assert world.sent == [signal.SIGTERM, signal.SIGKILL]


def test_killing_waits_for_nothing(world: World) -> None:
    """Whatever grace there was."""
    ending = TreeEnding()
    ending.stop(PROGRAM)
    ending.kill()

    assert not ending.is_over(PROGRAM)
    assert world.sent[-1] == signal.SIGKILL


def test_a_tree_that_nobody_asked_is_not_over(world: World) -> None:
    """Not even an empty one: its program may not have begun."""
    world.tree = []

    assert not TreeEnding().is_over(None)


def test_a_tree_whose_program_cannot_start_is_over() -> None:
    """Nothing is waited for."""
    ending = TreeEnding()
    ending.give_up()

    assert ending.is_over(None)


def test_a_signal_asks_the_program_once(world: World) -> None:
    """The loop obeys it, as a handler could interrupt anything."""
    ending = TreeEnding()
    ending.obey_signal(PROGRAM)
    ending.note_signal(signal.SIGTERM, None)
    assert world.sent == []
    for _ in range(2):
        ending.obey_signal(PROGRAM)

    assert world.sent == [signal.SIGTERM, signal.SIGCONT]


def test_a_library_that_listens_at_a_held_port_is_seen() -> None:
    """So is TensorFlow's worker, which listens on all addresses of both kinds."""
    ports, others = (HeldPorts("127.0.0.1", 1) for _ in range(2))
    with socket.socket(socket.AF_INET6) as library, closing(ports.sockets[0]), closing(others.sockets[0]):
        library.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        library.bind(("::", ports.numbers[0]))
        library.listen()

        assert ports.has_worker()
        assert not others.has_worker()


def test_the_first_instance_holds_the_ports_of_the_stores() -> None:
    """The one of popdist's own listens already."""
    with ExitStack() as stack:
        ports = HeldPorts("127.0.0.1", 0)
        for held in ports.sockets:
            stack.enter_context(closing(held))

        assert len(set(ports.numbers)) == 4
        stack.enter_context(socket.create_connection(("127.0.0.1", ports.numbers[-1])))


def test_a_program_is_asked_one_question_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers to two would be mixed up in its page. Stacks come first: moments of calls are asked for again."""
    asked: list[int] = []

    def ask(*_: object) -> list[int]:
        asked.append(1)
        return asked

    monkeypatch.setattr(program_watch, "ProgramQuestion", ask)
    monkeypatch.setattr(ProgramWatch, "_question_for_recorder", lambda *_, **__: None)
    monkeypatch.setattr(ProgramWatch, "_question_for_stacks", lambda *_: None)
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        tested = Agent(Link(ours), 1, Parentage(0, 0, (), {}), [], HeldKey("", ""))
        tested._program = PROGRAM
        for kind, num_asked in (("calls", 1), ("calls", 1), ("stacks", 2), ("calls", 2)):
            tested._execute({"order": kind, "most_helpers": 0})

            assert len(asked) == num_asked
        tested._ports.sockets[0].close()
