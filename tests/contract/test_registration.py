"""Every program of the environment can ask torch for the backend ``popdist``, and pays almost nothing for it."""

import subprocess
import sys
from pathlib import Path

import pytest
from torch import distributed as dist

import popdist
from popdist import contract
from popdist.process_group.registration import register
from tests.running import DEADLINE_SECONDS, MpiEnvironment, Poprun
from tests.running import run as run_command

AFTER_IMPORT = """
import os, sys
import torch.distributed as dist
heavy = {"popdist.process_group.torch_process_group", "popdist.contract", "popdist.host_memory"}
print("POPDIST" in dist.Backend._plugins, sorted(heavy & set(sys.modules)))
print(len(os.listdir("/proc/self/fd")))
"""

AFTER_INIT = """
import torch.distributed as dist, popdist
print("POPDIST" in dist.Backend._plugins)
popdist.init()
print("POPDIST" in dist.Backend._plugins)
"""

INIT_BEFORE_TORCH = """
import popdist
popdist.init()
import torch.distributed as dist
print("POPDIST" in dist.Backend._plugins)
"""

PLAIN = Path(__file__).with_name("plain_ranks.py")


def run(program: str, autoload: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a program prints."""
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", autoload)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=DEADLINE_SECONDS
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_torch_finds_it_without_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the entry point; nothing that takes time to load is loaded, and no file stays open."""
    registered, loaded, num_files = run(AFTER_IMPORT, "1", monkeypatch)
    assert (registered, loaded) == ("True", "[]")
    assert num_files == run(AFTER_IMPORT, "0", monkeypatch)[2]


def test_its_name_for_the_page_is_the_contracts() -> None:
    """The package does not load the contract to look for one variable."""
    assert popdist._PROGRESS_DESCRIPTOR == contract.PROGRESS_DESCRIPTOR
    assert popdist.__version__ == contract.VERSION


def test_init_registers_it_where_torch_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user may have switched torch's entry points off."""
    assert run(AFTER_INIT, "0", monkeypatch) == ["False", "True"]
    assert run(INIT_BEFORE_TORCH, "0", monkeypatch) == ["True"]


def test_any_launcher_starts_programs_that_name_it(
    mpi_environments: dict[str, MpiEnvironment], tmp_path: Path
) -> None:
    """poprun, torchrun and each mpiexec; the program imports torch alone."""
    program = [sys.executable, str(PLAIN), str(tmp_path / "store")]
    commands = [
        Poprun().command("-n", "2", "--launcher", "local", "--tag-output=no", *program),
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *program[1:]],
    ]
    for mpi in mpi_environments.values():
        options = ["--oversubscribe"] if mpi.name == "openmpi" else []
        store = str(tmp_path / mpi.name)
        commands.append([str(mpi.mpiexec), *options, "-n", "2", str(mpi.python), str(PLAIN), store])
    env = {"OMP_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    for command in commands:
        ended = run_command(command, env=env).succeeded()
        assert ended.lines == ["popdist popdist 6.0"] * 2


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
