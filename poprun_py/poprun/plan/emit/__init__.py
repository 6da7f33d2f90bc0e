"""Jobs for Kubernetes and Slurm, written from a plan; the cluster then starts the program without poprun.

Pure: the functions get values and return text. The module for Kubernetes is imported only when it is used.
"""

import math
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from poprun.errors import UsageError
from poprun.plan.plan import LaunchPlan
from poprun.plan.planner import THIS_MACHINE
from poprun.plan.render.words import size_of
from poprun.text.ranges import fold_hosts
from poprun.text.screen import EmitKind

_MAX_NAME: Final = 40  # characters of a job's name: operators append text, and a host's name has at most 63
_QUOTED: Final = frozenset(" \t\"'#")


def emit_job(
    plan: LaunchPlan,
    kind: EmitKind,
    *,
    image: str | None = None,  # the container image with the program
    command: Sequence[str] = ("poprun",),  # the command with which a batch script makes the same plan
    user_num_threads: str = "",  # the user's OMP_NUM_THREADS on this machine
) -> str:
    """Return the YAML or script of a job that runs ``plan``. Raise UsageError if program or image is missing."""
    if not plan.program:
        raise UsageError(f"--emit {kind} needs the PROGRAM that the job shall run")
    if plan.threads_per_replica is None and re.fullmatch("[1-9][0-9]*", user_num_threads):
        plan = replace(plan, threads_per_replica=int(user_num_threads))
    name = job_name(plan)
    if kind is EmitKind.SBATCH:
        return batch_script(plan, name, (*command, *plan.program))
    if image is None:
        raise UsageError(
            "a pod needs a container image that holds the program, Python and popdist: add --image NAME"
        )
    from poprun.plan.emit.kubernetes import jobset, mpijob

    return (jobset if kind is EmitKind.JOBSET else mpijob)(plan, name, image)


def job_name(plan: LaunchPlan) -> str:
    """Return a name for a cluster's job (RFC 1123), made from the program: ``train-2`` for ``Train_2.py``."""
    script = next((word for word in plan.program if word.endswith(".py")), plan.program[0])
    stem = os.path.basename(script).removesuffix(".py").lower()
    name = re.sub("[^a-z0-9]+", "-", stem)[:_MAX_NAME].strip("-")
    return name if name[:1].isalpha() else f"job-{name}".rstrip("-")


def batch_script(plan: LaunchPlan, name: str, words: Sequence[str]) -> str:
    """Return a script for Slurm's sbatch that requests what ``plan`` needs and runs the command ``words``."""
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
        # Slurm counts whole minutes; poprun needs one more minute to end the job itself.
        hours, minutes = divmod(math.ceil(plan.ending.timeout_seconds / 60) + 1, 60)
        yield "time", f"{hours:02}:{minutes:02}:00"


def _quoted(text: str) -> str:
    if not _QUOTED & set(text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
