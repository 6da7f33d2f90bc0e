"""Trainings on a device, each a recipe; the laws compare their weights with those of the CPU.

The process that forks instances imports this module, so nothing here may register the simulated accelerator before
an instance asks for it.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import popdist
from popdist.checkpoint import load_latest, save
from popdist.ground.layout import parts
from popdist.optim import LowPrecision
from popdist.parallel import PhasedOptimizer, phased, recompute
from tests.contract.laws import TIMEOUT_SECONDS

Recipe = Callable[[torch.device], str]

_NUM_SAMPLES: Final = 16
_NUM_STEPS: Final = 3


def train(
    recipe: str,
    device_type: str,
    num_devices: int = 4,
    is_direct: bool = False,  # noqa: FBT001, FBT002 - how a forked world passes it
    disk_folder: Path | None = None,
) -> str:
    """Join the job and train on the devices of a type; return the checksum of the weights.

    Args:
        recipe: A name of `RECIPES`.
        device_type: ``simulated`` or ``cpu``.
        num_devices: How many devices the machine has.
        is_direct: Whether a backend like NCCL sends between these devices.
        disk_folder: Where temporary files are on a disk, as a store of phases needs on a CPU.
    """
    tempfile.tempdir = None if disk_folder is None else str(disk_folder)
    _register(device_type, num_devices, is_direct=is_direct)
    popdist.init(timeout_seconds=TIMEOUT_SECONDS, torch_distributed=recipe in OF_TORCH)
    return RECIPES[recipe](_device_of(device_type, num_devices))


def _register(device_type: str, num_devices: int, *, is_direct: bool = False) -> None:
    if device_type != "cpu":
        os.environ["SIMULATED_DEVICES"] = str(num_devices)
        from tests.accelerator import simulated_collectives

        if is_direct:
            simulated_collectives.make_direct()


def _device_of(device_type: str, num_devices: int) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    device = torch.device(device_type, popdist.local_instance_index() % num_devices)
    torch.accelerator.set_device_index(device)  # as programs of DDP and FSDP do
    return device


class Net(nn.Module):
    """A convolution, batch norm, a layer that is used twice, and a parameter that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution = nn.Conv2d(1, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.hidden = nn.Linear(6 * 16, 96)
        self.last = nn.Linear(96, 4)
        self.never = nn.Parameter(torch.randn(3))

    def forward(self, images: Tensor) -> Tensor:
        """Four scores for each image."""
        rows = torch.relu(self.norm(self.convolution(images))).flatten(1)
        scores: Tensor = self.last(torch.tanh(self.hidden(torch.tanh(self.hidden(rows)))))
        return scores


def batch(number: int) -> tuple[Tensor, Tensor]:
    """Return this instance's samples of a step, in pinned memory where there is such."""
    generator = torch.Generator().manual_seed(number)
    images = torch.randn(_NUM_SAMPLES, 1, 6, 6, generator=generator)
    labels = torch.randint(4, (_NUM_SAMPLES,), generator=generator)
    rows = parts(range(_NUM_SAMPLES), popdist.local_replicas(), popdist.num_replicas())
    mine = images[rows.start : rows.stop], labels[rows.start : rows.stop]
    return (mine[0].pin_memory(), mine[1].pin_memory()) if torch.accelerator.is_available() else mine


def steps(model: popdist.ReplicatedModel, optimizer: torch.optim.Optimizer, numbers: range, **scaled: Any) -> None:
    """Train for some steps; ``scaler=`` scales the loss."""
    scaler = scaled.get("scaler", torch.amp.GradScaler("cpu", enabled=False))

    def body(images: Tensor, labels: Tensor) -> None:
        scaler.scale(64 * cross_entropy(model(images), labels)).backward()

    for number in numbers:
        optimizer.zero_grad()
        model.run_micro_batches(batch(number), body, 2)
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(0.5)
        scaler.step(optimizer)
        scaler.update()


def replicated(device: torch.device, **settings: Any) -> popdist.ReplicatedModel:
    """Return the replicated network on ``device``."""
    return popdist.ReplicatedModel(Net().to(device), **settings)


def plain(device: torch.device) -> str:
    """AdamW, with gradients clipped."""
    model = replicated(device)
    steps(model, torch.optim.AdamW(model.parameters(), lr=0.01), range(_NUM_STEPS))
    return popdist.checksum(model)


def in_a_side_stream(device: torch.device) -> str:
    """All training happens in a stream of the program's own."""
    model = replicated(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with _side_stream(device):
        steps(model, optimizer, range(_NUM_STEPS))
    return popdist.checksum(model)


@contextmanager
def _side_stream(device: torch.device) -> Iterator[None]:
    if device.type == "cpu":
        yield
        return
    stream, current = torch.Stream(device), torch.accelerator.current_stream(device)
    stream.wait_stream(current)
    with stream:
        yield
    current.wait_stream(stream)


def batch_norm_groups(device: torch.device) -> str:
    """Two replicas share the statistics of their batch norm."""
    model = replicated(device, batch_norm_group_size=2)
    steps(model, torch.optim.SGD(model.parameters(), lr=0.1), range(_NUM_STEPS))
    return popdist.checksum(model)


def rounded_gradients(device: torch.device) -> str:
    """Gradients are sent in bfloat16."""
    model = replicated(device, gradient_dtype=torch.bfloat16)
    steps(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), range(_NUM_STEPS))
    return popdist.checksum(model)


def scaled_loss(device: torch.device) -> str:
    """A GradScaler finds infinity in the first step, whose scale is too large."""
    model = replicated(device)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**127, growth_interval=2, backoff_factor=2.0**-100)
    steps(model, torch.optim.SGD(model.parameters(), lr=0.1), range(_NUM_STEPS), scaler=scaler)
    assert scaler.get_scale() == 2.0**28
    return popdist.checksum(model)


