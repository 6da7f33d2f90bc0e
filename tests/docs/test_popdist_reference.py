"""The library's reference tells the truth: its Python blocks, in their order, are a program that runs."""

import sys
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT, blocks
from tests.running import Poprun, run

REFERENCE = ROOT / "docs" / "popdist.md"


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """All blocks as one script."""
    texts = [block.text for block in blocks(REFERENCE) if block.language == "python"]
    path = tmp_path / "reference.py"
    path.write_text("\n".join(texts), encoding="utf-8")
    return path


def test_no_block_escapes_the_test() -> None:
    """Each block is Python."""
    assert {block.language for block in blocks(REFERENCE)} == {"python"}


def test_the_blocks_run_alone(program: Path) -> None:
    """Without a launcher they train one replica."""
    run([sys.executable, str(program)]).succeeded()


def test_the_blocks_run_as_a_job(program: Path, poprun: Poprun) -> None:
    """And under poprun two instances with two replicas each."""
    poprun("--launcher", "local", "-n", "2", "--num-replicas", "4", str(program)).succeeded()
