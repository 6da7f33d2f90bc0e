"""The end of an agent's tree: asked first, killed at one deadline, whoever asks how often. And its questions.

Holds poprun.launch.tree_ending.
"""

import os
import signal
import socket
import time
from collections.abc import Iterable
from contextlib import closing
from unittest.mock import Mock

import pytest

from poprun.launch import agent, tree_ending
from poprun.launch.agent import Agent, HeldKey, Parentage
from poprun.launch.messages.control import Link
from poprun.launch.process.process_tree import ProcessKey
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


def test_a_library_that_listens_at_a_held_port_is_seen() -> None:
    """So is TensorFlow's worker, which listens on all addresses of both kinds."""
    holder, other = (agent.hold_port("0.0.0.0") for _ in range(2))  # noqa: S104 - as TensorFlow's port is held
    with closing(holder), closing(other), socket.socket(socket.AF_INET6) as library:
        library.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        library.bind(("::", holder.getsockname()[1]))
        library.listen()

        assert agent.is_in_use(holder)
        assert not agent.is_in_use(other)


def test_a_program_is_asked_one_question_at_a_time() -> None:
    """Answers to two would be mixed up in its page. Stacks come first: moments of calls are asked for again."""
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    watch = Mock()
    with ours, theirs:
        tested = Agent(Link(ours), 1, Parentage(0, 0, (), {}), [], HeldKey("", ""))
        tested._program, tested._watch = PROGRAM, watch
        for kind in ("calls", "calls", "stacks", "calls"):
            tested._execute({"order": kind, "most_helpers": 0})
        for holder in tested._held:
            holder.close()

    assert [call[0] for call in watch.mock_calls] == ["ask_for_calls", "ask_for_stacks"]
