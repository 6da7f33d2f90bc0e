"""Train a GPT of `examples/train_phased.py` in memory, or phase by phase with a store on the host or on a disk.

python phased_gpt.py --store host --layers 21 --width 1024 --memory 900000000
"""

import argparse
import os
import time
from collections.abc import Callable

import torch
from gpu_check.programs.device import chosen_device, print_result, wait_for
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import popdist
from examples.train_phased import GPT, NUM_BYTES
from popdist.parallel import PhasedModel, PhasedOptimizer, phased, recompute

LENGTH, BATCH = 256, 8
"""Words of a sample, and samples of a step."""


def initialize(net: nn.Module) -> None:
    """Give each module its initial weights, in the order of the modules."""
    torch.manual_seed(0)
    for module in net.modules():
        if isinstance(module, nn.Linear | nn.LayerNorm | nn.Embedding):
            module.reset_parameters()


def step_of(model: popdist.ReplicatedModel | PhasedModel, do_step: Callable[[], object], words: Tensor) -> Tensor:
    """Do one step, and return its loss."""
    for part in model.micro_batches((words,)):
        x, y = part[0][:, :-1], part[0][:, 1:]
        loss = cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
    do_step()
    return loss.detach()


def main() -> None:
    """Train, and print the digest and the seconds of each step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", default="", help="host, or a folder; nothing for a model in memory")
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--memory", type=int, default=0, help="bytes; 0 for four phases")
    parser.add_argument("--wall", type=int, default=0, help="bytes that torch may take of the device; 0 for all")
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read with the first product of matrices
    device = chosen_device()
    popdist.init()
    torch.use_deterministic_algorithms(mode=True)
    if options.wall and device.type == "cuda":
        _, total = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction(options.wall / total)
    with torch.device("meta"):
        net = GPT(options.layers, options.width)
    num_parameters = sum(it.numel() for it in net.parameters())
    model: popdist.ReplicatedModel | PhasedModel
    do_step: Callable[[], object]
    if options.store:
        torch.manual_seed(0)
        size = {"memory": options.memory} if options.memory else {"phases": 4}
        model = phased(net, store=options.store, **size)
        do_step = PhasedOptimizer(model, torch.optim.AdamW, lr=1e-3).step
    else:
        initialize(net.to_empty(device="cpu"))
        model = popdist.ReplicatedModel(recompute(net.to(device), net.layers))
        do_step = torch.optim.AdamW(model.parameters(), lr=1e-3).step
    generator = torch.Generator().manual_seed(1)
    seconds, losses = [], []
    for _ in range(options.steps):
        words = torch.randint(NUM_BYTES, (BATCH, LENGTH + 1), generator=generator)
        begin = time.perf_counter()
        loss = step_of(model, do_step, words)
        wait_for(device)
        seconds.append(time.perf_counter() - begin)
        losses.append(loss.item())
    digest = popdist.checksum(model.state_dict())
    print_result(digest=digest, losses=losses, seconds=seconds, num_parameters=num_parameters)


if __name__ == "__main__":
    main()
