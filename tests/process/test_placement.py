"""Programs run on the cores that their plan binds them to, whatever starts them."""

import json
import os
import sys
from pathlib import Path

import pytest

from poprun.hosts.probe.machine import read_cpus, usable_cores
from poprun.text.ranges import fold_numbers
from tests.running import DEADLINE_SECONDS, Poprun, run

WHERE = """\
import json, os, subprocess, sys
ask = "import os; print(sorted(os.sched_getaffinity(0)))"
child = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
with open("/proc/self/numa_maps") as maps:
    policies = {line.split()[1] for line in maps}
own = sorted(os.sched_getaffinity(0))
print(json.dumps([int(os.environ["RANK"]), own, json.loads(child.stdout), [*policies]]))
"""


CORES = sorted(os.sched_getaffinity(0))


HOLD = """\
import os, sys
print(*sorted(os.sched_getaffinity(0)), flush=True)
sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def _pool_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cores are leased from a pool of the test's own, so that other jobs of the machine do not matter."""
    monkeypatch.setenv("POPRUN_POOL", str(tmp_path / "pool"))


def where(poprun: Poprun, *words: str, cwd: Path | None = None) -> list[tuple[set[int], set[int], set[str]]]:
    """What each instance tells: its cores, those of a child of its own, and the policies of its memory."""
    finished = poprun(*words, cwd=cwd).succeeded()
    told = sorted(json.loads(line) for line in finished.lines)
    return [(set(own), set(child), set(policies)) for _, own, child, policies in told]


@pytest.mark.skipif(len(CORES) == 1, reason="two instances cannot have a core each: there is one")
@pytest.mark.parametrize("placement", ["core", "compact"])
def test_each_instance_has_cores_of_its_own(launcher: Poprun, placement: str) -> None:
    """Its threads and its children run there, and no instance has one of another's."""
    layout = ("-n", "2", "--process-placement", placement, "--threads-per-replica", "1", "--no-tag-output")
    first, second = where(launcher, *layout, sys.executable, "-c", WHERE)

    assert first[0].isdisjoint(second[0])
    for own, child, _ in (first, second):
        assert own
        assert own < set(CORES)
        assert child == own


def test_nothing_is_bound_when_it_is_disabled(launcher: Poprun) -> None:
    """The programs may run wherever poprun may."""
    layout = ("-n", "2", "--process-placement", "disabled", "--no-tag-output")

    assert [told[0] for told in where(launcher, *layout, sys.executable, "-c", WHERE)] == [set(CORES)] * 2


def plan_with(poprun: Poprun, folder: Path, **changes: object) -> Path:
    """A plan file of two local instances of the program above, with some values changed."""
    words = ("--launcher", "local", "-n", "2", "--no-tag-output", "--dry-run", "--topology-format", "json")
    plan = json.loads(poprun(*words, sys.executable, "-c", WHERE, cwd=folder).succeeded().out)
    file = folder / "plan.json"
    file.write_text(json.dumps(plan | changes))
    return file


def binding(instances: str, cores: str, memory_nodes: str = "") -> dict[str, str]:
    """One entry of a plan's bindings."""
    return {"instances": instances, "cores": cores, "memory_nodes": memory_nodes}


def test_memory_is_bound_with_the_cores(poprun: Poprun, tmp_path: Path) -> None:
    """A plan's memory nodes hold for the program from its first page on, and only for the instances they name."""
    core = str(CORES[0])
    file = plan_with(poprun, tmp_path, bindings=[binding("0", core, "0"), binding("1", core)])
    first, second = where(poprun, "--plan", str(file))

    assert (first[0], first[2]) == ({CORES[0]}, {"bind:0"})
    assert (second[0], second[2]) == ({CORES[0]}, {"default"})


def test_a_plan_with_cores_that_are_not_here(poprun: Poprun, tmp_path: Path) -> None:
    """Before anything starts: the file, the cores, those there are, and the cure."""
    file = plan_with(poprun, tmp_path, bindings=[binding("0", str(CORES[0])), binding("1", "7000-7003")])
    finished = poprun("--plan", str(file))

    assert (finished.code, finished.out) == (2, "")
    assert f"{file}: bindings names cores 7000-7003, and this process may use core" in finished.err
    assert "make a new plan here" in finished.err


