"""A report of a job read back from its JSON, and shown.

Holds poprun.observe.account.job_record, poprun.observe.show.report_words, poprun.observe.show.report_rows and
poprun.observe.show.report_command.
"""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from poprun.errors import UsageError
from poprun.observe.account.job_record import read_report
from poprun.observe.show.report_command import report
from tests.unit.test_report_file import JOB


def timed_job() -> dict[str, Any]:
    """A report as it is written, with steps, phases and another key, and with letters that move a terminal."""
    job: dict[str, Any] = copy.deepcopy(JOB)
    attempt = job["attempts"][0]
    attempt["printed"] += ["  | ValueError: \x1b[2J\0"]
    attempt["instances"][0] |= {"num_steps": 1200, "phase_seconds": {"da\x1bta": 1.0, "waiting": 3.0}}
    attempt["instances"][1] |= {"a_key_of_later": {"x": 1}}
    return job


def shown(file: Path, job: object) -> str:
    """What `poprun-report show` prints of ``job``."""
    file.write_text(job if isinstance(job, str) else json.dumps(job))
    result = CliRunner(env={"COLUMNS": "100"}).invoke(report, ["show", str(file)], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_a_report_is_shown_in_words(tmp_path: Path) -> None:
    """How it ended, who was at fault and since when, who was slow and where the time went; no letter is raw."""
    text = "\n".join(" ".join(line.split()) for line in shown(tmp_path / "r.json", timed_job()).splitlines())

    assert "end exit code 143" in text
    assert "run 2023-11-14T22:13:20.500Z, 3 s: exit code 143\n" in text
    assert "verdict exception: instance 1, at train.py:3, since 2023-11-14T22:13:21.000Z\n" in text
    assert "printed instance 1 failed first: SIGTERM" in text
    assert "| ValueError: \\x1b[2J\\x00" in text
    assert "slow instance 1 is slow in data since step 20: +100 ms a step (50%): its disk" in text
    assert "warning memory" in text
    assert "0 localhost 0-1 well 2.25 s 1,200 2.9 KiB" in text
    assert "instance da\\x1bta waiting\n" in text
    assert "0 25% 75%" in text


def test_the_steps_of_a_restart_begin_anew(tmp_path: Path) -> None:
    """And the first attempt needs no word about it."""
    job = timed_job()
    job["attempts"] *= 2

    assert shown(tmp_path / "r.json", job).count("counted from 0 again in this attempt") == 1


def test_a_large_job_shows_those_that_failed(tmp_path: Path) -> None:
    """Beside the first instances, which are as well as those that are left out."""
    job = timed_job()
    attempt = job["attempts"][0]
    attempt["instances"] = [{**attempt["instances"][0], "index": index} for index in range(40)]
    attempt["first_failure"], attempt["verdict"] = 37, None
    text = shown(tmp_path / "r.json", job)

    assert "and 24 more instances" in text
    assert [row.split()[0] for row in text.splitlines() if " localhost " in row][-2:] == ["14", "37"]


def test_a_job_that_still_runs_says_so(tmp_path: Path) -> None:
    """As the report of a killed poprun does."""
    job = timed_job()
    job |= {"is_over": False, "exit_code": None}
    job["attempts"][0] |= {"is_over": False, "exit_code": None, "first_failure": None, "verdict": None}
    text = shown(tmp_path / "r.json", job)

    assert "it was still running when this was written" in text
    assert "3 s: still running" in text


def test_a_job_that_never_ran_has_its_error(tmp_path: Path) -> None:
    """And no table."""
    text = shown(tmp_path / "r.json", {**JOB, "plan": None, "attempts": [], "exit_code": None, "error": "no MPI"})

    assert text.splitlines()[-1].split(maxsplit=1) == ["end", "it never ran: no MPI"]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "r.json is damaged, or no report in JSON"),
        (json.dumps(JOB)[:300], "r.json is damaged, or no report in JSON"),
        ("[]", "r.json is no report of a job"),
        (
            '{"version": 1, "program": ["true"]}',
            "r.json is no report of a job: poprun --report FILE.json writes one",
        ),
        (json.dumps({**JOB, "version": 2}), "r.json: version 2: this poprun reads version 1"),
        (json.dumps({**JOB, "attempts": [{}]}), "r.json: attempts[0].started_at, attempts[0].duration_seconds"),
        (json.dumps({**JOB, "exit_code": "0"}), "r.json: exit_code must be a whole number, not '0'"),
        (json.dumps(JOB).replace("2.25", "NaN"), "duration_seconds must be a number from 0.0"),
    ],
)
def test_what_is_no_report_is_refused(text: str, error: str) -> None:
    """With the place in the file where it is damaged."""
    with pytest.raises(UsageError, match=r".*") as refused:
        read_report(text, "r.json")
    assert error in str(refused.value)
