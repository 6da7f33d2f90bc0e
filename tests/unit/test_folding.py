"""Lines that several instances print alike: folded where they can be, lost or swapped never."""

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from poprun.job.output.folding import HOLD_SECONDS, MAX_HELD_BYTES, Folded, Folder

NUM_INSTANCES = 4

instances = st.integers(0, NUM_INSTANCES - 1)
lines = st.sampled_from([b"\n", b"a\n", b"b\n", b"c\r\n"])
events = st.lists(
    st.one_of(
        st.tuples(st.just("add"), instances, lines),
        st.tuples(st.just("step of a bar"), instances, st.none()),
        st.tuples(st.just("due"), st.floats(0, 2 * HOLD_SECONDS), st.none()),
    ),
    max_size=60,
)


def unfolded(shown: Sequence[Folded]) -> list[list[bytes]]:
    """The lines of each instance, in the order in which they were shown."""
    return [[folded.line for folded in shown if instance in folded.instances] for instance in range(NUM_INSTANCES)]


@given(events, st.permutations(range(NUM_INSTANCES)))
def test_unfolding_gives_every_line_in_order(events: Sequence[Any], ends: Sequence[int]) -> None:
    """Whatever they print, whenever, and in whichever order they end; nothing waits longer than it may."""
    folder, shown, now = Folder(range(NUM_INSTANCES)), [], 0.0
    printed: list[list[bytes]] = [[] for _ in range(NUM_INSTANCES)]
    for kind, value, line in events:
        if kind == "add":
            printed[value].append(line)
            shown += folder.add(value, line, now)
        elif kind == "step of a bar":
            printed[value].append(b"step\r")
            shown += folder.add_lines(value, b"step\r", now)
            assert unfolded(shown)[value] == printed[value]
        else:
            now += value
            shown += folder.due(now)
            assert folder.due_at_seconds is None or now < folder.due_at_seconds <= now + HOLD_SECONDS
    for instance in ends:
        shown += folder.end(instance)

    assert unfolded(shown) == printed
    assert folder.due_at_seconds is None
    assert all(list(folded.instances) == sorted(set(folded.instances)) != [] for folded in shown)


@given(st.lists(lines, max_size=12), st.lists(instances, max_size=48))
def test_what_all_print_alike_is_shown_once(text: list[bytes], order: list[int]) -> None:
    """However they take turns."""
    folder, shown = Folder(range(NUM_INSTANCES)), []
    waiting = {instance: list(text) for instance in range(NUM_INSTANCES)}
    for instance in [*order, *[n for n in range(NUM_INSTANCES) for _ in text]]:
        if waiting[instance]:
            shown += folder.add(instance, waiting[instance].pop(0), 0.0)

    assert shown == [((0, 1, 2, 3), line) for line in text]


def test_a_line_of_one_comes_before_what_all_print_next() -> None:
    """In the order in which it was printed; nobody waits when the line behind it is everybody's."""
    folder, shown = Folder(range(3)), []
    for instance in (2, 0, 1):
        shown += folder.add(instance, b"I am %d\n" % instance, 0.0)
        shown += folder.add(instance, b"ready\n", 0.0)

    assert shown == [((2,), b"I am 2\n"), ((0,), b"I am 0\n"), ((1,), b"I am 1\n"), ((0, 1, 2), b"ready\n")]


def test_a_line_waits_for_others_only_so_long() -> None:
    """Then it is shown with those who printed it."""
    folder = Folder(range(3))
    assert folder.add(0, b"a\n", 10.0) == []
    assert folder.add(2, b"a\n", 10.1) == []
    assert folder.due_at_seconds == 10.0 + HOLD_SECONDS

    assert folder.due(10.1) == []
    assert folder.due(10.0 + HOLD_SECONDS) == [((0, 2), b"a\n")]
    assert folder.add(1, b"a\n", 10.3) == []


def test_nobody_waits_for_one_that_has_ended() -> None:
    """The lines that all others hold are shown when it ends."""
    folder = Folder(range(3))
    for instance in (0, 1):
        assert folder.add(instance, b"own %d\n" % instance, 0.0) == []
        assert folder.add(instance, b"a\n", 0.0) == []
        assert folder.add(instance, b"more %d\n" % instance, 0.0) == []

    assert folder.end(2) == [((0,), b"own 0\n"), ((1,), b"own 1\n"), ((0, 1), b"a\n")]
    assert folder.end(0) == [((1,), b"more 1\n")]
    assert folder.end(1) == [((0,), b"more 0\n")]


def test_two_orders_of_the_same_lines() -> None:
    """What one prints in another order cannot all be folded, and is shown all the same."""
    folder, shown = Folder(range(2)), []
    for instance, line in ((0, b"a\n"), (0, b"b\n"), (1, b"b\n"), (1, b"a\n")):
        shown += folder.add(instance, line, 0.0)
    shown += folder.due(HOLD_SECONDS)

    assert shown == [((0,), b"a\n"), ((0, 1), b"b\n"), ((1,), b"a\n")]


def test_memory_is_bounded() -> None:
    """A flood of one instance is not held back for the others."""
    folder = Folder(range(2))
    line = b"x" * 999 + b"\n"
    shown = [folded for number in range(5000) for folded in folder.add(0, b"%d " % number + line, 0.0)]

    assert len(shown) * len(line) > 5000 * len(line) - MAX_HELD_BYTES
    assert [folded.line.split()[0] for folded in shown] == [b"%d" % number for number in range(len(shown))]


def test_what_was_shown_takes_no_room() -> None:
    """After any number of lines that all printed, one that only one has printed waits for the others."""
    folder = Folder(range(3))
    line = b"x" * 999 + b"\n"
    for number in range(2 * MAX_HELD_BYTES // len(line)):
        shown = [folder.add(instance, b"%d " % number + line, 0.0) for instance in range(3)]
        assert shown == [[], [], [((0, 1, 2), b"%d " % number + line)]]

    assert folder.add(0, line, 0.0) == []
