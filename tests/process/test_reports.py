"""The report of a job as a file, from real jobs.

Holds poprun.command, poprun.observe.show.report_writer and poprun.hosts.probe.provenance.
"""

import json
import platform
import re
import sys
import time
from pathlib import Path

import pytest

from tests.running import DEADLINE_SECONDS, Poprun, run

FAIL_ONCE = """
import os, sys
held = bytearray(2 ** 26)
if os.environ["RANK"] == "1" and os.environ["POPDIST_RESTART_COUNT"] == "0":
    raise ValueError("bad batch")
"""


def test_a_job_and_its_restart_are_in_the_report(launcher: Poprun, tmp_path: Path) -> None:
    """Both attempts, with the last words of the first one's failure; the file starts at the working directory."""
    words = ("--max-restarts", "1", "--report", "report.json", "-n", "2", sys.executable, "-c", FAIL_ONCE)
    launcher(*words, cwd=tmp_path).succeeded()

    job = json.loads((tmp_path / "report.json").read_text())
    first, second = job["attempts"]
    assert (job["exit_code"], job["error"]) == (0, "")
    assert (first["exit_code"], first["first_failure"]) == (1, 1)
    assert first["instances"][1]["excerpt"][-1] == "ValueError: bad batch"
    assert (second["exit_code"], second["first_failure"]) == (0, None)
    assert [instance["exit_code"] for instance in second["instances"]] == [0, 0]
    assert all(instance["peak_memory_bytes"] > 2**26 for instance in second["instances"])
    assert second["instances"][0]["duration_seconds"] > 0
    assert first["ended_at"] <= second["started_at"]


@pytest.mark.parametrize(
    ("words", "code", "error", "has_plan"),
    [
        (["sh", "-c", 'ulimit -n 12; exec "$@"', "sh"], 70, "too many open files: poprun needs", False),
        (["sh", "-c", 'ulimit -n 16; exec "$@"', "sh"], 70, "too many open files: 2 instances need", True),
        (["env", "POPRUN_POOL=/proc/pool", "POPRUN_IPUS_PER_HOST=4"], 74, "pool /proc/pool cannot be made", True),
        (["env", "POPRUN_NUM_REPLICAS=3"], 2, "--num-replicas 3 does not divide", False),
    ],
)
def test_what_poprun_gives_up_for_is_in_the_report(
    poprun: Poprun, tmp_path: Path, words: list[str], code: int, error: str, *, has_plan: bool
) -> None:
    """Wherever that is: before there is a plan, and between the plan and the start."""
    command = poprun.command("--launcher", "local", "--report", "report.json", "-n", "2", "true")
    finished = run([*words, *command], cwd=tmp_path)
    job = json.loads((tmp_path / "report.json").read_text())

    assert finished.code == code
    assert (job["exit_code"], job["attempts"], job["plan"] is not None) == (None, [], has_plan)
    assert job["error"].startswith(error)


@pytest.mark.parametrize("file", ["missing/report.json", "folder.json", "null.json", "run.txt"])
def test_a_report_that_cannot_be_written_is_refused_before_anything_starts(
    poprun: Poprun, tmp_path: Path, file: str
) -> None:
    """With the name that was given; a name says by its end what is written."""
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "null.json").symlink_to("/dev/null")
    words = ("--launcher", "local", "--report", "good.json", "--report", file, "touch", "started")
    finished = poprun(*words, cwd=tmp_path)

    assert finished.code == 2
    assert re.search(
        rf"--report {file} (cannot be written: |is not possible: its name has to end in )", finished.err
    )
    assert not (tmp_path / "started").exists()


def test_a_report_that_cannot_be_written_later_is_one_warning(poprun: Poprun, tmp_path: Path) -> None:
    """The folder of one is gone; the job goes on, its exit code is its own, and the other report is there."""
    words = ("--launcher", "local", "--report", "gone/report.json", "--report", "report.json")
    (tmp_path / "gone").mkdir()
    finished = poprun(*words, "sh", "-c", "rmdir gone; exit 3", cwd=tmp_path)

    assert finished.code == 3
    assert finished.told.count("[W] --report ") == 1
    assert json.loads((tmp_path / "report.json").read_text())["exit_code"] == 3


