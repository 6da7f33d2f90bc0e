"""The judge of slowness: which instance keeps the others waiting, in which phase, and why. Pure.

An instance is called slow only if it comes later than most others in several windows in a row, by a large part
of a step, and much later than any other instance.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import comb, inf
from statistics import fmean, median, stdev
from typing import Final

from popdist.errors import name_instances
from poprun.observe.account.arrivals import Window
from poprun.observe.account.judgements import Slowness

NUM_WINDOWS: Final = 4
"""The number of consecutive periods of a few seconds (windows) in which the same instance must be late."""

MOST_WINDOWS: Final = 3 * NUM_WINDOWS
"""The number of the last windows that are kept, to find an instance that is late only in some steps."""

_LEAST_SECONDS: Final = 0.004
_LEAST_SHARE: Final = 0.1  # of a step
_LEAD: Final = 2.0  # the delay of a slow instance, divided by the delay of the next one
_LEAST_CERTAINTY: Final = 4.0
_MOST_CHANCE: Final = 1e-5  # that all late steps belong to one instance by chance, such as 17 of 17
_LATE_SHARE: Final = 0.5  # of a mean step, by which a late step is late
_SPREAD: Final = 0.75  # of the windows have a late step
_LONG_TRIP_SECONDS: Final = 0.002
_MUCH_COMMUNICATION: Final = 0.3  # of a step
_CLEARLY: Final = 1.5
_LEAST_PAUSE_SECONDS: Final = 1.0
_LEAST_CAUSE: Final = 0.4  # a reason explains at least this part of the lost time
_MORE_SAMPLES: Final = 1.1
_FAULTS_A_SECOND: Final = 100.0
_OWN_PHASES: Final = ("data", "forward", "optimizer", "checkpoint", "outside")


def find_slowness(windows: Sequence[Window], trip_seconds: float = 0.0) -> Slowness | None:
    """Return which instance was late in each of the last ``windows`` (periods of a few seconds), in which phase,
    and why; None if there is no such instance.

    ``trip_seconds`` is the longest round trip of a message between hosts; 0 on one host. An instance that is late
    by less than a round trip, or that works no longer than the others, only receives messages later.
    """
    latest = _find_latest(windows, trip_seconds)
    last = windows[-NUM_WINDOWS:]
    how_often: tuple[str, ...] = ()
    if latest is None:
        last = windows[-MOST_WINDOWS:]
        latest, how_often = _find_late_steps(last)
    if latest is None or (trip_seconds and not _works_longer(last, *latest)):
        return None
    instance, delay_seconds = latest
    return Slowness(
        instance=instance,
        phase=find_phase(last, instance),
        delay_seconds=delay_seconds,
        share=min(1.0, delay_seconds / _step_seconds(last)),
        since_seconds=last[0].began_seconds,
        since_step=last[0].first_step,
        num_windows=len(last),
        reasons=(*how_often, *find_reasons(last, instance)),
    )


def _find_late_steps(windows: Sequence[Window]) -> tuple[tuple[int, float] | None, tuple[str, ...]]:
    """Return the instance that is late in some steps, but not in most, with its mean delay in seconds, and texts
    on how often it is late; None and () if there is no such instance.

    Instances that are late by chance are late in turns, so the probability of many late steps of one instance is
    the probability of coin tosses. Windows in which most steps are late do not count.
    """
    if len(windows) < NUM_WINDOWS or any(it["messages"] for window in windows for it in window.totals.values()):
        return None, ()
    least = max(_LEAST_SECONDS, _LATE_SHARE * _step_seconds(windows))
    steps = [[delays for delays in window.steps if len(delays) > 1] for window in windows]
    late = [
        [max(it, key=lambda index: it[index]) for it in in_window if max(it.values()) >= least]
        for in_window in steps
    ]
    num_late, num_steps = Counter(index for late_ones in late for index in late_ones), sum(map(len, steps))
    is_spread = sum(map(bool, late)) >= _SPREAD * len(windows) and all(
        len(late_ones) <= len(in_window) / 2 for late_ones, in_window in zip(late, steps, strict=True)
    )
    if not num_late or not is_spread:
        return None, ()
    ((instance, count),) = num_late.most_common(1)
    total = num_late.total()
    chance = sum(comb(total, number) for number in range(count, total + 1)) / 2**total
    delay_seconds = fmean(it.get(instance, 0.0) for in_window in steps for it in in_window)
    if chance > _MOST_CHANCE or delay_seconds < _LEAST_SHARE * _step_seconds(windows):
        return None, ()
    return (instance, delay_seconds), (f"late in one step of {num_steps / count:.0f}",)


def _find_latest(windows: Sequence[Window], trip_seconds: float) -> tuple[int, float] | None:
    """Return the instance that was late in each recent period, and its mean delay in seconds; None if none was."""
    last = windows[-NUM_WINDOWS:]
    if len(last) < NUM_WINDOWS or any(window.delays.keys() != last[0].delays.keys() for window in last):
        return None
    if any(totals["messages"] for window in last for totals in window.totals.values()):
        return None  # who waits for a message is late without being slow, and nobody records messages
    means = {index: fmean(window.delays[index] for window in last) for index in last[0].delays}
    latest = max(means, key=lambda index: means[index])
    least = max(_LEAST_SECONDS, _LEAST_SHARE * _step_seconds(last), trip_seconds)
    is_always_late = all(_leads(window.usual, latest, least) for window in last)
    is_always_last = all(max(it.delays, key=lambda index: it.delays[index]) == latest for it in last)
    if not is_always_late and not (is_always_last and _leads(means, latest, least)):
        return None
    own_delay = means[latest] - _shared_delay(last, latest)
    if _certainty(last, latest) < _LEAST_CERTAINTY or not _leads({**means, latest: own_delay}, latest, least):
        return None
    return latest, means[latest]


def _step_seconds(windows: Sequence[Window]) -> float:
    return fmean(window.step_seconds for window in windows)


def _works_longer(windows: Sequence[Window], instance: int, delay_seconds: float) -> bool:
    """Whether an instance is late because it works longer, and not because messages reach it late."""
    num_steps = sum(window.num_steps for window in windows)
    work = sum(_excess(windows, instance).values()) - _more(windows, instance, "idle_backward") / num_steps
    return work >= _LEAST_CAUSE * delay_seconds


def has_ended(slowness: Slowness, windows: Sequence[Window]) -> bool:
    """Whether the slow instance is fast again: its mean delay now is less than half of the recorded delay."""
    if slowness.instance is None:
        return False
    last = windows[-(slowness.num_windows // 2) :]
    delays = [window.delays.get(slowness.instance, 0.0) for window in last]
    return fmean(delays) < slowness.delay_seconds / 2


def find_slow_link(
    windows: Sequence[Window], round_trips: Mapping[str, float], own_host: str | None
) -> Slowness | None:
    """Return the hosts whose network is slow, if communication takes a large part of each step; None if not.

    ``round_trips`` are the times of a message from poprun's host to each other host and back. If ``own_host`` is
    None, poprun runs outside of the job, and the way from poprun to the hosts does not count.
    """
    last = windows[-NUM_WINDOWS:]
    if len(last) < NUM_WINDOWS or not round_trips:
        return None
    step = _step_seconds(last)
    seconds = fmean(_communication(window) for window in last)
    if seconds < _MUCH_COMMUNICATION * step:
        return None
    common = 0.0 if own_host else min(round_trips.values())
    slow = [host for host, trip in round_trips.items() if trip - common >= _LONG_TRIP_SECONDS]
    farthest = max(round_trips, key=lambda host: round_trips[host])
    trip_seconds = round_trips[farthest]
    if slow:
        is_own = own_host is not None and len(slow) == len(round_trips) > 1  # each way is slow, all begin here
        others = slow if own_host is None or len(round_trips) > 1 else [own_host, *slow]
        hosts = [str(own_host)] if is_own else others
        whence = own_host or "poprun"
        reason = f"a message from {whence} to {farthest} and back takes {trip_seconds * 1000:.0f} ms"
    elif latest := _find_latest(last, trip_seconds):  # if it works longer, `find_slowness` has named it
        hosts, reason = [], f"{name_instances(latest[:1])} hears late of the others, and works no longer than they"
    else:
        return None
    return Slowness(
        instance=None,
        phase="communication",
        delay_seconds=seconds,
        share=min(1.0, seconds / step),
        since_seconds=last[0].began_seconds,
        since_step=last[0].first_step,
        reasons=(reason,),
        hosts=tuple(hosts),
    )


def _communication(window: Window) -> float:
    """Return the median seconds of communication in a step, without waits for the slowest instance."""
    return median(
        window.phases[index]["communication"]
        + window.totals[index]["idle_backward"] / window.num_steps
        - window.waits[index]
        for index in window.delays
    )


def _shared_delay(windows: Sequence[Window], instance: int) -> float:
    """Return the part of an instance's delay per step, in seconds, that comes from waits for shared cores."""
    more = _more(windows, instance, "run_delay")
    own = sum(window.totals[instance]["run_delay"] for window in windows)
    is_shared = own - more >= own / 2  # most other instances wait for a core nearly as long
    return max(0.0, more) / sum(window.num_steps for window in windows) if is_shared else 0.0


