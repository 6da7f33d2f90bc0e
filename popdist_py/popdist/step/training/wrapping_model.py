"""A model around a module: what the model has not itself is the module's own."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import Parameter

from popdist.data.randomness import ReplicaRandomness
from popdist.errors import WeightsError
from popdist.step.training.model_steps import ModelSteps


class WrappingModel(nn.Module):
    """A model whose attributes, parameters and buffers are those of ``module``, under the module's names."""

    _title: ClassVar[str]
    """What errors call such a model."""

    _advice: ClassVar[Mapping[str, str]]
    """What to write instead of attributes that such a model has not, for those that the module has neither."""

    _not_after: ClassVar[str]
    """What an error says of a change of the module's weights after the module was wrapped."""

    module: nn.Module
    _model_steps: ModelSteps  # from the time when it is set other attributes are the module's

    @property
    def randomness(self) -> ReplicaRandomness:
        """The random states of this instance's replicas; part of what a checkpoint saves."""
        return self._model_steps.randomness

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_model_steps" not in self.__dict__:
                raise
            module = self._model_steps.module
            if name in self._advice and not hasattr(module, name):
                raise AttributeError(f"{self._title} has no {name!r}: {self._advice[name]}") from None
            return getattr(module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the module; a WeightsError for a weight, and for what the model does otherwise."""
        if "_model_steps" not in self.__dict__ or name in self.__dict__ or hasattr(type(self), name):
            super().__setattr__(name, value)
        elif isinstance(value, nn.Module | Parameter) or name == "module":
            raise WeightsError(f"model.{name} = ... {self._not_after}")
        elif name in self._advice and not hasattr(self.module, name):
            raise WeightsError(f"model.{name} = {value!r}: {self._advice[name]}")
        else:
            setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        if hasattr(self.module, name) and name not in self.__dict__:
            delattr(self.module, name)
        else:
            super().__delattr__(name)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's own signature
        """Register a buffer of the module, which must have the same values on all instances."""
        self.module.register_buffer(name, tensor, persistent)

    def register_parameter(self, name: str, param: Parameter | None) -> None:
        """Refused: see :meth:`__setattr__`."""
        raise WeightsError(f"model.register_parameter({name!r}, {type(param).__name__}) {self._not_after}")

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Refused: see :meth:`__setattr__`."""
        raise WeightsError(f"model.add_module({name!r}, {type(module).__name__}) {self._not_after}")

    register_module = add_module

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Parameter]]:
        """The module's parameters under its own names."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """The module's buffers under its own names."""
        return self.module.named_buffers(*args, **kwargs)
