"""The programs that measure still start, so that the figures in the documents can be taken again."""

import ast
from pathlib import Path

import pytest

from tests.contract.forked_calls import ForkedWorlds
from tests.docs.markdown import ROOT

BENCHMARKS = sorted(
    path
    for path in (ROOT / "benchmarks").glob("*.py")
    if "parse_args" in path.read_text(encoding="utf-8")  # the others are parts of these
)


HELP = """
import runpy, sys
sys.path.insert(0, {folder!r})
sys.argv = [{script!r}, "--help"]
try:
    runpy.run_path({script!r}, run_name="__main__")
except SystemExit as end:
    print("ended with", end.code)
"""


@pytest.mark.parametrize("script", BENCHMARKS, ids=lambda path: path.stem)
def test_a_benchmark_starts(forked_world: ForkedWorlds, tmp_path: Path, script: Path) -> None:
    """It finds all that it imports, and its help page says what it measures."""
    program = tmp_path / "program.py"
    program.write_text(HELP.format(folder=str(script.parent), script=str(script)), encoding="utf-8")
    (printed,) = forked_world.script(program)
    summary = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""

    assert printed[-1] == "ended with 0"
    assert " ".join(summary.split()[:5]) in " ".join(" ".join(printed).split())


def test_a_benchmark_measures(forked_world: ForkedWorlds, tmp_path: Path) -> None:
    """One of them runs, prints a table with its limits, and puts it into the document."""
    document = tmp_path / "page.md"
    document.write_text("<!-- overhead begins -->\nold\n<!-- overhead ends -->\n", encoding="utf-8")
    script = ROOT / "benchmarks" / "overhead.py"
    words = ["--rounds", "2", "--steps", "1", "--document", str(document)]
    printed = "\n".join(forked_world.script(script, *words)[0])

    for word in ("digits CNN", "MLP, 25 M parameters", "≤ 90 µs", "≤ 450 µs", "--rounds 2"):
        assert word in printed
        assert word in document.read_text(encoding="utf-8")
