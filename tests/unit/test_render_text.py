"""PopRun's own table, character by character.

Holds poprun.plan.render and poprun.plan.render.text.
"""

from typing import Any

import pytest

from poprun.plan.render import render_plan
from poprun.plan.render.text import MAX_WIDTH
from poprun.text.screen import TopologyFormat
from tests.machines import TWO_SOCKETS, TWO_SOCKETS_WITH_SMT, facts_of
from tests.planning import LAPTOP, planned

ONE_HOST = """\
 ===========================
|      poprun topology      |
|===========================|
| hosts     |   localhost   |
|-----------|---------------|
| ILDs      |       0       |
|-----------|---------------|
| instances |   0   |   1   |
|-----------|---------------|
| replicas  | 0 | 1 | 2 | 3 |
 ---------------------------
"""

WIDE_HOST = """\
 =======================================
|            poprun topology            |
|=======================================|
| hosts     | a-host-with-a-wide-name-1 |
|-----------|---------------------------|
| ILDs      |             0             |
|-----------|---------------------------|
| instances |      0      |      1      |
|-----------|---------------------------|
| replicas  | 0           | 1           |
 ---------------------------------------
"""

NARROW = """\
 =================
| poprun topology |
|=================|
| hosts     |  a  |
|-----------|-----|
| ILDs      |  0  |
|-----------|-----|
| instances |  0  |
|-----------|-----|
| replicas  | 0   |
 -----------------
"""

PLACED = """\
 =======================================
|            poprun topology            |
|=======================================|
| hosts     |         localhost         |
|-----------|---------------------------|
| ILDs      |             0             |
|-----------|---------------------------|
| instances |      0      |      1      |
|-----------|---------------------------|
| cores     |  0-7,16-23  | 8-15,24-31  |
|-----------|---------------------------|
| replicas  | 0    | 1    | 2    | 3    |
 ---------------------------------------
"""

TWO_DIGITS = """\
 =======================================================================
|                            poprun topology                            |
|=======================================================================|
| hosts     |             n0              |             n1              |
|-----------|-----------------------------------------------------------|
| ILDs      |                             0                             |
|-----------|-----------------------------------------------------------|
| instances |      0       |      1       |      2       |      3       |
|-----------|-----------------------------------------------------------|
| replicas  | 0  | 1  | 2  | 3  | 4  | 5  | 6  | 7  | 8  | 9  | 10 | 11 |
 -----------------------------------------------------------------------
"""

FOLDED_REPLICAS = """\
 =============================
|       poprun topology       |
|=============================|
| hosts     |   n0   |   n1   |
|-----------|-----------------|
| ILDs      |        0        |
|-----------|-----------------|
| instances |   0    |   1    |
|-----------|-----------------|
| replicas  | 0-63   | 64-127 |
 -----------------------------
"""

FOLDED_INSTANCES = """\
 =============================
|       poprun topology       |
|=============================|
| hosts     |   n0   |   n1   |
|-----------|-----------------|
| ILDs      |        0        |
|-----------|-----------------|
| instances |  0-31  | 32-63  |
|-----------|-----------------|
| replicas  | 0-63   | 64-127 |
 -----------------------------
"""

FOLDED_HOSTS = """\
 ==========================
|     poprun topology      |
|==========================|
| hosts     | n[0000-1023] |
|-----------|--------------|
| ILDs      |      0       |
|-----------|--------------|
| instances |    0-4095    |
|-----------|--------------|
| replicas  | 0-65535      |
 --------------------------
"""

N_1024 = tuple(f"n{i:04}" for i in range(1024))


@pytest.mark.parametrize(
    ("asked", "table"),
    [
        ({"num_instances": 2, "num_replicas": 4}, ONE_HOST),
        ({"num_instances": 2, "hosts": ("a-host-with-a-wide-name-1",)}, WIDE_HOST),
        ({"hosts": ("a",)}, NARROW),
        ({"num_instances": 4, "num_replicas": 12, "hosts": ("n0", "n1")}, TWO_DIGITS),
        ({"num_instances": 2, "num_replicas": 128, "hosts": ("n0", "n1")}, FOLDED_REPLICAS),
        ({"num_instances": 64, "num_replicas": 128, "hosts": ("n0", "n1")}, FOLDED_INSTANCES),
        ({"num_instances": 4096, "num_replicas": 65_536, "hosts": N_1024}, FOLDED_HOSTS),
    ],
)
def test_the_table(asked: dict[str, Any], table: str) -> None:
    """Cells span what belongs to them; the table is as narrow as its texts allow, and folded when it is wide."""
    assert render_plan(planned(**asked), TopologyFormat.TEXT) == table


def test_the_cores_that_instances_are_bound_to() -> None:
    """They have a row of their own, below the instances."""
    plan = planned(facts_of(TWO_SOCKETS_WITH_SMT), num_instances=2, num_replicas=4)

    assert render_plan(plan, TopologyFormat.TEXT) == PLACED


@pytest.mark.parametrize("hosts", [1, 2, 7, 40, 300])
@pytest.mark.parametrize("per_host", [1, 3, 16, 200])
@pytest.mark.parametrize("local", [1, 4, 17])
def test_every_table_is_a_rectangle_of_bounded_width(hosts: int, per_host: int, local: int) -> None:
    """All lines between the rules are equally wide, at any counts, and never wider than MAX_WIDTH allows."""
    names = tuple(f"host-{index * index}.example.org" for index in range(hosts))
    num_instances = hosts * per_host
    for machine in (LAPTOP, facts_of(TWO_SOCKETS)):
        plan = planned(machine, hosts=names, num_instances=num_instances, num_replicas=num_instances * local)
        first, *lines, last = render_plan(plan, TopologyFormat.TEXT).splitlines()

        assert {len(line) for line in lines} == {len(first) + 1}
        assert len(last) == len(first) <= MAX_WIDTH + 14
