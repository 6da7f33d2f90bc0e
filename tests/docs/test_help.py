"""The help pages, word by word: a change of an option is a change of these files.

Holds poprun.cli.help_page.
"""

import re
import shlex
import sys
from pathlib import Path

from poprun import errors
from tests.running import Poprun, run

SHORT_PAGE = Path(__file__).with_name("short_help.txt")
WHOLE_PAGE = Path(__file__).with_name("help.txt")
SIZE_PAGE = Path(__file__).with_name("size_help.txt")
DOCS = Path(__file__).parent.parent.parent / "docs"


def test_the_short_page(poprun: Poprun) -> None:
    """``--help`` and ``-h`` print what is kept here: a line for each of ten options, on a screen of 80 by 24."""
    page = SHORT_PAGE.read_text(encoding="utf-8")

    assert poprun("--help").succeeded().out == page
    assert poprun("-n", "2", "-h", "train.py").succeeded().out == page
    assert max(map(len, page.splitlines())) <= 80
    assert len(page.splitlines()) <= 24
    assert len(re.findall(r"^  -.*  \w", page, re.MULTILINE)) == 10


def test_the_whole_page(poprun: Poprun) -> None:
    """``--help-all`` prints every option; the page fits 80 columns, and the short one counts its options."""
    page = WHOLE_PAGE.read_text(encoding="utf-8")
    num_options = len(re.findall(r"^  -", page, re.MULTILINE))

    assert poprun("--help-all").succeeded().out == page
    assert poprun("-n", "2", "--help-all", "train.py").succeeded().out == page
    assert max(map(len, page.splitlines())) <= 80
    assert f"--help-all shows all {num_options} options" in SHORT_PAGE.read_text(encoding="utf-8")


def test_the_page_of_the_planner() -> None:
    """``poprun-size --help`` and ``-h`` print what is kept here, and every example on it is one that works."""
    page = SIZE_PAGE.read_text(encoding="utf-8")
    program = str(Path(sys.executable).with_name("poprun-size"))

    assert run([program, "--help"]).succeeded().out == run([program, "-h"]).succeeded().out == page
    assert max(map(len, page.splitlines())) <= 80
    lines = page.partition("Examples:")[2].replace("\\\n", "").splitlines()
    examples = [shlex.split(line)[1:] for line in lines if line.strip()]
    assert len(examples) >= 5
    for words in examples:
        if not {"config.json", "rows.csv"} & set(words):
            assert run([program, *words]).succeeded().out


def test_the_guides_name_options_that_there_are() -> None:
    """Each option that a page of poprun's names is on the whole help page, or is another program's."""
    others = {"bind-to", "gpus", "mca", "nnodes", "nproc", "num-inst", "option", "output-filename", "save"}
    options = r"(?<![\w-])--(?:\[no-\])?([a-z][a-z-]+)"
    known = others | {*re.findall(options, WHOLE_PAGE.read_text(encoding="utf-8"))}
    pages = (DOCS / f"{name}.md" for name in ("poprun", "poprun-options", "hosts", "devices"))

    assert {name for page in pages for name in re.findall(options, page.read_text(encoding="utf-8"))} <= known


def test_the_guide_shows_the_table_of_popruns(poprun: Poprun) -> None:
    """PopRun's own table stands in the guide as poprun prints it."""
    table = poprun("-n", "2", "--num-replicas", "4", "--dry-run", "--topology-format", "text").succeeded().out

    assert f"```\n{table}```" in (DOCS / "poprun.md").read_text(encoding="utf-8")


def test_every_exit_code_of_an_error_is_in_the_table() -> None:
    """With its meaning, in the page of options."""
    table = (DOCS / "poprun-options.md").read_text(encoding="utf-8").partition("## Exit codes")[2]
    documented = {
        int(number) for row in re.findall(r"^\| ([0-9, ]+) \|", table, re.MULTILINE) for number in row.split(",")
    }

    assert {kind.exit_code for kind in vars(errors).values() if hasattr(kind, "exit_code")} <= documented
