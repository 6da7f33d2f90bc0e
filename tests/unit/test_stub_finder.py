"""Libraries beside PopTorch are found by import statements only, and last: a real one always wins.

Holds poptorch.stubs.operation_loading and poptorch.stubs.popart_enums.
"""

import importlib
import logging
import pkgutil
import sys
from collections.abc import Iterator
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

import popdist
from popdist.startup import stub_finder
from popdist.startup.stub_finder import LastFinder
from poptorch.stubs import operation_loading, popart_enums
from tests.running import run

SERVED = ("horovod", "popart", "examples_utils", "libpvti", "pvti")


@pytest.fixture(autouse=True)
def _not_imported_yet() -> Iterator[None]:
    """None of them is imported, before and after."""

    def forget() -> dict[str, ModuleType]:
        names = [name for name in sys.modules if name.partition(".")[0] in SERVED]
        return {name: sys.modules.pop(name) for name in names}

    before = forget()
    yield
    forget()
    sys.modules.update(before)


def test_they_are_imported_in_every_form() -> None:
    """Packages and modules in them, under their own names."""
    horovod = importlib.import_module("horovod.torch")
    assert (horovod.__name__, sys.modules["horovod"].__name__) == ("horovod.torch", "horovod")
    assert horovod.size() == 1
    assert vars(importlib.import_module("examples_utils.load_lib_utils.load_lib_utils"))["load_lib_all"]
    with pytest.raises(ModuleNotFoundError, match=r"horovod\.tensorflow"):
        importlib.import_module("horovod.tensorflow")
    with pytest.raises(AttributeError, match="'builder' here: PopART is not installed"):
        _ = importlib.import_module("popart").builder


@pytest.mark.parametrize("name", SERVED)
def test_whoever_asks_hears_that_they_are_not_installed(name: str) -> None:
    """By a spec, by metadata, or by asking the finders."""
    assert find_spec(name) is None
    with pytest.raises(ModuleNotFoundError):
        find_spec(f"{name}.torch")
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version(name)
    assert name not in metadata.packages_distributions()
    assert name not in {module.name for module in pkgutil.iter_modules()}
    assert {each.find_spec(name, None, None) for each in sys.meta_path} == {None}


def test_the_probes_of_other_libraries_are_as_ever() -> None:
    """Lightning's and transformers' functions, which ask in those ways."""
    lightning = pytest.importorskip("lightning_utilities.core.imports", reason="the extra `neighbours`")
    transformers = pytest.importorskip("transformers.utils.import_utils", reason="the extra `neighbours`")
    for name in SERVED:
        assert not lightning.package_available(name)
        assert not lightning.module_available(f"{name}.torch")
        assert not lightning.RequirementCache(name)
        assert not transformers._is_package_available(name)[0]


class LateFinder:
    """What an installation in place adds to ``sys.meta_path``, for one folder."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def find_spec(self, name: str, _path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """What the folder has."""
        return PathFinder.find_spec(name, [self._folder], target)


@pytest.mark.parametrize("is_late", [False, True])
def test_a_real_one_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_late: bool) -> None:
    """Wherever it stands in the path, also if its finder came last; and nothing is put into it."""
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("real = True")
    if is_late:
        monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, LateFinder(str(tmp_path))])
    else:
        monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    assert vars(importlib.import_module("horovod"))["real"]
    with pytest.raises(ModuleNotFoundError, match=r"horovod\.torch"):
        importlib.import_module("horovod.torch")


def test_nothing_is_served_without_poptorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody gets names of other projects who has not installed poptorch."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "poptorch"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [it for it in sys.path if not Path(it, "poptorch").exists()])
    stub_finder.begin()
    for name in SERVED:
        with pytest.raises(ModuleNotFoundError, match=f"'{name}'"):
            importlib.import_module(name)


def test_there_is_one_finder() -> None:
    """However often it is registered; `import popdist` alone registers none, and shows its public names only."""
    stub_finder.begin()
    stub_finder.begin()
    assert sum(isinstance(each, LastFinder) for each in sys.meta_path) == 1
    text = "import sys, popdist; print([type(it).__name__ for it in sys.meta_path], *dir(popdist))"
    finders, *names = run([sys.executable, "-c", text]).succeeded().out.partition("] ")[::2]
    assert "LastFinder" not in finders
    assert names[0].split() == sorted(vars(popdist)["__all__"])


def test_enumerations_are_numbers() -> None:
    """As options take and keep them."""
    enums = vars(popart_enums)
    assert int(enums["SyntheticDataMode"].RandomNormal) == 2
    assert int(enums["AccumulateOuterFragmentSchedule"].OverlapMemoryOptimized) == 3
    assert enums["SubgraphCopyingStrategy"]["JustInTime"] == 1
    assert set(popart_enums.__all__) <= set(enums)


def test_nothing_is_compiled(caplog: pytest.LogCaptureFixture) -> None:
    """It is said at the level of debugging."""
    with caplog.at_level(logging.DEBUG, "examples_utils"):
        for load in (operation_loading.load_lib, operation_loading.load_lib_all, operation_loading.load_lib_from):
            load("ops.cpp")
    assert len(caplog.records) == 3
    assert all("ops.cpp): nothing is compiled" in record.message for record in caplog.records)
    with pytest.raises(AttributeError, match="no 'testing' here"):
        _ = operation_loading.testing
