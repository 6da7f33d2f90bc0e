"""Progress bars and lines of several instances on one terminal, as the eye sees them."""

import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poprun.job.output.progress_bars import BottomRow, clip
from tests.screen import rows_of

UP = "\x1b[A"


class Terminal:
    """A terminal that a `BottomRow` writes to."""

    def __init__(self, columns: int = 0) -> None:
        self._row = BottomRow(lambda: columns)
        self._written = b""

    def show(self, instance: int, lines: str, step: str = "", stream: str = "stderr") -> list[str]:
        """The rows after ``instance`` wrote this."""
        tag = f"[{instance}] ".encode()
        self._written += self._row.render(stream, (instance,), tag, lines.encode(), step.encode())
        return rows_of(self._written.decode())

    def end_bars(self, instance: int) -> list[str]:
        """The rows after ``instance`` ended, and poprun spoke."""
        self._written += self._row.end_bars("stderr", instance) + b"poprun: bye\n"
        return rows_of(self._written.decode())


def test_each_step_is_drawn_over_the_one_before() -> None:
    """A shorter one leaves nothing of a longer one."""
    terminal = Terminal()

    assert terminal.show(0, "\r", "50% five hundred") == ["[0] 50% five hundred"]
    assert terminal.show(0, "50% five hundred\r", "60%") == ["[0] 60%"]
    assert terminal.show(0, "60%\rdone\n") == ["[0] done"]


def test_a_bar_stays_below_the_lines_of_others() -> None:
    """Also below those that its own instance prints on another stream."""
    terminal = Terminal()
    terminal.show(0, "", "10%")

    assert terminal.show(1, "a\nb\n") == ["[1] a", "[1] b", "[0] 10%"]
    assert terminal.show(0, "c\n", stream="stdout") == ["[1] a", "[1] b", "[0] c", "[0] 10%"]
    assert terminal.show(0, "10%\r", "20%")[3:] == ["[0] 20%"]


def test_a_bar_that_is_wiped_out_is_gone() -> None:
    """So a program prints a line above its bar, and removes the bar at the end."""
    terminal = Terminal()
    terminal.show(0, "\r", "10%")

    assert terminal.show(0, "10%\r   \rline\n", "") == ["[0] line"]
    assert terminal.show(0, "\r", "20%") == ["[0] line", "[0] 20%"]
    assert terminal.show(0, "20%\r   \r") == ["[0] line"]


def test_the_wiping_of_one_leaves_the_bar_of_another() -> None:
    """Only its owner wipes a bar out."""
    terminal = Terminal()
    terminal.show(0, "", "10%")

    assert terminal.show(1, "   \r") == ["[0] 10%"]


def test_a_bar_whose_program_ended_stays_on_a_row_of_its_own() -> None:
    """What comes next begins below it."""
    terminal = Terminal()
    terminal.show(0, "", "10%")

    assert terminal.end_bars(1) == ["poprun: bye"]
    terminal.show(0, "10%\r", "20%")
    assert terminal.end_bars(0) == ["poprun: bye", "[0] 20%", "poprun: bye"]


def test_a_step_is_as_wide_as_the_terminal() -> None:
    """A wider one would begin a new row at each step; lines may be wide."""
    terminal = Terminal(columns=12)

    assert terminal.show(0, "", "0123456789") == ["[0] 01234567"]
    assert terminal.show(0, "0123456789\n") == ["[0] 0123456789"]


@pytest.mark.parametrize(
    ("text", "columns", "expected"),
    [
        ("\x1b[36m[0]\x1b[0m ██████", 6, "\x1b[36m[0]\x1b[0m ██"),
        ("\x1b[32mgreen\x1b[0m", 2, "\x1b[32mgr\x1b[0m"),
        ("████", 4, "████"),
        ("long", 0, "long"),
    ],
)
def test_columns_are_counted_in_signs(text: str, columns: int, expected: str) -> None:
    """Not in bytes; colours take none, and end where they ended."""
    assert clip(text.encode(), columns).decode() == expected


def test_nested_bars_stand_below_each_other() -> None:
    """As tqdm draws them: down to the inner one, its step, up again."""
    terminal = Terminal()
    terminal.show(0, "\r", "outer 0")
    assert terminal.show(0, "outer 0\n\r", "inner 1" + UP) == ["[0] outer 0"]
    assert terminal.show(0, f"inner one{UP}\n\r", "inner 2" + UP) == ["[0] outer 0", "[0] inner one"]
    assert terminal.show(0, f"inner 2{UP}\r", "outer 1") == ["[0] outer 1", "[0] inner 2"]
    assert terminal.show(0, "outer 1\n", "") == ["[0] outer 1", "[0] inner 2"]
    assert terminal.show(0, "done\n") == ["[0] outer 1", "[0] done"]


def test_nested_bars_spare_the_lines_of_others() -> None:
    """They do not move up over them; the bar is then drawn once more below."""
    terminal = Terminal()
    terminal.show(0, "outer 0\n\r")
    terminal.show(0, f"inner 1{UP}\n\r")

    assert terminal.show(1, "line\n") == ["[0] outer 0", "[1] line"]
    assert terminal.show(0, f"inner 2{UP}\n\r") == ["[0] outer 0", "[1] line", "[0] inner 2"]
    rows = terminal.show(0, f"inner 3{UP}\router 1\n")
    assert rows == ["[0] outer 0", "[1] line", "[0] inner 3", "[0] outer 1"]


pieces = st.lists(st.sampled_from(["a", "bb", "\n", "\r", "\r\n", " "]), max_size=8).map("".join)
moves = st.lists(st.sampled_from(["a", "bb", "\n", "\r", "\r\n", UP]), max_size=8).map("".join)


@given(st.lists(st.tuples(st.integers(0, 2), pieces), max_size=12))
def test_no_line_is_lost_or_mixed(writes: Sequence[tuple[int, str]]) -> None:
    """Whatever bars there are, each line stands on the screen in order, with its tag and nothing of a bar."""
    terminal = Terminal()
    rows: list[str] = []
    lines = []
    for instance, text in writes:
        whole = _whole(text)
        lines += [f"[{instance}] {line}" for line in _lines(whole)]
        rows = terminal.show(instance, whole, text.removeprefix(whole))

    assert rows[: len(lines)] == lines
    assert len(rows) <= len(lines) + 1


@given(st.lists(st.tuples(st.just(0), moves) | st.tuples(st.just(1), pieces), max_size=16))
def test_no_line_is_drawn_over_by_another_instance(writes: Sequence[tuple[int, str]]) -> None:
    """Whatever bars instance 0 draws above each other."""
    terminal = Terminal()
    rows: list[str] = []
    lines = []
    for instance, text in writes:
        whole = _whole(text)
        lines += [f"[1] {line}" for line in _lines(whole) if instance == 1]
        rows = terminal.show(instance, whole)

    assert [row for row in rows if row.startswith("[1]")][: len(lines)] == lines


def _whole(text: str) -> str:
    return "".join(re.findall(r"[^\r\n]*(?:\r\n|\r|\n)", text))


def _lines(whole: str) -> list[str]:
    """The lines of ``whole`` without the steps of bars between them."""
    return [line.rstrip("\r\n") for line in re.findall(r"[^\r\n]*(?:\r\n|\r|\n)", whole) if line.endswith("\n")]
