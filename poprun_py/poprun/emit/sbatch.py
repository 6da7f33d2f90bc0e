"""A plan as a batch script of Slurm, in which poprun starts the job on the nodes that Slurm gives.

Source: sbatch(1). Its lines ask for what the plan needs, so poprun finds in the allocation what it was asked for.
"""

import math
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from poprun.emit.kubernetes import job_name
from poprun.errors import UsageError
from poprun.plan.plan import LaunchPlan
from poprun.plan.planner import THIS_MACHINE
from poprun.render.words import size_of
from poprun.text.host_names import fold_hosts

if TYPE_CHECKING:
    from poprun.emit import Surroundings

_HOUR_MINUTES: Final = 60
_QUOTED: Final = frozenset(" \t\"'#")


def write(plan: LaunchPlan, surroundings: "Surroundings") -> str:
    """``plan`` as a script for sbatch.

    Raises:
        UsageError: If the working directory or a word has a line break in it, which a line of sbatch cannot hold.
    """
    command = shlex.join((surroundings.python, "-m", "poprun", *surroundings.options, *plan.program))
    if "\n" in plan.working_directory or "\r" in plan.working_directory:
        raise UsageError(f"--emit sbatch: the working directory {plan.working_directory!r} has a line break in it")
    lines = [f"#SBATCH --{name}={_value(value)}" for name, value in _directives(plan)]
    return "\n".join(["#!/bin/bash", f"# {size_of(plan)}", *lines, "", f"exec {command}", ""])


def _directives(plan: LaunchPlan) -> Iterator[tuple[str, str]]:
    name = job_name(plan)
    yield "job-name", name
    yield "output", f"{name}-%j.out"
    yield "chdir", plan.working_directory
    yield "nodes", str(len(plan.hosts))
    if plan.hosts != (THIS_MACHINE,):
        yield "nodelist", fold_hosts(plan.hosts)
    yield "ntasks-per-node", str(plan.num_instances_per_host)
    if plan.threads_per_replica is not None:
        yield "cpus-per-task", str(plan.threads_per_replica)
    if plan.devices:
        yield "gpus-per-node", str(plan.num_slots_per_host)
    if plan.ending.timeout_seconds is not None:
        yield "time", _time(plan.ending.timeout_seconds)


def _time(seconds: float) -> str:
    """Slurm counts minutes; one more leaves poprun the time to end the job itself."""
    hours, minutes = divmod(math.ceil(seconds / 60) + 1, _HOUR_MINUTES)
    return f"{hours:02}:{minutes:02}:00"


def _value(text: str) -> str:
    if not _QUOTED & set(text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
