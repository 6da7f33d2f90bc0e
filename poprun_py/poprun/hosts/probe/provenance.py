"""The versions of the packages that a job's program uses, and the revision of its folder, as far as known."""

import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from poprun.launch.process.spawn import answer_of

_PACKAGES: Final = ("torch", "numpy", "mpi4py")
_GIT_SECONDS: Final = 2.0


def provenance(program: Sequence[str], working_directory: str) -> dict[str, str]:
    """Return the known versions of Python and packages that ``program`` uses, and its folder's git revision."""
    versions: dict[str, str | None] = {}
    if program and os.path.dirname(program[0]) == os.path.dirname(sys.executable):
        versions = {"python": platform.python_version(), **{it: version_of(it) for it in _PACKAGES}}
    git = ("git", "-C", working_directory, "describe", "--always", "--dirty", "--abbrev=12")
    answer = answer_of(git, _GIT_SECONDS) or ""
    versions["revision"] = answer.strip() if len(answer.splitlines()) == 1 else ""
    return {name: value for name, value in versions.items() if value}


def version_of(package: str) -> str | None:
    """Return the version of the installed ``package``; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
