"""Operations that run functions of the program: loops, conditions, custom operations, calls on the host."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from torch import Tensor

from poptorch.errors import Error, check_arguments

Body = Callable[..., Any]  # a function of tensors that returns one, or several in a list or tuple


def for_loop(count: int, body: Body, inputs: list[Tensor]) -> list[Tensor]:
    """``body`` called ``count`` times, on its own results from the second time on; ``inputs`` for a count of 0.

    Args:
        count: How often, from 0.
        body: Takes as many tensors as ``inputs``, and returns as many of the same shapes and dtypes.
        inputs: What the first call is given; copies of them, so that ``body`` may write into them.

    Raises:
        ValueError: If ``inputs`` is no list of tensors, or ``count`` no whole number from 0.
    """
    check_arguments("for_loop", "a function", body=body)
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
    then_inps: list[Tensor],
    else_body: Body,
    else_inps: list[Tensor],
) -> list[Tensor]:
    """``then_body(*then_inps)`` where ``condition`` is true, else ``else_body(*else_inps)``, always as a list.

    Args:
        condition: A tensor of one element.
        then_body: Returns tensors.
        then_inps: Its arguments.
        else_body: Returns as many tensors, of the same shapes and dtypes; only one of the two is called.
        else_inps: Its arguments.

    Raises:
        ValueError: If ``condition`` is no tensor of one element, or inputs are no lists of tensors.
    """
    given: object = condition
    if not isinstance(given, Tensor) or given.numel() != 1:
        raise ValueError(f"poptorch.cond: condition must be a tensor of one element, and is {given!r}")
    check_arguments("cond", "a function", then_body=then_body, else_body=else_body)
    _check_tensors("cond", "then_inps", then_inps)
    _check_tensors("cond", "else_inps", else_inps)
    if bool(condition):
        return _as_list("cond", "then_body", then_body(*then_inps))
    return _as_list("cond", "else_body", else_body(*else_inps))


def nop(tensor: Tensor) -> Tensor:
    """``tensor``. No effect: there is no graph in which it would be a boundary."""
    return tensor


def recomputationCheckpoint(*tensors: Tensor) -> Any:
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
    """Return what the function ``argument`` of poptorch's ``name`` returned, as a list of tensors."""
    values = list(result) if isinstance(result, list | tuple) else [result]
    tensors = [value for value in values if isinstance(value, Tensor)]
    if len(tensors) < len(values):
        kinds = [type(value).__name__ for value in values]
        raise Error(f"poptorch.{name}: {argument} must return tensors, and returned {kinds}")
    return tensors


def _kinds(tensors: Sequence[Tensor]) -> list[tuple[tuple[int, ...], str]]:
    return [(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors]


Implementation = Callable[..., Any]
"""Takes the operation's inputs and its attributes by name, and returns its outputs: one tensor, or several."""

_implementations: Final[dict[tuple[str, str], Implementation]] = {}


def registerCustomOp(name: str, domain: str) -> Callable[[Implementation], Implementation]:
    """Decorate the function that ``custom_op`` calls for operation ``name`` of ``domain``.

    It is given the inputs, and the attributes by name; torch differentiates what it does. A later function takes
    the place of an earlier one.
    """
    check_arguments("registerCustomOp", "a text", name=name, domain=domain)

    def register(implementation: Implementation) -> Implementation:
        _implementations[domain, name] = implementation
        return implementation

    return register


def custom_op(
    inputs: Sequence[Tensor],
    name: str,
    domain: str,
    domain_version: int,
    example_outputs: Sequence[Tensor],
    attributes: Mapping[str, Any] | None = None,
) -> list[Tensor]:
    """The outputs of an operation that the program has registered, always as a list.

    Args:
        inputs: Its inputs.
        name: What it is called, as for ``registerCustomOp``.
        domain: Whose it is, as for ``registerCustomOp``.
        domain_version: Not used.
        example_outputs: As many tensors, and of the shapes and dtypes, as the operation gives.
        attributes: What it is given by name.

    Raises:
        ValueError: If ``inputs`` or ``example_outputs`` are no list or tuple of tensors.
    """
    del domain_version
    check_arguments("custom_op", "a text", name=name, domain=domain)
    for argument, given in (("inputs", inputs), ("example_outputs", example_outputs)):
        _check_tensors("custom_op", argument, list(given) if isinstance(given, tuple) else given)
    implementation = _implementations.get((domain, name))
    if implementation is None:
        known = ", ".join(".".join(key) for key in sorted(_implementations)) or "none"
        raise Error(
            f"there is no implementation of the custom op {domain}.{name}: one that was compiled for an IPU "
            f'cannot run here. Give one with @poptorch.registerCustomOp("{name}", "{domain}"); registered: {known}'
        )
    outputs = _as_list("custom_op", f"{domain}.{name}", implementation(*inputs, **(attributes or {})))
    found, wanted = _kinds(outputs), _kinds(example_outputs)
    if found != wanted:
        raise Error(f"custom op {domain}.{name} must give {wanted}, as its example outputs, and gave {found}")
    return outputs


class CPU:
    """A function that a model calls on the host, which is where models run that have no GPU."""

    def __init__(self, layer_to_call: Callable[..., Any], ID: str) -> None:
        if not callable(layer_to_call):
            raise AssertionError(f"poptorch.CPU takes what can be called, and was given {layer_to_call!r}")
        self._layer_to_call = layer_to_call
        self._ID = ID
        self._last_call: Callable[[], Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102 - the docstring is the function's
        self._last_call = partial(self._layer_to_call, *args, **kwargs)
        return self._last_call()

    def execute(self) -> Any:
        """Call the function again with the arguments of its last call."""
        if self._last_call is None:
            raise Error(f"poptorch.CPU {self._ID!r} has not been called: there is nothing to execute again")
        return self._last_call()

    def registerPersistentData(self) -> None:
        """Keep the function's data. No effect: they stay where they are."""
