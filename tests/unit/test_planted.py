"""A planted bug stands in the copy while its tests run, and only then."""

from collections import Counter
from pathlib import Path

import pytest

from tests.architecture.source_tree import ROOT
from tests.planted import __main__ as planting
from tests.planted.bugs import BUGS, Bug

BUG = Bug("an end is left out", "sums.total", "lambda right: lambda n: right(n - 1)", ("unit/test_nothing.py",))
RIGHT = "def total(n):\n    return sum(range(n))\n"


@pytest.fixture
def module(tmp_path: Path) -> Path:
    """The one module of a small copy."""
    path = tmp_path / "popdist_py" / "popdist" / "deep" / "sums.py"
    path.parent.mkdir(parents=True)
    path.write_text(RIGHT)
    return path


@pytest.mark.parametrize(
    ("code", "verdict"), [(1, "caught"), (0, "SURVIVED"), (None, "UNDECIDED: its tests take too long")]
)
def test_a_bug_is_planted_and_taken_out(
    tmp_path: Path, module: Path, monkeypatch: pytest.MonkeyPatch, code: int | None, verdict: str
) -> None:
    """What came of it is what the tests said."""
    sums = []

    def run_tests(*_: object) -> int | None:
        names: dict[str, object] = {}
        exec(module.read_text(), names)  # noqa: S102 - this test wrote it
        sums.append(names["total"](4))  # type: ignore[operator] # a function
        return code

    monkeypatch.setattr(planting, "run_tests", run_tests)

    assert planting.judge(BUG, tmp_path, 1.0) == verdict
    assert sums == [3]
    assert module.read_text() == RIGHT


def test_a_function_that_is_not_there_is_reported(tmp_path: Path, module: Path) -> None:
    """It has another name now, and the bug wants writing anew."""
    module.write_text("def product(n):\n    return n\n")

    assert planting.judge(BUG, tmp_path, 1.0) == "NOT FOUND"


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.target)
def test_each_bug_can_be_planted(bug: Bug) -> None:
    """Its function is there, and so are its tests; no other bug has its name."""
    assert planting.find(bug, ROOT) is not None
    assert [test for test in bug.tests if not (ROOT / "tests" / test.partition("::")[0]).exists()] == []
    assert Counter(it.name for it in BUGS)[bug.name] == 1
