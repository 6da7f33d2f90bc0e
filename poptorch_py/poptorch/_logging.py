"""The log of poptorch, in PopTorch's form: ``[HH:MM:SS.mmm] [poptorch::python] [debug] text`` on stderr."""

import logging
import sys
from typing import Final, TextIO

from poptorch.environment import setting

TRACE: Final = 5
OFF: Final = 100

_LEVELS: Final = {
    "TRACE": TRACE,
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARN": logging.WARNING,
    "ERR": logging.ERROR,
    "OFF": OFF,
}
_NUMBERED: Final = ("TRACE", "DEBUG", "INFO", "WARN", "ERR")
_WORDS: Final = {number: word.lower() for word, number in _LEVELS.items()} | {
    logging.WARNING: "warning",
    logging.ERROR: "error",
    logging.CRITICAL: "critical",
}
_POPART_LEVELS: Final = ("TRACE", "DEBUG", "INFO", "WARN", "ERR", "CRITICAL", "OFF")


class _LineFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        moment = self.formatTime(record, "%H:%M:%S")
        word = _WORDS.get(record.levelno, record.levelname.lower())
        return f"[{moment}.{int(record.msecs):03}] [{record.name}] [{word}] {record.getMessage()}"


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to what ``sys.stderr`` is now, not to what it was when poptorch was imported."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(_LineFormatter())

    @property
    def stream(self) -> TextIO:  # type: ignore[override]  # logging keeps one stream, this one has none
        return sys.stderr


def _make_logger() -> logging.Logger:
    made = logging.getLogger("poptorch::python")
    if not made.handlers:
        made.addHandler(_StderrHandler())
    made.setLevel(_LEVELS.get(setting("LOG_LEVEL").upper(), logging.WARNING))
    return made


logger: Final = _make_logger()


def setLogLevel(level: str | int, update_cpp: bool = True) -> None:
    """Log from ``level`` on: one of TRACE, DEBUG, INFO, WARN and ERR, or its number from 0; or OFF."""
    del update_cpp  # there is one log
    if isinstance(level, int):
        if not 0 <= level < len(_NUMBERED):
            raise ValueError(f"Invalid log level integer {level}: 0 (TRACE) to 4 (ERR) are valid")
        level = _NUMBERED[level]
    if str(level).upper() not in _LEVELS:
        raise ValueError(f"Unknown log level: {level}. Valid values are {', '.join(sorted(_LEVELS))}")
    logger.setLevel(_LEVELS[level.upper()])


def setPopartLogLevel(level: str) -> None:
    """Check a level of PopART's log, without effect: there is no PopART here."""
    if str(level).upper() not in _POPART_LEVELS:
        raise ValueError(f"Level must be one of {', '.join(_POPART_LEVELS)}, and is {level!r}")
