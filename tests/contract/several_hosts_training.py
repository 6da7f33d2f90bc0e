"""A training over several hosts, or what an environment says are several; as a program it tells the digest."""

import hashlib
import os

import torch
from torch import Tensor, nn

import popdist
from popdist.job.context import current_group
from tests.contract.laws import TIMEOUT_SECONDS


def train() -> tuple[int, str]:
    """Train two models; how many instances share this one's memory, and a digest of the weights."""
    popdist.init(timeout_seconds=TIMEOUT_SECONDS)
    weights = b"".join(_trained(gradient_dtype) for gradient_dtype in (None, torch.bfloat16))
    weights += _trained_in_groups()
    local_collectives = current_group().backend.local_collectives
    num_on_host = 0 if local_collectives is None else local_collectives.group.size
    return num_on_host, hashlib.sha256(weights).hexdigest()


def _trained_in_groups() -> bytes:
    """The weights and statistics after two steps in which BatchNorm layers have those of all replicas."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 17), nn.BatchNorm1d(17), nn.ReLU(), nn.Linear(17, 5), nn.BatchNorm1d(5))
    model = popdist.ReplicatedModel(net, batch_norm_group_size=popdist.num_replicas())

    def body(x: Tensor) -> None:
        (model(x) + x[:, :5]).square().mean().backward()

    data = torch.randn(2, 48, 64, generator=torch.Generator().manual_seed(1))
    replicas = popdist.local_replicas()
    for step in range(2):
        mine = data[step].chunk(popdist.num_replicas())[replicas.start : replicas.stop]
        model.run_micro_batches(torch.cat(mine), body)
        _descend(model)
    return b"".join(it.numpy().tobytes() for it in net.state_dict().values())


def _trained(gradient_dtype: torch.dtype | None) -> bytes:
    """The weights after two steps."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 257), nn.ReLU(), nn.Linear(257, 63), nn.ReLU(), nn.Linear(63, 5))
    model = popdist.ReplicatedModel(net, gradient_dtype=gradient_dtype)
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        data = torch.randn(48, 64, generator=generator)
        replicas = popdist.local_replicas()
        mine = data.chunk(popdist.num_replicas())[replicas.start : replicas.stop]
        for x in model.micro_batches(torch.cat(mine)):
            assert isinstance(x, torch.Tensor)
            model(x).square().mean().backward()
        _descend(model)
    return b"".join(it.detach().numpy().tobytes() for it in net.parameters())


def _descend(model: nn.Module) -> None:
    """A step of SGD; for torch's own optimizer each process would import a second more of torch."""
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=0.5)
    model.zero_grad()


if __name__ == "__main__":
    os.write(1, f"{train()[1]}\n".encode())
