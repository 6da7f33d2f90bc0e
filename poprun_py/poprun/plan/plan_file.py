"""A plan as a file: written as JSON or YAML, read back to the same plan, and checked, for a person may write one.

Pure: values in, values and text out. The file states what the plan states, with hosts and cores as ranges, and
nothing that follows from it. Reading is strict, because a plan that is misread starts the wrong processes.
"""

import re
from dataclasses import fields
from typing import Final

from poprun.errors import PlanError
from poprun.plan.mpi_options import check_instance_variables
from poprun.plan.plan import LauncherKind, LaunchPlan
from poprun.plan.planner import check_settings
from poprun.plan.request import (
    EndingSettings,
    OutputSettings,
    RemoteSettings,
    VipuSettings,
    check_count,
    check_counts,
)
from poprun.plan.topology import ProcessPlacement
from poprun.text.fields import read_record, write_record
from poprun.text.input_files import YamlError, parse_json, parse_yaml
from poprun.text.ranges import fold_numbers

VERSION: Final = 1

_SECTIONS: Final = {
    "output": OutputSettings,
    "ending": EndingSettings,
    "vipu": VipuSettings,
    "remote": RemoteSettings,
}
_ALL_KEYS: Final = frozenset(
    (
        *(field.name for field in fields(LaunchPlan)),
        *(f"{name}.{field.name}" for name, section in _SECTIONS.items() for field in fields(section)),
    )
)
_RENAMED: Final = {
    "only_output_from_instance": "shown_instances",
    "report": "report_file",
    "instance_mpi_local_args": "instance_variables",
    "vipu_server_host": "server_host",
    "vipu_server_port": "server_port",
    "vipu_server_timeout": "server_timeout",
    "host_subnet": "subnet",
    "synchronise_python_venv": "synchronises_venv",
}
_OPTION: Final = re.compile("--([a-z-]+)")


def plan_to_dict(plan: LaunchPlan) -> dict[str, object]:
    """``plan`` as values that JSON and YAML know. Inverse of :func:`plan_from_dict`."""
    return write_record(plan, version=VERSION)


def plan_from_dict(values: object, source: str) -> LaunchPlan:
    """The plan that ``values`` of the file ``source`` state; a PlanError names the file, the key and the value."""
    plan = read_record(LaunchPlan, values, source, version=VERSION)
    check_plan(plan, source)
    return plan


def read_plan(text: str, source: str) -> LaunchPlan:
    """The plan in ``text``, JSON or YAML, of the file ``source``, which a PlanError names."""
    try:
        values = parse_json(text) if text.lstrip().startswith("{") else _read_yaml(text)
    except ValueError as error:
        raise PlanError(
            f"{source}: {error}: a plan is made with poprun --dry-run --topology-format json > plan.json"
        ) from None
    return plan_from_dict(values, source)


def _read_yaml(text: str) -> object:
    try:
        return parse_yaml(text)
    except YamlError as error:
        line = "" if error.line is None else f", line {error.line}"
        raise ValueError(f"neither JSON nor YAML ({error}{line})") from None


def check_plan(plan: LaunchPlan, source: str) -> None:
    """Check that the values of a plan that somebody wrote fit together as those of a made plan do."""
    try:
        check_counts(num_instances=plan.num_instances, num_replicas=plan.num_replicas, num_hosts=len(plan.hosts))
        check_count("--ipus-per-replica", plan.ipus_per_replica)
        check_settings(plan, plan.num_instances)
        check_instance_variables(plan.instance_variables, plan.num_instances)
    except PlanError as error:
        raise PlanError(f"{source}: {_OPTION.sub(_key_of, str(error))}") from None
    if not plan.cores:
        raise PlanError(f"{source}: cores is empty: a host has at least one")
    _check_bindings(plan, source)
    if plan.devices and len(plan.devices) != plan.num_gpus_per_host:
        raise PlanError(
            f"{source}: devices names {len(plan.devices)}, and the {plan.num_instances_per_host} instances of a "
            f"host use {plan.num_gpus_per_host}, {plan.ipus_per_replica} each: name as many, or none to compute "
            "on the CPU"
        )
    if (plan.launcher is LauncherKind.MPI) != (plan.mpi is not None):
        raise PlanError(
            f"{source}: launcher is {plan.launcher} and mpi is {plan.mpi.path if plan.mpi else 'null'}: "
            "give mpi with launcher mpi, and null with the others"
        )
    if not plan.working_directory.startswith("/"):
        raise PlanError(f"{source}: working_directory is {plan.working_directory!r}: give an absolute path")


def _check_bindings(plan: LaunchPlan, source: str) -> None:
    if not plan.bindings:
        return
    if plan.placement is ProcessPlacement.DISABLED:
        raise PlanError(f"{source}: placement is {plan.placement} and there are bindings: leave out one of them")
    if not all(binding.cores for binding in plan.bindings):
        raise PlanError(f"{source}: bindings: cores is empty: name the cores that an instance is bound to")
    bound = sorted(instance for binding in plan.bindings for instance in binding.instances)
    if bound != list(range(plan.num_instances_per_host)):
        raise PlanError(
            f"{source}: bindings names the instances {fold_numbers(bound) or 'of nobody'} of a host, and "
            f"it has {fold_numbers(range(plan.num_instances_per_host))}: name each of them once, or leave "
            "bindings empty to bind none"
        )


def _key_of(option: re.Match[str]) -> str:
    """The key that stands in a plan for an option of the command line."""
    name = option[1].replace("-", "_")
    name = _RENAMED.get(name, name).removeprefix("vipu_")
    keys = (name, *(f"{section}.{name}{unit}" for section in _SECTIONS for unit in ("", "_seconds")))
    return next((key for key in keys if key in _ALL_KEYS), option[0])
