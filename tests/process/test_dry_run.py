"""The command from its words to its exit code, as a real process that starts no other.

Holds poprun.plan.render.mermaid and poprun.__main__.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from poprun.plan.plan_file import read_plan
from poprun.text.screen import TopologyFormat
from tests.running import DEADLINE_SECONDS, Poprun, run, without_stamps

WITHOUT_LIBRARIES = """\
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "mpi4py", "numpy"}:
            raise ImportError(f"{name} is not installed here")

sys.meta_path.insert(0, Blocked())
from poprun.__main__ import main
main()
"""

NO_PROGRAM = """\
[E] there is no PROGRAM to start: poprun [OPTIONS] PROGRAM [ARGS]...
  poprun --help      the options that most jobs use, and examples
  poprun --dry-run   the plan alone, which needs no PROGRAM
  poprun --doctor    what this machine has for a job, and what is missing
"""

WITHOUT_MPI = """\
import os, sys
sys.executable = "/nowhere/python"
from poprun.__main__ import main
main()
"""


@pytest.mark.parametrize("topology_format", list(TopologyFormat))
def test_a_dry_run_needs_no_library(topology_format: TopologyFormat) -> None:
    """Without torch, mpi4py and numpy every format is printed; a look at a layout needs no program."""
    words = ["-n", "2", "--num-replicas", "4", "--dry-run", "--topology-format", topology_format]
    answer = subprocess.run(
        [sys.executable, "-c", WITHOUT_LIBRARIES, *words],
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )

    assert answer.returncode == 0, answer.stderr
    assert "localhost" in answer.stdout


@pytest.mark.parametrize("topology_format", ["json", "yaml"])
def test_a_printed_plan_starts_as_it_is(poprun: Poprun, tmp_path: Path, topology_format: str) -> None:
    """Plan on one command line, start on another: the same instances, replicas and program, in its own folder."""
    code = "import os; print(os.getcwd(), os.environ['RANK'], os.environ['POPDIST_NUM_TOTAL_REPLICAS'])"
    layout = ("--launcher", "local", "-n", "2", "--num-replicas", "6", "--no-tag-output")
    format_words = ("--dry-run", "--topology-format", topology_format)
    plan = poprun(*layout, *format_words, sys.executable, "-c", code, cwd=tmp_path).succeeded()
    file = tmp_path / "plan"
    file.write_text(plan.out)

    assert poprun("--plan", str(file), "--dry-run", "--topology-format", topology_format).out == plan.out
    assert poprun("--plan", str(file)).succeeded().lines == [f"{tmp_path} {rank} 6" for rank in range(2)]
    assert poprun("--plan", "-", stdin=plan.out).succeeded().lines == [f"{tmp_path} {rank} 6" for rank in range(2)]


def test_a_plan_without_a_program_takes_one(poprun: Poprun, tmp_path: Path) -> None:
    """One layout for several programs; a plan that names its program takes no other."""
    file = tmp_path / "plan"
    dry_run = ("--launcher", "local", "--dry-run", "--topology-format", "json")
    file.write_text(poprun(*dry_run).succeeded().out)

    assert poprun("--plan", str(file), "echo", "hello").succeeded().out == "hello\n"
    assert poprun("--plan", str(file)).code == 2

    file.write_text(poprun(*dry_run, "echo", "hello").succeeded().out)
    assert "names its program: leave out true" in poprun("--plan", str(file), "true").err


def test_the_topology_before_the_start(poprun: Poprun) -> None:
    """``--print-topology`` prints the plan, then the program runs."""
    words = ("--launcher", "local", "--print-topology=yes", "--topology-format", "text", "echo", "hello")
    lines = poprun(*words).succeeded().out.splitlines()

    assert lines[1].strip("| ") == "poprun topology"
    assert lines[-1] == "hello"


def test_words_that_go_elsewhere_are_told_of(poprun: Poprun, tmp_path: Path) -> None:
    """A program that is a switch's value, and a count behind the script or behind the interpreter."""
    (tmp_path / "train.py").touch()
    taken = poprun("--dry-run", "true", cwd=tmp_path).succeeded()
    behind = poprun("--dry-run", "train.py", "-n", "2", cwd=tmp_path).succeeded()

    assert "[W] true is the value of --dry-run: write -- before the program true\n" in taken.told
    assert "[W] -n goes to train.py: poprun's own options stand before the program\n" in behind.told
    told = poprun("--dry-run", sys.executable, "-n", "2", "train.py", cwd=tmp_path).told
    assert f"[W] -n goes to {sys.executable}: poprun's own options stand before the program\n" in told
    for line in (("-n", "2", "train.py", "-n", "2"), ("train.py", "--lr", "1", "-n", "2"), ("head", "-n", "2")):
        assert " goes to " not in poprun("--dry-run", *line, cwd=tmp_path).told


