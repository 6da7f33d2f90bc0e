"""Packed rows as a picture: from left to right the tokens of a row, from top to bottom all rows."""

from html import escape
from typing import Final

from popdist.packing.strategies import Pack, PackingStrategy

WIDTH, HEIGHT = 460, 300
LEFT, TOP, GAP = 20, 56, 40

FILLS: Final = ("#91c3f6", "#e9b082", "#8ecfa4", "#dfa9da")
"""Of a row's first, second, third and fourth sequence, and so on round."""

_NAMES: Final = {"none": "no packing"}

_THICK: Final = 4
"""Height from which on a band has a line under it."""

_STYLE: Final = """
text { fill: #1f2933; font-family: ui-sans-serif, system-ui, "DejaVu Sans", sans-serif; font-size: 13px; }
.title { font-weight: 600; } .note { fill: #5f6c7b; }
.paper { fill: #ffffff; } .row { fill: #eceff2; }
"""


def draw(*strategies: PackingStrategy) -> str:
    """A panel for each strategy, side by side, as one SVG; the grey of a panel is its padding."""
    width = LEFT * 2 + len(strategies) * WIDTH + (len(strategies) - 1) * GAP
    height = TOP + HEIGHT + 34
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}><title>Rows of {strategies[0].max_length} tokens</title>',
        f'<style>{_STYLE}</style><rect class="paper" width="{width}" height="{height}"/>',
    ]
    for number, strategy in enumerate(strategies):
        parts.append(f'<g transform="translate({LEFT + number * (WIDTH + GAP)} 0)">{_panel(strategy)}</g>')
    return "".join([*parts, "</svg>\n"])


def _panel(strategy: PackingStrategy) -> str:
    note = f"{strategy.efficiency:.1%} real tokens, {strategy.packing_factor:.2f} sequences a row"
    parts = [
        _text(
            0,
            24,
            f"{_NAMES.get(strategy.algorithm, strategy.algorithm)}: {strategy.num_packs:,} rows",
            kind="title",
        ),
        _text(0, 44, note),
        f'<rect class="row" x="0" y="{TOP}" width="{WIDTH}" height="{HEIGHT}"/>',
    ]
    done = 0
    for pack, count in sorted(strategy.packs.items(), reverse=True):
        top, bottom = (TOP + HEIGHT * rows / strategy.num_packs for rows in (done, done + count))
        parts.append(_band(pack, strategy.max_length, top, bottom - top))
        done += count
    y = TOP + HEIGHT + 20
    parts += [
        _text(0, y, "0"),
        _text(WIDTH // 2, y, "grey: padding", anchor="middle"),
        _text(WIDTH, y, f"{strategy.max_length} tokens", anchor="end"),
    ]
    return "".join(parts)


def _text(x: int, y: int, text: str, *, kind: str = "note", anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'


def _band(pack: Pack, max_length: int, top: float, height: float) -> str:
    """The rows of one pack; a thin line parts them from the next ones where there is room for it."""
    line = 1 if height > _THICK else 0
    x, parts = 0.0, []
    for number, length in enumerate(pack):
        width = WIDTH * length / max_length
        parts.append(
            f'<rect x="{x:.1f}" y="{top:.2f}" width="{width:.1f}" height="{max(height - line, 0.4):.2f}" '
            f'fill="{FILLS[number % len(FILLS)]}"/>'
        )
        x += width
    return "".join(parts)
