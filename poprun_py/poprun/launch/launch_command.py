"""What every launcher produces, and the shim that all of them start."""

import os
import sys
from collections.abc import Mapping
from typing import Final, NamedTuple

_PACKAGE: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

SHIM_WORDS: Final = (sys.executable, "-I", "-S", os.path.join(_PACKAGE, "launch", "shim.py"))
"""The shim in a bare interpreter: no site packages, no user's sitecustomize, a few milliseconds."""


class LaunchCommand(NamedTuple):
    """One process that poprun starts.

    Attributes:
        words: Its argv.
        environment: What is added to its environment; it tells the shims where their rank is told.
        death_signal: What it is sent when poprun dies.
    """

    words: tuple[str, ...]
    environment: Mapping[str, str]
    death_signal: int
