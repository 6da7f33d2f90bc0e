"""What the laws of checkpoints with several instances of a replica run on every instance."""

import os
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed.tensor
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import popdist
import popdist.checkpoint.tensor_files
from popdist.checkpoint import load_latest, save
from popdist.job import context
from tests.contract.checkpoint_laws import files_in, small_files
from tests.contract.collective_laws import refused

WIDTH, NUM_LAYERS, BATCH_SIZE = 4, 4, 8
TIMEOUT_SECONDS = 300.0


class Layer(nn.Module):
    """Two matrices, of which each instance of a stage has some rows or columns, and a norm that it has whole."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.table = nn.Parameter(torch.randn(5, WIDTH))  # does not divide by two
        self.register_buffer("shift", torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Add to ``x`` what the matrices make of it."""
        added: Tensor = self.down(nn.functional.gelu(self.up(self.norm(x) + self.shift)))
        return x + added


class Net(nn.Module):
    """The layers, or those of one stage, under the names that they have in the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({f"{number}": Layer() for number in range(NUM_LAYERS)})

    def forward(self, x: Tensor) -> Tensor:
        """Call one layer after the other."""
        for layer in self.layers.values():
            x = layer(x)
        return x


class Trained:
    """This instance's part of a model, with what trains it.

    Args:
        seed: Of the weights.
        is_fully_sharded: Cut each parameter over all instances of the job, which hold whole replicas.
    """

    def __init__(self, seed: int, *, is_fully_sharded: bool = False) -> None:
        torch.manual_seed(seed)
        net = self.net = Net()
        contract = context.environment().contract
        shared, part = contract.parallelism, contract.replica_part
        sizes = (contract.num_replicas, shared.pipeline, shared.tensor)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replica", "pipeline", "tensor"))
        for number in range(NUM_LAYERS):
            if number * shared.pipeline // NUM_LAYERS != part.stage:
                del net.layers[f"{number}"]
        if shared.tensor > 1:
            for layer in net.layers.values():
                parallelize_module(layer, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
                table = distribute_tensor(layer.get_parameter("table").detach(), mesh["tensor"], [Shard(0)])
                layer.register_parameter("table", nn.Parameter(table))
        if is_fully_sharded:
            fully_shard(net, mesh=mesh["replica"])
        self.schedule: ScheduleGPipe | None = None
        if shared.pipeline > 1:
            stages = mesh["pipeline"].get_group()
            stage = PipelineStage(net, part.stage, shared.pipeline, torch.device("cpu"), group=stages)
            self.schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=nn.functional.mse_loss)
        wrapped = net if self.schedule is None else nn.ModuleList([net])  # as several stages would be
        self.model: nn.Module = net if is_fully_sharded else popdist.ReplicatedModel(wrapped)
        groups: list[list[nn.Parameter]] = [[], []]
        for parameter in self.model.parameters():
            groups[parameter.dim() - 1].append(parameter)
        settings: list[dict[str, Any]] = [{"params": groups[0], "weight_decay": 0.0}, {"params": groups[1]}]
        self.optimizer = torch.optim.AdamW(settings, lr=0.01 * (1.0 + seed))
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.noise = popdist.ReplicatedModel(nn.Linear(1, 1))
        self.loader = popdist.data_loader(list(range(1000)), 1, shuffle=True)
        self.named: dict[str, Any] = {
            name: getattr(self, name) for name in ("model", "optimizer", "scheduler", "noise", "loader")
        }

    def step(self, number: int) -> float:
        """Train on the same samples for any mapping; gives the loss of this instance's replica."""
        every = torch.randn(BATCH_SIZE, WIDTH, generator=torch.Generator().manual_seed(number))
        x = every.chunk(popdist.num_replicas())[popdist.replica_index()]
        if self.schedule is not None:
            assert isinstance(self.model, popdist.ReplicatedModel)
            losses = self.model.pipeline_step(self.schedule, (x, x.sin()), share_losses=True)
            assert losses is not None
            loss = float(losses.mean())
        else:
            parts = self.model.micro_batches(x) if isinstance(self.model, popdist.ReplicatedModel) else [x]
            for mine in parts:
                found = nn.functional.mse_loss(self.model(mine), mine.sin())
                found.backward()
                loss = found.item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return loss

    def draw(self, batch: Any) -> tuple[int, float]:
        """This instance's sample of a batch, and a number from the states of its replica."""
        ((sample, number),) = [(int(it), float(torch.rand(()))) for it in self.noise.micro_batches(batch)]
        return sample, number

    def content(self) -> dict[str, str]:
        """Digests of the whole weights, buffers and states of the optimizer, as far as this instance has them."""
        found = dict(self.net.state_dict())
        for name, parameter in self.net.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                found[f"{name} {key}"] = value
        whole = {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in found.items()}
        return {key: popdist.checksum({"": value}) for key, value in whole.items()}


