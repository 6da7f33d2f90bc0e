"""The HTTP server of Prometheus metrics about a running job, at a port of 127.0.0.1."""

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import ThreadingWSGIServer

from poprun.errors import UsageError
from poprun.observe.account.curves import OF_NUMBERS, count_steps
from poprun.observe.account.state import InstanceState, InstanceStatus
from poprun.observe.account.time_shares import split_time
from poprun.observe.judge.job_end import JobEnd
from poprun.plan.plan import LaunchPlan

_HOST: Final = "127.0.0.1"
_JOIN_SECONDS: Final = 2.0
_MOST_CONNECTIONS: Final = 8
_INSTANCE: Final = ("instance_index", "host")  # ``instance`` is Prometheus' own name for who was asked


class _QuietHandler(WSGIRequestHandler):
    """A handler of HTTP requests that waits for a limited time, and logs nothing."""

    timeout = 5

    def log_message(self, *_: object) -> None:
        """Log nothing, so that the server's HTTP requests do not appear among the job's output."""


class _BoundedServer(ThreadingWSGIServer):
    """An HTTP server with a limited number of connections, because all users of this machine may connect."""

    request_queue_size = 128

    def __init__(self, *words: Any) -> None:
        self._opened: dict[socket.socket, None] = {}
        self._room = threading.Semaphore(_MOST_CONNECTIONS)
        super().__init__(*words)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a request in a new thread; at the limit of connections, first close the oldest connection."""
        if not self._room.acquire(blocking=False):
            with suppress(OSError, IndexError):
                [*self._opened][0].shutdown(socket.SHUT_RDWR)  # noqa: RUF015 - threads change the dict
            self._room.acquire()
        self._opened[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close the connection of an answered request, so that another client may connect."""
        super().shutdown_request(request)
        del self._opened[request]
        self._room.release()

    def handle_error(self, *_: object) -> None:
        """Print nothing if a request fails, for example because a client has left before the answer."""


class MetricsServer:
    """An HTTP server, in a thread, that answers Prometheus with the last stored state of a job."""

    def __init__(self, port: int) -> None:
        self._looks: Sequence[tuple[InstanceStatus, str, dict[str, float]]] = ()
        self._restart_count = 0
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server = make_server(_HOST, port, make_wsgi_app(registry), _BoundedServer, _QuietHandler)
        except OSError as error:
            raise UsageError(
                f"--metrics-port {port} cannot be used: {error.strerror}; 0 takes a free one"
            ) from None
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.address = f"http://{_HOST}:{self._server.server_port}/metrics"

    def close(self) -> None:
        """Stop the server, free its port, and wait briefly for its thread to end."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_JOIN_SECONDS)

    def update(self, plan: LaunchPlan, end: JobEnd, restart_count: int) -> None:
        """Store the state of all instances, from which later requests are answered."""
        curves = [] if end.curves is None else end.curves.instances
        lasts = [{name: it.last for name, it in one.by_name.items() if it.last is not None} for one in curves]
        hosts = [plan.instance(status.index).host for status in end.statuses]
        self._looks = list(zip(end.statuses, hosts, lasts, strict=True))
        self._restart_count = restart_count

    def collect(self) -> Iterator[Metric]:
        """Return all metrics of the job; prometheus_client calls this method for each request."""
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
