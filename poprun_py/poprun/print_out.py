"""A plan as it is printed: as a table, as a picture, or as a job of a cluster."""

import os
import sys
from typing import TYPE_CHECKING, Final

from poprun.cli.command_line import CommandLine
from poprun.cli.origins import origins
from poprun.plan.plan import LaunchPlan
from poprun.render import render_plan
from poprun.text import screen

if TYPE_CHECKING:
    from poprun.render.details import Details

_ENGINES_OWN: Final = ("host", "num-instances", "image")
"""Options that a batch script leaves to what it asks Slurm for."""


def print_out(plan: LaunchPlan, line: CommandLine) -> str:
    """``plan`` in the form that the command line asks for."""
    if line.emitted is not None:
        from poprun.emit import Surroundings, emit_job  # noqa: PLC0415 - most jobs run here

        return emit_job(
            plan, line.emitted, Surroundings(image=line.image, python=sys.executable, options=_options_again(line))
        )
    return render_plan(
        plan,
        line.topology_format,
        width=screen.width(),
        has_color=screen.has_color(),
        details=_details(plan, line) if line.verbosity else None,
    )


def _details(plan: LaunchPlan, line: CommandLine) -> "Details":
    from poprun.launch.launchers import launch_commands  # noqa: PLC0415 - only -v asks for it
    from poprun.plan.program_environment import program_environment  # noqa: PLC0415 - only -v asks for it
    from poprun.render.details import Details  # noqa: PLC0415 - only -v asks for it

    commands = launch_commands(plan)
    return Details(
        command=commands[0].words,
        num_commands=len(commands),
        origins=origins(line.given, with_defaults=line.verbosity > 1),
        environment=program_environment(plan, 0, os.environ),
    )


def _options_again(line: CommandLine) -> tuple[str, ...]:
    """The words with which poprun makes the same plan again, where the hosts come from the cluster's engine."""
    if line.plan_file is not None:
        return (f"--plan={os.path.abspath(line.plan_file)}",)
    kept = (one for one in line.given if not one.option.is_local and one.option.name not in _ENGINES_OWN)
    return tuple(f"--{one.option.name}={text}" for one in kept for text in one.texts)
