"""The gradients of a model's parameters as rows of numbers that can be added.

One row for each device and dtype in which gradients are added. A parameter without a gradient stands in its row as
zeros, and a mask remembers which had one.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from popdist.errors import CollectiveError
from popdist.training.rows import Rows, cut, join, num_reals, wide_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Parameters whose gradients lie in one row.

    Attributes:
        device: Where they are.
        dtype: In which their gradients are added.
        members: Positions among all parameters, with the parameters.
    """

    device: torch.device
    dtype: torch.dtype
    members: list[tuple[int, Parameter]]

    @property
    def size(self) -> int:
        """Numbers in the row."""
        return sum(num_reals(parameter) for _, parameter in self.members)


ParameterKind = tuple[int, bool, torch.device, torch.dtype]
"""What tells whether a parameter's place in the rows is still right: identity, whether it is trained, and kind."""


class FlatGradients:
    """Moves gradients from ``.grad`` of parameters to rows and back.

    Args:
        named_parameters: Those of one model, in the same order on all instances; frozen ones are left out.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, Parameter]]) -> None:
        self.names: list[str] = []
        groups: dict[tuple[torch.device, torch.dtype], _Group] = {}
        for name, parameter in named_parameters:
            if parameter.requires_grad:
                new = _Group(device=parameter.device, dtype=wide_dtype(parameter.dtype), members=[])
                groups.setdefault((new.device, new.dtype), new).members.append((len(self.names), parameter))
                self.names.append(name)
        self._groups = list(groups.values())

    def __str__(self) -> str:
        """What must be the same on all instances, in words."""
        return self._text

    @cached_property
    def _text(self) -> str:
        rows = (
            f"{group.size} {str(group.dtype).removeprefix('torch.')} on {group.device.type}"
            for group in self._groups
        )
        digest = hashlib.blake2b("\n".join(self.names).encode(), digest_size=4).hexdigest()
        return f"{len(self.names)} parameters, names {digest}: {', '.join(rows)}"

    def used(self) -> int:
        """Which parameters have a gradient now: bit i stands for ``names[i]``."""
        return sum(
            1 << i for group in self._groups for i, parameter in group.members if parameter.grad is not None
        )

    def not_finite(self) -> int | None:
        """The first parameter whose gradient holds NaN or infinity; None when there is none."""
        found = [
            i
            for group in self._groups
            for i, parameter in group.members
            if parameter.grad is not None and not parameter.grad.isfinite().all()
        ]
        return min(found, default=None)

    def clear(self) -> None:
        """Set every ``.grad`` to None."""
        for group in self._groups:
            for _, parameter in group.members:
                parameter.grad = None

    def take(self) -> Rows:
        """A copy of all gradients; zeros for a parameter without one.

        Raises:
            CollectiveError: If a gradient is sparse.
        """
        return [join((self._gradient(i, p) for i, p in group.members), group.dtype) for group in self._groups]

    def zeros(self) -> Rows:
        """What a micro batch without samples contributes."""
        return [torch.zeros(group.size, dtype=group.dtype, device=group.device) for group in self._groups]

    def give(self, rows: Rows, used: int) -> None:
        """Set the ``.grad`` of each parameter in ``used`` to its part of ``rows``, and all others to None.

        The gradients may share memory with ``rows``.
        """
        for group, row in zip(self._groups, rows, strict=True):
            parts = cut(row, [parameter for _, parameter in group.members])
            for (index, parameter), gradient in zip(group.members, parts, strict=True):
                parameter.grad = gradient if used >> index & 1 else None

    def _gradient(self, index: int, parameter: Parameter) -> Tensor:
        if parameter.grad is None:
            return torch.zeros(num_reals(parameter), device=parameter.device)
        if parameter.grad.layout != torch.strided:
            raise CollectiveError(
                f"the gradient of {self.names[index]} is sparse, and replicas add dense ones: make it with "
                "sparse=False"
            )
        return parameter.grad.detach()


class ModelGradients:
    """The gradients of the parameters that a model trains now.

    Args:
        module: The model; its parameters may change from step to step.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._kinds: list[ParameterKind] = []
        self._found = FlatGradients(())
        self.device = torch.device("cpu")
        """Where the first parameter was when they were last cleared or found; the CPU without one."""

    def clear(self) -> None:
        """Set every ``.grad`` to None."""
        parameters = _parameters_of(self._module)
        for it in parameters:
            if it.requires_grad:
                it.grad = None
        if parameters:
            self.device = parameters[0].device

    def find(self) -> FlatGradients:
        """Those of this moment; made anew only when the parameters have changed."""
        kinds = [(id(it), it.requires_grad, it.device, it.dtype) for it in _parameters_of(self._module)]
        if kinds != self._kinds:
            self._found, self._kinds = FlatGradients(self._module.named_parameters()), kinds
            self.device = kinds[0][2] if kinds else torch.device("cpu")
        return self._found


def _parameters_of(module: nn.Module) -> list[Parameter]:
    """The parameters in ``module``, in a fixed order; a tied one may come twice.

    Several times faster than ``module.parameters()``, because this is asked in every step.
    """
    found: list[Parameter | None] = []
    seen, waiting = {module}, [module]
    while waiting:
        current = waiting.pop()
        found += current._parameters.values()  # noqa: SLF001 - what parameters() reads
        for child in current._modules.values():  # noqa: SLF001 - as above
            if child is not None and child not in seen:
                seen.add(child)
                waiting.append(child)
    return [it for it in found if it is not None]
