"""A model around a module: what the model has not itself is the module's own."""

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
        """Split this instance's combined batch into its replicas' micro batches; afterwards ``.grad`` is ready.

        Each micro batch that is yielded must see one backward pass (of a mean over its samples), or several. When
        the loop has ended, ``.grad`` of each parameter is the mean over all samples of the job's step, added in
        float32 (float64 for parameters of double precision), or None for a parameter that no replica used.

        The loop begins without gradients. Those of before are dropped if an optimizer's step has used them, or a
        GradScaler has left it out. Others are an error, or ``add``.

        A part of the batch without samples is not yielded; an instance may have fewer samples than others, or
        none, and still takes part. Leaving the loop before its end abandons the step on every instance: the others
        raise ``MicroBatchError`` at the end of their loops, and an optimizer's step raises it on all of them until
        the next loop, which works again where all have caught it.

        Args:
            batch: Tensors in tuples, lists, mappings and dataclasses, with the samples of all local replicas along
                dim 0 of each: micro batch size x accumulation x local replicas, or fewer. Or the batch of
                ``popdist.data_loader``, or what ``split`` splits. Or a tuple of several loaders' batches, for
                ``for (x, y), z in model.micro_batches((a, b))``: the samples of the first count.
            accumulation: Micro batches of each replica in this step, the same on all instances; a loader's batch
                brings its own.
            reduction: ``"sum"`` leaves out the division by the sum of the weights, and weighs each micro batch 1
                unless ``weights`` says more.
            weights: What each micro batch counts, replica by replica, in place of its samples: its tokens, for a
                loss that is a mean over tokens. 0 drops the gradient.
            add: Add to the gradients of before which nothing has used, in place of an error: for an optimizer that
                steps after several loops. A phased model refuses it.
            split: Gives this instance's micro batches, ``local replicas x accumulation`` of them, replica by
                replica, None for one without samples. ``split=list`` takes a list of them.

        Returns:
            Micro batches on the model's device, which may share memory with the batch.

        Raises:
            BatchError: If the batch cannot be split, a weight is not possible, or the job has no sample.
            GradientError: If gradients of before would be lost, or ``check_finite`` has found one.
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
        """Raise WeightsError: see :meth:`__setattr__`."""
        raise WeightsError(f"model.register_parameter({name!r}, {type(param).__name__}) {self._not_after}")

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Raise WeightsError: see :meth:`__setattr__`."""
        raise WeightsError(f"model.add_module({name!r}, {type(module).__name__}) {self._not_after}")

    register_module = add_module

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Parameter]]:
        """Yield the module's parameters under the module's names."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield the module's buffers under the module's names."""
        return self.module.named_buffers(*args, **kwargs)
