"""The model of a data-parallel job: an ordinary module whose gradients are those of all replicas."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn

from popdist import context
from popdist.errors import BatchError, MicroBatchError, WeightsError, seed_number, whole_number
from popdist.gradients.buffers import ReplicaBuffers
from popdist.gradients.memory import ModelGradients
from popdist.gradients.partial_gradients import clip_grad_norm
from popdist.gradients.reduction import (
    CANNOT_SPLIT,
    IN_ANOTHER_LOOP,
    MeanOrSum,
    check_reduction,
    refuse_step,
)
from popdist.training import outside_step
from popdist.training.checks import CheckedSteps
from popdist.training.micro_batches import Nest, Split, check_weight, split_batch, to_device
from popdist.training.outside_step import AutomaticReduction
from popdist.training.randomness import ReplicaRandomness
from popdist.training.step import PlainStep, Step
from popdist.training_loop import training_loop
from popdist.weights import broadcast_weights, sum_parameters

LEFT: Final = (
    "the last step of this model was lost on all instances, because a loop over its micro batches was left before "
    "its end (by break, return or an exception) or raised an error, here or on another instance"
)
BESIDE: Final = (
    "the last step of this model was lost, because the loop over its micro batches ran beside another one in "
    "zip(), which does not take both to their ends: write zip(..., strict=True)"
)
"""Why a step has no gradient."""


class ModelSteps:
    """The steps of one module on this instance, one at a time.

    Args:
        module: Its gradients and buffers are those of all replicas after each step.
        seed: Of the replicas' random states.
        checks_finite: Whether to look for NaN and infinity in each micro batch's gradient.
    """

    def __init__(self, module: nn.Module, *, seed: int, checks_finite: bool) -> None:
        contract = context.environment().contract
        self.layout = contract.layout
        self.randomness = ReplicaRandomness(seed, self.layout.replicas_of(contract.instance_index))
        self._module = module
        self._checks_finite = checks_finite
        self._prepare()

    def _prepare(self) -> None:
        """Make what a copy makes anew."""
        outside_step.watch()
        self.step: Step | PlainStep | None = None
        self._left_at: int | None = None
        self.gradients = ModelGradients(self._module)
        self._buffers = ReplicaBuffers(self._module)
        self._checked_steps = CheckedSteps()
        self.automatic = AutomaticReduction(
            self._module,
            self.gradients,
            self._buffers,
            self.layout,
            self._checked_steps,
            checks_finite=self._checks_finite,
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("layout", "randomness", "_module", "_checks_finite")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._prepare()

    def begin(self, accumulation: int) -> Step | PlainStep:
        """Start a step, from no gradients."""
        training_loop.begin_step(self)
        group, checks_finite = context.current_group(), self._checks_finite
        is_checked = self._checked_steps.is_next_checked()
        if self.layout.num_replicas == accumulation == 1:
            self.step = PlainStep(self.gradients, is_checked=is_checked, checks_finite=checks_finite)
        else:
            self.step = Step(
                self.gradients.memory(group, self.layout),
                self._buffers,
                accumulation=accumulation,
                is_checked=is_checked,
                weights=sum_parameters(self._module) if is_checked and self.layout.num_replicas > 1 else None,
                checks_finite=checks_finite,
            )
        self.automatic.step = self.step
        self._left_at = None
        outside_step.begin_step(self, self._module)
        return self.step

    def micro_batches(
        self,
        batch: Nest,
        accumulation: int,
        *,
        reduction: MeanOrSum,
        weights: Sequence[float] | None,
        split: Split | None,
    ) -> Iterator[Nest]:
        """A whole step, as its micro batches: see ``ReplicatedModel.micro_batches``."""
        try:
            check_reduction(reduction)
            accumulation, contents, counts = split_batch(
                batch, self.layout.num_local_replicas, accumulation, split=split, weights=weights
            )
        except BatchError:
            self._refuse(accumulation, CANNOT_SPLIT)
            raise
        if self.step is not None:
            self._refuse(accumulation, IN_ANOTHER_LOOP)
            raise MicroBatchError(
                "a step began before the one before it had ended: end each micro_batches loop of a model before "
                "the next one, or call reduce_gradients() after the micro batches; neither of the two steps has a "
                "gradient on any instance. To train on two batches at once, put them into one loop: "
                "model.micro_batches((first, second))"
            )
        num_entered, step = MicroBatchScope.num_entered, self.begin(accumulation)
        try:
            step.announce(max(counts), reduction)
        except BaseException:
            self.abandon()
            raise
        for index, (content, weight) in enumerate(zip(contents, counts, strict=True)):
            if content is not None:
                counted = 1.0 if reduction == "sum" and weights is None else weight
                with MicroBatchScope(self, step, index, counted):
                    yield to_device(content, self.gradients.device)
        self.finish(reduction)
        MicroBatchScope.mark_beside(num_entered)

    def micro_batch(self, index: int, weight: float, accumulation: int) -> "MicroBatchScope":
        """What to enter for micro batch ``index`` of the step; the first one starts it."""
        weight, is_first = check_weight(weight), self.step is None
        if is_first and self._left_at is not None and index > self._left_at:
            raise self._left_error()
        step = self.step or self.begin(accumulation)
        if step.accumulation != accumulation:
            raise BatchError(f"accumulation={accumulation} in a step that began with {step.accumulation}")
        try:
            return MicroBatchScope(self, step, index, weight, is_alone=True)
        except BatchError:
            if is_first:
                self._end()
            raise

    def finish(self, reduction: MeanOrSum) -> None:
        """End the step with the gradient of all replicas: see ``ReplicatedModel.reduce_gradients``."""
        check_reduction(reduction)
        if self.step is None and self._left_at is not None:
            error, self._left_at = self._left_error(), None
            raise error
        step = self.step or self.begin(1)
        try:
            step.finish(reduction)
        except BaseException:
            self.abandon()
            raise
        self._checked_steps.end_step()
        self._end()

    def abandon(self, reason: str = LEFT) -> None:
        """End the step without a gradient on any instance, if there is one. Never raises."""
        if self.step is not None:
            self.step.abandon()
            self._end()
            outside_step.lose_step(self, self._module, reason)

    def leave(self, index: int | None, reason: str) -> None:
        """Abandon the step in micro batch ``index`` of a loop of the program's own; None in ``micro_batches``."""
        self._left_at = index
        self.abandon(reason)

    def _refuse(self, accumulation: int, refusal: float) -> None:
        """Make no step, nor the one that is open, and tell the others so; there are no gradients anywhere."""
        self.abandon()
        self.gradients.clear()
        refuse_step(context.current_group(), accumulation, refusal)
        outside_step.lose_step(self, self._module, LEFT)

    def _left_error(self) -> MicroBatchError:
        return MicroBatchError(
            f"micro batch {self._left_at} of this step was left by an exception, so the step has no gradient on "
            "any instance: catch the exception outside the whole step, and begin the next one with micro_batch(0)"
        )

    def _end(self) -> None:
        self.step = self.automatic.step = None
        self.automatic.is_computing = False
        outside_step.end_step(self)
        if self.layout.num_replicas > self.layout.num_local_replicas == 1:
            self._buffers.begin_step()  # the next pass may be one outside the loop, which nothing announces


