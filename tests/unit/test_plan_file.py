"""A plan that is written and read is the same plan; anything else in a file is refused by name.

Holds poprun.text, poprun.text.fields and poprun.plan.plan.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given

from poprun.errors import PlanError
from poprun.plan.plan import LaunchPlan
from poprun.plan.plan_file import plan_from_dict, plan_to_dict, read_plan
from poprun.plan.render import render_plan
from poprun.plan.request import VipuSettings
from poprun.text.fields import write_record
from poprun.text.screen import TopologyFormat
from tests.planning import CLUSTER_NODE, planned, plans

Values = dict[str, object]


@given(plans())
def test_a_plan_reads_back(plan: LaunchPlan) -> None:
    """plan_from_dict is the inverse of plan_to_dict, and of what JSON and YAML make of it."""
    assert plan_from_dict(plan_to_dict(plan), "plan") == plan
    assert read_plan(render_plan(plan, TopologyFormat.JSON), "plan") == plan
    assert read_plan(render_plan(plan, TopologyFormat.YAML), "plan") == plan


def test_a_file_states_ranges() -> None:
    """The file of a job on a thousand hosts is as long as that of a job on one."""
    plan = planned(CLUSTER_NODE, hosts=tuple(f"n{i:04}" for i in range(1024)), num_instances=65_536)

    assert plan_to_dict(plan) == {
        "version": 1,
        "program": ["/bin/train", "--epochs", "3"],
        "working_directory": "/home/me",
        "hosts": "n[0000-1023]",
        "num_instances": 65_536,
        "num_replicas": 65_536,
        "ipus_per_replica": 1,
        "cores": "0-63",
        "devices": [],
        "placement": "spreadnuma",
        "bindings": [],
        "threads_per_replica": 1,
        "is_deterministic": False,
        "launcher": "mpi",
        "mpi": {"kind": "mpich", "path": "/opt/mpich/bin/mpiexec", "version": "5.0.2", "forker": None},
        "mpi_global_args": [],
        "mpi_local_args": [],
        "variables": {},
        "instance_variables": {},
        "executable_cache_path": None,
        "output": {
            "shown_instances": None,
            "is_tagged": None,
            "tag_format": None,
            "is_folded": False,
            "log_dir": None,
            "has_monitor": False,
        },
        "ending": {
            "stop_timeout_seconds": 5.0,
            "start_timeout_seconds": 60.0,
            "timeout_seconds": None,
            "max_restarts": 0,
            "hang_report_seconds": 120.0,
            "hang_timeout_seconds": None,
            "report_files": [],
        },
        "remote": {"subnet": None, "ssh_config": None, "synchronises_venv": False, "slurm_job": None},
    }


def test_a_plan_of_an_older_poprun_is_read() -> None:
    """One from when an instance counted ``ipus_per_replica`` virtual IPUs: the counts are worked out anew."""
    written = (Path(__file__).parent / "plans" / "instances_counted.json").read_text(encoding="utf-8")
    plan = read_plan(written, "old.json")

    assert [plan.instance(index).ipus for index in range(2)] == [range(8), range(8, 16)]
    assert [plan.instance(index).devices for index in range(2)] == [("0", "1"), ("2", "3")]
    assert plan_from_dict(plan_to_dict(plan), "new.json") == plan


def changed(**values: object) -> Callable[[Values], Values]:
    """A change of some values of a plan file."""
    return lambda plan: plan | values


def nested(key: str, **values: object) -> Callable[[Values], Values]:
    """A change of some values of the mapping under ``key``."""

    def change(plan: Values) -> Values:
        inner = plan.get(key, write_record(VipuSettings()))
        assert isinstance(inner, dict)
        return plan | {key: inner | values}

    return change


def bound(*pairs: tuple[str, str]) -> Callable[[Values], Values]:
    """A change of the bindings, to these instances and their cores."""
    bindings = [{"instances": instances, "cores": cores, "memory_nodes": ""} for instances, cores in pairs]
    return changed(bindings=bindings)


def without(key: str) -> Callable[[Values], Values]:
    """A plan file that lacks ``key``."""
    return lambda plan: {name: value for name, value in plan.items() if name != key}


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (changed(version=2), "version 2: this poprun reads version 1"),
        (changed(version="1"), "version must be a whole number, not '1'"),
        (without("version"), "version is missing"),
        (without("cores"), "cores is missing"),
        (changed(colour="red"), "colour is no key of a plan; its keys are version, program,"),
        (changed(num_instances="2"), "num_instances must be a whole number, not '2'"),
        (changed(num_instances=True), "num_instances must be a whole number, not true"),
        (changed(num_instances=2.0), "num_instances must be a whole number, not 2.0"),
        (changed(num_instances=3), "num_replicas 4 does not divide over num_instances 3"),
        (changed(num_instances=0), "plan.json: num_instances 0 is not possible"),
        (changed(ipus_per_replica=0), "plan.json: ipus_per_replica 0 is not possible"),
        (changed(threads_per_replica=0), "plan.json: threads_per_replica 0 is not possible"),
        (
            nested("output", shown_instances="0-2"),
            "plan.json: output.shown_instances 2: there is no such instance",
        ),
        (nested("output", tag_format="\ud800"), "output.tag_format must be text that UTF-8 can hold"),
        (nested("ending", stop_timeout_seconds=-1), "plan.json: ending.stop_timeout_seconds -1 is not possible"),
        (nested("ending", stop_timeout_seconds="5"), "ending.stop_timeout_seconds must be a number, not '5'"),
        (nested("ending", stop_timeout_seconds=float("nan")), "plan.json: ending.stop_timeout_seconds nan"),
        (nested("ending", max_restarts=-1), "plan.json: ending.max_restarts -1 is not possible"),
        (nested("vipu", partition_attempts=0), "plan.json: vipu.partition_attempts 0 is not possible"),
        (nested("vipu", num_ilds=3), "plan.json: vipu.num_ilds 3 is more than num_instances 2"),
        (nested("vipu", server_timeout_seconds=0), "plan.json: vipu.server_timeout_seconds 0 is not possible"),
        (
            nested("vipu", partition=""),
            "plan.json: vipu.partition '' is not possible: a name has characters that can be printed",
        ),
        (changed(variables={"A": 1}), "variables.A must be text, not 1"),
        (changed(variables=["A"]), "variables must be a mapping of names to values, not ['A']"),
        (changed(instance_variables={"one": {}}), "instance_variables.one: the key must be a number such as '0'"),
        (changed(instance_variables={"2": {"A": None}}), "instance_variables 2: there is no such instance"),
        (nested("ending", patience=1), "ending.patience is no key of a plan"),
        (changed(output=None), "output must be a mapping of names to values, not null"),
        (changed(program="train"), "program must be a list of texts, not 'train'"),
        (changed(program=["train", 3]), "program must be a list of texts that a program can be given"),
        (changed(working_directory="work"), "working_directory is 'work': give an absolute path"),
        (changed(hosts="n[2-1]"), "hosts: --host 'n[2-1]': the range 2-1 runs backwards"),
        (changed(cores="0-"), "cores: '0-' is no list of numbers and ranges"),
        (changed(cores=""), "cores is empty"),
        (changed(devices=["0"]), "devices names 1, and the 2 instances of a host use 2, 1 each"),
        (changed(placement="core2"), "placement must be spreadnuma or compact or core or disabled, not 'core2'"),
        (changed(bindings=None), "bindings must be a list of mappings, not null"),
        (changed(bindings=[3]), "bindings[0] must be a mapping of names to values, not 3"),
        (changed(bindings=[{"instances": "0-1"}]), "bindings[0].cores, bindings[0].memory_nodes are missing"),
        (bound(("0", "0")), "bindings names the instances 0 of a host, and it has 0-1: name each of them once"),
        (bound(("0-1", "0"), ("1", "1")), "bindings names the instances 0-1,1 of a host, and it has 0-1"),
        (bound(("0-1", "")), "bindings: cores is empty"),
        (bound(("0-1", "0-")), "bindings[0].cores: '0-' is no list of numbers"),
        (
            lambda plan: bound(("0-1", "0"))(plan) | {"placement": "disabled"},
            "placement is disabled and there are bindings",
        ),
        (changed(launcher="slurm"), "launcher must be mpi or local or srun, not 'slurm'"),
        (changed(launcher="local"), "launcher is local and mpi is /opt/mpich/bin/mpiexec"),
        (changed(mpi=None), "launcher is mpi and mpi is null"),
        (changed(mpi="mpich"), "mpi must be a mapping of names to values, not 'mpich'"),
        (changed(mpi={"kind": "mpich", "path": "/x", "forker": None}), "mpi.version is missing"),
        (
            changed(mpi={"kind": "lam", "path": "/x", "version": "7", "forker": None}),
            "mpi.kind must be mpich or open_mpi, not 'lam'",
        ),
        (changed(is_deterministic=None), "is_deterministic must be true or false, not null"),
        (nested("output", is_tagged="yes"), "output.is_tagged must be true or false, not 'yes'"),
    ],
)
def test_what_is_refused(change: Callable[[Values], Values], what: str) -> None:
    """A file that is not exactly a plan is refused, by the file, the key and what was found."""
    plan = change(plan_to_dict(planned(CLUSTER_NODE, num_instances=2, num_replicas=4)))

    with pytest.raises(PlanError) as caught:
        read_plan(json.dumps(plan), "plan.json")
    assert str(caught.value).startswith("plan.json: ")
    assert what in str(caught.value)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "plan.json: the file must be a mapping of names to values, not null"),
        ("[]", "the file must be a mapping of names to values, not []"),
        ("{", "plan.json: Expecting property name"),
        ("{'a'", "plan.json: Expecting property name"),
        ('{"version": 1, "version": 1}', "version comes twice"),
        ("a: [", "neither JSON nor YAML"),
        ("\0", "neither JSON nor YAML"),
        ("!!python/object/apply:os.getpid []", "neither JSON nor YAML"),
    ],
)
def test_files_that_hold_no_mapping(text: str, what: str) -> None:
    """Text that is no JSON and no YAML, or another value than a mapping, and tags that would run code."""
    with pytest.raises(PlanError) as caught:
        read_plan(text, "plan.json")
    assert what in str(caught.value)


@pytest.mark.parametrize("word", ["a\0b", "\ud800"])
def test_words_that_no_program_can_be_given_are_refused(word: str) -> None:
    """Before anything starts, and with the key."""
    values = plan_to_dict(planned()) | {"program": ["echo", word]}

    with pytest.raises(PlanError, match="program must be a list of texts that a program can be given"):
        plan_from_dict(values, "plan.json")
