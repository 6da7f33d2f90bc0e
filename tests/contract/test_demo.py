"""The program that a new user runs first. Holds popdist.launching.demo."""

from tests.running import Poprun


def test_the_demo_prints_the_same_for_any_number_of_instances(poprun: Poprun) -> None:
    """Five epochs, each on one line, from instance 0 alone."""
    printed = [
        poprun(
            "-n",
            number,
            "--num-replicas",
            "2",
            "--tag-output=no",
            str(poprun.python),
            "-m",
            "popdist.launching.demo",
        )
        .succeeded()
        .lines
        for number in ("1", "2")
    ]

    assert printed[0] == printed[1]
    assert [line.partition(":")[0] for line in printed[0]] == [f"epoch {number}" for number in range(1, 6)]
