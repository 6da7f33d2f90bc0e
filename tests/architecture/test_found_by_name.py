"""The tests of a module are found by its name."""

import ast
import re
from functools import cache

from tests.architecture.source_tree import ROOT, Module, all_modules

_TESTS = ROOT / "tests"
_HOLDS = re.compile(r"\bHolds ([\w.,\s]+\w)\.(?:\s|$)")
_NAME = re.compile(r"\b(?:poprun|popdist|poptorch)(?:\.\w+)*")


@cache
def claimed() -> frozenset[str]:
    """The modules that a docstring of the tests names in a line like ``Holds poprun.job.loop.``: all of them."""
    docstrings = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) for path in _TESTS.rglob("*.py"))
    return frozenset(_NAME.findall(" ".join(claim for text in docstrings for claim in _HOLDS.findall(text or ""))))


def has_content(module: Module) -> bool:
    """Whether a module has more than a docstring and imports."""
    return any(not isinstance(node, ast.Expr | ast.Import | ast.ImportFrom) for node in module.tree.body)


def test_every_module_has_a_file_of_tests() -> None:
    """It bears the module's name, ``test_<module>.py``, or says in its docstring that it holds the module."""
    files = {path.stem.removeprefix("test_") for path in _TESTS.rglob("test_*.py")}
    lost = {
        module.name
        for module in all_modules()
        if has_content(module) and module.name.rpartition(".")[2] not in files and module.name not in claimed()
    }

    assert lost == set()


def test_a_docstring_names_modules_that_are_there() -> None:
    """Those that it holds."""
    assert claimed() - {module.name for module in all_modules()} == set()
