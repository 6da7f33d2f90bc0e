"""The name under which programs find poptorch's options for an instance of a job; poptorch itself has them."""

from importlib import import_module
from typing import Any

from popdist.errors import InstallationError
from popdist.installation import needs_torch as needs_torch

__all__ = ["Options"]

try:
    Options: Any = import_module("poptorch.options.job_options").JobOptions  # of a package above
except ModuleNotFoundError as error:
    if error.name != "poptorch":
        raise
    raise InstallationError("poptorch is not installed: pip install 'poprun[poptorch]'") from None
