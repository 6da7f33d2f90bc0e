"""accelerate, transformers' Trainer, Lightning and Fabric with several replicas in an instance.

Holds popdist.accelerate, popdist.transformers, popdist.lightning, popdist.fabric, popdist.trainers.replica_rows,
popdist.trainers.replica_steps, popdist.trainers.lightning_rows, popdist.trainers.replica_logs,
popdist.trainers.loop_turns, popdist.trainers.turn_loaders, popdist.trainers.evaluated_batches,
popdist.trainers.given_loaders and popdist.trainers.versions.
"""

import re
import signal
import sys
from pathlib import Path
from types import ModuleType

import pytest

from popdist.errors import InstallationError
from popdist.trainers.versions import check_version
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
    The schedule counts replicas. A loop may evaluate before it uses a batch, and another model may follow. To the
    program, four replicas are distributed even in one instance.
    """
    words = ("accelerate_program", "2", str(tmp_path))
    first = _run(poprun, *words, "0", num_instances=1)
    resumed = _lines(_run(poprun, *words, "1", num_instances=2), "epoch ")
    second = _run(poprun, *words, "0", num_instances=2)
    alone, two = _lines(first, "epoch "), _lines(second, "epoch ")

    assert len(_lines(first, "step ")) == 5
    assert _lines(first, "step ") == _lines(second, "step ")
    assert [line.split()[2] for line in _lines(first, "fold ")] == ["True", "True"]
    assert _lines(first, "fold ") == _lines(second, "fold ")
    assert alone == two
    assert alone[1:] == resumed
    assert re.match(rf"epoch 1: 2 steps, \d+ of 54, rate {0.01 - 0.01 * 16 / 400:.4f}, ", alone[1])


EVALUATED = """
import sys, torch
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate
from popdist.accelerate import Accelerator

class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(54.0) + torch.rand(54))

def noisy(samples):
    return default_collate(samples) + torch.rand(len(samples))

class Noisy(Dataset):
    x = torch.arange(54.0)

    def __len__(self):
        return 54

    def __getitem__(self, index):
        return self.x[index] + torch.rand(())

for drop_last, split, workers in ((False, False, 2), (True, False, 0), (False, True, 0), (True, True, 0)):
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=split))
    loader = DataLoader(Noisy(), batch_size=4, drop_last=drop_last, num_workers=workers)
    assert loader.dataset.x is accelerator.prepare(loader).dataset.x
    prepared = accelerator.prepare(loader)
    rows = [accelerator.gather_for_metrics(x) for x in prepared]
    rows += [accelerator.gather_for_metrics(x.mean()) for x in prepared]
    stream = DataLoader(Stream(), batch_size=4, drop_last=drop_last, collate_fn=noisy)
    torch.manual_seed(1)
    rows += [accelerator.gather_for_metrics(x) for x in accelerator.prepare(stream)]
    accelerator.print("evaluated", len(torch.cat(rows)), torch.cat(rows).double().sum().item())
