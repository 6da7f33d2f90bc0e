"""Jobs that are killed start again by themselves, and jobs that are asked to leave save first: no bit is lost.

The laws of preemption_laws.py hold in tests/contract/test_spawned_world.py.
"""

import os
import random
import re
import signal
import sys
from pathlib import Path

from tests.contract.forked_calls import ForkedWorlds
from tests.running import DEADLINE_SECONDS, Poprun

PROGRAM = Path(__file__).with_name("interrupted_training.py")
SEED = 5


def job(folder: Path, num_instances: int, *words: object) -> list[str]:
    """The words after ``poprun`` and its options."""
    counts = ["-n", str(num_instances), "--num-replicas", "4", "--tag-output=no"]
    return [*counts, sys.executable, str(PROGRAM), str(folder), *map(str, words)]


def alone(forked_world: ForkedWorlds, folder: Path) -> str:
    """The last line of a job that goes on with one instance."""
    ((*_, last),) = forked_world.script(PROGRAM, str(folder), num_instances=1, num_replicas=4)
    return last


def test_jobs_that_are_killed_or_asked_to_leave_end_as_one_that_nobody_disturbed(
    poprun: Poprun, forked_world: ForkedWorlds, tmp_path: Path
) -> None:
    """A job with two instances starts again by itself when its program is killed, and when an agent or a shim is.

    It saves and leaves when SIGTERM comes; one with one instance goes on until SIGUSR1, which was to leave with 0.
    """
    draw = random.Random(SEED)  # noqa: S311 - which instance dies when
    victims = ["program", draw.choice(["agent", "shim"])]
    kills = [
        f"--kill={i}:{draw.randrange(2)}:{draw.randrange(13 * i, 13 * i + 13)}:{it}"
        for i, it in enumerate(victims)
    ]
    first, second = draw.randrange(26, 32), draw.randrange(33, 55)
    options = ("--launcher=local", "--stop-timeout=40", "--max-restarts=50")
    restarts = []
    for num_instances, step, signum, code in ((2, first, signal.SIGTERM, 143), (1, second, signal.SIGUSR1, 0)):
        words = job(tmp_path / "disturbed", num_instances, "--wait-at", step, "--exit-code", code, *kills)
        with poprun.started(*options, *words) as process:
            assert process.stdout is not None
            assert f"waiting after {step} steps\n" in process.stdout  # reads on until it comes
            process.send_signal(signum)
            out, err = process.communicate(timeout=DEADLINE_SECONDS)

        assert process.returncode == code, err
        assert out.splitlines() == [f"left after {step + 1} steps"] * num_instances
        assert f"step-{step + 1:012d}" in os.listdir(tmp_path / "disturbed")  # noqa: PTH208 - the name alone
        restarts.append(re.findall(r"restart (\d+) of at most 50", err))
        kills = []

    assert restarts == [["1", "2"], []]
    assert alone(forked_world, tmp_path / "disturbed") == alone(forked_world, tmp_path / "whole")
