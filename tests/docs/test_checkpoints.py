"""The page about checkpoints tells the truth: its script runs, is killed by nobody, and goes on where it ended."""

import sys
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT, blocks
from tests.running import Poprun

PAGE = ROOT / "docs" / "checkpoints.md"


def test_the_script_of_the_page_runs_twice(
    poprun: Poprun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First from the start, then from its last checkpoint, of which three stay."""
    (block,) = [block for block in blocks(PAGE) if block.language == "python"]
    (tmp_path / "script.py").write_text(block.text + 'print("from", last.values if last else "the start")\n')
    monkeypatch.chdir(tmp_path)
    ends = [poprun("-n", number, "--launcher", "local", sys.executable, "script.py") for number in ("1", "2")]

    assert ends[0].succeeded().lines == ["from the start"]
    assert ends[1].succeeded().lines == ["[1,0]<stdout>:from {'epoch': 3}", "[1,1]<stdout>:from {'epoch': 3}"]
    names = sorted(path.name for path in (tmp_path / "run1").iterdir())
    assert names == [f"step-{step:012d}" for step in range(3)]
