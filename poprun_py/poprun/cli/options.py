"""The options of poprun, each declared once: its names, its type, its help text.

A default is named in a help text only: the values live in :class:`LaunchRequest`.
"""

from typing import Final

import click

from poprun.cli.command import GroupedOption, Switch
from poprun.cli.parameter_types import InstanceCount, InstanceList, OneOf, Seconds, SecondsOrOff, WholeNumber
from poprun.render import TopologyFormat
from poprun.request import LauncherChoice, LaunchRequest

LAYOUT: Final = "Layout"
START: Final = "Start"
ENDING: Final = "End"
OUTPUT: Final = "Output"
PLAN: Final = "Plan"

EXAMPLES: Final = """\
Examples:
  poprun --num-instances 2 --num-replicas 4 python train.py --epochs 3
  poprun -H 'node[0-3]' -n 8 --num-replicas 16 --dry-run python train.py
"""

_DEFAULTS: Final = LaunchRequest()
_ENDING: Final = _DEFAULTS.ending


def layout_options() -> list[click.Parameter]:
    """How many of what, where."""
    return [
        GroupedOption(
            ["-n", "--num-instances"],
            section=LAYOUT,
            type=InstanceCount(),
            metavar="N|auto",
            help=f"Processes in all; auto: one per free GPU. [default: {_DEFAULTS.num_instances}]",
        ),
        GroupedOption(
            ["--num-replicas"],
            section=LAYOUT,
            type=WholeNumber(),
            metavar="N",
            help="Model replicas in all, dealt evenly to the instances. [default: one per instance]",
        ),
        GroupedOption(
            ["--ipus-per-replica"],
            section=LAYOUT,
            type=WholeNumber(),
            metavar="N",
            help=f"Virtual IPUs per replica: GPUs or shares of the cores. [default: {_DEFAULTS.ipus_per_replica}]",
        ),
        GroupedOption(
            ["-H", "--host"],
            section=LAYOUT,
            multiple=True,
            metavar="HOSTS",
            help="Where to run: a,b or host[0-2,4]. [default: this machine]",
        ),
        GroupedOption(
            ["--threads-per-replica"],
            section=LAYOUT,
            type=WholeNumber(),
            metavar="N",
            help="Value of OMP_NUM_THREADS. [default: the cores shared out to the replicas]",
        ),
        Switch(["--deterministic"], section=LAYOUT, help="Let torch use deterministic algorithms only."),
    ]


def start_options() -> list[click.Parameter]:
    """How processes begin."""
    return [
        GroupedOption(
            ["--launcher"],
            section=START,
            type=OneOf([choice.value for choice in LauncherChoice]),
            help=f"Start with MPI, or without; auto: MPI where there is one. [default: {_DEFAULTS.launcher}]",
        ),
        GroupedOption(
            ["--mpi-global-args"],
            section=START,
            multiple=True,
            metavar="ARGS",
            help="Words for the MPI launcher, before its process count; may be repeated.",
        ),
        GroupedOption(
            ["--mpi-local-args"],
            section=START,
            multiple=True,
            metavar="ARGS",
            help="Words for the MPI launcher, after its process count; may be repeated.",
        ),
        GroupedOption(
            ["--start-timeout"],
            section=START,
            type=Seconds(),
            metavar="SECONDS",
            help=f"Time the instances have to come to life. [default: {_ENDING.start_timeout_seconds:g}]",
        ),
    ]


def ending_options() -> list[click.Parameter]:
    """How processes end, and what is told of it."""
    return [
        GroupedOption(
            ["--stop-timeout"],
            section=ENDING,
            type=Seconds(),
            metavar="SECONDS",
            help=f"Time a program has to end before it is killed. [default: {_ENDING.stop_timeout_seconds:g}]",
        ),
        GroupedOption(
            ["--timeout"],
            section=ENDING,
            type=Seconds(),
            metavar="SECONDS",
            help="Time the whole job has; it then ends with 124. [default: none]",
        ),
        GroupedOption(
            ["--max-restarts"],
            section=ENDING,
            type=WholeNumber(),
            metavar="N",
            help=f"Times a failed job is started again. [default: {_ENDING.max_restarts}]",
        ),
        GroupedOption(
            ["--hang-report"],
            section=ENDING,
            type=SecondsOrOff(),
            metavar="SECONDS|off",
            help="Tell who keeps the others waiting after so long without progress. "
            f"[default: {_ENDING.hang_report_seconds:g}]",
        ),
        GroupedOption(
            ["--hang-timeout"],
            section=ENDING,
            type=SecondsOrOff(),
            metavar="SECONDS|off",
            help="End the job after so long without progress. [default: off]",
        ),
        GroupedOption(
            ["--report"],
            section=ENDING,
            metavar="FILE",
            help="Write how the job went as JSON.",
        ),
    ]


def output_options() -> list[click.Parameter]:
    """What is shown of what the programs print."""
    return [
        GroupedOption(
            ["--only-output-from-instance"],
            section=OUTPUT,
            type=InstanceList(),
            metavar="N",
            help="Show the output of these instances only: 0 or 0,4-7.",
        ),
        Switch(
            ["--tag-output"],
            section=OUTPUT,
            help="Put the instance before each line. [default: with several instances]",
        ),
        GroupedOption(
            ["--tag-format"],
            section=OUTPUT,
            metavar="TEXT",
            help="The tag, with {instance}, {host}, {stream} and the like.",
        ),
        Switch(["--fold-output"], section=OUTPUT, help="Show lines that several instances print alike once."),
        GroupedOption(
            ["--log-dir"],
            section=OUTPUT,
            metavar="DIR",
            help="Keep each instance's output in a file of its own.",
        ),
        Switch(["--monitor"], section=OUTPUT, help="Show the instances live in place of their output."),
        GroupedOption(
            ["-v", "--verbose"],
            section=OUTPUT,
            count=True,
            help="Say what is done and why; -vv: more of it.",
        ),
    ]


def plan_options() -> list[click.Parameter]:
    """Looking before leaping."""
    return [
        Switch(["--dry-run"], section=PLAN, help="Print the plan and start nothing."),
        Switch(["--print-topology"], section=PLAN, help="Print the plan, then start it."),
        GroupedOption(
            ["--topology-format"],
            section=PLAN,
            type=OneOf([choice.value for choice in TopologyFormat]),
            metavar="FORMAT",
            help=f"table, text (as PopRun prints it), json or yaml. [default: {TopologyFormat.TABLE}]",
        ),
        GroupedOption(
            ["--plan"],
            section=PLAN,
            metavar="FILE",
            help="Start the plan that a dry run printed as json or yaml; -: read it from stdin.",
        ),
    ]
