"""Every program of the environment can ask torch for the backend ``popdist``, and pays almost nothing for it."""

import subprocess
import sys

import pytest
from torch import distributed as dist

from popdist.process_group.registration import register

AFTER_IMPORT = """
import os, sys
import torch.distributed as dist
print("POPDIST" in dist.Backend._plugins, "popdist.process_group.group" in sys.modules)
print(len(os.listdir("/proc/self/fd")))
"""

AFTER_INIT = """
import torch.distributed as dist, popdist
print("POPDIST" in dist.Backend._plugins)
popdist.init()
print("POPDIST" in dist.Backend._plugins)
"""


def run(program: str, autoload: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a program prints."""
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", autoload)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=50)
    assert done.stderr == ""
    return done.stdout.split()


def test_torch_finds_it_without_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the entry point; the process group itself is not loaded, and no file stays open."""
    registered, loaded, num_files = run(AFTER_IMPORT, "1", monkeypatch)
    assert (registered, loaded) == ("True", "False")
    assert num_files == run(AFTER_IMPORT, "0", monkeypatch)[2]


def test_init_registers_it_where_torch_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user may have switched torch's entry points off."""
    assert run(AFTER_INIT, "0", monkeypatch) == ["False", "True"]


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
