"""Things that are timed by turns, so that a slow moment of the machine slows all of them."""

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Name = TypeVar("Name")


def seconds(step: Callable[[], Any], num_steps: int = 1) -> float:
    """Of one of ``num_steps`` steps."""
    start = time.perf_counter()
    for _ in range(num_steps):
        step()
    return (time.perf_counter() - start) / num_steps


def by_turns(clocks: Mapping[Name, Callable[[], float]], rounds: int) -> dict[Name, list[float]]:
    """What each clock tells in every round; the next round has them the other way round."""
    times: dict[Name, list[float]] = {name: [] for name in clocks}
    for number in range(rounds):
        for name in reversed(list(clocks)) if number % 2 else clocks:
            times[name].append(clocks[name]())
    return times