def test_a_script_that_is_not_there(poprun: Poprun, tmp_path: Path) -> None:
    """A dry run plans it, and says so."""
    words = ("--launcher", "local", "--dry-run", sys.executable)
    absent, module = (poprun(*words, *rest, cwd=tmp_path).succeeded() for rest in (["train.py"], ["-m", "train"]))

    assert absent.told == f"[W] there is no file train.py in {tmp_path}, which {sys.executable} shall run\n"
    assert module.told == ""


def test_advice_is_no_output(poprun: Poprun) -> None:
    """What a person should know goes to stderr; stdout is a plan that a program reads."""
    plan = poprun("--launcher", "local", "-n", "1000", "--dry-run", "--topology-format", "json").succeeded()

    assert read_plan(plan.out, "stdout").num_instances == 1000
    assert plan.told.startswith("[W] 1,000 instances share")
    assert plan.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--num-instnces", "2", "true"], 2, "did you mean --num-instances?"),
        (["-n", "4", "--num-replicas", "6", "true"], 2, "nearest: 4 or 8 replicas, or 2, 3 or 6 instances"),
        (["--num-replicas", "two", "true"], 2, "--num-replicas two: give a whole number"),
        (["--host", "n[2-1]", "true"], 2, "runs backwards"),
        (
            ["--launcher", "local", "--host", "192.0.2.7", "true"],
            2,
            "--launcher local starts processes on this machine",
        ),
        (["--plan", "/nowhere/plan.json"], 2, "--plan /nowhere/plan.json: No such file or directory"),
        (["--plan", "/"], 2, "--plan /: Is a directory"),
        (["no-such-program"], 127, "there is no program no-such-program"),
        (["/"], 126, "/ is a directory"),
        (["--dry-run", "python train.py"], 2, "write its words without quotes around them all"),
        (["-n", "2", sys.executable, "-"], 2, "reads its program from the standard input, which only instance 0"),
    ],
)
def test_mistakes(poprun: Poprun, words: list[str], code: int, message: str) -> None:
    """One message on stderr, no traceback, and the exit code of its kind."""
    finished = poprun(*words)

    assert finished.code == code
    assert finished.told.startswith("[E] ")
    assert message in finished.err
    assert finished.err.count("\n") == 1


def test_no_program(poprun: Poprun) -> None:
    """Alone, poprun says where to look; a word that became the value of a switch is told of."""
    alone, behind_switch = poprun(), poprun("--print-topology", "true")
    hint = "  true, 1 and the like after a switch are its value: write -- before the program\n"

    assert (alone.code, behind_switch.code) == (2, 2)
    assert alone.told == NO_PROGRAM
    assert behind_switch.told == NO_PROGRAM + hint
    assert max(map(len, behind_switch.told.replace("[E]", "poprun: error:").splitlines())) <= 80


