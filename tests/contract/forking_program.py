"""A program that trains, forks a child that leaves by `sys.exit`, and goes on; see `test_forks`."""

import os
import signal
import sys
import time

import torch
from torch import distributed as dist
from torch import nn

import popdist

_CHILD_SECONDS = 30.0


def exit_code_of_child() -> int:
    """What `waitpid` says of a child that calls `sys.exit(7)`; the signal, negated, that ended it otherwise."""
    pid = os.fork()
    if pid == 0:
        sys.exit(7)
    deadline = time.monotonic() + _CHILD_SECONDS
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def train_and_fork(kind: str) -> None:
    """Print the child's exit code, and the sum over all instances that the parent makes afterwards."""
    has_default_group = kind == "default group"
    popdist.init(torch_distributed=has_default_group)
    model = popdist.ReplicatedModel(nn.Linear(4, 2))
    made = popdist.ShardedOptimizer(model, torch.optim.Adam) if kind == "sharded optimizer" else None
    samples = torch.ones(popdist.num_local_replicas(), 4)
    for _ in range(2):
        for batch in model.micro_batches(samples):
            model(batch).square().mean().backward()
        if made is not None:
            made.step()
        model.zero_grad()
    if has_default_group:
        dist.all_reduce(torch.ones(4), async_op=True).wait()
    code = exit_code_of_child()
    sys.stdout.write(f"{kind}: {code} {int(popdist.all_reduce(torch.ones(1)))}\n")


if __name__ == "__main__":
    for number, word in enumerate(sys.argv[1:]):
        if number:
            popdist.finalize()
        train_and_fork(word)
