"""Which tests hold which module: ``python -m tests.architecture.rooms MODULE``.

A file of tests holds the modules that it names: by an import, by a public name of popdist, or in a string, as the
programs have it that tests start. What belongs to one or two files of tests, as the laws beside them, counts as a
part of them; what many use, such as the fixtures, holds nothing. What tests reach only from outside, as through a
process, they name in a line of their docstring: ``Holds poprun.job.loop and poprun.launch.agent.``
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from tests.architecture.source_tree import ROOT, all_modules

_TESTS = ROOT / "tests"
_MOST_OWNERS = 2
"""A module of the tests that more files use is equipment."""

_NAME = re.compile(r"\b(?:poprun|popdist|poptorch|tests)(?:\.\w+)+")
_FILE = re.compile(r"\w+(?=\.py$)")
_HOLDS = re.compile(r"\bHolds ([\w.,\s]+\w)\.(?:\s|$)")


def rooms() -> list[str]:
    """Every module that holds more than a docstring and imports."""
    return [module.name for module in all_modules() if any(map(_is_content, module.tree.body))]


def _is_content(node: ast.stmt) -> bool:
    return not isinstance(node, ast.Expr | ast.Import | ast.ImportFrom)


@cache
def holders() -> dict[str, tuple[str, ...]]:
    """Module → the files of tests that hold it."""
    named = {path: frozenset(_names_in(path)) for path in _TESTS.rglob("*.py")}
    num_owners = Counter(helper for path in named for helper in _helpers(path, named))
    held = {
        path: {name for part in _parts(path, named, num_owners) for name in named[part]}
        for path in named
        if path.name.startswith("test_") and path.parent.name != "architecture"
    }
    return {room: tuple(_by_focus(room, held)) for room in rooms()}


def _by_focus(room: str, held: Mapping[Path, set[str]]) -> list[str]:
    """The files that hold a module: those named after it first, then those that hold the fewest others."""
    name = room.rpartition(".")[2]
    found = [path for path, names in held.items() if room in names]
    found.sort(key=lambda path: (name not in path.stem, len(held[path]), path))
    return [str(path.relative_to(_TESTS)) for path in found]


def _parts(path: Path, named: Mapping[Path, frozenset[str]], num_owners: Mapping[Path, int]) -> set[Path]:
    """A file of tests and what belongs to it."""
    parts, waiting = set[Path](), [path]
    while waiting:
        part = waiting.pop()
        if part not in parts:
            parts.add(part)
            waiting += [one for one in _helpers(part, named) if num_owners[one] <= _MOST_OWNERS]
    return parts


def _helpers(path: Path, named: Mapping[Path, frozenset[str]]) -> set[Path]:
    """The modules of the tests that a file names."""
    found = {ROOT.joinpath(*name.split(".")).with_suffix(".py") for name in named[path]}
    return {helper for helper in found & named.keys() if not helper.name.startswith("test_")} - {path}


def _names_in(path: Path) -> Iterator[str]:
    """The modules of the packages and of the tests that a file names."""
    known, public = _known(), _public_names()
    for text in _texts(ast.parse(path.read_text(encoding="utf-8"))):
        for name in _NAME.findall(text):
            beginnings = (name.rsplit(".", number)[0] for number in range(name.count(".") + 1))
            yield public.get(name) or next(filter(known.__contains__, beginnings), name)
        yield from (".".join((*path.relative_to(ROOT).parent.parts, file)) for file in _FILE.findall(text))


def _texts(tree: ast.Module) -> Iterator[str]:
    """All in which a file can name a module: imports, uses of popdist, strings, and the line of its docstring."""
    first = tree.body[0] if tree.body else None
    docstring = first.value if isinstance(first, ast.Expr) else None
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=module, names=names):
                yield from (f"{module}.{alias.name}" for alias in names)
            case ast.Attribute():
                yield ast.unparse(node)
            case ast.Constant(value=str(text)):
                yield text if node is not docstring else ""
    yield from _HOLDS.findall(ast.get_docstring(tree) or "")


@cache
def _known() -> frozenset[str]:
    tests = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in _TESTS.rglob("*.py")}
    return frozenset({module.name for module in all_modules()} | tests)


@cache
def _public_names() -> dict[str, str]:
    """``popdist.all_reduce`` → ``popdist.collectives``: what the ``__init__.py`` of each folder has of it."""
    return {
        f"{package.name}.{alias.name}": str(node.module)
        for package in all_modules()
        if package.path.name == "__init__.py"
        for node in ast.walk(package.tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(f"{package.name}.")
        for alias in node.names
    }


def claimed() -> dict[str, frozenset[str]]:
    """File of tests → the modules that the line of its docstring names."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in _TESTS.rglob("test_*.py")}
    claims = {path: " ".join(_HOLDS.findall(ast.get_docstring(tree) or "")) for path, tree in trees.items()}
    return {str(path.relative_to(_TESTS)): frozenset(_NAME.findall(claim)) for path, claim in claims.items()}


if __name__ == "__main__":
    for asked in sys.argv[1:]:
        sys.stdout.writelines(f"tests/{file}\n" for file in holders()[asked])
