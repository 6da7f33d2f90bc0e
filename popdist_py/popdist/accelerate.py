"""accelerate's Accelerator for a job of replicas: each replica has what one process of accelerate has.

Needs the package ``accelerate``. One line changes: ``from popdist.accelerate import Accelerator``.
"""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.data_loader import BatchSamplerShard, DataLoaderShard
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import recursively_apply
from torch import Tensor, nn
from torch.utils.data import BatchSampler, IterableDataset

from popdist.errors import BatchError, PopdistWarning, WeightsError
from popdist.job import context
from popdist.step.training.replicated_model import ReplicatedModel
from popdist.trainers.evaluated_batches import (
    SeededStream,
    WholeRows,
    num_counted_batches,
    repeats_samples,
    seeded_options,
)
from popdist.trainers.given_loaders import refuse_loader, seed_sampler, source_of
from popdist.trainers.loop_turns import LoopTurns
from popdist.trainers.replica_rows import ReplicaScopes, RowSampler, RowStream, options_of, row_options
from popdist.trainers.replica_steps import ReplicaSteps
from popdist.trainers.turn_loaders import ONE_LOOP, PreparedLoader
from popdist.trainers.versions import check_version

check_version(accelerate)

_REPEATED = (
    "accelerator.gather() keeps samples that are repeated in an evaluation's last batches. Another number of "
    "instances repeats other samples. Call accelerator.gather_for_metrics(), which leaves them out"
)
_ACCUMULATE = "Accelerator(gradient_accumulation_steps=N) and `with accelerator.accumulate(model):`"


