"""The offset between this clock and the clocks of other hosts, measured with messages that contain the time.

The other host answers at some moment between the question and the arrival of the answer. So each exchange gives
bounds for the offset, however long the messages travel.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from poprun.launch.messages.control import Message

ROUND_SECONDS: Final = 5.0
"""The time between two rounds of questions to the clocks of other hosts."""

_QUESTIONS_OF_ROUND: Final = 6
_RECENT_ROUNDS: Final = 12
_MOST_ROUNDS: Final = 512
_NANOSECONDS: Final = 1e9


class Exchange(NamedTuple):
    """A question for another host's time: when it was sent, the time in the answer, and when the answer came."""

    sent_ns: int
    answered_ns: int
    heard_ns: int

    @property
    def middle_ns(self) -> int:
        """The middle between the question and the arrival of the answer, by this host's clock, in ns."""
        return (self.sent_ns + self.heard_ns) // 2

    @property
    def offset_seconds(self) -> float:
        """The seconds by which the other clock is ahead, if question and answer were equally long on the way."""
        return (self.answered_ns - self.middle_ns) / _NANOSECONDS

    @property
    def uncertainty_seconds(self) -> float:
        """The largest possible error of ``offset_seconds``: half the time between question and answer."""
        return (self.heard_ns - self.sent_ns) / 2 / _NANOSECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockFit:
    """The offset of another host's clock as a linear function of this host's time."""

    at_ns: int  # a time of our clock
    offset_seconds: float  # seconds by which the other clock was ahead at ``at_ns``
    drift: float  # how much the other clock gains, in seconds per second
    drift_uncertainty: float  # the largest error of ``drift``; 0 with only one exchange
    uncertainty_seconds: float  # the largest error of an offset from the first to the last exchange

    def offset_at(self, our_ns: int) -> float:
        """Return how many seconds the other host's clock is ahead when this host's clock shows ``our_ns``."""
        return self.offset_seconds + self.drift * (our_ns - self.at_ns) / _NANOSECONDS

    def to_theirs(self, our_ns: int) -> int:
        """Return the time of the other host's clock when this host's clock shows ``our_ns``."""
        return our_ns + round(self.offset_at(our_ns) * _NANOSECONDS)

    def to_ours(self, their_ns: int) -> int:
        """Return the time of this host's clock when the other host's clock shows ``their_ns``."""
        without_drift_ns = their_ns - round(self.offset_seconds * _NANOSECONDS)
        return without_drift_ns - round((without_drift_ns - self.at_ns) * self.drift / (1 + self.drift))


def fit_clock(exchanges: Sequence[Exchange]) -> ClockFit:
    """Return another clock's offset as a straight line over time through two measurements in ``exchanges``: the
    most exact one in the first quarter of ``exchanges``, and the most exact one in the last quarter.
    """
    share = max(1, len(exchanges) // 4)
    first = min(exchanges[:share], key=lambda it: it.uncertainty_seconds)
    last = min(exchanges[-share:], key=lambda it: it.uncertainty_seconds)
    errors = first.uncertainty_seconds, last.uncertainty_seconds
    seconds = (last.middle_ns - first.middle_ns) / _NANOSECONDS
    drift = (last.offset_seconds - first.offset_seconds) / seconds if seconds else 0.0
    line = ClockFit(
        at_ns=first.middle_ns,
        offset_seconds=first.offset_seconds,
        drift=drift,
        drift_uncertainty=sum(errors) / seconds if seconds else 0.0,
        uncertainty_seconds=max(errors),
    )
    # outside of the interval between the two exchanges, the errors of both count
    outside = max(first.middle_ns - exchanges[0].sent_ns, exchanges[-1].heard_ns - last.middle_ns) / _NANOSECONDS
    bend = max(abs(line.offset_at(it.middle_ns) - it.offset_seconds) - it.uncertainty_seconds for it in exchanges)
    more = outside * line.drift_uncertainty + max(0.0, bend)
    return replace(line, uncertainty_seconds=line.uncertainty_seconds + more)


class HostClocks:
    """The clocks of a job's other hosts, compared with poprun's: poprun repeatedly asks an agent on each host."""

    def __init__(
        self,
        host_of: Mapping[int, str],
        send_order: Callable[[int, Message], object],
        round_seconds: float = ROUND_SECONDS,
    ) -> None:
        self._host_of = host_of  # the host of each instance on another host
        self._send_order = send_order
        self._round_seconds = round_seconds
        # the best exchange of each round, for each host; long jobs keep only some of the earlier rounds
        self.rounds: dict[str, list[Exchange]] = {host: [] for host in host_of.values()}
        self._num_open: dict[str, int] = {}
        self._due_seconds: dict[str, float] = {}

    def ask(self, reachable: Collection[int], now_seconds: float) -> None:
        """Ask each host for its time, by an instance in ``reachable``, unless it was asked in the last 5 s."""
        for index, host in self._host_of.items():
            if index in reachable and now_seconds >= self._due_seconds.get(host, 0.0):
                self._due_seconds[host] = now_seconds + self._round_seconds
                self._num_open[host] = _QUESTIONS_OF_ROUND
                self._send_order(index, {"order": "clock", "sent_ns": time.time_ns()})

    def add(self, instance: int, answer: Mapping[str, Any], heard_ns: int) -> None:
        """Record the time in a host's answer; ask the host again until it has answered six questions in a row."""
        exchange = Exchange(answer["sent_ns"], answer["answered_ns"], heard_ns)
        host = self._host_of.get(instance, "")
        num_open, rounds = self._num_open.get(host, 0), self.rounds.get(host)
        if not num_open or rounds is None or not exchange.sent_ns <= exchange.heard_ns:
            return
        if num_open == _QUESTIONS_OF_ROUND:
            rounds.append(exchange)
            if len(rounds) > _MOST_ROUNDS:
                del rounds[1:-1:2]
        elif exchange.uncertainty_seconds < rounds[-1].uncertainty_seconds:
            rounds[-1] = exchange
        self._num_open[host] -= 1
        if self._num_open[host]:
            self._send_order(instance, {"order": "clock", "sent_ns": time.time_ns()})

    def round_trips(self) -> dict[str, float]:
        """Return the shortest recent time, in seconds, between a question and its answer for each host."""
        pairs = {host: rounds[-_RECENT_ROUNDS:] for host, rounds in self.rounds.items() if rounds}
        return {host: min(2 * it.uncertainty_seconds for it in recent) for host, recent in pairs.items()}

    def fits(self) -> dict[str, ClockFit]:
        """Return, for each host that has answered, its clock's recent offset as a linear function of time."""
        return recent_fits(self.rounds)


def recent_fits(rounds: Mapping[str, Sequence[Exchange]]) -> dict[str, ClockFit]:
    """Return, for each host in ``rounds``, its clock's offset in the last minute as a linear function of time."""
    return {host: fit_clock(exchanges[-_RECENT_ROUNDS:]) for host, exchanges in rounds.items() if exchanges}
