"""Read the project's Markdown: its fenced blocks, its links, its headings."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent

_FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
_HEADING = re.compile(r"^#+ (?P<title>.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block.

    Attributes:
        language: The word after the fence.
        text: What stands between the fences.
        line: Line of the file on which it starts.
    """

    language: str
    text: str
    line: int


def documents() -> list[Path]:
    """Every Markdown file of the project."""
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md")])


def blocks(document: Path) -> list[Block]:
    """The fenced blocks of ``document``, in order."""
    text = document.read_text(encoding="utf-8")
    return [
        Block(language=match["language"], text=match["text"], line=text.count("\n", 0, match.start()) + 1)
        for match in _FENCE.finditer(text)
    ]


def links(document: Path) -> list[str]:
    """The targets of the links of ``document``, outside its blocks."""
    return [match["target"] for match in _LINK.finditer(prose(document))]


def prose(document: Path) -> str:
    """The text of ``document`` outside its blocks."""
    return _FENCE.sub("", document.read_text(encoding="utf-8"))


def anchors(document: Path) -> set[str]:
    """What a link may name after ``#``: the headings, spelt as web pages spell them."""
    titles = (match["title"] for match in _HEADING.finditer(document.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
