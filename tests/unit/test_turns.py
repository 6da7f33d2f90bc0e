"""The order in which works that pause go on."""

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from popdist.comm.two_level import in_turns


def test_a_work_begins_before_those_before_it_go_on() -> None:
    """So that something travels while the next one computes."""
    told: list[str] = []

    def work(name: str) -> Iterator[None]:
        told.append(f"{name} begins")
        yield
        told.append(f"{name} goes on")
        yield
        told.append(f"{name} ends")

    in_turns(work(name) for name in "abc")

    assert told == [
        "a begins",
        "b begins",
        "a goes on",
        "c begins",
        "b goes on",
        "a ends",
        "c goes on",
        "b ends",
        "c ends",
    ]


@given(st.lists(st.integers(0, 4), max_size=8))
def test_every_work_is_done_once_and_in_its_order(pauses: list[int]) -> None:
    """However often each pauses."""
    done: dict[int, list[int]] = {number: [] for number in range(len(pauses))}

    def work(number: int, times: int) -> Iterator[None]:
        for step in range(times):
            done[number].append(step)
            yield
        done[number].append(times)

    in_turns(work(number, times) for number, times in enumerate(pauses))

    assert done == {number: list(range(times + 1)) for number, times in enumerate(pauses)}
