"""Which counts fit together, and what an error proposes."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poprun.errors import PlanError
from poprun.plan.counts import check_counts, legal_instances


@pytest.mark.parametrize(
    ("instances", "replicas", "hosts", "message"),
    [
        (
            4,
            6,
            1,
            (
                "--num-replicas 6 does not divide over --num-instances 4; "
                "nearest: 4 or 8 replicas, or 2, 3 or 6 instances"
            ),
        ),
        (
            4,
            2,
            1,
            (
                "--num-instances 4 is more than --num-replicas 2: each instance needs a replica; "
                "nearest: 4 replicas, or 1 or 2 instances"
            ),
        ),
        (
            4,
            7,
            2,
            "--num-replicas 7 does not divide over --num-instances 4; nearest: 4 or 8 replicas",
        ),
        (
            3,
            None,
            2,
            "--num-instances 3 does not divide over the 2 hosts of --host; nearest: 2 or 4 instances, or 1 host",
        ),
        (
            1,
            8,
            4,
            "--num-instances 1 does not divide over the 4 hosts of --host; nearest: 4 or 8 instances, or 1 host",
        ),
        (0, None, 1, "--num-instances 0 is not possible: it must be at least 1"),
        (-2, 4, 1, "--num-instances -2 is not possible: it must be at least 1"),
        (1, 0, 1, "--num-replicas 0 is not possible: it must be at least 1"),
        (2**31, None, 1, "--num-instances 2147483648 is not possible: it can be at most 2147483647"),
        (1, 10**30, 1, f"--num-replicas {10**30} is not possible: it can be at most 2147483647"),
    ],
)
def test_what_is_refused(instances: int, replicas: int | None, hosts: int, message: str) -> None:
    """The message says what was asked, the rule, and the nearest legal choices."""
    with pytest.raises(PlanError) as caught:
        check_counts(num_instances=instances, num_replicas=replicas, num_hosts=hosts)
    assert str(caught.value) == message


@given(st.integers(1, 60), st.none() | st.integers(1, 60), st.integers(1, 12))
def test_every_proposal_is_legal(instances: int, replicas: int | None, hosts: int) -> None:
    """Whatever an error proposes instead of one count is legal with the others."""
    try:
        check_counts(num_instances=instances, num_replicas=replicas, num_hosts=hosts)
    except PlanError as error:
        proposals = re.search(r"nearest: (.*)", str(error))
        assert proposals is not None, "an illegal choice has legal neighbours"
        for numbers, noun in re.findall(r"([0-9, or]+) (replica|instance)s?", proposals[1]):
            for number in map(int, re.findall(r"[0-9]+", numbers)):
                check_counts(
                    num_instances=number if noun == "instance" else instances,
                    num_replicas=number if noun == "replica" else replicas,
                    num_hosts=hosts,
                )


@given(st.integers(1, 500), st.integers(1, 20))
def test_legal_instances_are_all_there_are(replicas: int, hosts: int) -> None:
    """They divide the replicas, are multiples of the hosts, and none is left out."""
    expected = [n for n in range(1, replicas + 1) if replicas % n == 0 and n % hosts == 0]

    assert legal_instances(replicas, hosts) == expected
