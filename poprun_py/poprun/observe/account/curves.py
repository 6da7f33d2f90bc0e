"""Curves of measurements over the time of an attempt: the mean in equal windows, at most 600 windows. Pure."""

import json
import math
from array import array
from collections.abc import Mapping, Sequence
from itertools import pairwise, zip_longest
from statistics import median
from typing import Any, Final

from poprun.observe.account.job_record import Curve
from poprun.observe.account.state import InstanceStatus

MAX_WINDOWS: Final = 600  # of a curve; a curve that needs more windows doubles the width of its windows
MAX_FOLDED: Final = 16  # largest number of instances for which each instance has its own curves
MAX_NUMBERS: Final = 64  # numbers of an instance; the library lets a program report no more
OF_NUMBERS: Final = "numbers/"
"""The beginning of the names of curves of numbers that programs report by `popdist.report`."""

_FIRST_WINDOW_SECONDS: Final = 1.0
_MOST: Final = 1e300  # so that no sum of values is infinite


class WindowedCurve:
    """A measured quantity of one instance over time: its mean in each window; all windows have the same length."""

    def __init__(self, unit: str) -> None:
        self.unit = unit  # such as ``1/s``; empty for none
        self.window_seconds = _FIRST_WINDOW_SECONDS
        self.last: float | None = None  # the last value that was added, which may be no finite number
        self._sums = array("d")
        self._weights = array("d")

    def add(self, at_seconds: float, value: float) -> None:
        """Add a measured value to the curve, ``at_seconds`` after the attempt's start."""
        self.last = value
        if math.isfinite(value):
            self._add(at_seconds, max(-_MOST, min(_MOST, value)), 1.0)

    def add_rate(self, since_seconds: float, until_seconds: float, amount: float) -> None:
        """Add ``amount``, such as a number of steps, done between two moments, as an amount per second."""
        if until_seconds <= since_seconds:
            return
        self.last = amount / (until_seconds - since_seconds)
        self._widen(until_seconds)
        first, last = (int(max(0.0, it) / self.window_seconds) for it in (since_seconds, until_seconds))
        bounds = [it * self.window_seconds for it in range(first + 1, last + 1)]
        for begin, end in pairwise(sorted({since_seconds, *bounds, until_seconds})):
            self._add((begin + end) / 2, self.last * (end - begin), end - begin)

    def _add(self, at_seconds: float, value: float, weight: float) -> None:
        self._widen(at_seconds)
        index = int(max(0.0, at_seconds) / self.window_seconds)
        missing = [0.0] * (index + 1 - len(self._sums))
        self._sums.extend(missing)
        self._weights.extend(missing)
        self._sums[index] += value
        self._weights[index] += weight

    def _widen(self, at_seconds: float) -> None:
        while at_seconds >= MAX_WINDOWS * self.window_seconds:
            self._sums, self._weights = _paired(self._sums), _paired(self._weights)
            self.window_seconds *= 2

    def values(self, window_seconds: float) -> list[float | None]:
        """Return the mean of the curve in each window of ``window_seconds``: the curve's own window length, or
        this length times a power of two; None for a window without a value.
        """
        sums, weights = self._sums, self._weights
        for _ in range(round(math.log2(window_seconds / self.window_seconds))):
            sums, weights = _paired(sums), _paired(weights)
        return [value / weight if weight else None for value, weight in zip(sums, weights, strict=True)]


def _paired(values: "array[float]") -> "array[float]":
    """Return the sums of the items 0 and 1, 2 and 3, and so on of ``values``, to double a curve's windows."""
    return array("d", (sum(values[index : index + 2]) for index in range(0, len(values), 2)))


class InstanceCurves:
    """The curves of one instance: a curve for each measured quantity, by name."""

    def __init__(self) -> None:
        self.by_name: dict[str, WindowedCurve] = {}
        self._totals: dict[str, tuple[float, float]] = {}

    def add(self, name: str, unit: str, at_seconds: float, value: float) -> None:
        """Add a measured value to the curve ``name``, which is made if it does not exist."""
        self._curve(name, unit).add(at_seconds, value)

    def add_total(self, name: str, unit: str, at_seconds: float, total: float) -> None:
        """Add the growth per second of ``total`` since the call before to the curve ``name``."""
        before_seconds, before = self._totals.get(name, (at_seconds, total))
        self._totals[name] = (at_seconds, total)
        if total >= before and at_seconds > before_seconds:
            self._curve(name, unit).add_rate(before_seconds, at_seconds, total - before)

    def add_lines(self, lines: str, delay_seconds: float, now_seconds: float) -> None:
        """Add the numbers that a program reported in ``lines``, with times by its clock; these times plus
        ``delay_seconds`` are the times since the attempt's start.
        """
        for line in lines.splitlines():
            reported_seconds, numbers = _read_line(line)
            is_possible = 0.0 <= reported_seconds + delay_seconds <= now_seconds
            at_seconds = reported_seconds + delay_seconds if is_possible else now_seconds
            for name, value in numbers.items():
                key = f"{OF_NUMBERS}{name}"
                if key in self.by_name or sum(it.startswith(OF_NUMBERS) for it in self.by_name) < MAX_NUMBERS:
                    self.add(key, "", at_seconds, value)

    def _curve(self, name: str, unit: str) -> WindowedCurve:
        if name not in self.by_name:
            self.by_name[name] = WindowedCurve(unit)
        return self.by_name[name]