"""


def test_evaluations_read_the_same_batches(poprun: Poprun, tmp_path: Path) -> None:
    """With samples that draw random numbers, with incomplete batches, and with batches that replicas share.

    54 samples are 14 batches, of which ``drop_last`` leaves the three steps of four replicas that are full.
    If four replicas share a batch, it leaves the last two samples out. The same stream has 64, 48, 56 or 52
    samples, because no library knows which samples of a stream are repeated in its last step.
    """
    script = tmp_path / "evaluated.py"
    script.write_text(EVALUATED, encoding="utf-8")
    found = []
    for number in ("1", "2", "4"):
        finished = poprun("--num-instances", number, "--num-replicas", "4", sys.executable, str(script))
        found.append(_lines(finished.succeeded_but_for_torch(), "evaluated "))

    assert [int(line.split()[1]) for line in found[0]] == [54 + 14 + 64, 48 + 12 + 48, 54 + 54 + 56, 52 + 52 + 52]
    assert found[0] == found[1] == found[2]


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

    Lightning's Trainer goes on in the middle of an epoch, and Fabric after an epoch, in whose successor it was
    killed. A loop of Fabric may keep its iterator. A decision by a loss of one replica is the decision of all.
    """
    lines, more = {}, {}
    saved = tmp_path / "1" / "step=1.ckpt", tmp_path / "killed" / "epoch-0.ckpt"
    options = ("--num-instances", "1", "--num-replicas", "4", sys.executable, "-m")
    killed = poprun(*options, "tests.contract.lightning_program", str(saved[1].parent), "killed")
    assert killed.code == 128 + signal.SIGKILL
    for name, begin, num_instances in (("1", (), 1), ("2", (), 2), ("3", saved, 2)):
        (tmp_path / name).mkdir()
        words = map(str, (tmp_path / name, *begin))
        finished = _run(poprun, "lightning_program", *words, num_instances=num_instances)
        lines[name] = [line for it in ("logged ", "trainer:", "fabric ") for line in _lines(finished, it)]
        more[name] = _lines(finished, "kept ") + _lines(finished, "decided ")

    assert len(more["1"]) == 2
    assert more["1"] == more["2"]
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


def test_an_old_library_is_refused_by_name() -> None:
    """The error names both versions; 2.10 is newer than 2.5."""
    old, new = ModuleType("lightning"), ModuleType("lightning")
    old.__version__, new.__version__ = "2.4.10", "2.10.0"  # type: ignore[attr-defined]  # of any module

    check_version(new)
    with pytest.raises(
        InstallationError, match=r"needs lightning 2\.5 or newer .*lightning 2\.4\.10 is installed"
    ):
        check_version(old)


RESUMED = """
import sys, torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, default_collate
from popdist.accelerate import Accelerator
import popdist

class Stream(IterableDataset):
    def __iter__(self):
        return iter(data)

def noisy(samples):
    return default_collate(samples) + 0.1 * torch.randn(2, 4)

folder, begin = sys.argv[1], int(sys.argv[2])
torch.manual_seed(1)
data = torch.randn(40, 4)
for kind, dataset in ("map", data), ("stream", Stream()):
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    loader = DataLoader(dataset, batch_size=2, collate_fn=noisy)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    if begin:
        accelerator.load_state(f"{folder}/{kind}{begin}")
        loader = accelerator.skip_first_batches(loader, begin)
    step = begin
    for x in loader:
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        step += accelerator.sync_gradients
        if accelerator.sync_gradients and not begin:
            accelerator.save_state(f"{folder}/{kind}{step}")
    accelerator.print(f"after {step} steps: {kind} {popdist.checksum(model)}")
"""


def test_a_loop_of_accelerate_resumes_within_an_epoch(poprun: Poprun, tmp_path: Path) -> None:
    """Two instances go on with the dropout and the noise of samples with which one instance would have gone on."""
    script = tmp_path / "resumed.py"
    script.write_text(RESUMED, encoding="utf-8")
    lines = []
    for num_instances, begin in ((1, "0"), (2, "2")):
        options = ("--num-instances", str(num_instances), "--num-replicas", "4", sys.executable, str(script))
        lines.append(_lines(poprun(*options, str(tmp_path), begin).succeeded_but_for_torch(), "after 5 steps"))

    assert lines[0] == lines[1]
    assert len(lines[0]) == 2


CALL_ALL = """
for call in calls:
    try:
        call()
    except Exception as error:
        print(f"{call.__name__}: {type(error).__name__}: {error}")
    else:
        print(f"{call.__name__}: nothing was refused")
"""


def test_loops_of_accelerate_have_the_same_bits_in_four_instances(poprun: Poprun, tmp_path: Path) -> None:
    """As in one instance."""
    alone, four = (
        _run(poprun, "accelerate_program", "2", str(tmp_path), "0", num_instances=number) for number in (1, 4)
    )
    for begin in ("epoch ", "step ", "fold "):
        assert _lines(alone, begin) == _lines(four, begin)


