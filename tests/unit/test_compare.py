"""Two reports of jobs compared: what differs by more than noise, and where it comes from.

Holds poprun.observe.show.compare.
"""

import copy
import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from click.testing import CliRunner

from poprun.observe.account.job_record import JobRecord, read_report
from poprun.observe.show.compare import Change, Comparison, Difference, compare
from poprun.observe.show.report_command import report
from tests.unit.test_report_file import JOB

MEMORY = 400 * 2**20


def job(
    rates: Sequence[float],
    *,
    delay: float = 0.0,
    phases: Mapping[int, Mapping[str, float]] | None = None,
    hosts: Sequence[str] = ("n1", "n1"),
    memory: int = MEMORY,
    name: str = "steps_per_second",
) -> dict[str, Any]:
    """A report of a job with these steps a second in windows of a second; ``phases`` are seconds of a step."""
    made: dict[str, Any] = copy.deepcopy(JOB)
    made["exit_code"] = 0
    attempt = made["attempts"][0]
    first = attempt["instances"][0]
    seconds = [number + 1.0 for number in range(len(rates) + 3)]
    curves = {
        name: {"unit": "1/s", "seconds": seconds, "values": [None, 1.0, *rates, 2.0]},
        "run_delay": {"unit": "", "seconds": seconds, "values": [delay] * len(seconds)},
    }
    attempt["instances"] = [
        {
            **first,
            "index": index,
            "host": host,
            "num_steps": 100,
            "phase_seconds": {phase: value * 100 for phase, value in (phases or {}).get(index, {}).items()},
            "curves": curves,
            "peak_memory_bytes": memory,
        }
        for index, host in enumerate(hosts)
    ]
    return made


def read(made: object) -> JobRecord:
    """The report as it is read from a file."""
    return read_report(json.dumps(made), "r.json")


def compared(before: object, after: object) -> Comparison:
    """The comparison of two reports as written."""
    return compare(read(before), read(after))


def speed(before: object, after: object) -> Difference:
    """The difference of their speed."""
    return compared(before, after).differences[0]


def noisy(seed: int, rate: float, spread: float, count: int = 60) -> list[float]:
    """Rates around ``rate`` that wander as those of a machine with other work do."""
    draw = Random(seed)  # noqa: S311 - a made run
    walk, found = 0.0, []
    for _ in range(count):
        walk = 0.9 * walk + draw.gauss(0.0, spread)
        found.append(rate * max(0.1, 1 + walk + draw.gauss(0.0, spread)))
    return found


@pytest.mark.parametrize(
    ("spread", "changes"),
    [(0.0, {Change.NONE}), (0.003, {Change.NONE}), (0.03, {Change.NONE, Change.UNKNOWN}), (0.1, {Change.UNKNOWN})],
)
def test_equal_runs_have_no_difference(spread: float, changes: set[Change]) -> None:
    """Twenty in a row, on a quiet machine, and on machines with so much other work that it would hide one."""
    runs = [read(job(noisy(seed, 100.0, spread))) for seed in range(21)]
    found = [compare(*pair).differences[0] for pair in pairwise(runs)]

    assert {it.change for it in found} == changes
    assert all((it.change is Change.UNKNOWN) == (it.noise > 0.1) for it in found)
    assert all(" cannot be seen" in it.notes[0] for it in found if it.change is Change.UNKNOWN)


@pytest.mark.parametrize("factor", [0.9, 0.8])
def test_a_slower_program_is_found(factor: float) -> None:
    """By ten percent and more where the machine is quiet; the other way round it is a faster one."""
    runs = [(job(noisy(seed, 100.0, 0.003)), job(noisy(seed + 50, 100.0 * factor, 0.003))) for seed in range(20)]
    found = [speed(before, after) for before, after in runs]

    assert {it.change for it in found} == {Change.SLOWER}
    assert all(it.share == pytest.approx(1 / factor - 1, abs=0.03) and it.noise < 0.05 for it in found)
    assert {speed(after, before).change for before, after in runs} == {Change.FASTER}


def test_the_load_of_the_machine_is_no_difference() -> None:
    """Where instances waited for a core for as long as steps became longer; not what they waited at the start."""
    quiet = job([100.0] * 30)
    loaded, slow = job([50.0] * 30, delay=0.25), job([50.0] * 30, delay=0.05)

    assert speed(quiet, loaded).change is speed(loaded, quiet).change is Change.NONE
    assert speed(quiet, loaded).notes == ("all instances together waited 10 ms a step longer for a core",)
    assert speed(quiet, slow).change is Change.SLOWER
    late = job([50.0] * 30)
    for instance in late["attempts"][0]["instances"]:
        instance["curves"]["run_delay"]["values"][:2] = [9.0, 9.0]
    assert speed(quiet, late).change is Change.SLOWER


