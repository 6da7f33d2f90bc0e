"""Text in columns, bold and coloured where a terminal can show it, as a string."""

from io import StringIO

from rich.console import Console, RenderableType

MIN_WIDTH = 60
"""Columns below which the cells would fall apart; a narrower terminal wraps whole rows."""


class Page:
    """What is printed on it is laid out for a terminal, and becomes text.

    Args:
        width: Columns of the terminal; fewer than ``MIN_WIDTH`` count as that many.
        has_color: Whether it shows colours.
    """

    def __init__(self, *, width: int, has_color: bool) -> None:
        self._lines = StringIO()
        self._console = Console(
            file=self._lines,
            width=max(width, MIN_WIDTH),
            force_terminal=has_color,
            color_system="standard" if has_color else None,
            no_color=not has_color,
            highlight=False,
            emoji=False,
            markup=False,
            legacy_windows=False,
        )

    def print(self, part: RenderableType = "", *, wraps_words: bool = True) -> None:
        """Add a part; lines that are not to be wrapped are left to the terminal, so that they copy whole."""
        self._console.print(part, soft_wrap=not wraps_words)

    def text(self) -> str:
        """All parts, without blanks at the ends of lines, ending with a line break."""
        return "\n".join(line.rstrip() for line in self._lines.getvalue().splitlines()) + "\n"
