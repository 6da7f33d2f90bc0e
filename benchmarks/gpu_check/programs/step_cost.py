"""Time a step of a plain loop, of DistributedDataParallel and of ReplicatedModel, by turns.

    python step_cost.py --model gpt --rounds 20

All three are in one process, which is a world of one rank. `gpt` is a GPT-2 of 124 M parameters in mixed precision
with bfloat16, which keeps a GPU busy; of `layers`, 200 layers of 64 x 64, the host is the limit.
"""

import argparse
import copy
import resource
from collections.abc import Callable, Sequence
from functools import partial

import torch
from gpu_check.programs.device import chosen_device, print_result, wait_for
from gpu_check.programs.gpt import GPT, GPT2, TINY
from measuring.turns import by_turns, seconds
from torch import Tensor, distributed, nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

import popdist

LOOPS = ("plain", "ddp", "replicated")
WARM_STEPS = 6
KIBIBYTE = 1024


class Layers(nn.Sequential):
    """200 small layers, whose kernels take less time than their launch."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(64, 64) for _ in range(200)))

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean square of the output."""
        for layer in self:
            x = layer(x)
        return x.square().mean()


def loop_of(name: str, net: nn.Module, sample: Tensor) -> Callable[[], None]:
    """Return a function that does one step of the loop ``name`` with a copy of ``net``."""
    device = sample.device
    inner = copy.deepcopy(net)
    optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-4, fused=True)
    autocast = partial(torch.autocast, device.type, torch.bfloat16, enabled=isinstance(net, GPT))
    if name == "replicated":
        model = popdist.ReplicatedModel(inner)

        def step() -> None:
            for part in model.micro_batches((sample,)):
                with autocast():
                    loss = model(part[0])
                loss.backward()
            optimizer.step()

        return step
    called: nn.Module = inner
    if name == "ddp":
        called = DistributedDataParallel(inner, device_ids=None if device.type == "cpu" else [device.index or 0])

    def plain_step() -> None:
        optimizer.zero_grad()
        with autocast():
            loss = called(sample)
        loss.backward()
        optimizer.step()

    return plain_step


def clock(step: Callable[[], None], num_steps: int, device: torch.device) -> float:
    """Return the seconds of a step, of which ``num_steps`` are taken."""

    def steps() -> None:
        for _ in range(num_steps):
            step()
        wait_for(device)

    wait_for(device)
    return seconds(steps) / num_steps


def used_bytes(device: torch.device) -> int:
    """Return the memory of the device that is in use, that of the driver included; of a CPU the process's peak."""
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIBIBYTE
    free, total = torch.get_device_module(device).mem_get_info()
    return int(total - free)


def bytes_of(device: torch.device) -> dict[str, int]:
    """Return what torch's allocator knows of the device's memory; empty for a CPU."""
    if device.type == "cpu":
        return {}
    found = torch.accelerator.memory_stats(device)
    names = "allocated_bytes.all.peak", "reserved_bytes.all.peak", "reserved_bytes.all.current"
    return {name: found[name] for name in names if name in found}


def main() -> None:
    """Time the loops, and print the seconds of each round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("gpt", "layers"), required=True)
    parser.add_argument("--loops", nargs="+", choices=LOOPS, default=LOOPS)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    device = chosen_device()
    popdist.init()
    if "ddp" in options.loops:
        backend = "nccl" if device.type == "cuda" else "gloo"
        distributed.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    before = used_bytes(device)
    times = measure(options.model, options.loops, options.rounds, options.steps, device)
    print_result(seconds=times, used_bytes=used_bytes(device), before_bytes=before, bytes=bytes_of(device))


def measure(
    model: str, loops: Sequence[str], rounds: int, num_steps: int, device: torch.device
) -> dict[str, list[float]]:
    """Return the seconds of a step of each loop in each round."""
    size = GPT2 if device.type == "cuda" else TINY
    torch.manual_seed(0)
    net: nn.Module = GPT(size) if model == "gpt" else Layers()
    words = torch.randint(size.vocab, (size.micro_batch, size.sequence + 1))
    sample = (words if model == "gpt" else torch.randn(64, 64)).to(device)
    net.to(device)
    steps = {name: loop_of(name, net, sample) for name in loops}
    del net
    clocks = {name: partial(clock, step, num_steps, device) for name, step in steps.items()}
    by_turns(clocks, max(WARM_STEPS // num_steps, 1) + 1)
    return by_turns(clocks, rounds)


if __name__ == "__main__":
    main()
