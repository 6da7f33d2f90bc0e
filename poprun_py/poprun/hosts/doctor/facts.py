"""The facts about the machine for `poprun --doctor`, and the versions for ``--version``. Changes nothing."""

import json
import os
import platform
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from popdist.ground.contract import VERSION
from poprun.hosts.probe.machine import machine_facts
from poprun.hosts.probe.provenance import version_of
from poprun.launch.process.limits import cpu_quota, find_loopback_problem, find_tmpdir_problem
from poprun.launch.process.machine_evidence import MemoryLimits, memory_limits
from poprun.launch.process.spawn import answer_of
from poprun.makers.maker import TORCH_BUILDS
from poprun.plan.program_environment import HASH_SEED
from poprun.plan.topology import MachineFacts
from poprun.text.screen import VersionFormat

TORCH_TIMEOUT_SECONDS: Final = 120.0  # the first import of torch may read a gigabyte from a slow disk
_TIMEOUT_SECONDS: Final = 10.0

DEPENDENCIES: Final = ("click", "mpi4py", "numpy", "psutil", "pyyaml", "rich", "torch")
"""The packages that pyproject.toml requires for poprun itself, for torch and for MPI."""

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
"""A program that prints :class:`Libraries` as JSON; another Python runs it because poprun never imports torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Libraries:
    """The versions, features and problems of the libraries that a program's Python can import, such as torch."""

    # versions of torch, mpi4py and popdist; a library that cannot be imported is left out
    versions: Mapping[str, str] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)  # why an installed library cannot be imported
    torch_trouble: str = ""  # why popdist cannot train with torch, with a remedy; empty if popdist can
    torch_folders: Sequence[str] = ()  # all folders with a torch; programs import the first
    # versions of the runtimes for which torch was built, by attribute of ``torch.version``; empty if not built
    builds: Mapping[str, str] = field(default_factory=dict)
    num_devices: int = 0  # devices that torch sees
    has_gloo: bool = False  # whether torch has gloo
    has_extension: bool = False  # whether popdist has its extension in C


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallationFacts:
    """The facts about the machine and about the software that is installed on it."""

    python: str  # version of the Python that runs poprun
    interpreter: str  # the path of this Python
    libraries: Libraries  # the libraries that this Python can import
    machine: MachineFacts  # the machine as the planner sees it
    cpu_quota: float | None  # number of cores whose time the control groups allow; None for no limit
    memory: MemoryLimits  # limits on memory, and the free memory in /dev/shm
    can_share_memory: bool  # whether /dev/shm can be written
    ssh: str  # the version that the ssh client prints; empty if there is no client
    slurm: str  # the version that srun prints; empty if there is no srun
    slurm_job: str  # number of the Slurm job of this process; empty outside of a Slurm job
    hash_seed: str = ""  # the user's PYTHONHASHSEED, which decides the order of sets; empty if it is not set
    # why processes cannot reach each other at the loopback address; empty if there is no problem
    loopback_problem: str = ""
    tmpdir_problem: str = ""  # why libraries cannot open sockets below TMPDIR; empty if there is no problem


def examine(environment: Mapping[str, str]) -> InstallationFacts:
    """Return the facts about this machine and its software; takes seconds, because a child imports torch."""
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
    """Return the libraries in the last line of a Python's ``answer``; if there is no list, return a problem."""
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
    """Return the text of `--version`: poprun's version and, in a full format, the versions of dependencies."""
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
        **{name: version_of(name) for name in DEPENDENCIES},
        "mpi": str(mpi) if mpi else None,
    }