def _certainty(windows: Sequence[Window], instance: int) -> float:
    """Return the mean lead of ``instance`` over the second latest instance, in standard errors of the mean."""
    leads = [
        delays.get(instance, 0.0) - max(late for index, late in delays.items() if index != instance)
        for window in windows
        for delays in window.steps
        if len(delays) > 1
    ]
    error = stdev(leads) / len(leads) ** 0.5 if len(leads) > 1 else 0.0
    return fmean(leads) / error if error else inf


def _leads(delays: Mapping[int, float], instance: int, least_seconds: float) -> bool:
    """Whether ``instance`` is late by ``least_seconds``, and at least twice as late as any other instance."""
    others = max((late for index, late in delays.items() if index != instance), default=0.0)
    return delays[instance] >= max(least_seconds, _LEAD * others)


def find_pause(window: Window) -> tuple[int, str, float] | None:
    """Return who saved or validated while others waited, in which phase and for how many seconds; None if none."""
    for index in window.delays:
        saving = _excess([window], index)["checkpoint"] * window.num_steps
        validating = _more([window], index, "long_forward")
        seconds = max(saving, validating)
        if seconds >= _LEAST_PAUSE_SECONDS and window.usual[index] * window.num_steps < seconds / 2:
            phase = "checkpoint" if saving >= validating else "long forward pass"
            return index, phase, seconds
    return None


