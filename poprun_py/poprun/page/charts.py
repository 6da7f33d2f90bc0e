"""Charts of a page: curves over time as SVG that fits any width, with its labels as text beside it. Pure.

A curve's points lie on a grid of 1,000 by 1,000; the page's script reads values back from them.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from poprun.render.picture.blocks import element, escaped
from poprun.render.picture.drawing import NUM_HUES

Point = tuple[float, float]

_GRID: Final = 1000
_MOST_POINTS: Final = 100_000  # of all charts of a page
_NUM_TICKS: Final = 4
_FAR: Final = 0.93  # where a label of the time ends at its place, for want of room
_LEAST_RANGE: Final = 1e-300  # of values that differ
_MOST_DIGITS: Final = 6  # before or behind the point of a label
_MANTISSAS: Final = (1, 2, 2.5, 5, 10)
_TIMES: Final = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
_BYTES: Final = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("bytes", 1))
_MINUTE, _HOUR, _DAY = 60, 3600, 86400


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a chart."""

    name: str
    parts: Sequence[Sequence[Point]]  # one of each attempt: seconds and values, by time
    style: str  # its class

    @property
    def values(self) -> list[float]:
        """All of them."""
        return [value for part in self.parts for _, value in part]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A quantity over the time of a job."""

    title: str
    unit: str
    lines: Sequence[Line]
    last: str = ""  # the value at the end


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    """What an axis shows."""

    low: float
    high: float
    ticks: Sequence[tuple[float, str]]

    def place(self, value: float) -> float:
        """Where a value lies, from 0 to 1."""
        return (value - self.low) / (self.high - self.low)


def render_charts(charts: Sequence[Chart], seconds: float, breaks: Sequence[float]) -> str:
    """All charts over the first ``seconds`` of a job, with a mark at each moment of ``breaks``."""
    num_points = sum(len(line.values) for chart in charts for line in chart.lines)
    group = max(1, math.ceil(num_points / _MOST_POINTS))
    return "".join(_render(chart, _time_scale(seconds), breaks, group) for chart in charts)


def _render(chart: Chart, times: _Scale, breaks: Sequence[float], group: int) -> str:
    factor, unit = _unit_of(chart)
    values = _value_scale([it / factor for line in chart.lines for it in line.values], chart.unit)
    labels = [
        *(
            _label("x far" if it > _FAR else "x", "left", it, text)
            for at, text in times.ticks
            for it in [times.place(at)]
        ),
        *(_label("y", "top", 1 - values.place(tick), text) for tick, text in values.ticks),
    ]
    names = [element("span", escaped(line.name), class_=f"key {line.style}") for line in chart.lines if line.name]
    return element(
        "figure",
        element(
            "figcaption",
            element("h3", escaped(chart.title)),
            element("span", escaped(unit), class_="unit"),
            element("span", escaped(chart.last), class_="last"),
        ),
        element(
            "div",
            _drawing(chart, times, values, factor, breaks, group),
            element("div", *labels, '<i class="cursor" hidden></i>', class_="scale"),
            class_="plot",
            tabindex="0",
            role="img",
            aria_label=f"{chart.title} over time; the arrow keys read values",
            data_x=f"{times.high:.6g}",
            data_low=f"{values.low:.9g}",
            data_high=f"{values.high:.9g}",
        ),
        element("p", *(names or [" "]), class_="keys", data_lines="\n".join(it.name for it in chart.lines)),
        class_="chart",
    )


def _drawing(
    chart: Chart, times: _Scale, values: _Scale, factor: float, breaks: Sequence[float], group: int
) -> str:
    """The curves, in units of ``factor``, over the lines of the grid and a mark at each of ``breaks``."""
    rules = "".join(f"M0 {_down(values.place(tick))}H{_GRID}" for tick, _ in values.ticks)
    marks = "".join(f"M{round(times.place(at) * _GRID)} 0V{_GRID}" for at in breaks)
    curves = [
        element(
            "path",
            class_=f"curve {line.style}",
            d="".join(_path(_grouped(part, group), times, values, factor) for part in line.parts),
        )
        for line in chart.lines
    ]
    return element(
        "svg",
        element("path", class_="rule", d=rules),
        *([element("path", class_="mark", d=marks)] if marks else []),
        *_bands(chart, times, values, factor),
        *curves,
        viewBox=f"0 0 {_GRID} {_GRID}",
        preserveAspectRatio="none",
        aria_hidden="true",
    )


def _path(points: Sequence[Point], times: _Scale, values: _Scale, factor: float) -> str:
    places = [
        (round(min(1.0, times.place(at)) * _GRID), _down(values.place(value / factor))) for at, value in points
    ]
    if len(places) == 1:
        return f"M{places[0][0]} {places[0][1]}h0"
    return "".join(f"{'L' if index else 'M'}{x} {y}" for index, (x, y) in enumerate(places))


def _bands(chart: Chart, times: _Scale, values: _Scale, factor: float) -> list[str]:
    """The areas between the most and the least of a folded chart; none of another one."""
    bounds = [line.parts for line in chart.lines if line.style == "bound"]
    areas = [[*high, *reversed(low)] for high, low in zip(*bounds, strict=True)] if bounds else []
    return [element("path", class_="area", d=_path(area, times, values, factor) + "Z") for area in areas if area]


def _grouped(points: Sequence[Point], group: int) -> Sequence[Point]:
    """The means of neighbours."""
    if group == 1:
        return points
    parts = [points[start : start + group] for start in range(0, len(points), group)]
    return [(part[-1][0], sum(value for _, value in part) / len(part)) for part in parts]


def _down(share: float) -> int:
    return round((1 - share) * _GRID)


def _label(axis: str, side: str, share: float, words: str) -> str:
    return element("span", escaped(words), class_=axis, style=f"{side}:{share:.2%}")


def _unit_of(chart: Chart) -> tuple[float, str]:
    if chart.unit != "bytes":
        return 1.0, chart.unit
    most = max((it for line in chart.lines for it in line.values), default=0.0)
    name, factor = next(((name, factor) for name, factor in _BYTES if most >= factor), _BYTES[-1])
    return float(factor), name


def _value_scale(values: Sequence[float], unit: str) -> _Scale:
    """From below the least value to above the largest one; from 0 for what has a unit."""
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
    """The next greater number of 1, 2, 2.5 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(it * power for it in _MANTISSAS if it * power >= step * (1 - 1e-9))


