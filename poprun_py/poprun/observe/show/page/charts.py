"""Charts of a job's page: curves over time as SVG that fits any width, with labels as text beside the SVG.

The points of a curve lie on a grid of 1,000 by 1,000, from which the page's script computes values.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Final

from poprun.observe.account.curves import OF_NUMBERS
from poprun.observe.account.job_record import AttemptRecord, Curve, InstanceRecord
from poprun.text.ranges import describe_seconds, unit_of_bytes
from popsize.svg import NUM_HUES, element, escaped

Point = tuple[float, float]  # seconds since the job began, and a value

_GRID: Final = 1000
_MOST_POINTS: Final = 100_000  # of all charts of a page
_NUM_TICKS: Final = 4
_FAR: Final = 0.93  # where a label of the time ends at its place, for want of room
_LEAST_RANGE: Final = 1e-300  # of values that differ
_MOST_DIGITS: Final = 6  # before or behind the point of a label
_MANTISSAS: Final = (1, 2, 2.5, 5, 10)
_TIMES: Final = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
_DAY: Final = 86400
_OF_ALL: Final = {"max": "bound", "median": "middle", "min": "bound"}
"""For each of the three lines in the chart of a large job, its key in the report and its CSS class."""

_TITLES: Final = {
    "steps_per_second": "steps a second",
    "samples_per_second": "samples a second",
    "gpu_busy": "GPU in use",
    "gpu_memory": "memory of the GPU",
    "cpu": "processors in use",
    "run_delay": "waiting for a core",
    "memory": "memory",
}
"""The titles of the curves that poprun measures, in their order on the page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a chart: its name, its CSS class, and its points in each attempt."""

    name: str  # empty if there is only one line
    style: str  # the CSS class of the line
    parts: Sequence[Sequence[Point]]  # the points of each attempt, by time

    @property
    def values(self) -> list[float]:
        """The values of all points of the line, over all attempts."""
        return [value for part in self.parts for _, value in part]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart of one quantity over the time of a job, with a line for each instance."""

    title: str
    unit: str
    lines: Sequence[Line]
    last: str = ""  # the value at the end


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    """An axis of a chart: its low end, its high end, and its labels."""

    low: float
    high: float
    ticks: Sequence[tuple[float, str]]

    def place(self, value: float) -> float:
        """Return the position of ``value`` on the axis: 0 at its low end, 1 at its high end."""
        return (value - self.low) / (self.high - self.low)


def charts_of(attempts: Sequence[AttemptRecord], offsets: Sequence[float]) -> list[Chart]:
    """Return a chart for each curve in the record: the loss first, other reported numbers, then measurements."""
    names = {name for it in attempts for curves in _curves_in(it) for name in curves}
    charts = [_chart(name, attempts, offsets) for name in sorted(names, key=_order)]
    return [it for it in charts if it.title not in _TITLES.values() or any(any(line.values) for line in it.lines)]


def _curves_in(attempt: AttemptRecord) -> Iterator[Mapping[str, Curve]]:
    """Yield dicts of curves by name: first the curves over all instances of an attempt, then each instance's."""
    yield attempt.curves
    yield from (it.curves for it in attempt.instances)


def _order(name: str) -> tuple[bool, bool, int, str]:
    place = list(_TITLES).index(name) if name in _TITLES else len(_TITLES)
    return name != f"{OF_NUMBERS}loss", not name.startswith(OF_NUMBERS), place, name


