"""Tables in Markdown, and their place in a document, so that its figures can be taken again with one command."""

import re
from collections.abc import Sequence
from pathlib import Path


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with straight columns, the first on the left, the others on the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first, *others = zip(cells, widths, strict=True)
        aligned = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
        return f"| {' | '.join(aligned)} |"

    rule = "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])])
    return "\n".join([line(head), f"|{rule}|", *map(line, rows)])


def put(document: Path, name: str, text: str) -> None:
    """Write ``text`` into ``document`` in place of what stands between its two comments ``name``.

    Raises:
        SystemExit: If it has no such comments.
    """
    begin, end = f"<!-- {name} begins -->", f"<!-- {name} ends -->"
    old = document.read_text(encoding="utf-8")
    new, found = re.subn(
        f"{re.escape(begin)}.*?{re.escape(end)}",
        lambda _: f"{begin}\n{text}\n{end}",
        old,
        count=1,
        flags=re.DOTALL,
    )
    if not found:
        raise SystemExit(f"{document} has no place for the figures: put {begin} and {end} there")
    document.write_text(new, encoding="utf-8")
