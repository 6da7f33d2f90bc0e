"""Output of poprun's own messages on standard output and standard error, for a terminal or as PopRun's log.

On a terminal a line is ``poprun: warning: 4 instances share 2 cores``; in a file or a pipe it is ``09:30:12.345
4711 POPRUN [W] 4 instances share 2 cores``.
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

BROKEN_PIPE: Final = 141  # exit code if the reader of the output has closed the pipe; a shell's code for SIGPIPE
_INTERRUPTED: Final = 130
_NO_ROOM: Final = "failed to map segment"  # the linker's message if a library finds no address space
_READABLE: Final = "poprun-readable"
_ASCII: Final = {
    **dict.fromkeys("─━", "-"),
    **dict.fromkeys("│·", "|"),
    **dict.fromkeys("├└╭╮╰╯", "+"),
    **dict.fromkeys("█▉▊▋▌▍▎▏", "#"),
    "…": "~",
    "→": ">",
}
"""ASCII replacements for letters, one letter for one letter, so that columns keep their width."""

_CODES: Final = r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\].*?(?:\x07|\x1b\\)|\x1b.|[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]"
_LONGEST: Final = 1800  # largest number of characters of a line or an error, without the time stamp of a log
_BYTES_BELOW: Final = 0xDC00
_FIRST_BYTE, _LAST_BYTE = 0xDC80, 0xDCFF


def write_any_letter() -> None:
    """Make standard output and standard error replace letters that the encoding lacks, so that no print fails."""
    codecs.register_error(_READABLE, _in_other_letters)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=_READABLE)


def _in_other_letters(error: UnicodeError) -> tuple[str | bytes, int]:
    """Return a replacement for a letter without encoding, and the next position (`codecs.register_error`)."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letter, end = error.object[error.start], error.start + 1
    if _FIRST_BYTE <= ord(letter) <= _LAST_BYTE:
        return bytes((ord(letter) - _BYTES_BELOW,)), end
    return _ASCII.get(letter) or letter.encode("ascii", "backslashreplace"), end


def exit_code_of(run: Callable[[], int], report: Callable[[str], object]) -> int:
    """Call ``run`` and return its exit code; after an error, call ``report`` and return the error's exit code."""
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
    except SystemError:  # Python raises this if an import finds no memory
        found = error_of_system(MemoryError())
    except ImportError as error:
        if _NO_ROOM not in str(error):
            raise
        found = error_of_system(MemoryError())
    report(str(found) if isinstance(found, HostsError) else shortened(str(found)))
    return found.exit_code


def run_click(command: "click.Command", name: str) -> int:
    """Run ``command``, a command of click, with the arguments of this process; return the command's exit code."""
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
    """Write ``text`` to standard output and flush. Raises OutputError if this fails, as on a full disk."""
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
    with suppress(OSError, ValueError, AttributeError):  # standard output may be closed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def has_color() -> bool:
    """Whether to colour standard output: it is a terminal, and NO_COLOR (https://no-color.org) is not set."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def width() -> int:
    """Return the width of the terminal in columns: ``COLUMNS`` if it is set; 80 if the width is not known."""
    import shutil

    return shutil.get_terminal_size().columns


def visible(text: str, *, keeps: str = "") -> str:
    r"""Return ``text`` with control characters escaped, such as ``\x1b``; the characters in ``keeps`` stay."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() or letter in keeps else letter.encode("unicode_escape").decode()
        for letter in text
    )


def without_codes(text: str) -> str:
    """Return ``text`` without colour codes, cursor codes and control characters; only tabs stay."""
    return re.sub(_CODES, "", text)


def shortened(text: str) -> str:
    """Return ``text``, without its middle if it is too long, because the beginning and the end matter most."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST * 2 // 3]} … {text[-_LONGEST // 4 :]}"


def _shown(text: str) -> str:
    """Return ``text`` with long lines shortened and control characters escaped, except line breaks and tabs."""
    return "\n".join(map(shortened, visible(text, keeps="\n\t").split("\n")))


class Level(StrEnum):
    """PopRun's letters for the importance of a log line."""

    DEBUG = "D"
    INFO = "I"
    WARNING = "W"
    ERROR = "E"


_WORDS: Final = {"warning: ": Level.WARNING, "error: ": Level.ERROR}
"""Beginnings of messages that tell the level; in a log the level's letter replaces the beginning."""


def own_line(text: str, level: Level = Level.INFO) -> str:
    """Return ``text`` as a log line; a text that begins with ``warning:`` or ``error:`` has this level."""
    text = _shown(text)
    if sys.stderr.isatty():
        return f"poprun: {text}\n"
    return logged(text, level, time.time(), os.getpid())


def logged(text: str, level: Level, now_seconds: float, pid: int) -> str:
    """Return ``text`` in PopRun's log format, with time, process id and level before the first line only."""
    for word, its_level in _WORDS.items():
        if text.startswith(word):
            text, level = text.removeprefix(word), its_level
    clock = time.strftime("%H:%M:%S", time.localtime(now_seconds))
    return f"{clock}.{int(now_seconds % 1 * 1000):03} {pid} POPRUN [{level}] {text}\n"


def log(text: str, level: Level = Level.INFO) -> None:
    """Write a log line of poprun to standard error; an error of writing is ignored."""
    with suppress(OSError, AttributeError):  # standard error may be closed
        sys.stderr.write(own_line(text, level))
        sys.stderr.flush()


class TopologyFormat(StrEnum):
    """The format of a printed plan: a table for people, PopRun's text, data for programs, or a picture."""

    TABLE = "table"
    TEXT = "text"
    JSON = "json"
    YAML = "yaml"
    SVG = "svg"
    HTML = "html"
    MERMAID = "mermaid"


class EmitKind(StrEnum):
    """The kind of cluster job that poprun can write: for Kubernetes or for Slurm."""

    MPIJOB = "mpijob"
    JOBSET = "jobset"
    SBATCH = "sbatch"


class ReportFormat(StrEnum):
    """The format in which ``--doctor`` prints its findings."""

    TABLE = "table"
    JSON = "json"


class VersionFormat(StrEnum):
    """The format of ``--version``: only poprun's version, or all dependencies' versions as text or JSON."""

    TEXT = "text"
    FULL_TEXT = "full-text"
    FULL_JSON = "full-json"
