"""Offset and drift of other clocks: the stated uncertainty holds, and each host is asked by one agent."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from poprun.launch.messages.clock import ROUND_SECONDS, Exchange, HostClocks, fit_clock

SECOND = 1_000_000_000
ROUNDING_SECONDS = 5e-9
BEGAN_NS = 1_800_000_000 * SECOND

delays = st.integers(0, 20_000_000)
exchanges = st.lists(st.tuples(st.integers(0, 300 * SECOND), delays, delays), min_size=1, max_size=20)


@example([(0, 0, 0)] * 6 + [(0, 3, 0), (9, 0, 4)], 0.0, 0.0, 0.0)
@given(exchanges, st.floats(-100, 100), st.floats(-5e-4, 5e-4), st.floats(0, 1))
def test_the_stated_uncertainty_holds(
    told: list[tuple[int, int, int]], offset: float, drift: float, place: float
) -> None:
    """For every clock that runs evenly, whatever the ways take, at all times between the exchanges."""

    def ahead_seconds(our_ns: int) -> float:
        return offset + drift * (our_ns - BEGAN_NS) / SECOND

    def exchange(sent_ns: int, there: int, back: int) -> Exchange:
        at_ns = sent_ns + there
        return Exchange(sent_ns, at_ns + round(ahead_seconds(at_ns) * SECOND), at_ns + back)

    made = sorted(exchange(BEGAN_NS + sent_ns, there, back) for sent_ns, there, back in told)
    made.sort(key=lambda it: it.middle_ns)
    clock = fit_clock(made)

    first_ns, last_ns = made[0].middle_ns, made[-1].middle_ns
    at_ns = first_ns + round(place * (last_ns - first_ns))
    slack = ROUNDING_SECONDS + 5e-4 * max(it.heard_ns - it.sent_ns for it in made) / SECOND
    assert abs(clock.offset_at(at_ns) - ahead_seconds(at_ns)) <= clock.uncertainty_seconds + slack
    share = max(1, len(made) // 4)
    lengths_ns = [end.middle_ns - begin.middle_ns for begin in made[:share] for end in made[-share:]]
    if clock.drift_uncertainty:
        nearest_ns = min(it for it in lengths_ns if it)
        assert clock.drift == pytest.approx(drift, abs=clock.drift_uncertainty + slack * SECOND / nearest_ns)
    if abs(clock.drift) < 1e-3:
        assert abs(clock.to_ours(clock.to_theirs(at_ns)) - at_ns) <= ROUNDING_SECONDS * SECOND


def test_a_clock_that_was_set_is_less_certain() -> None:
    """An exchange that the line misses shows that the clock did not run evenly."""
    even = [Exchange(at * SECOND, at * SECOND, at * SECOND + 2) for at in range(9)]
    jumped = [*even[:4], *(Exchange(it.sent_ns, it.answered_ns + SECOND, it.heard_ns) for it in even[4:])]

    assert fit_clock(even).uncertainty_seconds < 1e-8
    assert fit_clock(jumped).uncertainty_seconds > 0.4


def test_each_host_is_asked_in_rounds_by_one_agent_that_lives() -> None:
    """As soon as an agent is there, then every few seconds; the shortest exchange of a round counts."""
    asked: list[int] = []
    clocks = HostClocks({1: "b", 2: "b", 3: "c"}, lambda instance, _order: asked.append(instance))

    for reachable, now_seconds in (({0}, 0.0), ({0, 1, 2}, 1.0), ({1, 2, 3}, 1.5), ({2}, 1.0 + ROUND_SECONDS)):
        clocks.ask(reachable, now_seconds)
    assert asked == [1, 3, 2]
    for heard_ns in (9, 5, 8, 7, 6, 6):
        clocks.add(2, {"sent_ns": 0, "answered_ns": 7}, heard_ns)
    assert asked == [1, 3, *[2] * 6]
    clocks.add(2, {"sent_ns": 0, "answered_ns": 0}, 1)
    clocks.add(3, {"sent_ns": 2, "answered_ns": 0}, 1)
    assert clocks.rounds == {"b": [Exchange(0, 7, 5)], "c": []}
    assert list(clocks.fits()) == ["b"]


def test_a_long_job_keeps_few_rounds() -> None:
    """Its first and its last among them."""
    clocks = HostClocks({1: "b"}, lambda _instance, _order: None)
    for second in range(5000):
        clocks.ask({1}, second * ROUND_SECONDS)
        clocks.add(1, {"sent_ns": second, "answered_ns": second}, second)

    kept = clocks.rounds["b"]
    assert len(kept) <= 512
    assert (kept[0].sent_ns, kept[-1].sent_ns) == (0, 4999)
