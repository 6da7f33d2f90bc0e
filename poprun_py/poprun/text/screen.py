"""What poprun says on the two output streams of its caller, for a person at a terminal or as PopRun logs.

poprun: warning: 4 instances share 2 cores           on a terminal
    09:30:12.345 4711 POPRUN [W] 4 instances share …     anywhere else

Only :func:`own_line` looks at the clock and at the stream.
"""

import codecs
import os
import sys
import time
from contextlib import suppress
from enum import StrEnum
from io import TextIOWrapper
from typing import Final

from poprun.errors import OutputError

_READABLE: Final = "poprun-readable"
_ASCII: Final = {
    **dict.fromkeys("─━", "-"),
    **dict.fromkeys("│·", "|"),
    **dict.fromkeys("├└╭╮╰╯", "+"),
    **dict.fromkeys("█▉▊▋▌▍▎▏", "#"),
    "…": "~",
    "→": ">",
}
"""One letter for one, so that columns stay columns."""

_BYTES_BELOW: Final = 0xDC00
_FIRST_BYTE, _LAST_BYTE = 0xDC80, 0xDCFF


def write_any_letter() -> None:
    """Have both streams write what their encoding lacks in letters that it has.

    Rules of tables become ASCII, bytes of names that were no text are written as they were (PEP 383), and other
    letters stand as their numbers, as in Python's own text.
    """
    codecs.register_error(_READABLE, _in_other_letters)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=_READABLE)


def _in_other_letters(error: UnicodeError) -> tuple[str | bytes, int]:
    """What to write for letters that cannot be encoded, and where to go on (`codecs.register_error`)."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letter, end = error.object[error.start], error.start + 1
    if _FIRST_BYTE <= ord(letter) <= _LAST_BYTE:
        return bytes((ord(letter) - _BYTES_BELOW,)), end
    return _ASCII.get(letter) or letter.encode("ascii", "backslashreplace"), end


def print_out(text: str) -> None:
    """Write ``text`` to standard output, at once.

    Raises:
        OutputError: If it cannot be written, because the disk is full for example.
        BrokenPipeError: If nobody reads it any more.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        abandon_stdout()
        raise OutputError(f"standard output cannot be written: {error.strerror}") from None


def abandon_stdout() -> None:
    """Send what is still unwritten nowhere, so that the interpreter does not try again when it ends."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def has_color() -> bool:
    """Whether to colour standard output; NO_COLOR is what https://no-color.org asks programs to heed."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def width() -> int:
    """Columns of the terminal, or as ``COLUMNS`` says; 80 when nothing does."""
    import shutil  # noqa: PLC0415 - a job that prints no plan does without it

    return shutil.get_terminal_size().columns


def visible(text: str, *, keeps: str = "") -> str:
    r"""``text`` with what a terminal would obey or hide made visible: an escape becomes ``\x1b``.

    Text that another user or a program wrote goes through this before it is shown. What is in ``keeps`` stays.
    """
    return "".join(
        letter if letter.isprintable() or letter in keeps else letter.encode("unicode_escape").decode()
        for letter in text
    )


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

    Words of other users, hosts and programs may stand in it, so control characters are made visible.

    Args:
        text: One line or several; what begins with ``warning:`` or ``error:`` has that level.
        level: That of any other text.
    """
    text = visible(text, keeps="\n\t")
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


def log(text: str, level: Level = Level.INFO) -> None:
    """Write a line about what poprun does to standard error; an error of writing is ignored."""
    with suppress(OSError):
        sys.stderr.write(own_line(text, level))
        sys.stderr.flush()


class TopologyFormat(StrEnum):
    """How a plan is written: for a person, as PopRun writes it, for a program, or as a picture."""

    TABLE = "table"
    TEXT = "text"
    JSON = "json"
    YAML = "yaml"
    SVG = "svg"
    HTML = "html"
    MERMAID = "mermaid"


class EmitKind(StrEnum):
    """The engines of clusters for which a plan can be written."""

    MPIJOB = "mpijob"
    JOBSET = "jobset"
    SBATCH = "sbatch"


class ReportFormat(StrEnum):
    """How the findings of ``--doctor`` are written: for a person, or for a program."""

    TABLE = "table"
    JSON = "json"


class VersionFormat(StrEnum):
    """How much ``--version`` prints, and for whom."""

    TEXT = "text"
    FULL_TEXT = "full-text"
    FULL_JSON = "full-json"
