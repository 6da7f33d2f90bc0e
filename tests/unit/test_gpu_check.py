"""The check on a GPU: its plan, what ends its parts, and how their outcomes are shown."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
from gpu_check import runner
from gpu_check.endings import fault_lines, trouble_of
from gpu_check.findings import Findings
from gpu_check.jobs import PROGRAMS, JobEnd
from gpu_check.outcomes import Found, Outcome, ProcessEnd, Requirement, Verdict, found_in, judged, merged
from gpu_check.parts import PARTS, TOTAL_SECONDS, planned, seconds_left, skip_reason
from gpu_check.rendering import as_json, as_markdown, line, outcomes_in

from tests.docs.markdown import ROOT
from tests.leftovers import wait_until_none

HOLDS = Found(requirements=(Requirement(what="one digest", holds=True, found="461e"),), figures={"ms": 1.23456})
FAILS = Found(requirements=(*HOLDS.requirements, Requirement(what="nothing is left", holds=False, found="7 | 8")))
ENDED = ProcessEnd(code=0, seconds=1.0)


def outcome(number: int, device: str, verdict: Verdict = Verdict.HOLDS, found: Found = HOLDS) -> Outcome:
    """An outcome of a part on a device."""
    return Outcome(
        number=number,
        name=PARTS[number - 1].name,
        device=device,
        card="NVIDIA H100",
        software="torch 2.11",
        seen_on="2026-01-02",
        verdict=verdict,
        seconds=2.5,
        found=found,
    )


def test_the_parts_fit_into_eight_minutes() -> None:
    """All together on a GPU, and each has a function that does it."""
    assert sum(part.seconds for part in planned("cuda")) <= TOTAL_SECONDS
    assert [part.number for part in PARTS] == list(range(1, 13))
    for part in PARTS:
        assert callable(getattr(import_module(f"gpu_check.{part.module}"), f"part_{part.number}"))


def test_parts_are_chosen_and_have_more_time_elsewhere() -> None:
    """By number, in their order; on other devices with more patience, or with that of the command line."""
    chosen = planned("cuda", (8, 2))
    slow, asked = planned("cpu", (2,)), planned("cpu", (2,), 2.0)

    assert [part.number for part in chosen] == [2, 8]
    assert slow[0].seconds > asked[0].seconds == 2 * chosen[0].seconds
    assert skip_reason(PARTS[8], "cpu")
    assert not skip_reason(PARTS[8], "cuda")
    assert not skip_reason(PARTS[1], "cpu")


def test_a_part_never_uses_the_time_of_the_next() -> None:
    """Each has its own time, also if all parts before it hang; and what is left over is used."""
    parts = planned("cuda")
    elapsed = 0.0
    for position, part in enumerate(parts):
        seconds = seconds_left(parts, position, elapsed)
        assert seconds == pytest.approx(part.seconds)
        elapsed += seconds

    assert elapsed <= TOTAL_SECONDS
    assert seconds_left(parts, 1, 0.0) == parts[0].seconds + parts[1].seconds


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A file for the output of parts."""
    return tmp_path / "log"


def run(script: str, log: Path, seconds: float = 30.0) -> ProcessEnd:
    """Run a shell script as the process of a part."""
    return runner.run(["sh", "-c", script], seconds, os.environ, log)


def test_an_end_is_told(log: Path) -> None:
    """The exit code, the last line that is not empty, and, of a crash, the signal."""
    ended, killed = run("echo before; echo why; echo; exit 3", log), run("kill -SEGV $$", log)

    assert (ended.code, ended.num_left, ended.last_line) == (3, 0, "why")
    assert (killed.code, killed.last_line) == (-11, "")
    assert log.read_text() == "before\nwhy\n\n"


