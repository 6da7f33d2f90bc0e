"""What ``--version`` prints: poprun's own version, or that of everything a job depends on."""

import os
from enum import StrEnum
from typing import Final

from popdist.contract import VERSION

DEPENDENCIES: Final = ("click", "mpi4py", "numpy", "psutil", "pyyaml", "rich", "torch")
"""What pyproject.toml names."""


class VersionFormat(StrEnum):
    """How much is printed, and for whom."""

    TEXT = "text"
    FULL_TEXT = "full-text"
    FULL_JSON = "full-json"


def version_text(version_format: VersionFormat) -> str:
    """The versions, as text that ends with a line break; those of a full format name what is missing, too."""
    if version_format is VersionFormat.TEXT:
        return f"poprun {VERSION}\n"
    import json  # noqa: PLC0415 - every command line names the formats, hardly one prints in them

    versions = _versions()
    if version_format is VersionFormat.FULL_JSON:
        return json.dumps(versions, indent=2) + "\n"
    width = max(map(len, versions))
    return "".join(f"{name:<{width}}  {found or 'not found'}\n" for name, found in versions.items())


def _versions() -> dict[str, str | None]:
    import platform  # noqa: PLC0415 - as above

    from poprun.probe.machine import machine_facts  # noqa: PLC0415 - as above

    mpi = machine_facts(os.environ, with_mpi=True).mpi
    return {
        "poprun": VERSION,
        "popdist": VERSION,
        "python": platform.python_version(),
        **{name: _installed(name) for name in DEPENDENCIES},
        "mpi": str(mpi) if mpi else None,
    }


def _installed(name: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415 - as above

    try:
        return version(name)
    except PackageNotFoundError:
        return None
