"""Output of poprun's own messages to standard output and standard error, for a terminal or for a log file.

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
"""For each letter that ASCII lacks, the ASCII letter that replaces it: one for one, so columns keep their width.
"""

_CODES: Final = r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\].*?(?:\x07|\x1b\\)|\x1b.|[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]"
_LONGEST: Final = 1800  # largest number of characters of a line or an error, without the time stamp of a log
_BYTES_BELOW: Final = 0xDC00
_FIRST_BYTE, _LAST_BYTE = 0xDC80, 0xDCFF


def write_any_letter() -> None:
    """Let no later print fail on a letter that standard output or error cannot encode: print a replacement."""
    codecs.register_error(_READABLE, _in_other_letters)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=_READABLE)


def _in_other_letters(error: UnicodeError) -> tuple[str | bytes, int]:
    """Return the replacement for a letter that cannot be encoded, and the next position in the text."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letter, end = error.object[error.start], error.start + 1
    if _FIRST_BYTE <= ord(letter) <= _LAST_BYTE:
        return bytes((ord(letter) - _BYTES_BELOW,)), end
    return _ASCII.get(letter) or letter.encode("ascii", "backslashreplace"), end


def exit_code_of(run: Callable[[], int], report: Callable[[str], object]) -> int:
    """Return the exit code of ``run()``; if it raises, call ``report(message)`` and return the error's code."""
    try:
        return run()
    except BrokenPipeError:
        abandon_stdout()
        return BROKEN_PIPE
    except PoprunError as error:
        failure = error
    except (OSError, MemoryError) as error:
        abandon_stdout()
        failure = error_of_system(error)
    except SystemError:  # Python raises this if an import finds no memory
        failure = error_of_system(MemoryError())
    except ImportError as error:
        if _NO_ROOM not in str(error):
            raise
        failure = error_of_system(MemoryError())
    report(str(failure) if isinstance(failure, HostsError) else shortened(str(failure)))
    return failure.exit_code


def run_click(command: "click.Command", name: str) -> int:
    """Run the click command ``command`` with the arguments of this process, and return its exit code."""
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
    """Redirect standard output to /dev/null, so that Python does not fail when it flushes at its exit."""
    with suppress(OSError, ValueError, AttributeError):  # standard output may be closed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def has_color() -> bool:
    """Whether to use colours on standard output: it is a terminal, and NO_COLOR is not set."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def width() -> int:
    """Return the width of the terminal in columns: the variable ``COLUMNS`` if set; 80 if it is unknown."""
    import shutil

    return shutil.get_terminal_size().columns


def visible(text: str, *, keeps: str = "") -> str:
    r"""Return ``text`` with control characters escaped, such as ``\x1b``, except the characters in ``keeps``."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() or letter in keeps else letter.encode("unicode_escape").decode()
        for letter in text
    )


def without_codes(text: str) -> str:
    """Return ``text`` without the terminal's codes for colours and cursor, and without control characters."""
    return re.sub(_CODES, "", text)


def shortened(text: str) -> str:
    """Return ``text``; if it is longer than 1800 letters, replace its middle by ``…``."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST * 2 // 3]} … {text[-_LONGEST // 4 :]}"


def _shown(text: str) -> str:
    """Return ``text`` for a terminal: long lines cut, control characters escaped, except tabs and line breaks."""
    return "\n".join(map(shortened, visible(text, keeps="\n\t").split("\n")))


class Level(StrEnum):
    """The importance of a line in poprun's log; the value is the letter that the log prints."""

    DEBUG = "D"
    INFO = "I"
    WARNING = "W"
    ERROR = "E"


_WORDS: Final = {"warning: ": Level.WARNING, "error: ": Level.ERROR}
"""The first words of a message that give its level; a log prints the letter of the level instead of these words.
"""


def own_line(text: str, level: Level = Level.INFO) -> str:
    """Return ``text`` as a line for standard error: after ``poprun:`` on a terminal, else in the log's format."""
    text = _shown(text)
    if sys.stderr.isatty():
        return f"poprun: {text}\n"
    return logged(text, level, time.time(), os.getpid())


def logged(text: str, level: Level, now_seconds: float, pid: int) -> str:
    """Return ``text`` in the log's format: after the time, the process id and the letter of ``level``."""
    for word, its_level in _WORDS.items():
        if text.startswith(word):
            text, level = text.removeprefix(word), its_level
    clock = time.strftime("%H:%M:%S", time.localtime(now_seconds))
    return f"{clock}.{int(now_seconds % 1 * 1000):03} {pid} POPRUN [{level}] {text}\n"


def log(text: str, level: Level = Level.INFO) -> None:
    """Write ``text`` as a message of poprun to standard error; ignore errors, such as a closed stream."""
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
    """The kind of job that poprun can write for a cluster: MPIJob or JobSet (Kubernetes), or a Slurm script."""

    MPIJOB = "mpijob"
    JOBSET = "jobset"
    SBATCH = "sbatch"


class ReportFormat(StrEnum):
    """The format in which ``poprun --doctor`` prints the problems that it found."""

    TABLE = "table"
    JSON = "json"


class VersionFormat(StrEnum):
    """The format of ``poprun --version``: only poprun's version, or also all dependencies, as text or JSON."""

    TEXT = "text"
    FULL_TEXT = "full-text"
    FULL_JSON = "full-json"