def test_a_part_that_hangs_is_ended_whole(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ignores SIGTERM, and so does its child, which has left the process group."""
    monkeypatch.setattr(runner, "STOP_SECONDS", 0.5)
    child = tmp_path / "child"
    stubborn = f'trap "" TERM; echo $$ > {child}; while :; do sleep 600; done'

    end = run(
        f"trap '' TERM; setsid sh -c '{stubborn}' & echo hangs; while :; do sleep 600; done", log, seconds=5.0
    )

    assert end.code is None
    assert end.last_line == "hangs"
    assert 4 < end.seconds < 20
    assert wait_until_none(lambda: {int(child.read_text())} & pids()) == []


def pids() -> set[int]:
    """All processes that have not ended."""
    return {int(it.name) for it in Path("/proc").iterdir() if it.name.isdecimal() and b") Z" not in stat_of(it)}


def stat_of(folder: Path) -> bytes:
    """The kernel's line on a process; that of a zombie if it is gone."""
    try:
        return (folder / "stat").read_bytes()
    except OSError:
        return b") Z"


def test_what_a_part_leaves_is_counted_and_ended(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that outlives the part, in a session of its own; one that ends soon is none."""
    monkeypatch.setattr(runner, "LEAVE_SECONDS", 0.5)

    left = run("setsid sleep 600 > /dev/null 2>&1 &", log)
    none = run("sleep 0.01 &", log)

    assert (left.code, left.num_left, none.num_left) == (0, 1, 0)


@pytest.mark.parametrize(
    ("found", "end", "verdict"),
    [
        (HOLDS, ENDED, Verdict.HOLDS),
        (FAILS, ENDED, Verdict.FAILS),
        (HOLDS, replace(ENDED, num_left=2), Verdict.FAILS),
        (HOLDS, replace(ENDED, code=1, last_line="KeyError"), Verdict.CRASHED),
        (HOLDS, replace(ENDED, code=None), Verdict.TIMED_OUT),
        (Found(skipped=("needs a device",)), ENDED, Verdict.SKIPPED),
        (Found(), ENDED, Verdict.CRASHED),
    ],
)
def test_a_part_is_judged(found: Found, end: ProcessEnd, verdict: Verdict) -> None:
    """By what must hold, and by how its process ended; a part that checked nothing is no success."""
    assert judged(found, end)[0] is verdict


def test_findings_are_there_before_the_part_ends(tmp_path: Path) -> None:
    """Each is written at once, so a part that hangs has told what it found until then."""
    path = tmp_path / "findings.json"
    findings = Findings(path)
    findings.require("one digest", holds=1, found=461)
    findings.measure(first_loss=2.5)
    first = found_in(json.loads(path.read_text()))
    findings.skip("kernels: needs a device")

    assert first.requirements == (Requirement(what="one digest", holds=True, found="461"),)
    assert first.figures == {"first loss": 2.5}
    assert found_in(json.loads(path.read_text())).skipped == ("kernels: needs a device",)


def test_a_line_tells_what_failed_first() -> None:
    """Then how much holds, and the figures; in one line."""
    assert line(outcome(2, "cuda")) == " 2 same bits            2.5 s  holds      1 of 1 hold; ms 1.235"
    failed = line(outcome(8, "cuda", Verdict.FAILS, FAILS))
    assert failed.endswith("fails      NOT nothing is left: 7 | 8; 1 of 2 hold")


def test_outcomes_survive_their_file() -> None:
    """What is read is what was written; another form is refused with advice."""
    outcomes = (outcome(2, "cuda"), outcome(8, "cpu", Verdict.SKIPPED, Found(skipped=("needs a device",))))

    assert outcomes_in(as_json(outcomes)) == outcomes
    with pytest.raises(ValueError, match="--out"):
        outcomes_in("[]")


def test_the_newest_outcome_counts_and_the_most_telling_device_is_shown() -> None:
    """A table has each part once: a GPU's outcome before a CPU's, a skipped one never."""
    old = (outcome(2, "cpu"), outcome(2, "cuda", Verdict.FAILS, FAILS), outcome(8, "cuda", Verdict.SKIPPED))
    outcomes = merged(old, [outcome(2, "cuda"), outcome(8, "cpu")])

    rows = as_markdown(outcomes).splitlines()

    assert [(it.number, it.device) for it in outcomes] == [(2, "cuda"), (8, "cuda"), (2, "cpu"), (8, "cpu")]
    assert rows[3].endswith("| NVIDIA H100, torch 2.11, 2026-01-02 | holds in 2 s: 1 of 1 hold |")
    assert "| no GPU: NVIDIA H100, " in rows[9]
    assert rows[2].endswith("| nothing yet |  |")
    assert all(row.count("|") == 5 for row in [*rows, *as_markdown(old).splitlines()])


def test_a_verdict_of_poprun_is_read() -> None:
    """Instance 1, its cause and a line of the function that fails; anything else is said."""
    lines = fault_lines()
    source = (PROGRAMS / "failing.py").read_text().splitlines()
    place = f"/x/failing.py:{lines.start + 3}"
    verdict = {"culprits": [1], "cause": "out of memory", "places": {"1": place}}

    def trouble(**changed: object) -> str:
        report = {"attempts": [{"verdict": verdict | changed}]}
        return trouble_of(JobEnd(code=1, out="", err="", report=report, seconds=1.0), "out of memory", lines)

    assert source[lines.start - 1].startswith("def fail(")
    assert "synchronize(device)" in source[lines.stop - 2]
    assert trouble() == ""
    assert "exception" in trouble(cause="exception")
    assert "[0]" in trouble(culprits=[0])
    assert "failing.py:2" in trouble(places={"1": "failing.py:2"})
    assert "no verdict" in trouble_of(JobEnd(code=0, out="", err="", seconds=1.0), "signal", None)


def test_the_command_writes_what_it_prints(tmp_path: Path) -> None:
    """From any folder, with the Python that it is told: a line, a JSON file, a page; a wrong number is refused."""
    command = [str(ROOT / "scripts" / "gpu-check"), "--device", "cpu", "--out", str(tmp_path), "--parts"]
    environment = {**os.environ, "PYTHON": sys.executable}

    good, bad = (
        subprocess.run(
            [*command, it], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        for it in ("9", "13")
    )

    assert (good.returncode, good.stderr) == (0, "")
    assert "9 two jobs" in good.stdout
    assert "skipped: needs a device" in good.stdout
    (kept,) = outcomes_in((tmp_path / "gpu.json").read_text())
    assert kept.verdict is Verdict.SKIPPED
    assert "| 9 two jobs |" in (tmp_path / "gpu.md").read_text()
    assert bad.returncode == 2
    assert "'13' is no part: name some of 1 to 12" in bad.stderr
