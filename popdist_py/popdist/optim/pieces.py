"""popdist's optimizers on pieces of parameters, and norms of whole parameters added in one fixed order.

The squares of a parameter's elements, in float64 and in the order of memory, are added in blocks of 128: the upper
half to the lower half, until one number is left. The blocks are added in the tree of `popdist.ground.tree`. So the
bits do not depend on threads, and a piece that begins at a multiple of 128 elements is a few nodes of the tree.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from popdist.errors import OptimizerError, as_float
from popdist.ground import extension as compiled
from popdist.ground.local_tensors import is_distributed
from popdist.ground.tree import aligned_nodes, span

BLOCK: Final = 128
"""Number of elements of a block; shards of parameters are cut at multiples of this number."""

find_extension: Final = compiled.find
"""The function that returns the part of popdist written in C; None if it is not built."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A piece of a whole parameter: consecutive elements, in the order of memory."""

    position: int  # index of the whole parameter, counted over the parameter groups
    elements: range  # begins at a multiple of 128
    num_elements: int  # number of elements of the whole parameter

    @property
    def is_whole(self) -> bool:
        """Whether the piece has all elements of the parameter."""
        return len(self.elements) == self.num_elements


NodeSums: TypeAlias = Mapping[Tensor, Sequence[Sequence[float]]]
"""Several sums over each piece of a parameter; each sum has one number for each tree node over blocks."""

WholeSums: TypeAlias = Callable[[NodeSums], Mapping[Tensor, Sequence[float]]]
"""A function from sums over pieces to sums over whole parameters; it exchanges sums between instances."""


class PieceOptimizer(Optimizer):
    """An optimizer that can update pieces (some consecutive elements) of parameters, not only whole ones."""

    exchanges_norms: bool = False
    """Whether a step needs the norms of whole parameters, which instances must exchange."""

    _pieces: Mapping[Tensor, Piece] = {}
    _whole_sums: WholeSums | None = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as torch does. Raises OptimizerError if a parameter is a DTensor."""
        super().add_param_group(param_group)
        try:
            refuse_distributed(type(self).__name__, self.param_groups[-1]["params"])
        except OptimizerError:
            del self.param_groups[-1]
            raise

    def place(self, pieces: Mapping[Tensor, Piece], whole_sums: WholeSums | None) -> None:
        """Record the place of each piece in its whole parameter, and ``whole_sums``, which each step calls once: a
        function that adds the pieces' sums of squares over all instances.
        """
        self._pieces = pieces
        self._whole_sums = whole_sums

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient.

        Args:
            closure: A function that computes the loss and the gradients anew.

        Returns:
            The result of ``closure``, or None.

        Raises:
            OptimizerError: If a gradient is sparse, or for the reasons that the class names.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.update()
        return loss

    def update(self) -> None:
        """Update the parameters that have a gradient; a subclass implements this method."""
        raise NotImplementedError

    @classmethod
    def names_of_elements(
        cls, defaults: Mapping[str, Any], settings: Mapping[str, Any], device: torch.device
    ) -> frozenset[str]:
        """Return the names of the state tensors that have one number for each element of a parameter."""
        raise NotImplementedError


def refuse_distributed(name: str, parameters: Iterable[Tensor]) -> None:
    """Raise OptimizerError if a parameter is a DTensor, whose local elements are not consecutive."""
    for parameter in parameters:
        if is_distributed(parameter):
            raise OptimizerError(
                f"{name} of a DTensor of shape {tuple(parameter.shape)}: it takes whole parameters. Step with an "
                "optimizer of torch; its states are cut as the parameters are, by fully_shard too"
            )


def load_uncast(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> dict[Tensor, dict[str, Any]]:
    """Load the settings in ``state_dict``, and return the saved state of each parameter, in its saved dtypes."""
    Optimizer.load_state_dict(optimizer, {**state_dict, "state": {}})
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    places = dict(zip(numbers, parameters, strict=True))
    return {places[number]: dict(state) for number, state in state_dict["state"].items() if number in places}


def gradient_of(parameter: Tensor) -> Tensor:
    """Return the gradient of ``parameter``; raise OptimizerError if the gradient is sparse or missing."""
    gradient = parameter.grad
    if gradient is None or gradient.layout != torch.strided:
        raise OptimizerError(
            f"the gradient of a parameter of shape {tuple(parameter.shape)} is sparse: make it with sparse=False"
        )
    return gradient


def is_piece_optimizer(optimizer_class: type[Optimizer]) -> bool:
    """Whether ``optimizer_class`` is one of popdist's own optimizers that can update pieces of parameters."""
    return issubclass(optimizer_class, PieceOptimizer) and optimizer_class.__module__ in _OWN


