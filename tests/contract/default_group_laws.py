"""The laws of ``popdist.init(torch_distributed=True)``; the helpers are as torchvision's references have them."""

import sys

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import HashStore

import popdist
from popdist.job import context
from tests.contract.collective_laws import refused
from tests.contract.laws import TIMEOUT_SECONDS, laws_of
from tests.contract.training_laws import is_last


def run_all() -> int:
    """Every law of this file; how many there were."""
    laws = laws_of(sys.modules[__name__])
    for law in laws:
        law()
        assert not dist.is_initialized()
        assert not popdist.is_initialized()
    return len(laws)


def connect(*, torch_distributed: bool = True) -> None:
    """What a program writes at its start."""
    popdist.init(timeout_seconds=TIMEOUT_SECONDS, torch_distributed=torch_distributed)


def is_dist_avail_and_initialized() -> bool:
    """Torchvision's."""
    return dist.is_available() and dist.is_initialized()


def get_world_size() -> int:
    """Torchvision's."""
    return dist.get_world_size() if is_dist_avail_and_initialized() else 1


def is_main_process() -> bool:
    """Torchvision's."""
    return not is_dist_avail_and_initialized() or dist.get_rank() == 0


def reduce_dict(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """The mean of each value over all processes."""
    if get_world_size() < 2:
        return values
    names = sorted(values)
    stacked = torch.stack([values[name] for name in names])
    dist.all_reduce(stacked)
    return dict(zip(names, stacked / get_world_size(), strict=True))


class SmoothedValue:
    """A meter whose processes add up their counts and totals, as a MetricLogger's do."""

    def __init__(self) -> None:
        self.count, self.total = 0, 0.0

    def update(self, value: float, n: int) -> None:
        """Take ``n`` values."""
        self.count, self.total = self.count + n, self.total + value * n

    def synchronize_between_processes(self) -> None:
        """Become the meter of all processes."""
        if is_dist_avail_and_initialized():
            both = torch.tensor([self.count, self.total], dtype=torch.float64)
            dist.barrier()
            dist.all_reduce(both)
            self.count, self.total = int(both[0]), float(both[1])


def law_helpers_find_the_instances() -> None:
    """Ranks are instances, one is the main one, and sums go over all of them, beside popdist's own."""
    connect()
    index, size = popdist.instance_index(), popdist.num_instances()
    assert (dist.get_rank(), get_world_size(), is_main_process()) == (index, size, popdist.is_main())
    found = reduce_dict({"loss": torch.tensor(float(index)), "accuracy": torch.tensor(2.0)})
    assert found == {"loss": torch.tensor((size - 1) / 2), "accuracy": torch.tensor(2.0)}
    meter = SmoothedValue()
    meter.update(float(index), n=index + 1)
    meter.synchronize_between_processes()
    assert meter.count == size * (size + 1) // 2
    assert meter.total == sum(i * (i + 1) for i in range(size))
    everybody: list[object] = [None] * size
    dist.all_gather_object(everybody, {"rank": index})
    assert everybody == [{"rank": i} for i in range(size)]
    assert popdist.all_reduce(torch.ones(1)).item() == size
    popdist.finalize()


def law_it_can_be_made_again() -> None:
    """And it is never made unasked."""
    for _ in range(2):
        connect()
        dist.barrier()
        popdist.finalize()
    connect(torch_distributed=False)
    assert not dist.is_initialized()
    with refused(popdist.BackendError, "torch_distributed=True.* after init.*: call init.* once, before all else"):
        connect()
    popdist.finalize()
    with refused(popdist.BackendError, "torch_distributed='yes' must be True or False"):
        popdist.init(torch_distributed="yes")  # type: ignore[arg-type] # that is the mistake


def law_a_program_that_destroys_it_is_left_alone() -> None:
    """What it makes instead is its own, too."""
    connect()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    popdist.finalize()
    assert dist.is_initialized()
    dist.destroy_process_group()


def law_the_programs_own_is_taken() -> None:
    """If its ranks are the instances; and it is not destroyed."""
    dist.init_process_group("gloo")
    connect()
    assert dist.get_backend() == "gloo"
    popdist.finalize()
    dist.barrier()
    dist.destroy_process_group()


def law_one_with_other_ranks_is_refused_on_every_instance() -> None:
    """As is one that a part of the instances has made; then all is well."""
    if popdist.num_instances() == 1:
        return
    size = popdist.num_instances()
    if is_last():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    with refused(popdist.BackendError, r"init\(torch_distributed=True\): instance 0 has no default group"):
        connect()
    if not is_last():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    with refused(popdist.BackendError, f"instance 0 of {size} is rank 0 of 1 in the default group"):
        connect()
    dist.destroy_process_group()
    assert context._state.job is None
    connect()
    popdist.finalize()
