"""What a loop over micro batches may change beside the model that it trains, found in checked steps.

Parameters of the other wrapped models are written once for the job, outside of the loop, as the model's own are.
Buffers of modules that nothing wraps belong to no replica: a criterion with a centre, a teacher with BatchNorm.
"""

import gc
import warnings
from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from popdist.errors import PopdistWarning
from popdist.gradients.model_buffers import ModelBuffers, find_changed
from popdist.training.optimizer_steps import wrapped_modules
from popdist.weights import is_comparable, sum_tensors

_MOST_NAMES = 3


class ParametersBeside:
    """The parameters of other wrapped models, as they were when the step of a model began.

    Args:
        module: The model, whose own parameters are left out.
        others: The others.
    """

    def __init__(self, module: nn.Module, others: Iterable[nn.Module]) -> None:
        self._sums = sum_tensors(_parameters_beside(module, others))

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


def _parameters_beside(module: nn.Module, others: Iterable[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    seen = {id(parameter) for parameter in module.parameters()}
    for other in others:
        for name, parameter in other.named_parameters():
            if id(parameter) not in seen and is_comparable(parameter):
                seen.add(id(parameter))
                yield f"{name} of {type(other).__name__}", parameter


class BuffersBeside:
    """The buffers of all modules in training mode that nothing wraps, as they are now.

    To find them takes about a tenth of a second.
    """

    def __init__(self) -> None:
        wrapped = {id(part) for module in wrapped_modules() for part in module.modules()}
        self._owners = []
        for found in gc.get_objects():
            if issubclass(type(found), nn.Module) and id(found) not in wrapped:
                state = vars(found)
                if state.get("_buffers") and state.get("training"):
                    self._owners.append(ModelBuffers(found))
        for owner in self._owners:
            owner.remember()

    def warn(self) -> None:
        """Warn of those that have another content now, which a micro batch has written."""
        names = []
        for owner in self._owners:
            own = {name: it for name, it in owner.buffers.items() if it.owner is owner.module}
            names += [f"{name} of {type(owner.module).__name__}" for name in find_changed(own)]
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
