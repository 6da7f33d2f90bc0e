"""What holds for `popdist.parallel.phased`: run on every instance of jobs of several sizes.

A law is a function ``law_...`` of a folder for stores. Each trains a model in phases, and beside it the same one
in memory, with recomputed layers.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu

import popdist
from popdist.parallel import PhasedOptimizer, phased, recompute

WORDS, LENGTH, WIDTH, LAYERS, NUM_SAMPLES = 20, 5, 16, 4, 26


class Layer(nn.Module):
    """Draws random numbers, and writes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))
        self.scale: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states."""
        y = self.dropout(self.down(relu(self.up(self.norm(x))))) * self.scale.clone()
        with torch.no_grad():
            self.scale.mul_(0.99).add_(y.detach().mean(dim=(0, 1)))
        result: Tensor = x + y
        return result


class Net(nn.Module):
    """An embedding, layers and a head that is tied to the embedding; one weight is of no layer."""

    def __init__(self, *, is_tied: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if is_tied:
            self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        y = self.words(x) + self.shift
        for layer in self.layers:
            y = layer(y)
        logits: Tensor = self.head(self.norm(y))
        return logits


def net(*, is_tied: bool = False) -> Net:
    """The same one on all instances."""
    torch.manual_seed(1)
    return Net(is_tied=is_tied)


def share(step: int, num_samples: int = NUM_SAMPLES) -> tuple[Tensor, Tensor]:
    """This instance's samples of a step; the replicas have unequal numbers."""
    draw = torch.Generator().manual_seed(step)
    words = torch.randint(WORDS, (num_samples, LENGTH), generator=draw)
    num_local = popdist.num_local_replicas()
    first, last = (
        num_samples * (popdist.instance_index() + end) * num_local // popdist.num_replicas() for end in (0, 1)
    )
    return words[first:last], (words[first:last] + 1) % WORDS


def losses_of(
    model: Any,  # noqa: ANN401 - a ReplicatedModel or a PhasedModel
    optimizer: torch.optim.Optimizer,
    accumulation: int = 1,
    num_steps: int = 2,
    num_samples: int = NUM_SAMPLES,
    **options: Any,  # noqa: ANN401 - of micro_batches()
) -> list[float]:
    """Train; the losses of this instance's micro batches."""
    losses = []
    for step in range(num_steps):
        for x, y in model.micro_batches(share(step, num_samples), accumulation, **options):
            loss = cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    return losses


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Its own copy of weights and buffers."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """The same names and bits."""
    assert found.keys() == wanted.keys()
    assert [name for name, tensor in wanted.items() if not torch.equal(found[name], tensor)] == []


def law_bits_are_those_of_the_model_in_memory(folder: str) -> None:
    """With any number of phases, and any accumulation."""
    for accumulation, optimizer_class, numbers in ((1, torch.optim.SGD, (2,)), (3, torch.optim.AdamW, (1, 3, 7))):
        whole = popdist.ReplicatedModel(recompute(net()))
        wanted = losses_of(whole, optimizer_class(whole.parameters(), lr=0.1), accumulation)
        for number in numbers:
            model = phased(net(), phases=number, store=f"{folder}/{accumulation} {number}")
            optimizer = PhasedOptimizer(model, optimizer_class, lr=0.1)
            assert losses_of(model, optimizer, accumulation) == wanted
            assert_equal(state_of(model), state_of(whole))
            model.close()


def all_laws() -> list[Callable[[str], None]]:
    """Every law of this file."""
    return [law for name, law in globals().items() if name.startswith("law_")]


def run_all(folder: str) -> int:
    """Check them on this instance; gives their number."""
    popdist.init(timeout_seconds=60)
    for number, law in enumerate(all_laws()):
        law(f"{folder}/{number}")
    return len(all_laws())
