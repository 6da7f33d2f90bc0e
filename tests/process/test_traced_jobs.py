"""Traces of real jobs: what `poprun --trace` leaves, and what it says of programs that it cannot trace.

Holds popdist.startup.recording and poprun.launch.clock_answers.
"""

import json
import shutil
import sys
from base64 import b64encode
from collections import Counter
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from popdist.startup.recording import CLOCK_DESCRIPTOR, ask_clock
from poprun.observe.show.trace.collection import TRACE_FILE
from poprun.observe.show.trace.time_table import TABLE_FILE
from tests.running import Finished, Poprun
from tests.trace_checks import faults
from tests.traces.traced_jobs import clock_errors, launched, read

PARSE = """async (base64) => {
  const packed = Uint8Array.from(atob(base64), (it) => it.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const { traceEvents } = JSON.parse(await new Response(stream).text());
  return [...new Set(traceEvents.map((it) => it.ph))];
}"""

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


def traced(
    poprun: Poprun, folder: Path, number: int, program: str, *words: str, env: dict[str, str] | None = None
) -> Finished:
    """Run ``program`` in some instances, with what it needs to know of its trace."""
    file = folder / "program.py"
    file.write_text(program, encoding="utf-8")
    asked = ("--launcher", "local", "-n", str(number), *words)
    return poprun(*asked, sys.executable, str(file), str(folder / "trace"), env=env)


def test_a_job_and_who_was_late(browser: Browser, tmp_path: Path) -> None:
    """Rows for workers, an arrow for each collective of DDP's, a table that names who came last, and true clocks.

    Where there is faketime, the clock of instance 1 is three seconds ahead and runs faster.
    """
    finished = launched(str(tmp_path), ("forward", "150", "8", "5"), steps="3:7")
    document, table = read(str(tmp_path))

    assert faults(document) == []
    assert "profiler_start" not in finished.err  # which torch's profiler would write
    assert {it.name for it in tmp_path.iterdir()} == {TRACE_FILE, TABLE_FILE}
    events = document["traceEvents"]
    rows = Counter(it["args"]["name"].split(" ")[0] for it in events if it["name"] == "thread_name")
    assert {"phases", "collectives", "main"} <= set(rows)
    arrows = [it for it in events if it.get("cat") == "collective" and it["ph"] in "sf"]
    assert (len(arrows), {it["pid"] for it in arrows if it["ph"] == "f"}) == (8, {2})
    steps = Counter(it["pid"] for it in events if it["name"].startswith("Optimizer.step"))
    assert steps == {1: 4, 2: 4}
    early, late = table.instances
    assert (table.num_steps, table.num_collectives, late.num_last) == (4, 4, 4)
    assert early.seconds["waiting"] > 0.4
    assert late.seconds["outside"] > 0.5
    assert late.delay_seconds > 0.1
    clocks = document["poprun"]["instances"]
    if shutil.which("faketime"):
        assert clocks["1"]["offset_seconds"] > 2.9
    for index, errors in clock_errors(document).items():
        assert len(errors) == 4
        assert max(errors) <= clocks[str(index)]["uncertainty_seconds"] + 1e-6
    packed = b64encode((tmp_path / TRACE_FILE).read_bytes()).decode()
    assert set(browser.new_page().evaluate(PARSE, packed)) == {"M", "X", "f", "s"}


def test_programs_that_cannot_be_traced(poprun: Poprun, tmp_path: Path) -> None:
    """One ends too early, two profile themselves and keep their events, one is killed: each is named."""
    finished = traced(poprun, tmp_path, 4, OTHERS, "--trace", str(tmp_path / "trace"), "--trace-steps", "3:6")

    assert finished.code == 137
    for text in (
        "instance 0: it ended after 2 optimizer steps",
        "instances 1 and 2: the program profiles itself",
        "instance 3: there is none: its program was killed",
    ):
        assert f"trace of {text}" in finished.err
    document, _ = read(str(tmp_path / "trace"))
    assert faults(document) == []
    assert {it["pid"] for it in document["traceEvents"]} == {2}  # until it began to profile itself


def test_a_clock_that_cannot_be_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program has removed the variable or closed the descriptor, whose number may be that of a file now."""
    monkeypatch.delenv(CLOCK_DESCRIPTOR, raising=False)
    assert ask_clock() == []
    with (tmp_path / "file").open("w") as file:
        for number in (file.fileno(), -1):
            monkeypatch.setenv(CLOCK_DESCRIPTOR, str(number))
            assert ask_clock() == []
        file.write("open")


def test_what_programs_for_popvision_do(poprun: Poprun, tmp_path: Path) -> None:
    """Their variable turns the trace on, from the first module to the end; spans and loaders stand in it."""
    program = """
import libpvti as pvti, time, torch
class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 5
    def __getitem__(self, index):
        time.sleep(0.05)
        return torch.ones(2)
layer, channel = torch.nn.Linear(2, 2), pvti.createTraceChannel("mine")
layer(torch.ones(2))
for sample in torch.utils.data.DataLoader(Slow(), num_workers=1):
    with pvti.Tracepoint(channel, "work"):
        layer(sample)
        time.sleep(0.1)  # then the worker waits between two samples, which ends what is recorded of one
"""
    asked = json.dumps({"enable": "true", "directory": str(tmp_path / "trace")})
    finished = traced(poprun, tmp_path, 1, program, env={"PVTI_OPTIONS": asked}).succeeded()
    document, table = read(str(tmp_path / "trace"))

    assert "variables for PopVision ask for a profile" in finished.err
    assert faults(document) == []
    assert [it.index for it in table.instances] == [0]
    names = Counter(it["name"] for it in document["traceEvents"])
    assert names["mine: work"] == 5
    assert names["__getitem__ (program.py)"] >= 1
    assert table.instances[0].seconds["data"] > 0.05