def _chart(name: str, attempts: Sequence[AttemptRecord], offsets: Sequence[float]) -> Chart:
    """Return the chart of the curve ``name``: a line for each instance, or three lines for many instances."""

    def line(label: str, style: str, key: str, holders: Sequence[AttemptRecord | InstanceRecord]) -> Line:
        curves = [(offset, it.curves.get(name)) for offset, it in zip(offsets, holders, strict=True)]
        parts = [
            [
                (offset + at, value)
                for at, value in zip(curve.seconds, getattr(curve, key) or (), strict=False)
                if value is not None
            ]
            for offset, curve in curves
            if curve is not None
        ]
        return Line(name=label, style=style, parts=parts)

    if any(name in it.curves for it in attempts):
        lines = [line(f"{key} of all", style, key, attempts) for key, style in _OF_ALL.items()]
    else:
        names = _names_of_instances(len(attempts[0].instances))
        lines = [
            line(label, style, "values", [it.instances[index] for it in attempts])
            for index, (label, style) in enumerate(names)
        ]
    last_first = (curves for it in reversed(attempts) for curves in _curves_in(it))
    latest = next(curves[name] for curves in last_first if name in curves)
    return Chart(
        title=_TITLES.get(name, name.removeprefix(OF_NUMBERS).replace("_", " ")),
        unit=latest.unit,
        lines=[it for it in lines if it.values],
        last=_last_value(latest) if name.startswith(OF_NUMBERS) else "",
    )


def _names_of_instances(count: int) -> Iterator[tuple[str, str]]:
    """Yield for each instance the name and the CSS class of its line in charts."""
    for index in range(count):
        style = f"h{index % NUM_HUES}" + (" dashed" if index >= NUM_HUES else "")
        yield f"instance {index}" if count > 1 else "", style


def _last_value(curve: Curve) -> str:
    """Return the last value of a curve as text, such as ``0.25`` or ``nan``; an empty text if it has no value."""
    known_values = [it for it in curve.middle if it is not None] if curve.last is None else [curve.last]
    last = known_values[-1] if known_values else ""
    return last if isinstance(last, str) else f"{last:.4g}"


def render_charts(charts: Sequence[Chart], seconds: float, breaks: Sequence[float]) -> str:
    """Return the HTML of all charts over the job's ``seconds``, with a mark at each restart in ``breaks``. Charts
    that have the same lines share one legend above all charts; other charts have their own.
    """
    num_points = sum(len(line.values) for chart in charts for line in chart.lines)
    group = max(1, math.ceil(num_points / _MOST_POINTS))
    shared, count = Counter(map(_legend, charts)).most_common(1)[0]
    shared = shared if count > 1 else ""
    times = _time_scale(seconds)
    drawn = "".join(_render(_prepared(chart, group), times, breaks, above=shared) for chart in charts)
    return (element("p", shared, class_="series") if shared else "") + element("div", drawn, class_="charts")


def _legend(chart: Chart) -> str:
    """Return the HTML of a chart's legend: each line's name in its colour; "" if there is only one line."""
    return "".join(element("span", escaped(it.name), class_=f"key {it.style}") for it in chart.lines if it.name)


def _prepared(chart: Chart, group: int) -> Chart:
    """Return the chart to draw: bytes in a readable unit, each ``group`` of neighbouring points as its mean."""
    unit, factor = chart.unit, 1
    if unit == "bytes":
        unit, factor = unit_of_bytes(max((it for line in chart.lines for it in line.values), default=0.0))

    def points(part: Sequence[Point]) -> list[Point]:
        groups = [part[start : start + group] for start in range(0, len(part), group)]
        return [(it[-1][0], fmean(value for _, value in it) / factor) for it in groups]

    lines = [replace(line, parts=[*map(points, line.parts)]) for line in chart.lines]
    return replace(chart, unit=unit, lines=lines)


def _render(chart: Chart, times: _Scale, breaks: Sequence[float], *, above: str) -> str:
    """Return the HTML of one chart, with its legend unless ``above``, the HTML above all charts, is the same."""
    values = _value_scale([it for line in chart.lines for it in line.values], chart.unit)
    labels = [
        _label("x far" if times.place(at) > _FAR else "x", "left", times.place(at), it) for at, it in times.ticks
    ]
    labels += [_label("y", "top", 1 - values.place(at), it) for at, it in values.ticks]
    legend = _legend(chart)
    return element(
        "figure",
        element(
            "figcaption",
            element("h3", escaped(chart.title)),
            element("span", escaped(chart.unit), class_="unit"),
            element("span", escaped(chart.last), class_="last"),
        ),
        element(
            "div",
            _drawing(chart, times, values, breaks),
            element("div", *labels, '<i class="cursor" hidden></i>', class_="scale"),
            class_="plot",
            tabindex="0",
            role="img",
            aria_label=f"{chart.title} over time; the arrow keys read values",
            data_x=f"{times.high:.6g}",
            data_low=f"{values.low:.9g}",
            data_high=f"{values.high:.9g}",
        ),
        element(
            "p",
            legend if legend and legend != above else " ",
            class_="keys",
            data_lines="\n".join(it.name for it in chart.lines),
        ),
        class_="chart",
    )


