"""The handful of ``horovod.torch`` that docs/from-ddp.md calls, over torch.distributed. It is not Horovod.

It shows that the page's block is a program with Horovod's order of calls, not how Horovod behaves.
"""

import os
from collections.abc import Iterable, Mapping

from torch import Tensor, distributed, nn
from torch.optim import Optimizer


def init() -> None:
    """Connect the processes."""
    distributed.init_process_group("gloo")


def size() -> int:
    """Number of processes."""
    return distributed.get_world_size()


def rank() -> int:
    """This process."""
    return distributed.get_rank()


def local_rank() -> int:
    """This process on its host."""
    return int(os.environ["LOCAL_RANK"])


def broadcast_parameters(params: Mapping[str, Tensor], root_rank: int) -> None:
    """Overwrite tensors with the root's."""
    for tensor in params.values():
        distributed.broadcast(tensor, root_rank)


def broadcast_optimizer_state(optimizer: Optimizer, root_rank: int) -> None:
    """Nothing to send: the page's optimizer has no state when it is called."""
    assert not optimizer.state
    assert root_rank == 0


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]]
) -> Optimizer:
    """The same optimizer, which averages the gradients over the processes before each step."""
    parameters = [parameter for _, parameter in named_parameters]

    def average(*_unused: object) -> None:
        for parameter in parameters:
            assert parameter.grad is not None
            distributed.all_reduce(parameter.grad, distributed.ReduceOp.SUM)
            parameter.grad /= size()

    optimizer.register_step_pre_hook(average)
    return optimizer