def start() -> None:
    """Join the job."""
    popdist.init(timeout_seconds=TIMEOUT_SECONDS, torch_distributed=True)


def train_and_save(folder: Path) -> dict[str, Any]:
    """Train from the start, and save in the middle; what the job has then and at the end."""
    start()
    trained = Trained(0)
    batches = iter(trained.loader)
    for number in range(3):
        trained.draw(next(batches))
        trained.step(number)
    directory = save(folder, **trained.named)
    refuse_what_does_not_fit(folder, trained)
    then = trained.content()
    files = {path.name for path in (directory / "tensors").iterdir()}
    return {"files": files, "then": then} | go_on(trained, batches)


def refuse_what_does_not_fit(folder: Path, trained: Trained) -> None:
    """Save and load what does not fit together: an error on all instances, and nothing is left."""
    index = popdist.instance_index()
    other_shape, other_values = nn.Linear(2, 2 + index % 2), nn.Linear(2, 2)
    with torch.no_grad():
        other_values.weight.fill_(index)
    with refused(
        popdist.CheckpointError, r"m\.weight is float32\[2, 2\] on instance 0 and float32\[3, 2\] on instance 1"
    ):
        save(folder, m=other_shape)
    with refused(popdist.CheckpointError, r"m\.weight has other values on instance 0 than on instance 1"):
        save(folder, m=other_values)
    with refused(popdist.CheckpointError, "optimizer has parameters of no module in this call"):
        save(folder, optimizer=trained.optimizer)
    lacking = nn.Module()
    lacking.layers = nn.ModuleDict({"9": Layer()})
    before = popdist.checksum(lacking)
    fault = "another model: only the checkpoint has layers.*; it does not have layers.9.table"
    with refused(popdist.CheckpointError, fault):
        load_latest(folder, model=lacking)
    assert popdist.checksum(lacking) == before
    with (
        small_files(2000) if index == 1 else nullcontext(),
        refused(popdist.CheckpointError, "step 1 could not be written into .*File too large"),
    ):
        save(folder, **trained.named)
    assert files_in(folder) == ["step-000000000000"]


def go_on(trained: Trained, batches: Any) -> dict[str, Any]:
    """Train two steps more."""
    rate = trained.scheduler.get_last_lr()
    sample, number = trained.draw(next(batches))
    losses = [trained.step(number) for number in (3, 4)]
    return {"end": trained.content(), "draw": number, "sample": sample, "rate": rate, "losses": losses}


def load(folder: Path) -> list[dict[str, Any]]:
    """Load what another world saved into another model, save it, and train on; fully sharded too at the end."""
    start()
    found: list[dict[str, Any]] = []
    is_whole = not context.environment().contract.parallelism.is_shared
    for is_fully_sharded in [False, True] if is_whole and popdist.num_instances() > 1 else [False]:
        trained = Trained(1, is_fully_sharded=is_fully_sharded)
        if is_whole and popdist.num_instances() > 1 and not found:
            with refused(popdist.CheckpointError, "by other parts of replicas, .* name the model as well"):
                load_latest(folder, optimizer=trained.optimizer)
        assert load_latest(folder, **trained.named) is not None
        save(folder, **trained.named)
        then = {"then": trained.content()}
        found.append(then | go_on(trained, iter(trained.loader)))
    return found


def be_killed_while_saving(folder: Path) -> None:
    """Save what was loaded; the last instance ends when it opens the file of its tensors."""
    start()
    trained = Trained(1)
    load_latest(folder, **trained.named)
    is_victim = popdist.instance_index() == popdist.num_instances() - 1

    def end(event: str, arguments: tuple[object, ...]) -> None:
        if is_victim and event == "open" and ".partial/tensors/" in str(arguments[0]):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(end)
    with refused(popdist.BackendError, "instance 1"):
        save(folder, **trained.named)
