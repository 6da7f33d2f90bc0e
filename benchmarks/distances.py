"""Train the digits in 1, 2 and 4 processes, and draw how far the weights go from the weights of one process.

    python benchmarks/distances.py --plot docs/distances.svg

DistributedDataParallel adds up the gradients in another order for each number of processes, and rounds each sum.
"""

import argparse
import math
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import popdist

NUM_REPLICAS, GLOBAL_BATCH = 4, 64
KINDS = {"DistributedDataParallel": ("#d62728", "#ff9896"), "popdist": ("#1f77b4", "#17becf")}
"""How the digits are trained, with the colours of two and four processes."""
SPLITS = (2, 4)
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 300, 84, 20, 46, 44


def train(kind: str, num_steps: int, file: str) -> None:
    """Train in this process of a job, and write the weights after each step into ``file`` from instance 0."""
    popdist.init()
    rank, size = popdist.instance_index(), popdist.num_instances()
    torch.manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16, torch.tensor(digits.target)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    step = _popdist_step(net) if kind == "popdist" else _ddp_step(net)
    optimizer, weights = torch.optim.AdamW(net.parameters(), lr=1e-2), []
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).repeat(1 + num_steps // 20)
    for rows in order.split(GLOBAL_BATCH)[:num_steps]:
        own = rows.chunk(size)[rank]
        optimizer.zero_grad()
        step(images[own], labels[own])
        optimizer.step()
        weights.append(torch.cat([it.detach().flatten() for it in net.parameters()]))
    if rank == 0:
        torch.save(torch.stack(weights), file)


def _popdist_step(net: nn.Module) -> Callable[[Tensor, Tensor], None]:
    model = popdist.ReplicatedModel(net)

    def step(images: Tensor, labels: Tensor) -> None:
        for x, y in model.micro_batches((images, labels)):
            nn.functional.cross_entropy(model(x), y).backward()

    return step


def _ddp_step(net: nn.Module) -> Callable[[Tensor, Tensor], None]:
    distributed.init_process_group("gloo")
    model = DistributedDataParallel(net)

    def step(images: Tensor, labels: Tensor) -> None:
        nn.functional.cross_entropy(model(images), labels).backward()

    return step


def distances(kind: str, num_steps: int) -> dict[int, list[float]]:
    """The distances to one process's weights after each step, as parts of their length, by number of processes."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in (1, *SPLITS):
            file = str(Path(folder, str(number)))
            replicas = ["--num-replicas", str(NUM_REPLICAS)] if kind == "popdist" else []
            program = [sys.executable, __file__, "--steps", str(num_steps), "--train", kind, file]
            words = [str(Path(sys.executable).with_name("poprun")), "-n", str(number), *replicas, *program]
            subprocess.run(words, check=True, stdin=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
            found[number] = torch.load(file).double()
    alone = found.pop(1)
    return {number: ((it - alone).norm(dim=1) / alone.norm(dim=1)).tolist() for number, it in found.items()}


def svg(curves: Mapping[tuple[str, int], Sequence[float]]) -> str:
    """The distances of each kind and number of processes over the steps, as one picture."""
    num_steps, most = len(next(iter(curves.values()))), max(map(max, curves.values())) or 1.0
    unit = 10.0 ** math.floor(math.log10(most))
    top = unit * math.ceil(most / unit)

    def y(distance: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * distance / top

    parts = [_text(LEFT, 18, "distance of the weights from the weights of one process (part of their length)")]
    for mark in range(5):
        height = y(top * mark / 4)
        parts.append(f'<path d="M{LEFT} {height:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 8, height + 4, f"{100 * top * mark / 4:.3g} %" if mark else "0", "end"))
    parts.append(_text((LEFT + WIDTH) / 2, HEIGHT - 8, f"{num_steps} steps of training", "middle"))
    for place, ((kind, number), curve) in enumerate(curves.items()):
        colour, last = KINDS[kind][SPLITS.index(number)], curve[-1]
        x = [LEFT + (WIDTH - LEFT - RIGHT) * (step + 1) / num_steps for step in range(num_steps)]
        line = " ".join(f"{at:.1f},{y(distance):.1f}" for at, distance in zip(x, curve, strict=True))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="{4 - number / 2}"/>')
        height = TOP + 14 + 20 * place
        parts.append(f'<path d="M{LEFT + 16} {height - 4}h24" stroke="{colour}" stroke-width="4"/>')
        end = f"{100 * last:.3g} % at the end" if last else "0: the same bits"
        parts.append(_text(LEFT + 48, height, f"{kind}, {number} processes: {end}"))
    frame = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {frame} font-family="sans-serif" font-size="12">'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>', *parts, "</svg>\n"])


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def main() -> None:
    """Train, print the last distances, and draw all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500, help="(500)")
    parser.add_argument("--plot", type=Path, help="an SVG file to write")
    parser.add_argument("--train", nargs=2, metavar=("KIND", "FILE"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.train:
        train(asked.train[0], asked.steps, asked.train[1])
        return

    curves = {(kind, number): curve for kind in KINDS for number, curve in distances(kind, asked.steps).items()}
    for (kind, number), curve in curves.items():
        print(f"{kind}, {number} processes: {curve[-1]:.2e} after {asked.steps} steps")
    if any(max(curve) for (kind, _), curve in curves.items() if kind == "popdist"):
        raise SystemExit("the splits of popdist differ: that must not be")
    if asked.plot:
        asked.plot.write_text(svg(curves), encoding="utf-8")
    print(f"again: {shlex.join(['python', *sys.argv])}")


if __name__ == "__main__":
    main()
