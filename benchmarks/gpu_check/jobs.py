"""Jobs that a part starts with poprun, and what they print."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parent.parent.parent
PROGRAMS: Final = Path(__file__).parent / "programs"
DEVICE: Final = "GPU_CHECK_DEVICE"
"""The environment variable that names the type of the device that the programs compute on."""

RANKS_SHARE: Final = "GPU_CHECK_RANKS_SHARE"
"""The environment variable that has NCCL connect ranks on one GPU."""

NUM_REPLICAS: Final = 4
RESULT: Final = "RESULT "
"""How the line begins on which a program prints its result as JSON."""

_JOBS_AT_ONCE: Final = {"cuda": 3}
_MOST_LINES: Final = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a part is told.

    Attributes:
        device: The type of the device.
        is_quick: Whether fewer repetitions are enough.
        folder: Where the part may write.
        seconds: How long the part has.
    """

    device: str
    is_quick: bool
    folder: Path
    seconds: float

    @property
    def on_cuda(self) -> bool:
        """Whether the device is a GPU that torch calls ``cuda``."""
        return self.device == "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """How a job ended.

    Attributes:
        code: Its exit code; None if its time was up.
        out: What its programs printed.
        err: What poprun and the programs wrote to the standard error.
        report: What ``--report`` wrote, if it was asked for.
        seconds: How long it took.
    """

    code: int | None
    out: str
    err: str
    report: Mapping[str, Any] = field(default_factory=dict)
    seconds: float

    @property
    def results(self) -> list[Any]:
        """The results that its programs printed."""
        return [json.loads(it[len(RESULT) :]) for it in self.out.splitlines() if it.startswith(RESULT)]

    @property
    def result(self) -> Any:
        """The first result; an empty dictionary if there is none."""
        return self.results[0] if self.results else {}

    @property
    def verdict(self) -> Mapping[str, Any]:
        """The verdict of the last attempt in the report; empty if there is none."""
        attempts = self.report.get("attempts") or [{}]
        return attempts[-1].get("verdict") or {}

    @property
    def trouble(self) -> str:
        """Why the job failed, in one line; empty if it ended well."""
        if self.code == 0:
            return ""
        said = [it.strip() for it in f"{self.out}\n{self.err}".splitlines() if "Error" in it or "error" in it]
        return f"exit code {self.code}: {said[-1][:300] if said else 'no error was printed'}"


def poprun(
    setting: Setting,
    num_instances: int,
    program: Sequence[str],
    *,
    options: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    seconds: float = 60.0,
) -> JobEnd:
    """Run a job of four replicas, whose instances share the device, and write what it printed if it fails."""
    with tempfile.TemporaryDirectory(dir=setting.folder) as folder:
        report = Path(folder, "report.json")
        words = [*poprun_words("-n", str(num_instances), "--num-replicas", str(NUM_REPLICAS), "--tag-output=no")]
        # a pool of its own for each job: jobs of one pool are never on one GPU at the same time
        words += ["--share-devices", "--pool", str(Path(folder, "pool"))] if setting.on_cuda else []
        words += ["--report", str(report), *options, sys.executable, *program]
        end = run(words, variables=variables, seconds=seconds)
        read = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
    return JobEnd(code=end.code, out=end.out, err=end.err, report=read, seconds=end.seconds)


def poprun_words(*options: str) -> list[str]:
    """Return the command line of poprun, which needs no MPI."""
    return [sys.executable, "-m", "poprun", "--launcher", "local", *options]


def run(words: Sequence[str], *, variables: Mapping[str, str] | None = None, seconds: float = 60.0) -> JobEnd:
    """Run a command for at most ``seconds``, and write what it printed if it fails."""
    begin = time.monotonic()
    environment = {**os.environ, **(variables or {})}
    try:
        ended = subprocess.run(
            words,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            env=environment,
            timeout=seconds,
            check=False,
        )
        end = JobEnd(code=ended.returncode, out=ended.stdout, err=ended.stderr, seconds=time.monotonic() - begin)
    except subprocess.TimeoutExpired as late:  # poprun, when it is killed, ends its job
        out, err = ((it or b"").decode(errors="replace") for it in (late.stdout, late.stderr))
        end = JobEnd(code=None, out=out, err=err, seconds=time.monotonic() - begin)
    if end.code != 0:
        printed = f"{end.out}\n{end.err}".splitlines()[-_MOST_LINES:]
        print(
            f"$ {' '.join(words)}\nexit code {end.code} after {end.seconds:.1f} s", *printed, sep="\n", flush=True
        )
    return end


def at_once(setting: Setting, calls: Sequence[Callable[[], JobEnd]]) -> list[JobEnd]:
    """Run jobs, several at once where the machine has room for that; return their ends in the same order."""
    with ThreadPoolExecutor(_JOBS_AT_ONCE.get(setting.device, 1)) as threads:
        return [it.result() for it in [threads.submit(call) for call in calls]]
