"""What the instances of a test world leave for the process that waits for them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

JOB_FILE: Final = "job.pickle"
"""The call that every instance makes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a call.

    Attributes:
        value: What the function returned.
        failure: The traceback of what it raised, or None.
    """

    value: object = None
    failure: str | None = None


def outcome_path(directory: Path, instance: int) -> Path:
    """Where an instance's outcome is written, whole or not at all."""
    return directory / f"outcome-{instance}.pickle"
