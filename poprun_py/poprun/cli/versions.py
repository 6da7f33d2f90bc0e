"""What ``--version`` prints: poprun's own version, or that of everything a job depends on."""

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from popdist.contract import VERSION
from poprun.probe.machine import machine_facts
from poprun.text.screen import VersionFormat

DEPENDENCIES: Final = ("click", "mpi4py", "numpy", "psutil", "pyyaml", "rich", "torch")
"""What pyproject.toml names."""


def version_text(version_format: VersionFormat) -> str:
    """The versions, each on a line; the full formats name every dependency, and those that are missing."""
    if version_format is VersionFormat.TEXT:
        return f"poprun {VERSION}\n"
    versions = _versions()
    if version_format is VersionFormat.FULL_JSON:
        return json.dumps(versions, indent=2) + "\n"
    width = max(map(len, versions))
    return "".join(f"{name:<{width}}  {found or 'not found'}\n" for name, found in versions.items())


def _versions() -> dict[str, str | None]:
    mpi = machine_facts(os.environ, with_mpi=True).mpi
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
