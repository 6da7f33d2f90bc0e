"""Part 8: failures on the device are named, and nothing is left of them."""

import re
import subprocess
import time
from contextlib import suppress
from functools import partial
from typing import Final

from gpu_check.findings import Findings
from gpu_check.jobs import PROGRAMS, JobEnd, Setting, at_once, poprun

_PROGRAM: Final = PROGRAMS / "failing.py"
_CAUSES: Final = {
    "memory": "out of memory",
    "assert": "exception",
    "address": "exception",
    "kill": "signal",
    "endless": "did not come back from its own code",
}
"""Each failure, and the cause that poprun has to name."""

_WITHOUT_CUDA: Final = {"cpu": {"kill"}, "simulated": {"kill", "memory"}}
_HANG: Final = ("--hang-report", "3", "--hang-timeout", "4", "--stop-timeout", "2")
_FREE_SECONDS: Final = 5.0
_POLL_SECONDS: Final = 0.2
_MEBIBYTES_WITHIN: Final = 64


def part_8(setting: Setting, findings: Findings) -> None:
    """Fail in each way, and read poprun's verdict and the driver's list of processes."""
    lines = fault_lines()
    kinds = [kind for kind in _CAUSES if kind in _WITHOUT_CUDA.get(setting.device, _CAUSES)]
    for kind in _CAUSES.keys() - {*kinds}:
        findings.skip(f"{kind}: needs a device")
    before = device_use() if setting.on_cuda else ()
    job = partial(poprun, setting, 2, options=_HANG, seconds=setting.seconds / 2)
    for kind, end in zip(
        kinds, at_once(setting, [partial(job, [str(_PROGRAM), kind]) for kind in kinds]), strict=True
    ):
        wrong = trouble_of(end, _CAUSES[kind], lines if kind != "kill" else None)
        findings.require(f"{kind}: instance 1, its line and its cause are named", not wrong, wrong)
        findings.measure(**{kind: f"{end.seconds:.1f} s, {' '.join(end.verdict.get('details', []))[:120]}"})
    if setting.on_cuda:
        after = freed(before)
        findings.require(
            "the device is free after all of them", after == before, f"before {before}, after {after}"
        )


def fault_lines() -> range:
    """Return the lines of the program in which it fails."""
    before, _, function = _PROGRAM.read_text(encoding="utf-8").partition("def fail(")
    begin = before.count("\n") + 1
    return range(begin, begin + function.partition("\n\n\n")[0].count("\n") + 1)


def trouble_of(end: JobEnd, cause: str, lines: range | None) -> str:
    """Return what a verdict lacks; empty if it names instance 1, the cause, and one of ``lines``."""
    verdict = end.verdict
    if not verdict:
        return f"no verdict; {end.trouble or 'the job ended well'}"
    if verdict["culprits"] != [1] or verdict["cause"] != cause:
        return f"instances {verdict['culprits']}, {verdict['cause']}, for {cause!r} of instance 1"
    place = verdict["places"].get("1", "")
    named = re.search(r"failing\.py\D+(\d+)", place)
    if lines is not None and (named is None or int(named[1]) not in lines):
        return f"the place {place!r}, for a line of {lines.start} to {lines.stop - 1}"
    return ""


def device_use() -> tuple[str, ...]:
    """Return the processes that the driver lists, and the used memory of the first device in steps."""
    processes = _asked("--query-compute-apps=pid")
    used = _asked("--query-gpu=memory.used")
    steps = round(int(used[0]) / _MEBIBYTES_WITHIN) if used and used[0].isdecimal() else 0
    return (*processes, f"{_MEBIBYTES_WITHIN * steps} MiB")


def _asked(query: str) -> list[str]:
    with suppress(OSError, subprocess.SubprocessError):
        words = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
        return subprocess.run(words, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
    return []


def freed(before: tuple[str, ...]) -> tuple[str, ...]:
    """Return the use of the device, as soon as it is what it was ``before``, or after some seconds."""
    deadline = time.monotonic() + _FREE_SECONDS
    while (found := device_use()) != before and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return found
