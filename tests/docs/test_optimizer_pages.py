"""The pages about optimizers tell the truth: their blocks, in their order, run, alone and as a job."""

from pathlib import Path

from tests.contract.forked_calls import ForkedWorlds
from tests.docs.markdown import ROOT, blocks


def test_the_blocks_of_the_page_run(forked_world: ForkedWorlds, tmp_path: Path) -> None:
    """Without a launcher, and with two instances."""
    texts = [it.text for it in blocks(ROOT / "docs" / "sharded-optimizer.md") if it.language == "python"]
    (tmp_path / "script.py").write_text("\n".join(texts), encoding="utf-8")

    forked_world.script(tmp_path / "script.py")
    forked_world.script(tmp_path / "script.py", num_instances=2)


def test_the_blocks_of_the_page_on_large_batches_run(forked_world: ForkedWorlds, tmp_path: Path) -> None:
    """With two instances."""
    texts = [it.text for it in blocks(ROOT / "docs" / "large-batches.md") if it.language == "python"]
    (tmp_path / "script.py").write_text("\n".join(texts), encoding="utf-8")

    forked_world.script(tmp_path / "script.py", num_instances=2)
