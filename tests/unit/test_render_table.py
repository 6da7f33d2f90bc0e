"""The table for a person: golden text, and a bound on its size.

Holds poprun.plan.render.words.
"""

import re
from typing import Any

import pytest

from poprun.plan.render import render_plan
from poprun.plan.render.table import Details
from poprun.plan.topology import MachineFacts, ProcessPlacement
from poprun.text.ranges import parse_hosts
from poprun.text.screen import TopologyFormat
from tests.machines import EIGHT_NODES, TWO_SOCKETS, facts_of
from tests.planning import CLUSTER_NODE, LAPTOP, planned, with_gpus

LAPTOP_TABLE = """\
poprun     2 instances · 4 replicas · 4 virtual IPUs · 1 host

host        instance   replicas   device
────────────────────────────────────────────────────
localhost   0          0-1        cores 0-1 in turns
            1          2-3        cores 2-3 in turns

launcher   local
threads    1 per replica
program    /bin/train --epochs 3
folder     /home/me
"""

GPU_TABLE = """\
poprun     2 instances · 2 replicas · 4 virtual IPUs · 2 hosts

host   instance   replicas   virtual IPUs   device
────────────────────────────────────────────────────
a      0          0          0-1            GPUs 1,3
b      1          1          0-1            GPUs 1,3

launcher   local
threads    4 per replica
program    /bin/train --epochs 3
folder     /home/me
"""

CLUSTER_TABLE = """\
poprun     8,192 instances · 65,536 replicas · 65,536 virtual IPUs · 1,024 hosts

host           instance   replicas      device
────────────────────────────────────────────────────────────
n0000          0          0-7           cores 0-7 in turns
               1          8-15          cores 8-15 in turns
               2          16-23         cores 16-23 in turns
               3          24-31         cores 24-31 in turns
               4          32-39         cores 32-39 in turns
               5          40-47         cores 40-47 in turns
               6          48-55         cores 48-55 in turns
               7          56-63         cores 56-63 in turns
n[0001-1022]   8-8183     64-65471      the same on each
n1023          8184       65472-65479   cores 0-7 in turns
"""

TURNS_TABLE = """\
host        instance   replicas   device
────────────────────────────────────────────────
localhost   0          0-3        GPU 0 in turns
            1          4-7        GPU 2 in turns
"""

MANY_INSTANCES_TABLE = """\
host        instance   replicas   device
─────────────────────────────────────────────
localhost   0          0          cores 0-3
            1          1          cores 4-7
            2          2          cores 8-11
            3-14       3-14       and so on
            15         15         cores 60-63
"""


PLACED_TABLE = """\
placement  spreadnuma
           instances 0-1: cores 0,2,4,6,8,10,12,14, memory of node 0
           instances 2-3: cores 1,3,5,7,9,11,13,15, memory of node 1
launcher   local
threads    4 per replica
program    /bin/train --epochs 3
"""

PLACED_HOSTS_TABLE = """\
placement  core, on each host
           local instance 0: cores 0-3, memory of node 0
           local instance 1: cores 4-7, memory of node 0
           local instance 2: cores 8-11, memory of node 1
           12 more like these
           local instance 15: cores 60-63, memory of node 7
"""


@pytest.mark.parametrize(
    ("machine", "asked", "table"),
    [
        (LAPTOP, {"num_instances": 2, "num_replicas": 4}, LAPTOP_TABLE),
        (with_gpus("bfbf"), {"hosts": ("a", "b"), "num_instances": 2, "ipus_per_replica": 2}, GPU_TABLE),
        (
            CLUSTER_NODE,
            {"hosts": parse_hosts("n[0000-1023]"), "num_instances": 8192, "num_replicas": 65_536},
            CLUSTER_TABLE,
        ),
        (with_gpus("fbf"), {"num_instances": 2, "num_replicas": 8}, TURNS_TABLE),
        (CLUSTER_NODE, {"num_instances": 16}, MANY_INSTANCES_TABLE),
        (facts_of(TWO_SOCKETS), {"num_instances": 4}, PLACED_TABLE),
        (
            facts_of(EIGHT_NODES),
            {"hosts": ("a", "b"), "num_instances": 32, "placement": ProcessPlacement.CORE},
            PLACED_HOSTS_TABLE,
        ),
    ],
)
def test_the_table(machine: MachineFacts, asked: dict[str, Any], table: str) -> None:
    """Hosts, instances, replicas, virtual IPUs and what each stands for; equal hosts and many instances folded."""
    assert table in render_plan(planned(machine, **asked), TopologyFormat.TABLE)


