"""How near the planner of mappings comes to what others measured and published.

    python benchmarks/sizing.py --plot sizing.png
    python benchmarks/sizing.py --fit  # finds the constants again; a few minutes

Each row of ``benchmarks/data/planner`` is predicted as ``poprun-size`` predicts; the README there names sources.
A group has rows that are equal in all but tensor, pipeline, replicas and micro batch, and at least five of them.
It needs scipy, and ``--plot`` matplotlib.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from measuring.documents import put, table
from measuring.sizing_fit import SHARE, fitted, split
from measuring.sizing_rows import (
    GROUPED,
    Pair,
    PodRow,
    Score,
    Timed,
    megatron_memory,
    megatron_seconds,
    mpt_cases,
    pairs_of,
    pod_rows,
    rows_of,
    score_of,
    step_cases,
    titan_pairs,
)

from popsize.constants import CONSTANTS
from popsize.hardware import GIB

ONE_HOST, MANY_HOSTS, MEGATRON = "times_one_host", "times_many_hosts", "memory_megatron"
SIZES: Final = ("tensor", "pipeline", "replicas", "micro_batch")
DOTS_PER_INCH = 150


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure that is to be reached.

    Attributes:
        table: The table that it is about.
        what: What the figure is.
        value: What is reached.
        limit: The most that it may be; the least where ``at_least``.
        form: How both are written.
        at_least: Whether more is better.
    """

    table: str
    what: str
    value: float
    limit: float
    form: str
    at_least: bool = False

    @property
    def cells(self) -> tuple[str, ...]:
        """It as cells of a table."""
        good = self.value >= self.limit if self.at_least else self.value <= self.limit
        side = "≥" if self.at_least else "≤"
        aim = f"{side}{self.form.format(self.limit)}"
        reached = self.form.format(self.value)
        return f"{self.table}, {self.what}", aim, reached if good else f"**{reached}**"


def goals(one: Score, many: Score) -> list[Goal]:
    """The figures that are to be reached, and those that are."""
    return [
        Goal(ONE_HOST, "mean error", one.error, 0.084, "{:.1%}"),
        Goal(
            ONE_HOST,
            "groups with a first proposal within 3 %",
            one.near,
            0.7,
            "{:.0%}",
            at_least=True,
        ),
        Goal(ONE_HOST, "first proposal over fastest, mean", one.loss, 1.04, "{:.3f}"),
        Goal(ONE_HOST, "rank correlation, median", one.rank, 0.93, "{:.3f}", at_least=True),
        Goal(MANY_HOSTS, "mean error", many.error, 0.147, "{:.1%}"),
        *_megatron_goals(),
        *_memory_goals(),
    ]


def _megatron_goals() -> list[Goal]:
    memory = megatron_memory()
    gib = [pair.error for column, pair in memory if column.startswith("gib")]
    points = [abs(pair.predicted - pair.measured) for column, pair in memory if column.startswith("pct")]
    errors = [pair.error for pair in megatron_seconds()]
    return [
        Goal(MEGATRON, "GiB, worst", max(gib), 0.001, "{:.2%}"),
        Goal(MEGATRON, "points of a share, worst", max(points), 1, "{:.2f}"),
        Goal(MEGATRON, "seconds, worst", max(errors), 0.15, "{:.1%}"),
        Goal(MEGATRON, "seconds, mean error", fmean(errors), 0.1, "{:.1%}"),
    ]


def _memory_goals() -> list[Goal]:
    once, twice = ([case.predicted.fits for case in mpt_cases(n)] for n in (1, 2))
    eager, compiled = (
        [pair.error for pair in titan_pairs() if ("eager" in pair.row["extra"]) == is_eager]
        for is_eager in (True, False)
    )
    pods = [bool(one.answer.fitting) for one in pod_rows()]
    return [
        Goal("fits_mpt", "rows whose micro batch fits", fmean(once), 0.9, "{:.0%}", at_least=True),
        Goal("fits_mpt", "rows where twice of it does not", 1 - fmean(twice), 0.7, "{:.0%}", at_least=True),
        Goal("peaks_torchtitan", "eager, worst", max(eager), 0.1, "{:.1%}"),
        Goal("peaks_torchtitan", "compiled, worst", max(compiled), 0.1, "{:.1%}"),
        Goal("mappings_pods", "rows that are legal and fit", fmean(pods), 1, "{:.0%}", at_least=True),
    ]


def goals_table(one: Score, many: Score) -> str:
    """What is to be reached, and what is; in bold where that is not enough."""
    head = ("figure", "to reach", "reached")
    return table(head, [goal.cells for goal in goals(one, many)])


def times_table(pairs: Iterable[Pair]) -> str:
    """Seconds of steps: each row, predicted beside measured."""
    names = [name for name in (*GROUPED, *SIZES) if name != "sequence"]
    cells = [(*(pair.row[name] for name in names), *_figures(pair, "{:.4g}")) for pair in pairs]
    return table((*names, "measured", "predicted", "ratio"), cells)


def _figures(pair: Pair, form: str) -> tuple[str, str, str]:
    return form.format(pair.measured), form.format(pair.predicted), f"{pair.predicted / pair.measured:.3f}"


def megatron_tables() -> str:
    """The paper's models: GiB and shares by its equations, seconds as measured."""
    seconds = megatron_seconds()
    names = [row["model"] for row in rows_of("memory_megatron.csv")]
    cells = [
        (f"{name}, {column}", *_figures(pair, "{:.2f}"))
        for column, pair in megatron_memory()
        for name in [pair.row["model"]]
    ]
    columns = ["seconds, full recomputation"] * len(names) + ["seconds, selective"] * len(names)
    cells += [
        (f"{name}, {column}", *_figures(pair, "{:.2f}"))
        for name, column, pair in zip([*names, *names], columns, seconds, strict=True)
    ]
    return table(("memory_megatron", "published", "predicted", "ratio"), cells)


