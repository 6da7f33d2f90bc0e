"""The oldest version of each library with which replicas have the same bits for any number of instances."""

from types import ModuleType
from typing import Final

from packaging.version import Version

from popdist.errors import InstallationError

OLDEST: Final = {"accelerate": "1.10", "lightning": "2.5", "transformers": "5.0"}


def check_version(library: ModuleType) -> None:
    """Raise InstallationError if the module ``library`` has a version that is too old for popdist."""
    name, found = library.__name__, library.__version__
    if Version(found) < Version(OLDEST[name]):
        raise InstallationError(
            f"popdist needs {name} {OLDEST[name]} or newer to train replicas, and {name} {found} is installed: "
            f"pip install --upgrade {name}"
        )
