"""Are the losses the same, however the instances share a replica? One small GPT, trained by each mapping.

    python benchmarks/mappings.py --document docs/large-models.md --plot docs/mappings.svg

Every job trains on the same samples with the same first weights, so the losses differ by rounding alone.
"""

import argparse
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from measuring.documents import put, table
from measuring.log_log import Panel, svg

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_gpt.py"
LIMIT, LEAST = 1e-5, 1e-8
STEPS = (1, 2, 5, 10, 20, 50)
"""Those that the picture shows."""

LIMIT_SECONDS = 900

JOBS = {
    "-n 1": (),
    "-n 4 --parallelism tensor=2": (),
    "-n 4 --parallelism pipeline=2": (),
    "-n 8 --parallelism tensor=2,pipeline=2": (),
    "-n 8": (),
    "-n 4": ("--fully-sharded",),
}
"""Words for poprun, and for the program."""


def losses_of(poprun_words: str, program_words: Sequence[str], steps: int) -> list[float]:
    """The loss of each step of one job."""
    poprun = [sys.executable, "-m", "poprun", "--tag-output=no", *poprun_words.split()]
    command = [*poprun, sys.executable, str(EXAMPLE), "--steps", str(steps), *program_words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_SECONDS)
    lines = [line.split() for line in done.stdout.splitlines()]
    losses = [float(words[1]) for words in lines if len(words) == 2 and words[0].isdecimal()]
    if done.returncode or len(losses) != steps:
        raise SystemExit(f"{shlex.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return losses


def main() -> None:
    """Train by each mapping, and print how far the losses lie apart."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--document", type=Path, help="a Markdown file whose part `mappings` gets the table")
    parser.add_argument("--plot", type=Path, help="an SVG file for the curves")
    options = parser.parse_args()
    found = {}
    for poprun_words, program_words in JOBS.items():
        name = " ".join(["poprun", poprun_words, *program_words])
        found[name] = losses_of(poprun_words, program_words, options.steps)
    alone, *_ = found.values()
    worst = {name: max(abs(a - b) for a, b in zip(alone, losses, strict=True)) for name, losses in found.items()}
    rows = [
        (f"`{name}`", f"{losses[0]:.6f}", f"{losses[-1]:.6f}", f"{worst[name]:.1e}")
        for name, losses in found.items()
    ]
    holds = "holds" if max(worst.values()) <= LIMIT else "does not hold"
    command = "`python benchmarks/mappings.py --document docs/large-models.md --plot docs/mappings.svg`"
    head = ("job", "first loss", f"loss of step {options.steps}", "largest difference")
    text = f"{command}\n\n{table(head, rows)}\n\nThe limit of {LIMIT:g} {holds}."
    print(text)
    if options.document is not None:
        put(options.document, "mappings", text)
    if options.plot is not None:
        options.plot.write_text(_picture(list(found.values())), encoding="utf-8")


def _picture(found: Sequence[Sequence[float]]) -> str:
    """The loss of one process, and how far those of the others lie from it."""
    alone, *others = found
    curves = {"loss of one": _curve(alone)}
    for name, losses in zip(("t = 2", "p = 2", "t = 2, p = 2", "r = 8", "fully sharded"), others, strict=True):
        curves[name] = _curve([max(abs(a - b), LEAST) for a, b in zip(alone, losses, strict=True)])
    panel = Panel(title="Loss by step, and how far the others are from it (1e-08: none)", curves=curves)
    return svg([panel], str, lambda value: f"{value:g}", "")


def _curve(values: Sequence[float]) -> dict[int, tuple[float, float, float]]:
    return {step: (values[step - 1],) * 3 for step in STEPS if step <= len(values)}


if __name__ == "__main__":
    main()
