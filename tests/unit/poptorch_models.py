"""Models that tests of poptorch train, and what they ask of them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Net(nn.Module):
    """A small network with statistics and dropout, and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout()
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        """Scores."""
        scores = self.last(self.drop(torch.relu(self.norm(self.first(x)))))
        return scores if y is None else (scores, functional.cross_entropy(scores, y))


class Affine(nn.Module):
    """One product with a squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 1)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The product, and the error."""
        out = self.fc(x)
        return out, functional.mse_loss(out, y)


class Forward(nn.Module):
    """A weight, a buffer, and a forward of the test's own."""

    y: Tensor

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("y", torch.zeros(2))
        self._forward = forward

    def forward(self, x: Tensor) -> Any:
        """The test's own."""
        return self._forward(self, x)


def random_batch(num: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs and targets of `Affine`."""
    made = torch.Generator().manual_seed(seed)
    return torch.randn(num, 2, generator=made), torch.randn(num, 1, generator=made)


def states_are_equal(one: nn.Module, other: nn.Module) -> bool:
    """Whether all parameters and buffers of two modules have the same bits."""
    states = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(left, right) for left, right in states)
