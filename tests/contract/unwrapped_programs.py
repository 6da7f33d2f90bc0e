"""Programs that train without a ReplicatedModel, as people write them; each is one process of a job of its own."""

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import popdist
from popdist.step.checks.optimizer_checks import lone_steps
from poptorch.stubs import horovod_torch
from tests.contract.collective_laws import refused
from tests.contract.laws import TIMEOUT_SECONDS

WORDS = r"gradients of this instance alone: the job has \d replicas.*micro_batches.*execute_on_instances"


def net() -> nn.Sequential:
    """The same weights on each instance."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


def parts() -> Iterator[Tensor]:
    """The micro batches that a loader deals to this instance, in two steps."""
    rows = torch.randn(4 * popdist.num_replicas(), 4, generator=torch.Generator().manual_seed(1))
    for batch in popdist.data_loader(rows, 2):
        yield from batch


def train(model: nn.Module, data: list[Tensor] | None = None) -> torch.optim.Optimizer:
    """A loop of torch's, with nothing between backward() and step()."""
    optimizer = torch.optim.AdamW(model.parameters())
    for x in parts() if data is None else data:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return optimizer


def refuse(model: nn.Module) -> None:
    """The first step is refused, and no weight has changed."""
    before = copy.deepcopy(model.state_dict())
    with refused(popdist.OptimizerError, WORDS):
        train(model)
    for name, value in model.state_dict().items():
        assert bool((value == before[name]).all()), name


def forgotten() -> None:
    """Nothing is wrapped, and nobody has called init()."""
    refuse(net())


def forgotten_after_init() -> None:
    """Nothing is wrapped; the weights were made equal, and the loss is told of in each step."""
    popdist.init(timeout_seconds=TIMEOUT_SECONDS)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with refused(popdist.OptimizerError, WORDS):
        for x in parts():
            loss = model(x).square().mean()
            loss.backward()
            popdist.weighted_mean(loss.item(), 1)
            popdist.all_reduce(loss.detach().clone())
            optimizer.step()


def forgotten_with_a_closure() -> None:
    """The gradients come into being within the step."""
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters())
    for x in parts():

        def closure(x: Tensor = x) -> Tensor:
            loss = torch.as_tensor(model(x).square().mean())
            loss.backward()
            return loss

        with refused(popdist.OptimizerError, WORDS):
            optimizer.step(closure)
        return


def _tell_by_torch() -> None:
    """Train, and tell of the loss by a collective of torch between backward() and step()."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())
    found = (
        "the gradients of the instances still differ" if popdist.num_instances() > 1 else "nothing has added up"
    )
    with refused(popdist.OptimizerError, f"{found}.*micro_batches"):
        for x in parts():
            loss = model(x).square().mean()
            loss.backward()
            for _ in model.parameters():  # as many calls as there are gradients show nothing
                dist.all_reduce(loss.detach().clone())
            optimizer.step()
    assert all(bool((value == before[name]).all()) for name, value in model.state_dict().items())


def forgotten_beside_torch() -> None:
    """Nothing is wrapped, and torch's default group is popdist's."""
    popdist.init(timeout_seconds=TIMEOUT_SECONDS, torch_distributed=True)
    _tell_by_torch()


def forgotten_in_a_program_of_torch() -> None:
    """The wrapper of a program for torch alone was left out; popdist only deals the samples."""
    dist.init_process_group("gloo")
    _tell_by_torch()
    dist.destroy_process_group()


def sharded_within_a_replica() -> None:
    """Only the instances of a replica have exchanged anything."""
    cut, sharded, mesh = net(), net(), popdist.device_mesh()
    parallelize_module(cut, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(sharded, mesh=mesh["tensor"])
    for model in (cut, sharded):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 4)).sum().backward()
        with refused(popdist.OptimizerError, WORDS):
            optimizer.step()


def checked_after(model: nn.Module) -> None:
    """All instances have the same weights, and no step was one on gradients of one instance alone."""
    assert not lone_steps.number
    words = popdist.all_gather(torch.cat([it.detach().flatten() for it in model.parameters()]))
    assert all(torch.equal(words[0], it) for it in words)


def with_ddp() -> None:
    """DistributedDataParallel over the backend popdist, and over gloo."""
    popdist.init(timeout_seconds=TIMEOUT_SECONDS, torch_distributed=True)
    for group in (None, dist.new_group(backend="gloo")):
        model = DistributedDataParallel(net(), process_group=group)
        train(model)
        checked_after(model)
    del model


def with_fully_shard() -> None:
    """FSDP over all replicas: as a function, and as a wrapper of a program that is torch's alone."""
    store, rank, size = next(rendezvous("env://"))  # the store stays: popdist's store has the same server here
    dist.init_process_group("gloo", store=PrefixStore("torch", store), rank=rank, world_size=size)
    train(FullyShardedDataParallel(net(), device_id=torch.device("cpu")))
    dist.destroy_process_group()
    model = net()
    fully_shard(model, mesh=popdist.device_mesh()["replica"])
    train(model)
    assert not lone_steps.number


