"""A job with a slow instance: said while it runs, and in the report. The rest is scripts/slowdowns."""

import json
import re
import sys
from pathlib import Path

import pytest

from tests.running import Poprun

TRAINS = """
import os, sys, time
import torch
from torch import distributed, nn
rank = int(os.environ["RANK"])
class Slow(nn.Linear):
    def forward(self, x):
        time.sleep(0.12 if rank == 1 else 0.03)
        return super().forward(x)
distributed.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(Slow(4, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
stop = torch.zeros(1)
while not stop:
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    stop.fill_(os.path.exists(sys.argv[1]))
    distributed.broadcast(stop, 0)
distributed.destroy_process_group()
"""


def test_the_slow_instance_is_said_while_the_job_runs(poprun: Poprun, tmp_path: Path) -> None:
    """The report has it, too, and where the time of each went."""
    report, stop = tmp_path / "report.json", tmp_path / "stop"
    words = ["--launcher", "local", "-n", "2", "--report", str(report), sys.executable, "-c", TRAINS, str(stop)]
    with poprun.started(*words) as process:
        assert process.stderr is not None
        said = next(line for line in process.stderr if " is slow in " in line)
        stop.touch()
        rest = process.stderr.read()
        assert process.wait() == 0
    (attempt,) = json.loads(report.read_text())["attempts"]
    (slowdown,) = attempt["slowdowns"]

    slow = re.compile(
        r"instance 1 is slow in forward since (step \d+|\d+ s)"
    )  # seconds where it is the first step
    assert slow.search(said)
    assert slow.search(rest)  # the summary
    assert (slowdown["instance"], slowdown["phase"]) == (1, "forward")
    assert slowdown["delay_seconds"] == pytest.approx(0.09, rel=0.5)
    for instance in attempt["instances"]:
        assert sum(instance["phase_seconds"].values()) == pytest.approx(instance["duration_seconds"], rel=0.01)
    assert attempt["instances"][0]["phase_seconds"]["waiting"] > 1.0
