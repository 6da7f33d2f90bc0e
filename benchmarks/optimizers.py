"""How long a step of popdist's optimizers takes beside torch's AdamW, and how much memory their state needs.

    python benchmarks/optimizers.py --rounds 15 --document docs/large-batches.md

25 million parameters in 300 tensors. Every round times a step of ours and one of torch's, in turn; what counts is
the median over the rounds of the ratio within a round. Memory is the bytes of weights and state after a step.
"""

import argparse
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from measuring.documents import put, table
from measuring.medians import Median, median, ratio
from measuring.turns import by_turns, seconds
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from popdist.optim import LAMB, LARS, LowPrecision
from popdist.optim.pieces import find_extension

Make = Callable[[list[nn.Parameter]], Optimizer]

FOREACH = partial(AdamW, foreach=True)
MOST_MEMORY = 0.52
"""What LowPrecision may take of the memory in float32."""

LOW = partial(LowPrecision, optimizer_class=AdamW)
COMPARISONS: dict[str, tuple[torch.dtype, Make, str, Make, float]] = {
    "LAMB": (torch.float32, LAMB, "AdamW(foreach=True)", FOREACH, 1.3),
    "LARS": (torch.float32, LARS, "AdamW(foreach=True)", FOREACH, 1.3),
    "LowPrecision, AdamW, bfloat16": (torch.bfloat16, LOW, "AdamW", AdamW, 2.5),
    "LowPrecision, AdamW, float16": (torch.float16, LOW, "AdamW", AdamW, 2.5),
}
"""What is ours → the dtype of its weights, ours, what it is compared with in float32, and the most it may take."""


def made(make: Make, dtype: torch.dtype, shapes: list[tuple[int, int]]) -> Optimizer:
    """An optimizer that has made a step."""
    parameters = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape).to(dtype)
    optimizer = make(parameters)
    optimizer.step()
    return optimizer


def num_bytes(optimizer: Optimizer) -> int:
    """Of weights and state."""
    parameters = [it for group in optimizer.param_groups for it in group["params"]]
    states = [it for state in optimizer.state.values() for it in state.values() if isinstance(it, Tensor)]
    return sum(it.nbytes for it in (*parameters, *states))


def timed(ours: Callable[[], object], theirs: Callable[[], object], rounds: int) -> tuple[Median, list[str]]:
    """The ratio of the seconds of two steps; what a table says of both, and the ratio with its interval."""
    times = by_turns({"ours": partial(seconds, ours), "theirs": partial(seconds, theirs)}, rounds)
    found = ratio(times["ours"], times["theirs"])
    cells = [f"{median(times[name]).value * 1e3:.0f} ms" for name in ("ours", "theirs")]
    return found, [*cells, f"{found.value:.2f} ({found.lower:.2f} to {found.upper:.2f})"]


def compare(name: str, rounds: int, shapes: list[tuple[int, int]]) -> list[str]:
    """A row of the table."""
    dtype, make, their_name, make_theirs, most = COMPARISONS[name]
    theirs, ours = made(make_theirs, torch.float32, shapes), made(make, dtype, shapes)
    found, (mine, its, shown) = timed(ours.step, theirs.step, rounds)
    memory = num_bytes(ours) / num_bytes(theirs)
    most_memory = f" (≤ {MOST_MEMORY})" if dtype != torch.float32 else ""
    holds = found.value <= most and (dtype == torch.float32 or memory <= MOST_MEMORY)
    return [
        *(name, mine, f"{its}, {their_name}", shown),
        *(f"≤ {most}", f"{memory:.3f}{most_memory}", "yes" if holds else "no"),
    ]


def main() -> None:
    """Compare, print a table, and write it into a document if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="how often each step is timed (15)")
    parser.add_argument("--num-tensors", type=int, default=300, help="of 83,333 parameters each (300)")
    parser.add_argument("--document", type=Path, help="a document for the table")
    options = parser.parse_args()
    shapes = [(271, 307)] * options.num_tensors
    rows = [compare(name, options.rounds, shapes) for name in COMPARISONS]
    text = table(["", "a step", "torch's, in float32", "ratio (95 %)", "limit", "memory (limit)", "holds"], rows)
    has = "with" if find_extension() else "without"
    command = shlex.join(["python", *sys.argv])
    text += f"\n\n{has} the extension, {torch.get_num_threads()} threads: `{command}`"
    print(text)
    if options.document:
        put(options.document, "optimizers", text)


if __name__ == "__main__":
    main()