def _excess(windows: Sequence[Window], instance: int) -> dict[str, float]:
    """Return by phase how many seconds more per step ``instance`` takes than the median of the other instances."""
    excess = {}
    for phase in (*_OWN_PHASES, "backward"):
        means = {
            index: fmean(window.phases[index].get(phase, 0.0) for window in windows) for index in windows[0].phases
        }
        excess[phase] = means[instance] - median(mean for index, mean in means.items() if index != instance)
    return excess


def find_phase(windows: Sequence[Window], instance: int) -> str:
    """Return the phase in which a slow instance loses most time, such as ``data``, compared with the others.

    If the other instances wait in their backward passes, a slow backward pass looks short. Its delay is then the
    delay that no other phase explains. This rest contains all errors, so it must be clearly larger.
    """
    excess = _excess(windows, instance)
    delay = fmean(window.delays[instance] for window in windows)
    rest = delay - sum(max(0.0, excess[phase]) for phase in _OWN_PHASES)
    excess["backward"] = max(excess["backward"], rest / _CLEARLY)
    return max(excess, key=lambda phase: excess[phase])


def find_reasons(windows: Sequence[Window], instance: int) -> list[str]:
    """Return texts why an instance is slow, from what the kernel, Python and the data show; strongest first."""
    lost = sum(window.delays[instance] * window.num_steps for window in windows)
    seconds = windows[-1].ended_seconds - windows[0].began_seconds
    more = {name: _more(windows, instance, name) for name in windows[0].totals[instance]}
    samples = {index: sum(it.totals[index]["samples"] for it in windows) for index in windows[0].totals}
    usual = median(count for index, count in samples.items() if index != instance)
    texts = {
        "throttled": f"its control group was throttled for {more['throttled']:.1f} of {seconds:.0f} s",
        "gc": f"Python collected garbage for {more['gc']:.1f} of {seconds:.0f} s",
        "disk": f"it waited for a disk for {more['disk']:.1f} of {seconds:.0f} s",
        "run_delay": f"it wanted a core and had none for {more['run_delay']:.1f} of {seconds:.0f} s",
    }
    reasons = [text for name, text in texts.items() if more[name] >= _LEAST_CAUSE * lost][:1]
    if waits_for_workers(windows, instance):
        reasons.append("it waits for the workers of its loader")
    if more["faults"] >= _FAULTS_A_SECOND * lost:
        reasons.append(f"{more['faults']:.0f} pages came from a disk")
    if usual and samples[instance] >= _MORE_SAMPLES * usual:
        reasons.append(f"it had {samples[instance] / usual:.2f} times as many samples as most")
    return reasons


def waits_for_workers(windows: Sequence[Window], instance: int) -> bool:
    """Whether a slow instance loses its time because it waits for its DataLoader's workers."""
    lost = sum(window.delays[instance] * window.num_steps for window in windows)
    return lost > 0.0 and _more(windows, instance, "workers") >= _LEAST_CAUSE * lost


def _more(windows: Sequence[Window], instance: int, name: str) -> float:
    """Return by how much the total ``name`` of ``instance``, such as gc seconds, exceeds the others' median."""
    totals = {index: sum(window.totals[index][name] for window in windows) for index in windows[0].totals}
    return totals[instance] - median(total for index, total in totals.items() if index != instance)
