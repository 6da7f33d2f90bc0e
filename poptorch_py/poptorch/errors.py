"""What poptorch raises, and the check of the arguments of its operations."""

import reprlib
from collections.abc import Callable, Mapping
from operator import index
from typing import Final

from torch import Tensor, nn

_OWN: Final = "poptorch_error"


class Error(Exception):
    """A program asked for what poptorch cannot do, or gave a model something that does not fit it.

    Args:
        message: What was asked, what was found, what to do. These three are also attributes.
        location: Where it was found; empty where the traceback says so.
        type: What kind of error, in one word.
    """

    def __init__(self, message: str = "", location: str = "", type: str = _OWN) -> None:  # noqa: A002 - PopTorch's name
        super().__init__(f"{message}\n{location}" if location else message)
        self.message = message
        self.location = location
        self.type = type


class RecoverableError(Error):
    """The device failed, and works again after ``recovery_action``."""

    def __init__(
        self,
        message: str = "",
        location: str = "",
        type: str = _OWN,  # noqa: A002 - PopTorch's name
        recovery_action: str = "",
    ) -> None:
        super().__init__(message, location, type)
        self.recovery_action = recovery_action


class UnrecoverableError(Error):
    """The device failed, and must be repaired."""


class ConfigFileError(Error):
    """A line of a file of options is no call of a setter; the message names file and line."""


def is_whole(value: object) -> bool:
    """Whether ``value`` is a whole number, of Python's or numpy's; bools are none."""
    try:
        index(value)  # type: ignore[arg-type] # that is the question
    except TypeError:
        return False
    return not isinstance(value, bool | Tensor)


_ARE: Final[Mapping[str, Callable[[object], bool]]] = {
    "a tensor": lambda value: isinstance(value, Tensor),
    "a function": callable,
    "a whole number": is_whole,
    "a text": lambda value: isinstance(value, str),
    "a module": lambda value: isinstance(value, nn.Module),
}


def check_arguments(call: str, wanted: str, **given: object) -> None:
    """Refuse arguments of another kind."""
    for name, value in given.items():
        if not _ARE[wanted](value):
            raise Error(f"poptorch.{call}: {name} must be {wanted}, and is {reprlib.repr(value)}")