class MicroBatchScope:
    """Within it the process is one replica: its random states are in place, and its gradients are expected.

    Leaving it takes the gradients. Leaving it by an exception abandons the step on every instance.

    Attributes:
        num_entered: How many were entered so far in this process.
        number: Which of them this one is, from 1.
        leaving: Why the step is lost if this one is left by an exception.
    """

    num_entered: ClassVar[int] = 0
    _open: ClassVar[list["MicroBatchScope"]] = []

    def __init__(
        self, steps: ModelSteps, step: Step | PlainStep, index: int, weight: float, *, is_alone: bool = False
    ) -> None:
        self._steps = steps
        self._step = step
        self._index = index if is_alone else None
        self._weight = weight
        self._randomness = steps.randomness.of(step.begin(index, weight), steps.gradients.device)
        self.number = 0
        self.leaving = LEFT

    @classmethod
    def mark_beside(cls, num_entered: int) -> None:
        """A loop has ended that began after ``num_entered`` scopes: those entered since are of loops beside it."""
        for scope in cls._open:
            if scope.number > num_entered:
                scope.leaving = BESIDE

    def __enter__(self) -> None:
        self._randomness.__enter__()
        self._steps.automatic.is_computing = True
        MicroBatchScope.num_entered += 1
        self.number = MicroBatchScope.num_entered
        self._open.append(self)

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._open.remove(self)
        self._randomness.__exit__()
        if error is not None and self._steps.step is not self._step:
            return  # a loop that a traceback kept open: its step has been abandoned, and another may have begun
        self._steps.automatic.is_computing = False
        if error is not None:
            self._steps.leave(self._index, self.leaving)
            return
        try:
            self._step.collect(self._weight)
        except BaseException:
            self._steps.abandon()
            raise


