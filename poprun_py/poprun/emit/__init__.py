"""A plan as the job of a cluster's own engine, which then starts it without poprun.

Pure: values in, text out. The writers are modules of their own that are imported on use: starting a job pays for
none of them.
"""

import os
import re
from dataclasses import dataclass
from typing import Final

from poprun.errors import UsageError
from poprun.plan.plan import LaunchPlan
from poprun.text.screen import EmitKind

_MAX_NAME: Final = 40
"""Characters of a job's name; the operators append to it, and a host's name has at most 63."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """The facts that a cluster's job needs beside its plan."""

    image: str | None = None  # the container image that holds the program, or None
    python: str = "python3"  # the interpreter that runs poprun
    # the words of poprun's command line that the plan was made from, without those that are for the print-out
    options: tuple[str, ...] = ()


def emit_job(plan: LaunchPlan, kind: EmitKind, surroundings: Surroundings) -> str:
    """``plan`` as a job of ``kind``, as text; a UsageError says what is missing, or what the kind cannot say."""
    if not plan.program:
        raise UsageError(f"--emit {kind} needs the PROGRAM that the job shall run")
    name = job_name(plan)
    if kind is EmitKind.SBATCH:
        from poprun.emit.sbatch import batch_script  # noqa: PLC0415 - see the module's docstring

        words = (surroundings.python, "-m", "poprun", *surroundings.options, *plan.program)
        return batch_script(plan, name, words)
    if surroundings.image is None:
        raise UsageError(
            "a pod needs a container image that holds the program, Python and popdist: add --image NAME"
        )
    from poprun.emit.kubernetes import jobset, mpijob  # noqa: PLC0415 - see the module's docstring

    return (jobset if kind is EmitKind.JOBSET else mpijob)(plan, name, surroundings.image)


def job_name(plan: LaunchPlan) -> str:
    """A name for the job, from that of its program: ``/data/Train_2.py`` becomes ``train-2``.

    It is a label of RFC 1123, as
    https://kubernetes.io/docs/concepts/overview/working-with-objects/names/ asks for.
    """
    script = next((word for word in plan.program if word.endswith(".py")), plan.program[0])
    stem = os.path.basename(script).removesuffix(".py").lower()
    name = re.sub("[^a-z0-9]+", "-", stem)[:_MAX_NAME].strip("-")
    return name if name[:1].isalpha() else f"job-{name}".rstrip("-")
