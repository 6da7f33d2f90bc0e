"""What programs for PopTorch expect of ``horovod.torch``; every instance runs all of it."""

import sys
from typing import Any

import torch
from torch import nn

import popdist
from poptorch.stubs import horovod_torch as hvd
from tests.contract.collective_laws import refused
from tests.contract.laws import laws_of


def run_all() -> int:
    """Every law, in the order of this file; how many there were."""
    assert not hvd.is_initialized()
    hvd.init()
    hvd.init()
    assert hvd.is_initialized()
    laws = laws_of(sys.modules[__name__])
    for law in laws:
        hvd.barrier()
        law()
    hvd.shutdown()
    return len(laws)


def law_ranks_are_instances() -> None:
    """All on one host."""
    assert (hvd.size(), hvd.rank()) == (popdist.num_instances(), popdist.instance_index())
    assert (hvd.local_size(), hvd.local_rank(), hvd.cross_size(), hvd.cross_rank()) == (
        hvd.size(),
        hvd.rank(),
        1,
        0,
    )
    assert hvd.is_homogeneous()


def law_allreduce_is_the_mean_unless_told_otherwise() -> None:
    """A new tensor, without gradient; integers are rounded down."""
    mine = torch.full((2,), float(hvd.rank() + 1), requires_grad=True)
    total, size = float(sum(range(1, hvd.size() + 1))), hvd.size()
    for mean in (hvd.allreduce(mine * 1), hvd.allreduce(mine, average=True), hvd.allreduce(mine, op=hvd.Average)):
        assert torch.equal(mean, torch.full((2,), total / size))
        assert not mean.requires_grad
    for whole in (hvd.allreduce(mine, average=False, name="loss"), hvd.allreduce(mine, op=hvd.Sum)):
        assert torch.equal(whole, torch.full((2,), total))
    assert hvd.allreduce(mine, op=hvd.Max).tolist() == [size] * 2
    assert hvd.allreduce(mine, op=hvd.Min).tolist() == [1.0] * 2
    assert hvd.allreduce(mine, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5).tolist() == [total] * 2
    assert int(hvd.allreduce(torch.tensor(hvd.rank() - 2))) == (sum(range(size)) - 2 * size) // size
    assert mine.tolist() == [hvd.rank() + 1] * 2


def law_in_place_and_grouped() -> None:
    """The tensor itself, or all of a list."""
    mine = torch.tensor(float(hvd.rank()))
    assert hvd.allreduce_(mine, op=hvd.Sum) is mine
    assert float(mine) == sum(range(hvd.size()))
    pair = hvd.grouped_allreduce([torch.ones(2), torch.full((), float(hvd.rank()))], op=hvd.Sum)
    assert [each.tolist() for each in pair] == [[hvd.size()] * 2, sum(range(hvd.size()))]
    assert hvd.grouped_allreduce_([mine], average=True)[0] is mine


def law_allgather_joins_ragged_rows() -> None:
    """Along dim 0, in the order of the instances; none is legal."""
    rows = hvd.allgather(torch.full((hvd.rank(), 2), hvd.rank()))
    assert rows[:, 1].tolist() == [rank for rank in range(hvd.size()) for _ in range(rank)]
    assert rows.shape[1:] == (2,)


def law_broadcasts_give_what_the_root_has() -> None:
    """Tensors, state dicts, named parameters; entries that are no tensors stay."""
    root = hvd.size() - 1
    mine = torch.tensor([hvd.rank()])
    assert (int(hvd.broadcast(mine, root_rank=root)), int(mine)) == (root, hvd.rank())
    assert hvd.broadcast_(mine, root) is mine
    assert int(mine) == root
    torch.manual_seed(hvd.rank())
    linear, norm = nn.Linear(2, 3), nn.BatchNorm1d(3)
    module = nn.Sequential(linear, norm)
    assert norm.running_mean is not None
    norm.running_mean.fill_(hvd.rank())
    hvd.broadcast_parameters({**module.state_dict(), "epoch": hvd.rank()}, root_rank=root)
    assert len(set(popdist.all_gather(linear.weight.detach().sum()).tolist())) == 1
    assert module.state_dict()["1.running_mean"].tolist() == [root] * 3
    hvd.broadcast_parameters(module.named_parameters())
    with refused(ValueError, "state_dict"):
        hvd.broadcast_parameters([torch.ones(2)])


def law_objects_and_optimizers_are_data() -> None:
    """Tensors within, too; what would run code is refused on all."""
    found = hvd.broadcast_object({"epoch": hvd.rank(), "best": (torch.full((2,), hvd.rank()), None)}, root_rank=0)
    assert (found["epoch"], found["best"][0].tolist(), found["best"][1]) == (0, [0, 0], None)
    with refused(popdist.CollectiveError, "instance 0 brought a .*tensors"):
        hvd.broadcast_object(refused if hvd.rank() == 0 else None)
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([weight], lr=0.1 * (1 + hvd.rank()))
    if hvd.rank() == 0:
        weight.grad = torch.ones(2)
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert torch.allclose(optimizer.state[weight]["exp_avg"], torch.full((2,), 0.1))


def law_the_rest_is_refused_by_name() -> None:
    """What cannot be, and what popdist does in another way."""
    with refused(ValueError, "give one of them"):
        hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum)
    calls: Any = (hvd.allreduce, hvd.allreduce_, hvd.broadcast, hvd.broadcast_)
    for call in calls:
        with refused(popdist.CollectiveError, "expected a tensor, and found a NoneType"):
            call(None, 0)
    with refused(ValueError, "op=2.*Average, Sum, Min or Max"):
        hvd.allreduce(torch.ones(1), op=2)  # type: ignore[arg-type] # the subject
    with refused(popdist.OptimizerError, "DistributedOptimizer.SGD.*trainingModel.*ReplicatedModel"):
        hvd.DistributedOptimizer(torch.optim.SGD([torch.ones(1)]), named_parameters=[])
    with refused(AttributeError, "no 'alltoall' here.*all_gather"):
        _ = hvd.alltoall
    with refused(popdist.CollectiveError, "leave comm out"):
        hvd.init([0, 1])