def _read_line(line: str) -> tuple[float, dict[str, float]]:
    """Return the time, and the numbers by name, in ``line`` from a program; 0.0 and {} if it is malformed."""
    try:
        at_seconds, numbers = json.loads(line)
        return float(at_seconds), {str(name): float(value) for name, value in numbers.items()}
    except (ValueError, TypeError, AttributeError, RecursionError, OverflowError):
        return 0.0, {}


class JobCurves:
    """The curves of measured quantities of all instances in one attempt of a job."""

    def __init__(self, num_instances: int, began_at_seconds: float) -> None:
        self._began_at_seconds = began_at_seconds
        self.instances = [InstanceCurves() for _ in range(num_instances)]

    def add_look(self, status: InstanceStatus, event: Mapping[str, Any], now_seconds: float) -> None:
        """Add a measurement of one instance to its curves: memory, processor time, steps, reported numbers."""
        curves, at_seconds = self.instances[status.index], now_seconds - self._began_at_seconds
        if event.get("num_processes"):
            curves.add("memory", "bytes", at_seconds, event["memory_bytes"])
            curves.add_total("cpu", "cores", at_seconds, event["cpu_seconds"])
        if num_steps := count_steps(status):
            curves.add_total("steps_per_second", "1/s", at_seconds, num_steps)
        if status.counters is not None and status.counters.num_samples:
            curves.add_total("samples_per_second", "1/s", at_seconds, status.counters.num_samples)
        if status.machine is not None:
            curves.add_total("run_delay", "share of the time", at_seconds, status.machine.run_delay_seconds)
        if isinstance(lines := event.get("numbers"), str):
            # the clocks of hosts differ; the message took no time
            curves.add_lines(lines, at_seconds - event["read_at_seconds"], at_seconds)

    def add_gpu(
        self, index: int, name: str, busy: float | None, memory_bytes: float | None, now_seconds: float
    ) -> None:
        """Add the load and the used memory of an instance's GPU, if the driver reports these values."""
        curves, at_seconds = self.instances[index], now_seconds - self._began_at_seconds
        if busy is not None:
            curves.add(f"{name}_busy", "share of the time", at_seconds, busy)
        if memory_bytes is not None:
            curves.add(f"{name}_memory", "bytes", at_seconds, memory_bytes)


def count_steps(status: InstanceStatus) -> int:
    """Return the number of a program's steps: counted optimizer steps or, if none were counted, reported steps."""
    if status.counters is not None and status.counters.num_optimizer_steps:
        return status.counters.num_optimizer_steps
    return 0 if status.progress is None else status.progress.num_steps or status.progress.step or 0


def curves_of(instance: InstanceCurves) -> dict[str, Curve]:
    """Return the curves of one instance as a job's report contains them, by name."""
    return {name: _curve_of(curve) for name, curve in sorted(instance.by_name.items())}


def _curve_of(curve: WindowedCurve) -> Curve:
    values = curve.values(curve.window_seconds)
    return Curve(
        unit=curve.unit,
        seconds=_ends(len(values), curve.window_seconds),
        values=_rounded(values),
        last=_known(curve.last),
    )


def fold_curves(instances: Sequence[InstanceCurves]) -> dict[str, Curve]:
    """Return for each name one curve of all ``instances``, with least, median and largest value per window."""
    names = sorted({name for it in instances for name in it.by_name})
    return {name: _fold([it.by_name[name] for it in instances if name in it.by_name]) for name in names}


def _fold(curves: Sequence[WindowedCurve]) -> Curve:
    window_seconds = max(curve.window_seconds for curve in curves)
    windows = zip_longest(*(curve.values(window_seconds) for curve in curves))
    known_values = [[value for value in window if value is not None] for window in windows]
    return Curve(
        unit=curves[0].unit,
        seconds=_ends(len(known_values), window_seconds),
        min=_rounded([min(values, default=None) for values in known_values]),
        median=_rounded([median(values) if values else None for values in known_values]),
        max=_rounded([max(values, default=None) for values in known_values]),
    )


def _ends(num_windows: int, window_seconds: float) -> tuple[float, ...]:
    return tuple((index + 1) * window_seconds for index in range(num_windows))


def _rounded(values: Sequence[float | None]) -> tuple[float | None, ...]:
    """Return ``values`` with six significant digits, because more digits would only make a report longer."""
    return tuple(None if it is None else float(f"{it:.6g}") for it in values)


def _known(value: float | None) -> float | str | None:
    """Return ``value`` for JSON: a number or None unchanged, but ``nan`` and ``inf`` as text, which JSON lacks."""
    return value if value is None or math.isfinite(value) else str(value)
