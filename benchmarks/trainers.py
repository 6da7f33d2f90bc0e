"""The step of Trainer, Lightning, Fabric and accelerate, with popdist's line and without it.

    python benchmarks/trainers.py --rounds 5

Each library trains with one replica in each of two processes, on the CPUs of this machine: under ``torchrun`` by
the library alone, whose DistributedDataParallel adds by gloo, and under ``poprun`` with popdist's line. In each
round the two run one after the other. A figure is the median time of a step, popdist's divided by the library's.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median as middle
from typing import Any, Final

from measuring.documents import table
from measuring.medians import Median, ratio

LIMIT: Final = 1.03
DEADLINE_SECONDS: Final = 300
WARM_UP: Final = 5
"""Steps that are not timed."""

SIZES: Final = {"0.1 M": (64, 2), "13 M": (1024, 12)}
"""Width and number of the hidden layers, by the number of parameters."""


def network(size: str) -> Any:
    """Return a network of linear layers."""
    from torch import nn

    width, number = SIZES[size]
    hidden = [layer for _ in range(number) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(64, width), *hidden, nn.Linear(width, 10))


def samples(num_steps: int) -> Any:
    """Return a dataset for ``num_steps`` steps of two replicas, with eight samples each."""
    import torch
    from torch.utils.data import TensorDataset

    number = num_steps * 2 * 8
    return TensorDataset(torch.randn(number, 64), torch.randint(10, (number,)))


def by_accelerate(size: str, num_steps: int, *, replicated: bool, tick: Callable[[], None]) -> None:
    """Train with a loop of accelerate."""
    import accelerate
    import torch
    from torch.utils.data import DataLoader

    kind = accelerate.Accelerator
    if replicated:
        from popdist.accelerate import Accelerator as kind  # noqa: N813 - one name for both
    accelerator = kind(cpu=True)
    net = network(size)
    loader = DataLoader(samples(num_steps), batch_size=8)
    model, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01), loader)
    for x, y in loader:
        accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        tick()


def by_fabric(size: str, num_steps: int, *, replicated: bool, tick: Callable[[], None]) -> None:
    """Train with a loop of Fabric."""
    import torch
    from lightning.fabric import Fabric
    from torch.utils.data import DataLoader

    strategy: Any = "ddp"
    if replicated:
        from popdist.fabric import FabricStrategy

        strategy = FabricStrategy()
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    net = network(size)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.01))
    loader = fabric.setup_dataloaders(DataLoader(samples(num_steps), batch_size=8))
    for x, y in loader:
        fabric.backward(torch.nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        tick()


def by_lightning(size: str, num_steps: int, *, replicated: bool, tick: Callable[[], None]) -> None:
    """Train with Lightning's Trainer."""
    import lightning
    import torch
    from torch.utils.data import DataLoader

    class Module(lightning.LightningModule):  # type: ignore[misc]  # Lightning has no types
        def __init__(self) -> None:
            super().__init__()
            self.net = network(size)

        def training_step(self, batch: Any) -> Any:
            return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def on_train_batch_end(self, *_args: Any) -> None:
            tick()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    strategy: Any = "ddp"
    if replicated:
        from popdist.lightning import ReplicatedStrategy

        strategy = ReplicatedStrategy()
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, **quiet)
    trainer.fit(Module(), DataLoader(samples(num_steps), batch_size=8))


def by_trainer(size: str, num_steps: int, *, replicated: bool, tick: Callable[[], None]) -> None:
    """Train with transformers' Trainer."""
    import torch
    import transformers
    from torch import nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network(size)

        def forward(self, x: Any, labels: Any) -> Any:
            return {"loss": nn.functional.cross_entropy(self.net(x), labels)}

    class Tick(transformers.TrainerCallback):  # type: ignore[misc]  # transformers' callbacks have no types
        def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
            tick()

    kind = transformers.Trainer
    if replicated:
        from popdist.transformers import Trainer as kind  # noqa: N813 - one name for both
    arguments = transformers.TrainingArguments(
        num_train_epochs=1,
        per_device_train_batch_size=8,
        report_to=[],
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    data = [{"x": x, "labels": torch.as_tensor(y)} for x, y in samples(num_steps)]
    kind(model=Model(), args=arguments, train_dataset=data, callbacks=[Tick()]).train()


LIBRARIES: Final = {
    "accelerate": by_accelerate,
    "transformers": by_trainer,
    "Lightning": by_lightning,
    "Fabric": by_fabric,
}


def train(library: str, size: str, num_steps: int, *, replicated: bool) -> None:
    """Train in this process, and print the median seconds of a step."""
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    times: list[float] = []
    LIBRARIES[library](size, num_steps, replicated=replicated, tick=lambda: times.append(time.perf_counter()))
    steps = [after - before for before, after in zip(times[WARM_UP:], times[WARM_UP + 1 :], strict=False)]
    print(f"seconds {middle(steps)}", flush=True)


def seconds_of(library: str, size: str, num_steps: int, *, replicated: bool) -> float:
    """Return the median seconds of a step of one job of two processes."""
    scripts = Path(sys.executable).parent
    launcher = [str(scripts / "torchrun"), "--nproc-per-node", "2"]
    words = [str(Path(__file__).resolve()), "--train", library, size, str(num_steps)]
    if replicated:
        launcher = [str(scripts / "poprun"), "-n", "2", "--num-replicas", "2", sys.executable]
        words.append("--replicated")
    finished = subprocess.run(
        [*launcher, *words], capture_output=True, text=True, check=False, timeout=DEADLINE_SECONDS
    )
    found = [float(line.rpartition(" ")[2]) for line in finished.stdout.splitlines() if "seconds " in line]
    if finished.returncode or not found:
        raise SystemExit(f"{library} has failed:\n{finished.stdout}\n{finished.stderr}")
    return max(found)


def measure(rounds: int, num_steps: int) -> dict[tuple[str, str], Median]:
    """Return popdist's time of a step divided by the library's, by library and size."""
    found = {}
    for library in LIBRARIES:
        for size in SIZES:
            pairs = [
                [seconds_of(library, size, num_steps, replicated=is_ours) for is_ours in (True, False)]
                for _ in range(rounds)
            ]
            found[library, size] = ratio(*zip(*pairs, strict=True))
    return found


def described(found: dict[tuple[str, str], Median]) -> str:
    """Return a table of the ratios."""
    rows: Iterable[Sequence[str]] = [
        [library, size, f"{it.value:.2f} ({it.lower:.2f} to {it.upper:.2f})", "yes" if it.value <= LIMIT else "NO"]
        for (library, size), it in found.items()
    ]
    return table(["library", "parameters", "popdist / library", f"≤ {LIMIT}"], list(rows))


def main() -> None:
    """Measure all libraries, or train in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--train", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--replicated", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        library, size, num_steps = arguments.train
        train(library, size, int(num_steps), replicated=arguments.replicated)
    else:
        print(described(measure(arguments.rounds, arguments.steps)))


if __name__ == "__main__":
    main()
