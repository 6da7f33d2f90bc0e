"""Operations that programs bring along: by name, with an implementation for the CPU, and on the host."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from torch import Tensor

from poptorch.errors import Error

Implementation = Callable[..., Any]
"""Takes the operation's inputs and its attributes by name, and returns its outputs: one tensor, or several."""

_implementations: Final[dict[tuple[str, str], Implementation]] = {}


def registerCustomOp(name: str, domain: str) -> Callable[[Implementation], Implementation]:
    """Decorate the function that ``custom_op`` calls for operation ``name`` of ``domain``.

    It is given the inputs, and the attributes by name; torch differentiates what it does. A later function takes
    the place of an earlier one.
    """

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
    """The outputs of an operation that the program has registered.

    Args:
        inputs: Its inputs.
        name: What it is called, as for ``registerCustomOp``.
        domain: Whose it is, as for ``registerCustomOp``.
        domain_version: Not used.
        example_outputs: As many tensors, and of the shapes and dtypes, as the operation gives.
        attributes: What it is given by name.

    Returns:
        Its outputs, also one alone.

    Raises:
        Error: If nothing is registered by that name, or gives other tensors than the examples.
    """
    del domain_version
    implementation = _implementations.get((domain, name))
    if implementation is None:
        known = ", ".join(".".join(key) for key in sorted(_implementations)) or "none"
        raise Error(
            f"there is no implementation of the custom op {domain}.{name}: one that was compiled for an IPU "
            f'cannot run here. Give one with @poptorch.registerCustomOp("{name}", "{domain}"); registered: {known}'
        )
    result = implementation(*inputs, **(attributes or {}))
    outputs = list(result) if isinstance(result, list | tuple) else [result]
    found = [(tuple(one.shape), one.dtype) if isinstance(one, Tensor) else type(one) for one in outputs]
    wanted = [(tuple(one.shape), one.dtype) for one in example_outputs]
    if found != wanted:
        raise Error(f"custom op {domain}.{name} must give {wanted}, as its example outputs, and gave {found}")
    return outputs


class CPU:
    """A function that a model calls on the host, which is where models run that have no GPU.

    Args:
        layer_to_call: What is called; its result is the call's.
        ID: What it is called.
    """

    def __init__(self, layer_to_call: Callable[..., Any], ID: str) -> None:  # noqa: N803 - PopTorch's name
        if not callable(layer_to_call):
            raise AssertionError(f"poptorch.CPU takes what can be called, and was given {layer_to_call!r}")
        self._layer_to_call = layer_to_call
        self._ID = ID

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401, D102 - as the function has it
        return self._layer_to_call(*args, **kwargs)
