"""Trains a small model data-parallel for some seconds; one instance may be late in one phase of each step.

poprun --num-instances 2 python benchmarks/measuring/delayed_training.py 15 --phase data --delay 0.002
"""

import argparse
import time

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

NUM_STEPS = 20
"""After so many steps the instances agree on whether the time is over."""

WIDTH = 512


class Late(nn.Module):
    """Passes on what it is given, late in the forward pass."""

    def __init__(self, delay_seconds: float) -> None:
        super().__init__()
        self._delay_seconds = delay_seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same values."""
        time.sleep(self._delay_seconds)
        return x


class LateRows(TensorDataset):
    """Rows of which the first of each batch comes late."""

    delay_seconds = 0.0

    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, ...]]:
        """The rows of a batch."""
        time.sleep(self.delay_seconds)
        return [self[index] for index in indices]


def main() -> None:
    """Train until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seconds", type=float, help="of training")
    parser.add_argument("--phase", choices=["data", "forward", "optimizer"], default="data")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds in each step of the last instance")
    options = parser.parse_args()
    distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    is_late = distributed.get_rank() == distributed.get_world_size() - 1
    delays = {options.phase: options.delay if is_late else 0.0}
    torch.manual_seed(0)
    net = nn.Sequential(Late(delays.get("forward", 0.0)), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer.register_step_pre_hook(lambda *_: time.sleep(delays.get("optimizer", 0.0)))
    rows = LateRows(torch.randn(NUM_STEPS * 64, WIDTH))
    rows.delay_seconds = delays.get("data", 0.0)
    loader = DataLoader(rows, batch_size=64)
    goes_on, end = torch.ones(()), time.monotonic() + options.seconds
    while goes_on:
        for (x,) in loader:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        goes_on.fill_(time.monotonic() < end)
        distributed.all_reduce(goes_on, distributed.ReduceOp.MIN)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
