"""The page on poptorch tells the truth: its blocks and its programs run."""

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.contract.forked_calls import ForkedWorlds
from tests.docs.markdown import ROOT, blocks

PAGE = ROOT / "docs" / "poptorch.md"


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    with torch.random.fork_rng():
        yield


def test_the_blocks_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a launcher: one replica, process 0 of 1."""
    for block in blocks(PAGE):
        if block.language == "python":
            exec(compile(block.text, "poptorch.md", "exec"), {})  # noqa: S102 - the page's own

    assert {block.language for block in blocks(PAGE)} == {"bash", "python"}
    assert capsys.readouterr().out == "1 0 1\ntorch.Size([5, 3])\n"


def test_the_programs_run(forked_world: ForkedWorlds, tmp_path: Path) -> None:
    """Those of its four steps: one replica, then four; curves of 1 and 16 replicas are equal, and drawn."""
    (block,) = (block for block in blocks(PAGE) if block.language == "bash")
    commands = [shlex.split(line) for line in block.text.splitlines()]
    programs = [ROOT / next(word for word in command if word.endswith(".py")) for command in commands]
    assert commands[2][:-2] == ["poprun", "--num-instances", "4", "--num-replicas", "4", "--ipus-per-replica", "4"]
    assert len({*programs}) == len(commands) - 1
    assert {*programs} == {*(ROOT / "examples" / "poptorch").glob("*.py")}

    (alone,) = forked_world.script(programs[0], "--epochs", "1")
    checkpoint = tmp_path / "checkpoint.pt"
    first, *others = forked_world.script(
        programs[2], "--epochs", "1", "--checkpoint", str(checkpoint), num_instances=2, num_replicas=4
    )
    (scaled,) = forked_world.script(programs[3], "--epochs", "1", "--plot", str(tmp_path / "curves.png"))

    assert [line.split()[0] for line in alone] == ["epoch", "test"]
    assert (len(first), first[-1].split(", ")[1], others) == (2, "replicas: 4", [[]])
    assert torch.load(checkpoint).keys() == {"model", "optimizer"}
    assert [line.split(" weights ")[1] for line in scaled[:2]] == [scaled[0].split(" weights ")[1]] * 2
    assert (tmp_path / "curves.png").stat().st_size > 0
