"""Jobs that are killed start again by themselves, and jobs that are asked to leave save first: no bit is lost."""

import os
import random
import signal
import sys
from pathlib import Path

import pytest

from tests.contract import preemption_laws
from tests.contract.forked_calls import ForkedWorlds
from tests.running import DEADLINE_SECONDS, Poprun

PROGRAM = Path(__file__).with_name("interrupted_training.py")
NUM_STEPS = 60
SEED = 5


def job(folder: Path, num_instances: int, *words: object) -> list[str]:
    """The words after ``poprun`` and its options."""
    counts = ["-n", str(num_instances), "--num-replicas", "4", "--tag-output=no"]
    return [*counts, sys.executable, str(PROGRAM), str(folder), *map(str, words)]


@pytest.fixture
def whole(forked_world: ForkedWorlds, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The last line of a job that nobody disturbed."""
    return alone(forked_world, tmp_path_factory.mktemp("whole"))


def alone(forked_world: ForkedWorlds, folder: Path) -> str:
    """The last line of a job that goes on with one instance."""
    ((*_, last),) = forked_world.script(PROGRAM, str(folder), num_instances=1, num_replicas=4)
    return last


def test_a_job_that_is_killed_starts_again_until_it_is_done(poprun: Poprun, tmp_path: Path, whole: str) -> None:
    """A program is killed and then an agent or a shim, each at any step: the end is that of the whole job."""
    draw = random.Random(SEED)  # noqa: S311 - which instance dies when
    victims = ["program", draw.choice(["agent", "shim"])]
    kills = [f"{i}:{draw.randrange(2)}:{draw.randrange(20 * i, 20 * i + 20)}:{it}" for i, it in enumerate(victims)]

    finished = poprun(
        "--launcher=local",
        "--max-restarts=50",
        *job(tmp_path, 2, *(f"--kill={it}" for it in kills)),
    ).succeeded()

    assert finished.out.splitlines()[-1] == whole
    assert "restart 2 of at most 50" in finished.err
    assert "restart 3" not in finished.err


def test_a_job_that_is_asked_to_leave_saves_and_goes_on_later(
    poprun: Poprun, forked_world: ForkedWorlds, tmp_path: Path, whole: str
) -> None:
    """SIGTERM with two instances, then SIGUSR1 with one, which was to leave with 0: the bits are the same."""
    draw = random.Random(SEED)  # noqa: S311 - when
    first, second = draw.randrange(25), draw.randrange(30, 55)
    options = ("--launcher=local", "--stop-timeout=40", "--max-restarts=3")
    for num_instances, step, signum, code in ((2, first, signal.SIGTERM, 143), (1, second, signal.SIGUSR1, 0)):
        words = job(tmp_path, num_instances, "--wait-at", step, "--exit-code", code)
        with poprun.started(*options, *words) as process:
            assert process.stdout is not None
            assert next(process.stdout) == f"waiting after {step} steps\n"
            process.send_signal(signum)
            out, err = process.communicate(timeout=DEADLINE_SECONDS)

        assert process.returncode == code, err
        assert out.splitlines() == [f"left after {step + 1} steps"] * num_instances
        assert f"step-{step + 1:012d}" in os.listdir(tmp_path)  # noqa: PTH208 - the name alone
        assert "restart" not in err
    assert alone(forked_world, tmp_path) == whole


def test_laws(forked_world: ForkedWorlds, tmp_path: Path) -> None:
    """Every law of preemption_laws.py, on both instances."""
    laws = forked_world(
        preemption_laws.run_all, tmp_path, num_instances=2, num_replicas=4, timeout_seconds=DEADLINE_SECONDS
    )
    assert laws == [len([name for name in vars(preemption_laws) if name.startswith("law_")])] * 2
