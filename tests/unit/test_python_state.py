"""State in Python that is carried from one forward pass to the next is told from caches and records."""

import random
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import spectral_norm

from popdist.errors import PopdistWarning
from popdist.step.checks.python_state import ENOUGH, MOST_PASSES, PythonState, next_fault


class _Base(nn.Module):
    """With attributes of many kinds; ``forward`` differs."""

    state: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.state = self.first_state()

    def first_state(self) -> Any:
        """What the attribute is before the first pass."""
        return 0


class _Counter(_Base):
    def forward(self, x: Tensor) -> Tensor:
        self.state += 1
        return torch.as_tensor(x * self.state)


class _LateCounter(_Base):
    """A counter that begins in the third pass."""

    num_known = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_known = min(self.num_known + 1, 3)
        self.state += self.num_known == 3
        return torch.as_tensor(x * self.state)


class _Decaying(_Base):
    def first_state(self) -> float:
        return 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.state *= 0.95
        return torch.as_tensor(x * self.state)


class _Hidden(_Base):
    def first_state(self) -> None:
        return None

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.zeros(2) if self.state is None else self.state[0]
        out = self.layer(x + hidden)
        self.state = (out.detach().mean(0),)
        return torch.as_tensor(out)


class _InPlace(_Base):
    def first_state(self) -> Tensor:
        return torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        self.state.add_(x.mean(0))
        return torch.as_tensor(x - self.state)


class _Method(_Base):
    def advance(self) -> None:
        """Count."""
        self.state = self.state + 1.5

    def forward(self, x: Tensor) -> Tensor:
        self.advance()
        return x


class _TorchGenerator(_Base):
    def first_state(self) -> torch.Generator:
        return torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(x + torch.rand(2, generator=self.state))


class _PythonGenerator(_Base):
    def first_state(self) -> random.Random:
        return random.Random(1)  # noqa: S311 - no secret

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(x + self.state.random())


class _NumpyGenerator(_Base):
    def first_state(self) -> np.random.Generator:
        return np.random.default_rng(1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(x + self.state.random())


class _OldNumpyGenerator(_Base):
    def first_state(self) -> np.random.RandomState:
        return np.random.RandomState(1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(x + self.state.rand())


class _HiddenInDict(_Base):
    def first_state(self) -> dict[str, Tensor]:
        return {"hidden": torch.zeros(2)}

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x + self.state["hidden"])
        self.state = {"hidden": out.detach().mean(0)}
        return torch.as_tensor(out)


class _Queue(_Base):
    def first_state(self) -> deque[float]:
        return deque([0.0], maxlen=1)

    def forward(self, x: Tensor) -> Tensor:
        self.state.append(float(x.sum()))
        return x


class _Table(_Base):
    def first_state(self) -> dict[str, float]:
        return {"mean": 0.0}

    def forward(self, x: Tensor) -> Tensor:
        self.state["mean"] += float(x.mean())
        return x


class _Array(_Base):
    def first_state(self) -> "np.ndarray[Any, Any]":
        return np.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        self.state += float(x.mean())
        return x


class _Record(_Base):
    """The last loss, for whoever asks."""

    def forward(self, x: Tensor) -> Tensor:
        self.state = float(x.sum())
        return x

    def last(self) -> float:
        """Read by the loop, and not by ``forward``."""
        return float(self.state)


class _Attention(_Base):
    """The last result, for whoever draws it."""

    def forward(self, x: Tensor) -> Tensor:
        self.state = self.layer(x).detach()
        return torch.as_tensor(x + self.state)


class _WrittenFirst(_Base):
    def forward(self, x: Tensor) -> Tensor:
        self.state = float(x.sum())
        return torch.as_tensor(x * self.state)


class _Cache(_Base):
    def forward(self, x: Tensor) -> Tensor:
        if not self.state:
            self.state = 1
        return torch.as_tensor(x * self.state)


class _Log(_Base):
    def first_state(self) -> list[float]:
        return []

    def forward(self, x: Tensor) -> Tensor:
        self.state.append(float(x.sum()))
        return x


class _Memo(_Base):
    def first_state(self) -> dict[float, float]:
        return {}

    def forward(self, x: Tensor) -> Tensor:
        self.state[float(x.sum())] = 1.0
        return x


class _SeededAnew(_Base):
    def first_state(self) -> torch.Generator:
        return torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(2, generator=self.state)
        self.state.manual_seed(3)
        return torch.as_tensor(x + noise)


class _Graph(_Base):
    """A loss beside the result, with a graph."""

    def forward(self, x: Tensor) -> Tensor:
        if self.state is not None:
            self.state = self.layer(x).square().mean()
        return x


class _Normed(_Base):
    """Whose weight a hook makes from another one, by a vector that moves."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = spectral_norm(nn.Linear(2, 2)).requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.layer(x))


def passes(module: nn.Module, number: int = ENOUGH) -> str | None:
    """What is found in so many passes."""
    state = PythonState(nn.ModuleDict({"inner": module}))
    state.is_watched(1)
    for i in range(number):
        state.watch(lambda i=i: module(torch.full((3, 2), i + 1.5)))  # type: ignore[misc] # mypy takes no defaults here
    return next_fault()


@pytest.fixture(autouse=True)
def _nothing_is_left() -> None:
    next_fault()


@pytest.mark.parametrize(
    "kind",
    [
        *(_Counter, _Decaying, _Hidden, _HiddenInDict, _InPlace, _Method, _Queue, _Table, _Array),
        *(_TorchGenerator, _PythonGenerator, _NumpyGenerator, _OldNumpyGenerator),
    ],
)
def test_what_is_carried_over_is_named(kind: Callable[[], nn.Module]) -> None:
    """With the module, where it is, and what to do; not before it changed in some passes."""
    name = kind.__name__
    assert passes(kind(), ENOUGH - 1) is None
    found = passes(kind())
    assert found is not None
    assert found.startswith(f"the attribute state of {name} (inner) changes in each forward pass, and the next")
    assert "register_buffer" in found


def test_a_counter_that_begins_late_is_named() -> None:
    """After as many passes in a row as another counter needs."""
    assert passes(_LateCounter(), ENOUGH + 1) is None
    assert passes(_LateCounter(), ENOUGH + 2) is not None


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "kind",
    [_Record, _Attention, _WrittenFirst, _Cache, _Log, _Memo, _SeededAnew, _Graph, _Normed, lambda: nn.LSTM(2, 2)],
)
def test_caches_and_records_are_none(kind: Callable[[], nn.Module]) -> None:
    """Neither an error nor a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", PopdistWarning)
        assert passes(kind(), MOST_PASSES) is None


def test_a_model_without_steps_is_not_looked_at_for_ever() -> None:
    """And one with steps again in the next one that is checked."""
    state = PythonState(nn.ModuleDict())
    for step in (1, 2):
        for _ in range(MOST_PASSES):
            assert state.is_watched(step)
            state.watch(dict)
        assert not state.is_watched(step)