def test_mpi_asked_for_and_absent() -> None:
    """The exit code of a service that is unavailable, and the ways to get one; ``auto`` does without."""
    command = [sys.executable, "-c", WITHOUT_MPI, "--dry-run"]
    environment = os.environ | {"PATH": "/nowhere"}
    asked, auto = (
        subprocess.run(
            [*command, *words],
            capture_output=True,
            text=True,
            timeout=DEADLINE_SECONDS,
            check=False,
            env=environment,
        )
        for words in (["--launcher", "mpi"], [])
    )

    assert (asked.returncode, asked.stdout) == (69, "")
    assert "pip install 'poprun[mpich]'" in asked.stderr
    assert (auto.returncode, auto.stderr) == (0, "")


def test_the_launcher_is_told_with_its_reason(poprun: Poprun) -> None:
    """``-v`` says which launcher is taken and why, and shows the exact command."""
    finished = poprun("-v", "--launcher", "local", "-n", "2", "--dry-run", "true").succeeded()

    assert "[I] launcher local: asked for\n" in finished.told
    assert "[I] PYTHONHASHSEED=0 for the programs: sets of strings" in finished.told
    assert "shim.py" in finished.out
    assert "POPDIST_NUM_TOTAL_REPLICAS=2" in finished.out


def test_options_from_everywhere(poprun: Poprun, tmp_path: Path) -> None:
    """A file that a dry run wrote, a variable and a flag make one plan, and ``-v`` shows who said what."""
    written = ("--launcher", "local", "-n", "2", "--num-replicas", "4", "--export-config", "job.yaml", "--dry-run")
    poprun(*written, cwd=tmp_path).succeeded()
    words = ("--import-config", "job.yaml", "--num-replicas", "12", "--dry-run", "-v")
    out = poprun(*words, cwd=tmp_path, env={"POPRUN_NUM_INSTANCES": "6"}).succeeded().out

    assert (tmp_path / "job.yaml").read_text() == "num-instances: 2\nnum-replicas: 4\nlauncher: local\n"
    assert "6 instances · 12 replicas" in out
    rows = [line.removeprefix("options").split(maxsplit=2) for line in out.splitlines()]
    assert ["num-instances", "6", "POPRUN_NUM_INSTANCES"] in rows
    assert ["num-replicas", "12", "command line"] in rows
    assert ["launcher", "local", "job.yaml:3"] in rows

    refused = poprun(*written, cwd=tmp_path)
    assert (refused.code, "there is such a file" in refused.err) == (2, True)


PRINTING = pytest.mark.parametrize(
    ("program", "words"),
    [
        ("poprun", ["--dry-run"]),
        ("vipu", ["list", "partitions"]),
        ("vipu", ["--help"]),
        ("poprun-top", ["--version"]),
        ("poprun-size", ["--model", "gpt2", "--devices", "8xA100", "--global-batch", "8"]),
    ],
)


