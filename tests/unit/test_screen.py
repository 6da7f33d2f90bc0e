"""What poprun says of itself, in PopRun's form."""

import errno
import re

import pytest

from poprun.errors import HostsError, PoprunError, UsageError
from poprun.text.screen import Level, exit_code_of, logged, own_line, visible, without_codes


@pytest.mark.parametrize(
    ("text", "level", "line"),
    [
        ("waiting", Level.INFO, "[I] waiting"),
        ("hello", Level.DEBUG, "[D] hello"),
        ("warning: 2 cores", Level.INFO, "[W] 2 cores"),
        ("error: no program", Level.INFO, "[E] no program"),
        ("a warning: this", Level.INFO, "[I] a warning: this"),
        ("instance 1 failed\n  | Traceback", Level.ERROR, "[E] instance 1 failed\n  | Traceback"),
    ],
)
def test_a_line_of_popruns(text: str, level: Level, line: str) -> None:
    """Time to the millisecond, process, POPRUN, level; a text that says its level itself says it once."""
    stamp, written = logged(text, level, 1_000_000_000.0625, 4711).split(" POPRUN ", 1)

    assert re.fullmatch(r"\d\d:\d6:40\.062 4711", stamp)
    assert written == f"{line}\n"


def test_a_terminal_shows_who_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """There a person reads, who does not need the process's number; anywhere else the stamp is there."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert own_line("warning: 2 cores") == "poprun: warning: 2 cores\n"

    monkeypatch.setattr("sys.stderr.isatty", lambda: False)
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} \d+ POPRUN \[W\] 2 cores\n", own_line("warning: 2 cores"))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("\x9b2J", "\\x9b2J"),
        ("a\rb\tc\0", "a\\rb\\tc\\x00"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("\udc9b", "\\udc9b"),
        ("Grüße, 世界 🙂 \\x1b", "Grüße, 世界 🙂 \\x1b"),
    ],
)
def test_what_a_terminal_would_obey_is_made_visible(text: str, shown: str) -> None:
    """Wherever words of other users, hosts or programs come to a terminal; line breaks and tabs stay in lines."""
    assert visible(text) == shown
    assert own_line(f"host n1: {text}\n").count("\n") == 2
    assert "\x1b" not in own_line(f"host n1: {text}")
    assert "\x9b" not in own_line(f"host n1: {text}")


def test_codes_of_terminals_can_be_left_out() -> None:
    """Colours, titles and single codes."""
    assert without_codes("\x1b]0;title\x07a\x1b[1;31mb\x1b[0m\x1b7\tc\x9b") == "ab\tc"


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UsageError("no such option"), 2, "no such option"),
        (OSError(errno.ENOSPC, "No space left on device"), 73, "standard output cannot be written: No space"),
        (OSError(errno.EACCES, "Permission denied", "/f"), 2, "/f: Permission denied"),
        (BlockingIOError(errno.EAGAIN, "Try again"), 70, "too many processes: raise the limit with `ulimit -u`"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 70, "too little address space or memory: raise"),
        (MemoryError(), 70, "too little address space or memory: raise `ulimit -v`"),
        (ImportError("x.so: failed to map segment from shared object"), 70, "too little address space"),
        (BrokenPipeError(), 141, ""),
    ],
)
def test_every_error_has_a_message_and_an_exit_code(
    error: Exception, code: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever command of poprun's it ends."""
    monkeypatch.setattr("poprun.text.screen.abandon_stdout", lambda: None)
    told: list[str] = []

    def fail() -> int:
        raise error

    assert exit_code_of(fail, told.append) == code
    assert "".join(told).startswith(message)


def test_no_message_is_longer_than_a_screen() -> None:
    """What was asked stands at its beginning, and what to do at its end; a table of hosts has all of them."""
    lines = "a\n" * 5_000
    shown = own_line(f"error: --host {'1' * 5_000_000}: give a name")
    told: list[str] = []

    def fail(error: PoprunError) -> int:
        raise error

    exit_code_of(lambda: fail(UsageError(f"--plan {lines}: give a file")), told.append)
    exit_code_of(lambda: fail(HostsError(lines)), told.append)

    assert len(shown) < 2000
    assert " [E] --host 1111" in shown
    assert shown.endswith("1: give a name\n")
    assert (len(told[0]) < 2000, told[1]) == (True, lines)