@pytest.mark.parametrize(
    ("phases", "hosts", "place"),
    [
        ({1: {"data": 0.003}}, "aab", "instance 1, in data: +2 ms a step"),
        ({0: {"forward": 0.003}, 1: {"forward": 0.0032}}, "aab", "host a, in forward: +2.1 ms a step"),
        ({it: {"backward": 0.003} for it in range(3)}, "aab", "all instances, in backward: +2 ms a step"),
        (
            {it: {"communication": 0.004} for it in range(3)},
            "aab",
            "all instances, in communication over the network: +3 ms a step",
        ),
        ({0: {"waiting": 0.003}, 2: {"data": 0.003}}, "aaa", "instance 2, in data: +2 ms a step"),
    ],
)
def test_where_a_difference_comes_from(phases: Mapping[int, Mapping[str, float]], hosts: str, place: str) -> None:
    """The phase, with the instance, host or all; communication only where no work became longer."""
    usual = {
        it: dict.fromkeys(("data", "forward", "backward", "communication", "waiting"), 0.001) for it in range(3)
    }
    slower = {it: {**usual[it], **phases.get(it, {})} for it in range(3)}
    before = job([100.0] * 12, phases=usual, hosts=tuple(hosts))
    after = job([1 / 0.012] * 12, phases=slower, hosts=tuple(hosts))

    assert speed(before, after).notes == (place,)


def test_long_steps_are_told_in_seconds() -> None:
    """And no change is told in powers of ten."""
    before, after = (job([1 / it] * 12, phases={1: {"data": it}}) for it in (20.0, 32.5))

    assert (speed(before, after).before, speed(before, after).after) == ("20 s", "32.5 s")
    assert speed(before, after).notes == ("instance 1, in data: +12.5 s a step",)


def test_memory() -> None:
    """More by twentieth and 32 MiB is more, with the instance that holds it."""
    _, more = compared(job([9.0] * 9), job([9.0] * 9, memory=2 * MEMORY)).differences
    _, less = compared(job([9.0] * 9, memory=2 * MEMORY), job([9.0] * 9)).differences
    _, same = compared(job([9.0] * 9), job([9.0] * 9, memory=MEMORY + 2**24)).differences

    assert (more.change, more.after, more.notes) == (Change.MORE, "800 MiB", ("of instance 1",))
    assert (less.change, same.change) == (Change.LESS, Change.NONE)


def test_what_has_no_steps_is_not_judged() -> None:
    """Nor what has few; samples stand for steps, and of many instances the median."""
    folded = job([9.0] * 9)
    for instance in folded["attempts"][0]["instances"]:
        curves = instance.pop("curves")
    folded["attempts"][0]["curves"] = {
        name: {"seconds": it["seconds"], "min": it["values"], "median": it["values"], "max": it["values"]}
        for name, it in curves.items()
    }

    assert speed(JOB, JOB).change is speed(job([9.0] * 5), job([5.0] * 5)).change is Change.UNKNOWN
    assert speed(folded, job([5.0] * 9)).change is Change.SLOWER
    assert speed(job([9.0] * 9, name="samples_per_second"), JOB).figure == "the whole run"
    samples = [job([rate] * 9, name="samples_per_second") for rate in (9.0, 5.0)]
    assert speed(job([9.0] * 9), samples[0]).change is Change.UNKNOWN
    assert (speed(*samples).figure, speed(*samples).change) == ("a sample", Change.SLOWER)


def test_the_command(tmp_path: Path) -> None:
    """It prints what differs first; with ``--fail-on-worse`` what is worse exits with 1."""
    files = {name: tmp_path / f"{name}.json" for name in ("usual", "slow", "short", "other", "never")}
    made = {name: job([100.0] * 20) for name in ("usual", "other")}
    made |= {"slow": job([80.0] * 20), "short": job([100.0] * 3)}
    made["other"]["plan"]["program"] = ["/bin/other"]
    made["never"] = {**JOB, "attempts": [], "error": "no MPI"}
    for name, file in files.items():
        file.write_text(json.dumps(made[name]))

    def run(*words: str) -> tuple[int, str]:
        words = tuple(str(files.get(word, word)) for word in words)
        result = CliRunner().invoke(report, ["compare", *words])
        return result.exit_code, result.output or str(result.exception)

    code, text = run("usual", "slow")
    assert (code, text.splitlines()[0]) == (0, "a step: 25.0% slower")
    assert run("usual", "slow", "--fail-on-worse")[0] == 1
    assert run("usual", "usual", "--fail-on-worse") == run("usual", "usual")
    assert run("usual", "usual")[1].startswith("no difference\n")
    assert run("usual", "short")[1].splitlines()[0] == "the whole run: not known"
    assert "two different programs: /bin/train --epochs 3 and /bin/other" in run("usual", "other")[1]
    assert "the job of the second report never ran: no MPI" in run("usual", "never")[1]