REFUSED = """
import sys, torch, warnings
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from popdist.accelerate import Accelerator
from popdist.errors import PopdistWarning

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

def no_model():
    accelerator, model, _ = begin()
    accelerator.backward(model(torch.ones(1, 4)).mean())

def nested():
    accelerator, model, optimizer = begin()
    model, loader = accelerator.prepare(model, DataLoader(data, batch_size=4))
    next(zip(loader, loader))

def too_early():
    accelerator, model, optimizer = begin()
    model, loader = accelerator.prepare(model, DataLoader(data, batch_size=4))
    for (x,) in loader:
        model(x)
        model.eval()
        next(iter(loader))

def saved_too_early():
    accelerator, model, optimizer = begin()
    model, loader = accelerator.prepare(model, DataLoader(data, batch_size=4))
    for _ in loader:
        accelerator.save_state(__file__ + ".saved")

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

def own_generator():
    class Noisy(torch.utils.data.Dataset):
        def __init__(self):
            self.drawn_by = torch.Generator()

        def __len__(self):
            return 8

        def __getitem__(self, index):
            return torch.rand(4, generator=self.drawn_by)

    accelerator, model, optimizer = begin()
    model, loader = accelerator.prepare(model, DataLoader(Noisy(), batch_size=2))
    next(iter(loader))

def loop(turn, is_prepared=True, trains=True):
    accelerator, model, optimizer = begin()
    loader = DataLoader(data, batch_size=4)
    model, optimizer = accelerator.prepare(model, optimizer)
    model.train(trains)
    for number, (x,) in enumerate(accelerator.prepare(loader) if is_prepared else loader):
        turn(accelerator, optimizer, number, lambda: model(x).mean())

def raw_loader():
    loop(lambda accelerator, _, __, loss: accelerator.backward(loss()), is_prepared=False)

def in_evaluation_mode():
    loop(lambda accelerator, _, __, loss: accelerator.backward(loss()), trains=False)

def a_closure():
    loop(lambda _, optimizer, __, loss: optimizer.step(loss))

def rate_by_hand():
    def turn(accelerator, optimizer, number, loss):
        accelerator.backward(loss())
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
        optimizer.step()
    loop(turn)

def rate_for_the_next():
    def turn(accelerator, optimizer, number, loss):
        accelerator.sync_gradients
        accelerator.backward(loss())
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
    loop(turn)

def optimizers_in_turn():
    accelerator, model, optimizer = begin()
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    model, *optimizers, loader = accelerator.prepare(model, optimizer, other, DataLoader(data, batch_size=4))
    for number, (x,) in enumerate(loader):
        accelerator.backward(model(x).mean())
        optimizers[number % 2].step()

def gathered():
    def turn(accelerator, _, __, loss):
        found = loss()
        accelerator.backward(found)
        accelerator.gather(found.detach())
    loop(turn)

def reduced():
    loop(lambda accelerator, _, __, loss: accelerator.reduce(loss().detach()))

def gathered_for_metrics():
    def turn(accelerator, optimizer, _, loss):
        found = loss()
        accelerator.backward(found)
        optimizer.step()
        if accelerator.sync_gradients:
            accelerator.gather_for_metrics(found.detach())
    loop(turn)

def counts_iterations():
    def turn(accelerator, optimizer, _, loss):
        accelerator.backward(loss())
        optimizer.step()
    with warnings.catch_warnings(action="error", category=PopdistWarning):
        loop(turn)

def leaves(after):
    accelerator, model, optimizer = begin()
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4))
    for (x,) in loader:
        accelerator.backward(model(x).mean())
        optimizer.step()
        break
    model.eval()
    after(loader)

def triggered():
    loop(lambda accelerator, *_: accelerator.check_trigger())

def sets_trigger():
    loop(lambda accelerator, *_: accelerator.set_trigger())

def triggers_once():
    accelerator, model, optimizer = begin()
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4))
    steps = 0
    for (x,) in loader:
        accelerator.backward(model(x).mean())
        optimizer.step()
        if not accelerator.sync_gradients:
            continue
        steps += 1
        if steps == 2:
            accelerator.set_trigger()
        if accelerator.check_trigger():
            break
    raise ValueError(f"no error: {steps}")

def knows_length():
    accelerator, model, _ = begin()
    model, loader = accelerator.prepare(model, DataLoader(data, batch_size=4))
    len(loader)
    model.eval()
    with warnings.catch_warnings(action="error", category=PopdistWarning):
        list(loader)

class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(1))

    def forward(self, x):
        self.centre += x.detach().mean()
        return (x - self.centre).square().mean()

def loss_with_a_buffer():
    criterion = Centred()
    accelerator, model, optimizer = begin()
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4))
    with warnings.catch_warnings(action="error", category=PopdistWarning):
        for (x,) in loader:
            accelerator.backward(criterion(model(x)))
            optimizer.step()

def local_sgd():
    from accelerate.local_sgd import LocalSGD
    accelerator, model, optimizer = begin()
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4))
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8):
        next(iter(loader))

def left():
    with warnings.catch_warnings(record=True, action="always") as said:
        leaves(lambda _: None)
    raise said[-1].message

def evaluates_after_leaving():
    with warnings.catch_warnings(action="ignore", category=PopdistWarning):
        leaves(lambda loader: next(iter(loader)))

calls = by_hand, twice, no_model, nested, too_early, two_models, sampler, batch_sampler, uneven, dispatched
calls += saved_too_early, counts_iterations, own_generator, raw_loader, in_evaluation_mode, a_closure, rate_by_hand
calls += gathered, reduced, gathered_for_metrics, rate_for_the_next, optimizers_in_turn
calls += left, evaluates_after_leaving, local_sgd, triggered, sets_trigger, triggers_once, knows_length
calls += (loss_with_a_buffer,)
"""

