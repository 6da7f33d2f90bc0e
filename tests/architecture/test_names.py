"""The names of modules and classes: each once in a package, and in the words of the glossary."""

import ast
import re
from collections import Counter

import pytest

from tests.architecture.source_tree import ROOT, Module, modules

GLOSSARY = ROOT / "docs" / "glossary.md"
MOST_WORDS_OF_THE_GLOSSARY = 40

FOREIGN = frozenset({"slurm", "__init__", "__main__"})
"""Modules that may have namesakes: what is foreign, in folders that say its part, and Python's own."""


def _classes(module: Module) -> list[str]:
    return [node.name for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)]


@pytest.mark.parametrize("package", ["popdist", "poprun", "poptorch"])
def test_no_name_occurs_twice(package: str) -> None:
    """A reader who meets a name again meets the same thing."""
    files = Counter(module.path.stem for module in modules(package))
    classes = Counter(name for module in modules(package) for name in _classes(module))

    assert {name for name, count in files.items() if count > 1} - FOREIGN == set()
    assert {name for name, count in classes.items() if count > 1} == set()


def test_no_file_of_two_packages_has_one_name() -> None:
    """Who looks for a file by its name finds one; each package has its errors."""
    packages = [{module.path.stem for module in modules(it)} for it in ("popdist", "poprun", "poptorch")]
    files = Counter(name for names in packages for name in names)

    assert {name for name, count in files.items() if count > 1} - FOREIGN == {"errors"}


def _glossary(section: str = "Words") -> list[tuple[str, set[str]]]:
    """Each word, or verb, of the glossary, with what is not to be used for it."""
    text = GLOSSARY.read_text(encoding="utf-8").partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:4] for line in text.splitlines() if line.startswith("| ")]
    return [(word.strip(), {other.strip() for other in others.split(",")} - {""}) for word, _, others in rows[1:]]


def test_the_glossary_is_short() -> None:
    """Somebody new can read it in two minutes, and finds each word once."""
    words = [word for word, _ in _glossary()]

    assert 0 < len(words) <= MOST_WORDS_OF_THE_GLOSSARY
    assert len(set(words)) == len(words)


@pytest.mark.parametrize("package", ["popdist", "poprun", "poptorch"])
def test_names_keep_to_the_glossary(package: str) -> None:
    """No file and no class bears a word that the glossary has another one for."""
    avoided = {other: word for word, others in _glossary() for other in others}
    wrong = [
        f"{module.name}: {name} says {part}, the glossary {avoided[part]}"
        for module in modules(package)
        for name in (module.path.stem, *_classes(module))
        for part in _words_of(name)
        if part in avoided
    ]

    assert wrong == []


@pytest.mark.parametrize("package", ["popdist", "poprun", "poptorch"])
def test_verbs_keep_to_the_glossary(package: str) -> None:
    """No function and no method is called by a verb alone that the glossary has another one for."""
    avoided = {other: verb for verb, others in _glossary("Verbs") for other in others}
    wrong = [
        f"{module.name}: {node.name}, the glossary {avoided[node.name.strip('_')]}"
        for module in modules(package)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.strip("_") in avoided
    ]

    assert wrong == []


def _words_of(name: str) -> set[str]:
    """The words of a name in either case, in lower case, each as it is and without an ``s`` at its end."""
    parts = {part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}
    return parts | {part.removesuffix("s") for part in parts}
