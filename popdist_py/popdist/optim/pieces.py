"""What an optimizer of popdist is told when its parameters are pieces of larger ones.

Such an optimizer looks at more than the elements that it updates: at the norm of a whole parameter, or at the
number of an element in it. A sharded optimizer tells it which piece of what it has, and adds up what the instances
know.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from popdist.errors import OptimizerError, as_float


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Some elements of a whole parameter, in the order of memory.

    Attributes:
        position: Number of the whole parameter, counted over the parameter groups.
        elements: Which elements of it; the first one is a multiple of 128.
        num_elements: Elements of the whole parameter.
    """

    position: int
    elements: range
    num_elements: int

    @property
    def is_whole(self) -> bool:
        """Whether these are all elements."""
        return len(self.elements) == self.num_elements


NodeSums: TypeAlias = Mapping[Tensor, Sequence[Sequence[float]]]
"""For each piece several sums over it, each in nodes of the tree over the blocks of the whole parameter."""

WholeSums: TypeAlias = Callable[[NodeSums], Mapping[Tensor, Sequence[float]]]
"""From the sums over pieces to those over whole parameters, by an exchange with the other instances."""


class PieceOptimizer(Optimizer):
    """An optimizer that may be given pieces of parameters, together with what it has to know about them.

    torch's copies of optimizers leave out what a class adds, so a copy has whole parameters again.
    """

    exchanges_norms: bool = False
    """Whether a step needs norms of whole parameters."""

    _pieces: Mapping[Tensor, Piece] = {}
    _whole_sums: WholeSums | None = None

    def place(self, pieces: Mapping[Tensor, Piece], whole_sums: WholeSums | None) -> None:
        """From now on these parameters are pieces of others.

        Args:
            pieces: What each parameter is a piece of; one that is not in it is whole.
            whole_sums: Adds up sums over pieces; called once in each step, also when there is nothing to add.
        """
        self._pieces = pieces
        self._whole_sums = whole_sums

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401 - a closure may give anything
        """Update the parameters that have a gradient.

        Args:
            closure: Computes the loss and the gradients anew.

        Returns:
            What ``closure`` returned, or None.

        Raises:
            OptimizerError: If a gradient is sparse, or as the class says.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.update()
        return loss

    def update(self) -> None:
        """Make the step, with the gradients that are there."""
        raise NotImplementedError

    @classmethod
    def names_of_elements(
        cls, defaults: Mapping[str, Any], settings: Mapping[str, Any], device: torch.device
    ) -> frozenset[str]:
        """The names in the state of what has a number for each element, for a group with these settings."""
        raise NotImplementedError


def load_uncast(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> dict[Tensor, dict[str, Any]]:
    """Load the settings of ``state_dict`` into ``optimizer``, which then has no state.

    Returns:
        The state of each parameter as it stands there: torch's own method turns it into the parameter's dtype.

    Raises:
        ValueError: If it has other groups.
    """
    Optimizer.load_state_dict(optimizer, {**state_dict, "state": {}})
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    places = dict(zip(numbers, parameters, strict=True))
    return {places[number]: dict(state) for number, state in state_dict["state"].items() if number in places}


def is_piece_optimizer(optimizer_class: type[Optimizer]) -> bool:
    """Whether ``optimizer_class`` is one of popdist's own that may be given pieces; a subclass of it may not."""
    return issubclass(optimizer_class, PieceOptimizer) and optimizer_class.__module__ in _OWN


_OWN: Final = frozenset({"popdist.optim.lamb", "popdist.optim.lars", "popdist.optim.low_precision"})


def check_number(what: str, value: object, *, minimum: float = 0.0, below: float = float("inf")) -> None:
    """Check that ``value``, which the caller named ``what``, is a number from ``minimum`` to under ``below``.

    Raises:
        OptimizerError: If it is not.
    """
    is_number = isinstance(value, int | float | Tensor) and not isinstance(value, bool)
    if not is_number or not minimum <= as_float(value) < below:
        limit = f" and below {below:g}" if below < float("inf") else ""
        raise OptimizerError(f"{what}={value!r} must be a number of at least {minimum:g}{limit}")
