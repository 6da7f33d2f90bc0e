"""poprun's own words on the two output streams of its caller."""

import os
import sys
from io import TextIOWrapper

from poprun.errors import UsageError
from poprun.text.log_line import own_line


def show(text: str) -> None:
    """Write ``text`` to standard output, at once; what its encoding lacks becomes a question mark.

    Raises:
        UsageError: If it cannot be written, because the disk is full for example.
        BrokenPipeError: If nobody reads it any more.
    """
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        abandon_stdout()
        raise UsageError(f"standard output cannot be written: {error.strerror}") from None


def tell(text: str) -> None:
    """Write a line about what poprun does to standard error."""
    sys.stderr.write(own_line(text))


def abandon_stdout() -> None:
    """Send what is still unwritten nowhere, so that the interpreter does not try again when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def has_color() -> bool:
    """Whether to colour standard output; NO_COLOR is what https://no-color.org asks programs to heed."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def width() -> int:
    """Columns of the terminal, or as ``COLUMNS`` says; 80 when nothing does."""
    import shutil  # noqa: PLC0415 - a job that prints no plan does without it

    return shutil.get_terminal_size().columns
