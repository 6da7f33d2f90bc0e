"""The help page, word by word: a change of an option is a change of this file."""

import re
from pathlib import Path

from tests.running import Poprun

HELP = Path(__file__).with_name("help.txt")
REFERENCE = Path(__file__).parent.parent.parent / "docs" / "poprun.md"


def test_the_help_page(poprun: Poprun) -> None:
    """``--help`` and ``-h`` print the page that is kept here; it fits 80 columns."""
    page = HELP.read_text(encoding="utf-8")

    assert poprun("--help").succeeded().out == page
    assert poprun("-n", "2", "-h", "train.py").succeeded().out == page
    assert max(map(len, page.splitlines())) <= 80


def test_the_reference_names_every_option(poprun: Poprun) -> None:
    """docs/poprun.md knows each option of the help page, and shows PopRun's table as poprun prints it."""
    reference = REFERENCE.read_text(encoding="utf-8")
    options = re.findall(r"--(?:\[no-\])?([a-z-]+)", HELP.read_text(encoding="utf-8").partition("Examples:")[0])
    table = poprun("-n", "2", "--num-replicas", "4", "--dry-run", "--topology-format", "text").succeeded().out

    assert [option for option in options if f"`--{option}" not in reference] == []
    assert f"```\n{table}```" in reference
