"""The name under which programs find poptorch's options for an instance of a job; poptorch itself has them."""

from importlib import import_module
from typing import Any

__all__ = ["Options"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a class of the package above
    if name != "Options":
        raise AttributeError(f"module 'popdist.poptorch' has no attribute {name!r}: it has Options")
    return import_module("poptorch.options.job_options").JobOptions
