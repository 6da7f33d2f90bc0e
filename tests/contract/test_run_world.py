"""run_world calls a function in a real job and tells how it ended.

Holds popdist.testing.__main__, popdist.testing and popdist.testing.world.
"""

import os
import sys
from pathlib import Path

import pytest

import popdist
from popdist.testing import run_world
from tests.running import run

SCRIPT = """
import popdist
from popdist.testing import run_world

class Place:
    def __init__(self, number):
        self.number = number

def place(start):
    return Place(start.number + popdist.local_replicas().start)

if __name__ == "__main__":
    print([place.number for place in run_world(place, Place(10), num_instances=2, num_replicas=4)])
"""


def fail(culprit: int) -> None:
    """One instance raises, the others return."""
    if popdist.instance_index() == culprit:
        raise ValueError(f"instance {culprit} is the culprit")


def die() -> None:
    """End without an exception."""
    os._exit(7)


def wait() -> None:
    """Never return."""
    sys.stdout.write("waiting\n")
    sys.stdout.flush()
    while True:
        os.read(os.pipe()[0], 1)


def test_results_come_in_instance_order_from_a_script_too(tmp_path: Path) -> None:
    """Functions and classes of ``__main__`` go there and back."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    assert run([sys.executable, str(script)]).succeeded().lines[-1] == "[10, 12]"


def place() -> tuple[int, int, int]:
    """Where this instance is: in which replica, which instance of the job, and how many replicas there are."""
    return popdist.replica_index(), popdist.instance_index(), popdist.num_replicas()


def test_several_instances_share_a_replica() -> None:
    """They stand next to each other."""
    assert run_world(place, num_instances=4, tensor=2) == [(0, 0, 2), (0, 1, 2), (1, 2, 2), (1, 3, 2)]
    with pytest.raises(
        popdist.WorldError, match=r"(?s)brought no result; poprun ended with code 2:.*replicas of 3"
    ):
        run_world(place, num_instances=4, tensor=3)


def test_a_failing_instance_is_told_with_its_traceback() -> None:
    """The error carries the traceback of the instance that raised."""
    with pytest.raises(popdist.WorldError, match=r"instance 1 of 2 raised:(.|\n)*in fail(.|\n)*is the culprit"):
        run_world(fail, 1, num_instances=2)


def test_a_dead_instance_is_told_with_popruns_words() -> None:
    """An instance that leaves no result is named, with the exit code."""
    with pytest.raises(popdist.WorldError, match=r"instance 0 of 1 brought no result; poprun ended with code 7"):
        run_world(die, num_instances=1)


def test_a_world_whose_time_is_up_is_stopped() -> None:
    """The time is a bound: nothing of the world is left."""
    with pytest.raises(popdist.WorldError, match="instances 0 and 1 of 2 brought no result; the time was up"):
        run_world(wait, num_instances=2, timeout_seconds=2)


def test_a_function_that_others_cannot_find_is_refused() -> None:
    """A lambda has no name to be found by."""
    with pytest.raises(popdist.WorldError, match="that a module defines by name"):
        run_world(lambda: None, num_instances=1)
