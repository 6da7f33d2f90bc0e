"""Which counts fit together, and what an error proposes; the template of a tag, and what it becomes."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poprun.errors import PlanError
from poprun.plan.request import (
    POPRUN_TAG,
    TAG_FIELDS,
    USUAL_TAG,
    check_counts,
    check_tag_format,
    legal_instances,
)

VALUES = {
    "instance": "3",
    "local_instance": "1",
    "host": "b",
    "replicas": "6-7",
    "stage": "1",
    "shard": "0",
    "stream": "stderr",
}

pieces = st.lists(
    st.sampled_from(
        ["{", "}", "{{", "}}", "{instance}", "{host:>3}", "{stream:", "!r", "03", "{}", "{rank}", "\n"]
    )
).map("".join)


@pytest.mark.parametrize(
    ("template", "tag"),
    [
        (POPRUN_TAG, "[1,3]<stderr>:"),
        (USUAL_TAG, "[3] "),
        ("{host}/{local_instance} {replicas}|", "b/1 6-7|"),
        ("{instance:>3}{host:3}{stream:^8}|", "  3b   stderr |"),
        ("{{{instance}}}\t", "{3}\t"),
        (r"\t$", r"\t$"),
        ("", ""),
    ],
)
def test_fields_become_values(template: str, tag: str) -> None:
    """Everything else stays as it was typed."""
    check_tag_format(template)

    assert template.format_map(VALUES) == tag


@pytest.mark.parametrize(
    ("template", "what"),
    [
        ("{rank}", "there is no {rank}; there are {instance}, {local_instance}, {host}, {replicas}, {stage}, {sh"),
        ("{}", "there is no {}; there are {instance}"),
        ("{instance", "there is no field at '{instance'"),
        ("[{instance}}", "there is no field at '}'"),
        ("{instance!r}", "there is no field at '{instance!r}'"),
        ("{instance.__class__}", "there is no field at"),
        ("{instance:999999999}", "each with a width if you like, such as {instance:>3}, and {{ }} for braces"),
        ("{instance:03}", "there is no field at"),
    ],
)
def test_what_is_no_template(template: str, what: str) -> None:
    """The message names the fields there are."""
    with pytest.raises(PlanError) as caught:
        check_tag_format(template)
    assert what in str(caught.value)


@given(pieces)
def test_what_was_checked_can_be_filled(template: str) -> None:
    """No template fails later, and one that is refused breaks a rule."""
    try:
        check_tag_format(template)
    except PlanError:
        return
    assert isinstance(template.format_map(VALUES), str)


def test_every_field_has_a_value_here() -> None:
    """The tests above know all there are."""
    assert set(TAG_FIELDS) == set(VALUES)


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
        (2**31, None, 1, "--num-instances 2147483648 is not possible: it can be at most 1048576"),
        (1, 10**30, 1, f"--num-replicas {10**30} is not possible: it can be at most 1048576"),
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
