"""What stands before each line, for one instance and for several."""

from typing import Any

import pytest

from poprun.job.output.lines import Tags
from poprun.plan.settings import OutputSettings
from tests.planning import planned


def tag(
    *instances: int, is_terminal: bool = False, is_coloured: bool = False, output: OutputSettings | None = None
) -> bytes:
    """The tag of a line of standard error in a job of eight instances on two hosts."""
    asked: dict[str, Any] = {"num_instances": 8, "num_replicas": 16, "hosts": ("n0", "n1")}
    plan = planned(**asked, output=output or OutputSettings())
    return Tags(plan, "stderr", is_terminal=is_terminal, is_coloured=is_coloured).of(instances)


def test_tools_find_what_poprun_writes() -> None:
    """PopRun's tag, in a pipe or a file."""
    assert tag(3) == b"[1,3]<stderr>:"
    assert tag(0, 1, 2, 5) == b"[1,0-2,5]<stderr>:"


def test_people_find_a_short_one() -> None:
    """In a colour of its own for each instance; what several printed has none."""
    assert tag(3, is_terminal=True) == b"[3] "
    assert tag(3, is_terminal=True, is_coloured=True) == b"\x1b[35m[3]\x1b[0m "
    assert tag(0, 1, is_terminal=True, is_coloured=True) == b"[0-1] "


def test_no_tags() -> None:
    """When they are switched off."""
    assert tag(3, output=OutputSettings(is_tagged=False)) == b""


@pytest.mark.parametrize(
    ("instances", "expected"),
    [
        ((5,), b"5 1 n1 10-11 stderr"),
        ((0, 1), b"0-1 0-1 n0 0-3 stderr"),
        ((1, 5), b"1,5 1 n[0-1] 2-3,10-11 stderr"),
    ],
)
def test_every_field_of_a_template(instances: tuple[int, ...], expected: bytes) -> None:
    """The values of several instances are folded."""
    template = "{instance} {local_instance} {host} {replicas} {stream}"
    output = OutputSettings(tag_format=template)

    assert tag(*instances, output=output) == expected
    coloured = tag(2, is_coloured=True, output=OutputSettings(tag_format="\udcff\t{instance}>  "))
    assert coloured == b"\x1b[32m\xff\t2>\x1b[0m  "