def by_hand() -> None:
    """By popdist and by torch, tensor by tensor or as one, and by Horovod's stand-in; with two optimizers."""
    popdist.init(timeout_seconds=TIMEOUT_SECONDS, torch_distributed=True)

    def flat(gradients: list[Tensor], reduce: Callable[[Tensor], object] = popdist.all_reduce) -> None:
        values = torch.cat([it.flatten() for it in gradients])
        reduce(values)
        for gradient, value in zip(gradients, values.split([it.numel() for it in gradients]), strict=True):
            gradient.copy_(value.view_as(gradient))

    for add in (
        flat,
        lambda gradients: flat(gradients, dist.all_reduce),
        lambda gradients: [popdist.all_reduce(it) for it in gradients],
        lambda gradients: [dist.all_reduce(it) for it in gradients],
        lambda gradients: [horovod_torch.allreduce_(it) for it in gradients],
    ):
        model = net()
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[2])]
        for x in parts():
            model.zero_grad()
            model(x).square().mean().backward()
            add([it.grad for it in model.parameters() if it.grad is not None])
            for optimizer in optimizers:
                optimizer.step()
        checked_after(model)


def by_hand_without_init() -> None:
    """By torch's gloo alone, in one call for all gradients."""
    dist.init_process_group("gloo")
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in parts():
        model.zero_grad()
        model(x).square().mean().backward()
        gradients = [it.grad for it in model.parameters() if it.grad is not None]
        values = torch.cat([it.flatten() for it in gradients])
        dist.all_reduce(values)
        for gradient, value in zip(gradients, values.split([it.numel() for it in gradients]), strict=True):
            gradient.copy_(value.view_as(gradient))
        optimizer.step()
    assert not lone_steps.number
    dist.destroy_process_group()


def by_all_reduce_gradients() -> None:
    """With one replica in each instance."""
    popdist.init(timeout_seconds=TIMEOUT_SECONDS)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in parts():
        model.zero_grad()
        model(x).square().mean().backward()
        popdist.all_reduce_gradients(model)
        optimizer.step()
    checked_after(model)


def beside_a_wrapped_one() -> None:
    """Another model that each instance trains for itself; and one instance has one for teaching, untrained."""
    popdist.init(timeout_seconds=TIMEOUT_SECONDS)
    model = popdist.ReplicatedModel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    teacher = net() if popdist.is_main() else nn.Identity()
    for batch in popdist.data_loader(torch.randn(4 * popdist.num_replicas(), 4), 2):
        for x in model.micro_batches(batch):
            with torch.no_grad():
                wanted = teacher(x).sum()
            (model(x) - wanted).square().mean().backward()
        optimizer.step()
    train(net())


def alone_on_purpose() -> None:
    """All train the same from the same data; or each for itself what it says so of; and one evaluates."""
    popdist.init(timeout_seconds=TIMEOUT_SECONDS)
    rows = list(torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0)))
    train(net(), rows)
    assert lone_steps.number == len(rows)  # of which poprun tells at the end
    own, model, mine = {popdist.instance_index()}, net(), list(parts())
    popdist.execute_on_instances(own, train, net(), mine)
    popdist.execute_on_instances({0}, train, net(), mine)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in mine:
        model(x).sum().backward()
        popdist.execute_on_instances(own, optimizer.step)
        if popdist.is_main():
            model(x).sum().backward()
    assert lone_steps.number == len(rows)


def with_ddp_of_several_replicas() -> None:
    """DistributedDataParallel takes each instance for one replica."""
    popdist.init(torch_distributed=True, timeout_seconds=TIMEOUT_SECONDS)
    model = DistributedDataParallel(net())
    before = copy.deepcopy(model.state_dict())
    with refused(popdist.OptimizerError, r"mean over \d instances, and the job has \d replicas.*ReplicatedModel"):
        train(model)
    for name, value in model.state_dict().items():
        assert bool((value == before[name]).all()), name
