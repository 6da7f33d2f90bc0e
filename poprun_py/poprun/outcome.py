"""The outcome of a job: its ends until now, in the job's report and metrics."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from poprun.errors import UsageError, error_of_system
from poprun.plan.plan import LaunchPlan
from poprun.plan.program_environment import wished_job_id
from poprun.text import screen

if TYPE_CHECKING:
    from poprun.devices.lease.claims import LeasedPlan
    from poprun.job.loop import Attempt
    from poprun.observe.judge.job_end import JobEnd
    from poprun.observe.show.metrics_server import MetricsServer
    from poprun.observe.show.report_writer import ReportWriter


@dataclass(slots=True)
class JobOutcome:
    """How each start (attempt) of a job has ended so far, with the writers of the job's report and metrics."""

    files: Sequence[str] = ()  # names of the report files, as the user wrote the names
    job_id: str = field(default_factory=lambda: wished_job_id(os.environ) or os.urandom(6).hex())
    plan: LaunchPlan | None = None  # None before poprun has made the plan
    leased: "LeasedPlan | None" = None
    ends: list["JobEnd"] = field(default_factory=list)
    provenance: Mapping[str, str] = field(default_factory=dict)
    writer: "ReportWriter | None" = None  # None before the plan, and if nobody asked for a report
    metrics: "MetricsServer | None" = None  # None if nobody asked for metrics

    def begin(self, plan: LaunchPlan) -> None:
        """Begin with the job of ``plan``: check that its report can be written, and start serving its metrics."""
        self.plan, self.files = plan, ()
        if plan.ending.report_files:
            self._begin_report(plan)
        if plan.ending.metrics_port is not None:
            self.metrics = _serve_metrics(plan.ending.metrics_port)

    def _begin_report(self, plan: LaunchPlan) -> None:
        from poprun.hosts.probe.provenance import provenance
        from poprun.observe.show.report_writer import ReportWriter

        writer = ReportWriter(plan.ending.report_files, plan.working_directory)
        writer.check()
        self.writer = writer
        self.provenance = provenance(plan.program, plan.working_directory)

    def note_progress(self, attempt: "Attempt") -> None:
        """Update the metrics with the running ``attempt``; also write the report when it is due."""
        is_due = self.writer is not None and self.writer.is_due(time.monotonic())
        if self.plan is None or not (self.metrics or is_due):
            return
        end = attempt.end(is_over=False)
        if self.metrics is not None:
            self.metrics.update(self.plan, end, len(self.ends))
        if self.writer is not None and is_due:
            self._write(self.writer, [*self.ends, end])

    def write(self, error: str) -> None:
        """Write the job's last report and stop the metrics; ``error`` is why poprun gave up, or an empty text."""
        if self.metrics is not None:
            self.metrics.close()
        if self.files:  # the files are still there if no plan was made
            from poprun.observe.show.report_writer import ReportWriter

            self.writer, self.files = ReportWriter(self.files, os.curdir), ()
        if self.writer is not None:
            writer, self.writer = self.writer, None
            self._write(writer, self.ends, error)

    def _write(self, writer: "ReportWriter", ends: "Sequence[JobEnd]", error: str = "") -> None:
        from poprun.observe.show.report_file import record_job

        leases, given = (self.leased.leases, self.leased.given) if self.leased else ((), None)
        job = record_job(self.plan, self.job_id, ends, error=error, leases=leases, given=given)
        writer.write(replace(job, provenance=self.provenance))


def _serve_metrics(port: int) -> "MetricsServer":
    try:
        from poprun.observe.show.metrics_server import MetricsServer
    except ModuleNotFoundError:
        raise UsageError(
            "--metrics-port needs the package prometheus_client, which is not there: install it, or poprun's "
            "extra metrics"
        ) from None
    server = MetricsServer(port)
    screen.log(f"metrics are at {server.address}")
    return server


@contextmanager
def reported(outcome: JobOutcome) -> Iterator[None]:
    """A context in which a job runs; at its end the job's report is written, also after an exception."""
    error = ""
    try:
        yield
    except (OSError, MemoryError) as problem:
        error = str(error_of_system(problem))
        raise
    except Exception as problem:
        error = str(problem)
        raise
    finally:
        outcome.write(error)
