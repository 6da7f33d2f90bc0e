"""popdist's extension in C, which a build makes where there is a compiler; Python does the same without it."""

from array import array
from collections.abc import Iterable
from importlib import import_module
from types import ModuleType


def extension() -> ModuleType | None:
    """The module; None where it was not built, for want of a compiler or for another interpreter."""
    try:
        return import_module("popdist.host_memory._quick")
    except ImportError:
        return None


def as_numbers(numbers: Iterable[int]) -> bytes:
    """Numbers from 0 to 2**64 - 1, such as addresses, as the extension reads them."""
    return array("Q", numbers).tobytes()
