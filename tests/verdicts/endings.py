"""Programs of three instances of which one goes another way than the others, each as its user would write it."""

from typing import Final

_HEAD: Final = """
import os, signal, sys, threading, time
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
import torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
torch.manual_seed(0)
"""

_DDP: Final = f"""{_HEAD}
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
def train(num_steps):
    for step in range(num_steps):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""

_SHARDED: Final = f"""{_HEAD}
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
model = nn.Linear(8, 4)
fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
def train(num_steps):
    for step in range(num_steps):
        model(torch.randn(4, 8)).sum().backward()
"""

ONE_BATCH_LESS: Final = f"""{_DDP}
train(7 if rank == 1 else 8)
dist.all_reduce(torch.ones(3))
"""
ONE_BATCH_MORE: Final = f"""{_DDP}
train(9 if rank == 1 else 8)
"""
OTHER_DTYPE: Final = f"""{_HEAD}
for step in range(8):
    dist.all_reduce(torch.ones(4, dtype=torch.float64 if step == 5 and rank == 1 else torch.float32))
dist.barrier()
"""
OTHER_MODEL: Final = f"""{_HEAD}
layers = [nn.Linear(8, 4)] * 2 if rank == 1 else [nn.Linear(8, 4)]
model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers, *([nn.Linear(4, 4)] if rank == 1 else [])))
"""
LATE_FOR_BARRIER: Final = f"""{_HEAD}
from datetime import timedelta
if rank == 1:
    time.sleep(600)
dist.monitored_barrier(timeout=timedelta(seconds=3))
"""
CAUGHT: Final = f"""{_HEAD}
for step in range(8):
    try:
        if step == 5 and rank == 1:
            raise ValueError("bad sample")
        dist.all_reduce(torch.ones(5))
    except ValueError:
        continue
dist.barrier()
"""
AT_EXIT: Final = f"""{_DDP}
import atexit
train(5)
if rank == 1:
    atexit.register(time.sleep, 600)
    sys.exit(0)
train(3)
"""
MESSAGE: Final = f"""{_DDP}
train(5)
if rank == 1:
    dist.recv(torch.ones(4), src=0)
train(3)
"""
OTHER_PORT: Final = f"""
import os
if os.environ["RANK"] == "1":
    os.environ["MASTER_PORT"] = "1"
{_HEAD}"""
OTHER_RANK: Final = OTHER_PORT.replace('"MASTER_PORT"] = "1"', '"RANK"] = "0"')
WHOLE_STATE: Final = f"""{_SHARDED}
train(3)
if rank == 1:
    weight = model.weight.full_tensor()
train(3)
dist.barrier()
"""
NOT_ISSUED: Final = f"""{_HEAD}
works = [dist.all_reduce(torch.ones(4), async_op=True) for step in range(4) if step != 2 or rank != 1]
for work in works:
    work.wait()
dist.barrier()
"""
PREFETCH: Final = f"""{_DDP}
import queue
batches = queue.Queue(2)
def fill():
    for step in range(8):
        if step == 5 and rank == 1:
            raise ValueError("bad file")
        batches.put(step)
threading.Thread(target=fill, daemon=True).start()
for _ in range(8):
    batches.get()
    train(1)
"""
FETCHER: Final = PREFETCH.replace("import queue", "import multiprocessing as queue").replace(
    "threading.Thread", "queue.get_context('fork').Process"
)
LOCK: Final = f"""{_DDP}
import fcntl
lock = open(os.path.join(os.path.dirname(__file__), "lock"), "w")
if rank == 1:
    fcntl.flock(lock, fcntl.LOCK_EX)
dist.barrier()
if rank == 1:
    time.sleep(600)
fcntl.flock(lock, fcntl.LOCK_EX)
"""
UNEVEN: Final = f"""{_HEAD}
if rank == 1:
    dist.all_reduce(torch.ones(4))
sizes = [rank + other + 1 for other in range(world)]
dist.all_to_all_single(torch.ones(sum(sizes)), torch.ones(sum(sizes)), sizes, sizes)
dist.barrier()
"""
STALE_LOCK: Final = f"""{_HEAD}
from torch.utils.file_baton import FileBaton
FileBaton(__file__).wait()
"""
LOST_CHILD: Final = """
import multiprocessing, os
def work(results):
    if os.environ["RANK"] == "1":
        os._exit(1)
    results.put(1)
fork = multiprocessing.get_context("fork")
results = fork.Queue()
fork.Process(target=work, args=(results,)).start()
print(results.get())
"""
