"""Operations that run functions on tensors, and those that pass tensors on as they are."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from poptorch.errors import Error

Body = Callable[..., Any]
"""A function of tensors that returns one, or several in a list or tuple."""


def for_loop(count: int, body: Body, inputs: list[Tensor]) -> list[Tensor]:
    """``body`` called ``count`` times, on its own results from the second time on.

    Args:
        count: How often, from 0.
        body: Takes as many tensors as ``inputs``, and returns as many of the same shapes and dtypes.
        inputs: What the first call is given; copies of them, so that ``body`` may write into them.

    Returns:
        What the last call returned; ``inputs`` for a count of 0.

    Raises:
        ValueError: If ``inputs`` is no list of tensors, or ``count`` no whole number from 0.
        Error: If ``body`` returns other tensors than it was given.
    """
    _check_tensors("for_loop", "inputs", inputs)
    given: object = count
    if not isinstance(given, int) or isinstance(given, bool) or given < 0:
        raise ValueError(f"poptorch.for_loop: count must be a whole number from 0, and is {count!r}")
    values = [tensor.clone() for tensor in inputs]
    for _ in range(count):
        values = _as_list("for_loop", "body", body(*values))
        found, wanted = _kinds(values), _kinds(inputs)
        if found != wanted:
            raise Error(f"poptorch.for_loop: body must return what it is given, {wanted}, and returned {found}")
    return values


def cond(
    condition: Tensor,
    then_body: Body,
    then_inputs: list[Tensor],
    else_body: Body,
    else_inputs: list[Tensor],
) -> list[Tensor]:
    """``then_body(*then_inputs)`` where ``condition`` is true, else ``else_body(*else_inputs)``.

    Args:
        condition: A tensor of one element.
        then_body: Returns tensors.
        then_inputs: Its arguments.
        else_body: Returns as many tensors, of the same shapes and dtypes; only one of the two is called.
        else_inputs: Its arguments.

    Returns:
        The tensors that were returned, also one alone.

    Raises:
        ValueError: If ``condition`` is no tensor of one element, or inputs are no lists of tensors.
        Error: If what was called returned something else.
    """
    given: object = condition
    if not isinstance(given, Tensor) or given.numel() != 1:
        raise ValueError(f"poptorch.cond: condition must be a tensor of one element, and is {given!r}")
    _check_tensors("cond", "then_inputs", then_inputs)
    _check_tensors("cond", "else_inputs", else_inputs)
    if bool(condition):
        return _as_list("cond", "then_body", then_body(*then_inputs))
    return _as_list("cond", "else_body", else_body(*else_inputs))


def nop(tensor: Tensor) -> Tensor:
    """``tensor``. No effect: there is no graph in which it would be a boundary."""
    return tensor


def recomputationCheckpoint(*tensors: Tensor) -> Any:  # noqa: ANN401 - one tensor, or a tuple
    """``tensors``. No effect: torch keeps what lies between; ``torch.utils.checkpoint`` of a module does not."""
    return tensors[0] if len(tensors) == 1 else tensors


def _check_tensors(name: str, argument: str, value: object) -> None:
    if not isinstance(value, list):
        raise ValueError(f"poptorch.{name}: {argument} must be a list of tensors, and is {type(value).__name__}")
    for position, one in enumerate(value):
        if not isinstance(one, Tensor):
            raise ValueError(
                f"poptorch.{name}: {argument} must be a list of tensors, and its element {position} is "
                f"{type(one).__name__}"
            )


def _as_list(name: str, argument: str, result: object) -> list[Tensor]:
    values = list(result) if isinstance(result, list | tuple) else [result]
    tensors = [value for value in values if isinstance(value, Tensor)]
    if len(tensors) < len(values):
        kinds = [type(value).__name__ for value in values]
        raise Error(f"poptorch.{name}: {argument} must return tensors, and returned {kinds}")
    return tensors


def _kinds(tensors: Sequence[Tensor]) -> list[tuple[tuple[int, ...], str]]:
    return [(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors]
