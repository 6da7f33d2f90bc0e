"""Packing against padding: the same texts, the same steps, and the time of a real token.

    python benchmarks/pack_bert.py --document docs/packing.md --plot docs/pack_bert.png

Runs ``examples/pack_bert.py`` with padding and packed, and draws the loss of both over the real tokens seen.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from measuring.documents import put, table

PROGRAM = Path(__file__).parents[1] / "examples" / "pack_bert.py"
NAMES = {"none": "padding", "lpfhp": "packed"}
MEAN_OF = 15

Steps = list[tuple[int, float, float]]
"""Real tokens and seconds so far, and the loss, after each step."""


def train(packing: str, folder: Path, epochs: int, most: int) -> Steps:
    """The steps of one run; at most so many."""
    curve = folder / f"{packing}.json"
    words = ["--packing", packing, "--epochs", str(epochs), "--steps", str(most), "--curve", str(curve)]
    command = [sys.executable, "-m", "poprun", "--launcher", "local", "-n", "2", "--num-replicas", "4"]
    program = [sys.executable, str(PROGRAM), *words, "--tokenizer", str(folder / "tokenizer.json")]
    subprocess.run([*command, *program], check=True, stdin=subprocess.DEVNULL)
    steps: Steps = json.loads(curve.read_text(encoding="utf-8"))["steps"]
    return steps


def smooth(steps: Steps) -> tuple[list[float], list[float], list[float]]:
    """Millions of real tokens, seconds, and the mean loss of the steps around."""
    losses, size = [loss for _, _, loss in steps], min(MEAN_OF, len(steps))
    means = [sum(losses[i : i + size]) / size for i in range(len(losses) - size + 1)]
    middle = steps[size // 2 :][: len(means)]
    return [tokens / 1e6 for tokens, _, _ in middle], [seconds for _, seconds, _ in middle], means


def plot(runs: dict[str, Steps], path: Path) -> None:
    """Both curves in one picture."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (over_tokens, over_time) = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for name, steps in runs.items():
        tokens, seconds, losses = smooth(steps)
        style = {"linewidth": 3.0, "alpha": 0.5} if name == "none" else {"linewidth": 1.2}
        over_tokens.plot(tokens, losses, label=NAMES[name], **style)
        over_time.plot(seconds, losses, label=NAMES[name], **style)
    over_tokens.set(
        xlabel="real tokens, millions", ylabel=f"loss, mean of {MEAN_OF} steps", title="The same steps"
    )
    over_time.set(xlabel="seconds of training", title="in less time")
    for axes in (over_tokens, over_time):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Train twice, and show what a real token costs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10**9, help="stop after so many")
    parser.add_argument("--document", type=Path, help="put the table between its comments")
    parser.add_argument("--plot", type=Path, help="a PNG of both curves; needs matplotlib")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: train(name, Path(folder), arguments.epochs, arguments.steps) for name in NAMES}
    costs = {name: steps[-1][1] / steps[-1][0] for name, steps in runs.items()}
    rows = [
        (
            NAMES[name],
            f"{len(steps):,}",
            f"{steps[-1][0]:,}",
            f"{steps[-1][1]:.1f}",
            f"{1e6 * costs[name]:.0f}",
            f"{costs[name] / costs['none']:.2f}",
            f"{sum(loss for _, _, loss in steps[-MEAN_OF:]) / MEAN_OF:.3f}",
        )
        for name, steps in runs.items()
    ]
    head = ("run", "steps", "real tokens", "seconds", "µs a token", "over padding", f"loss, last {MEAN_OF} steps")
    text = f"`python {shlex.join(sys.argv)}`\n\n{table(head, rows)}"
    sys.stdout.write(text + "\n")
    if arguments.plot:
        plot(runs, arguments.plot)
    if arguments.document:
        put(arguments.document, "training", text)


if __name__ == "__main__":
    main()
