"""The pages about optimizers tell the truth: their blocks, in their order, run, alone and as a job."""

import sys
from pathlib import Path

from tests.docs.markdown import ROOT, blocks
from tests.running import Poprun, run


def test_the_blocks_of_the_page_run(poprun: Poprun, tmp_path: Path) -> None:
    """Without a launcher, and with two instances."""
    texts = [it.text for it in blocks(ROOT / "docs" / "sharded-optimizer.md") if it.language == "python"]
    (tmp_path / "script.py").write_text("\n".join(texts), encoding="utf-8")

    run([sys.executable, str(tmp_path / "script.py")]).succeeded()
    poprun("--launcher", "local", "-n", "2", str(tmp_path / "script.py")).succeeded()


def test_the_blocks_of_the_page_on_large_batches_run(poprun: Poprun, tmp_path: Path) -> None:
    """With two instances."""
    texts = [it.text for it in blocks(ROOT / "docs" / "large-batches.md") if it.language == "python"]
    (tmp_path / "script.py").write_text("\n".join(texts), encoding="utf-8")

    poprun("--launcher", "local", "-n", "2", str(tmp_path / "script.py")).succeeded()
