"""A log-log plot as an SVG; pure."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#8c564b", "#1f77b4", "#9467bd", "#ff7f0e", "#d62728", "#7f7f7f", "#2ca02c", "#17becf")
WIDTH, HEIGHT = 460, 400
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 40, 50
LEGEND_LEFT, LEGEND_STEP, LEGEND_HEIGHT = 12, 120, 18

Curve = Mapping[int, tuple[float, float, float]]
"""At each x: the value, and the lower and the upper end of its interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Positions on a logarithmic scale.

    Attributes:
        least: The value at ``start``.
        most: The value at ``stop``.
        start: A coordinate of the picture.
        stop: Another one.
    """

    least: float
    most: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        """The coordinate of ``value``."""
        share = math.log(value / self.least) / math.log(self.most / self.least)
        return self.start + share * (self.stop - self.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One system of axes.

    Attributes:
        title: Stands above it.
        curves: One line for each name.
    """

    title: str
    curves: Mapping[str, Curve]


def svg(panels: Sequence[Panel], x_name: Callable[[int], str], y_name: Callable[[float], str], label: str) -> str:
    """A picture of ``panels`` side by side over the same axes, with one legend; all values above 0."""
    points = [point for panel in panels for curve in panel.curves.values() for point in curve.items()]
    xs = sorted({x for x, _ in points})
    least, most = min(low for _, (_, low, _) in points), max(high for _, (_, _, high) in points)
    decades = [10.0**n for n in range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)]
    names = list(dict.fromkeys(name for panel in panels for name in panel.curves))
    colours = dict(zip(names, COLOURS, strict=False))
    parts = []
    for number, panel in enumerate(panels):
        left = LEFT + number * WIDTH
        x = Axis(least=xs[0] / 2, most=xs[-1] * 2, start=left, stop=left + WIDTH - LEFT - RIGHT)
        y = Axis(least=decades[0], most=decades[-1], start=HEIGHT - BOTTOM, stop=TOP)
        parts.append(_text((x.start + x.stop) / 2, TOP - 14, panel.title, "middle", "bold"))
        parts += _grid(x, y, [(at, x_name(at)) for at in xs], [(at, y_name(at)) for at in decades])
        for name, curve in panel.curves.items():
            parts += _curve(x, y, curve, colours[name])
    parts.append(_text(LEFT, 14, label, "start"))
    width = WIDTH * len(panels)
    in_a_row = (width - LEGEND_LEFT) // LEGEND_STEP
    parts += _legend(colours, HEIGHT + 8, in_a_row)
    height = HEIGHT + 30 + LEGEND_HEIGHT * ((len(names) - 1) // in_a_row)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    )
    style = 'font-family="sans-serif" font-size="11"'
    background = f'<rect width="{width}" height="{height}" fill="white"/>'
    return "\n".join([f"{head} {style}>", background, *parts, "</svg>\n"])


def _text(x: float, y: float, text: str, anchor: str, weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _grid(x: Axis, y: Axis, x_ticks: Sequence[tuple[int, str]], y_ticks: Sequence[tuple[float, str]]) -> list[str]:
    parts = []
    for at, name in y_ticks:
        parts.append(_line(x.start, y(at), x.stop, y(at), "#dddddd"))
        parts.append(_text(x.start - 6, y(at) + 4, name, "end"))
    for at, name in x_ticks:
        parts.append(_line(x(at), y.start, x(at), y.stop, "#eeeeee"))
        parts.append(_text(x(at), y.start + 16, name, "middle"))
    return parts


def _curve(x: Axis, y: Axis, curve: Curve, colour: str) -> list[str]:
    points = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, (value, _, _) in sorted(curve.items()))
    parts = [f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>']
    for at, (value, low, high) in sorted(curve.items()):
        parts.append(_line(x(at), y(low), x(at), y(high), colour))
        parts.append(f'<circle cx="{x(at):.1f}" cy="{y(value):.1f}" r="2.5" fill="{colour}"/>')
    return parts


def _legend(colours: Mapping[str, str], top: float, in_a_row: int) -> list[str]:
    parts = []
    for number, (name, colour) in enumerate(colours.items()):
        left = LEGEND_LEFT + LEGEND_STEP * (number % in_a_row)
        y = top + LEGEND_HEIGHT * (number // in_a_row)
        parts.append(f'<line x1="{left}" y1="{y}" x2="{left + 20}" y2="{y}" stroke="{colour}" stroke-width="3"/>')
        parts.append(_text(left + 26, y + 4, name, "start"))
    return parts
