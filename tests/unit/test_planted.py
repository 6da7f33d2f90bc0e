"""A planted bug stands in the copy while its tests run, and only then."""

from collections import Counter
from pathlib import Path

import pytest

from tests.planted import __main__ as planting
from tests.planted.bugs import BUGS, Bug

BUG = Bug("an end is left out", "popdist", "range(n)", "range(n - 1)", ("unit/test_nothing.py",))


@pytest.fixture
def module(tmp_path: Path) -> Path:
    """The one module of a small copy."""
    path = tmp_path / "popdist_py" / "popdist" / "deep" / "sums.py"
    path.parent.mkdir(parents=True)
    path.write_text("total = sum(range(n))\n")
    return path


@pytest.mark.parametrize(
    ("code", "verdict"), [(1, "caught"), (0, "SURVIVED"), (None, "UNDECIDED: its tests take too long")]
)
def test_a_bug_is_planted_and_taken_out(
    tmp_path: Path, module: Path, monkeypatch: pytest.MonkeyPatch, code: int | None, verdict: str
) -> None:
    """What came of it is what the tests said."""
    seen = []

    def run_tests(*_: object) -> int | None:
        seen.append(module.read_text())
        return code

    monkeypatch.setattr(planting, "run_tests", run_tests)

    assert planting.judge(BUG, tmp_path, 1.0) == verdict
    assert seen == ["total = sum(range(n - 1))\n"]
    assert module.read_text() == "total = sum(range(n))\n"


@pytest.mark.parametrize("text", ["total = 0\n", "range(n), range(n)\n"])
def test_a_text_that_is_not_there_once_is_told(tmp_path: Path, module: Path, text: str) -> None:
    """It has changed, and the bug wants writing anew."""
    module.write_text(text)

    assert planting.judge(BUG, tmp_path, 1.0) == "NOT FOUND"


def test_each_bug_changes_something_and_has_a_name_and_tests() -> None:
    """Two of one name would hide one of them in what is told."""
    assert [name for name, count in Counter(bug.name for bug in BUGS).items() if count > 1] == []
    assert [bug.name for bug in BUGS if bug.before == bug.after or not bug.tests] == []
