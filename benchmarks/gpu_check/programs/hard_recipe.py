"""Train with everything on which the order of streams and hooks may depend.

    poprun -n 2 --num-replicas 4 python hard_recipe.py            # prints a digest
    poprun -n 1 --num-replicas 4 python hard_recipe.py --by-hand  # compares with a loop of torch alone

BatchNorm, dropout, mixed precision with a GradScaler that skips one step, clipping, accumulation, and a sharded
optimizer. The loop by hand has no dropout: it draws other random numbers.
"""

import argparse
import copy

import torch
from gpu_check.programs.device import chosen_device, print_result
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import popdist

NUM_STEPS, ACCUMULATION, MICRO_BATCH, NUM_REPLICAS = 30, 2, 4, 4
STEP_SAMPLES = NUM_REPLICAS * ACCUMULATION * MICRO_BATCH
SKIPPED_STEP = 7
LIMIT = 0.5
"""Of the gradients' norm."""

LEARNING_RATE = 1e-3


class Net(nn.Sequential):
    """Convolutions with statistics, dropout, and a classifier."""

    def __init__(self, dropout: float) -> None:
        super().__init__(
            nn.Conv2d(3, 32, 3, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Conv2d(32, 64, 3, padding=1, stride=2, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(64 * 8 * 8, 10),
        )


def images() -> TensorDataset:
    """Return the samples of all steps; the third tensor multiplies a sample's loss."""
    generator = torch.Generator().manual_seed(1)
    count = NUM_STEPS * STEP_SAMPLES
    factors = torch.ones(count)
    factors[SKIPPED_STEP * STEP_SAMPLES + STEP_SAMPLES // 2] = torch.inf
    pixels = torch.randn(count, 3, 16, 16, generator=generator)
    return TensorDataset(pixels, torch.randint(10, (count,), generator=generator), factors)


def loss_of(model: nn.Module, pixels: Tensor, labels: Tensor, factors: Tensor) -> Tensor:
    """Return the mean loss of a micro batch in mixed precision."""
    kind = pixels.device.type
    with torch.autocast(kind, torch.float16 if kind == "cuda" else torch.bfloat16):
        scores = model(pixels)
    return (cross_entropy(scores.float(), labels, reduction="none") * factors).mean()


def train(net: Net) -> tuple[popdist.ReplicatedModel, int]:
    """Train with popdist; return the model and the number of skipped steps."""
    model = popdist.ReplicatedModel(net)
    optimizer = popdist.ShardedOptimizer(model, torch.optim.AdamW, lr=LEARNING_RATE)
    scaler = torch.amp.GradScaler(next(net.parameters()).device.type)
    loader = popdist.data_loader(images(), MICRO_BATCH, ACCUMULATION)
    num_skipped = 0
    for batch in loader:
        for pixels, labels, factors in model.micro_batches(batch):
            scaler.scale(loss_of(model, pixels, labels, factors)).backward()
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(LIMIT)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        num_skipped += scaler.get_scale() < before
    return model, num_skipped


def train_by_hand(net: Net) -> tuple[Net, int]:
    """Train with torch alone, replica after replica; return the model and the number of skipped steps.

    Gradients are added in the order of a binary tree, and the norm is taken of the norms of the parameters: if a
    norm differs in its last bit, rounding to 16 bits makes weights differ by some percent after 30 steps.
    """
    device = next(net.parameters()).device
    parameters = list(net.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE)
    scaler = torch.amp.GradScaler(device.type)
    num_skipped = 0
    samples = [tensor.to(device).split(STEP_SAMPLES) for tensor in images().tensors]
    for step in zip(*samples, strict=True):
        start = {name: buffer.clone() for name, buffer in net.named_buffers()}
        sums, ends = [], []
        for replica in zip(*(tensor.chunk(NUM_REPLICAS) for tensor in step), strict=True):
            load_buffers(net, start)
            for micro in zip(*(tensor.split(MICRO_BATCH) for tensor in replica), strict=True):
                scaler.scale(loss_of(net, *micro)).backward()  # adds to .grad, two micro batches
            sums.append([parameter.grad for parameter in parameters if parameter.grad is not None])
            ends.append({name: buffer.clone() for name, buffer in net.named_buffers()})
            optimizer.zero_grad()
        pairs = [[a + b for a, b in zip(sums[i], sums[i + 1], strict=True)] for i in (0, 2)]
        for parameter, a, b in zip(parameters, *pairs, strict=True):
            parameter.grad = (a + b) / (NUM_REPLICAS * ACCUMULATION)
        load_buffers(net, mean_of(ends))
        scaler.unscale_(optimizer)
        norms = [torch.linalg.vector_norm(parameter.grad) for parameter in parameters]
        nn.utils.clip_grads_with_norm_(parameters, LIMIT, torch.linalg.vector_norm(torch.stack(norms)))
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        num_skipped += scaler.get_scale() < before
        optimizer.zero_grad()
    return net, num_skipped


def mean_of(states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean of the replicas' floats, and replica 0's other buffers."""
    return {
        name: torch.stack([it[name] for it in states]).mean(0) if first.is_floating_point() else first
        for name, first in states[0].items()
    }


@torch.no_grad()
def load_buffers(net: Net, values: dict[str, Tensor]) -> None:
    """Give the buffers of ``net`` these values."""
    for name, buffer in net.named_buffers():
        buffer.copy_(values[name])


def difference(ours: nn.Module, theirs: nn.Module) -> float:
    """Return the largest difference of a tensor, relative to the largest number in it."""
    found = [0.0]
    for mine, other in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
        if other.is_floating_point():
            found.append(float((mine - other).abs().max() / other.abs().max()))
    return max(found)


def main() -> None:
    """Train, and print the digest, or the difference to the loop by hand."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--by-hand", action="store_true")
    options = parser.parse_args()
    device = chosen_device()
    popdist.init()
    torch.manual_seed(0)
    net = Net(0.0 if options.by_hand else 0.2).to(device)
    twin = copy.deepcopy(net)
    model, num_skipped = train(net)
    found = {"digest": popdist.checksum(model), "num_skipped": num_skipped}
    if options.by_hand:
        other, found["num_skipped_by_hand"] = train_by_hand(twin)
        found["difference"] = difference(model.module, other)
    print_result(**found)


if __name__ == "__main__":
    main()
