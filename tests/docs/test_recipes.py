"""The page of recipes tells the truth: each program and each command runs, and equal bits are compared."""

import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from poprun.__main__ import run_command
from tests.contract.forked_calls import ForkedWorlds
from tests.docs.markdown import ROOT, blocks
from tests.docs.test_readme import normalised
from tests.running import Poprun, run

PAGE = ROOT / "docs" / "recipes.md"
FEWEST_RECIPES, MOST_WORDS = 20, 3300

PROGRAMS = {block.text.split()[1]: block.text for block in blocks(PAGE) if block.language == "python"}
"""The programs by their names, which their first lines say."""

SAME_IN_ANY_SPLIT = ("train", "amp", "ema", "norm", "predict", "scale", "stop_early")
WITH_TESTS_OF_THEIR_OWN = (
    "ddp",
    "hang",
    "metrics",
    "notebook",
    "once",
    "resume",
    "save",
    "sharded",
    "task",
    "track",
)

ON_FOUR_GPUS = """
poprun() {
    case "$*" in *--emit*) command poprun "$@" ;; *) printf '%q ' "$@"; echo ;; esac
}
poprun-report() { [ "$1" = show ]; }
docker() { while [ "$1" != poprun ]; do shift; done; "$@"; }
sbatch() { grep -q '^#SBATCH --nodes=2' "$1" && bash -n "$1"; }
sleep() { :; }
kill() { :; }
"""
"""What stands for commands in a shell: poprun prints its words, which are planned later, and starts nothing."""

NVIDIA_SMI = "#!/bin/sh\ncase $2 in *gpu=index*) for i in 0 1 2 3; do echo $i, GPU-$i; done;; esac\n"

WANDB = """
def init(*, project, id, resume):
    print("project", project)

def log(numbers, step):
    print(step, *numbers)

def finish():
    print("finished")
"""

