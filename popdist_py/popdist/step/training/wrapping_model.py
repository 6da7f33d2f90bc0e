"""A model that wraps a module: attributes that the model does not have come from the module."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import Parameter

from popdist.data.randomness import ReplicaRandomness
from popdist.errors import WeightsError
from popdist.gradients.step_headers import MeanOrSum
from popdist.step.training.micro_batches import Nest, Split
from popdist.step.training.model_steps import ModelSteps, WholeStep


class WrappingModel(nn.Module):
    """A model with the attributes, parameters and buffers of the wrapped ``module``, under the same names."""

    _title: ClassVar[str]
    """The name of such a model in error messages."""

    _advice: ClassVar[Mapping[str, str]]
    """For attributes that neither such a model nor the module has: the advice of the error message."""

    _not_after: ClassVar[str]
    """The text of the error for a change of the module's weights after the module was wrapped."""

    module: nn.Module
    _model_steps: ModelSteps  # once this attribute is set, other attributes are set on the module

    @property
    def randomness(self) -> ReplicaRandomness:
        """The random states of this instance's replicas, which a checkpoint saves."""
        return self._model_steps.randomness

    def micro_batches(
        self,
        batch: Nest,
        accumulation: int = 1,
        *,
        reduction: MeanOrSum = "mean",
        weights: Sequence[float] | None = None,
        split: Split | None = None,
        add: bool = False,
    ) -> Iterator[Nest]:
        """Yield this instance's micro batches; after the loop ``.grad`` is the gradient over all replicas.

        Each micro batch must get one backward pass (of a mean over its samples), or several. After the loop,
        ``.grad`` of each parameter is the mean over all samples of the job's step, added in float32 (float64 for
        parameters of double precision), or None for a parameter that no replica used.

        The loop begins without gradients. It drops a gradient from before that an optimizer's step has used, or
        that a GradScaler made the step skip. Any other gradient raises an error, unless ``add`` is True.

        A part of the batch without samples is not yielded. An instance may have fewer samples than others, or
        none, and still takes part. Leaving the loop before its end abandons the step on every instance: the other
        instances raise ``MicroBatchError`` at the end of their loops, and an optimizer's step raises
        ``MicroBatchError`` until the next loop, which works again if all instances have caught the error.

        Args:
            batch: Tensors in tuples, lists, mappings and dataclasses, with the samples of all local replicas along
                dim 0 of each: micro batch size x accumulation x local replicas, or fewer. Or the batch of
                ``popdist.data_loader``, or a value that ``split`` splits. Or a tuple of several loaders' batches,
                for ``for (x, y), z in model.micro_batches((a, b))``: the samples of the first loader count.
            accumulation: Micro batches of each replica in this step, the same on all instances; a loader's batch
                brings its own.
            reduction: ``"sum"`` leaves out the division by the sum of the weights, and gives each micro batch the
                weight 1 unless there are ``weights``.
            weights: The weight of each micro batch, replica by replica, in place of its number of samples: the
                number of tokens, for a loss that is a mean over tokens. 0 drops the gradient.
            add: Add to unused gradients from before the loop, in place of an error: for an optimizer that steps
                after several loops. A phased model refuses this.
            split: A function that returns this instance's micro batches, ``local replicas x accumulation`` of
                them, replica by replica, None for a micro batch without samples. ``split=list`` takes their list.

        Returns:
            Micro batches on the model's device, which may share memory with the batch.

        Raises:
            BatchError: If the batch cannot be split, a weight is not possible, or the job has no sample.
            GradientError: If gradients from before would be lost, or ``check_finite`` has found NaN or infinity.
            WeightsError: If a check finds weights that differ between instances, or were written in a micro batch.
            MicroBatchError: If an instance left its loop or could not split its batch.
            CollectiveError: If the instances differ in accumulation, reduction or parameters, or do other things.
            BackendError: If an instance was lost or did not come in time.
        """
        return self._model_steps.micro_batches(WholeStep(batch, accumulation, reduction, weights, split, add))

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
        """Set an attribute of the wrapped module; raise WeightsError for a module, parameter or DDP attribute."""
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
        """Register a buffer of the wrapped module, which must have the same values on all instances."""
        self.module.register_buffer(name, tensor, persistent)

    def register_parameter(self, name: str, param: Parameter | None) -> None:
        """Raise WeightsError, because a wrapped module gets no new parameters: see :meth:`__setattr__`."""
        raise WeightsError(f"model.register_parameter({name!r}, {type(param).__name__}) {self._not_after}")

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Raise WeightsError, because a wrapped module gets no new modules: see :meth:`__setattr__`."""
        raise WeightsError(f"model.add_module({name!r}, {type(module).__name__}) {self._not_after}")

    register_module = add_module

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Parameter]]:
        """Yield the parameters of the wrapped module under the module's names."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers of the wrapped module under the module's names."""
        return self.module.named_buffers(*args, **kwargs)
