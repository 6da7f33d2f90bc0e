"""Slow one instance of a job or a link down, and print whom poprun names, in which phase and why, as Markdown.

The exit code is 1 when fewer than 95 % are right within 30 s, or anybody is named in a job that is balanced.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from poprun.observe.account.job_record import read_report
from poprun.observe.account.judgements import Slowness
from tests.hosts.jobs import HostPoprun
from tests.hosts.network import Network, missing_reason
from tests.slowdowns.cases import CONTROLS, DDP, FAULTS, ON_HOSTS, Case

_PROGRAM: Final = Path(__file__).with_name("program.py")
_MOST_SECONDS: Final = 30.0  # from the first step until it is said who is slow, or the job ends
_START_SECONDS: Final = 120.0
_GROUPS: Final = {"group": Path("/sys/fs/cgroup/cpu"), "disk": Path("/sys/fs/cgroup/blkio")}
_SAID: Final = re.compile(r" is slow (in|since) ")
_LEAST_SHARE: Final = 0.95


def main() -> int:
    """Run the cases that the command line names; the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/slowdowns", description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases with TEXT in 'kind: what'")
    parser.add_argument("--faults", action="store_true", help="no controls")
    parser.add_argument("--controls", action="store_true", help="nothing but controls")
    parser.add_argument(
        "--traceml", metavar="FOLDER", help="traceml's answers, too: of an environment with traceml-ai"
    )
    options = parser.parse_args()
    chosen = [*([] if options.controls else FAULTS), *([] if options.faults else CONTROLS)]
    cases = [it for it in chosen if options.only in f"{it.kind}: {it.what}" and _is_possible(it)]
    print_row("training", "instances", "what is slow", "right", "after", "poprun", "TraceML")
    print_row(*["---"] * 7)
    results = []
    for case in cases:
        slowdowns, seconds = run_case(case)
        theirs = ask_traceml(case, options.traceml) if options.traceml else ""
        result = Result(case=case, is_right=is_right(case, slowdowns), seconds=seconds, theirs=theirs)
        results.append(result)
        right = "yes" if result.is_right else "**no**"
        after = describe_times([result])
        print_row(case.kind, str(case.num_instances), case.what, right, after, describe(slowdowns), theirs)
    print_summary(results)
    num_right = sum(result.is_right for result in results)
    sys.stdout.write(f"\n{num_right} of {len(results)} are right.\n")
    are_controls_right = all(result.is_right for result in results if result.case.is_control)
    return int(num_right < _LEAST_SHARE * len(results) or not are_controls_right)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of a case."""

    case: Case
    is_right: bool
    seconds: float | None  # of training until somebody was named
    theirs: str  # TraceML's answer, where it was asked


def print_summary(results: Sequence[Result]) -> None:
    """Print how many cases of each kind are right."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault(result.case.group, []).append(result)
    sys.stdout.write("\n")
    print_row("training", "slow", "right", "after", "TraceML names instance 1")
    print_row(*["---"] * 5)
    for (kind, what), those in groups.items():
        asked = [result.theirs for result in those if result.theirs]
        named = sum(re.findall(r"R\d+/", it)[:1] == ["R1/"] for it in asked)
        theirs = f"{named} of {len(asked)}" if asked else ""
        print_row(kind, what, f"{sum(it.is_right for it in those)} of {len(those)}", describe_times(those), theirs)


def print_row(*cells: str) -> None:
    """Print a row of a table in Markdown."""
    sys.stdout.write(f"| {' | '.join(cells)} |\n")
    sys.stdout.flush()


def describe_times(results: Sequence[Result]) -> str:
    """After how many seconds of training somebody was named."""
    seconds = [it.seconds for it in results if it.seconds is not None]
    if not seconds:
        return ""
    least, most = f"{min(seconds):.0f}", f"{max(seconds):.0f}"
    return f"{least} s" if least == most else f"{least} to {most} s"


def _is_possible(case: Case) -> bool:
    if case.kind in ON_HOSTS and (missing_reason() or not os.access("/dev/net/tun", os.W_OK)):
        return False
    folder = _GROUPS.get(case.fault)
    return folder is None or os.access(folder, os.W_OK)


