"""The README tells the truth: each of its blocks runs, and what it shows is printed."""

import os
import re
import sys
import tomllib
from pathlib import Path

import pytest

from tests.contract.forked_calls import ForkedWorlds
from tests.docs.markdown import ROOT, Block, blocks
from tests.running import Finished, run

README = ROOT / "README.md"
GUIDE = ROOT / "docs" / "poprun.md"
MOST_LINES = 115


CHANGING = (
    (r"\d+\.\d+%", "N%"),
    (r"weights [0-9a-f]{32}", "weights CHECKSUM"),
    (r"cores? [\d,-]+", "cores N"),
    (r"\d+ per replica", "N per replica"),
    (r"\d+\.\d+\.\d+\w*", "VERSION"),
    (r"folder +\S+", "folder HERE"),
    (r"\S*/bin/", "BIN/"),
    (r"\d\d:\d\d:\d\d\.\d+ \d+ POPRUN", "TIME POPRUN"),
    (r'File "\S*/examples', 'File "EXAMPLES'),
    (r"[ ─]+", " "),
)
"""What differs from machine to machine in what is printed, and what stands for it in a comparison."""

IN_THE_SCRIPTS_ENVIRONMENT = Path(sys.prefix) == ROOT / ".venv"


def of_language(language: str, page: Path = README) -> list[Block]:
    """The blocks of ``page`` in ``language``."""
    return [block for block in blocks(page) if block.language == language]


def script_after() -> str:
    """The training script with the lines that the diff adds."""
    (block,) = of_language("diff")
    return "\n".join(line[1:] for line in block.text.splitlines() if not line.startswith("-"))


def shell(commands: str, cwd: Path = ROOT) -> Finished:
    """Run ``commands`` as a reader who has activated the environment does."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return run(
        ["bash", "-euo", "pipefail", "-c", commands],
        env={"PATH": path},
        cwd=cwd,
    )


def normalised(text: str) -> list[str]:
    """The lines of ``text`` without what changes from machine to machine."""
    for pattern, name in CHANGING:
        text = re.sub(pattern, name, text)
    return [line.strip() for line in text.strip().splitlines()]


def test_the_readme_is_short() -> None:
    """Who wants to know more follows its links."""
    assert len(README.read_text(encoding="utf-8").splitlines()) <= MOST_LINES


def test_no_block_escapes_the_tests() -> None:
    """Each block is in a language that a test below runs."""
    assert {block.language for block in blocks(README)} == {"bash", "console", "diff"}


@pytest.mark.parametrize("block", of_language("console", GUIDE), ids=lambda block: f"line {block.line}")
def test_a_command_prints_what_is_shown(block: Block) -> None:
    """The numbers may differ from machine to machine, nothing else."""
    command, _, shown = block.text.partition("\n")

    assert normalised(shell(command.removeprefix("$ ")).succeeded().out) == normalised(shown)


@pytest.mark.skipif(not IN_THE_SCRIPTS_ENVIRONMENT, reason="makes .venv when there is none")
def test_the_first_screen_is_what_the_demo_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the README: each command with its lines, from a checkout as it is; three checksums are equal."""
    monkeypatch.setenv("SLOW_TORCH", "1")  # or a process may end by gloo's error before poprun stops it
    assert "`scripts/demo`" in README.read_text(encoding="utf-8")
    told = shell("scripts/demo").succeeded().out
    warnings = re.compile(r"POPRUN \[[IW]\]|\[c10d\]")  # of few or busy cores; of torch without names
    without_warnings = "\n".join(line for line in told.splitlines() if not warnings.search(line))
    checksums = re.findall(r"weights ([0-9a-f]{32})", told)

    assert len(checksums) == 3
    assert len(set(checksums)) == 1
    for block in of_language("console"):
        assert "\n".join(normalised(block.text)) in "\n".join(normalised(without_warnings))
    assert told.endswith("left: 0\n")


def test_torchrun_prints_more_than_the_readme_says() -> None:
    """Of the same failure; both of its streams are counted."""
    torchrun = shell("torchrun --nproc-per-node 4 examples/failing_rank.py 2>&1 || true").succeeded()

    assert len(torchrun.lines) > 60


def test_the_three_commands_train_a_script_of_ones_own(tmp_path: Path) -> None:
    """After pip, which installs an extra that there is, each command ends well with the script of the diff."""
    install, *commands = of_language("bash")[0].text.splitlines()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (tmp_path / "train.py").write_text(script_after(), encoding="utf-8")

    assert install == "pip install '.[torch,mpich]'"
    assert {"torch", "mpich"} <= project["optional-dependencies"].keys()
    for command in commands:
        shell(command, cwd=tmp_path).succeeded()


def test_the_diff_is_between_two_scripts_that_run(forked_world: ForkedWorlds, tmp_path: Path) -> None:
    """Without the plus lines it is a plain PyTorch script; with them it runs without poprun, too."""
    (block,) = of_language("diff")
    before = "\n".join(line[1:] for line in block.text.splitlines() if not line.startswith("+"))
    (tmp_path / "before.py").write_text(before, encoding="utf-8")
    (tmp_path / "after.py").write_text(script_after(), encoding="utf-8")

    assert "popdist" not in before
    for name in ("before.py", "after.py"):
        forked_world.script(tmp_path / name)
