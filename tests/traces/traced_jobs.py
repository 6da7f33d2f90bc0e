"""Jobs of `tests.traces.program`: how they are traced, and how far the trace is from what they have told."""

import gzip
import json
import shutil
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from poprun.observe.show.trace.collection import TRACE_FILE
from poprun.observe.show.trace.time_table import TABLE_FILE, TraceTable, read_table
from tests.running import Finished, run

PROGRAM = Path(__file__).with_name("program.py")
FALSE_CLOCK = "+3s x1.0001"
NS_PER_US = 1000


def launched(folder: str, words: Sequence[str], *, steps: str = "5:15") -> Finished:
    """Run the program as two instances; where there is faketime, instance 1 has a false clock."""
    false = f"faketime -f '{FALSE_CLOCK}'" if shutil.which("faketime") else ""
    script = f'[ "$RANK" = 0 ] && exec "$@"; exec {false} "$@"'
    asked = ("--launcher", "local", "--no-tag-output", "-n", "2", "--trace", folder, "--trace-steps", steps)
    program = ("sh", "-c", script, "sh", sys.executable, str(PROGRAM), *words)
    return run([sys.executable, "-m", "poprun", *asked, *program]).succeeded()


def read(folder: str) -> tuple[Any, TraceTable]:
    """The trace and the table."""
    with gzip.open(Path(folder, TRACE_FILE), "rt", encoding="utf-8") as file:
        return json.load(file), read_table(Path(folder, TABLE_FILE).read_text(encoding="utf-8"), folder)


def clock_errors(document: Mapping[str, Any]) -> dict[int, list[float]]:
    """The least error, in seconds, of each span whose true begin the program has told, by instance."""
    zero_ns = document["poprun"]["zero_epoch_ns"]
    told: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for event in document["traceEvents"]:
        if event["name"].startswith(("truth ", "until ")):
            told[event["pid"] - 1].append(event)
    return {instance: _errors(sorted(own, key=lambda it: it["ts"]), zero_ns) for instance, own in told.items()}


def _errors(told: Sequence[Mapping[str, Any]], zero_ns: int) -> list[float]:
    """How far each begin is from the time between the two that its pair of spans names."""
    found = []
    for begin, until in zip(told[::2], told[1::2], strict=True):
        at_ns = zero_ns + begin["ts"] * NS_PER_US
        before_ns, after_ns = (int(it["name"].split()[1]) for it in (begin, until))
        found.append(max(before_ns - at_ns, at_ns - after_ns, 0) / 1e9)
    return found