REPORTS = """
import sys, time, popdist
from pathlib import Path

popdist.report(step=4, loss=0.5, **{"accuracy/test": 0.75})
print("reported\\n1 of 2", end="\\r", flush=True)
print("2 of 2", flush=True)
if len(sys.argv) > 1:
    while not Path(sys.argv[1]).exists():
        time.sleep(0.01)
popdist.report(step=5, loss=0.25)
"""


def test_what_a_program_reported_and_printed(launcher: Poprun, tmp_path: Path) -> None:
    """The last report too, which nobody had read when the program ended; of a progress bar the last step."""
    launcher("-n", "2", "--report", "report.json", sys.executable, "-c", REPORTS, cwd=tmp_path).succeeded()
    instances = json.loads((tmp_path / "report.json").read_text())["attempts"][0]["instances"]

    assert [instance["num_steps"] for instance in instances] == [5, 5]
    assert [instance["last_lines"] for instance in instances] == [["reported", "2 of 2"]] * 2
    lasts = [{name: curve["last"] for name, curve in instance["curves"].items()} for instance in instances]
    assert {"numbers/loss": 0.25, "numbers/accuracy/test": 0.75}.items() <= lasts[1].items()


def test_a_killed_poprun_leaves_the_report_of_a_job_that_runs(poprun: Poprun, tmp_path: Path) -> None:
    """It is written while the job runs."""
    reports = ("--report", "report.html", "--report", "report.json")  # written in this order
    words = ("--launcher", "local", "-n", "2", *reports, sys.executable, "-c", REPORTS, "never")
    report = tmp_path / "report.json"
    run(["git", "init", "-q"], cwd=tmp_path).succeeded()
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    run(["git", *who, "commit", "-q", "--allow-empty", "-m", "begin"], cwd=tmp_path).succeeded()
    with poprun.started(*words, cwd=tmp_path) as started:
        while not report.exists():
            assert started.poll() is None
            time.sleep(0.05)
        started.kill()
        started.wait(DEADLINE_SECONDS)
    job = json.loads(report.read_text())
    shown = run([str(poprun.python.with_name("poprun-report")), "show", str(report)]).succeeded().out

    assert "it was still running when this was written" in shown
    assert (job["is_over"], job["exit_code"], job["attempts"][0]["is_over"]) == (False, None, False)
    assert job["provenance"]["python"] == platform.python_version()
    assert re.fullmatch("[0-9a-f]{12}", job["provenance"]["revision"])
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".git", "report.html", "report.json"]
    assert '<p class="state runs">running</p>' in (tmp_path / "report.html").read_text()


STAGE_KILLED = """
import json, os, signal, sys, time
from pathlib import Path
from popdist.ground.contract import Contract

contract = Contract.from_env(os.environ)
part, sizes = contract.replica_part, contract.parallelism
found = [contract.num_replicas, contract.ipus_per_replica, contract.layout.num_instances]
place = [contract.instance_index, part.replica, part.stage, part.shard]
print(json.dumps([*place, *found, sizes.tensor, sizes.pipeline]), flush=True)
Path(f"{contract.instance_index}.met").touch()
while len(list(Path().glob("*.met"))) < 4:
    time.sleep(0.01)
if (part.stage, part.shard) == (1, 0):
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""


def test_a_killed_stage_is_named_by_replica_stage_and_shard(launcher: Poprun, tmp_path: Path) -> None:
    """Four instances that are one replica know their places, and both reports name that of the killed one."""
    words = ("--no-tag-output", "--report", "report.json", "--parallelism", "tensor=2,pipeline=2")
    finished = launcher(*words, sys.executable, "-c", STAGE_KILLED, cwd=tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    instances = report["attempts"][0]["instances"]

    assert [json.loads(line) for line in finished.lines] == [
        [2 * stage + shard, 0, stage, shard, 1, 4, 1, 2, 2] for stage in (0, 1) for shard in (0, 1)
    ]
    assert finished.code == 137
    assert "instance 2 failed first: SIGKILL, killed (host localhost, replica 0, stage 1, shard 0)" in finished.err
    assert instances[2]["place"] == {"replica": 0, "stage": 1, "shard": 0}
    assert report["plan"]["parallelism"] == {"instances_per_replica": 4, "tensor": 2, "pipeline": 2}
