"""The docstrings and comments keep to plain words: those that are hard to read may only become fewer.

If a change lowers a count, lower its number here. ``python -m tests.docs.test_docstrings`` prints each place.
"""

import ast
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import Final

import pytest

from tests.architecture.source_tree import Module, comments, docstrings, modules, words

PACKAGES: Final = ("popsize", "popdist", "poprun")

VERBS: Final = words(
    "accept acquire adapt add allocate answer append apply ask be begin bind blame build call cancel check "
    "choose clear clip close collate combine compare compile compute connect continue copy count create cut deal "
    "declare describe destroy disable discard divide do draw drop end enlarge enter evaluate exchange exclude "
    "fail fetch fill finalize find finish flush forget fork gather get give grant hand handle have hide hold "
    "identify import iterate join keep kill learn leave let listen load lock log look lower make map mark "
    "measure merge mix move multiply normalise note notice obey open order overwrite pack pad parse pass pause "
    "pickle plan post prepare print put queue raise read reap receive record redirect reduce refuse register "
    "release remember remove rename renew replace report request reserve restore return round run sample save "
    "say scale search send serve set share show simulate sleep solve split start step stop store take tell "
    "train try unmap unpickle update use wait wake warn write yield"
)
"""The verbs with which the docstrings of functions begin; a new verb gets its place here."""

_PHRASES: Final = ("that of", "those of", "within it", "as above", "as below", "so too")
_POINTERS: Final = words("this that these those it they what where which")


def first_word(text: str) -> str:
    """Return the first word of ``text`` in lower case, without marks."""
    match = re.match(r"\W*(\w+)", text)
    return match[1].lower() if match else ""


def without_verb(module: Module) -> Iterator[str]:
    """Yield each function whose docstring begins with no verb, but for a property, *Whether* and *A context*."""
    for function in module.functions:
        docstring = " ".join((ast.get_docstring(function) or "Return").split())
        is_property = any("property" in ast.unparse(it) for it in function.decorator_list)
        is_thing = re.match(r"Whether |A context ", docstring)
        if not is_property and not is_thing and first_word(docstring) not in VERBS:
            yield f"{function.name}: {docstring}"


def beginning_with_a_pointer(module: Module) -> Iterator[str]:
    """Yield each docstring whose first word points at a noun that another text has."""
    yield from (text for text in docstrings(module) if first_word(text) in _POINTERS)


def with_phrase(phrase: str) -> Callable[[Module], Iterator[str]]:
    """Return a finder that yields each ``phrase`` in docstrings and comments, with the words that follow."""
    pattern = re.compile(rf"\b{phrase}\b.{{0,60}}", re.IGNORECASE)

    def finder(module: Module) -> Iterator[str]:
        for text in (*docstrings(module), *comments(module)):
            yield from pattern.findall(text)

    return finder


Finder = Callable[[Module], Iterator[str]]
FINDERS: Final[dict[str, Finder]] = {
    "without a verb": without_verb,
    "beginning with a pointer": beginning_with_a_pointer,
    **{phrase: with_phrase(phrase) for phrase in _PHRASES},
}

MOST: Final = {
    "without a verb": 0,
    "beginning with a pointer": 0,
    "that of": 0,
    "those of": 3,
    "within it": 0,
    "as above": 0,
    "as below": 0,
    "so too": 0,
}
"""Of each pattern how often it may be in the packages of poprun and popdist."""


@cache
def found(pattern: str) -> tuple[str, ...]:
    """Return every place of ``pattern``: the module's name and the text."""
    return tuple(f"{module.name}: {it}" for module in modules(*PACKAGES) for it in FINDERS[pattern](module))


@pytest.mark.parametrize("pattern", FINDERS)
def test_hard_docstrings_do_not_become_more(pattern: str) -> None:
    """Nor comments with such a phrase."""
    assert (len(found(pattern)) <= MOST[pattern], found(pattern)) == (True, found(pattern))


def test_the_patterns_are_seen(tmp_path: Path) -> None:
    """Each finder sees its own pattern once, and nothing in plain words."""
    hard = module_of(
        tmp_path / "hard.py",
        """
        def answer():
            '''The answer, so too that of others as above.'''  # within it, and
            # as below those
            # of others

        limit = 1
        '''This is a limit.'''
        """,
    )
    plain = module_of(
        tmp_path / "plain.py",
        """
        def answer():
            '''Return the answer.'''  # of the question

        def is_known():
            '''Whether the answer is known.'''

        @property
        def limit():
            '''The limit of the answer.'''
        """,
    )

    assert {name: len([*finder(hard)]) for name, finder in FINDERS.items()} == dict.fromkeys(MOST, 1)
    assert {name: [*finder(plain)] for name, finder in FINDERS.items()} == {name: [] for name in MOST}


def module_of(path: Path, text: str) -> Module:
    """Write ``text`` to ``path``, and return the file as a module."""
    path.write_text(dedent(text), encoding="utf-8")
    tree = ast.parse(dedent(text))
    return Module(name=path.stem, path=path, place=path.name, tree=tree, nodes=(*ast.walk(tree),))


def main() -> None:
    """Print each place of each pattern."""
    for pattern in FINDERS:
        sys.stdout.write("\n".join([f"# {pattern}: {len(found(pattern))}", *found(pattern), ""]))


if __name__ == "__main__":
    main()
