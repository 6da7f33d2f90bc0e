"""Packing: rows, proved gaps and seconds of each strategy; and beside other packers.

    python benchmarks/packing.py

The histograms are those that were published with "Efficient Sequence Packing without Cross-contamination"
(https://arxiv.org/abs/2107.02027), whose figures stand beside ours. The other packers get a million lengths
drawn from the one of Wikipedia: the loop of first fit decreasing, over a tree of the rows' room, and trl's
``pack_dataset``, if it is installed (``pip install trl``), of a dataset of rows of bytes. ``wrapped`` cuts
sequences, which is another thing.
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from measuring.documents import put, table
from numpy.typing import NDArray

from popdist.packing import PackingStrategy, lpfhp, nnlshp, optimal, spfhp, unpacked
from popdist.packing.packed_loader import PackedRows

DATA = Path(__file__).parent / "data" / "packing_histograms.json"
WIKIPEDIA, SQUAD = ("wikipedia-512", 512), ("squad-1.1-384", 384)

PUBLISHED = {
    (WIKIPEDIA, "none", 1): "16.280 M",
    (WIKIPEDIA, "spfhp", 2): "10.102 M",
    (WIKIPEDIA, "spfhp", 3): "9.095 M",
    (WIKIPEDIA, "spfhp", 4): "8.659 M",
    (WIKIPEDIA, "spfhp", 8): "8.225 M",
    (WIKIPEDIA, "spfhp", None): "8.168 M",
    (WIKIPEDIA, "nnlshp", 3): "8.155 M in 18 to 24 s",
    (SQUAD, "spfhp", 2): "45,335",
    (SQUAD, "spfhp", None): "40,711",
    (SQUAD, "nnlshp", 3): "40,808",
    (SQUAD, "lpfhp", None): "40,631",
}


class Timed(NamedTuple):
    """What a call gave, and how long it took."""

    value: Any
    seconds: float


def timed(call: Callable[[], Any]) -> Timed:
    """Call once."""
    start = time.perf_counter()
    value = call()
    return Timed(value, time.perf_counter() - start)


def strategies_table(name: tuple[str, int], *, with_nnlshp: bool) -> str:
    """All strategies on one histogram."""
    max_length = name[1]
    histogram = json.loads(DATA.read_text(encoding="utf-8"))[name[0]]
    calls: list[tuple[Callable[..., PackingStrategy], int | None]] = [
        *((spfhp, limit) for limit in (2, 3, 4, 8, None)),
        *((lpfhp, limit) for limit in (3, 8, None)),
        *(((nnlshp, 3),) if with_nnlshp else ()),
        *((optimal, limit) for limit in (2, 3, 4, 8, None)),
    ]
    made = [Timed(unpacked(histogram, max_length), 0.0)]
    optimal([1, 2, 3], 4)  # loads scipy
    for algorithm, limit in calls:
        made.append(timed(lambda algorithm=algorithm, limit=limit: algorithm(histogram, max_length, limit)))  # type: ignore[misc] # mypy takes no defaults here
    head = ("strategy", "most a row", "rows", "real tokens", "bound", "gap", "seconds", "published")
    rows = [
        (
            strategy.algorithm,
            str(strategy.max_sequences_per_pack or "any"),
            f"{strategy.num_packs:,}",
            f"{strategy.efficiency:.3%}",
            f"{strategy.lower_bound:,}",
            f"{strategy.gap:.4%}",
            f"{seconds:.3f}" if seconds else "",
            PUBLISHED.get((name, strategy.algorithm, strategy.max_sequences_per_pack), ""),
        )
        for strategy, seconds in made
    ]
    return table(head, rows)


def first_fit_decreasing(lengths: NDArray[np.int64], max_length: int) -> int:
    """Rows of the loop of first fit decreasing: each sequence into the first row that has room."""
    size = 1 << int(len(lengths) - 1).bit_length()
    room = [max_length] * (2 * size)
    num_rows = 0
    for length in np.sort(lengths)[::-1].tolist():
        node = 1
        while node < size:
            node *= 2
            if room[node] < length:
                node += 1
        room[node] -= length
        num_rows = max(num_rows, node - size + 1)
        while node > 1:
            node //= 2
            best = max(room[2 * node], room[2 * node + 1])
            if room[node] == best:
                break
            room[node] = best
    return num_rows


def of_trl(lengths: NDArray[np.int64], max_length: int, strategy: str) -> Timed | None:
    """Rows of trl's packer, which sees all sequences at once; None where it is not installed."""
    try:
        from trl import pack_dataset
    except ImportError:
        return None
    import pyarrow as pa
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    column = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(np.zeros(offsets[-1], np.int8)))
    dataset = Dataset(pa.table({"input_ids": column}))
    options = {"batch_size": len(lengths), "keep_in_memory": True}
    packed = timed(lambda: pack_dataset(dataset, max_length, strategy, options))
    return Timed(len(packed.value), packed.seconds)


