"""Which instance updates which elements of a parameter: who needs which part of its gradient."""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor
from torch.nn import Parameter

from popdist.gradients.shards import Ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class _Owned:
    """A parameter of a sharded optimizer.

    Attributes:
        parameter: It, not kept alive by this.
        ranges: For each instance the elements that it updates.
        optimizer: Whose it is, not kept alive by this.
    """

    parameter: weakref.ref[Parameter]
    ranges: Ranges
    optimizer: weakref.ref[object]


_owned: dict[int, _Owned] = {}
"""By identity of the parameter."""


def remember(dealt: Iterable[tuple[Parameter, Ranges]], optimizer: object) -> None:
    """From now on, and as long as it lives, ``optimizer`` updates these parameters so."""
    for parameter, ranges in dealt:
        key = id(parameter)
        reference = weakref.ref(parameter, lambda _, key=key: _owned.pop(key, None))  # type: ignore[misc] # mypy takes no defaults here
        _owned[key] = _Owned(parameter=reference, ranges=ranges, optimizer=weakref.ref(optimizer))


def ranges_of(parameter: Tensor) -> Ranges | None:
    """The elements that each instance updates; None for a parameter of no sharded optimizer."""
    known = _owned.get(id(parameter))
    if known is None or known.parameter() is not parameter or known.optimizer() is None:
        return None
    return known.ranges
