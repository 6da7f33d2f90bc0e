"""A plan as a file: written as JSON or YAML, read again as an equal plan, and checked. Pure.

Pure: the functions get values and return values or text. The file contains the values of the plan, with hosts and
cores as ranges. Reading is strict, because a person may have written the plan, and a wrong plan starts wrong
processes.
"""

import re
from dataclasses import fields, is_dataclass
from typing import Final

from poprun.errors import PlanError
from poprun.makers.maker import MAKERS
from poprun.plan.mpi_options import check_instance_variables
from poprun.plan.plan import LauncherKind, LaunchPlan
from poprun.plan.planner import check_settings
from poprun.plan.request import check_counts, check_ipus_per_replica, check_path
from poprun.plan.topology import ProcessPlacement
from poprun.text.fields import read_record, write_record
from poprun.text.input_files import YamlError, parse_json, parse_yaml
from poprun.text.ranges import fold_numbers

VERSION: Final = 1

_OPTION: Final = re.compile("--(?:vipu-)?([a-z-]+)")
_KEYS: Final = {
    **{
        inner.name.removesuffix("_seconds"): f"{section.name}.{inner.name}"
        for section in fields(LaunchPlan)
        if isinstance(section.type, type) and is_dataclass(section.type)
        for inner in fields(section.type)
    },
    **{field.name: field.name for field in fields(LaunchPlan)},
    "host_subnet": "remote.subnet",
    "instance_mpi_local_args": "instance_variables",
    "only_output_from_instance": "output.shown_instances",
    "parallelism": "mapping_path",
    "report": "ending.report_files",
    "trace": "trace.folder",
    "trace_seconds": "trace.seconds",
    "trace_steps": "trace.steps",
}
"""For each option of the command line its key in a plan's file: error messages about a file name the key."""


def plan_to_dict(plan: LaunchPlan) -> dict[str, object]:
    """Return ``plan`` as a dict for JSON or YAML, from which :func:`plan_from_dict` reads the plan."""
    return write_record(plan, version=VERSION)


def plan_from_dict(values: object, source: str) -> LaunchPlan:
    """Return the plan in ``values``, the parsed file ``source``. Raises PlanError if a key or value is wrong."""
    plan = read_record(LaunchPlan, values, source, version=VERSION)
    check_plan(plan, source)
    return plan


def read_plan(text: str, source: str) -> LaunchPlan:
    """Return the plan in ``text``, the JSON or YAML of the file ``source``. Raises PlanError if it is wrong."""
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
    """Raise PlanError if the values of a plan from the file ``source`` contradict each other."""
    try:
        check_counts(
            num_instances=plan.num_instances,
            num_replicas=plan.num_replicas,
            num_hosts=len(plan.hosts),
            instances_per_replica=plan.parallelism.instances_per_replica,
        )
        check_ipus_per_replica(plan.ipus_per_replica, plan.parallelism.instances_per_replica)
        check_path("--parallelism", plan.mapping_path)
        check_settings(plan, plan.num_instances, plan.parallelism)
        check_instance_variables(plan.instance_variables, plan.num_instances)
    except PlanError as error:
        message = _OPTION.sub(lambda option: _KEYS.get(option[1].replace("-", "_"), option[0]), str(error))
        raise PlanError(f"{source}: {message}") from None
    if not plan.cores:
        raise PlanError(f"{source}: cores is empty: a host has at least one")
    _check_bindings(plan, source)
    _check_devices(plan, source)
    if (plan.launcher is LauncherKind.MPI) != (plan.mpi is not None):
        raise PlanError(
            f"{source}: launcher is {plan.launcher} and mpi is {plan.mpi.path if plan.mpi else 'null'}: "
            "give mpi with launcher mpi, and null with the others"
        )
    if not plan.working_directory.startswith("/"):
        raise PlanError(f"{source}: working_directory is {plan.working_directory!r}: give an absolute path")


def _check_devices(plan: LaunchPlan, source: str) -> None:
    if plan.maker not in MAKERS:
        raise PlanError(f"{source}: maker is {plan.maker!r}: give one of {', '.join(MAKERS)}, or leave it out")
    fewest = plan.num_devices_per_instance if plan.vipu.shares_devices else plan.num_gpus_needed
    if plan.devices and not fewest <= len(plan.devices) <= plan.num_gpus_needed:
        raise PlanError(
            f"{source}: devices names {len(plan.devices)}, and the {plan.num_instances_per_host} instances of a "
            f"host use {plan.num_gpus_needed}, {plan.num_devices_per_instance} each: name as many, or none to "
            "compute on the CPU"
        )


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
