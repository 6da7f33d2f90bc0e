"""The gradients of a module, whose parameters may change from step to step, and the memory they are added in."""

import weakref

import torch
from torch import nn
from torch.nn import Parameter

from popdist.gradients.gradient_memory import GradientMemory
from popdist.gradients.rows import FlatGradients
from popdist.groups import Group
from popdist.layout import ReplicaLayout

ParameterKind = tuple[int, bool, torch.device, torch.dtype]
"""What tells whether a parameter's place in the rows is still right: identity, whether it is trained, and kind."""


class ModelGradients:
    """The gradients of the parameters that a model trains now.

    Args:
        module: The model, which is not kept alive by this; its parameters may change from step to step.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._kinds: list[ParameterKind] = []
        self._found = FlatGradients(())
        self._memory: GradientMemory | None = None
        self.device = torch.device("cpu")
        """Where the first parameter was when they were last cleared or found; the CPU without one."""

    def clear(self) -> None:
        """Set every ``.grad`` to None."""
        parameters = _parameters_of(self._module())
        for it in parameters:
            if it.requires_grad:
                it.grad = None
        if parameters:
            self.device = parameters[0].device

    def find(self) -> FlatGradients:
        """Those of this moment; made anew only when the parameters have changed."""
        kinds = [(id(it), it.requires_grad, it.device, it.dtype) for it in _parameters_of(self._module())]
        if kinds != self._kinds:
            module = self._module()
            self._found = FlatGradients(module.named_parameters() if module is not None else ())
            self._kinds = kinds
            self.device = kinds[0][2] if kinds else torch.device("cpu")
        return self._found

    def memory(self, group: Group, layout: ReplicaLayout) -> GradientMemory:
        """Where they are added over the replicas of the job; the same one until the parameters change."""
        gradients = self.find()
        if self._memory is None or self._memory.gradients is not gradients or self._memory.group is not group:
            self._memory = GradientMemory(group, layout, gradients)
        return self._memory


def _parameters_of(module: nn.Module | None) -> list[Parameter]:
    """The parameters in ``module``, if it is still there, in a fixed order; a tied one may come twice.

    Several times faster than ``module.parameters()``, because this is asked in every step.
    """
    if module is None:
        return []
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
