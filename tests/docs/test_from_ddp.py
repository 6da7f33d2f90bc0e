"""The page for those who come from elsewhere tells the truth: its scripts run, with as many samples as it says."""

import re
import shlex
from collections import Counter
from pathlib import Path

import pytest

from tests.contract.forked_calls import ForkedWorlds
from tests.docs.markdown import ROOT, blocks
from tests.docs.scripts_in_turn import agree, run_in_turn, trained
from tests.docs.scripts_of_others import OTHERS
from tests.running import Poprun

PAGE = ROOT / "docs" / "from-ddp.md"
STAND_INS = ROOT / "tests" / "docs" / "stand_ins"
EXAMPLES = ROOT / "examples"


PORTED = ("by hand", "over all samples", "helpers")
"""The page's last scripts: what real programs are when they have been ported."""

ON_THE_CPU = (('"cuda"', '"cpu"'), ("Accelerator()", "Accelerator(cpu=True)"))
"""What is written otherwise on a machine without a GPU."""

LEAST_ACCURACY = 85
"""An untrained model has an accuracy of 10 %."""

COUNT = '\nprint("{}", sum(len(batch[0]) for batch in loader))\n'


def on_the_cpu(text: str) -> str:
    """Return ``text`` as it is written on a machine without a GPU."""
    for there, here in ON_THE_CPU:
        text = text.replace(there, here)
    return text


def scripts() -> list[str]:
    """The Python blocks of the page, for the CPU."""
    return [on_the_cpu(block.text) for block in blocks(PAGE) if block.language == "python"]


def diff() -> list[str]:
    """The lines of the page's diff."""
    (block,) = (block for block in blocks(PAGE) if block.language == "diff")
    return [line or " " for line in block.text.splitlines()]


def told() -> dict[str, int]:
    """How many samples an epoch has, as the page's last table tells."""
    rows = re.findall(r"^\| (\w+) \| (\d+)", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return {name: int(number) for name, number in rows}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where ``task.py`` is."""
    (tmp_path / "task.py").write_text(scripts()[0], encoding="utf-8")
    return tmp_path


def test_four_lines_are_changed() -> None:
    """The diff is no longer than the page says."""
    assert Counter(line[0] for line in diff() if line[0] != " ") == {"-": 3, "+": 5}


def test_the_changed_script_runs_as_the_page_says(forked_world: ForkedWorlds, folder: Path) -> None:
    """Alone and in two jobs with the same replicas, which end with the same bits; nobody sees a sample twice."""
    after = "\n".join(line[1:] for line in diff() if line[0] != "-")
    count = "\nprint(popdist.checksum(model), sum(batch.num_samples_job for batch in loader))\n"
    (folder / "train.py").write_text(after + count, encoding="utf-8")
    (block,) = (block for block in blocks(PAGE) if block.language == "bash")
    commands = [shlex.split(line, comments=True) for line in block.text.splitlines()]
    assert commands == [
        ["python", "train.py"],
        *(["poprun", "--num-instances", n, "--num-replicas", "4", "python", "train.py"] for n in "21"),
    ]
    sizes: tuple[tuple[int | None, int], ...] = ((None, 1), (2, 4), (1, 4))
    ends = [
        line.split()
        for instances, replicas in sizes
        for (line,) in forked_world.script(folder / "train.py", num_instances=instances, num_replicas=replicas)
    ]

    assert len(ends) == 4
    assert {int(count) for _, count in ends} == {told()["popdist"]}
    assert len({checksum for checksum, _ in ends[1:]}) == 1


@pytest.mark.parametrize("launcher", ["mpich"], indirect=True)
def test_the_other_scripts_run_under_poprun(launcher: Poprun, folder: Path) -> None:
    """Those of the page and of other libraries, in two processes: they see as many samples as the page says.

    So do the examples of DDP, Lightning and accelerate, which know MPI's launchers, too, and believe poprun's
    variables. Horovod is a stand-in, because it cannot be installed here: the test shows that its script is a
    program, not what Horovod makes of it.
    """
    before = "\n".join(line[1:] for line in diff() if line[0] != "+")
    known = {"plain": before, "DDP": scripts()[1], **OTHERS}
    for name, text in known.items():
        (folder / f"{name}.py").write_text(on_the_cpu(text) + COUNT.format(name), encoding="utf-8")
    (empty := folder / "empty").mkdir()
    lightning, *examples = (
        EXAMPLES / name for name in ("with_lightning.py", "with_accelerate.py", "plain_ddp.py")
    )
    commands = [*((folder / f"{name}.py",) for name in known), (lightning, "--devices", "2"), *zip(examples)]
    finished = run_in_turn(launcher, commands, search=[str(STAND_INS)], cwd=empty).succeeded_but_for_torch()
    seen = dict.fromkeys(known, 0)
    for name, count in re.findall(r"^(\w+) (\d+)$", finished.out, re.MULTILINE):
        seen[name] += int(count)
    first, second = trained(finished)

    assert seen.pop("plain") == 2 * told()["popdist"]
    assert seen.pop("PopDist") < told()["popdist"]
    assert {**seen, "popdist": 1001} == told()
    assert min(first, second) >= LEAST_ACCURACY
    assert agree(finished)


@pytest.mark.parametrize("name", PORTED)
def test_a_ported_program_has_the_same_bits_in_any_split(
    forked_world: ForkedWorlds, folder: Path, name: str
) -> None:
    """Four replicas in two instances and in one."""
    script = folder / "train.py"
    text = scripts()[PORTED.index(name) - len(PORTED)]
    script.write_text(f"{text}\nprint('bits', popdist.checksum(model))\n", encoding="utf-8")
    (first,), (second, third) = (
        forked_world.script(script, num_instances=number, num_replicas=4) for number in (1, 2)
    )

    assert first[-1].startswith("bits ")
    assert first[-1] == second[-1] == third[-1]
