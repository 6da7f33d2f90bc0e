"""The page on data tells the truth: its blocks are one program, and it runs everywhere."""

import sys
from pathlib import Path

from tests.docs.markdown import ROOT, blocks
from tests.running import run

PAGE = ROOT / "docs" / "data.md"

POPRUN = [sys.executable, "-m", "poprun", "--launcher", "local", "-n", "2", "--num-replicas", "4"]


def test_the_blocks_are_a_program(tmp_path: Path) -> None:
    """Alone, and in a job; what it computes is the same on every instance of a job."""
    found = blocks(PAGE)
    program = tmp_path / "program.py"
    program.write_text(
        "\n".join([*(block.text for block in found), "print(popdist.checksum(model), mean_square_error)"])
    )

    assert {block.language for block in found} == {"python"}
    assert len(run([sys.executable, str(program)], cwd=tmp_path).succeeded().lines) == 1
    lines = run([*POPRUN, "--no-tag-output", sys.executable, str(program)], cwd=tmp_path).succeeded().lines
    assert len(lines) == 2
    assert len(set(lines)) == 1
