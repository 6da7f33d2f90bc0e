"""Run programs that end badly or stand still, and print beside each whom poprun and others name, as Markdown.

The exit code is 1 when fewer than 95 % of the verdicts are right, or anybody is named in a control.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from popdist.errors import name_instances
from tests.verdicts.cases import CASES, Case

_LIMIT_SECONDS: Final = 120
_OTHERS_SECONDS: Final = {False: 180, True: 90}  # for a program that ends, and for one that stands still
_OTHERS: Final = {
    "torchrun": ("torchrun", "--standalone", "--nproc-per-node"),
    # --multi_gpu starts a process for each instance whatever the devices are; --cpu would start a single one
    "accelerate": ("accelerate", "launch", "--multi_gpu", "--num_machines", "1", "--num_processes"),
}
_GROUPS: Final = Path("/sys/fs/cgroup/memory")
_HANG: Final = ("--hang-report", "4", "--hang-timeout", "5")
_ROOT: Final = re.compile(r"Root Cause.*?rank\s+: (\d+).*?exitcode\s+: (-?\d+)", re.DOTALL)
_LEAST_SHARE: Final = 0.95


def main() -> int:
    """Run the cases that the command line names; the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/verdicts", description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases with TEXT in framework or fault")
    parser.add_argument("--python", default=sys.executable, help="another one's modules, such as one with JAX")
    parser.add_argument("--others", action="store_true", help=f"the answers of {' and '.join(_OTHERS)}, too")
    options = parser.parse_args()
    cases = [
        it for it in CASES if options.only in f"{it.framework}: {it.what}" and _is_possible(it, options.python)
    ]
    sys.stdout.write(
        f"| framework | what happens to instance 1 | right | poprun | {' | '.join(_OTHERS)} |\n"
        f"|{'---|' * (4 + len(_OTHERS))}\n"
    )
    rights = []
    for case in cases:
        verdict, told = run_case(case, options.python)
        rights.append(is_right(case, verdict, told))
        theirs = ask_others(case) if options.others else [""] * len(_OTHERS)
        row = (case.framework, case.what, "yes" if rights[-1] else "**no**", describe(verdict), *theirs)
        sys.stdout.write(f"| {' | '.join(row)} |\n")
        sys.stdout.flush()
    sys.stdout.write(f"\n{sum(rights)} of {len(rights)} are right.\n")
    controls = [right for right, case in zip(rights, cases, strict=True) if case.is_control]
    return int(sum(rights) < _LEAST_SHARE * len(rights) or not all(controls))


def _is_possible(case: Case, python: str) -> bool:
    if case.memory_bytes and not os.access(_GROUPS, os.W_OK):
        return False
    module = {"mpi4py": "mpi4py", "JAX": "jax"}.get(case.framework, "sys")
    return subprocess.run([python, "-c", f"import {module}"], check=False, capture_output=True).returncode == 0


def run_case(case: Case, python: str) -> tuple[dict[str, Any] | None, str]:
    """The verdict in poprun's report of a case, or None, and what poprun has printed."""
    with tempfile.TemporaryDirectory(prefix="verdicts-") as folder:
        program, report = Path(folder, "train.py"), Path(folder, "report.json")
        program.write_text(case.program)
        launcher = () if case.framework == "mpi4py" else ("--launcher", "local")
        poprun = str(Path(sys.executable).with_name("poprun"))
        words = [poprun, *launcher, *_HANG, *case.options, "-n", str(case.num_instances)]
        with _memory_group(case.memory_bytes) as joining:
            words = [*joining, *words, "--report", str(report), python, str(program)]
            finished = _run(words, _LIMIT_SECONDS)
        attempts = json.loads(report.read_text())["attempts"] if report.exists() else []
    return (attempts[-1]["verdict"] if attempts else None), finished


@contextmanager
def _memory_group(num_bytes: int) -> Iterator[Sequence[str]]:
    """A control group (version 1) that may use so much; the words that start a command in it. None for 0."""
    if not num_bytes:
        yield ()
        return
    group = _GROUPS / f"verdicts-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(num_bytes))
        yield "sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(group)
    finally:
        group.rmdir()


def is_right(case: Case, verdict: dict[str, Any] | None, told: str) -> bool:
    """Whether the verdict names whom it should, for the right cause; of a control, nobody."""
    if case.is_control:
        return verdict is None and "did not arrive" not in told
    return verdict is not None and tuple(verdict["culprits"]) == case.culprits and verdict["cause"] in case.causes


def describe(verdict: dict[str, Any] | None) -> str:
    """A verdict in a few words."""
    if verdict is None:
        return "nothing"
    who = name_instances(verdict["culprits"]) if verdict["culprits"] else "nobody"
    place = verdict["places"].get(str(verdict["culprits"][0]), "") if verdict["culprits"] else ""
    return f"{who}: {verdict['cause']}{f', {Path(place).name}' if place else ''}"


def ask_others(case: Case) -> list[str]:
    """Whom each of the others names as the root cause, and for what."""
    if case.framework in ("ReplicatedModel", "backend popdist", "mpi4py", "JAX") or case.memory_bytes:
        return [""] * len(_OTHERS)
    with ThreadPoolExecutor(len(_OTHERS)) as threads:
        return list(threads.map(partial(_ask, case), _OTHERS.values()))


def _ask(case: Case, launcher: Sequence[str]) -> str:
    with tempfile.TemporaryDirectory(prefix="verdicts-") as folder:
        program = Path(folder, "train.py")
        program.write_text(case.program)
        command = Path(sys.executable).with_name(launcher[0])
        words = [str(command), *launcher[1:], str(case.num_instances), str(program)]
        told = _run(words, _OTHERS_SECONDS[case.stands_still])
    found = _ROOT.search(told)
    if found is None:
        return f"nothing in {_OTHERS_SECONDS[True]} s" if case.stands_still else "nothing"
    return f"rank {found[1]}: exit code {found[2]}"


def _run(words: Sequence[str], limit_seconds: float) -> str:
    """What a command prints, at most for so long; then it is asked to end."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        words, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            return process.communicate(timeout=limit_seconds)[0]
        except subprocess.TimeoutExpired:
            process.terminate()
            return process.communicate(timeout=limit_seconds)[0]


if __name__ == "__main__":
    sys.exit(main())
