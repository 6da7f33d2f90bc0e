"""Options for how processes end, and what is shown of them."""

from typing import Final

from poprun.cli.kinds import (
    FILE,
    FLAG,
    FOLDER,
    INSTANCES,
    NAME,
    NUMBER,
    SECONDS,
    SECONDS_OR_OFF,
    SWITCH,
    TEXT,
    one_of,
)
from poprun.cli.option import Group, Option, grouped
from poprun.doctor import ReportFormat
from poprun.emit import EmitKind
from poprun.plan.settings import EndingSettings
from poprun.render import TopologyFormat

_DEFAULTS: Final = EndingSettings()

ENDING: Final = grouped(
    Group.ENDING,
    Option(
        "stop-timeout",
        "ending.stop_timeout_seconds",
        SECONDS,
        f"Time a program has to end before it is killed. [default: {_DEFAULTS.stop_timeout_seconds:g}]",
    ),
    Option(
        "timeout",
        "ending.timeout_seconds",
        SECONDS,
        "Time the whole job has; it then ends with 124. [default: none]",
    ),
    Option(
        "max-restarts",
        "ending.max_restarts",
        NUMBER,
        f"Times a failed job is started again. [default: {_DEFAULTS.max_restarts}]",
    ),
    Option(
        "hang-report",
        "ending.hang_report_seconds",
        SECONDS_OR_OFF,
        "Tell who keeps the others waiting after so long without progress. "
        f"[default: {_DEFAULTS.hang_report_seconds:g}]",
    ),
    Option(
        "hang-timeout",
        "ending.hang_timeout_seconds",
        SECONDS_OR_OFF,
        "End the job after so long without progress. [default: off]",
    ),
    Option("report", "ending.report_file", FILE, "Write how the job went as JSON."),
)

OUTPUT: Final = grouped(
    Group.OUTPUT,
    Option(
        "only-output-from-instance",
        "output.shown_instances",
        INSTANCES,
        "Show the output of these instances only: 0 or 0,4-7.",
    ),
    Option(
        "tag-output",
        "output.is_tagged",
        SWITCH,
        "Put the instance before each line. [default: with several instances]",
    ),
    Option("tag-format", "output.tag_format", TEXT, "The tag, with {instance}, {host}, {stream} and the like."),
    Option("fold-output", "output.is_folded", SWITCH, "Show lines that several instances print alike once."),
    Option("log-dir", "output.log_dir", FOLDER, "Keep each instance's output in a file of its own."),
    Option("monitor", "output.has_monitor", SWITCH, "Show the instances live in place of their output."),
    Option(
        "print-topology", "line.prints_topology", SWITCH, "Print the plan, then start it.", goes_with_plan=True
    ),
    Option(
        "topology-format",
        "line.topology_format",
        one_of(TopologyFormat, "FORMAT"),
        "table, text (as PopRun prints it), json, yaml, or a picture: svg, html, mermaid. "
        f"[default: {TopologyFormat.TABLE}]",
        goes_with_plan=True,
    ),
)

DEBUG: Final = grouped(
    Group.DEBUG,
    Option(
        "debug",
        "request.is_debugged",
        SWITCH,
        "Say all that -vv says, and have programs tell where they crash.",
    ),
    Option(
        "dry-run",
        "line.is_dry_run",
        SWITCH,
        "Print the plan and start nothing.",
        is_local=True,
        goes_with_plan=True,
    ),
    Option(
        "doctor",
        "line.asks_doctor",
        FLAG,
        "Tell what poprun would use on this machine, and what is missing.",
        is_local=True,
    ),
    Option(
        "format",
        "line.report_format",
        one_of(ReportFormat),
        f"How --doctor tells it. [default: {ReportFormat.TABLE}]",
        is_local=True,
    ),
    Option(
        "emit",
        "line.emitted",
        one_of(EmitKind, "KIND"),
        "Print the job for a cluster and start nothing: mpijob, jobset (Kubernetes) or sbatch.",
        is_local=True,
        goes_with_plan=True,
    ),
    Option("image", "line.image", NAME, "Container image of the job that --emit prints.", goes_with_plan=True),
    Option(
        "plan",
        "line.plan_file",
        FILE,
        "Start the plan that a dry run printed as json or yaml; -: read it from stdin.",
        is_local=True,
        goes_with_plan=True,
    ),
)