def sharded(device: torch.device) -> str:
    """Each instance updates its part of the parameters."""
    model = replicated(device)
    steps(model, popdist.ShardedOptimizer(model, torch.optim.AdamW, lr=0.01), range(_NUM_STEPS))
    return popdist.checksum(model)


def low_precision(device: torch.device) -> str:
    """The sharded optimizer holds its moments in half precision."""
    model = replicated(device)
    optimizer = popdist.ShardedOptimizer(model, LowPrecision, optimizer_class=torch.optim.AdamW, lr=0.01, seed=1)
    steps(model, optimizer, range(_NUM_STEPS))
    return popdist.checksum(model)


def phases(device: torch.device) -> str:
    """A model of which the device holds a part at a time."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), *(nn.Linear(36, 36) for _ in range(6)), nn.Linear(36, 4)).to(device)
    with tempfile.TemporaryDirectory() if device.type == "cpu" else nullcontext("host") as store:
        model = phased(net, phases=3, store=store)
        optimizer = PhasedOptimizer(model, torch.optim.AdamW, lr=0.01)
        for number in range(_NUM_STEPS):
            for images, labels in model.micro_batches(batch(number), 2):
                cross_entropy(model(images), labels).backward()
            optimizer.step()
        return popdist.checksum(model.state_dict())


class Noisy(nn.Module):
    """Two layers with dropout that are called by name."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(36, 36), nn.Dropout()) for _ in range(2))
        self.last = nn.Linear(36, 4)

    def forward(self, images: Tensor) -> Tensor:
        """Four scores for each image."""
        x = images.flatten(1)
        for layer in self.layers:
            x = layer(input=x)
        scores: Tensor = self.last(x)
        return scores


def recomputed(device: torch.device) -> str:
    """Layers draw the same numbers when they are computed again: torch finds no device among their arguments."""
    found = []
    for is_recomputed in (False, True):
        net = Noisy().to(device)
        model = popdist.ReplicatedModel(recompute(net, net.layers) if is_recomputed else net)
        steps(model, torch.optim.SGD(model.parameters(), lr=0.1), range(_NUM_STEPS))
        found.append(popdist.checksum(model))
    assert found[0] == found[1]
    return found[0]


def distributed_data_parallel(device: torch.device) -> str:
    """Torch's DDP over the backend popdist."""
    net = DistributedDataParallel(Net().to(device), find_unused_parameters=True)
    _train_with_torch(net, device)
    return popdist.checksum(nn.ParameterList(net.parameters()))


def fully_sharded(device: torch.device) -> str:
    """Torch's FSDP2 over the backend popdist."""
    net = Net().to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    fully_shard(net.hidden, mesh=mesh)
    fully_shard(net, mesh=mesh)
    _train_with_torch(net, device)
    return popdist.checksum(nn.ParameterList([it.full_tensor() for it in net.parameters()]))  # type: ignore[attr-defined] # DTensors


def _train_with_torch(net: nn.Module, device: torch.device) -> None:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for number in range(_NUM_STEPS):
        images, labels = (it.to(device, non_blocking=True) for it in batch(number))
        optimizer.zero_grad()
        cross_entropy(net(images), labels).backward()
        optimizer.step()


OF_TORCH: Final[dict[str, Recipe]] = {it.__name__: it for it in (distributed_data_parallel, fully_sharded)}
"""Recipes whose weights depend on the number of instances."""

OF_POPDIST: Final[dict[str, Recipe]] = {
    it.__name__: it
    for it in (
        plain,
        in_a_side_stream,
        batch_norm_groups,
        rounded_gradients,
        scaled_loss,
        sharded,
        low_precision,
        phases,
        recomputed,
    )
}
RECIPES: Final = OF_TORCH | OF_POPDIST


class _Counted(TorchDispatchMode):
    """Counts the operators within that are no views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def num_kernels_of_low_precision(device_type: str) -> list[int]:
    """Return how many kernels the second step takes, for parameters of 2 ** 19 and of 2 ** 21 numbers."""
    _register(device_type, 1)
    popdist.init(timeout_seconds=TIMEOUT_SECONDS)
    found = []
    for size in (1 << 19, 1 << 21):
        weight = nn.Parameter(torch.ones(size, dtype=torch.bfloat16, device=device_type))
        optimizer = LowPrecision([weight], optimizer_class=torch.optim.AdamW, lr=0.01, seed=1)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        with _Counted() as counted:
            optimizer.step()
        found.append(counted.count)
    return found


def go_on(folder: Path, device_type: str, num_devices: int = 4) -> str:
    """Train two steps after those that ``folder`` holds, and save; return the checksum of the weights."""
    _register(device_type, num_devices)
    popdist.init(timeout_seconds=TIMEOUT_SECONDS)
    model = replicated(_device_of(device_type, num_devices))
    optimizer = popdist.ShardedOptimizer(model, LowPrecision, optimizer_class=torch.optim.AdamW, lr=0.01, seed=1)
    first = 0
    if folder.exists():
        load_latest(folder, model=model, optimizer=optimizer)
        first = 2
    steps(model, optimizer, range(first, first + 2))
    save(folder, model=model, optimizer=optimizer)
    return popdist.checksum(model)
