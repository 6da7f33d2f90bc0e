"""Functions are called once a module has been imported, and the program sees nothing of it."""

import importlib
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from popdist.startup.after_import import AfterImport

NAME = "imported_once"


@pytest.fixture
def finder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AfterImport]:
    """One beside a module that counts how often it runs, and one that fails."""
    (tmp_path / f"{NAME}.py").write_text("import sys\nsys.flags_of_test = getattr(sys, 'flags_of_test', 0) + 1\n")
    (tmp_path / f"{NAME}_badly.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))
    made = AfterImport()
    yield made
    for name in (NAME, f"{NAME}_badly"):
        sys.modules.pop(name, None)
    if made in sys.meta_path:
        sys.meta_path.remove(made)
    if hasattr(sys, "flags_of_test"):
        del sys.flags_of_test


def test_functions_are_called_after_the_first_import(finder: AfterImport) -> None:
    """In their order, with the module, whose loader is its own again; who fails disturbs nobody."""
    before, called = list(sys.meta_path), []

    def fail(_: ModuleType) -> None:
        raise ValueError

    finder.call(NAME, fail)
    finder.call(NAME, lambda module: called.append((module, sys.flags_of_test)))  # type: ignore[attr-defined]
    assert sys.meta_path[0] is finder
    spec = find_spec(NAME)
    assert spec is not None
    assert spec.loader.get_source(NAME).startswith("import sys")  # type: ignore[union-attr] # who only asks
    assert called == []
    module = importlib.import_module(NAME)

    assert called == [(module, 1)]
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    assert module.__spec__ is not None
    assert module.__spec__.loader is module.__loader__
    assert sys.meta_path == before
    finder.call(NAME, lambda module: called.append((module, 2)))
    assert called == [(module, 1), (module, 2)]


def test_what_cannot_be_imported_fails_as_without_it(finder: AfterImport) -> None:
    """Missing or broken, and it is still waited for."""
    called: list[ModuleType] = []
    for name in (f"{NAME}_badly", f"{NAME}_missing"):
        finder.call(name, called.append)
    with pytest.raises(ZeroDivisionError):
        importlib.import_module(f"{NAME}_badly")
    with pytest.raises(ModuleNotFoundError, match=f"'{NAME}_missing'"):
        importlib.import_module(f"{NAME}_missing")

    assert called == []
    assert find_spec(f"{NAME}_missing") is None
    assert finder in sys.meta_path
