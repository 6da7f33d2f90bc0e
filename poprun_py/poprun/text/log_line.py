"""How poprun words what it says on its standard error: for a person at a terminal, or as PopRun logs.

    poprun: warning: 4 instances share 2 cores           on a terminal
    09:30:12.345 4711 POPRUN [W] 4 instances share …     anywhere else

Only :func:`own_line` looks at the clock and at the stream.
"""

import os
import sys
import time
from enum import StrEnum
from typing import Final


class Level(StrEnum):
    """PopRun's letters for how much a line matters."""

    DEBUG = "D"
    INFO = "I"
    WARNING = "W"
    ERROR = "E"


_WORDS: Final = {"warning: ": Level.WARNING, "error: ": Level.ERROR}
"""Beginnings of texts that say what they are; the letter takes their place."""


def own_line(text: str, level: Level = Level.INFO) -> str:
    """``text`` as a line of poprun's own for its standard error, with its line break.

    Args:
        text: One line or several; what begins with ``warning:`` or ``error:`` has that level.
        level: That of any other text.
    """
    if sys.stderr.isatty():
        return f"poprun: {text}\n"
    return logged(text, level, time.time(), os.getpid())


def logged(text: str, level: Level, now_seconds: float, pid: int) -> str:
    """``text`` as PopRun logs it: local time to the millisecond, process, letter; further lines are left alone."""
    for word, its_level in _WORDS.items():
        if text.startswith(word):
            text, level = text.removeprefix(word), its_level
    clock = time.strftime("%H:%M:%S", time.localtime(now_seconds))
    return f"{clock}.{int(now_seconds % 1 * 1000):03} {pid} POPRUN [{level}] {text}\n"