def titan_table() -> str:
    """Peaks of Llama models in GiB."""
    cells = [
        (f"{pair.row['model']} {pair.row['parallel']}, {pair.row['extra']}", *_figures(pair, "{:.1f}"))
        for pair in titan_pairs()
    ]
    return table(("peaks_torchtitan", "GiB measured", "predicted", "ratio"), cells)


def fits_table() -> str:
    """FSDP runs: GiB that the largest micro batch, and twice it, are predicted to need."""
    cells = [
        (
            f"{row['Model']} on {row['# GPUs']} {row['GPU']}, {row['SeqLen (T)']} tokens",
            row["MicroBatchSize"],
            *(f"{case.predicted.memory.total / GIB:.1f}" for case in (once, twice)),
            f"{once.predicted.workload.limit_bytes / GIB:.1f}",
        )
        for row, once, twice in zip(rows_of("fits_mpt.csv"), mpt_cases(1), mpt_cases(2), strict=True)
    ]
    return table(("fits_mpt", "largest", "GiB", "GiB of twice it", "of"), cells)


def pods_table() -> str:
    """How models were dealt to IPU-PODs, and how the planner would do it with what was published fixed."""
    head = ("model on pod", "t,p,r,b", "samples/s", "beside layers", "and")
    return table(head, [*map(_pod_cells, pod_rows())])


def _pod_cells(one: PodRow) -> tuple[str, ...]:
    name = f"{one.row['model'].split(' (')[0]}, {one.workload.model.sequence}, {one.row['machine']}"
    if not one.answer.fitting:
        return name, ", ".join(one.row[size] for size in SIZES), "", "", "does not fit"
    first = one.answer.fitting[0]
    rate = one.workload.training.global_batch / first.duration.total
    terms = {field.name: getattr(first.duration, field.name) for field in fields(first.duration)}
    most = max(terms.keys() - {"layers"}, key=terms.__getitem__)
    chosen = [
        word
        for word in first.mapping.text.split(",")
        if word.partition("=")[0] not in (*SIZES, "weight_shards", "optimizer_shards")
    ]
    sizes = ",".join(str(getattr(first.mapping, size)) for size in SIZES)
    beside = f"{most} {terms[most] / first.duration.total:.0%}"
    return name, sizes, f"{rate:,.0f}", beside, " ".join(chosen)


def fits_of(one: Sequence[Timed], many: Sequence[Timed]) -> str:
    """The constants that every fifth of the groups gives, and their scores on what was not fitted."""
    constants, scores = [], []
    for offset in range(SHARE):
        groups, rest = split(one, offset)
        found = fitted(groups)
        constants.append(found)
        iterations = fmean(pair.error for pair in megatron_seconds(found))
        cells = (*score_of(pairs_of(rest, found)).cells, f"{score_of(pairs_of(many, found)).error:.1%}")
        scores.append((str(offset), *cells, f"{iterations:.1%}"))
    head = ("fifth", "error", "≤ 1.03", "loss", "rank", "many hosts", "megatron")
    names = [field.name for field in fields(CONSTANTS) if field.name != "context_bytes"]
    ends = [(min(values), max(values)) for name in names for values in [[getattr(one, name) for one in constants]]]
    values = [f"`{name}` {least:.3g} to {most:.3g}" for name, (least, most) in zip(names, ends, strict=True)]
    return "\n\n".join([table(head, scores), f"Ranges: {', '.join(values)}."])


def plot(path: Path, series: Sequence[tuple[str, Sequence[Pair]]]) -> None:
    """Draw predicted over measured seconds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 6), layout="constrained")
    axes: Any = figure.subplots()
    for name, pairs in series:
        axes.scatter([pair.measured for pair in pairs], [pair.predicted for pair in pairs], s=8, label=name)
    ends = [0.05, 100.0]
    axes.plot(ends, ends, color="#888", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="measured seconds a step", ylabel="predicted seconds a step")
    axes.set_aspect("equal")
    axes.legend()
    figure.savefig(path, dpi=DOTS_PER_INCH)


def main() -> None:
    """Print the tables, and write what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--fit", action="store_true", help="fit the constants on each fifth of the groups, and compare"
    )
    parser.add_argument("--summary", action="store_true", help="leave out the rows of the long tables")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="predicted over measured seconds")
    parser.add_argument("--document", type=Path, help="put the tables between its comments")
    arguments = parser.parse_args()
    one, many = step_cases(f"{ONE_HOST}.csv"), step_cases(f"{MANY_HOSTS}.csv")
    if arguments.fit:
        _show(arguments.document, "fits", lambda: fits_of(one, many))
        return
    near, far = pairs_of(one), pairs_of(many)
    if not arguments.summary:
        sys.stdout.write(
            "\n\n".join([times_table(near), times_table(far), megatron_tables(), fits_table()]) + "\n\n"
        )
    _show(
        arguments.document,
        "accuracy",
        lambda: "\n\n".join([goals_table(score_of(near), score_of(far)), pods_table()]),
    )
    if arguments.plot:
        series = [("one host", near), ("many hosts", far), ("22B to 1T parameters", megatron_seconds())]
        plot(arguments.plot, series)


def _show(document: Path | None, name: str, text_of: Callable[[], str]) -> None:
    text = text_of()
    sys.stdout.write(text + "\n")
    if document:
        put(document, name, text)


if __name__ == "__main__":
    main()
