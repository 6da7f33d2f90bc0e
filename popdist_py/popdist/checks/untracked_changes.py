"""What a loop over micro batches may change beside the model that it trains, found in checked steps.

Parameters of the other wrapped models are written once for the job, outside of the loop, as the model's own are.
Buffers of modules that nothing wraps belong to no replica: a criterion with a centre, a teacher with BatchNorm.
"""

import warnings
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from popdist import torch_private
from popdist.checks.parameter_sums import is_comparable, sum_tensors
from popdist.errors import PopdistWarning
from popdist.training.step import modules_in, reduced_modules

_MOST_NAMES = 3


class OtherParameters:
    """The parameters of other wrapped models, as they were when the step of a model began."""

    def __init__(self, module: nn.Module, others: Iterable[nn.Module]) -> None:
        self._sums = sum_tensors(_other_parameters(module, others))

    def fault(self) -> str | None:
        """The first that was written since, in words."""
        place = self._sums.first_change()
        if place is None:
            return None
        return (
            f"{self._sums.names[place]} was written in a micro batch of another model: so the result depends on "
            "how many micro batches an instance computes. Write a parameter once for all replicas, outside of the "
            "loop over micro batches: move a teacher or a target network, and step an optimizer, after it"
        )


def _other_parameters(module: nn.Module, others: Iterable[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    seen = {id(parameter) for parameter in module.parameters()}
    for other in others:
        for name, parameter in other.named_parameters():
            if id(parameter) not in seen and is_comparable(parameter):
                seen.add(id(parameter))
                yield f"{name} of {type(other).__name__}", parameter


class UntrackedBuffers:
    """The buffers of modules that nothing wraps, as they were when each module was first called in a loop.

    A hook on all modules finds them. A module of which only methods are called is not found, and none is where
    torch.compile has compiled a model, as it would compile it again because of the hook.
    """

    def __init__(self) -> None:
        wrapped = [part for module in modules_in(reduced_modules) for part in module.modules()]
        self._tracked = {id(tensor) for part in wrapped for tensor in part.buffers(recurse=False)}
        self._copies: dict[nn.Module, dict[str, Tensor]] = {}
        is_compiled = any(map(torch_private.is_compiled, wrapped))
        self._hook = None if is_compiled else register_module_forward_pre_hook(self._remember)

    def _remember(self, module: nn.Module, _args: object) -> None:
        if module.training and module not in self._copies:
            buffers = {name: it for name, it in module.named_buffers(recurse=False) if id(it) not in self._tracked}
            self._copies[module] = {name: tensor.detach().clone() for name, tensor in buffers.items()}

    def close(self, *, warns: bool) -> None:
        """Look at no more modules, and warn of buffers that a micro batch has written."""
        if self._hook is not None:
            self._hook.remove()
        names = [
            f"{name} of {type(module).__name__}"
            for module, copies in (self._copies.items() if warns else ())
            for name, before in copies.items()
            if not _is_equal(getattr(module, name, None), before)
        ]
        if names:
            more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
            warnings.warn(
                f"{', '.join(names[:_MOST_NAMES])}{more} changed in a loop over micro batches, and nothing wraps "
                "the module: so the buffer differs between instances, and depends on how the replicas are dealt "
                "to them. Wrap it, ReplicatedModel(module), or put it into one ModuleDict with the model; or call "
                "module.eval() where it shall not change",
                PopdistWarning,
                stacklevel=3,
            )


def _is_equal(now: object, before: Tensor) -> bool:
    if not isinstance(now, Tensor) or now.shape != before.shape or now.device != before.device:
        return False
    return torch.equal(now, before)
