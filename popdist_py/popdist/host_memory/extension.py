"""popdist's extension in C, which a build makes where there is a compiler; Python does the same without it."""

from importlib import import_module
from types import ModuleType


def extension() -> ModuleType | None:
    """The module; None where it was not built, for want of a compiler or for another interpreter."""
    try:
        return import_module("popdist.host_memory._quick")
    except ImportError:
        return None