def run_case(case: Case) -> tuple[Sequence[Slowness], float | None]:
    """The slowdowns in poprun's report of a case, and after how many seconds of training the first was said."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slowdowns-")))
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        fault = case.fault
        if fault in _GROUPS:
            environ["SLOW_GROUP"] = str(stack.enter_context(_limited_group(fault)))
        if fault == "core":
            stack.enter_context(_neighbours(1))
        if fault == "disk":
            file = folder / "samples"
            file.write_bytes(os.urandom(8 << 20))
            os.sync()  # what is not on the disk yet would stay in memory
            fault = f"disk:{file}"
        report = folder / "report.json"
        program = [sys.executable, str(_PROGRAM), case.kind, fault, str(_MOST_SECONDS)]
        job = ["-n", str(case.num_instances), "--report", str(report), *program]
        if case.kind in ON_HOSTS:
            words = stack.enter_context(_on_hosts(case, folder, job))
        else:
            words = [str(Path(sys.executable).with_name("poprun")), "--launcher", "local", *job]
        seconds = _watch(words, environ)
        attempts = read_report(report.read_text(), str(report)).attempts if report.exists() else ()
    return (attempts[-1].slowdowns if attempts else ()), seconds


def _watch(words: list[str], environ: dict[str, str]) -> float | None:
    """Run poprun until it names somebody or the program ends; after how many seconds of training it did."""
    began = said = None
    with subprocess.Popen(
        words, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        timer = threading.Timer(_START_SECONDS + _MOST_SECONDS, lambda: _poprun(process).terminate())
        timer.start()
        for line in process.stdout or ():
            if "begins" in line and began is None:
                began = time.monotonic()
            elif "Error" in line or "Traceback" in line:
                sys.stderr.write(line)
            elif _SAID.search(line) and said is None:
                said = time.monotonic()
                _poprun(process).send_signal(signal.SIGINT)
        timer.cancel()
    return None if said is None or began is None else said - began


def _poprun(process: "subprocess.Popen[str]") -> psutil.Process:
    """The process of poprun; of a job on hosts the one that was started waits for it."""
    started = psutil.Process(process.pid)
    return started.children()[0] if started.name() == "nsenter" else started


@contextmanager
def _on_hosts(case: Case, folder: Path, job: list[str]) -> Iterator[list[str]]:
    """The words of poprun on the first of some hosts, one of which has a slow link in some cases."""
    names = [f"n{number}" for number in range(1, case.num_instances + 1)]
    with ExitStack() as stack:
        network = stack.enter_context(Network(names, folder))
        if case.delayed_host:
            stack.enter_context(network.delayed(case.frame_seconds, case.delayed_host))
        if case.narrow_host:
            network.narrow(case.narrow_host, case.link_rate)
        poprun = HostPoprun(python=Path(sys.executable), name="")
        yield poprun.words(network, ["--host", ",".join(names), *job])


@contextmanager
def _limited_group(fault: str) -> Iterator[Path]:
    """A control group (version 1) that may use half a processor, or read 512 KiB a second from the disk."""
    group = _GROUPS[fault] / f"slowdowns-{os.getpid()}"
    group.mkdir()
    try:
        if fault == "group":
            (group / "cpu.cfs_quota_us").write_text("50000")
        else:
            device = Path(tempfile.gettempdir()).stat().st_dev
            limit = f"{os.major(device)}:{os.minor(device)} {1 << 19}"
            (group / "blkio.throttle.read_bps_device").write_text(limit)
        yield group
    finally:
        for _ in range(100):
            with suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)


@contextmanager
def _neighbours(core: int) -> Iterator[None]:
    """Three programs that keep a core busy, each in a session of its own, between which the kernel shares it."""
    burn = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    words = [sys.executable, "-c", burn]
    with ExitStack() as stack:
        for _ in range(3):
            process = stack.enter_context(subprocess.Popen(words, start_new_session=True))
            stack.callback(process.kill)
        yield


def ask_traceml(case: Case, folder: str) -> str:
    """The verdict and its reason in TraceML's summary of a job of DistributedDataParallel."""
    if case.kind != DDP or case.fault in ("group", "disk", "core"):
        return ""
    with tempfile.TemporaryDirectory(prefix="slowdowns-") as logs:
        words = [str(Path(folder, "bin", "traceml")), "run", "--mode", "summary", "--logs-dir", logs]
        job = ["--run-name", "a", "--nproc-per-node", str(case.num_instances), str(_PROGRAM)]
        program = ["--args", case.kind, case.fault, str(_MOST_SECONDS)]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "WITH_TRACEML": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        finished = subprocess.run(
            [*words, *job, *program], env=environ, capture_output=True, text=True, check=False, timeout=600
        )
    found = re.findall(r"(?:Verdict|Why): (.*?)\s*\|", finished.stdout)
    return "; ".join(found[:2])


def is_right(case: Case, slowdowns: Sequence[Slowness]) -> bool:
    """Whether the culprit alone is named, for a right phase and cause; of a control, nobody."""
    if case.is_control or not slowdowns:
        return (case.is_control or bool(case.narrow_host)) and not slowdowns
    first = slowdowns[0]
    is_it = all(it.name == case.culprit for it in slowdowns)
    return is_it and first.phase in case.phases and case.cause in "; ".join(first.reasons)


def describe(slowdowns: Sequence[Slowness]) -> str:
    """Who was named, in a few words."""
    if not slowdowns:
        return "nothing"
    first = slowdowns[0]
    reasons = "; ".join(re.sub(r"at /\S*/", "at ", reason) for reason in first.reasons)
    late = f"+{first.delay_seconds * 1000:.0f} ms"
    return f"{first.name}: {first.phase} {late}, {reasons}"


if __name__ == "__main__":
    sys.exit(main())
