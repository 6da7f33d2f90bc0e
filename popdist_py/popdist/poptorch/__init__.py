"""The import path ``popdist.poptorch`` of PopTorch's options for an instance; poptorch implements the options."""

from importlib import import_module
from typing import Any

from popdist.errors import InstallationError
from popdist.ground.installation import needs_torch
from popdist.startup import stub_finder

__all__ = ["Options"]

del needs_torch  # needs_torch raises an error if torch is missing, and has no other use

stub_finder.begin()

try:
    Options: Any = import_module("poptorch.options.job_options").JobOptions  # poptorch depends on popdist
except ModuleNotFoundError as error:
    if error.name != "poptorch":
        raise
    raise InstallationError("poptorch is not installed: pip install 'poprun[poptorch]'") from None
