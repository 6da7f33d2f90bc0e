"""The laws of collectives within micro batches, and of losses over the samples of all replicas."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.nn.functional import all_gather

import popdist
from tests.contract.collective_laws import refused

WORDS = r"within a micro batch of one of several replicas.*outside of the micro batches.*as many instances as repl"


def by_operator(x: Tensor) -> object:
    """As torch.compile and DTensor call collectives."""
    group: Any = dist.group.WORLD
    return functional.all_reduce(x, "sum", group) + 0


def by_autograd(x: Tensor) -> object:
    """The gather of contrastive losses, which has a backward pass."""
    return torch.cat(all_gather(x)).sum()


def over_gloo(x: Tensor) -> object:
    """In a group that the program has made."""
    return dist.all_reduce(x.detach().clone(), group=gloo())


CALLS: dict[str, Callable[[Tensor], object]] = {
    "all_reduce": lambda x: dist.all_reduce(x.detach().clone()),
    "all_gather_object": lambda _: dist.all_gather_object([None] * popdist.num_instances(), 1),
    "operator": by_operator,
    "autograd": by_autograd,
    "gloo": over_gloo,
    "popdist.all_gather": popdist.all_gather,
    "popdist.all_reduce": lambda x: popdist.all_reduce(x.detach().clone()),
    "popdist.barrier": lambda _: popdist.barrier(),
    "popdist.broadcast_object": lambda _: popdist.broadcast_object(1),
    "popdist.gather": lambda x: popdist.gather(x.detach()),
    "popdist.weighted_mean": lambda _: popdist.weighted_mean(1.0, 1),
}


@cache
def gloo() -> Any:
    """A group of gloo that the program has made, beside the default group."""
    popdist.device_mesh()
    return dist.new_group(backend="gloo")


def batch_of(rows: Tensor) -> Tensor:
    """This instance's part of ``rows``, which are those of all replicas."""
    return rows.chunk(popdist.num_instances())[popdist.instance_index()]


def law_a_collective_in_the_loop_is_refused_where_an_instance_has_several_replicas() -> None:
    """Whoever calls it, and in each form of a step; with one replica in each instance it joins all of them."""
    gloo()
    rows = torch.randn(2 * popdist.num_replicas(), 4)
    for number, (name, call) in enumerate(CALLS.items()):
        model = popdist.ReplicatedModel(nn.Linear(4, 4))
        weights = popdist.checksum(model)
        is_joined = name == "popdist.all_gather"  # of a tensor with a gradient, which is refused anywhere

        def body(x: Tensor, call: Callable[[Tensor], object] = call, model: nn.Module = model) -> None:
            y = model(x)
            call(y)
            y.sum().backward()

        if popdist.num_local_replicas() == 1 and not is_joined:
            for x in model.micro_batches(batch_of(rows)):
                body(x)
            continue
        words = WORDS if popdist.num_local_replicas() > 1 else "detach"
        with refused(popdist.CollectiveError, words):
            if number % 2:
                model.run_micro_batches(batch_of(rows), body)
            else:
                for x in model.micro_batches(batch_of(rows)):
                    body(x)
        assert popdist.checksum(model) == weights
        for x in model.micro_batches(batch_of(rows)):
            model(x).sum().backward()


def law_what_joins_no_replicas_is_legal_in_the_loop() -> None:
    """Metrics that only collect, batch norm groups, queries, and collectives between two loops."""
    gloo()
    size = popdist.num_replicas()
    model = popdist.ReplicatedModel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), batch_norm_group_size=size)
    mean, rows = popdist.Mean(), torch.randn(2 * size, 4)

    def body(x: Tensor) -> None:
        loss = model(x).square().mean()
        loss.backward()
        mean.add(loss.item() * len(x), len(x))
        assert popdist.num_replicas() == size

    for _ in range(2):
        model.zero_grad()
        model.run_micro_batches(batch_of(rows), body)
        dist.barrier()
        assert mean.compute() > 0


def contrast(rows: Tensor) -> Tensor:
    """A loss over all samples: each one's two halves are to be more alike than those of different samples."""
    first, second = rows.chunk(2, dim=1)
    return nn.functional.cross_entropy(first @ second.T, torch.arange(len(rows)))


def gradients_over_all_samples() -> list[list[float]]:
    """The gradients of two steps of the loop in docs/from-ddp.md, and of one process without popdist."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))
    model, rows = popdist.ReplicatedModel(net), torch.randn(48, 4)
    loader = popdist.data_loader(rows, 3, accumulation=2, drop_last=True)
    found: list[list[float]] = []
    for batch in loader:
        with torch.no_grad():
            every = popdist.gather([model(x) for x in batch])
        model.zero_grad()
        first = popdist.replica_index() * 2 * 3
        for x in model.micro_batches(batch, reduction="sum"):
            joined = every.clone()
            joined[first : first + len(x)] = model(x)
            contrast(joined).backward()
            first += len(x)
        found.append(torch.cat([it.grad.flatten() for it in net.parameters() if it.grad is not None]).tolist())
        indices = popdist.gather(torch.tensor(batch.indices))
        wanted = torch.autograd.grad(contrast(net(rows[indices])), list(net.parameters()))
        torch.testing.assert_close(torch.tensor(found[-1]), torch.cat([it.flatten() for it in wanted]))
    return found
