"""Parts 1, 9 and 10: what poprun finds, deals and records."""

import gzip
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from gpu_check.bits import require_runs
from gpu_check.findings import Findings
from gpu_check.jobs import PROGRAMS, RESULT, ROOT, Setting, poprun, poprun_words, run

_TRACED: Final = ("--trace-steps", "8:28")
_NUM_TRACED: Final = 20
_WITHIN: Final = 0.02
_HOLDING: Final = (sys.executable, str(PROGRAMS / "holding.py"))
_SUM: Final = "import torch; assert torch.ones(1000, device='cuda').sum() == 1000"
_START_SECONDS: Final = 8.0
_MOMENT_SECONDS: Final = 1.0
_LEAST_PAGE_BYTES: Final = 10_000


def part_1(setting: Setting, findings: Findings) -> None:
    """Ask poprun what there is, and what it would do."""
    doctor = run(poprun_words("--doctor", "--format", "json"), seconds=setting.seconds)
    dry = [
        "-n",
        "auto" if setting.on_cuda else "1",
        "--dry-run",
        "--topology-format",
        "json",
        "python3",
        "train.py",
    ]
    plan = run(poprun_words(*dry), seconds=setting.seconds)
    require_runs(findings, [doctor, plan])
    if setting.on_cuda:
        sums = run([sys.executable, "-c", _SUM], seconds=setting.seconds)
        findings.require("torch computes on the GPU", sums.code == 0, sums.trouble)
    if doctor.code == 0:
        findings.measure(**{it["subject"]: it["found"] for it in _rows(json.loads(doctor.out))})
    if plan.code == 0:
        devices = json.loads(plan.out)["devices"]
        findings.measure(devices_of_the_plan=devices)
        if setting.on_cuda:
            findings.require("the GPU is in the plan", devices, devices)
        else:
            findings.skip("the GPU is in the plan: needs a device")


def _rows(table: Any) -> list[dict[str, str]]:
    """Return the findings of the doctor that tell of the device."""
    rows = table["findings"] if isinstance(table, dict) else table
    return [it for it in rows if it["subject"] in {"torch", "GPUs", "devices", "driver"}]


def part_9(setting: Setting, findings: Findings) -> None:
    """Start a job that holds the GPU, a job that asks for it meanwhile, and a job that queues for it."""
    release, is_there = setting.folder / "release", setting.folder
    words = poprun_words("-n", "1", "--tag-output=no")
    with _started([*words, *_HOLDING, str(release)]) as holder:
        if holder.stdout is not None:
            holder.stdout.readline()  # it holds the GPU
        asker = run([*words, *_HOLDING, str(is_there)], seconds=_START_SECONDS)
        with _started([*words, "--wait-for-devices", *_HOLDING, str(is_there)]) as waiter:
            time.sleep(_MOMENT_SECONDS)  # in which it would begin if it did not wait
            release.touch()
            held, asked, waited = map(_result_in, (holder.communicate()[0], asker.out, waiter.communicate()[0]))
    findings.require("the first job has the GPU", held.get("devices"), held)
    findings.require("a job that asks meanwhile does not get the GPU", not asked.get("devices"), asked)
    findings.require("that job is told of the first one", "process" in asker.err, asker.err[-200:])
    findings.require("the job that queues has the GPU, too", waited.get("devices"), waited)
    is_later = waited.get("begin", 0) > held.get("end", float("inf"))
    findings.require("the job that queues begins when the first one has ended", is_later, waited)
    findings.measure(refusal=(asker.err.strip().splitlines() or ["none"])[0][-200:])


def _started(words: Sequence[str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)


def _result_in(printed: str) -> dict[str, Any]:
    """Return the result in what a program printed; empty if there is none."""
    found = [it[len(RESULT) :] for it in printed.splitlines() if it.startswith(RESULT)]
    return dict(json.loads(found[0])) if found else {}


def part_10(setting: Setting, findings: Findings) -> None:
    """Trace 20 steps, and read the trace, its table and the report."""
    folder, page = setting.folder / "trace", setting.folder / "run.html"
    program = [str(PROGRAMS / "run_example.py"), str(ROOT / "examples" / "train_digits.py"), "--epochs", "2"]
    options = ["--trace", str(folder), *_TRACED, "--report", str(page)]
    end = poprun(setting, 1, program, options=options, seconds=0.9 * setting.seconds)
    require_runs(findings, [end])
    findings.require("there is a page", page.exists() and page.stat().st_size > _LEAST_PAGE_BYTES)
    traced = folder / "trace.json.gz"
    findings.require("there is a trace", traced.exists())
    if traced.exists():
        _read_trace(setting, findings, traced)
    seconds = end.report["attempts"][-1]["instances"][0] if end.report.get("attempts") else {}
    if seconds.get("phase_seconds") and seconds.get("duration_seconds"):
        share = sum(seconds["phase_seconds"].values()) / seconds["duration_seconds"]
        findings.require("shares of the page add up to the wall clock", abs(share - 1) <= _WITHIN, f"{share:.3f}")
        findings.measure(phase_seconds={name: round(it, 2) for name, it in seconds["phase_seconds"].items() if it})
    else:
        findings.require("the report has seconds of phases", holds=False)


def _read_trace(setting: Setting, findings: Findings, path: Path) -> None:
    """Record what a trace and its table hold."""
    with gzip.open(path, "rt", encoding="utf-8") as opened:
        events = json.load(opened)["traceEvents"]
    kinds = Counter(it.get("cat", "") for it in events)
    table = json.loads((path.parent / "table.json").read_text(encoding="utf-8"))
    findings.require("20 steps are traced", table["num_steps"] == _NUM_TRACED, table["num_steps"])
    if setting.on_cuda:
        findings.require("the trace has kernels", kinds["kernel"], dict(kinds))
    else:
        findings.skip("kernels in the trace: needs a device")
    seconds = table["instances"][0]["seconds"]
    window = sum(seconds.values())
    shares = {name: f"{it / window:.0%}" for name, it in seconds.items()}
    findings.measure(kernels=kinds["kernel"], window_seconds=round(window, 3), shares=shares)
