"""What poprun says on the two output streams of its caller, for a person at a terminal or as PopRun logs.

A line is ``poprun: warning: 4 instances share 2 cores`` on a terminal, and anywhere else
``09:30:12.345 4711 POPRUN [W] 4 instances share 2 cores``.
"""

import codecs
import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from io import TextIOWrapper
from typing import TYPE_CHECKING, Final

from poprun.errors import HostsError, OutputError, PoprunError, error_of_system

if TYPE_CHECKING:
    import click

BROKEN_PIPE: Final = 141  # exit code when nobody reads the output any more: that of SIGPIPE in a shell
_INTERRUPTED: Final = 130
_NO_ROOM: Final = "failed to map segment"  # what the linker says of a library for which there is no address space
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

_CODES: Final = r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\].*?(?:\x07|\x1b\\)|\x1b.|[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]"
_LONGEST: Final = 1800  # characters of a line, or of an error; a line of a log has a stamp before it
_BYTES_BELOW: Final = 0xDC00
_FIRST_BYTE, _LAST_BYTE = 0xDC80, 0xDCFF


def write_any_letter() -> None:
    """Make both streams replace letters that their encoding lacks, so that printing never fails."""
    codecs.register_error(_READABLE, _in_other_letters)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=_READABLE)


def _in_other_letters(error: UnicodeError) -> tuple[str | bytes, int]:
    """The replacement for a letter that cannot be encoded, and the position after it (`codecs.register_error`)."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letter, end = error.object[error.start], error.start + 1
    if _FIRST_BYTE <= ord(letter) <= _LAST_BYTE:
        return bytes((ord(letter) - _BYTES_BELOW,)), end
    return _ASCII.get(letter) or letter.encode("ascii", "backslashreplace"), end


def exit_code_of(run: Callable[[], int], report: Callable[[str], object]) -> int:
    """The exit code of the command ``run``; an error has its own, and ``report`` gets its message."""
    try:
        return run()
    except BrokenPipeError:
        abandon_stdout()
        return BROKEN_PIPE
    except PoprunError as error:
        found = error
    except (OSError, MemoryError) as error:
        abandon_stdout()
        found = error_of_system(error)
    except SystemError:  # Python's own, where an import finds no memory
        found = error_of_system(MemoryError())
    except ImportError as error:
        if _NO_ROOM not in str(error):
            raise
        found = error_of_system(MemoryError())
    report(str(found) if isinstance(found, HostsError) else shortened(str(found)))
    return found.exit_code


def run_click(command: "click.Command", name: str) -> int:
    """Run a program that is a command of click's, with the words of this process; returns its exit code."""
    import click

    def report(message: str) -> None:
        click.echo(f"{name}: error: {_shown(message)}", err=True)

    def run() -> int:
        try:
            return command.main(prog_name=name, standalone_mode=False) or 0
        except click.exceptions.NoArgsIsHelpError as error:
            click.echo(error.format_message(), err=True)
            return error.exit_code
        except click.ClickException as error:
            report(error.format_message())
            return error.exit_code
        except (click.Abort, KeyboardInterrupt):
            return _INTERRUPTED
        except SystemExit:
            if sys.stdout is stdout:
                raise
            raise BrokenPipeError from None  # click wraps both streams and exits with 1 when nobody reads

    write_any_letter()
    stdout = sys.stdout
    return exit_code_of(run, report)


def print_out(text: str) -> None:
    """Write ``text`` to standard output and flush it; a full disk is an :class:`OutputError`."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        abandon_stdout()
        raise OutputError(f"standard output cannot be written: {error.strerror}") from None
    except AttributeError:
        raise OutputError("standard output is closed") from None


def abandon_stdout() -> None:
    """Redirect standard output to /dev/null, so that the interpreter does not fail to flush it at its end."""
    with suppress(OSError, ValueError, AttributeError):  # there may be no standard output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def has_color() -> bool:
    """Whether to colour standard output; NO_COLOR is what https://no-color.org asks programs to heed."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def width() -> int:
    """The width of the terminal in columns, or ``COLUMNS`` if that is set; 80 if neither is known."""
    import shutil

    return shutil.get_terminal_size().columns


def visible(text: str, *, keeps: str = "") -> str:
    r"""``text`` with control characters escaped for the screen, as ``\x1b`` is; those in ``keeps`` stay."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() or letter in keeps else letter.encode("unicode_escape").decode()
        for letter in text
    )


def without_codes(text: str) -> str:
    """``text`` without what colours a terminal or moves its cursor: no control character but tabs is left."""
    return re.sub(_CODES, "", text)


def shortened(text: str) -> str:
    """``text`` without its middle if it is too long: what was asked stands first, and what to do last."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST * 2 // 3]} … {text[-_LONGEST // 4 :]}"


def _shown(text: str) -> str:
    """``text`` with control characters escaped, but line breaks and tabs, and with no line that is too long."""
    return "\n".join(map(shortened, visible(text, keeps="\n\t").split("\n")))


class Level(StrEnum):
    """PopRun's letters for how much a line matters."""

    DEBUG = "D"
    INFO = "I"
    WARNING = "W"
    ERROR = "E"


_WORDS: Final = {"warning: ": Level.WARNING, "error: ": Level.ERROR}
"""Beginnings of texts that say what they are; the letter takes their place."""


def own_line(text: str, level: Level = Level.INFO) -> str:
    """``text`` as a log line of poprun's; one that begins with ``warning:`` or ``error:`` has that level."""
    text = _shown(text)
    if sys.stderr.isatty():
        return f"poprun: {text}\n"
    return logged(text, level, time.time(), os.getpid())


def logged(text: str, level: Level, now_seconds: float, pid: int) -> str:
    """``text`` in PopRun's log format: local time, process id and level; further lines are not prefixed."""
    for word, its_level in _WORDS.items():
        if text.startswith(word):
            text, level = text.removeprefix(word), its_level
    clock = time.strftime("%H:%M:%S", time.localtime(now_seconds))
    return f"{clock}.{int(now_seconds % 1 * 1000):03} {pid} POPRUN [{level}] {text}\n"


def log(text: str, level: Level = Level.INFO) -> None:
    """Write a log line of poprun's to standard error; an error of writing is ignored."""
    with suppress(OSError, AttributeError):  # there may be no standard error
        sys.stderr.write(own_line(text, level))
        sys.stderr.flush()


class TopologyFormat(StrEnum):
    """The form of a printed plan: for people, as PopRun prints it, for programs, or a picture."""

    TABLE = "table"
    TEXT = "text"
    JSON = "json"
    YAML = "yaml"
    SVG = "svg"
    HTML = "html"
    MERMAID = "mermaid"


class EmitKind(StrEnum):
    """The cluster engines for which poprun can write a job."""

    MPIJOB = "mpijob"
    JOBSET = "jobset"
    SBATCH = "sbatch"


class ReportFormat(StrEnum):
    """The form of the findings of ``--doctor``."""

    TABLE = "table"
    JSON = "json"


class VersionFormat(StrEnum):
    """The form of ``--version``: poprun's own, or of every dependency, for people or programs."""

    TEXT = "text"
    FULL_TEXT = "full-text"
    FULL_JSON = "full-json"
