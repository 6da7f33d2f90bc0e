"""accelerate, transformers' Trainer, Lightning and Fabric with several replicas in an instance.

Holds popdist.accelerate, popdist.transformers, popdist.lightning, popdist.fabric, popdist.trainers.replica_rows,
popdist.trainers.replica_steps, popdist.trainers.lightning_rows, popdist.trainers.replica_logs and
popdist.trainers.loop_turns.
"""

import re
import sys
from pathlib import Path

from tests.running import Finished, Poprun


def _run(poprun: Poprun, module: str, *arguments: str, num_instances: int) -> Finished:
    options = ("--num-instances", str(num_instances), "--num-replicas", "4", sys.executable, "-m")
    return poprun(*options, f"tests.contract.{module}", *arguments).succeeded_but_for_torch()


def _lines(finished: Finished, begin: str) -> list[str]:
    lines = [line.removeprefix("[0] ") for line in finished.out.splitlines()]
    return [line for line in lines if line.startswith(begin)]


def test_a_loop_of_accelerate_has_the_same_bits(poprun: Poprun, tmp_path: Path) -> None:
    """At 1 and 2 instances, and if 2 instances go on after the epoch that one instance has saved.

    54 samples are 14 batches, so each of four replicas has 4. With accumulation 2 they make two steps.
    The schedule counts replicas.
    """
    words = ("accelerate_program", "2", str(tmp_path))
    alone = _lines(_run(poprun, *words, "0", num_instances=1), "epoch ")
    resumed = _lines(_run(poprun, *words, "1", num_instances=2), "epoch ")
    two = _lines(_run(poprun, *words, "0", num_instances=2), "epoch ")

    assert alone == two
    assert alone[1:] == resumed
    assert re.match(rf"epoch 1: 2 steps, \d+ of 54, rate {0.01 - 0.01 * 16 / 400:.4f}, ", alone[1])


def test_the_trainer_logs_the_same_losses_and_bits(poprun: Poprun, tmp_path: Path) -> None:
    """At 1 and 2 instances, and if 2 instances go on in the middle of the epoch that one instance has begun."""
    alone = _lines(_run(poprun, "trainer_program", str(tmp_path / "1"), num_instances=1), "logged ")
    two = _lines(_run(poprun, "trainer_program", str(tmp_path / "2"), num_instances=2), "logged ")
    begun = str(tmp_path / "3"), str(tmp_path / "1" / "checkpoint-2")
    resumed = _lines(_run(poprun, "trainer_program", *begun, num_instances=2), "logged ")

    assert len(alone) == 2 * 3 + 2 + 1
    assert alone == two == resumed


def test_lightning_has_the_same_bits(poprun: Poprun, tmp_path: Path) -> None:
    """At 1 and 2 instances, and if 2 instances go on where one instance has saved.

    Lightning's Trainer goes on in the middle of an epoch, and Fabric after an epoch.
    """
    lines = {}
    saved = tmp_path / "1" / "step=1.ckpt", tmp_path / "1" / "epoch-0.ckpt"
    for name, begin, num_instances in (("1", (), 1), ("2", (), 2), ("3", saved, 2)):
        (tmp_path / name).mkdir()
        words = map(str, (tmp_path / name, *begin))
        finished = _run(poprun, "lightning_program", *words, num_instances=num_instances)
        lines[name] = [line for it in ("logged ", "trainer:", "fabric ") for line in _lines(finished, it)]

    assert len(lines["1"]) == 8 + 1 + 2
    assert "'number': 3.0" in lines["1"][7]
    assert lines["1"] == lines["2"]
    assert lines["3"][-2:] == [lines["1"][-3], lines["1"][-1]]


def test_one_instance_stops_all(poprun: Poprun, tmp_path: Path) -> None:
    """A callback's wish on one instance is that of all; the losses of the next training begin at zero again."""
    words = ("trainer_program", str(tmp_path), "stop")
    alone, two = (_run(poprun, *words, num_instances=number) for number in (1, 2))

    assert _lines(alone, "logged ") == _lines(two, "logged ")
    assert [line.split()[1] for line in _lines(alone, "logged ")[:-1]] == ["1", "2", "2"]  # losses, evaluation
    (loss,) = _lines(alone, "loss ")
    assert _lines(two, "loss ") == [loss]
    assert 3.5 < float(loss.split()[1]) < 4.5


REFUSED = """
import sys, torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from popdist.accelerate import Accelerator

data = TensorDataset(torch.ones(32, 4))

def begin(**options):
    accelerator = Accelerator(cpu=True, **options)
    model = nn.Linear(4, 1)
    return accelerator, model, torch.optim.SGD(model.parameters(), lr=0.1)

def by_hand():
    accelerator, model, optimizer = begin()
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4))
    for number, (x,) in enumerate(loader):
        accelerator.backward(model(x).mean())
        if number % 4 == 3:
            optimizer.step()

def twice():
    accelerator, model, optimizer = begin()
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4))
    for (x,) in loader:
        for _ in range(2):
            accelerator.backward(model(x).mean())
        optimizer.step()

def two_models():
    accelerator, model, _ = begin()
    accelerator.prepare(model, nn.Linear(2, 2))

def sampler():
    accelerator, _, _ = begin()
    accelerator.prepare(DataLoader(data, batch_size=4, sampler=DistributedSampler(data, num_replicas=2, rank=0)))

def batch_sampler():
    from torch.utils.data import BatchSampler
    accelerator, _, _ = begin()
    dealt = BatchSampler(DistributedSampler(data, num_replicas=2, rank=0), 4, False)
    accelerator.prepare(DataLoader(data, batch_sampler=dealt))

def uneven():
    from accelerate.utils import DataLoaderConfiguration
    accelerator, _, _ = begin(dataloader_config=DataLoaderConfiguration(even_batches=False))
    accelerator.prepare(DataLoader(TensorDataset(torch.ones(10, 4)), batch_size=4))

def dispatched():
    from accelerate.utils import DataLoaderConfiguration
    begin(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))

for call in (by_hand, twice, two_models, sampler, batch_sampler, uneven, dispatched):
    try:
        call()
    except Exception as error:
        print(f"{call.__name__}: {type(error).__name__}: {error}")
    else:
        print(f"{call.__name__}: nothing was refused")
"""


def test_what_has_no_bits_is_refused_by_name(poprun: Poprun, tmp_path: Path) -> None:
    """Each error says what to write, before a weight has changed."""
    program = tmp_path / "refused.py"
    program.write_text(REFUSED, encoding="utf-8")

    finished = poprun("--num-instances", "1", "--num-replicas", "2", sys.executable, str(program)).succeeded()

    said = dict(line.split(": ", 1) for line in _lines(finished, "") if ": " in line)
    expected = {
        "by_hand": "BatchError: optimizer.step() was not called",
        "twice": "BatchError: accelerator.backward() was called twice",
        "two_models": "WeightsError: popdist.accelerate.Accelerator prepares one model",
        "sampler": "BatchError: the loader has a DistributedSampler",
        "batch_sampler": "BatchError: the loader has a DistributedSampler",
        "uneven": "BatchError: even_batches=False",
        "dispatched": "BatchError: dispatch_batches=True",
    }
    assert {name: said[name][: len(words)] for name, words in expected.items()} == expected
