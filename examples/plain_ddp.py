"""A training script that knows torch.distributed and nothing of poprun: it runs under torchrun as well.

poprun -n 2 python examples/plain_ddp.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

NUM_STEPS = 60
SAMPLES_PER_RANK = 32


def train(rank: int, device: torch.device) -> torch.Tensor:
    """The weights of a line fitted to points that differ from rank to rank."""
    torch.manual_seed(rank)
    inputs = torch.randn(SAMPLES_PER_RANK, 3, device=device)
    targets = inputs @ torch.tensor([[1.0], [-2.0], [3.0]], device=device) + 0.5
    model = DistributedDataParallel(nn.Linear(3, 1).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def main() -> None:
    """Train, then show what this rank found: all ranks find the same."""
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    weights = train(rank, device)
    print(f"rank {rank} of {world_size}: {weights.tolist()}", flush=True)
    dist.barrier()  # torch 2.13 may abort a rank that leaves within milliseconds of its last collective
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
