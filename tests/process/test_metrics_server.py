"""What Prometheus reads of a running job."""

import re
import socket
import sys
import threading
import time
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from poprun.errors import UsageError
from poprun.observe.account.curves import JobCurves
from poprun.observe.show import metrics_server
from poprun.observe.show.metrics_server import MetricsServer
from poprun.outcome import _serve_metrics
from tests.running import DEADLINE_SECONDS, Poprun
from tests.unit.test_report_file import COUNTERS, END, GOOD, PLAN

PROGRAM = """
import time, popdist
from pathlib import Path

popdist.report(step=7, loss=0.5, **{'accuracy "test"': 0.75})
while not Path("end").exists():
    time.sleep(0.01)
"""


def read(address: str) -> dict[tuple[str, str, str], float]:
    """The values at an address, by name, instance and name of the number."""
    with urlopen(address, timeout=DEADLINE_SECONDS) as answer:  # noqa: S310 - its own loopback address
        families = text_string_to_metric_families(answer.read().decode())
        return {
            (it.name, it.labels.get("instance_index", ""), it.labels.get("name", "")): it.value
            for family in families
            for it in family.samples
        }


def test_a_running_job_answers_and_leaves_no_port(poprun: Poprun, tmp_path: Path) -> None:
    """At a free port of the loopback address, which it names; another job cannot have that one."""
    words = ("--launcher", "local", "-n", "2", "--metrics-port")
    with poprun.started(*words, "0", sys.executable, "-c", PROGRAM, cwd=tmp_path) as started:
        assert started.stderr is not None
        told = re.search(r"metrics are at (http://127\.0\.0\.1:(\d+)/metrics)", started.stderr.readline())
        assert told is not None
        reported = {("poprun_reported", "1", "loss"), ("poprun_reported", "0", 'accuracy "test"')}
        while not reported <= (values := read(told[1])).keys():
            time.sleep(0.05)
        second = poprun(*words, told[2], "touch", "started", cwd=tmp_path)
        (tmp_path / "end").touch()
        assert started.wait(DEADLINE_SECONDS) == 0

    assert values["poprun_reported", "1", "loss"] == 0.5
    assert values["poprun_reported", "0", 'accuracy "test"'] == 0.75
    assert values["poprun_steps_total", "0", ""] == 7
    assert values["poprun_running", "0", ""] == 1
    assert values["poprun_memory_bytes", "1", ""] > 2**20
    assert values["poprun_restarts", "", ""] == 0
    assert second.code == 2
    assert f"--metrics-port {told[2]} cannot be used: Address already in use" in second.err
    assert [entry.name for entry in tmp_path.iterdir()] == ["end"]
    with socket.socket() as client, pytest.raises(ConnectionRefusedError):
        client.connect(("127.0.0.1", int(told[2])))


def test_waits_in_the_backward_pass_are_communication() -> None:
    """As in the report."""
    counters = replace(COUNTERS, seconds={**COUNTERS.seconds, "backward": 2.0}, idle_backward_seconds=1.5)
    end = replace(END, statuses=[replace(GOOD, counters=counters)], curves=JobCurves(1, 0.0))
    with closing(MetricsServer(0)) as server:
        server.update(PLAN, end, 0)
        (family,) = (it for it in server.collect() if it.name == "poprun_phase_seconds")

    seconds = {sample.labels["phase"]: sample.value for sample in family.samples if sample.value}
    assert seconds == {"forward": 1.0, "backward": 0.5, "communication": 1.5}


def test_silent_connections_take_nothing_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many, and for however long: there are few threads and descriptors, and others are answered."""
    before, num_threads = len(list(Path("/proc/self/fd").iterdir())), threading.active_count()
    monkeypatch.setattr(metrics_server._QuietHandler, "timeout", 1)
    with closing(MetricsServer(0)) as server, ExitStack() as stack:
        port = int(server.address.rpartition(":")[2].partition("/")[0])
        for _ in range(100):
            silent = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_SECONDS))
        assert read(server.address) == {("poprun_restarts", "", ""): 0.0}
        assert len(list(Path("/proc/self/fd").iterdir())) - before <= 100 + 12
        assert threading.active_count() - num_threads <= 10
        assert silent.recv(1) == b""  # its time is over


def test_a_missing_package_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an extra."""
    monkeypatch.delitem(sys.modules, "poprun.observe.show.metrics_server", raising=False)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)

    with pytest.raises(UsageError, match="needs the package prometheus_client"):
        _serve_metrics(0)
