"""The model of a data-parallel job: an ordinary module whose gradients are reduced over all replicas."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from popdist.data.randomness import checked_seed
from popdist.data.shard_randomness import give_parts_numbers
from popdist.errors import MOST_PARTS, BatchError, WeightsError, check_flags, whole_number
from popdist.gradients.buffers import check_buffers
from popdist.gradients.clipping import clip_grad_norm_
from popdist.gradients.flat_buffers import check_gradient_dtype
from popdist.gradients.step_headers import MeanOrSum
from popdist.ground.accelerators import accelerator
from popdist.ground.local_tensors import is_distributed
from popdist.job import context
from popdist.job.weights import broadcast_weights
from popdist.step.training.batch_norm import group_norms
from popdist.step.training.ddp_answers import ATTRIBUTES, refuse_module, refuse_options, refuse_wrappers
from popdist.step.training.micro_batches import Nest, Split, to_device
from popdist.step.training.model_steps import ModelSteps, WholeStep
from popdist.step.training.norm_sync import check_group_size
from popdist.step.training.pipeline import Arguments, pipeline_of
from popdist.step.training.wrapping_model import WrappingModel

R = TypeVar("R")


class ReplicatedModel(WrappingModel):
    """A wrapper of ``module`` in which each step's gradient is the mean over all replicas of the job.

    The wrapper gives all instances the weights of instance 0, and calls ``popdist.init()`` if the program has not.
    Everything else is the module's own: ``forward``, the keys of ``state_dict``, the names of parameters and
    buffers, and any attribute that this class does not have. The loop to write, with any torch optimizer::

        model = popdist.ReplicatedModel(Net())
        for batch in loader:
            for x, y in model.micro_batches(batch):
                loss_fn(model(x), y).backward()
            optimizer.step()

    The bits of the weights depend on the replicas and the accumulation, not on the number of instances. Each
    replica draws random numbers (Python's, numpy's and torch's) from its own states. Every replica starts a step
    from the same buffers. After the step a floating-point buffer is the mean over the replicas, any other buffer
    has the value of replica 0. Outside the loop, an instance with one replica reduces the gradients at the end of
    ``backward()``; an instance with several replicas raises ``BatchError``.

    Args:
        module: Any module; its parameters and buffers are changed in place on instances other than 0.
        seed: The seed of the replicas' random states, equal on all instances. None, only for a job of one replica:
            the replica uses the program's own random states, as in a loop without popdist.
        check_finite: Check each micro batch's gradient for NaN and infinity; every instance then raises
            ``GradientError``. Do not use this with a GradScaler, which expects NaN and infinity.
        strict_bits: Raise ``BatchError`` if the number of local replicas is no power of two.
        gradient_dtype: ``torch.bfloat16`` or ``torch.float16``: each replica's weighted gradient and each sum of
            replicas is rounded to this dtype; then the mean is taken, and ``.grad`` has the parameter's dtype. It
            halves the bytes on a network. In float16 a value above 65504 becomes infinity. None rounds nothing.
        num_local_replicas: Number of this instance's replicas of this model, in a program started without poprun:
            one process, torchrun, mpiexec. The same number on all instances. Loaders of popdist and
            ``popdist.num_replicas()`` know only the number of the job. None for the number of the job.
        batch_norm_group_size: So many consecutive replicas share the statistics of BatchNorm layers, as if their
            samples were one batch. The number must divide the model's replicas. If it is greater than 1 and an
            instance has several replicas, the loop is :meth:`run_micro_batches`. 1 changes no layer.
        **ddp_options: Options of DistributedDataParallel; for each the error says what to write instead.

    Raises:
        WeightsError: If the instances have different modules, or the module cannot be replicated: it reduces
            gradients already, is cut over instances of several replicas, is lazy, or has a BatchNorm layer that
            cannot share statistics; and for an option of DistributedDataParallel.
        GradientError: If ``gradient_dtype`` is another dtype.
        CollectiveError: If the other arguments differ between instances.
        BatchError: If a number is not possible, or ``strict_bits`` refuses the number of local replicas.
        ContractError, BackendError: As ``popdist.init()``.
    """

    _title = "ReplicatedModel"
    _advice = ATTRIBUTES
    _not_after = (
        "after the module was wrapped, so instances may have different weights: change the module before "
        "ReplicatedModel(module); or change model.module on all instances, then call "
        "popdist.broadcast_weights(model), and make the optimizer then"
    )

    def __init__(  # noqa: PLR0913 - each argument is an option of the user
        self,
        module: nn.Module,
        seed: int | None = 0,
        *,
        num_local_replicas: int | None = None,
        check_finite: bool = False,
        strict_bits: bool = False,
        gradient_dtype: torch.dtype | None = None,
        batch_norm_group_size: int = 1,
        **ddp_options: object,
    ) -> None:
        super().__init__()
        refuse_options(ddp_options)
        check_flags(BatchError, check_finite=check_finite, strict_bits=strict_bits)
        if num_local_replicas is not None:
            num_local_replicas = whole_number(
                "num_local_replicas", num_local_replicas, BatchError, maximum=MOST_PARTS
            )
        layout = context.environment().layout_of_model(num_local_replicas)
        num_local = layout.num_local_replicas
        if strict_bits and num_local & (num_local - 1):
            raise BatchError(
                f"strict_bits=True, and {num_local} local replicas are no power of two: choose --num-replicas and "
                "--num-instances so that their quotient is one"
            )
        if not isinstance(module, nn.Module):
            raise WeightsError(f"ReplicatedModel wraps a torch.nn.Module, and this is a {type(module).__name__}")
        refuse_wrappers(ReplicatedModel)
        refuse_module(module)
        seed = checked_seed(seed, layout.num_replicas)
        gradient_dtype = check_gradient_dtype(gradient_dtype)
        norm_size = check_group_size(batch_norm_group_size, layout.num_replicas)
        context.ensure_init()
        accelerator.use_device_of(module)
        context.data_parallel_group().agree(
            f"ReplicatedModel(seed={seed}, num_local_replicas={num_local}, {check_finite=}, {strict_bits=}, "
            f"{gradient_dtype=}, batch_norm_group_size={norm_size})"
        )
        if any(map(is_distributed, module.parameters())):
            give_parts_numbers()
        self.module = module
        self.register_load_state_dict_pre_hook(_inside_another_module)  # type: ignore[no-untyped-call]  # torch's
        broadcast_weights(module)
        group_norms(module, norm_size)
        self._model_steps = ModelSteps(
            module,
            layout,
            seed=seed,
            checks_finite=check_finite,
            gradient_dtype=gradient_dtype,
            norm_size=norm_size,
        )
        self._model_steps.automatic.watch()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass of the wrapped module, and return its result."""
        steps: ModelSteps = self._model_steps
        module: Any = steps.module  # self.module takes ten times longer
        if steps.automatic.is_watchful:
            if torch.is_grad_enabled():
                steps.automatic.watch()
            if steps.layout.num_replicas > 1:
                return steps.forward(partial(module, *args, **kwargs))
        return module(*args, **kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the wrapped module, as ``torch.nn.Module.compile`` does; popdist's part is not compiled."""
        self.module.compile(*args, **kwargs)

    def run_micro_batches(  # noqa: PLR0913 - the arguments are those of micro_batches(), and the function
        self,
        batch: Nest,
        body: Callable[..., R],
        accumulation: int = 1,
        *,
        reduction: MeanOrSum = "mean",
        weights: Sequence[float] | None = None,
        split: Split | None = None,
        add: bool = False,
    ) -> list[R]:
        """Call ``body`` for each micro batch of this instance; then ``.grad`` is the gradient over all replicas.

        This does the work of the loop of :meth:`micro_batches`, with the inside of the loop as a function, so that
        replicas can wait for each other in the middle of the function::

            def body(x, y):
                loss = loss_fn(model(x), y)
                loss.backward()
                return loss.detach()

            losses = model.run_micro_batches(batch, body)

        With ``batch_norm_group_size`` and several local replicas in a group, these replicas compute in turns, each
        in a thread: one replica runs at a time, up to a BatchNorm layer or its end, then the next replica, in
        order, with its random states, buffers and gradients. Each thread begins with the caller's grad mode,
        autocast and context variables; other modes of torch that belong to a thread do not reach ``body``: enter
        these modes in ``body``. The activations of a group's local replicas are in memory together.

        Args:
            batch: As of :meth:`micro_batches`, and so are the other arguments and the errors.
            body: Called with a micro batch, whose items are its arguments if it is a tuple or list. It does the
                forward and backward passes of one replica.
            accumulation: See ``batch``.
            reduction: See ``batch``.
            weights: See ``batch``; greater than 0 with samples where groups share statistics.
            split: See ``batch``.
            add: See ``batch``.

        Returns:
            The results of ``body`` for the micro batches with samples, replica by replica.

        Raises:
            MicroBatchError: Also if replicas of a group do not call the same BatchNorm layers equally often.
            BaseException: An exception that ``body`` raises; the step is abandoned on every instance.
        """
        if not callable(body):
            raise BatchError(
                f"run_micro_batches(batch, {body!r}): body is called with each micro batch, as a function of its "
                "items that computes the loss and calls backward()"
            )
        step = WholeStep(batch, accumulation, reduction, weights, split, add)
        return self._model_steps.run_micro_batches(step, body)

    def pipeline_step(  # noqa: PLR0913 - the arguments of micro_batches(), and the schedule
        self,
        schedule: Any,
        batch: Nest,
        accumulation: int = 1,
        *,
        arguments: Arguments | None = None,
        share_losses: bool = False,
        reduction: MeanOrSum = "mean",
        add: bool = False,
    ) -> Tensor | None:
        """Run a pipeline schedule over this replica's samples; then ``.grad`` is the gradient over all replicas.

        The model's module is this instance's stage, or ``nn.ModuleList`` of its stages. All instances of the
        replica call this with the same batch::

            stages = popdist.device_mesh()["pipeline"]
            stage = PipelineStage(layers, stages.get_local_rank(), stages.size(), device, group=stages.get_group())
            schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=loss_fn)
            model = popdist.ReplicatedModel(layers)
            for batch in loader:
                losses = model.pipeline_step(schedule, batch)
                optimizer.step()

        The schedule adds the gradients of its micro batches one after another, in its own order, and divides the
        sum by their number, unless it was made with ``scale_grads=False``. Then the sums of the replicas are added
        as in ``micro_batches``, each with the weight of its samples. Within ``torch.no_grad()`` the schedule only
        evaluates: there are losses, no gradients, and nothing is exchanged with other replicas.

        Args:
            schedule: A schedule of torch.distributed.pipelining, made with a ``loss_fn``.
            batch: As of :meth:`micro_batches`. The batch of a loader with ``accumulation=8`` has the micro batches
                of a schedule with ``n_microbatches=8``, or of two runs of a schedule with 4. Without accumulation
                the schedule cuts the samples itself. All micro batches must have one size, in all steps: make the
                loader with ``drop_last=True``.
            accumulation: How often the schedule runs for each replica, if the batch is no loader's.
            arguments: A function from samples of the batch to the inputs of the first stage, keyword arguments for
                all stages, and the target. None if the samples are tuples of inputs with the target at the end.
            share_losses: Give the losses to all instances of the replica, which wait for its last stage.
            reduction: As of :meth:`micro_batches`; ``"sum"`` for sums over samples, with ``scale_grads=False``.
            add: As of :meth:`micro_batches`.

        Returns:
            The losses of the replica's micro batches, in float64, if its last stage is here; None elsewhere.

        Raises:
            BatchError: Also if the stages are on other instances than this replica's, or the micro batches differ.
            WeightsError: Also if a stage has no parameters, other parameters than the model, or another stage's.
            OptimizerError: In the closure of an optimizer, as LBFGS takes one.
        """
        steps: ModelSteps = self._model_steps
        pipeline, number = pipeline_of(steps.pipelines, schedule, steps.module), steps.layout.num_local_replicas
        split = partial(pipeline.runs, number, accumulation, arguments)
        num_runs = pipeline.num_runs(batch, number, accumulation)
        if torch.is_grad_enabled():
            step = WholeStep(batch, num_runs, reduction, None, split, add)
            runs = steps.run_micro_batches(step, partial(pipeline.run, schedule.step))
        else:
            runs = [pipeline.evaluate(schedule, to_device(it, steps.gradients.device)) for it in split(batch)]
        return pipeline.losses(runs, number * num_runs * pipeline.num_micro_batches, share=share_losses)

    def micro_batch(
        self, index: int, *, weight: float = 1.0, accumulation: int = 1
    ) -> AbstractContextManager[None]:
        """Return a context in which this process runs micro batch ``index`` as its replica, for your own loop.

        ``micro_batches`` is made of such contexts and :meth:`reduce_gradients`. A step is all of an instance's
        micro batches, or fewer, in order, each with any number of backward passes::

            for i, (x, y) in enumerate(parts):
                with model.micro_batch(i, weight=len(x)):
                    loss_fn(model(x), y).backward()
            model.reduce_gradients()

        The first context removes the gradients from before, as ``micro_batches`` does; :meth:`reduce_gradients`
        can add them again. An exception in a context abandons the step, as in ``micro_batches``.

        Args:
            index: Among this instance's micro batches, replica by replica: local replica x accumulation + step.
            weight: The weight of the gradient, at least 0; 0 drops the gradient.
            accumulation: Micro batches of each replica in this step.

        Raises:
            BatchError: If there is no such micro batch, it is done already, or the weight is negative.
        """
        index = whole_number("index", index, BatchError, minimum=0)
        accumulation = whole_number("accumulation", accumulation, BatchError, maximum=MOST_PARTS)
        return self._model_steps.micro_batch(index, weight, accumulation)

    def reduce_gradients(self, reduction: MeanOrSum = "mean", *, add: bool = False) -> None:
        """End a step: set ``.grad`` to the mean or sum (see ``reduction``) over all replicas; make buffers equal.

        Micro batches that were left out count as empty. Every instance must call this, even without a micro batch.

        Args:
            reduction: ``"mean"`` divides the sum of the weighted gradients by the sum of the weights; ``"sum"``
                does not.
            add: As in ``micro_batches``.

        Raises:
            BatchError: If the weights of the whole job add up to 0; and as ``micro_batches``.
        """
        self._model_steps.reduce_gradients(reduction, add=add)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale all gradients to a norm of at most ``max_norm``: see ``popdist.clip_grad_norm_``."""
        return clip_grad_norm_(
            self.module.parameters(), max_norm, norm_type, error_if_nonfinite=error_if_nonfinite
        )

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which ``backward()`` outside of micro batches leaves gradients unreduced.

        As under DistributedDataParallel, the next backward pass outside the context reduces them. Use the context
        also if this model's gradients play no part, as for a discriminator while its generator is trained.
        """
        return self._model_steps.automatic.suspended()

    def state_dict(  # type: ignore[override]  # torch's stubs leave out the positional arguments it takes
        self,
        *args: Any,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the state dict of the wrapped module, which the module and this model can load.

        Raises:
            WeightsError: While the buffers hold what a pass in training mode outside of the loop wrote, unless
                ``keep_vars`` asks for the model's own tensors.
        """
        if not kwargs.get("keep_vars"):
            check_buffers(self.module)
        state: dict[str, Any] = self.module.state_dict(*args, **kwargs)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a state dict of the wrapped module, on this instance only."""
        loaded = self.module.load_state_dict(state_dict, *args, **kwargs)
        self._model_steps.buffers.clear_outside_writes()
        return loaded


def _inside_another_module(_model: nn.Module, state_dict: dict[str, Any], prefix: str, *_unused: object) -> None:
    """Put ``module.`` into the model's keys in ``state_dict``, before a module around the model loads it."""
    for key in [key for key in state_dict if key.startswith(prefix)]:
        state_dict[f"{prefix}module.{key.removeprefix(prefix)}"] = state_dict.pop(key)
