"""Every program of the environment can ask torch for the backend ``popdist``, and pays almost nothing for it."""

import subprocess
import sys

import pytest
from torch import distributed as dist

import popdist
from popdist import contract
from popdist.process_group.registration import register
from tests.running import DEADLINE_SECONDS

AFTER_IMPORT = """
import os, sys
import torch.distributed as dist
heavy = {"popdist.process_group.torch_process_group", "popdist.contract", "popdist.host_memory"}
print("POPDIST" in dist.Backend._plugins, sorted(heavy & set(sys.modules)))
print(len(os.listdir("/proc/self/fd")))
import popdist
popdist.init()
print("POPDIST" in dist.Backend._plugins)
"""

INIT_BEFORE_TORCH = """
import popdist
popdist.init()
import torch.distributed as dist
print("POPDIST" in dist.Backend._plugins)
"""


def run(program: str, autoload: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a program prints."""
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", autoload)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=DEADLINE_SECONDS
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_it_is_found_without_an_import_or_by_init(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the entry point; nothing that takes time to load is loaded, and no file stays open.

    A user may have switched torch's entry points off: then init() registers it, before torch is imported, too.
    """
    registered, loaded, num_files, *after = run(AFTER_IMPORT, "1", monkeypatch)
    assert (registered, loaded, after) == ("True", "[]", ["True"])
    assert run(AFTER_IMPORT, "0", monkeypatch) == ["False", "[]", num_files, "True"]
    assert run(INIT_BEFORE_TORCH, "0", monkeypatch) == ["True"]


def test_its_name_for_the_page_is_the_contracts() -> None:
    """The package does not load the contract to look for one variable."""
    assert popdist._PROGRESS_DESCRIPTOR == contract.PROGRESS_DESCRIPTOR
    assert popdist.__version__ == contract.VERSION


def test_it_is_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time does nothing."""
    register()
    before = dist.Backend._plugins["POPDIST"]
    register()
    assert dist.Backend._plugins["POPDIST"] is before


def test_it_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception would break ``import torch`` for the whole environment."""

    def refuse(*_arguments: object, **_options: object) -> None:
        raise RuntimeError("another torch")

    monkeypatch.setattr(dist.Backend, "_plugins", {})
    monkeypatch.setattr(dist.Backend, "register_backend", refuse)
    register()
    assert dist.Backend._plugins == {}
