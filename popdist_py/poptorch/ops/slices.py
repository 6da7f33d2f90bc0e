"""Slices whose place is known only when the model runs."""

from torch import Tensor

from poptorch.errors import Error


def dynamic_slice(tensor: Tensor, dim: int, start: Tensor | int, size: int, step: int = 1) -> Tensor:
    """Elements ``start``, ``start + step`` and so on of dimension ``dim``, up to ``start + size``.

    Args:
        tensor: What is sliced.
        dim: Which dimension; negative ones count from the last.
        start: The first element: a whole number, or a tensor that holds one.
        size: How many elements the slice spans, from 1.
        step: How far they lie apart, from 1. ``size`` is a multiple of it.

    Returns:
        A view of ``tensor`` with ``size / step`` elements in dimension ``dim``.

    Raises:
        Error: If the slice does not lie in ``tensor``, or ``start`` is no whole number.
    """
    first = _first("dynamic_slice", tensor, dim, start, size)
    if step < 1 or size % step:
        raise Error(f"poptorch.dynamic_slice: step {step} must divide size {size}")
    view = tensor.narrow(dim, first, size)
    return view if step == 1 else view.unfold(dim, 1, step).squeeze(-1)


def dynamic_update(input: Tensor, src: Tensor, dim: int, start: Tensor | int, size: int) -> Tensor:  # noqa: A002
    """A copy of ``input`` with ``src`` in place of the ``size`` elements from ``start`` on in dimension ``dim``.

    Args:
        input: What is copied.
        src: Has ``size`` elements in dimension ``dim``, otherwise the shape of ``input``, and its dtype.
        dim: Which dimension; negative ones count from the last.
        start: The first element that is replaced: a whole number, or a tensor that holds one.
        size: How many are replaced, from 1.

    Returns:
        A new tensor like ``input``.

    Raises:
        Error: If the elements do not lie in ``input``, or ``src`` does not fit.
    """
    first = _first("dynamic_update", input, dim, start, size)
    wanted = list(input.shape)
    wanted[dim] = size
    if list(src.shape) != wanted or src.dtype != input.dtype:
        raise Error(
            f"poptorch.dynamic_update: src must be of shape {wanted} and {input.dtype}, and is of shape "
            f"{list(src.shape)} and {src.dtype}"
        )
    return input.slice_scatter(src, dim, first, first + size)


def _first(name: str, tensor: Tensor, dim: int, start: Tensor | int, size: int) -> int:
    """The whole number that ``start`` holds.

    Raises:
        Error: If it holds none, or ``size`` elements from there on do not lie in ``tensor``.
    """
    is_whole = start.numel() == 1 and not start.is_floating_point() if isinstance(start, Tensor) else True
    if not is_whole:
        raise Error(f"poptorch.{name}: start must be one whole number, and is {start}")
    first = int(start)
    if not -tensor.dim() <= dim < tensor.dim() or size < 1 or not 0 <= first <= tensor.shape[dim] - size:
        raise Error(
            f"poptorch.{name}: {size} elements from {first} on of dimension {dim} do not lie in a tensor of shape "
            f"{list(tensor.shape)}"
        )
    return first