@PRINTING
def test_nobody_reads_what_is_printed(program: str, words: list[str]) -> None:
    """A reader that goes away ends a program quietly, as it ends any other one of a pipe."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as nobody:
        answer = subprocess.run(
            [Path(sys.executable).with_name(program), *words],
            stdout=nobody,
            stderr=subprocess.PIPE,
            text=True,
            timeout=DEADLINE_SECONDS,
            check=False,
        )

    assert (answer.returncode, answer.stderr) == (128 + signal.SIGPIPE, "")


@PRINTING
def test_a_full_disk(program: str, words: list[str]) -> None:
    """What cannot be written is one error with its reason, not half a table and a traceback."""
    with Path("/dev/full").open("w") as full:
        answer = subprocess.run(
            [Path(sys.executable).with_name(program), *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=DEADLINE_SECONDS,
            check=False,
        )

    assert answer.returncode == 73
    begin = "[E]" if program == "poprun" else f"{program}: error:"
    said = without_stamps(answer.stderr)
    assert said == f"{begin} standard output cannot be written: No space left on device\n"


def test_a_working_directory_that_is_gone(poprun: Poprun, tmp_path: Path) -> None:
    """One message and no traceback."""
    script = 'mkdir gone && cd gone && rmdir ../gone && exec "$@"'
    finished = run(["sh", "-c", script, "sh", *poprun.command("--dry-run")], cwd=tmp_path)

    assert (finished.code, finished.out) == (2, "")
    assert finished.told == "[E] the working directory is gone: change to one that exists\n"


def test_ctrl_c_before_anything_is_started(poprun: Poprun) -> None:
    """While poprun waits for a plan, Ctrl-C ends it as any command: 130 in a shell, and no traceback."""
    with subprocess.Popen(
        poprun.command("-v", "--plan", "-"), stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert without_stamps(process.stderr.readline()) == "[I] reading the plan from standard input\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=DEADLINE_SECONDS)

    assert (process.returncode, err) == (-signal.SIGINT, "")


def test_words_of_any_bytes(poprun: Poprun, tmp_path: Path) -> None:
    """A file name that is no text travels through a plan unharmed."""
    word = os.fsdecode(b"\xff\xc3\xbc")
    plan = poprun("--launcher", "local", "--dry-run", "--topology-format", "json", "ls", word, cwd=tmp_path)

    assert json.loads(plan.succeeded().out)["program"][1] == word
    assert poprun("--dry-run", "ls", word).succeeded().err == ""


def test_a_plan_for_other_machines_may_name_their_program(poprun: Poprun) -> None:
    """A dry run says that the program is not here, and plans it all the same."""
    answer = poprun("--dry-run", "-H", "node[0-1]", "-n", "2", "no-such-program", "--epochs", "3").succeeded()

    assert "no-such-program --epochs 3" in answer.out
    assert "[W] there is no program no-such-program" in answer.told


def test_a_job_for_a_cluster_is_printed(poprun: Poprun, tmp_path: Path) -> None:
    """``--emit`` starts nothing: the program need not be here, nor the hosts; a plan file does as well."""
    words = ("--launcher", "local", "-H", "far[0-1]", "-n", "4", "--num-replicas", "8")
    emit = ("--emit", "jobset", "--image", "registry.example.org/train:1")
    first = poprun(*words, *emit, "train.py", "--epochs", "3").succeeded()
    file = tmp_path / "plan.json"
    file.write_text(poprun(*words, "--dry-run", "--topology-format", "json").succeeded().out, encoding="utf-8")
    second = poprun("--plan", str(file), *emit, "train.py", "--epochs", "3").succeeded()

    assert "kind: JobSet\n" in first.out
    assert first.out.splitlines()[1] == "# python train.py --epochs 3"
    assert second.out == first.out
    missing = poprun(*words, "--emit", "mpijob", "train.py")
    assert (missing.code, missing.out) == (2, "")
    assert "add --image NAME" in missing.err


@pytest.mark.parametrize(
    ("encoding", "separator", "name"), [("ascii", "|", r"tr\xe4n\u03bb"), ("latin-1", "·", "trän\\u03bb")]
)
def test_streams_without_unicode_show_rules_and_names_readably(
    poprun: Poprun, encoding: str, separator: str, name: str
) -> None:
    """What the encoding lacks becomes ASCII, one letter for one of a rule: columns stay columns."""
    answer = subprocess.run(
        poprun.command("--dry-run", "--launcher", "local", "-n", "2", "echo", "tränλ"),
        env={**os.environ, "PYTHONIOENCODING": encoding},
        capture_output=True,
        timeout=DEADLINE_SECONDS,
        check=True,
    )
    title, _, heading, rule, *_ = lines = answer.stdout.decode(encoding).splitlines()

    assert f"2 instances {separator} 2 replicas" in title
    assert rule == "-" * len(heading)
    assert any(name in line for line in lines)


def test_names_that_are_no_text_in_the_c_locale_come_out_as_they_went_in(poprun: Poprun) -> None:
    """Their bytes are written as they are, which most terminals then show rightly."""
    answer = subprocess.run(
        poprun.command("--dry-run", "--launcher", "local", "-n", "2", "echo", "tränλ"),
        env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
        timeout=DEADLINE_SECONDS,
        check=True,
    )

    assert "tränλ".encode() in answer.stdout
