"""What Prometheus reads of a running job, at a port of 127.0.0.1, through its own library."""

from collections.abc import Iterator, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from poprun.errors import UsageError
from poprun.job.performance.curves import OF_NUMBERS, count_steps
from poprun.job.record import JobEnd
from poprun.job.report.report_file import split_time
from poprun.job.state import InstanceState, InstanceStatus
from poprun.plan.plan import LaunchPlan

_HOST: Final = "127.0.0.1"
_JOIN_SECONDS: Final = 2.0
_INSTANCE: Final = ("instance_index", "host")  # ``instance`` is Prometheus' own name for who was asked


class MetricsServer:
    """Answers Prometheus in a thread, with what was known of the job at its last look."""

    def __init__(self, port: int) -> None:
        self._looks: Sequence[tuple[InstanceStatus, str, dict[str, float]]] = ()
        self._restart_count = 0
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, addr=_HOST, registry=registry)
        except OSError as error:
            raise UsageError(
                f"--metrics-port {port} cannot be used: {error.strerror}; 0 takes a free one"
            ) from None
        self.address = f"http://{_HOST}:{self._server.server_port}/metrics"

    def close(self) -> None:
        """End the thread and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_JOIN_SECONDS)

    def update(self, plan: LaunchPlan, end: JobEnd, restart_count: int) -> None:
        """Answer from now on with how an attempt stands."""
        curves = [] if end.curves is None else end.curves.instances
        lasts = [{name: it.last for name, it in one.by_name.items() if it.last is not None} for one in curves]
        hosts = [plan.instance(status.index).host for status in end.statuses]
        self._looks = list(zip(end.statuses, hosts, lasts, strict=True))
        self._restart_count = restart_count

    def collect(self) -> Iterator[Metric]:
        """Everything, as the library asks for it at each request."""
        restarts = GaugeMetricFamily("poprun_restarts", "Times that the job was started again")
        restarts.add_metric((), self._restart_count)
        running = GaugeMetricFamily("poprun_running", "Whether the program of an instance runs", labels=_INSTANCE)
        memory = GaugeMetricFamily(
            "poprun_memory_bytes", "Memory of the processes of an instance", labels=_INSTANCE
        )
        cpu = CounterMetricFamily("poprun_cpu_seconds", "Processor time of those processes", labels=_INSTANCE)
        steps = CounterMetricFamily("poprun_steps", "Steps that an instance has made", labels=_INSTANCE)
        phases = CounterMetricFamily(
            "poprun_phase_seconds", "Time that an instance has spent in a phase", labels=(*_INSTANCE, "phase")
        )
        numbers = GaugeMetricFamily("poprun_reported", "The last popdist.report()", labels=(*_INSTANCE, "name"))
        for status, host, lasts in self._looks:
            labels = (str(status.index), host)
            running.add_metric(labels, status.state is InstanceState.RUNNING)
            steps.add_metric(labels, count_steps(status))
            if status.usage is not None:
                memory.add_metric(labels, status.usage.memory_bytes)
                cpu.add_metric(labels, status.usage.cpu_seconds)
            for phase, seconds in (split_time(0.0, status.counters) if status.counters else {}).items():
                if phase != "waiting":  # a part of communication that is known later, and a counter never falls
                    phases.add_metric((*labels, phase), seconds)
            for name, last in lasts.items():
                if name.startswith(OF_NUMBERS):
                    numbers.add_metric((*labels, name.removeprefix(OF_NUMBERS)), last)
        return iter((restarts, running, memory, cpu, steps, phases, numbers))