def _time_scale(seconds: float) -> _Scale:
    high = max(seconds, 1e-3)
    step = next((it for it in _TIMES if high / it <= _NUM_TICKS + 1), _DAY * math.ceil(high / _DAY / _NUM_TICKS))
    ticks = [(float(it), describe_duration(it)) for it in range(0, math.floor(high) + 1, step)]
    return _Scale(
        low=0.0, high=high, ticks=ticks if len(ticks) > 1 else [(0.0, "0 s"), (high, describe_duration(high))]
    )


def describe_duration(seconds: float) -> str:
    """A duration with its two largest units: ``3.2 s``, ``1 min 20 s``, ``2 h``."""
    if seconds < _MINUTE:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    for unit, name, below, lower in (
        (_DAY, "d", _HOUR, "h"),
        (_HOUR, "h", _MINUTE, "min"),
        (_MINUTE, "min", 1, "s"),
    ):
        if whole >= unit:
            rest = whole % unit // below
            return f"{whole // unit} {name}" + (f" {rest} {lower}" if rest else "")
    return f"{whole} s"


def charts_of(attempts: Sequence[Mapping[str, Any]], offsets: Sequence[float]) -> list[Chart]:
    """The charts of all curves that a report has, those of reported numbers first, the loss before all."""
    found: dict[str, dict[str, list[_Drawn]]] = {}
    for offset, attempt in zip(offsets, attempts, strict=True):
        for drawn in _drawn_curves(attempt, offset):
            found.setdefault(drawn.name, {}).setdefault(drawn.line, []).append(drawn)
    names = sorted(found, key=lambda it: (it != "numbers/loss", not it.startswith("numbers/"), _order(it)))
    return [_chart(name, found[name]) for name in names]


def _chart(name: str, lines: Mapping[str, Sequence["_Drawn"]]) -> Chart:
    lasts = [it.last for drawn in lines.values() for it in drawn[-1:] if it.last]
    return Chart(
        title=TITLES.get(name, name.removeprefix("numbers/").replace("_", " ")),
        unit=next(iter(lines.values()))[0].unit,
        lines=[
            Line(name=line, parts=[it.points for it in drawn], style=drawn[0].style)
            for line, drawn in lines.items()
        ],
        last=lasts[0] if name.startswith("numbers/") and lasts else "",
    )


TITLES: Final = {
    "steps_per_second": "steps a second",
    "samples_per_second": "samples a second",
    "gpu_busy": "GPU in use",
    "gpu_memory": "memory of the GPU",
    "cpu": "processors in use",
    "run_delay": "waiting for a core",
    "memory": "memory",
}
"""What the curves are called that poprun measures, in the order of the page."""


def _order(name: str) -> tuple[int, str]:
    return list(TITLES).index(name) if name in TITLES else len(TITLES), name


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawn:
    """What one attempt gives to one line of a chart."""

    name: str  # of the curve
    line: str  # empty where there is one only
    style: str
    unit: str
    points: Sequence[Point]
    last: str = ""  # the value at the end; empty where another line has it


def _drawn_curves(attempt: Mapping[str, Any], offset: float) -> Iterator[_Drawn]:
    """The lines of an attempt that began ``offset`` seconds after the job."""

    def points(curve: Mapping[str, Any], key: str) -> list[Point]:
        pairs = zip(curve["seconds"], curve[key], strict=True)
        return [(offset + at, value) for at, value in pairs if value is not None]

    for name, curve in attempt["curves"].items():
        for key, style in (("max", "bound"), ("median", "middle"), ("min", "bound")):
            places = points(curve, key)
            last = f"{places[-1][1]:.4g}" if key == "median" and places else ""
            yield _Drawn(
                name=name, line=f"{key} of all", style=style, unit=curve["unit"], points=places, last=last
            )
    for instance in attempt["instances"]:
        index = instance["index"]
        style = f"h{index % NUM_HUES}" + (" dashed" if index >= NUM_HUES else "")
        line = f"instance {index}" if len(attempt["instances"]) > 1 else ""
        for name, curve in instance["curves"].items():
            value = curve["last"]
            last = f"{value:.4g}" if isinstance(value, float | int) else str(value or "")
            yield _Drawn(
                name=name, line=line, style=style, unit=curve["unit"], points=points(curve, "values"), last=last
            )
