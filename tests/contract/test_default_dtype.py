"""The whole library trains the same bits whatever a program has given to ``torch.set_default_dtype``."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import popdist
from popdist.checkpoint import load_latest, save
from popdist.optim import LAMB, LARS, LowPrecision
from tests.contract.forked_calls import ForkedWorlds
from tests.running import DEADLINE_SECONDS

NUM_SAMPLES = 47
NUM_STEPS = {1: 260, 2: 20}
"""For each number of instances; a counter of steps in bfloat16 stays at 256."""


class Noisy(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Samples with noise that is drawn when they are read."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return index / NUM_SAMPLES + 0.1 * torch.randn(8, dtype=torch.float32), index % 3


def net(dtype: torch.dtype) -> nn.Sequential:
    """One whose weights have this dtype, whatever the default is."""
    layers: list[nn.Module] = [
        nn.Linear(8, 40, dtype=dtype),
        nn.BatchNorm1d(40, dtype=dtype),
        nn.Dropout(0.1),
        nn.Linear(40, 3, dtype=dtype),
    ]
    values = torch.Generator().manual_seed(0)
    made = nn.Sequential(*layers)
    for parameter in made.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, dtype=torch.float32, generator=values) / 4)
    return made


def optimizers() -> Iterator[tuple[str, popdist.ReplicatedModel, Any]]:
    """Each of popdist's, with the model that it trains."""
    kinds: dict[str, tuple[torch.dtype, Any, dict[str, Any]]] = {
        "LAMB": (torch.float32, LAMB, {}),
        "LARS": (torch.float32, LARS, {"momentum": 0.9}),
        "LowPrecision": (torch.bfloat16, LowPrecision, {"optimizer_class": torch.optim.AdamW}),
        "RMSprop": (torch.float16, LowPrecision, {"optimizer_class": torch.optim.RMSprop}),
        "AdamW": (torch.float32, torch.optim.AdamW, {}),
    }
    for name, (dtype, kind, settings) in kinds.items():
        torch.manual_seed(1)
        model = popdist.ReplicatedModel(net(dtype))
        if name == "LARS":
            yield name, model, LARS(model.parameters(), lr=0.01, **settings)
        else:
            yield name, model, popdist.ShardedOptimizer(model, kind, lr=0.01, **settings)


def train(default: torch.dtype, folder: Path) -> dict[str, str]:
    """What each optimizer has trained, and what a checkpoint brings back."""
    torch.set_default_dtype(default)
    popdist.init(timeout_seconds=DEADLINE_SECONDS)
    found = {}
    for name, model, optimizer in optimizers():
        dtype = next(model.parameters()).dtype
        loader = popdist.data_loader(Noisy(), 5, shuffle=True)
        losses, num_steps = popdist.Mean(), 0
        while num_steps < (NUM_STEPS[popdist.num_instances()] if name == "LAMB" else 20):
            for batch in loader:
                optimizer.zero_grad()
                for x, y in model.micro_batches(batch):
                    loss = cross_entropy(model(x.to(dtype)).float(), y)
                    loss.backward()
                    losses.add(loss.item() * len(y), len(y))
                if name == "AdamW":
                    model.clip_grad_norm_(0.5)
                optimizer.step()
                num_steps += 1
        values = {
            "mean": torch.tensor([losses.compute()], dtype=torch.float64),
            "sum": popdist.all_reduce(torch.full((3,), 0.1, dtype=torch.float64)),
            "rows": popdist.gather(torch.arange(4 * popdist.num_replicas(), dtype=torch.int64)[share()]),
        }
        save(folder / name, step=num_steps, model=model, optimizer=optimizer, loader=loader)
        loaded = load_latest(folder / name, model=model, optimizer=optimizer, loader=loader)
        assert loaded is not None
        found[name] = popdist.checksum({**model.state_dict(), **values})
    return found


def share() -> slice:
    """This instance's part of four rows for each replica."""
    replicas = popdist.local_replicas()
    return slice(4 * replicas.start, 4 * replicas.stop)


@pytest.mark.parametrize("num_instances", NUM_STEPS)
def test_default_dtype_changes_no_bit(forked_world: ForkedWorlds, num_instances: int, tmp_path: Path) -> None:
    """Nothing of popdist takes its dtype from the program's default."""
    expected, *others = (
        forked_world(
            train,
            dtype,
            tmp_path / str(dtype),
            num_instances=num_instances,
            num_replicas=2,
            timeout_seconds=DEADLINE_SECONDS,
        )
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64)
    )

    assert others == [expected] * 3
