"""The page about checkpoints tells the truth: its script runs, is killed by nobody, and goes on where it ended."""

from pathlib import Path

from tests.contract.forked_calls import ForkedWorlds
from tests.docs.markdown import ROOT, blocks

PAGE = ROOT / "docs" / "checkpoints.md"


def test_the_script_of_the_page_runs_twice(forked_world: ForkedWorlds, tmp_path: Path) -> None:
    """First from the start, then from its last checkpoint, of which three stay."""
    (block,) = [block for block in blocks(PAGE) if block.language == "python"]
    (tmp_path / "script.py").write_text(block.text + 'print("from", last.values if last else "the start")\n')
    first, second = (forked_world.script(tmp_path / "script.py", num_instances=number) for number in (1, 2))

    assert first == [["from the start"]]
    assert second == [["from {'epoch': 3}"]] * 2
    names = sorted(path.name for path in (tmp_path / "run1").iterdir())
    assert names == [f"step-{step:012d}" for step in range(3)]
