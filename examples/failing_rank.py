"""Fail on rank 2 while the other ranks wait for it, as a job does in which one rank lacks its data.

poprun --num-instances 4 python examples/failing_rank.py
"""

import torch
from torch import distributed

SHARDS = {0: 512, 1: 512, 3: 512}

distributed.init_process_group("gloo")
rank = distributed.get_rank()
for _ in range(5):
    distributed.all_reduce(torch.ones(8))
num_samples = torch.tensor(SHARDS[rank])
distributed.all_reduce(num_samples)
