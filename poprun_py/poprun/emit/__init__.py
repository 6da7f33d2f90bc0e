"""A plan as the job of a cluster's own engine, which then starts it without poprun.

Pure: values in, text out. A row of ``_WRITERS`` is one kind; each is a module of its own that is imported on use.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Final

from poprun.errors import UsageError
from poprun.plan.plan import LaunchPlan
from poprun.text.formats import EmitKind

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a job of a cluster needs beside its plan.

    Attributes:
        image: The container image that holds the program, or None.
        python: The interpreter that runs poprun.
        options: The words of poprun's command line that the plan was made from, without those that are for the
            print-out.
    """

    image: str | None = None
    python: str = "python3"
    options: tuple[str, ...] = ()


_WRITERS: Final = {
    EmitKind.MPIJOB: "poprun.emit.mpijob",
    EmitKind.JOBSET: "poprun.emit.jobset",
    EmitKind.SBATCH: "poprun.emit.sbatch",
}
"""The module of each kind; its ``write`` makes the text."""


def emit_job(plan: LaunchPlan, kind: EmitKind, surroundings: Surroundings) -> str:
    """``plan`` as a job of ``kind``, as text that ends with a line break.

    Raises:
        UsageError: If there is no program, or the kind needs something that ``surroundings`` lack.
    """
    if not plan.program:
        raise UsageError(f"--emit {kind} needs the PROGRAM that the job shall run")
    write: Callable[[LaunchPlan, Surroundings], str] = import_module(_WRITERS[kind]).write
    return write(plan, surroundings)
