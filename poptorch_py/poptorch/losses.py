"""The loss that a model trains by: found in its first forward, wherever it is in the result."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Self, get_args

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import functional
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function_unary

from poptorch.errors import Error, check_arguments

Reduction = Literal["mean", "sum", "none", 0, 1, 2]

_NAMES: Final = """
    binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy ctc_loss
    gaussian_nll_loss hinge_embedding_loss huber_loss kl_div l1_loss margin_ranking_loss mse_loss multi_margin_loss
    multilabel_margin_loss multilabel_soft_margin_loss nll_loss poisson_nll_loss smooth_l1_loss soft_margin_loss
    triplet_margin_loss triplet_margin_with_distance_loss
""".split()  # noqa: SIM905 - twenty names read best as text


def identity_loss(x: Tensor, reduction: Reduction) -> Tensor:
    """Make ``x`` the loss: for a loss of a program's own, and for a sum of several.

    Args:
        x: Of any shape.
        reduction: ``"mean"`` or 1, ``"sum"`` or 0, ``"none"`` or 2. With the last one, all elements are added when
            the gradient is computed, and the loss keeps its shape.
    """
    if has_torch_function_unary(x):
        return handle_torch_function(identity_loss, (x,), x, reduction)
    check_arguments("identity_loss", "a tensor", x=x)
    if type(reduction) not in (str, int) or reduction not in get_args(Reduction):
        raise Error(
            f"Unsupported reduction {reduction!r}: identity_loss takes 'mean', 'sum' or 'none' (or 1, 0, 2)"
        )
    if reduction in ("none", 2):
        return x.view_as(x)
    return x.mean() if reduction in ("mean", 1) else x.sum()


LOSSES: Final = {
    identity_loss,
    *(getattr(functional, name) for name in _NAMES),
    *(getattr(torch, name) for name in _NAMES if hasattr(torch, name)),
}

_OF_COMPILED: Final = "CompiledFunctionBackward"
"""What makes each result of a function that torch.compile has compiled."""


class OperationWatch(TorchFunctionMode):
    """Within it each operation of torch goes through ``run``."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        return self.run(func, args, kwargs or {})

    def run(self, operation: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operation."""
        return operation(*args, **kwargs)


class LossSearch(OperationWatch):
    """Within it a forward is watched: each loss that it makes is kept, and ``backward()`` is refused."""

    def __init__(self) -> None:
        super().__init__()
        self._losses: list[Tensor] = []

    def run(self, operation: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operation, and keep a loss."""
        if operation is Tensor.backward:
            REFUSED_BACKWARD()
        result = super().run(operation, args, kwargs)
        if operation in LOSSES:
            self._losses.append(result)
        return result

    def final(self) -> Tensor:
        """The one loss that flows into no other; one without a gradient does not count beside one that has it."""
        with_gradient = [loss for loss in self._losses if loss.grad_fn is not None]
        found = with_gradient or self._losses[-1:]
        if not found:
            raise Error(
                "Couldn't find a loss: forward of a model that is trained computes one, by a loss function of "
                "torch's or as poptorch.identity_loss(x, reduction). What torch.jit has compiled hides it: "
                "compute it in a module around that"
            )
        earlier = set[Node]()
        for loss in found:
            if loss.grad_fn not in earlier:
                _add_ancestors(loss.grad_fn, earlier)
        finals = [loss for loss in found if loss.grad_fn not in earlier]
        if len(finals) > 1:
            raise Error(
                f"Multiple independent losses: {len(finals)} losses of forward flow into no other one. Make one "
                "of them, as poptorch.identity_loss(first + second, reduction='none')"
            )
        return finals[0]


def _add_ancestors(node: Node | None, found: set[Node]) -> None:
    waiting = [node]
    while waiting:
        current = waiting.pop()
        for before, _ in current.next_functions if current is not None else ():
            if before is not None and before not in found:
                found.add(before)
                waiting.append(before)


@dataclass(frozen=True, slots=True)
class LossPlace:
    """Where in the result of a forward the loss is: found in the first one, and looked up in each later one."""

    index: int  # among the result's tensors
    made_by: type  # the loss's node in the graph of autograd

    @classmethod
    def of(cls, tensors: Sequence[Tensor], loss: Tensor) -> Self | None:
        """Its place in the result of the first forward; None where it is none of that."""
        index = next((index for index, tensor in enumerate(tensors) if tensor is loss), None)
        return None if index is None else cls(index, type(loss.grad_fn))

    def loss(self, tensors: Sequence[Tensor]) -> Tensor:
        """The loss in the result of a later forward; an Error if something else is in its place."""
        found = tensors[self.index] if self.index < len(tensors) else None
        if found is None or (
            type(found.grad_fn) is not self.made_by and type(found.grad_fn).__name__ != _OF_COMPILED
        ):
            raise Error(
                "the loss is no longer where the first forward had it: forward must return the same structure, "
                "with the loss in the same place, each time"
            )
        return found


class _RefusedBackward:
    """In place of ``backward()`` of a model's results; whoever saves a result saves nothing of this."""

    def __call__(self, *_args: object, **_kwargs: object) -> None:
        raise Error(
            "backward() cannot be called explicitly: a model of poptorch.trainingModel makes the whole step, "
            "backward pass and optimizer included, when it is called"
        )

    def __deepcopy__(self, _memo: object) -> "_RefusedBackward":
        return self

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return OrderedDict, ()  # which torch.load takes for harmless


REFUSED_BACKWARD: Final = _RefusedBackward()