class Accelerator(accelerate.Accelerator):
    """accelerate's Accelerator, in whose loop replicas take the place of processes.

    In a job of R replicas, replica r trains on the batches that accelerate gives to process r of R processes, and
    the weights are bitwise equal for any number of instances. A loop over a prepared loader, while the model is in
    training mode, yields the batches of the instance's replicas one after the other. ``sync_gradients`` is True at
    the last batch of an optimizer step, so that ``optimizer.step()`` and ``scheduler.step()`` act only there.
    Count steps by ``sync_gradients``. ``len(loader)`` is the number of batches of one replica, and
    ``num_processes`` is the number of replicas. While the model is in evaluation mode, a loader gives each batch
    to one instance, as accelerate gives each batch to one process; random numbers follow from the batch's samples.
    In a job of one replica, all is as in accelerate.

    Args:
        *args: As of ``accelerate.Accelerator``, and so are the keyword arguments.

    Raises:
        BatchError: For what is not the same for any number of instances: FSDP, DeepSpeed, Megatron-LM, parallelism
            inside a replica, ``dispatch_batches=True``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        context.ensure_init()
        super().__init__(*args, **kwargs)
        self._begin_replicas()

    @classmethod
    def take_over(cls, accelerator: accelerate.Accelerator) -> None:
        """Make ``accelerator``, which another library has made and not used yet, an Accelerator of popdist."""
        accelerator.__class__ = cls
        accelerator._begin_replicas()  # noqa: SLF001 - it has this class now

    def _begin_replicas(self) -> None:
        self.num_replicas = context.num_replicas()
        self.replica_steps: ReplicaSteps | None = None
        self.deals_rows = self.gathers_later = self.is_predicting = False
        self._counts_instances = self._drops_repeated = self._may_train_another = self._shares_trigger = False
        self.loop_turns: LoopTurns | None = None
        self._loaded_from: Path | None = None
        if self.num_replicas > 1:
            self._refuse_engines()
            self.register_save_state_pre_hook(self._save_states)
            self.register_load_state_pre_hook(self._load_states)

    def _refuse_engines(self) -> None:
        """Raise BatchError if an option lets another library, such as DeepSpeed, make the optimizer steps."""
        kind = str(self.distributed_type).rpartition(".")[-1]
        if kind not in ("NO", "MULTI_CPU", "MULTI_GPU"):
            raise BatchError(
                f"popdist.accelerate.Accelerator with {kind}: another engine would make the steps. Leave out its "
                "plugin, or use accelerate.Accelerator"
            )
        if self.parallelism_config is not None:
            raise BatchError("popdist.accelerate.Accelerator takes no parallelism_config: leave it out")
        if self.dispatch_batches:
            raise BatchError(
                "dispatch_batches=True lets process 0 read the data of all processes: leave it out, and each "
                "instance reads the batches of its replicas"
            )

    @property
    def num_processes(self) -> int:
        """The number of replicas, each of which takes the place of a process."""
        return int(super().num_processes) if self._counts_instances else context.num_replicas()

    @property
    def use_distributed(self) -> bool:
        """Whether the job has several replicas, each of which takes the place of a process."""
        return context.num_replicas() > 1

    @contextmanager
    def counting_instances(self) -> Iterator[None]:
        """A context in which ``num_processes`` counts instances, because an evaluation deals to instances."""
        self._counts_instances = True
        try:
            yield
        finally:
            self._counts_instances = False

    @property
    def sync_gradients(self) -> bool:
        """Whether the program's ``optimizer.step()`` updates weights in this iteration of its loop."""
        if self.loop_turns is not None:
            self.loop_turns.is_asked = True
        return bool(self.gradient_state.sync_gradients)

    @sync_gradients.setter
    def sync_gradients(self, acts: bool) -> None:
        self.gradient_state.sync_gradients = acts

    @property
    def is_last_process(self) -> bool:
        """Whether this instance is the last instance of the job."""
        return bool(self.process_index == super().num_processes - 1)

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,  # noqa: FBT001 - accelerate's signature
        evaluation_mode: bool = False,  # noqa: FBT001, FBT002 - accelerate's signature
    ) -> nn.Module:
        """Prepare ``model`` as accelerate does, with ReplicatedModel in place of DistributedDataParallel.

        Raises:
            WeightsError: If a model was prepared before this one, and :meth:`free_memory` was not called since:
                the steps of two models cannot be told apart.
        """
        is_trained = any(parameter.requires_grad for parameter in model.parameters()) and not evaluation_mode
        if self.num_replicas == 1 or not is_trained or isinstance(model, ReplicatedModel):
            prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode=evaluation_mode)
            return prepared
        if self.replica_steps is not None and self.replica_steps.model.module is not model:
            if not self._may_train_another:
                raise WeightsError(
                    "popdist.accelerate.Accelerator prepares one model that is trained, and this is the second: "
                    "put both into one nn.Module, or prepare the other one with evaluation_mode=True. If the "
                    "first trains no more, call accelerator.free_memory() before"
                )
            self.replica_steps = None
        prepared = super().prepare_model(model, device_placement, evaluation_mode=True)
        self._may_train_another = False
        if self.replica_steps is None:
            self.replica_steps = ReplicaSteps(prepared, reads_ahead=True)
            self.loop_turns = LoopTurns(self.replica_steps, _ACCUMULATE, "accelerator.sync_gradients")
        return self.replica_steps.model

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Return the module inside a prepared model."""
        inner = model.module if isinstance(model, ReplicatedModel) else model
        unwrapped: nn.Module = super().unwrap_model(inner, *args, **kwargs)
        return unwrapped

    def prepare_data_loader(
        self,
        data_loader: Any,
        device_placement: bool | None = None,  # noqa: FBT001 - accelerate's signature
        slice_fn_for_dispatch: Any = None,
    ) -> Any:
        """Prepare a loader, which in training yields the batches of this instance's replicas, and in an evaluation
        this instance's share of all batches.

        Raises:
            BatchError: If the sampler of the loader deals samples to processes already, or replicas would have
                different numbers of batches.
        """
        if self.num_replicas == 1 or isinstance(data_loader, PreparedLoader):
            return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        refuse_loader(data_loader)
        if not self.use_seedable_sampler:
            seed_sampler(data_loader)
        dispatches, self.dataloader_config.dispatch_batches = self.dataloader_config.dispatch_batches, False
        try:
            with self.counting_instances():
                dealt = super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        finally:
            self.dataloader_config.dispatch_batches = dispatches
        rows = self._rows(data_loader, dealt)
        loader = rows if self.deals_rows else PreparedLoader(self, self._seeded(data_loader, dealt), rows)
        self._dataloaders[-1] = loader
        return loader

    def _seeded(self, loader: Any, dealt: Any) -> Any:
        """Return a loader that deals to instances the batches of an evaluation, which are the same for any number
        of instances. Replicas share or drop batches as ``num_replicas`` processes would.
        """
        if isinstance(loader.dataset, IterableDataset):
            return self._shard(dealt, **self._stream_options(SeededStream, loader))
        source = source_of(dealt.batch_sampler)
        if self.split_batches:
            source = BatchSampler(source.sampler, source.batch_size // self.num_replicas, source.drop_last)
        if loader.drop_last:
            source = WholeRows(source, self.num_replicas)
        num_instances, even = int(super().num_processes), self.even_batches
        shard = BatchSamplerShard(source, num_instances, self.process_index, even_batches=even)
        return self._shard(dealt, **seeded_options(loader, shard), _drop_last=loader.drop_last)

    @staticmethod
    def _shard(dealt: Any, **options: Any) -> Any:
        synchronized = {name: getattr(dealt, name) for name in ("device", "rng_types", "synchronized_generator")}
        return DataLoaderShard(**synchronized, **options)

    def _rows(self, loader: Any, dealt: Any) -> Any:
        """Return a loader that yields rows: lists with one batch of ``loader`` for each local replica."""
        if isinstance(loader.dataset, IterableDataset):
            options = self._stream_options(RowStream, loader)
        else:
            scopes = self._scopes(loader)
            options = row_options(loader, scopes, self._row_sampler(dealt.batch_sampler, scopes))
        keeps_repeated = loader.drop_last or context.num_local_replicas() > 1
        return self._shard(dealt, **options, _drop_last=keeps_repeated)

    def _scopes(self, loader: Any) -> ReplicaScopes:
        return ReplicaScopes(lambda: self.replica_steps, loader.worker_init_fn)

    def _stream_options(self, kind: type[RowStream], loader: Any) -> dict[str, Any]:
        size = (loader.batch_size or 1) // (self.num_replicas if self.split_batches else 1)
        scopes = self._scopes(loader)
        stream = kind(loader.dataset, size, loader.drop_last, loader.collate_fn, scopes)
        return {**options_of(loader), "dataset": stream, "batch_size": None}

    def _row_sampler(self, batch_sampler: Any, scopes: ReplicaScopes) -> RowSampler:
        source = source_of(batch_sampler)
        shards = [
            partial(
                BatchSamplerShard,
                num_processes=self.num_replicas,
                process_index=replica,
                split_batches=self.split_batches,
                even_batches=self.even_batches,
            )
            for replica in range(self.num_replicas)
        ]
        numbers = {len(shard(source)) for shard in shards}
        if len(numbers) > 1:
            raise BatchError(
                f"even_batches=False, and the replicas would have {min(numbers)} or {max(numbers)} batches: "
                "choose even_batches=True, or a loader with drop_last=True"
            )
        return RowSampler(source, [shards[it] for it in scopes.replicas], scopes)

    def prepare_optimizer(
        self,
        optimizer: Any,
        device_placement: bool | None = None,  # noqa: FBT001 - accelerate's signature
    ) -> Any:
        """Prepare an optimizer whose ``step()`` updates weights only when all replicas' gradients are complete."""
        prepared = super().prepare_optimizer(optimizer, device_placement)
        if self.num_replicas == 1 or not isinstance(prepared, AcceleratedOptimizer):
            return prepared
        own = _Optimizer(prepared.optimizer, device_placement=False, scaler=prepared.scaler)
        own.owner = self
        self._optimizers[-1] = own
        return own

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare a scheduler that advances as often as accelerate's would with one process for each replica."""
        prepared = super().prepare_scheduler(scheduler)
        if isinstance(prepared, AcceleratedScheduler) and context.num_local_replicas() > 1:
            prepared = _Scheduler(
                prepared.scheduler, prepared.optimizers, prepared.step_with_optimizer, prepared.split_batches
            )
            self._schedulers[-1] = prepared
        return prepared

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """A context in which gradients accumulate over ``gradient_accumulation_steps`` batches of each replica."""
        if self.loop_turns is None or not self.loop_turns.is_running:
            with super().accumulate(*models):
                yield
            return
        self.loop_turns.accumulates = True
        yield

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip the gradients of a step as accelerate does; before the last turn of the step, do nothing."""
        if self.loop_turns is None or self.loop_turns.is_last:
            super().clip_grad_value_(parameters, clip_value)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context that does nothing for a ReplicatedModel, which reduces once in each step anyway."""
        if isinstance(model, ReplicatedModel):
            return nullcontext()
        unsynchronised: AbstractContextManager[Any] = super().no_sync(model)
        return unsynchronised

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Compute gradients of ``loss``; at the last batch of an optimizer step, reduce all replicas' gradients.

        Raises:
            BatchError: If the function is called twice in one turn of a loop, or no model was prepared.
        """
        turns = self.loop_turns
        if turns is None and self.num_replicas > 1:
            raise BatchError(
                "no model was prepared: call accelerator.prepare(model, optimizer, loader) before the loop"
            )
        if turns is not None:
            turns.check_backward("accelerator.backward")
        super().backward(loss, **kwargs)
        if turns is not None and turns.is_running:  # else the Trainer ends its micro batches
            turns.end_micro_batch()

    def gather(self, tensor: Any) -> Any:
        """Gather as accelerate does for several processes: numbers become tensors with one dimension.

        In a model's call return ``tensor`` if ``log`` gathers metrics later. Raises BatchError in a training
        loop of several local replicas.
        """
        if self._gathers_later_now:
            return tensor
        self._check_collective("gather")
        loader = self.gradient_state.active_dataloader
        if not self._drops_repeated and repeats_samples(loader) and loader.end_of_dataloader:
            warnings.warn(_REPEATED, PopdistWarning, stacklevel=2)
        gathered = super().gather(tensor)
        return gathered if self.num_replicas == 1 else recursively_apply(torch.atleast_1d, gathered)

    def gather_for_metrics(self, input_data: Any, *args: Any, **kwargs: Any) -> Any:
        """Gather as accelerate does, without repeated samples; numbers, without the numbers of repeated batches.

        In a model's call return ``input_data`` if ``log`` gathers metrics later. Raises BatchError in a training
        loop of several local replicas.
        """
        if self._gathers_later_now:
            return input_data
        self._check_collective("gather_for_metrics")
        gather, self._drops_repeated = super().gather_for_metrics, True
        try:
            if isinstance(input_data, Tensor) and input_data.ndim == 0 and self.num_replicas > 1:
                return self.gather(input_data)[: num_counted_batches(self.gradient_state.active_dataloader)]
            return gather(input_data, *args, **kwargs)
        finally:
            self._drops_repeated = False

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Reduce ``tensor`` over the instances as accelerate does. Raises BatchError as :meth:`gather`."""
        self._check_collective("reduce")
        return super().reduce(tensor, *args, **kwargs)

    def set_trigger(self) -> None:
        """Ask all instances to stop, as in accelerate. Raises BatchError as :meth:`check_trigger`."""
        self._check_trigger("set_trigger")
        super().set_trigger()

    def check_trigger(self) -> bool:
        """Whether an instance has called :meth:`set_trigger`; all instances call the method.

        Raises:
            BatchError: Before the last batch of an optimizer step.
        """
        self._check_trigger("check_trigger")
        self._shares_trigger = True
        try:
            return bool(super().check_trigger())
        finally:
            self._shares_trigger = False

    def _check_trigger(self, name: str) -> None:
        if self.loop_turns is not None and not self.loop_turns.is_last:
            raise BatchError(
                f"accelerator.{name}() was called in the turn of one replica: call it where "
                "accelerator.sync_gradients is True, and decide by a popdist.Mean() of the losses"
            )

    def _check_collective(self, name: str) -> None:
        if self.loop_turns is not None and not self._shares_trigger:
            self.loop_turns.check_collective(f"accelerator.{name}")

    @property
    def _gathers_later_now(self) -> bool:
        is_training = self.replica_steps is not None and self.replica_steps.is_open
        return self.gathers_later and (is_training or self.is_predicting)

    def turns(self, rows: Any) -> Iterator[Any]:
        """Yield each local replica's batches in turn; the loop's body then uses this replica's random states."""
        turns: Any = self.loop_turns
        if turns.is_running:
            raise BatchError(f"a loop over a prepared loader began in another loop. {ONE_LOOP}")
        try:
            for content in turns.over(self._rows_of_steps(rows)):
                self.sync_gradients = turns.is_last
                yield content
        finally:
            self.sync_gradients = True

    def _rows_of_steps(self, rows: Any) -> Iterator[list[Any]]:
        step: list[Any] = []
        for row in rows:
            step.append(row)
            if len(step) == self.gradient_accumulation_steps or rows.end_of_dataloader:
                yield step
                step = []

    def free_memory(self, *objects: Any) -> Any:
        """Release the prepared objects as accelerate does; then another model can be prepared."""
        self._may_train_another = True
        return super().free_memory(*objects)

    def _save_states(self, _models: Any, _weights: Any, folder: str) -> None:
        """Save the random states of all replicas in ``folder``, the folder of accelerate's checkpoint."""
        if self.replica_steps is not None:
            self.replica_steps.save(Path(folder))

    def _load_states(self, _models: Any, folder: str) -> None:
        self._loaded_from = Path(folder)
        if self.replica_steps is not None:
            self.replica_steps.load(self._loaded_from)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return a loader without the first ``num_batches`` batches of each replica."""
        if not isinstance(dataloader, PreparedLoader):
            return super().skip_first_batches(dataloader, num_batches)
        if self._loaded_from is not None and self.replica_steps is not None:
            self.replica_steps.resume(self._loaded_from)
            self._loaded_from = None
        dealt, rows = (super(Accelerator, self).skip_first_batches(it, num_batches) for it in dataloader.loaders)
        return PreparedLoader(self, dealt, rows)


class _Optimizer(AcceleratedOptimizer):
    """accelerate's optimizer, whose ``step()`` first ends the open micro batch (one batch of one replica)."""

    owner: Accelerator

    def step(self, closure: Any = None) -> None:
        """Update the weights, if the gradients of all replicas are complete."""
        turns = self.owner.loop_turns
        if turns is not None and turns.is_running:
            turns.begin_step(self, closure)
        super().step(closure)


class _Scheduler(AcceleratedScheduler):
    """accelerate's scheduler, which in each step advances as often as if each replica were a process."""

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the learning rate scheduler, if the optimizer has updated the weights."""
        counts_processes = (
            self.step_with_optimizer and self.gradient_state.sync_gradients and not self.split_batches
        )
        for _ in range(context.num_local_replicas() if counts_processes else 1):
            super().step(*args, **kwargs)
