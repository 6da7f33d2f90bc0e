"""The names of PopTorch's compiled part that programs use: the check of options, and errors for tests."""

from enum import Enum
from typing import Any

import torch

from poptorch._logging import logger
from poptorch.errors import Error as Error
from poptorch.errors import RecoverableError as RecoverableError
from poptorch.errors import UnrecoverableError as UnrecoverableError


def _validateOptions(options: dict[str, Any]) -> None:
    """Log each option; raise an Error if the value of an option is of a type that no option has."""
    log_options(options)
    for name, value in options.items():
        if value is not None and not isinstance(value, bool | int | float | str | list | dict | torch.dtype):
            raise Error(f"Unknown value type {type(value).__name__} for option {name}")


def log_options(options: dict[str, Any]) -> None:
    """Log the value of each option."""
    for name, value in options.items():
        for line in _lines(name, value):
            logger.debug("poptorch.Options %s", line)


def _lines(name: str, value: Any) -> list[str]:
    """Return the lines of the log that say what the option ``name`` is set to; none for None."""
    if isinstance(value, list):
        return [f"added {_text(part)} to {name}" for part in value]
    if isinstance(value, dict):
        return [f"set {name}[{key}] to {_text(part)}" for key, part in value.items()]
    return [] if value is None else [f"set {name} to value {_text(value)}"]


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def isCompilingWithDispatcher() -> bool:
    """False: nothing is compiled."""
    return False


class TestErrorType(Enum):
    """Failures of a device that `_throwTestError` raises; none of them happens here."""

    PoplarUnrecoverable = 0
    PoplarRecoverableFullReset = 1
    PoplarLinkError = 2


def _throwTestError(kind: TestErrorType) -> None:
    """Raise what a failing device would raise, for tests of a program's own handling."""
    location = "in throwTestError::bottomLevel\nin throwTestError::topLevel"
    if kind is TestErrorType.PoplarRecoverableFullReset:
        raise RecoverableError(
            "a test asked for an error that a full reset mends",
            location,
            "poplar_recoverable_runtime_error",
            recovery_action="FULL_RESET",
        )
    if kind is TestErrorType.PoplarUnrecoverable:
        raise UnrecoverableError(
            "a test asked for an error of broken hardware", location, "poplar_unrecoverable_runtime_error"
        )
    raise Error("a test asked for an error of the linker", location, "poplar_link_error")