def _drawing(chart: Chart, times: _Scale, values: _Scale, breaks: Sequence[float]) -> str:
    """Return the SVG of a chart: grid, curves, a mark at each of ``breaks``, and areas between two bounds."""
    rules = "".join(f"M0 {_down(values.place(tick))}H{_GRID}" for tick, _ in values.ticks)
    marks = "".join(f"M{round(times.place(at) * _GRID)} 0V{_GRID}" for at in breaks)
    bounds = [line.parts for line in chart.lines if line.style == "bound"]
    areas = [[*high, *reversed(low)] for high, low in zip(*bounds, strict=True)] if bounds else []
    curves = [(line.style, "".join(_path(part, times, values) for part in line.parts)) for line in chart.lines]
    return element(
        "svg",
        element("path", class_="rule", d=rules),
        element("path", class_="mark", d=marks),
        *(element("path", class_="area", d=_path(area, times, values) + "Z") for area in areas if area),
        *(element("path", class_=f"curve {style}", d=path) for style, path in curves),
        viewBox=f"0 0 {_GRID} {_GRID}",
        preserveAspectRatio="none",
        aria_hidden="true",
    )


def _path(points: Sequence[Point], times: _Scale, values: _Scale) -> str:
    places = [(round(min(1.0, times.place(at)) * _GRID), _down(values.place(value))) for at, value in points]
    if len(places) == 1:
        return f"M{places[0][0]} {places[0][1]}h0"
    return "".join(f"{'L' if index else 'M'}{x} {y}" for index, (x, y) in enumerate(places))


def _down(share: float) -> int:
    return round((1 - share) * _GRID)


def _label(axis: str, side: str, share: float, words: str) -> str:
    return element("span", escaped(words), class_=axis, style=f"{side}:{share:.2%}")


def _value_scale(values: Sequence[float], unit: str) -> _Scale:
    """Return the axis that covers ``values``; an axis of values with a unit, such as bytes, also covers 0."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if unit:
        low, high = min(0.0, low), max(0.0, high)
    if high - low < _LEAST_RANGE:
        margin = abs(low) / 2 if abs(low) > _LEAST_RANGE else 0.5
        low, high = (0.0, 1.0) if unit else (low - margin, high + margin)
    step = _nice((high - low) / _NUM_TICKS)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = next((it for it in range(_MOST_DIGITS) if math.isclose(step * 10**it, round(step * 10**it))), None)
    form = ".3g" if digits is None or step >= 10**_MOST_DIGITS else f",.{digits}f"
    ticks = [(it * step, f"{it * step:{form}}") for it in range(first, last + 1)]
    return _Scale(low=first * step, high=last * step, ticks=ticks)


def _nice(step: float) -> float:
    """Return the smallest number from ``step`` on that is 1, 2, 2.5 or 5 times a power of ten, for labels."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(it * power for it in _MANTISSAS if it * power >= step * (1 - 1e-9))


def _time_scale(seconds: float) -> _Scale:
    high = max(seconds, 1e-3)
    step = next((it for it in _TIMES if high / it <= _NUM_TICKS + 1), _DAY * math.ceil(high / _DAY / _NUM_TICKS))
    ticks = [(float(it), describe_seconds(it)) for it in range(0, math.floor(high) + 1, step)]
    return _Scale(
        low=0.0, high=high, ticks=ticks if len(ticks) > 1 else [(0.0, "0 s"), (high, describe_seconds(high))]
    )
