"""Threads of which one runs at a time: whatever goes wrong in a turn, the others have theirs, and all end."""

from functools import partial

import pytest

from popdist.step.training.replica_turns import Turns


@pytest.mark.parametrize("wrong", ["enter", "exit"])
def test_an_error_at_an_end_of_a_turn_stops_nobody(wrong: str) -> None:
    """As when there is no memory to keep what a replica has: it is raised when all others have computed."""
    done: list[int] = []

    def fail(when: str, number: int) -> None:
        if number == 0 and when == wrong:
            raise MemoryError

    turns = Turns(partial(fail, "enter"), partial(fail, "exit"))

    def compute(number: int) -> None:
        turns.pass_on(number)
        done.append(number)

    with pytest.raises(MemoryError):
        turns.run([partial(compute, number) for number in range(3)], interrupt=lambda: None)
    assert done == [1, 2]
