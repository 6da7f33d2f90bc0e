"""The facts that `poprun --doctor` judges, and the versions of ``--version``. Changes nothing."""

import json
import os
import platform
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from popdist.ground.contract import VERSION
from poprun.hosts.probe.machine import machine_facts
from poprun.launch.process.limits import (
    MemoryLimits,
    cpu_quota,
    find_loopback_problem,
    find_tmpdir_problem,
    memory_limits,
)
from poprun.launch.process.spawn import answer_of
from poprun.makers.maker import TORCH_BUILDS
from poprun.plan.program_environment import HASH_SEED
from poprun.plan.topology import MachineFacts
from poprun.text.screen import VersionFormat

TORCH_TIMEOUT_SECONDS: Final = 120.0  # the first import may have to fetch a gigabyte from a slow disk
_TIMEOUT_SECONDS: Final = 10.0

DEPENDENCIES: Final = ("click", "mpi4py", "numpy", "psutil", "pyyaml", "rich", "torch")
"""What pyproject.toml names for poprun itself, for torch and for MPI."""

_PROGRAM: Final = """
import importlib, importlib.util, json, os, sys
versions, problems = {}, {}
found = {"versions": versions, "problems": problems}
for name in ("torch", "mpi4py", "popdist"):
    try:
        if importlib.util.find_spec(name) is not None:
            versions[name] = getattr(importlib.import_module(name), "__version__", "")
    except Exception as error:
        problems[name] = f"{type(error).__name__}: {error}"
try:
    extension = importlib.import_module("popdist.ground.extension")
    found["has_extension"] = extension.find() is not None
except Exception:
    pass
if "torch" in versions:
    import torch
    files = (os.path.realpath(os.path.join(place, "torch", "__init__.py")) for place in sys.path)
    found["torch_folders"] = [*dict.fromkeys(os.path.dirname(file) for file in files if os.path.exists(file))]
    try:
        found["torch_trouble"] = importlib.import_module("popdist.ground.installation.torch_found").find_trouble()
    except Exception:
        pass
    found["builds"] = {name: getattr(torch.version, name, None) or "" for name in BUILDS}
    found["num_devices"] = torch.accelerator.device_count() if hasattr(torch, "accelerator") else 0
    found["has_gloo"] = torch.distributed.is_available() and torch.distributed.is_gloo_available()
print("\\n" + json.dumps(found))
"""
"""Prints :class:`Libraries` as JSON, in a Python of its own: poprun never imports torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Libraries:
    """The libraries that a program finds when it imports them."""

    # of torch, mpi4py and popdist, each only if it can be imported
    versions: Mapping[str, str] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)  # why one of them that is installed cannot
    torch_trouble: str = ""  # why popdist cannot train with torch, and what to do; empty if it can
    torch_folders: Sequence[str] = ()  # where torch lies, first the one that programs import
    # the version of each runtime that torch was built for, by its attribute of ``torch.version``; or empty
    builds: Mapping[str, str] = field(default_factory=dict)
    num_devices: int = 0  # devices that torch sees
    has_gloo: bool = False  # whether torch has gloo
    has_extension: bool = False  # whether popdist has its extension in C


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallationFacts:
    """The facts of the machine and of what is installed on it."""

    python: str  # version of the Python that runs poprun
    interpreter: str  # its path
    libraries: Libraries  # what that Python can import
    machine: MachineFacts  # the machine as the planner sees it
    cpu_quota: float | None  # how many cores' worth of time the control groups grant, or None
    memory: MemoryLimits  # limits on memory, and the room in /dev/shm
    can_share_memory: bool  # whether /dev/shm can be written
    ssh: str  # what the ssh client says of itself; empty when there is none
    slurm: str  # what srun says of itself; empty when there is none
    slurm_job: str  # number of the Slurm job that this process is in, or empty
    hash_seed: str = ""  # what the user gives Python for the order of sets; empty where nothing
    # why processes cannot reach each other at the loopback address; empty when they can
    loopback_problem: str = ""
    tmpdir_problem: str = ""  # why libraries cannot open sockets below TMPDIR; empty when they can


def examine(environment: Mapping[str, str]) -> InstallationFacts:
    """The facts of this machine; finding them takes as long as importing torch does."""
    program = _PROGRAM.replace("BUILDS", repr((*TORCH_BUILDS,)))
    return InstallationFacts(
        python=platform.python_version(),
        interpreter=sys.executable,
        libraries=read_libraries(answer_of((sys.executable, "-P", "-c", program), TORCH_TIMEOUT_SECONDS)),
        machine=machine_facts(environment),
        cpu_quota=cpu_quota(),
        memory=memory_limits(),
        can_share_memory=os.access("/dev/shm", os.W_OK | os.X_OK),
        ssh=_version_of("ssh", "-V"),
        slurm=_version_of("srun", "--version"),
        slurm_job=environment.get("SLURM_JOB_ID", ""),
        hash_seed=environment.get(HASH_SEED, ""),
        loopback_problem=find_loopback_problem(),
        tmpdir_problem=find_tmpdir_problem(environment.get("TMPDIR", "")),
    )


def read_libraries(answer: str | None) -> Libraries:
    """The libraries of which the last line of ``answer`` tells; None is a Python that failed or took too long."""
    try:
        return Libraries(**json.loads((answer or "").strip().rpartition("\n")[2]))
    except ValueError:
        problem = f"Python did not answer within {TORCH_TIMEOUT_SECONDS:g} s, or crashed when it imported torch"
        return Libraries(problems={"torch": problem})


def _version_of(program: str, option: str) -> str:
    path = shutil.which(program)
    answer = answer_of((path, option), _TIMEOUT_SECONDS) if path else None
    return (answer or "").strip().partition("\n")[0]


def version_text(version_format: VersionFormat, environment: Mapping[str, str]) -> str:
    """The versions, each on a line; the full formats name every dependency, and those that are missing."""
    if version_format is VersionFormat.TEXT:
        return f"poprun {VERSION}\n"
    versions = _versions(environment)
    if version_format is VersionFormat.FULL_JSON:
        return json.dumps(versions, indent=2) + "\n"
    width = max(map(len, versions))
    return "".join(f"{name:<{width}}  {found or 'not found'}\n" for name, found in versions.items())


def _versions(environment: Mapping[str, str]) -> dict[str, str | None]:
    mpi = machine_facts(environment, with_mpi=True).mpi
    return {
        "poprun": VERSION,
        "popdist": VERSION,
        "python": platform.python_version(),
        **{name: _installed(name) for name in DEPENDENCIES},
        "mpi": str(mpi) if mpi else None,
    }


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
