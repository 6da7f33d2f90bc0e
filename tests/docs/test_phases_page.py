"""The page about models larger than memory tells the truth: its script runs, and its example."""

import re
from pathlib import Path

import pytest

from tests.contract.forked_calls import ForkedWorlds
from tests.docs.markdown import ROOT, blocks

PAGE = ROOT / "docs" / "phases.md"
EXAMPLE = ROOT / "examples" / "train_phased.py"


@pytest.mark.parametrize("num_instances", [1, 2])
def test_the_script_of_the_page_runs(forked_world: ForkedWorlds, disk_folder: Path, num_instances: int) -> None:
    """As it is, and with the lines that the page adds for clipping."""
    script, change = (block.text for block in blocks(PAGE) if block.language in ("python", "diff"))
    made, loop = script.split("optimizer = ")[0], script.split("for batch in loader:")[0]
    (disk_folder / "script.py").write_text(script, encoding="utf-8")
    forked_world.script(disk_folder / "script.py", num_instances=num_instances)
    after = "\n".join(line[1:] for line in change.splitlines() if not line.startswith("-"))
    optimizer, _, steps = after.partition("\n")
    changed = made + optimizer + loop.removeprefix(made).partition("\n")[2] + steps
    (disk_folder / "script.py").write_text(changed, encoding="utf-8")
    forked_world.script(disk_folder / "script.py", num_instances=num_instances)


def test_the_example_runs(forked_world: ForkedWorlds, disk_folder: Path) -> None:
    """A few steps of a small model; nothing stays in the folder."""
    words = ["--times", "0.02", "--width", "64", "--length", "32", "--steps", "4", "--folder", str(disk_folder)]
    (printed,) = forked_world.script(EXAMPLE, *words)

    assert re.search(r"\d MB of model, \d+ MB of memory, [\d.]+ s a step", printed[-1])
    assert not any(disk_folder.iterdir())