REFUSED_OF_LIGHTNING = """
import logging, sys, warnings
import lightning, popdist.fabric, popdist.lightning, torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
data = TensorDataset(torch.ones(32, 4))

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch):
        return self.net(batch[0]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Endless(IterableDataset):
    def __iter__(self):
        return iter([(torch.ones(4),)] * 16)

def fit(loader=None, strategy=None, hooks=None, val=None, resume=None, **options):
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    strategy = popdist.lightning.ReplicatedStrategy(**strategy or {})
    trainer = lightning.Trainer(strategy=strategy, max_epochs=1, accelerator="cpu", **quiet, **options)
    module = type("Mine", (Module,), hooks or {})()
    trainer.fit(module, DataLoader(data, batch_size=4) if loader is None else loader, val, ckpt_path=resume)

def manual():
    fit(hooks={"automatic_optimization": False})

def sync_batchnorm():
    fit(sync_batchnorm=True)

def iterable():
    fit(DataLoader(Endless(), batch_size=4))

def sampler():
    fit(DataLoader(data, batch_size=4, sampler=DistributedSampler(data, num_replicas=1, rank=0)))

def no_sampler():
    fit(use_distributed_sampler=False)

def two_loaders():
    fit([DataLoader(data, batch_size=4)] * 2)

def before_transfer():
    fit(hooks={"on_before_batch_transfer": lambda self, batch, dataloader_idx: batch})

def no_zero_grad():
    fit(hooks={"optimizer_zero_grad": lambda self, epoch, batch_idx, optimizer: None})

def validate(step, **options):
    loaders = DataLoader(data, batch_size=2), DataLoader(data, batch_size=4)
    fit(loaders[0], val=loaders[1], hooks={"validation_step": step}, **options)

def inside_a_step():
    validate(lambda self, batch: None, accumulate_grad_batches=2, val_check_interval=3)

def resumed():
    save = lambda self, outputs, batch, batch_idx: batch_idx or self.trainer.save_checkpoint(sys.argv[0] + ".ckpt")
    fit(hooks={"on_train_batch_end": save}, accumulate_grad_batches=2)
    fit(resume=sys.argv[0] + ".ckpt", accumulate_grad_batches=2)

def gathered():
    validate(lambda self, batch: self.all_gather(batch[0]))

def counted():
    def count(self, batch):
        self.number = getattr(self, "number", 0) + 1
        return self.net(batch[0]).mean() * self.number
    with warnings.catch_warnings(action="error", category=popdist.errors.PopdistWarning):
        fit(hooks={"training_step": count})

def counted_inside():
    class Counting(nn.Linear):
        def forward(self, x):
            self.number = getattr(self, "number", 0) + 1
            return super().forward(x) * self.number
    fit(hooks={"__init__": lambda self: (Module.__init__(self), setattr(self, "net", Counting(4, 1)))[0]})

def predicted():
    options = {"limit_predict_batches": 2, "logger": False, "accelerator": "cpu"}
    trainer = lightning.Trainer(strategy=popdist.lightning.ReplicatedStrategy(), **options)
    with warnings.catch_warnings(action="error", category=popdist.errors.PopdistWarning):
        kind = type("Mine", (Module,), {"forward": lambda _self, batch: batch[0]})
        trainer.predict(kind(), DataLoader(data, batch_size=4))

def averaging():
    fit(callbacks=[StochasticWeightAveraging(swa_lrs=0.1)])

def no_loss():
    fit(hooks={"training_step": lambda self, batch: None})

def an_iterator():
    fit(hooks={"training_step": lambda self, dataloader_iter: None})

def an_option():
    fit(strategy={"find_unused_parameters": True})

def a_hook():
    fit(hooks={"on_train_batch_start": lambda self, batch, batch_idx: batch[0].mean()})

def begin(accumulation=1):
    fabric = Fabric(strategy=popdist.fabric.FabricStrategy(accumulation), accelerator="cpu")
    fabric.launch()
    net = nn.Linear(4, 1)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    return fabric, model, optimizer, fabric.setup_dataloaders(DataLoader(data, batch_size=4))

def lengths():
    _, model, _, loader = begin()
    in_training = len(loader)
    model.eval()
    with torch.no_grad():
        raise ValueError(f"no error: {in_training}, {len(loader)}, {sum(1 for _ in loader)}")

def knows_length():
    _, model, _, loader = begin()
    len(loader)
    model.eval()
    with warnings.catch_warnings(action="error", category=popdist.errors.PopdistWarning):
        list(loader)

def twice():
    fabric, model, _, loader = begin()
    for (x,) in loader:
        fabric.backward(model(x).mean())
        fabric.backward(model(x).mean())

def by_hand():
    fabric, model, optimizer, loader = begin()
    for number, (x,) in enumerate(loader):
        fabric.backward(model(x).mean())
        if number % 4 == 3:
            optimizer.step()

def incomplete():
    *_, loader = begin(3)
    next(iter(loader))

def closure():
    fabric, model, optimizer, loader = begin()
    for (x,) in loader:
        optimizer.step(lambda: fabric.backward(model(x).mean()))

def second_model():
    begin()[0].setup(nn.Linear(2, 2))

def endless():
    fabric, *_ = begin()
    next(iter(fabric.setup_dataloaders(DataLoader(Endless(), batch_size=4))))

def counts_iterations():
    fabric, model, optimizer, loader = begin()
    with warnings.catch_warnings(action="error", category=popdist.errors.PopdistWarning):
        for (x,) in loader:
            fabric.backward(model(x).mean())
            optimizer.step()

def gathered_by_fabric():
    fabric, _, _, loader = begin()
    for (x,) in loader:
        fabric.all_reduce(x)

def not_set_up():
    fabric, *_ = begin()
    other = Fabric(strategy=popdist.fabric.FabricStrategy(), accelerator="cpu")
    other.backward(nn.Linear(4, 1)(torch.ones(1, 4)).mean())

def length_in_a_hook():
    fit(hooks={"on_train_batch_end": lambda _self, _outputs, batch, _number: len(batch)})

def summed():
    fabric, model, optimizer, loader = begin()
    number = torch.zeros(1)
    for (x,) in loader:
        fabric.backward(model(x).mean())
        optimizer.step()
        number += len(x)
        if fabric.strategy.sync_gradients:
            break
    raise ValueError(f"no error: {fabric.all_reduce(number, reduce_op='sum').item()}")

def left():
    fabric, model, optimizer, loader = begin()
    for _ in range(2):
        for (x,) in loader:
            fabric.backward(model(x).mean())
            optimizer.step()
            break

def saved():
    fabric, model, _, loader = begin()
    for (x,) in loader:
        fabric.backward(model(x).mean())
        fabric.save("unfinished.ckpt", {"model": model})

def an_option_of_fabric():
    popdist.fabric.FabricStrategy(broadcast_buffers=False)

def no_number():
    begin(0)

calls = manual, sync_batchnorm, iterable, sampler, no_sampler, two_loaders, before_transfer, averaging, no_loss
calls += an_iterator, an_option, a_hook, twice, by_hand, incomplete, closure, second_model, endless
calls += left, saved, no_number, no_zero_grad, inside_a_step, resumed, gathered, an_option_of_fabric, counted
calls += counts_iterations, gathered_by_fabric, counted_inside, lengths, predicted, knows_length
calls += not_set_up, length_in_a_hook, summed
"""
REFUSED_OF_TRAINER = """
import torch, transformers, warnings
from torch import nn
from torch.utils.data import DataLoader
from transformers import TrainingArguments
from popdist.errors import PopdistWarning
from popdist.transformers import Replicated, Trainer

data = [{"x": torch.ones(4), "labels": torch.tensor(1)}] * 32

class Net(nn.Linear):
    def forward(self, x, labels):
        return {"loss": nn.functional.cross_entropy(super().forward(x), labels)}

def train(kind=Trainer, **options):
    arguments = TrainingArguments(__file__ + ".saved", use_cpu=True, report_to=[], save_strategy="no", **options)
    kind(model=Net(4, 2), args=arguments, train_dataset=data).train()

def own_step():
    train(type("Mine", (Trainer,), {"training_step": lambda *_: None}))

def raw_loader():
    mine = type("Mine", (transformers.Trainer,), {"get_train_dataloader": lambda _: DataLoader(data)})
    train(type("Replicas", (Replicated, mine), {}))

def by_batch():
    train(batch_eval_metrics=True)

def gathered():
    def gather(self, model, inputs, *_, **__):
        loss = super(Trainer, self).compute_loss(model, inputs)
        return loss - self.accelerator.gather(loss.detach()).mean()
    train(type("Mine", (Trainer,), {"compute_loss": gather}))

def split():
    train(accelerator_config={"split_batches": True})

def objects():
    train(eval_use_gather_object=True)

def by_instance():
    train(eval_do_concat_batches=False)

def counted():
    def count(self, *args, **kwargs):
        self.number = getattr(self, "number", 0) + 1
        return super(Trainer, self).compute_loss(*args, **kwargs)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PopdistWarning)
        train(type("Mine", (Trainer,), {"compute_loss": count}))

def logged():
    def log(self, *args, **kwargs):
        self.log({"own": 1.0})
        return super(Trainer, self).compute_loss(*args, **kwargs)
    arguments = TrainingArguments(__file__ + ".saved", use_cpu=True, report_to=[], save_strategy="no")
    own = type("Mine", (Trainer,), {"compute_loss": log})
    trainer = own(model=Net(4, 2), args=arguments, train_dataset=data)
    trainer.train()
    logs = [it for it in trainer.state.log_history if "own" in it]
    raise ValueError(f"no error: {len(logs)} logs in {trainer.state.global_step} steps")

def raw_loader_of_evaluation():
    own = type("Mine", (Trainer,), {"get_eval_dataloader": lambda _self, _data=None: DataLoader(data, 8)})
    arguments = TrainingArguments(__file__ + ".saved", use_cpu=True, report_to=[])
    trainer = own(model=Net(4, 2), args=arguments, train_dataset=data, eval_dataset=data)
    raise ValueError(f"no error: {trainer.evaluate()['eval_loss'] > 0}")

calls = (
    own_step, raw_loader, by_batch, gathered, split, objects, by_instance, counted, logged,
    raw_loader_of_evaluation,
)
"""
TRAINER_SAYS = {
    "own_step": "BatchError: Mine.training_step would get the batches of several replicas",
    "raw_loader": "BatchError: get_train_dataloader() returned DataLoader",
    "by_batch": "BatchError: TrainingArguments(batch_eval_metrics=...)",
    "objects": "BatchError: TrainingArguments(eval_use_gather_object=...)",
    "by_instance": "BatchError: eval_do_concat_batches=False",
    "logged": "ValueError: no error: 6 logs in 6 steps",
    "counted": "PopdistWarning: Mine.number changes for each replica",
    "split": "BatchError: accelerator_config with split_batches",
    "raw_loader_of_evaluation": "ValueError: no error: True",
    "gathered": "CollectiveError: a collective of torch.distributed within a micro batch",
}
LIGHTNING = "BatchError: popdist.lightning.ReplicatedStrategy with 2 replicas: "
SAYS = {
    "by_hand": "BatchError: optimizer.step() was not called",
    "twice": "BatchError: accelerator.backward() was called twice",
    "no_model": "BatchError: no model was prepared",
    "nested": "BatchError: a loop over a prepared loader began in another loop",
    "too_early": "BatchError: an evaluation began in the middle of an optimizer step",
    "saved_too_early": "BatchError: a checkpoint was saved at the top of the loop's body",
    "two_models": "WeightsError: popdist.accelerate.Accelerator prepares one model",
    "sampler": "BatchError: the loader has a DistributedSampler",
    "batch_sampler": "BatchError: the loader has a DistributedSampler",
    "uneven": "BatchError: even_batches=False",
    "dispatched": "BatchError: dispatch_batches=True",
    "own_generator": "BatchError: Noisy.drawn_by is a random generator of the program's own",
    "counts_iterations": "PopdistWarning: this instance trains 2 replicas in turn",
    "left": "PopdistWarning: the loop over the loader was left in the middle of an optimizer step",
    "local_sgd": "BatchError: a training loop began within model.no_sync()",
    "evaluates_after_leaving": "BatchError: the loop over the loader was left in the middle of an optimizer step",
    "triggered": "BatchError: accelerator.check_trigger() was called in the turn of one replica",
    "sets_trigger": "BatchError: accelerator.set_trigger() was called in the turn of one replica",
    "triggers_once": "ValueError: no error: 2",
    "knows_length": "PopdistWarning: len(loader) was 4 before this evaluation, which has 8 batches here",
    "loss_with_a_buffer": "PopdistWarning: centre of Centred changed in a loop over micro batches",
    "raw_loader": "BatchError: accelerator.backward() was called outside of a training loop",
    "in_evaluation_mode": "BatchError: accelerator.backward() was called outside of a training loop",
    "a_closure": "BatchError: optimizer.step(closure)",
    "rate_by_hand": "BatchError: the learning rate has changed between the replicas of one optimizer step",
    "rate_for_the_next": "BatchError: the learning rate has changed between the replicas of one optimizer step",
    "optimizers_in_turn": "BatchError: an optimizer made a step for some replicas and not for the last one",
    "gathered": "BatchError: accelerator.gather() joins the value of one replica of each instance",
    "reduced": "BatchError: accelerator.reduce() joins the value of one replica of each instance",
    "gathered_for_metrics": "BatchError: accelerator.gather_for_metrics() joins the value of one replica of each",
}
LIGHTNING_SAYS = {
    "manual": f"{LIGHTNING}automatic_optimization=False",
    "sync_batchnorm": f"{LIGHTNING}sync_batchnorm=True",
    "iterable": "BatchError: DataLoader with the sampler _InfiniteConstantSampler",
    "sampler": "BatchError: DataLoader with the sampler DistributedSampler",
    "no_sampler": "BatchError: DataLoader with the sampler SequentialSampler",
    "two_loaders": "BatchError: training_step would get list",
    "before_transfer": f"{LIGHTNING}on_before_batch_transfer",
    "no_zero_grad": f"{LIGHTNING}optimizer_zero_grad",
    "inside_a_step": "BatchError: a validation after each 3 batches would begin inside an optimizer step",
    "resumed": "BatchError: the checkpoint was saved in the middle of an optimizer step",
    "gathered": "CollectiveError: a collective of torch.distributed within a micro batch",
    "saved": "BatchError: a checkpoint was saved in the middle of an optimizer step",
    "counted": "PopdistWarning: the attribute number of Mine changes in each forward pass",
    "counted_inside": "WeightsError: the attribute number of Counting (net) changes in each forward pass",
    "averaging": f"{LIGHTNING}StochasticWeightAveraging",
    "no_loss": "BatchError: training_step returned None",
    "an_iterator": "BatchError: training_step would get _DataFetcherWrapper",
    "an_option": "WeightsError: ReplicatedModel(..., find_unused_parameters=...)",
    "an_option_of_fabric": "WeightsError: ReplicatedModel(..., broadcast_buffers=...)",
    "a_hook": "BatchError: a hook of Lightning reads its batch",
    "twice": "BatchError: fabric.backward() was called twice",
    "by_hand": "BatchError: optimizer.step() was not called",
    "incomplete": "BatchError: FabricStrategy(accumulation=3), and each replica has 4 batches",
    "closure": "BatchError: optimizer.step(closure)",
    "counts_iterations": "PopdistWarning: this instance trains 2 replicas in turn",
    "gathered_by_fabric": "BatchError: fabric.all_reduce() joins the value of one replica of each instance",
    "second_model": "WeightsError: popdist.fabric.FabricStrategy sets up one model",
    "endless": "BatchError: the loader deals no samples to replicas",
    "left": "BatchError: the loop over the loader was left",
    "no_number": "BatchError: accumulation=0",
    "not_set_up": "BatchError: no model was set up: call fabric.setup(model, optimizer) before the loop",
    "length_in_a_hook": "BatchError: a hook of Lightning reads its batch",
    "summed": "ValueError: no error: 8.0",
    "lengths": "ValueError: no error: 4, 8, 8",
    "predicted": "PopdistWarning: limit_predict_batches limits the batches of each instance",
    "knows_length": "PopdistWarning: len(loader) was 4 before this evaluation, which has 8 batches here",
}


@pytest.mark.parametrize(
    ("program", "says"),
    [(REFUSED, SAYS), (REFUSED_OF_TRAINER, TRAINER_SAYS), (REFUSED_OF_LIGHTNING, LIGHTNING_SAYS)],
    ids=["accelerate", "trainer", "lightning"],
)
def test_what_has_no_bits_is_refused_by_name(
    poprun: Poprun, tmp_path: Path, program: str, says: dict[str, str]
) -> None:
    """Each error says what to write, before a weight has changed."""
    script = tmp_path / "refused.py"
    script.write_text(program + CALL_ALL, encoding="utf-8")

    finished = poprun("--num-instances", "1", "--num-replicas", "2", sys.executable, str(script)).succeeded()

    said = dict(line.split(": ", 1) for line in _lines(finished, "") if ": " in line)
    assert {name: said[name][: len(words)] for name, words in says.items()} == says
