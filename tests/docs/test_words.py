"""The pages and the messages keep to plain words: sentences that are hard to read may only become fewer.

If a change lowers a count, lower its number here. ``python -m tests.docs.test_words`` prints each place.
"""

import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from textwrap import dedent

import pytest

from tests.architecture.source_tree import SOURCES
from tests.docs.markdown import ROOT, documents

MOST_WORDS_OF_A_SENTENCE = 30
MOST_WORDS_OF_ALL_PAGES = 45_000
GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

_NO_PROSE = re.compile(r"^```.*?^```|^(?:\||#|!|<!--|<br>|<https?:).*?$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_PART = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )")
_MARK = re.compile(r"^\s*(?:[-*]|\d+\.) ")
_END = re.compile(r"(?<=[.!?:])\**\s+(?=[A-Z`*\x22]|pop|torch|jobs)|(?<=[.!?])\**$")
_MESSAGE = re.compile(
    r"^(?P<indent> *)(?:raise [A-Z]|[\w.]*\b(?:warn|debug|info|warning|error|log|print_out)\().*$", re.MULTILINE
)


def parts(page: str) -> list[str]:
    """Return the paragraphs and list items of ``page``, without code blocks, tables, headings and links."""
    prose = _LINK.sub(r"\1", _NO_PROSE.sub("", page))
    return [" ".join(_MARK.sub("", part).split()) for part in _PART.split(prose) if part.strip()]


def sentences(part: str) -> list[str]:
    """Return the sentences of one paragraph or list item."""
    return [sentence for sentence in _END.split(part) if sentence.strip()]


@cache
def messages() -> tuple[tuple[str, str], ...]:
    """Return the module and the text of each message that is raised, warned or logged, with … for each value."""
    files = [path for package, folder in SOURCES.items() for path in sorted((folder / package).rglob("*.py"))]
    return tuple((path.stem, text) for path in files for text in _messages(path.read_text(encoding="utf-8")))


def _messages(source: str) -> Iterator[str]:
    """Yield the messages of one file; to parse only the statements that have some takes a tenth of the time."""
    for match in _MESSAGE.finditer(source):
        end = re.compile(rf"^{match['indent']}\).*$" if match[0].endswith("(") else "$", re.MULTILINE)
        statement = source[match.start() : end.search(source, match.end()).end()]  # type: ignore[union-attr]
        with suppress(SyntaxError):  # the head of a compound statement
            for node in ast.walk(ast.parse(dedent(statement))):
                if isinstance(node, ast.Call):
                    yield from filter(None, map(_text, node.args))


def _text(node: ast.expr) -> str:
    """Return the text of a string literal, empty if ``node`` is none."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(_text(value) if isinstance(value, ast.Constant) else "…" for value in values)
        case _:
            return ""


def beginning_with_a_pointer(part: str) -> Iterator[str]:
    """Yield ``part`` if its first word points at a noun of another sentence."""
    if re.match(r"\W*(It|They|This|That|Those|These|One|What|Neither|Both|Others)\b(?! (?:page|pages)\b)", part):
        yield part


def is_no(part: str) -> Iterator[str]:
    """Yield each sentence of ``part`` that says what a thing is not by *is no*."""
    yield from (it for it in sentences(part) if re.search(r"(?<![Tt]here )\b(?:is|are) no\b", it))


def that_of(part: str) -> Iterator[str]:
    """Yield each sentence of ``part`` that has *that of* or *those of* for a noun."""
    yield from (it for it in sentences(part) if re.search(r"\b(?:that|those) of\b", it))


def too_long(part: str) -> Iterator[str]:
    """Yield each sentence of ``part`` that has too many words."""
    yield from (it for it in sentences(part) if len(it.split()) > MOST_WORDS_OF_A_SENTENCE)


Finder = Callable[[str], Iterator[str]]
MOST: dict[Finder, tuple[int, int]] = {
    beginning_with_a_pointer: (0, 0),
    is_no: (0, 63),
    that_of: (1, 20),
    too_long: (2, 49),
}
"""Of each pattern how often it may be in the pages, and in the messages."""


def found(finder: Finder, texts: Iterable[tuple[str, str]]) -> list[str]:
    """Return every place that ``finder`` sees in ``texts``, pairs of a place's name and a text."""
    return [f"{name}: {it}" for name, text in texts for it in finder(text)]


def of_pages() -> Iterator[tuple[str, str]]:
    """Yield the page's name and the text of each paragraph of each guide."""
    for page in GUIDES:
        yield from ((page.name, part) for part in parts(page.read_text(encoding="utf-8")))


@pytest.mark.parametrize("finder", MOST, ids=lambda it: it.__name__)
def test_hard_sentences_do_not_become_more(finder: Finder) -> None:
    """In the guides, and in the messages of the sources."""
    in_pages, in_messages = found(finder, of_pages()), found(finder, messages())

    assert (len(in_pages) <= MOST[finder][0], in_pages) == (True, in_pages)
    assert (len(in_messages) <= MOST[finder][1], in_messages) == (True, in_messages)


def test_the_pages_stay_short() -> None:
    """All Markdown of the project together."""
    folders = ("tests", "benchmarks", "poptorch_py")
    pages = [*documents(), *(page for folder in folders for page in (ROOT / folder).rglob("*.md"))]

    assert sum(len(page.read_text(encoding="utf-8").split()) for page in pages) <= MOST_WORDS_OF_ALL_PAGES


def test_the_patterns_are_seen() -> None:
    """Each finder sees its own pattern, and nothing in a sentence that has none."""
    page = (
        "# It\n\nIt is no pipe, a [file](that of.md).\n\n- The code is that of the last.\n\n```\nThis is no\n```\n"
    )
    long = " ".join(["word"] * (MOST_WORDS_OF_A_SENTENCE + 1))
    pages = [("page", part) for part in [*parts(page), long]]

    assert {it: len(found(it, pages)) for it in MOST} == dict.fromkeys(MOST, 1)
    assert not any(found(it, [("page", "poprun starts each instance.")]) for it in MOST)


def main() -> None:
    """Print each place of each pattern."""
    for finder in MOST:
        for texts in (of_pages(), messages()):
            places = found(finder, texts)
            sys.stdout.write("\n".join([f"# {finder.__name__}: {len(places)}", *places, ""]))


if __name__ == "__main__":
    main()
