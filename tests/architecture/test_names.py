"""Names: each once in a package, in the words of the glossary; and the tests of a module are found by its name."""

import ast
import re
from collections import Counter

import pytest

from tests.architecture.source_tree import ROOT, SOURCES, Module, comments, docstrings, modules
from tests.docs.markdown import documents, prose

MOST_WORDS_OF_THE_GLOSSARY = 40

FOREIGN = {"__init__", "__main__"}
"""Modules that have namesakes: Python names them."""

_HOLDS = re.compile(r"\bHolds ([\w.,\s]+\w)\.(?:\s|$)")
_OF_MAKERS = re.compile(
    r"(?i:\bcuda|nvidia|\brocm|\brocr|\bhip_|\bhip\b|\bxpu|level zero|libcu|cublas|cudnn)|\bZE_[A-Z]"
)
_MAY_NAME_MAKERS = {
    "popsize.hardware": "devices that people buy, by the names in their data sheets",
}
"""The modules beside `poprun.makers` in which makers are named, and why."""

_OTHER_MEANINGS = {
    "box": "of a drawing",
    "chunk": "a piece of a message",
    "clone": "of a tensor",
    "computer": "any one, also outside of a job",
    "daemon": "of MPI; a kind of process",
    "example": "one that is shown",
    "grant": "what a pool does with a request",
    "iteration": "over a loader; of PopTorch's devices",
    "manager": "of a context, of Hydra",
    "note": "keep a fact",
    "proc": "the file system of processes",
    "retry": "try again",
    "schedule": "of a pipeline or of a learning rate",
    "session": "of processes, of Open MPI, of PopART",
    "starter": "of autograd's engine",
    "task": "of Slurm",
    "try": "of doing something",
    "worker": "of a DataLoader",
}
"""Words that the glossary has another one for, and what they may mean in a text."""

_NAME = re.compile(r"\b(?:poprun|popsize|popdist|poptorch)(?:\.\w+)*")


def test_no_name_occurs_twice() -> None:
    """Who looks for a name finds one file, or one class of a package; each package has its errors."""
    files = Counter(module.path.stem for module in modules())
    classes = Counter((module.package, node.name) for module in modules() for node in module.classes)

    assert {name: count for name, count in files.items() if count > 1 and name not in FOREIGN} == {
        "errors": len(SOURCES)
    }
    assert {name for name, count in classes.items() if count > 1} == set()


def test_makers_of_devices_are_named_in_one_folder() -> None:
    """Everything else in the launcher speaks of devices, so that a further maker is a further value there."""
    naming = {
        module.name
        for module in modules("poprun", "popsize")
        if _OF_MAKERS.search(module.path.read_text(encoding="utf-8"))
    }

    assert {name for name in naming if not name.startswith("poprun.makers.")} == _MAY_NAME_MAKERS.keys()


def _glossary(section: str) -> list[tuple[str, list[str]]]:
    """Each word, or verb, of the glossary, with what is not to be used for it."""
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    table = text.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:4] for line in table.splitlines() if line.startswith("| ")]
    return [(word.strip(), [*filter(None, map(str.strip, others.split(",")))]) for word, _, others in rows[1:]]


def test_the_glossary_is_short() -> None:
    """Somebody new can read it in two minutes, and finds each word once."""
    words = [word for word, _ in _glossary("Words")]

    assert 0 < len(words) <= MOST_WORDS_OF_THE_GLOSSARY
    assert len(set(words)) == len(words)


@pytest.mark.parametrize("section", ["Words", "Verbs"])
def test_names_keep_to_the_glossary(section: str) -> None:
    """No file and no class has a word, and no function is called by a verb alone, that it has another one for."""
    avoided = {other: word for word, others in _glossary(section) for other in others}
    named = [
        (module.name, name, part)
        for module in modules()
        for name in [module.path.stem, *(node.name for node in module.classes)]
        for part in _words_of(name)
    ]
    if section == "Verbs":
        named = [(module.name, it.name, it.name.strip("_")) for module in modules() for it in module.functions]

    assert [f"{place}: {name}, say {avoided[part]}" for place, name, part in named if part in avoided] == []


def test_each_word_of_the_glossary_is_used() -> None:
    """Each word in a page, a docstring or a comment; each verb in the name of a function."""
    said = "\n".join(_texts()).lower()
    named = {part for function in _functions() for part in _parts(function)}
    verbs = [verb for row, _ in _glossary("Verbs") for verb in row.split(", ")]

    assert [word for word, _ in _glossary("Words") if not re.search(rf"\b{word.lower()}s?\b", said)] == []
    assert [verb for verb in verbs if verb not in named] == []


def test_a_word_that_the_glossary_refuses_is_used_nowhere() -> None:
    """No text and no function's name has it, but for those that mean another thing."""
    refused = [other for _, others in _glossary("Words") for other in others]
    pattern = re.compile(rf"(?<![\w`/.-])({'|'.join(refused)})s?\b(?![`_./(-]\w?)", re.IGNORECASE)
    used = {match.lower() for text in _texts() for match in pattern.findall(text)}
    used |= {part for function in _functions() for part in _words_of(function) if part in refused}

    assert used - _OTHER_MEANINGS.keys() == set()


def _texts() -> list[str]:
    """The prose of each page but the glossary, and each docstring and comment."""
    pages = [prose(page) for page in documents() if page.name != "glossary.md"]
    return [*pages, *(text for module in modules() for text in (*docstrings(module), *comments(module)))]


def _functions() -> list[str]:
    return [function.name for module in modules() for function in module.functions]


def _parts(name: str) -> set[str]:
    """Each run of words of a name with underscores: of ``_wait_for_all`` also ``wait_for``."""
    words = name.strip("_").split("_")
    return {"_".join(words[start:end]) for start in range(len(words)) for end in range(start + 1, len(words) + 1)}


def _words_of(name: str) -> set[str]:
    """The words of a name in either case, in lower case, each as it is and without an ``s`` at its end."""
    parts = {part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}
    return parts | {part.removesuffix("s") for part in parts}


def test_every_module_has_a_file_of_tests() -> None:
    """It bears its name, ``test_<module>.py``, or a docstring has ``Holds`` and its full name."""
    paths = list((ROOT / "tests").rglob("*.py"))
    docstrings = [ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "" for path in paths]
    held = {name for text in docstrings for claim in _HOLDS.findall(text) for name in _NAME.findall(claim)}
    files = {path.stem for path in paths}
    lost = {module.name for module in modules() if f"test_{module.name.rpartition('.')[2]}" not in files}

    assert {module.name for module in modules() if _has_content(module)} & lost <= held
    assert held <= {module.name for module in modules()}


def _has_content(module: Module) -> bool:
    """Whether a module has more than a docstring and imports."""
    return any(not isinstance(node, ast.Expr | ast.Import | ast.ImportFrom) for node in module.tree.body)
