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
from popdist import contract
from popdist.process_group.registration import register
from tests.running import DEADLINE_SECONDS

PROJECT = Path(__file__).parent.parent.parent / "pyproject.toml"

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

FOREIGN = """
import sys
import torch.distributed as dist
print("POPDIST" in dist.Backend._plugins, "popdist.process_group" in sys.modules)
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
    ("hides", "file", "text"),
    [
        (True, "", ""),
        (False, "popdist.py", "raise SystemExit('ran')"),
        (False, "popdist/__init__.py", "import a_module_that_is_missing"),
        (False, "popdist/__init__.py", "raise RuntimeError('half of an installation')"),
    ],
    ids=["hidden", "a program of that name", "missing dependency", "broken"],
)
def test_programs_of_others_never_end_by_it(hides: bool, file: str, text: str, tmp_path: Path) -> None:  # noqa: FBT001 - a case
    """At ``import torch``, where the metadata of the distribution is there and the package cannot be imported."""
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

    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["False", "False"], "")


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
