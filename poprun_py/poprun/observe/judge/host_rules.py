"""Rules that find problems of a job's hosts, such as memory that will soon be full. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import linear_regression
from typing import Final

from poprun.observe.account.state import InstanceStatus, MemoryCurve

_MOST_SECONDS: Final = 3600.0  # a limit of memory that is further away is not worth a warning
_LEAST_GROWTH: Final = 0.05  # of the room that was left: so much memory has grown
_LEAST_CURVE_SECONDS: Final = 60.0  # a program that starts takes more and more memory, too
_LEAST_SAMPLES: Final = 12
_NUM_PARTS: Final = 4
_LEAST_SECONDS: Final = 30.0  # in which processors were looked at
_LEAST_THROTTLED: Final = 0.05  # of the time


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFinding:
    """A problem of a host, such as full memory or throttled processors, that a rule has found."""

    kind: str  # which `observe.show.host_words` knows
    host: str
    instances: tuple[int, ...]  # the instances on the host that the rule used
    numbers: Mapping[str, float]  # for the words


HostRule = Callable[[str, Sequence[InstanceStatus]], HostFinding | None]
"""A function that returns a problem of a host, or None, given the status of each instance on the host."""


def find_host_findings(statuses: Sequence[InstanceStatus], hosts: Mapping[int, str]) -> list[HostFinding]:
    """Return the problems that the rules find on each host of a job; ``hosts`` has the host of each instance."""
    findings = []
    for host in dict.fromkeys(hosts.values()):
        on_host = [status for status in statuses if hosts[status.index] == host]
        findings += [finding for rule in RULES if (finding := rule(host, on_host)) is not None]
    return findings


def find_growth(host: str, here: Sequence[InstanceStatus]) -> HostFinding | None:
    """Return a problem if the memory of ``host``, at its present growth, will be full within an hour; or None."""
    rates = {status.index: growth_rate(status.memory) for status in here}
    growing = [status for status in here if rates[status.index] > 0.0]
    room = min((it.machine.room_bytes for it in growing if it.machine and it.machine.room_bytes), default=0)
    rate = sum(rates.values())
    grown = sum(it.memory.samples[-1][1] - it.memory.samples[0][1] for it in growing)
    if not room or rate * _MOST_SECONDS < room or grown < _LEAST_GROWTH * room:
        return None
    return HostFinding(
        kind="growth", host=host, instances=tuple(it.index for it in growing), numbers={"room": room, "rate": rate}
    )


def growth_rate(curve: MemoryCurve) -> float:
    """Return by how many bytes per second memory grew in the last two thirds of ``curve``; 0 if not steadily."""
    if not curve.samples:
        return 0.0
    first, last = curve.samples[0][0], curve.samples[-1][0]
    samples = [it for it in curve.samples if it[0] >= first + (last - first) / 3]
    if len(samples) < _LEAST_SAMPLES or samples[-1][0] - samples[0][0] < _LEAST_CURVE_SECONDS:
        return 0.0
    size = len(samples) // _NUM_PARTS
    rates = [_rate(samples[part * size : (part + 1) * size]) for part in range(_NUM_PARTS)]
    rate = _rate(samples)
    return rate if rate > 0.0 and all(rate / 2 <= it <= rate * 2 for it in rates) else 0.0


def _rate(samples: Sequence[tuple[float, int]]) -> float:
    return linear_regression(*zip(*samples, strict=True)).slope


def find_throttling(host: str, here: Sequence[InstanceStatus]) -> HostFinding | None:
    """Return a problem if the processors of ``host`` were throttled for much of the time; None if not."""
    shares = {"heat": 0.0, "quota": 0.0}
    for status in here:
        first, last, usage = status.first_machine, status.machine, status.usage
        seconds = 0.0 if usage is None else usage.at_seconds - (status.started_at_seconds or usage.at_seconds)
        if first is None or last is None or seconds < _LEAST_SECONDS:
            continue
        heat = [it.counters.get("heat_seconds", 0.0) for it in (first, last)]
        shares["heat"] = max(shares["heat"], (heat[1] - heat[0]) / seconds)
        shares["quota"] = max(shares["quota"], (last.throttled_seconds - first.throttled_seconds) / seconds)
    why = max(shares, key=lambda name: shares[name])
    if shares[why] < _LEAST_THROTTLED:
        return None
    numbers = {"share": min(1.0, shares[why])}
    return HostFinding(kind=why, host=host, instances=tuple(it.index for it in here), numbers=numbers)


RULES: Final[tuple[HostRule, ...]] = (find_growth, find_throttling)
