"""What goes between the hosts of a group, and what does not."""

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, distributed
from torch.nn import Linear
from torch.nn.parallel import DistributedDataParallel

from popdist.exchange.transport.hosts import HostMessages
from tests.contract.forked_ranks import Rank
from tests.torch_names import all_gather_single, reduce_scatter_single

LENGTH = 3 << 20
"""Several chunks."""
NUM_LOCAL = 2
"""Ranks of each host; the hosts are two."""

ROUNDING = 4096
"""Bytes by which shares of odd lengths may differ."""


def sent_bytes(collective: Callable[[], object]) -> int:
    """How much this rank sends to other hosts in a collective."""
    sizes: list[int] = []
    start = HostMessages.start

    def count(
        messages: HostMessages, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]
    ) -> Callable[[], None]:
        sizes.extend(tensor.nbytes for rank, tensor in sent.items() if rank != distributed.get_rank())
        return start(messages, sent, received)

    with patch.object(HostMessages, "start", count):
        collective()
    return sum(sizes)


def run_all(rank: Rank) -> None:
    """Each rank sends its share of what its host has, and gloo sends nothing besides."""
    tensor = torch.ones(LENGTH)
    share = tensor.nbytes // NUM_LOCAL
    assert share <= sent_bytes(lambda: distributed.all_reduce(tensor)) <= share + ROUNDING
    assert tensor.eq(rank.num_ranks).all()

    gathered = torch.empty(LENGTH * rank.num_ranks)
    assert sent_bytes(lambda: all_gather_single(gathered, tensor)) == tensor.nbytes
    assert sent_bytes(lambda: reduce_scatter_single(tensor, gathered)) == tensor.nbytes

    root = rank.num_ranks - 1
    is_rank_of_its_host = rank.rank == root
    assert sent_bytes(lambda: distributed.broadcast(tensor, root)) == is_rank_of_its_host * tensor.nbytes

    group: Any = distributed.new_group()
    distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=2), group)
    host = group._host
    assert (host._messages.timeout_seconds, host.local.group.barriers.timeout_seconds) == (2, 2)

    model = DistributedDataParallel(Linear(100, 100))
    size = sum(it.nbytes for it in model.parameters())
    assert size // NUM_LOCAL <= sent_bytes(lambda: model(torch.ones(1, 100)).sum().backward()) < size
