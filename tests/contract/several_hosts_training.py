"""A training over several hosts, or what an environment says are several."""

import hashlib

import torch
from torch import nn

import popdist
from popdist.context import current_group

TIMEOUT_SECONDS = 300.0


def train() -> tuple[int, str]:
    """Train two models; how many instances share this one's memory, and a digest of the weights."""
    popdist.init(timeout_seconds=TIMEOUT_SECONDS)
    weights = b"".join(_trained(gradient_dtype) for gradient_dtype in (None, torch.bfloat16))
    neighbours = current_group().backend.neighbours
    num_neighbours = 0 if neighbours is None else neighbours.group.size
    return num_neighbours, hashlib.sha256(weights).hexdigest()


def _trained(gradient_dtype: torch.dtype | None) -> bytes:
    """The weights after two steps."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 257), nn.ReLU(), nn.Linear(257, 63), nn.ReLU(), nn.Linear(63, 5))
    model = popdist.ReplicatedModel(net, gradient_dtype=gradient_dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        data = torch.randn(48, 64, generator=generator)
        replicas = popdist.local_replicas()
        mine = data.chunk(popdist.num_replicas())[replicas.start : replicas.stop]
        for x in model.micro_batches(torch.cat(mine)):
            assert isinstance(x, torch.Tensor)
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return b"".join(it.detach().numpy().tobytes() for it in net.parameters())
