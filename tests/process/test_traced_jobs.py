"""Traces of real jobs: what `poprun --trace` leaves, and what it says of programs that it cannot trace.

Holds popdist.startup.recording and poprun.launch.clock_answers.
"""

import gzip
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from poprun.trace.collection import TRACE_FILE
from poprun.trace.time_table import TABLE_FILE, TraceTable, read_table
from tests.running import Finished, Poprun
from tests.trace_checks import faults

DDP = """
import os, sys, time
import torch
from torch import distributed as dist, nn
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        time.sleep(0.01)
        return torch.ones(16)

dist.init_process_group("gloo")
torch.set_num_threads(1)
model = nn.parallel.DistributedDataParallel(nn.Linear(16, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in DataLoader(Slow(), batch_size=4, num_workers=1):
    loss = model(batch).sum()
    if dist.get_rank() == 1:
        time.sleep(0.15)
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
"""

OTHERS = """
import os, pathlib, signal, sys, time
import torch
from torch import nn
index = int(os.environ["RANK"])
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def steps(number):
    for _ in range(number):
        model(torch.ones(4)).sum().backward()
        optimizer.step()
if index == 0:
    steps(2)
elif index == 1:
    steps(4)
    with torch.profiler.profile() as own:
        steps(3)
    assert any(it.name == "aten::addmm" or it.name == "aten::linear" for it in own.events())
elif index == 2:
    with torch.autograd.profiler.profile() as own:
        steps(9)
    assert own.function_events
elif index == 3:
    steps(4)
    deadline = time.monotonic() + 60
    while len(list(pathlib.Path(sys.argv[1]).glob(".parts*/*.about"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def traced(poprun: Poprun, folder: Path, number: int, program: str, *words: str) -> Finished:
    """Run ``program`` in instances of which one may fail, with its trace in ``folder``."""
    file = folder / "program.py"
    file.write_text(program, encoding="utf-8")
    asked = ("--launcher", "local", "-n", str(number), "--trace", str(folder / "trace"), *words)
    return poprun(*asked, sys.executable, str(file), str(folder / "trace"))


def read(folder: Path) -> tuple[Any, TraceTable]:
    """The trace and the table in a folder."""
    with gzip.open(folder / TRACE_FILE, "rt", encoding="utf-8") as file:
        return json.load(file), read_table((folder / TABLE_FILE).read_text(encoding="utf-8"), str(folder))


def test_a_job_and_who_was_late(poprun: Poprun, tmp_path: Path) -> None:
    """Rows for workers, an arrow for each collective of DDP's, and a table that names who came last."""
    finished = traced(poprun, tmp_path, 2, DDP, "--trace-steps", "3:7").succeeded()
    document, table = read(tmp_path / "trace")

    assert faults(document) == []
    assert "profiler_start" not in finished.err  # which torch's profiler would write
    assert {it.name for it in (tmp_path / "trace").iterdir()} == {TRACE_FILE, TABLE_FILE}
    events = document["traceEvents"]
    rows = Counter(it["args"]["name"].split(" ")[0] for it in events if it["name"] == "thread_name")
    assert rows["loader"] >= 2
    arrows = [it for it in events if it.get("cat") == "collective" and it["ph"] in "sf"]
    assert (len(arrows), {it["pid"] for it in arrows if it["ph"] == "f"}) == (8, {1})
    steps = Counter(it["pid"] for it in events if it["name"].startswith("Optimizer.step"))
    assert steps == {0: 4, 1: 4}
    early, late = table.instances
    assert (table.num_steps, table.num_collectives, late.num_last) == (4, 4, 4)
    assert early.waiting_for_others_seconds > 0.4
    assert late.idle_seconds > 0.5
    assert late.delay_seconds > 0.1
    assert max(it.uncertainty_seconds for it in table.instances) < 0.05


def test_programs_that_cannot_be_traced(poprun: Poprun, tmp_path: Path) -> None:
    """One ends too early, two profile themselves and keep their events, one is killed: each is named."""
    finished = traced(poprun, tmp_path, 4, OTHERS, "--trace-steps", "3:6")

    assert finished.code == 137
    for text in (
        "instance 0: it ended after 2 optimizer steps",
        "instances 1 and 2: the program profiles itself",
        "instance 3: there is none: its program was killed",
    ):
        assert f"trace of {text}" in finished.err
    document, _ = read(tmp_path / "trace")
    assert faults(document) == []
    assert {it["pid"] for it in document["traceEvents"]} == {1}  # until it began to profile itself


def test_a_window_from_the_first_module_on(poprun: Poprun, tmp_path: Path) -> None:
    """Programs without an optimizer are traced for some seconds, or to their end."""
    program = "import torch\nlayer = torch.nn.Linear(2, 2)\nfor _ in range(50): layer(torch.ones(2))\n"
    traced(poprun, tmp_path, 1, program, "--trace-seconds", "99").succeeded()
    document, table = read(tmp_path / "trace")

    assert faults(document) == []
    assert [it.index for it in table.instances] == [0]
    assert any(it["name"] == "aten::linear" for it in document["traceEvents"])
