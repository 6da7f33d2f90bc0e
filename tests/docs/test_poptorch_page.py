"""The page on poptorch tells the truth: its blocks run."""

from collections.abc import Iterator

import pytest
import torch

import popdist
from tests.docs.markdown import ROOT, blocks


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    with torch.random.fork_rng():
        yield
    popdist.finalize()


def test_the_blocks_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a launcher: one replica, process 0 of 1."""
    found = blocks(ROOT / "docs" / "poptorch.md")
    for block in found:
        exec(compile(block.text, "poptorch.md", "exec"), {})  # noqa: S102 - the page's own

    assert {block.language for block in found} == {"python"}
    assert capsys.readouterr().out == "1 0 1\ntorch.Size([5, 3])\n"
