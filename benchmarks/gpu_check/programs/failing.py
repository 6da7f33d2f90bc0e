"""Train with two instances, of which instance 1 fails: failing.py memory|assert|endless|address|kill."""

import os
import signal
import sys

import torch
from gpu_check.programs.device import chosen_device
from torch import nn
from torch.cuda import jiterator

import popdist

SPIN = "template <typename T> T spin(T x) { volatile T y = x; while (y == y) { y = y + T(0); } return y; }"
WILD = (
    "template <typename T> T wild(T x) { return *reinterpret_cast<volatile T*>(16ULL * (unsigned long long)x); }"
)
"""Kernels that never end, and that read at an address that is not there."""

HUGE_BYTES = 1 << 43
NUM_STEPS, FAILING_STEP = 8, 3


def fail(kind: str, device: torch.device) -> None:
    """Fail in this way."""
    if kind == "memory":
        torch.empty(HUGE_BYTES, dtype=torch.uint8, device=device)
    elif kind == "assert":
        nn.functional.embedding(torch.tensor([9], device=device), torch.zeros(4, 4, device=device))
    elif kind in {"endless", "address"}:
        kernel = jiterator._create_jit_fn(SPIN if kind == "endless" else WILD)  # noqa: SLF001 - so it is documented
        kernel(torch.ones(4, device=device))
    else:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.accelerator.synchronize(device)


def main() -> None:
    """Train until the failure."""
    device = chosen_device()
    popdist.init()
    torch.manual_seed(0)
    model = popdist.ReplicatedModel(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1)).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(popdist.instance_index())
    for step in range(NUM_STEPS):
        for points in model.micro_batches(torch.randn(4 * popdist.num_local_replicas(), 8)):
            if step == FAILING_STEP and popdist.instance_index() == 1:
                fail(sys.argv[1], device)
            model(points).square().mean().backward()
        optimizer.step()


if __name__ == "__main__":
    main()
