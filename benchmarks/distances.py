"""Train the digits with the same four replicas in one, two and four instances, and draw the three trainings.

    python benchmarks/training.py --plot docs/training.svg

The curves lie on each other, because the bits of the weights do not depend on the split.
"""

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_digits.py"
NUM_REPLICAS = 4
SPLITS = {1: ("#ff7f0e", 9), 2: ("#2ca02c", 6), 4: ("#1f77b4", 3)}
"""Numbers of instances, with the colour and the size of their marks."""
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 300, 60, 20, 46, 44


def train(num_instances: int, num_epochs: int) -> tuple[list[float], str]:
    """The test accuracy after each epoch in percent, and the checksum of the weights."""
    poprun = Path(sys.executable).parent / "poprun"
    options = ["--num-instances", str(num_instances), "--num-replicas", str(NUM_REPLICAS)]
    words = [str(poprun), *options, sys.executable, str(EXAMPLE), "--epochs", str(num_epochs)]
    told = subprocess.run(words, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout
    accuracies = [float(found) for found in re.findall(r"epoch \d+: test accuracy ([\d.]+)%", told)]
    checksums = re.findall(r"weights ([0-9a-f]{32})", told)
    return accuracies, checksums[0]


def svg(trainings: Mapping[int, Sequence[float]], title: str) -> str:
    """The curves of ``trainings``, by their number of instances, as one picture; at least two epochs."""
    num_epochs = len(next(iter(trainings.values())))
    least = 2 * int(min(map(min, trainings.values())) // 2)

    def x(epoch: float) -> float:
        return LEFT + 20 + (WIDTH - LEFT - RIGHT - 40) * epoch / (num_epochs - 1)

    def y(accuracy: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * (accuracy - least) / (100 - least)

    parts = [_text(LEFT, 18, title, "start")]
    for accuracy in range(least, 101, 2):
        parts.append(f'<path d="M{LEFT} {y(accuracy):.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 8, y(accuracy) + 4, f"{accuracy} %", "end"))
    parts += [_text(x(epoch), HEIGHT - BOTTOM + 18, str(epoch + 1), "middle") for epoch in range(num_epochs)]
    parts.append(_text((LEFT + WIDTH) / 2, HEIGHT - 8, "epoch", "middle"))
    for place, (num_instances, accuracies) in enumerate(trainings.items()):
        colour, size = SPLITS[num_instances]
        points = [(x(epoch), y(accuracy)) for epoch, accuracy in enumerate(accuracies)]
        line = " ".join(f"{at:.1f},{height:.1f}" for at, height in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="{size / 2}"/>')
        at = WIDTH - RIGHT - 190
        points.append((at, HEIGHT - BOTTOM - 74 + 22 * place))
        parts += [f'<circle cx="{left:.1f}" cy="{top:.1f}" r="{size}" fill="{colour}"/>' for left, top in points]
        name = _counted(num_instances, "instance")
        each = _counted(NUM_REPLICAS // num_instances, "replica")
        parts.append(_text(at + 16, HEIGHT - BOTTOM - 70 + 22 * place, f"{name}, {each} each", "start"))
    frame = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {frame} font-family="sans-serif" font-size="12">'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>', *parts, "</svg>\n"])


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' if count > 1 else ''}"


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def main() -> None:
    """Train, print the accuracies, and draw them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8, help="at least 2 (8)")
    parser.add_argument("--instances", type=int, nargs="+", choices=SPLITS, default=list(SPLITS), help="(1 2 4)")
    parser.add_argument("--plot", type=Path, help="an SVG file to write")
    asked = parser.parse_args()

    found = {num_instances: train(num_instances, asked.epochs) for num_instances in asked.instances}
    for num_instances, (accuracies, checksum) in found.items():
        print(f"{num_instances} instances: {' '.join(f'{at:.2f}%' for at in accuracies)}  weights {checksum}")
    if len(set(map(str, found.values()))) != 1:
        raise SystemExit("the splits differ: that must not be")
    if asked.plot:
        title = f"{EXAMPLE.name}: test accuracy of the same {NUM_REPLICAS} replicas, dealt {len(found)} ways"
        trainings = {num_instances: accuracies for num_instances, (accuracies, _) in found.items()}
        asked.plot.write_text(svg(trainings, title), encoding="utf-8")
    print(f"again: {shlex.join(['python', *sys.argv])}")


if __name__ == "__main__":
    main()
