"""What is wrong with an installation of torch and numpy is said in one sentence, with what to do.

Holds popdist.ground.installation.torch_found and popdist.ground.installation.needs_torch.
"""

import sys
import tomllib
from importlib import import_module
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

import popdist
from popdist.ground.installation import torch_found
from popdist.ground.installation.torch_found import OLDEST_TORCH, find_trouble, trouble_of_numpy, trouble_of_torch
from tests.docs.markdown import ROOT


@pytest.mark.parametrize("version", ["2.6.0", "2.13.0+cpu", "3.0.0a0+git1234", "10.1", "unknown"])
def test_a_torch_that_works_is_no_trouble(version: str) -> None:
    """The oldest one too, one that is newer than all that were tested, and one whose version says nothing."""
    assert trouble_of_torch(version, has_distributed=True) == ""


def test_an_old_torch_is_named_with_the_oldest_that_works() -> None:
    """Which is that of the extra ``torch``."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    oldest = f"torch>={OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}"

    assert oldest in extras["torch"]
    for version in ("1.13.1", "2.5.1+cu124"):
        told = trouble_of_torch(version, has_distributed=False)
        assert told.startswith(f"torch {version} is too old")
        assert told.endswith(f"pip install '{oldest}'")


def test_a_torch_without_its_distributed_part() -> None:
    """Popdist connects processes through it."""
    told = trouble_of_torch("2.13.0", has_distributed=False)
    assert told.startswith(
        "torch 2.13.0 was built without torch.distributed, which popdist needs: install a build"
    )


@pytest.mark.parametrize(("numpy", "remedy"), [("2.1.3", "'numpy<2'"), ("1.26.4", "'numpy>=2'")])
def test_a_numpy_of_another_kind(numpy: str, remedy: str) -> None:
    """Torch was built for the other one."""
    told = trouble_of_numpy("2.6.0", numpy)
    assert told.startswith(f"torch 2.6.0 cannot use numpy {numpy}, for which it was not built")
    assert f"pip install {remedy}, or a torch" in told


class DeafTensor:
    """A tensor of a torch that found no numpy that it can use."""

    def numpy(self) -> None:
        """Fail as torch does."""
        raise RuntimeError("Numpy is not available")


def test_the_installed_torch_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """This one is fine; one that has no numpy, or is without its distributed part, is found out."""
    assert find_trouble() == ""
    monkeypatch.setattr(torch, "empty", lambda *_size, **_options: DeafTensor())
    assert f"cannot use numpy {np.__version__}" in find_trouble()
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert find_trouble() == "popdist needs numpy, which is not installed: pip install 'poprun[torch]'"
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    assert "built without torch.distributed" in find_trouble()
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))  # what a folder of that name is
    assert find_trouble().startswith("torch of no version was built without torch.distributed")


def test_what_trains_is_not_given_out_with_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name or by folder; what torch itself lacks is its own exception."""
    monkeypatch.delitem(sys.modules, "popdist.ground.installation.needs_torch", raising=False)
    monkeypatch.delattr("popdist.ground.installation.needs_torch", raising=False)  # of an import that went well
    monkeypatch.setattr(torch_found, "import_module", lambda _name: SimpleNamespace(__version__="1.0.2"))
    monkeypatch.delitem(vars(popdist), "ReplicatedModel", raising=False)
    with pytest.raises(popdist.InstallationError, match=r"torch 1\.0\.2 is too old"):
        _ = popdist.ReplicatedModel
    monkeypatch.setitem(sys.modules, "onnx", None)  # which is not installed either
    for package in ("popdist.optim", "popdist.onnx"):
        monkeypatch.delitem(sys.modules, package, raising=False)
        with pytest.raises(popdist.InstallationError, match=r"torch 1\.0\.2 is too old"):
            import_module(package)
    monkeypatch.setattr(torch_found, "import_module", lambda _name: __import__("a_library_of_torch"))
    with pytest.raises(ModuleNotFoundError, match="a_library_of_torch"):
        find_trouble()