class ReplicatedModel(nn.Module):
    """Wraps ``module`` so that each step's gradient is the mean over all replicas of the job.

    Makes the weights of all instances those of instance 0, after ``popdist.init()`` where the program has not
    called it. Everything else is the module's own: ``forward``, the keys of ``state_dict``, the names of
    parameters and buffers, and any attribute that this class does not have. The loop to write, with any torch
    optimizer::

        model = popdist.ReplicatedModel(Net())
        for batch in loader:
            for x, y in model.micro_batches(batch):
                loss_fn(model(x), y).backward()
            optimizer.step()

    The bits of the weights depend on the replicas and the accumulation, not on how many instances the replicas
    are dealt to. A replica draws its random numbers (Python's, numpy's and torch's) from states of its own; every
    replica starts a step from the same buffers, and afterwards those of floats are the mean over the replicas,
    others those of replica 0. The conditions: the same number of threads for each replica (poprun sets it), the
    same kind of CPU or GPU, the same build of torch, and a computation that gives the same bits for the same
    samples (so a loss that is a mean over its micro batch). Instances exchange one partial sum of gradients when
    their number of local replicas is a power of two, else the aligned ones of their block, at most
    ``2 * log2(num_replicas)``.

    Outside the loop, ``backward()`` reduces when it ends if the instance has one replica, as under torch's
    DistributedDataParallel, and raises ``BatchError`` if it has several.

    Args:
        module: Any module; its parameters and buffers are changed in place on instances other than 0.
        seed: Of the replicas' random states; the same on all instances.
        check_finite: Look for NaN and infinity in the gradient of each micro batch; every instance then raises
            ``GradientError``, which names the parameter and the replica. Not for use with a GradScaler, which
            expects them.
        strict_bits: Refuse local replicas that are no power of two.

    Raises:
        WeightsError: If the instances have different modules, or the weights differ afterwards.
        CollectiveError: If the instances differ in the other arguments.
        BatchError: If ``strict_bits`` refuses the number of local replicas, or the seed is none.
        ContractError, BackendError: As ``popdist.init()``.
    """

    module: nn.Module

    def __init__(
        self, module: nn.Module, seed: int = 0, *, check_finite: bool = False, strict_bits: bool = False
    ) -> None:
        super().__init__()
        num_local = context.environment().contract.layout.num_local_replicas
        if strict_bits and num_local & (num_local - 1):
            raise BatchError(
                f"strict_bits=True, and {num_local} local replicas are no power of two: choose --num-replicas and "
                "--num-instances so that their quotient is one"
            )
        if not isinstance(module, nn.Module):
            raise WeightsError(f"ReplicatedModel wraps a torch.nn.Module, and this is a {type(module).__name__}")
        seed = seed_number(seed, BatchError)
        context.ensure_init()
        context.current_group().agree(f"ReplicatedModel(seed={seed}, {check_finite=}, {strict_bits=})")
        self.module = module
        self.register_load_state_dict_pre_hook(_inside_another_module)  # type: ignore[no-untyped-call]  # torch's
        broadcast_weights(module)
        self._model_steps = ModelSteps(module, seed=seed, checks_finite=check_finite)
        self._model_steps.automatic.watch()

    @property
    def randomness(self) -> ReplicaRandomness:
        """The random states of this instance's replicas; part of what a checkpoint saves."""
        return self._model_steps.randomness

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever the module takes and gives
        """The module's own forward pass."""
        if torch.is_grad_enabled():
            self._model_steps.automatic.watch()
        return self.module(*args, **kwargs)

    def micro_batches(
        self,
        batch: Nest,
        accumulation: int = 1,
        *,
        reduction: MeanOrSum = "mean",
        weights: Sequence[float] | None = None,
        split: Split | None = None,
    ) -> Iterator[Nest]:
        """Split this instance's combined batch into its replicas' micro batches; afterwards ``.grad`` is ready.

        Each micro batch that is yielded must see one backward pass (of a mean over its samples), or several. Every
        gradient is weighted by the samples it stands for, so ragged last steps are exact: when the loop has ended,
        ``.grad`` of each parameter is the mean over all samples of the job's step. It is added in float32
        (float64 for parameters of double precision) and is None for a parameter that no replica used. The
        gradients that were there before are dropped.

        A part of the batch without samples is not yielded; an instance may have fewer samples than others, or
        none, and still takes part. Leaving the loop before its end (by break, return or an exception) abandons
        the step on every instance: the others raise ``MicroBatchError`` at the end of their loops, and an
        optimizer's step raises it on all of them until the next loop, which works again where all have caught it.

        Args:
            batch: Tensors in tuples, lists, mappings and dataclasses, with the samples of all local replicas along
                dim 0 of each: micro batch size x accumulation x local replicas, or fewer (see
                `popdist.training.micro_batches`). Or the batch of ``popdist.data_loader``, or what ``split``
                splits.
            accumulation: Micro batches of each replica in this step, the same on all instances. At least 1; a
                loader's batch brings its own.
            reduction: ``"sum"`` leaves out the division by the sum of the weights, and weighs each micro batch 1
                unless ``weights`` says more.
            weights: What each micro batch counts, replica by replica, in place of its samples: its tokens, for a
                loss that is a mean over tokens. At least 0 each; 0 drops the gradient.
            split: Gives this instance's micro batches, ``local replicas x accumulation`` of them, replica by
                replica, None for one without samples. ``split=list`` takes a list of them.

        Returns:
            Micro batches on the model's device; those of a nest are views of its tensors if these are there.

        Raises:
            BatchError: If the batch cannot be split, a weight is negative, or the whole job has no sample in this
                step.
            GradientError: If gradients are checked and one is not finite.
            MicroBatchError: If an instance left its loop or could not split its batch.
            CollectiveError: If the instances differ in accumulation, reduction or parameters, or do other things.
            BackendError: If an instance was lost or did not come in time.
        """
        steps = self._model_steps
        return steps.micro_batches(batch, accumulation, reduction=reduction, weights=weights, split=split)

    def micro_batch(
        self, index: int, *, weight: float = 1.0, accumulation: int = 1
    ) -> AbstractContextManager[None]:
        """Within it, this process is the replica that micro batch ``index`` belongs to; for loops of your own.

        ``micro_batches`` is made of this and :meth:`reduce_gradients`. A step is all of an instance's micro
        batches, or fewer, in order, each with any number of backward passes::

            for i, (x, y) in enumerate(parts):
                with model.micro_batch(i, weight=len(x)):
                    loss_fn(model(x), y).backward()
            model.reduce_gradients()

        The first one drops the gradients that were there. Leaving it by an exception abandons the step, as
        leaving ``micro_batches`` does.

        Args:
            index: Among this instance's micro batches, replica by replica: local replica x accumulation + step.
            weight: What the gradient counts. At least 0; 0 drops it.
            accumulation: Micro batches of each replica in this step.

        Raises:
            BatchError: If there is no such micro batch, it is done already, or the weight is negative.
        """
        index = whole_number("index", index, BatchError, minimum=0)
        accumulation = whole_number("accumulation", accumulation, BatchError)
        return self._model_steps.micro_batch(index, weight, accumulation)

    def reduce_gradients(self, reduction: MeanOrSum = "mean") -> None:
        """End a step: ``.grad`` of each parameter becomes that of all replicas, and buffers are made equal.

        Micro batches that were left out count as empty ones. Every instance calls it, also one without any.

        Args:
            reduction: ``"mean"`` divides the sum of the weighted gradients by the sum of the weights; ``"sum"``
                does not.

        Raises:
            BatchError: If the weights of the whole job add up to 0.
            GradientError, MicroBatchError, CollectiveError, BackendError: As ``micro_batches``.
        """
        self._model_steps.finish(reduction)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale all gradients down to a norm of ``max_norm``, after the loop; every instance calls it.

        As ``torch.nn.utils.clip_grad_norm_``, which may be used as well: each instance takes the norms of some of
        the parameters only, and on the CPU the bits are the same.

        Args:
            max_norm: The largest norm of all gradients together.
            norm_type: Which norm; ``inf`` for the largest absolute value.
            error_if_nonfinite: Raise when the norm is NaN or infinity, and leave the gradients.

        Returns:
            The norm before scaling.

        Raises:
            RuntimeError: If the norm is not finite and ``error_if_nonfinite``.
            CollectiveError, BackendError: If the instances do other things, or one was lost.
        """
        group = context.current_group()
        return clip_grad_norm(group, self.module, max_norm, norm_type, must_be_finite=error_if_nonfinite)

    def no_sync(self) -> AbstractContextManager[None]:
        """Within it, ``backward()`` outside the loop leaves this instance's gradients as they are.

        As under DistributedDataParallel: they are reduced with the next backward pass outside it. And the way to
        say that this model's gradients play no part, as those of a discriminator when its generator is trained.
        """
        return self._model_steps.automatic.suspended()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the module has
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None:
                raise
            return getattr(module, name)

    def state_dict(  # type: ignore[override]  # torch's stubs leave out the positional arguments it takes
        self,
        *args: Any,  # noqa: ANN401 - torch's own signature
        **kwargs: Any,  # noqa: ANN401 - as above
    ) -> dict[str, Any]:
        """The module's own state dict: it loads into the bare module and the other way round."""
        state: dict[str, Any] = self.module.state_dict(*args, **kwargs)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as above
        """Load a state dict of the module, on this instance only."""
        return self.module.load_state_dict(state_dict, *args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:  # noqa: ANN401 - as above
        """The module's parameters under its own names."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:  # noqa: ANN401 - as above
        """The module's buffers under its own names."""
        return self.module.named_buffers(*args, **kwargs)


def _inside_another_module(_model: nn.Module, state_dict: dict[str, Any], prefix: str, *_unused: object) -> None:
    """Before a module that holds the model loads: its children are found by attribute, so put that name in."""
    for key in [key for key in state_dict if key.startswith(prefix)]:
        state_dict[f"{prefix}module.{key.removeprefix(prefix)}"] = state_dict.pop(key)
