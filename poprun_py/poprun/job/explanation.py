"""The end of a job that did not end well: what is found out about it, and told."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from poprun.job.aborts import blame_aborter
from poprun.job.outcome import JobEnd
from poprun.job.report.findings import gather_findings
from poprun.job.report.report import render_end
from poprun.job.voice import say
from poprun.plan.plan import LaunchPlan
from poprun.probe.kernel_kills import KillCounts
from poprun.text.log_line import Level


def explain(
    end: JobEnd,
    plan: LaunchPlan,
    tails: Mapping[int, Sequence[str]],
    launcher_output: Sequence[str],
    kills_before: KillCounts | None,
) -> JobEnd:
    """The end with all that is found out about it, after the user has been told.

    Args:
        end: How the job ended.
        plan: The job.
        tails: The last lines of the standard error of each instance that ended with an error, by index.
        launcher_output: The last lines that the launcher printed.
        kills_before: What the kernel had counted when the job began; None for a job of several machines.
    """
    explained = replace(
        end,
        statuses=blame_aborter(end.statuses, tails, end.launcher_code),
        findings=gather_findings(tails, launcher_output, kills_before),
    )
    if lines := render_end(explained, plan):
        say("\n".join(lines), Level.ERROR)
    return explained