_OWN: Final = frozenset({"popdist.optim.trust_ratio", "popdist.optim.low_precision"})


def check_number(what: str, value: object, *, minimum: float = 0.0, below: float = float("inf")) -> None:
    """Raise OptimizerError unless ``minimum <= value < below`` for the argument with the name ``what``."""
    is_number = isinstance(value, int | float | Tensor) and not isinstance(value, bool)
    if not is_number or not minimum <= as_float(value) < below:
        limit = f" and below {below:g}" if below < float("inf") else ""
        raise OptimizerError(f"{what}={value!r} must be a number of at least {minimum:g}{limit}")


def in_order_of(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return ``tensor`` with its elements in the memory order of ``parameter``; a copy if the order differs."""
    if tensor.is_contiguous() and parameter.is_contiguous():
        return tensor
    stride = torch.empty_like(parameter, device="meta", requires_grad=False).stride()
    if tensor.stride() == stride:
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def flat_in_order_of(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return the elements of ``tensor`` as a flat tensor, in the memory order of ``parameter``."""
    return flat(in_order_of(tensor, parameter))


def flat(dense: Tensor) -> Tensor:
    """Return a flat view of the tensor ``dense``, which has no gaps, in the order of memory."""
    return dense.as_strided((dense.numel(),), (1,))


def square_sums(flats: Sequence[Tensor]) -> list[float]:
    """Return the sum of squares of each tensor's elements; for a complex element, of its absolute value."""
    arithmetic = find_extension()
    sums = [_square_sum(row, arithmetic) for row in flats]
    on_devices = [number for number in sums if isinstance(number, Tensor)]
    device_sums = iter(torch.stack(on_devices).tolist() if on_devices else ())
    return [next(device_sums) if isinstance(number, Tensor) else number for number in sums]


def node_sums(elements: Tensor, piece: Piece) -> list[float]:
    """Return the sums of squares of ``elements``: one for each node of the addition tree within ``piece``."""
    start = piece.elements.start
    return square_sums([elements[run.start - start : run.stop - start] for run in runs_of_nodes(piece)])


def runs_of_nodes(piece: Piece) -> list[range]:
    """Return, for each node (partial sum) of the addition tree within ``piece``, the range of its elements."""
    num_blocks = math.ceil(piece.num_elements / BLOCK)
    first, last = piece.elements.start // BLOCK, math.ceil(piece.elements.stop / BLOCK)
    spans = [span(node, num_blocks) for node in aligned_nodes(first, last, num_blocks)]
    return [range(it.start * BLOCK, min(it.stop * BLOCK, piece.elements.stop)) for it in spans]


def _square_sum(row: Tensor, arithmetic: Any) -> float | Tensor:
    if not row.numel():
        return 0.0
    if arithmetic is None or row.device.type != "cpu" or row.is_complex():
        return _sum_by_torch(row)
    if row.dtype not in (torch.float32, torch.float64):
        row = row.to(torch.float32)  # half dtypes fit float32 exactly
    total: float = arithmetic.square_sum(row.data_ptr(), row.numel(), row.dtype == torch.float64)
    return total


def _sum_by_torch(row: Tensor) -> Tensor:
    if row.is_complex():
        squares = torch.view_as_real(row).to(torch.float64).square().sum(1)
    else:
        squares = row.to(torch.float64).square()
    sums = torch.nn.functional.pad(squares, (0, -len(squares) % BLOCK)).view(-1, BLOCK)
    while sums.shape[1] > 1:
        width = sums.shape[1] // 2
        sums = sums[:, :width] + sums[:, width:]
    level = sums.view(-1)
    while len(level) > 1:
        pairs = level[: len(level) // 2 * 2].view(-1, 2)
        level = torch.cat([pairs[:, 0] + pairs[:, 1], level[2 * len(pairs) :]])
    return level[0]
