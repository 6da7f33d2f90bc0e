"""A rank of a program that names the backend ``popdist`` and imports nothing of it: ``plain_ranks.py STORE``.

Who starts it tells each rank its number: torchrun and poprun in torch's variables, MPI's launchers in their own.
"""

import os
import sys

import torch
from torch import distributed as dist


def main(store: str) -> None:
    """Add up the ranks' numbers; each prints what it found."""
    rank, size = (
        next(int(os.environ[name]) for name in names if name in os.environ)
        for names in (
            ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK"),
            ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"),
        )
    )
    if "RANK" in os.environ:
        dist.init_process_group("popdist")
    else:
        dist.init_process_group("popdist", init_method=f"file://{store}", rank=rank, world_size=size)
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    part = dist.new_group(backend="popdist")
    dist.all_reduce(total, group=part)
    os.write(1, f"{dist.get_backend()} {dist.get_backend(part)} {total.item()}\n".encode())
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
