"""The program that a new user runs first; test_readme.py runs its command. Holds popdist.launching.demo."""

import io
from contextlib import redirect_stdout

from popdist.launching import demo
from tests.contract.forked_calls import ForkedWorlds
from tests.running import DEADLINE_SECONDS


def printed() -> list[str]:
    """The lines that this instance prints."""
    with redirect_stdout(io.StringIO()) as out:
        demo.main()
    return out.getvalue().splitlines()


def test_the_demo_prints_the_same_for_any_number_of_instances(forked_world: ForkedWorlds) -> None:
    """Five epochs, each on one line, from instance 0 alone."""
    (alone,), (first, second) = (
        forked_world(printed, num_instances=number, num_replicas=2, timeout_seconds=DEADLINE_SECONDS)
        for number in (1, 2)
    )

    assert (first, second) == (alone, [])
    assert [line.partition(":")[0] for line in alone] == [f"epoch {number}" for number in range(1, 6)]