def packers_table(num_sequences: int, max_length: int = WIKIPEDIA[1]) -> str:
    """Ours and others' on lengths drawn from the histogram of Wikipedia."""
    counts = np.array(json.loads(DATA.read_text(encoding="utf-8"))[WIKIPEDIA[0]])
    lengths = np.random.default_rng(0).choice(len(counts), num_sequences, p=counts / counts.sum()) + 1
    ours: dict[str, Timed] = {}
    for algorithm in (lpfhp, optimal):
        made = timed(lambda algorithm=algorithm: algorithm(np.bincount(lengths)[1:], max_length))  # type: ignore[misc] # as above
        ours[f"popdist {made.value.algorithm}"] = Timed(made.value.num_packs, made.seconds)
        rows = PackedRows(lengths, made.value, seed=0, shuffle=True)
        dealt = timed(lambda rows=rows: rows.samples(range(rows.num_rows), 0))  # type: ignore[misc] # as above
        ours[f"popdist {made.value.algorithm}, and the samples of each row"] = Timed(
            made.value.num_packs, made.seconds + dealt.seconds
        )
    others = {
        "first fit decreasing": timed(lambda: first_fit_decreasing(lengths, max_length)),
        "trl bfd": of_trl(lengths, max_length, "bfd"),
        "trl wrapped, which cuts sequences": of_trl(lengths, max_length, "wrapped"),
    }
    first = ours["popdist lpfhp"]
    cells = [
        (name, f"{found.value:,}", f"{found.seconds:.2f}", f"{found.seconds / first.seconds:.1f}")
        for name, found in {**ours, **others}.items()
        if found is not None
    ]
    return table(("packer", "rows", "seconds", "times lpfhp's"), cells)


def main() -> None:
    """Measure, and print or write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-sequences", type=int, default=10**6, help="lengths drawn for the packers")
    parser.add_argument("--only-squad", action="store_true", help="leave out Wikipedia's table")
    parser.add_argument("--without-nnlshp", action="store_true", help="leave out what takes half a minute")
    parser.add_argument("--document", type=Path, help="put the tables between its comments")
    arguments = parser.parse_args()
    wikipedia = "left out"
    if not arguments.only_squad:
        wikipedia = strategies_table(WIKIPEDIA, with_nnlshp=not arguments.without_nnlshp)
    squad = strategies_table(SQUAD, with_nnlshp=not arguments.without_nnlshp)
    text = "\n\n".join(
        [
            f"On one core: `python {shlex.join(sys.argv)}`",
            "Wikipedia, 16,279,552 sequences in rows of 512 tokens:",
            wikipedia,
            "SQuAD 1.1, 88,641 sequences in rows of 384 tokens:",
            squad,
            f"{arguments.num_sequences:,} lengths drawn from Wikipedia's histogram:",
            packers_table(arguments.num_sequences),
        ]
    )
    sys.stdout.write(text + "\n")
    if arguments.document:
        put(arguments.document, "strategies", text)


if __name__ == "__main__":
    main()