def test_a_plan_with_gpus_that_are_not_here(poprun: Poprun, tmp_path: Path) -> None:
    """An error, not a job that finds out by itself."""
    file = plan_with(poprun, tmp_path, devices=["70", "71"])
    finished = poprun("--plan", str(file))

    assert (finished.code, finished.out) == (2, "")
    assert f"{file}: devices names GPUs 70, 71, and " in finished.err


def test_a_plan_of_a_larger_machine(poprun: Poprun, tmp_path: Path) -> None:
    """Without a binding it starts, with a warning that says what differs."""
    file = plan_with(poprun, tmp_path, cores="0-1023", placement="disabled")
    finished = poprun("--plan", str(file)).succeeded()

    assert f"[W] {file} counts on 1024 cores, and there " in finished.told
    assert len(finished.lines) == 2


UNCHECKED = """\
import os, sys
from poprun.plan.plan_file import read_plan
from poprun.start import run_job
with open(sys.argv[1]) as file:
    sys.exit(run_job(read_plan(file.read(), sys.argv[1])))
"""


def test_cores_that_are_gone_when_the_program_is_to_start(poprun: Poprun, tmp_path: Path) -> None:
    """The agent finds them gone, starts nothing, and the report says which cores; the other instance is ended."""
    file = plan_with(poprun, tmp_path, bindings=[binding("0", str(CORES[0])), binding("1", f"{CORES[0]},7000")])
    finished = run([sys.executable, "-c", UNCHECKED, str(file)])

    assert finished.code == 70
    assert f"cannot be bound to cores {CORES[0]},7000, not all of which are to be had here" in finished.err


def one_core(*options: str, num_threads: int = 1) -> tuple[str, ...]:
    """The words of a job of one instance that has as many cores of its own as threads, tells them and waits."""
    placement = ("--process-placement", "compact", "--threads-per-replica", str(num_threads))
    return ("--launcher", "local", *placement, *options, sys.executable, "-c", HOLD)


@pytest.mark.skipif(
    len({cpu.core for cpu in read_cpus(CORES)}) == 1 or len(usable_cores()) < len(CORES),
    reason="two jobs cannot have a physical core each, or a control group grants less time than there are cores",
)
def test_two_jobs_have_different_cores(poprun: Poprun, tmp_path: Path) -> None:
    """Cores of one's own are leased: the next job gets others, or is told who has them, or waits for them."""
    many = one_core(num_threads=len(CORES))
    with poprun.started(*one_core()) as first:
        assert first.stdout is not None
        assert first.stdin is not None
        held = numbers(first.stdout.readline())
        other = numbers(poprun(*one_core()).succeeded().out)
        refused = poprun(*many)
        same = binding("0", fold_numbers(sorted(held)))
        file = plan_with(
            poprun, tmp_path, placement="core", bindings=[same], num_instances=1, num_replicas=1, devices=[]
        )
        fixed = poprun("--plan", str(file))
        with poprun.started("--wait-for-devices", *many) as patient:
            assert patient.stdout is not None
            assert patient.stdin is not None
            assert patient.stderr is not None
            waiting = patient.stderr.readline()
            first.stdin.write("\n")
            first.stdin.flush()
            everything = numbers(patient.stdout.readline())
            patient.stdin.write("\n")
            patient.stdin.flush()
            assert patient.wait(timeout=DEADLINE_SECONDS) == 0
        assert first.wait(timeout=DEADLINE_SECONDS) == 0

    assert held.isdisjoint(other)
    assert (refused.code, refused.out) == (69, "")
    assert f"the job needs {len(CORES)} cores, and {len(CORES) - len(held)} " in refused.err
    assert f"core/{fold_numbers(sorted(held))}: process " in refused.err
    assert (fixed.code, fixed.out) == (69, "")
    assert f"the job needs {len(held)} core" in fixed.err
    assert f"waiting: the job needs {len(CORES)} cores" in waiting
    assert everything == set(CORES)


def numbers(line: str) -> set[int]:
    """The numbers in a line."""
    return set(map(int, line.split()))
