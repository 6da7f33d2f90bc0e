"""The page on functions tells the truth: its fixture is one; tests/contract/notebook_cells.py runs its example."""

import sys
from pathlib import Path

from tests.docs.markdown import ROOT, blocks
from tests.running import run


def test_the_fixture_is_one(tmp_path: Path) -> None:
    """Also where pytest loads the test's file as a module that no other process finds."""
    _, fixture, test = blocks(ROOT / "docs" / "launch-function.md")
    (tmp_path / "conftest.py").write_text(fixture.text)
    (tmp_path / "test_place.py").write_text(test.text)

    words = ["-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", str(tmp_path)]
    ended = run([sys.executable, *words], cwd=tmp_path)

    assert "1 failed, 1 passed" in ended.out
    assert "assert 0 == 1" in ended.out
