"""The name under which programs find poptorch's options for an instance of a job; poptorch itself has them."""

from importlib import import_module
from typing import Any

from popdist.errors import InstallationError
from popdist.ground.installation import needs_torch
from popdist.startup import stub_finder

__all__ = ["Options"]

del needs_torch  # which raises without torch, and has no other use

stub_finder.begin()

try:
    Options: Any = import_module("poptorch.options.job_options").JobOptions  # of a package above
except ModuleNotFoundError as error:
    if error.name != "poptorch":
        raise
    raise InstallationError("poptorch is not installed: pip install 'poprun[poptorch]'") from None
