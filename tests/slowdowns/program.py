"""A program that trains in one of several ways and is slowed down in one instance: program.py KIND FAULT SECONDS.

Instance 1 is the slow one; in "pause" all are. It prints "begins" when training begins, and trains until it has
taken so long.
"""

import gc
import mmap
import os
import random
import sys
import time
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.utils.data import DataLoader, Dataset

kind, fault, limit = sys.argv[1], sys.argv[2], float(sys.argv[3])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
where, _, how = fault.partition(":")
is_slow = rank == 1
chance = random.Random(rank)  # noqa: S311 - no secrets

WIDTH, BATCH = 256, 64


def lose(milliseconds: float) -> None:
    """Compute for so long, which a neighbour cannot see."""
    end = time.perf_counter() + milliseconds / 1000
    while time.perf_counter() < end:
        torch.mm(BALLAST, BALLAST)


BALLAST = torch.ones(64, 64)


def slow_down(place: str) -> None:
    """Lose time in ``place`` if that is the fault: as ``often-10`` ms with one step in so many, or ``sleep``."""
    if not is_slow or where != place:
        return
    manner, milliseconds, one_in = how.split("-")
    if chance.random() * int(one_in) < 1:
        (time.sleep(float(milliseconds) / 1000) if manner == "sleep" else lose(float(milliseconds)))


class Backward(torch.autograd.Function):
    """Does nothing, and may take its time in the backward pass."""

    @staticmethod
    def forward(_: object, x: Tensor) -> Tensor:
        """The same."""
        return x.clone()

    @staticmethod
    def backward(_: object, gradient: Tensor) -> Tensor:
        """The same."""
        slow_down("backward")
        return gradient


class Net(nn.Module):
    """A few layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(WIDTH, 512), nn.Linear(512, 512), nn.Linear(512, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """All layers, with as much work again."""
        slow_down("forward")
        for _ in range(4):
            x = x + self.last(torch.relu(self.second(torch.relu(self.first(x)))))
        changed: Tensor = Backward.apply(x)  # type: ignore[no-untyped-call]
        return changed


class Optimizer(torch.optim.SGD):
    """SGD that may take its time."""

    def step(self, closure: Any = None) -> Any:
        """A step."""
        slow_down("optimizer")
        return super().step(closure)


class Samples(Dataset[Tensor]):
    """Samples without end; the first of a batch may take its time, or each come from a slow disk."""

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, index: int) -> Tensor:
        if index % BATCH == 0:
            slow_down("data")
            if where == "disk" and is_slow:
                read_slowly()
        return torch.ones(WIDTH)


def read_slowly() -> None:
    """Read past the cache from a disk of which the control group may read little."""
    file = os.open(how, os.O_RDONLY | os.O_DIRECT)
    with mmap.mmap(-1, 1 << 16) as buffer:
        os.preadv(file, [buffer], chance.randrange(64) << 16)
    os.close(file)


def prepare() -> None:
    """Make what the machine's faults need."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if where == "core":
        os.sched_setaffinity(0, {rank % 2})
    if where in ("group", "disk") and is_slow:
        Path(os.environ["SLOW_GROUP"], "cgroup.procs").write_text(str(os.getpid()))
    if where == "garbage" and is_slow:
        Samples.garbage = [[number] for number in range(1 << 21)]  # type: ignore[attr-defined]


def after_step(step: int) -> None:
    """What some programs do now and then."""
    if where == "garbage" and is_slow and step % 8 == 0:
        gc.collect()
    if where == "checkpoint" and rank == 0 and step % 100 == 50:
        end = time.monotonic() + 2.5
        while time.monotonic() < end:
            torch.save([torch.ones(1 << 16)] * 8, os.devnull)
    if where == "validation" and rank == 0 and step % 100 == 50:
        end = time.monotonic() + 2.5
        with torch.no_grad():
            while time.monotonic() < end:
                net(torch.ones(BATCH, WIDTH))
    if where == "pause":
        time.sleep(0.5)
    slow_down("outside")


def begin() -> float:
    """Say that training begins."""
    if rank == 0:
        sys.stdout.write("begins\n")
        sys.stdout.flush()
    return time.monotonic() + limit


def train_with_torch(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A loop of torch's own."""
    batch_size = BATCH * 4 if where == "uneven" and is_slow else BATCH
    loader = DataLoader(Samples(), batch_size=batch_size, num_workers=1 if kind.endswith("workers") else 0)
    end = begin()
    for step, batch in enumerate(loader):
        with other.trace_step(model) if other else nullcontext():
            optimizer.zero_grad()
            model(batch).pow(2).mean().backward()
            optimizer.step()
        after_step(step)
        if where == "apart" and step % 50:  # nothing else keeps the instances in step
            continue
        stop = torch.tensor([float(time.monotonic() > end)])
        distributed.broadcast(stop, 0)
        if stop:
            return


def train_with_replicas() -> None:
    """A loop of popdist's."""
    import popdist

    popdist.init()
    model = popdist.ReplicatedModel(net)
    optimizer = Optimizer(model.parameters(), 1e-3)
    num_samples = BATCH * 4 if where == "uneven" and is_slow else BATCH
    samples, end = Samples(), begin()
    for step in range(1 << 30):
        batch = torch.stack([samples[index] for index in range(num_samples)])
        for (x,) in model.micro_batches((batch,)):
            model(x).pow(2).mean().backward()
        optimizer.step()
        after_step(step)
        if where == "apart" and step % 50:
            continue
        if popdist.all_reduce(torch.tensor(float(time.monotonic() > end)), "max"):
            return


def train_in_stages() -> None:
    """A pipeline."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    stage = PipelineStage(net, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    optimizer, end, batch = Optimizer(net.parameters(), 1e-3), begin(), torch.ones(BATCH, WIDTH)
    for _ in range(1 << 30):
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(batch)
        elif rank == size - 1:
            schedule.step(target=batch)
        else:
            schedule.step()
        optimizer.step()
        stop = torch.tensor([float(time.monotonic() > end)])
        distributed.broadcast(stop, 0)
        if stop:
            return


other: Any = None
if os.environ.get("WITH_TRACEML"):  # it sees the steps of programs only that name them
    other = import_module("traceml_ai")
    other.init()
prepare()
net = Net()
if kind.startswith("ReplicatedModel"):
    train_with_replicas()
else:
    if kind == "backend popdist":
        import popdist

        popdist.init(torch_distributed=True)
    else:
        distributed.init_process_group("gloo")
    if kind == "pipelining":
        train_in_stages()
    elif kind == "FSDP2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        for module in (net.first, net.second, net.last, net):
            fully_shard(module, mesh=init_device_mesh("cpu", (size,)))
        train_with_torch(net, Optimizer(net.parameters(), 1e-3))
    else:
        train_with_torch(nn.parallel.DistributedDataParallel(net), Optimizer(net.parameters(), 1e-3))
    distributed.destroy_process_group()