CHECK_OF_METRICS = """
import popdist
from metrics import accuracy
from task import Net, test

popdist.init()
model, (x, y) = Net(), test.tensors
assert accuracy(model, test) == (model.eval()(x).argmax(1) == y).sum().item() / len(y)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """All programs of the page, as a reader would save them."""
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def shown_after(program: str) -> list[str]:
    """The lines that the page shows directly after the block ``program``; none if the page shows none."""
    found = re.search(
        re.escape(program) + r"```\n\n```text\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL
    )
    return normalised(found[1]) if found else []


def test_no_program_escapes_the_tests() -> None:
    """The page has many recipes in few words, in languages that run, and each program has a test below."""
    page = PAGE.read_text(encoding="utf-8")

    assert {block.language for block in blocks(PAGE)} == {"python", "bash", "text"}
    assert {*PROGRAMS} == {f"{name}.py" for name in (*SAME_IN_ANY_SPLIT, *WITH_TESTS_OF_THEIR_OWN)}
    assert len(re.findall("^### ", page, re.MULTILINE)) >= FEWEST_RECIPES
    assert len(page.split()) <= MOST_WORDS


@pytest.mark.parametrize("name", SAME_IN_ANY_SPLIT)
def test_a_program_prints_the_same_in_any_split(forked_world: ForkedWorlds, folder: Path, name: str) -> None:
    """Four replicas in 1, 2 and 4 instances: instance 0 alone prints, the same checksum, and as the page shows."""
    program = folder / f"{name}.py"
    printed = {number: forked_world.script(program, num_instances=number, num_replicas=4) for number in (1, 2, 4)}
    (alone,) = printed[1]

    assert alone
    assert printed[2] == [alone, []]
    assert printed[4] == [alone, [], [], []]
    shown = shown_after(PROGRAMS[program.name])
    assert shown in ([], normalised("\n".join(alone)))


def test_a_sharded_optimizer_changes_no_bit(forked_world: ForkedWorlds, folder: Path) -> None:
    """Its program ends with the checksum of the program that is not sharded, in any split."""
    (whole,) = forked_world.script(folder / "train.py", num_instances=1, num_replicas=4)

    for number in (2, 4):
        first, *_ = forked_world.script(folder / "sharded.py", num_instances=number, num_replicas=4)
        assert first == whole
    assert shown_after(PROGRAMS["sharded.py"]) == shown_after(PROGRAMS["train.py"]) == normalised(whole[0])


def test_other_replicas_keep_what_the_page_says(forked_world: ForkedWorlds, folder: Path) -> None:
    """The number of steps with one replica, and the statistics of batch norm, up to rounding."""
    (scaled,) = forked_world.script(folder / "scale.py", num_instances=1)
    means = [
        float(forked_world.script(folder / "norm.py", num_instances=1, num_replicas=number)[0][0].split()[-1])
        for number in (1, 2, 4)
    ]

    assert scaled == ["13 steps an epoch, 64 samples in a micro batch"]
    assert shown_after(PROGRAMS["scale.py"]) == ["13 steps an epoch, 16 samples in a micro batch"]
    assert means == pytest.approx([means[0]] * 3, abs=2e-4)


def test_an_accuracy_counts_each_sample_once(forked_world: ForkedWorlds, folder: Path) -> None:
    """It is what one process computes without popdist."""
    (folder / "check.py").write_text(CHECK_OF_METRICS, encoding="utf-8")

    forked_world.script(folder / "check.py", num_instances=2, num_replicas=4)


def test_a_job_resumes_in_mid_epoch(forked_world: ForkedWorlds, folder: Path) -> None:
    """With another number of instances, to the bits of a job that was not interrupted."""
    words = re.findall(r"-n (\d) --num-replicas 4 python resume.py (\d\d)$", PAGE.read_text(), re.MULTILINE)
    for number, last_step in words:
        (resumed, *_) = forked_world.script(
            folder / "resume.py", last_step, num_instances=int(number), num_replicas=4
        )
    (folder / "run").rename(folder / "resumed")
    (whole,) = forked_world.script(folder / "resume.py", words[-1][1], num_instances=1, num_replicas=4)

    assert [number for number, _ in words] == ["2", "4"]
    assert resumed == whole


def test_the_last_and_the_best_are_saved(forked_world: ForkedWorlds, folder: Path) -> None:
    """Two of the last stay, and the best; a job that finds the best again saves it again."""
    for _ in range(2):
        forked_world.script(folder / "save.py", num_instances=2, num_replicas=4)

    assert [len([*(folder / name).iterdir()]) for name in ("last", "best")] == [2, 1]


def test_a_tracker_hears_of_each_step_once(forked_world: ForkedWorlds, folder: Path) -> None:
    """On instance 0 alone."""
    (folder / "wandb.py").write_text(WANDB, encoding="utf-8")
    first, second = forked_world.script(folder / "track.py", num_instances=2, num_replicas=4)

    assert first == ["project points", *(f"{step} loss" for step in range(13)), "finished"]
    assert second == []


def test_data_is_prepared_once(forked_world: ForkedWorlds, folder: Path) -> None:
    """By one instance, and not in the next job."""
    printed = [forked_world.script(folder / "once.py", num_instances=2) for _ in range(2)]

    assert printed == [[["prepares the data"], []], [[], []]]


def test_the_commands_are_understood(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a machine with four GPUs: the commands of the blocks and of the table; a plan is as shown."""
    (folder / "nvidia-smi").write_text(NVIDIA_SMI)
    (folder / "nvidia-smi").chmod(0o755)
    (folder / "hosts.txt").write_text("node1\nnode2\n")
    page = PAGE.read_text(encoding="utf-8")
    table = re.findall(r"`([^`]*\bpoprun -?[^`]*)`[^|`]*\|$", page, re.MULTILINE)
    texts = [block.text for block in blocks(PAGE) if block.language == "bash"]
    monkeypatch.setenv(
        "PATH", os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    )
    monkeypatch.chdir(folder)
    script = "\n".join([ON_FOUR_GPUS, *texts, *table])
    written = run(["bash", "-euo", "pipefail", "-c", script]).succeeded().lines
    codes = [run_command(["--launcher=local", "--dry-run", *shlex.split(words)]) for words in written]
    plans = capsys.readouterr()

    assert len(table) == 10
    assert len(written) > 25
    assert (plans.err.count("[E]"), codes) == (0, [0] * len(written)), plans.err
    assert "#SBATCH" in (folder / "job.sh").read_text()
    (shown,) = (block.text for block in blocks(PAGE) if block.text.startswith("poprun     4 instances"))
    assert "\n".join(normalised(shown)) in "\n".join(normalised(plans.out))


def test_a_ddp_script_runs_unchanged(poprun: Poprun, folder: Path) -> None:
    """Both ranks train, and the report is written."""
    words = ("-n", "2", "--tag-output=no", "--report", "run.html", sys.executable)
    done = poprun(*words, "ddp.py", cwd=folder).succeeded_but_for_torch()

    assert done.lines == ["rank 0 of 2 has trained", "rank 1 of 2 has trained"]
    assert (folder / "run.html").exists()


def test_a_hang_looks_as_shown(poprun: Poprun, folder: Path) -> None:
    """The exit code is that of a hang, and the instance, its line and the waiting collective are named."""
    (shown,) = (block.text for block in blocks(PAGE) if block.text.startswith("poprun: no progress"))
    hangs = poprun("-n", "2", "--hang-report", "2", "--hang-timeout", "4", sys.executable, "hang.py", cwd=folder)
    told = hangs.told.replace("[I]", "poprun:").replace(str(folder), "/home/me")

    assert hangs.code == 75
    assert re.sub(r"for \d s", "for N s", shown) in re.sub(r"for \d s", "for N s", told)


def test_a_notebook_starts_a_job(folder: Path) -> None:
    """Both instances return the same checksum."""
    run([sys.executable, "notebook.py"], cwd=folder).succeeded()


def test_a_debugger_has_all_replicas_in_one_process(poprun: Poprun, folder: Path) -> None:
    """It stops where the exception was raised."""
    (folder / "train.py").write_text("replica = 3\nraise ValueError(replica)\n")
    (words,) = re.findall(r"^poprun (.* -m pdb .*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    done = poprun(*words.replace("python", sys.executable).split(), cwd=folder, stdin="p replica + 1\nq\nq\n")

    assert "(Pdb) 4\n" in done.out
