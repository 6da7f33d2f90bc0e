"""Questions to programs of the machine, asked for a bounded time.

Holds poprun.launch.process.spawn.
"""

import pytest

from poprun.launch.process.spawn import answer_of


def test_both_streams_are_read() -> None:
    """Some runtimes print their version on standard error."""
    answer = answer_of(("sh", "-c", "echo out; echo err >&2"), 10.0)

    assert answer == "out\nerr\n"


@pytest.mark.parametrize("words", [("/no/such/program",), ("sh", "-c", "echo all is lost, 0; exit 9")])
def test_a_program_that_fails_has_no_answer(words: tuple[str, ...]) -> None:
    """What a broken driver says is no inventory."""
    assert answer_of(words, 10.0) is None


def test_a_program_that_takes_too_long_is_killed() -> None:
    """With what it has started: the suite's fixtures look."""
    assert answer_of(("sh", "-c", "sleep 600 & echo slow; sleep 600"), 0.2) is None
