"""Whether memory grows without end, and when it will be at its limit. Pure."""

from collections.abc import Callable, Mapping, Sequence
from statistics import linear_regression
from typing import Final

from popdist.errors import name_instances
from poprun.observe.account.state import InstanceStatus, MemoryCurve
from poprun.plan.plan import LaunchPlan
from poprun.text.ranges import describe_bytes

_LEAST_SECONDS: Final = 60.0  # a program that starts takes more and more memory, too
_LEAST_SAMPLES: Final = 12
_NUM_PARTS: Final = 4
_MOST_SECONDS: Final = 3600.0  # a limit that is further away is not worth a warning
_LEAST_SHARE: Final = 0.05  # of the room that was left: so much it has grown


def growth_rate(curve: MemoryCurve) -> float:
    """Bytes a second by which memory has grown over the last two thirds of its curve; 0 if not steadily."""
    if not curve.samples:
        return 0.0
    first, last = curve.samples[0][0], curve.samples[-1][0]
    samples = [it for it in curve.samples if it[0] >= first + (last - first) / 3]
    if len(samples) < _LEAST_SAMPLES or samples[-1][0] - samples[0][0] < _LEAST_SECONDS:
        return 0.0
    size = len(samples) // _NUM_PARTS
    rates = [_rate(samples[part * size : (part + 1) * size]) for part in range(_NUM_PARTS)]
    rate = _rate(samples)
    return rate if rate > 0.0 and all(rate / 2 <= it <= rate * 2 for it in rates) else 0.0


def _rate(samples: Sequence[tuple[float, int]]) -> float:
    return linear_regression(*zip(*samples, strict=True)).slope


def warn_of_growth(
    plan: LaunchPlan, statuses: Sequence[InstanceStatus], warned: dict[str, str], warn: Callable[[str], None]
) -> None:
    """Warn of the memory of each host that is not yet among those ``warned`` of, and add it to them."""
    hosts = {status.index: plan.instance(status.index).host for status in statuses}
    for host, warning in find_growth(statuses, hosts).items():
        if host not in warned:
            warned[host] = warning
            warn(f"warning: {warning}")


def find_growth(statuses: Sequence[InstanceStatus], hosts: Mapping[int, str]) -> dict[str, str]:
    """A warning for each host whose memory will be full within an hour, if its instances go on like this."""
    rates = {status.index: growth_rate(status.memory) for status in statuses}
    found = {}
    for host in dict.fromkeys(hosts.values()):
        here = [status for status in statuses if hosts[status.index] == host and rates[status.index] > 0.0]
        room = min((it.machine.room_bytes for it in here if it.machine and it.machine.room_bytes), default=0)
        rate = sum(rates[status.index] for status in here)
        grown = sum(it.memory.samples[-1][1] - it.memory.samples[0][1] for it in here)
        if room and rate * _MOST_SECONDS >= room and grown >= _LEAST_SHARE * room:
            minutes = max(1, round(room / rate / 60))
            names = name_instances([status.index for status in here])
            found[host] = (
                f"the memory of {names} grows by {describe_bytes(round(rate * 60))} a minute: in "
                f"{minutes} min {describe_bytes(room)} more are used, which is all that is left"
            )
    return found
