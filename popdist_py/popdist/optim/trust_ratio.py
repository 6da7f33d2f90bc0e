"""The step that LAMB and LARS have in common: the update of a whole parameter is scaled by norms over all of it.

A step has two parts. The first one prepares the tensor whose norm is needed beside that of the weights; the second
one updates the weights, with both norms. Between them the sums over pieces of parameters are added up over the
instances, once for all of them.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from popdist.errors import OptimizerError
from popdist.optim.pieces import PieceOptimizer, flat_in_order_of, node_sums, square_sums

Settings: TypeAlias = Mapping[str, Any]
"""A parameter group."""

_CACHED_ELEMENTS: Final = 1 << 16
"""On the CPU so many elements of small tensors are updated at once, which fit its caches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedUpdate:
    """Parameters with, for each, the tensor whose norm is compared with its own: ``measured``."""

    group: Settings
    parameters: list[Tensor]
    measured: list[Tensor]


class TrustRatioOptimizer(PieceOptimizer):
    """An optimizer whose updates are scaled by norms of whole parameters."""

    exchanges_norms = True

    element_names: frozenset[str]
    """The names of state with a number for each element."""

    @classmethod
    def names_of_elements(
        cls,
        defaults: Mapping[str, Any],  # noqa: ARG003 - equal for all settings
        settings: Mapping[str, Any],  # noqa: ARG003
        device: torch.device,  # noqa: ARG003
    ) -> frozenset[str]:
        """The same names for any settings."""
        return cls.element_names

    def prepare(self, group: Settings, parameters: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
        """Make the tensors whose norms are needed; gradients are negated already if the group maximizes."""
        raise NotImplementedError

    def finish_update(self, prepared: PreparedUpdate, norms: Sequence[tuple[float, float]] | None) -> None:
        """Update the weights; ``norms`` are those of weights and measured tensors, None without a trust ratio."""
        raise NotImplementedError

    def update(self) -> None:
        """Update the parameters that have a gradient, first those whose norms need an exchange."""
        work = [(group, _with_gradient(group["params"])) for group in self.param_groups]
        if self._whole_sums is not None:
            self._step_on_pieces(work, self._whole_sums)
        for group, parameters in work:
            for some in _batches([it for it in parameters if not self._is_cut(group, it)], group["foreach"]):
                prepared = self._begin(group, some)
                self.finish_update(prepared, _norms(prepared) if group["trust_ratio"] else None)

    def _step_on_pieces(
        self,
        work: Sequence[tuple[Settings, list[Tensor]]],
        whole_sums: Callable[..., Mapping[Tensor, Sequence[float]]],
    ) -> None:
        """Update the parameters of which this instance has only a piece."""
        prepared_updates = []
        for group, parameters in work:
            if cut := [it for it in parameters if self._is_cut(group, it)]:
                prepared_updates.append(self._begin(group, cut))
        pieces = {
            parameter: [node_sums(flat_in_order_of(it, parameter), self._pieces[parameter]) for it in both]
            for prepared in prepared_updates
            for parameter, *both in zip(prepared.parameters, prepared.parameters, prepared.measured, strict=True)
        }
        whole = whole_sums(pieces)
        for prepared in prepared_updates:
            self.finish_update(prepared, [_roots(*whole[parameter]) for parameter in prepared.parameters])

    def _is_cut(self, group: Settings, parameter: Tensor) -> bool:
        """Whether the norms of this parameter need an exchange with other instances."""
        piece = self._pieces.get(parameter)
        return piece is not None and not piece.is_whole and bool(group["trust_ratio"])

    def _begin(self, group: Settings, parameters: list[Tensor]) -> PreparedUpdate:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if group["maximize"]:
            gradients = list(torch._foreach_neg(gradients))  # noqa: SLF001 - as torch's own optimizers call it
        with_values = self.prepare(group, parameters, gradients)
        return PreparedUpdate(group=group, parameters=parameters, measured=with_values)


def _with_gradient(parameters: Sequence[Tensor]) -> list[Tensor]:
    found = [parameter for parameter in parameters if parameter.grad is not None]
    for parameter in found:
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise OptimizerError(
                f"the gradient of a parameter of shape {tuple(parameter.shape)} is sparse: make it with "
                "sparse=False"
            )
    return found


def _batches(parameters: Sequence[Tensor], foreach: bool | None) -> Iterator[list[Tensor]]:  # noqa: FBT001 - torch's setting
    """Group the parameters that are updated at once, which changes no bit.

    On the CPU torch's foreach functions are loops over the tensors, so few that stay in the cache are best.
    """
    is_on_cpu = any(parameter.device.type == "cpu" for parameter in parameters)
    most = 0 if foreach is False else _CACHED_ELEMENTS if is_on_cpu else math.inf
    batch: list[Tensor] = []
    num_elements = 0
    for parameter in parameters:
        if batch and num_elements + parameter.numel() > most:
            yield batch
            batch, num_elements = [], 0
        batch.append(parameter)
        num_elements += parameter.numel()
    if batch:
        yield batch


def _norms(prepared: PreparedUpdate) -> list[tuple[float, float]]:
    weights = [flat_in_order_of(it, it) for it in prepared.parameters]
    measured = [flat_in_order_of(it, own) for it, own in zip(prepared.measured, prepared.parameters, strict=True)]
    sums = square_sums([*weights, *measured])
    return [_roots(*both) for both in zip(sums[: len(weights)], sums[len(weights) :], strict=True)]


def _roots(of_weights: float, of_measured: float) -> tuple[float, float]:
    return math.sqrt(of_weights), math.sqrt(of_measured)
