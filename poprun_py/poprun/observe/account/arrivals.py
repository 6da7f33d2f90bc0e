"""The times at which instances called each collective: which instance called it last, and how much later. Pure."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any, Final

from popdist.ground.progress import PhaseCounters, read_places, read_stamps, read_step_ends
from poprun.observe.account.state import InstanceStatus, MachineTotals

_MICROSECONDS: Final = 1e6
_LEAST_MEMBERS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMoments:
    """The times at which a program called the collectives of one process group."""

    by_number: Mapping[int, float]  # seconds since 1970, by the number of the collective
    ranks: tuple[int, ...] = ()  # the ranks of the group in the job; empty if torch does not record the ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One report of an instance: when it called collectives and ended steps, and totals since its start."""

    at_seconds: float  # monotonic time at which poprun received the report
    groups: Mapping[str, GroupMoments]
    step_ends: Sequence[float]  # ends of the last optimizer steps, ascending, by the same clock
    counters: PhaseCounters
    machine: MachineTotals
    places: Mapping[str, str]  # the program's most frequent line in each phase, as ``file:line``


def read_look(
    event: Mapping[str, Any], status: InstanceStatus, at_seconds: float, offset_seconds: float
) -> Look | None:
    """Return what ``event``, a message of the agent that watches one instance, reports; None if the program has no
    counters. The agent's clock is ahead of poprun's clock by ``offset_seconds``.
    """
    page = bytes.fromhex(event["page"])
    counters = PhaseCounters.read(page)
    if counters is None:
        return None
    groups = {
        name: GroupMoments(by_number={number: at - offset_seconds for number, at in moments.items()})
        for name, moments in read_stamps(page).items()
    }
    try:
        for name, group in event["groups"].items():
            seconds = [number / _MICROSECONDS - offset_seconds for number in group["microseconds"]]
            moments = dict(zip(map(int, group["numbers"]), seconds, strict=True))
            groups[name] = GroupMoments(ranks=tuple(map(int, group["ranks"])), by_number=moments)
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    return Look(
        at_seconds=at_seconds,
        groups=groups,
        step_ends=[at - offset_seconds for at in read_step_ends(page)],
        counters=counters,
        machine=status.machine or MachineTotals(),
        places=read_places(page),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A period of a few seconds of a job: how long a step took in it, and how late each instance was."""

    began_seconds: float  # since the beginning of the attempt
    ended_seconds: float
    first_step: int  # optimizer steps before the window; 0 if the program has no optimizer
    num_steps: int  # steps in the window; collectives if the program has no optimizer
    step_seconds: float
    steps: Sequence[Mapping[int, float]]  # the delays in each step that lies wholly in the window
    delays: Mapping[int, float]  # largest delay in a step against most other instances, in the mean
    waits: Mapping[int, float]  # how long the instance waited for the last instance in a step, in the mean
    usual: Mapping[int, float]  # the median of the delays
    phases: Mapping[int, Mapping[str, float]]  # seconds of a step in each phase
    totals: Mapping[int, Mapping[str, float]]  # growth of the running totals in the whole window
    newest_moment: float  # when the last collective was called, in seconds since 1970


Arrivals = Mapping[int, float]
"""The time at which each member of a process group called one collective, by the index of the instance."""


def find_arrivals(looks: Mapping[int, Look], after: float) -> list[Arrivals]:
    """Return, for each collective that all members of its process group have called, the time of each member's
    call. The result has only the collectives whose last member called later than the time ``after``.
    """
    collectives = []
    for name in {name for look in looks.values() for name in look.groups}:
        groups = {index: look.groups[name] for index, look in looks.items() if name in look.groups}
        members = {member for group in groups.values() for member in group.ranks} or set(groups)
        if len(members) < _LEAST_MEMBERS or not members <= groups.keys():
            continue
        numbers = set.intersection(*(set(groups[index].by_number) for index in members))
        arrivals = ({index: groups[index].by_number[number] for index in members} for number in numbers)
        collectives += [it for it in arrivals if max(it.values()) > after]
    return sorted(collectives, key=lambda it: max(it.values()))


def measure_window(
    before: Mapping[int, Look], now: Mapping[int, Look], began_at_seconds: float, after: float
) -> Window | None:
    """Return how long the steps between two reports took, and how late each instance was; None if none ended."""
    arrivals = find_arrivals(now, after)
    seconds = fmean(now[index].at_seconds - before[index].at_seconds for index in now)
    first, last = (median(look.counters.num_optimizer_steps for look in looks.values()) for looks in (before, now))
    num_steps = int(last - first) if last else len(arrivals)
    if not arrivals or num_steps < 1 or seconds <= 0.0:
        return None
    step_seconds = seconds / num_steps if last else _mean_gap(arrivals)
    steps = [_worst_delays(cycle) for cycle in _cycles(arrivals, now)]
    if not steps:
        return None
    return Window(
        began_seconds=fmean(look.at_seconds for look in before.values()) - began_at_seconds,
        ended_seconds=fmean(look.at_seconds for look in now.values()) - began_at_seconds,
        first_step=int(first),
        num_steps=num_steps,
        step_seconds=step_seconds,
        steps=[delays for delays, _ in steps],
        delays={index: fmean(delays.get(index, 0.0) for delays, _ in steps) for index in now},
        waits={index: fmean(waits.get(index, 0.0) for _, waits in steps) for index in now},
        usual={index: median(delays.get(index, 0.0) for delays, _ in steps) for index in now},
        phases={index: _phase_seconds(before[index], now[index], num_steps) for index in now},
        totals={index: _totals(before[index], now[index]) for index in now},
        newest_moment=max(arrivals[-1].values()),
    )


def _mean_gap(arrivals: Sequence[Arrivals]) -> float:
    """Return the mean time in seconds between two collectives, for a program whose steps are not counted."""
    ends = [max(it.values()) for it in arrivals]
    return fmean(after - before for before, after in pairwise(ends)) if len(ends) > 1 else 0.0


def _cycles(arrivals: Sequence[Arrivals], looks: Mapping[int, Look]) -> list[list[Arrivals]]:
    """Return a list of collectives for each whole step; if steps are not counted, for each collective alone."""
    if not any(look.step_ends for look in looks.values()):
        return [[arrival] for arrival in arrivals]
    cycles: dict[int, list[Arrivals]] = {}
    for arrival in arrivals:
        member = min(arrival)
        ends = looks[member].step_ends
        number = bisect_left(ends, arrival[member])
        if 0 < number < len(ends):
            step = looks[member].counters.num_optimizer_steps - len(ends) + number
            cycles.setdefault(step, []).append(arrival)
    return list(cycles.values())


def last_of(arrivals: Arrivals) -> int:
    """Return the index of the instance that was the last to call the collective with the times ``arrivals``."""
    return max(arrivals, key=lambda index: arrivals[index])


def delay_of(instance: int, arrivals: Arrivals) -> float:
    """Return by how many seconds ``instance`` called a collective later than the median of the other instances."""
    return arrivals[instance] - median(at for other, at in arrivals.items() if other != instance)


def _worst_delays(cycle: Sequence[Arrivals]) -> tuple[dict[int, float], dict[int, float]]:
    """Return each instance's largest delay in the collectives ``cycle`` of one step, and how long each instance
    waited for the last one in the collective whose call times differ most.
    """
    delays: dict[int, float] = {}
    for arrival in cycle:
        for index in arrival:
            delays[index] = max(delays.get(index, 0.0), delay_of(index, arrival))
    widest = max(cycle, key=lambda it: max(it.values()) - min(it.values()))
    return delays, {index: max(widest.values()) - at for index, at in widest.items()}


def _phase_seconds(before: Look, now: Look, num_steps: int) -> dict[str, float]:
    earlier = before.counters.seconds
    return {name: (total - earlier[name]) / num_steps for name, total in now.counters.seconds.items()}


def _totals(before: Look, now: Look) -> dict[str, float]:
    pairs = {
        "long_forward": (before.counters.long_forward_seconds, now.counters.long_forward_seconds),
        "idle_backward": (before.counters.idle_backward_seconds, now.counters.idle_backward_seconds),
        "gc": (before.counters.gc_seconds, now.counters.gc_seconds),
        "disk": (before.counters.disk_seconds, now.counters.disk_seconds),
        "workers": (before.counters.worker_seconds, now.counters.worker_seconds),
        "messages": (before.counters.message_seconds, now.counters.message_seconds),
        "samples": (before.counters.num_samples, now.counters.num_samples),
        "run_delay": (before.machine.run_delay_seconds, now.machine.run_delay_seconds),
        "throttled": (before.machine.throttled_seconds, now.machine.throttled_seconds),
        "faults": (before.machine.num_major_faults, now.machine.num_major_faults),
    }
    return {name: later - earlier for name, (earlier, later) in pairs.items()}
