"""Every program of the environment can ask torch for the backend ``popdist``, and pays almost nothing for it."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

import popdist
import popdist_backend
from popdist.exchange.process_group.registration import register
from popdist.ground import contract
from tests.running import DEADLINE_SECONDS

PROJECT = Path(__file__).parent.parent.parent / "pyproject.toml"

AFTER_IMPORT = """
import os, sys
import torch.distributed as dist
exchange = "popdist.exchange"
heavy = {f"{exchange}.process_group.torch_process_group", "popdist.ground.contract", f"{exchange}.host_memory"}
print("POPDIST" in dist.Backend._plugins, sorted(heavy & set(sys.modules)))
print(len(os.listdir("/proc/self/fd")))
import popdist
popdist.init()
print("POPDIST" in dist.Backend._plugins)
"""

FOREIGN = """
import sys
import torch.distributed as dist
print("popdist.exchange.process_group" in sys.modules)
try:
    dist.init_process_group("popdist", store=dist.HashStore(), rank=0, world_size=1)
except ImportError as error:
    print(error)
"""

TOO_OLD = """
import sys, types
version = sys.modules["torch.version"] = types.ModuleType("torch.version")
version.__version__ = "2.3.1+cpu"
version.__getattr__ = lambda name: None
import torch.distributed as dist
try:
    dist.init_process_group("popdist", store=dist.HashStore(), rank=0, world_size=1)
except ImportError as error:
    print(error)
import popdist
try:
    import popdist.optim
except popdist.InstallationError as error:
    print(error)
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


@pytest.mark.parametrize(
    ("hides", "file", "text", "reason"),
    [
        (True, "", "", "Python does not find popdist, of which it finds the metadata; install poprun again"),
        (False, "popdist.py", "raise SystemExit('ran')", "stands in the way of the package popdist"),
        (
            False,
            "popdist/__init__.py",
            "import a_module_that_is_missing",
            "ModuleNotFoundError: No module named 'a_module_that_is_missing'",
        ),
        (
            False,
            "popdist/__init__.py",
            "raise RuntimeError('half of an installation')",
            "RuntimeError: half of an installation",
        ),
    ],
    ids=["hidden", "a program of that name", "missing dependency", "broken"],
)
def test_programs_of_others_never_end_by_it(
    hides: bool,  # noqa: FBT001 - a case
    file: str,
    text: str,
    reason: str,
    tmp_path: Path,
) -> None:
    """At ``import torch``, where the metadata of the distribution is there and the package cannot be imported.

    Who asks for the backend hears why it is not there.
    """
    names = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["entry-points"]["torch.backends"]
    information = tmp_path / "poprun-0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: poprun\nVersion: 0\n", encoding="utf-8")
    entries = "".join(f"{name} = {target}\n" for name, target in names.items())
    (information / "entry_points.txt").write_text(f"[torch.backends]\n{entries}", encoding="utf-8")
    shutil.copy(popdist_backend.__file__, tmp_path)
    if file:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text, encoding="utf-8")
    libraries = Path(torch.__file__).parent.parent
    command = [
        sys.executable,
        *(["-S"] if hides else []),
        "-c",
        FOREIGN,
    ]  # what the files .pth name is not there then
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_SECONDS,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{libraries}"},
    )

    loaded, told = done.stdout.splitlines()
    assert (done.returncode, loaded, done.stderr) == (0, "False", "")
    assert told.startswith("torch has no backend popdist: ")
    assert reason in told


def test_a_torch_that_is_too_old_is_imported_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend, and what trains, say which version was found and which is the oldest that works."""
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")
    done = subprocess.run(
        [sys.executable, "-c", TOO_OLD], capture_output=True, text=True, check=True, timeout=DEADLINE_SECONDS
    )
    told = "torch 2.3.1+cpu is too old for popdist, which works with torch 2.6 and newer: pip install 'torch>=2.6'"
    assert done.stdout.splitlines() == [
        f"torch has no backend popdist: {told} (`poprun --doctor` tells more)",
        told,
    ]


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
    popdist_backend.register()
    assert dist.Backend._plugins == {}
