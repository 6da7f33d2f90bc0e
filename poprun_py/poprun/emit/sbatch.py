"""A plan as a batch script of Slurm, in which poprun starts the job on the nodes that Slurm gives.

Source: sbatch(1). The script asks for what the plan needs, so poprun finds that in the allocation.
"""

import math
import shlex
from collections.abc import Iterator, Sequence
from typing import Final

from poprun.errors import UsageError
from poprun.plan.plan import LaunchPlan
from poprun.plan.planner import THIS_MACHINE
from poprun.render.words import size_of
from poprun.text.ranges import fold_hosts

_QUOTED: Final = frozenset(" \t\"'#")


def batch_script(plan: LaunchPlan, name: str, words: Sequence[str]) -> str:
    """``plan`` as a script for sbatch, which runs the command ``words`` under ``name``."""
    if "\n" in plan.working_directory or "\r" in plan.working_directory:
        raise UsageError(f"--emit sbatch: the working directory {plan.working_directory!r} has a line break in it")
    lines = [f"#SBATCH --{option}={_quoted(value)}" for option, value in _directives(plan, name)]
    return "\n".join(["#!/bin/bash", f"# {size_of(plan)}", *lines, "", f"exec {shlex.join(words)}", ""])


def _directives(plan: LaunchPlan, name: str) -> Iterator[tuple[str, str]]:
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
        yield "gpus-per-node", str(plan.num_gpus_per_host)
    if plan.ending.timeout_seconds is not None:
        # Slurm counts minutes; one more leaves poprun the time to end the job itself.
        hours, minutes = divmod(math.ceil(plan.ending.timeout_seconds / 60) + 1, 60)
        yield "time", f"{hours:02}:{minutes:02}:00"


def _quoted(text: str) -> str:
    if not _QUOTED & set(text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
