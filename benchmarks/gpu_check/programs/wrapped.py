"""Train with DistributedDataParallel or FSDP2 as any program of torch does, and print the losses.

poprun -n 2 python wrapped.py --wrap fsdp --backend cpu:popdist,cuda:nccl
"""

import argparse

import torch
from gpu_check.programs.device import chosen_device, print_result
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import popdist_backend

NUM_STEPS, NUM_SAMPLES, WIDTH = 8, 16, 256


def main() -> None:
    """Train, and print the loss of each step, the mean over all ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wrap", choices=("ddp", "fsdp"), required=True)
    parser.add_argument("--backend", required=True)
    options = parser.parse_args()
    device = chosen_device()
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
    popdist_backend.register()  # torch does so itself where popdist is installed
    distributed.init_process_group(options.backend)
    rank, size = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(6))).to(device)
    samples = torch.randn(NUM_SAMPLES, WIDTH).chunk(size)[rank].to(device)
    model: nn.Module = net
    if options.wrap == "ddp":
        model = DistributedDataParallel(net)
    else:
        mesh = init_device_mesh(device.type, (size,))
        for module in (*net, net):
            fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = (model(samples) - samples).square().mean()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        distributed.all_reduce(mean)
        losses.append(mean.item() / size)
    print_result(losses=losses)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
