"""The gradients that are there when a step begins, and which no optimizer has used.

A step begins without gradients. Used ones are dropped. Others are those that a program adds up on purpose or has
forgotten; only it knows which, so it must say: drop them (``zero_grad()``) or add to them (``add=True``).

Three kinds are dropped all the same. Zeros, which ``zero_grad(set_to_none=False)`` leaves. Those of a parameter
that no optimizer has ever stepped on, when one has used the others of the model: they are of no use. And all, when
one in the job holds NaN or infinity: then a GradScaler has left out the step, which it does not tell.
"""

import hashlib
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from popdist.errors import GradientError, name_instances
from popdist.gradients.gradient_flags import is_reduced, mark_reduced, mark_used, stepped_parameters
from popdist.gradients.memory import ModelGradients
from popdist.gradients.partial_gradients import PartialGradient

_models: Final[weakref.WeakSet[ModelGradients]] = weakref.WeakSet()
"""The gradients of all models that have had a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """A gradient that nothing has used: a copy, in memory that no step writes over, and its parameter."""

    position: int
    parameter: Parameter
    gradient: Tensor
    is_reduced: bool


class OldGradients:
    """The gradients that a model has when its step begins: removed, and those that matter are ``kept``."""

    __slots__ = ("_gradients", "_is_decided", "_module", "kept")

    def __init__(self, module: nn.Module, gradients: ModelGradients) -> None:
        self._module = module
        self._gradients = gradients
        self.kept: Sequence[_Kept] = ()
        self._is_decided = False
        _models.add(gradients)
        unused, are_some_used = gradients.remove()
        if unused:
            self._keep(unused, stepped_parameters() if are_some_used else None)

    def _keep(self, unused: Mapping[int, Tensor], held: set[int] | None) -> None:
        found = []
        for position, (_, parameter) in enumerate(self._module.named_parameters()):
            gradient = unused.get(id(parameter))
            if gradient is None or (held is not None and id(parameter) not in held):
                continue
            # of a partial gradient other instances have other parts
            if _is_zero(gradient) and not isinstance(gradient, PartialGradient):
                continue
            kept = _Kept(
                position=position,
                parameter=parameter,
                gradient=_copy(gradient),
                is_reduced=is_reduced(gradient),
            )
            found.append(kept)
        self.kept = found

    def number(self, *, add: bool) -> int:
        """What this instance says of them in a header; 0 if there are none.

        It is a digest of which parameters they belong to, if the step adds to them. Else it is the place of the
        first of them, from 1, and negative where a model has one that is not finite.
        """
        if not self.kept or self._is_decided:
            return 0
        if add:
            text = repr([kept.position for kept in self.kept]).encode()
            return 1 + int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")
        place = next((kept.position + 1 for kept in self.kept if not _is_zero(kept.gradient)), 0)
        return place if self._are_all_finite() else -place

    def _are_all_finite(self) -> bool:
        others = (unused for model in _models for unused in model.unused().values())
        return all(map(_is_finite, [kept.gradient for kept in self.kept])) and all(map(_is_finite, others))

    def drop_unless_added(self, numbers: Mapping[int, int], *, add: bool) -> None:
        """Drop them, if the step does not add to them and all may go; ``numbers`` are those of all instances.

        A GradientError says that they would be lost, or belong to other parameters on another instance.
        """
        self._is_decided = True
        if add and len(set(numbers.values())) > 1:
            raise GradientError(
                "add=True, and the instances do not have gradients of the same parameters: call zero_grad() on "
                "all of them or on none"
            )
        if add or not any(numbers.values()):
            return
        self.kept = ()
        if min(numbers.values()) < 0:
            for model in _models:
                if model is not self._gradients:
                    mark_used(model.parameters())
            return
        place = max(numbers.values())
        names = [name for name, _ in self._module.named_parameters()]
        owners = name_instances(instance for instance, number in numbers.items() if number)
        raise GradientError(
            f"{names[place - 1]} has a gradient that no optimizer's step has used, on {owners}, and a loop over "
            "micro batches would drop it. If it shall go, call zero_grad() before the loop. If the loop shall add "
            "to it, as when an optimizer steps after every second loop only, write "
            "model.micro_batches(batch, add=True), or model.reduce_gradients(add=True)"
        )

    @torch.no_grad()
    def add_to_new(self) -> None:
        """Make each ``.grad`` the sum of what was kept and of what the step has made, if it has made any."""
        for kept in self.kept:
            parameter, new = kept.parameter, kept.parameter.grad
            if new is None:
                parameter.grad = kept.gradient
                mark_reduced(kept.gradient, is_reduced=kept.is_reduced)
                continue
            if isinstance(new, PartialGradient) and _is_part_of_same(kept.gradient, new):
                new.content.add_(kept.gradient.content)  # type: ignore[attr-defined] # it is one of these, too
            else:
                new.add_(kept.gradient)
            mark_reduced(new, is_reduced=is_reduced(new) and kept.is_reduced)


def _is_part_of_same(old: Tensor, new: PartialGradient) -> bool:
    return isinstance(old, PartialGradient) and old.ranges == new.ranges and old.is_whole == new.is_whole


def _copy(gradient: Tensor) -> Tensor:
    if isinstance(gradient, PartialGradient):
        gradient.content = gradient.content.clone()
        return gradient
    return gradient.detach().clone()


def _numbers(gradient: Tensor) -> Tensor:
    """The elements of ``gradient`` that are here."""
    if isinstance(gradient, PartialGradient):
        return gradient.here
    return gradient.coalesce().values() if gradient.layout == torch.sparse_coo else gradient


def _is_zero(gradient: Tensor) -> bool:
    return not _numbers(gradient).any()


def _is_finite(gradient: Tensor) -> bool:
    return bool(_numbers(gradient).isfinite().all())