def test_details() -> None:
    """``-v`` adds origins of options, the exact command, in one line that a shell takes, and variables."""
    details = Details(
        command=("/opt/mpich/bin/mpiexec", "-n", "3", "a b"),
        num_commands=3,
        origins=(("host", "a,b", "POPRUN_HOST"), ("mpi-local-args", "-x " * 12, "job.yaml:3")),
        environment={"RANK": "0", "A": "x y"},
        frameworks={"torch": {"RANK": "0"}},
    )
    table = render_plan(planned(), TopologyFormat.TABLE, details=details, width=40)

    assert table.endswith(
        "options    host            a,b                       POPRUN_HOST\n"
        f"           mpi-local-args  {'-x ' * 12}  job.yaml:3\n"
        "command    /opt/mpich/bin/mpiexec -n 3 'a b'\n"
        "           and 2 more like it\n"
        "variables  of instance 0\n"
        "           A=x y\n"
        "           RANK=0\n"
        "frameworks what instance 0 is told for each; port 0 stands for one that the start chooses\n"
        "           torch: RANK=0\n"
    )


def test_colour_changes_no_character() -> None:
    """Without its escape sequences the coloured table is the plain one."""
    plan = planned(CLUSTER_NODE, num_instances=16)
    coloured = render_plan(plan, TopologyFormat.TABLE, has_color=True)
    plain = "\n".join(line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", coloured).splitlines()) + "\n"

    assert "\x1b[" in coloured
    assert plain == render_plan(plan, TopologyFormat.TABLE)


@pytest.mark.parametrize("topology_format", ["table", "text", "json", "yaml"])
@pytest.mark.parametrize("hosts", ["n[0000-1023]", "r[0-31]n[0-31]"])
def test_the_largest_plans_fit_a_screen(topology_format: str, hosts: str) -> None:
    """65,536 replicas on 1,024 hosts are at most 80 lines in every format that is no picture, however placed."""
    for machine in (CLUSTER_NODE, facts_of(TWO_SOCKETS)):
        plan = planned(machine, hosts=parse_hosts(hosts), num_instances=65_536, num_replicas=65_536)

        assert render_plan(plan, TopologyFormat(topology_format)).count("\n") <= 80


def test_a_narrow_terminal_does_not_take_the_cells_apart() -> None:
    """Virtual IPUs make room; below the width of the others rows stay whole, and the terminal wraps them."""
    plan = planned(num_instances=2, num_replicas=4, ipus_per_replica=2)
    least, narrow, wide = (render_plan(plan, TopologyFormat.TABLE, details=None, width=w) for w in (20, 40, 60))
    rows = narrow.splitlines()[2:6]

    assert least == narrow
    assert ("   virtual IPUs" in narrow, "   virtual IPUs" in wide) == (False, True)
    assert rows[0].split() == ["host", "instance", "replicas", "device"]
    assert "localhost  0         0-1" in narrow
    assert max(map(len, rows)) <= 40


def test_a_terminal_obeys_nothing_in_a_plan() -> None:
    """A plan file may be another user's: its control characters are shown; bytes that are no text stay."""
    plan = planned(program=("echo", "a\x1b[31m\x07b", "c\udce9", "d\ne"))

    assert "program    echo 'a\\x1b[31m\\x07b' 'c\udce9' 'd\ne'\n" in render_plan(plan, TopologyFormat.TABLE)
