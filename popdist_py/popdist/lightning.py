"""Lightning's Trainer for a job of replicas: each replica has what one process of Lightning's Trainer has.

Needs the package ``lightning``. One line changes: ``Trainer(strategy=popdist.lightning.ReplicatedStrategy())``.
"""

import inspect
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, wraps
from typing import Any

import lightning
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor, nn
from torchmetrics import Metric

from popdist.errors import BatchError, PopdistWarning
from popdist.exchange.groups import refuse_in_turn, replicas_in_turn
from popdist.ground.torch_private_groups import num_collectives
from popdist.job import context
from popdist.job.instances import is_main
from popdist.trainers.lightning_rows import (
    ReplicaProcess,
    ReplicaRow,
    RowLoader,
    options_for_job,
    reduce_by,
    row_loader,
)
from popdist.trainers.replica_logs import LoggedValue, Logs, combine_logs
from popdist.trainers.replica_rows import ReplicaScopes
from popdist.trainers.replica_steps import STATES_KEY, ReplicaBatch, ReplicaSteps
from popdist.trainers.versions import check_version

check_version(lightning)


class ReplicatedStrategy(ReplicaProcess, DDPStrategy):  # type: ignore[misc]  # Lightning has no types
    """A strategy of Lightning's Trainer in which replicas take the place of processes.

    In a job of R replicas, replica r trains on the batches that Lightning gives to process r of R processes. The
    weights, and the values logged with ``sync_dist=True``, are bitwise equal for any number of instances. Steps,
    epochs and ``batch_idx`` are counted as with R processes. ``training_step``, ``validation_step`` and
    ``test_step`` are called once for each replica of this instance. Hooks with an argument ``batch`` get a
    ``ReplicaRow``, whose ``micro_batches`` are the batches of the replicas. Hooks get as ``outputs`` the result of
    this instance's first replica in training, and in evaluation a list of the results of several replicas. A
    checkpoint can be resumed with another number of instances. In a job of one replica, all is as in Lightning's
    DDPStrategy.

    Args:
        **options: As of ``lightning.pytorch.strategies.DDPStrategy``.

    Raises:
        BatchError: For what is not the same for any number of instances, before the first step: manual
            optimization, ``sync_batchnorm``, an IterableDataset, a sampler that deals samples to processes,
            several training loaders, ``on_before_batch_transfer``, ``optimizer_zero_grad``,
            StochasticWeightAveraging, a validation inside an optimizer step.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options_for_job(options, DDPStrategy))
        self._scopes = ReplicaScopes(self._steps_now)
        self._steps: ReplicaSteps | None = None
        self._saved_states: Any = None
        self._shared_names: set[str] = set()
        self._monitored: set[str] = set()  # the names of values by which callbacks and schedulers decide

    @property
    def _trainer(self) -> Any:
        return self.lightning_module.trainer

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The arguments of a DistributedSampler, which deals to replicas, but in a prediction to instances."""
        if self.has_replicas and not self._trainer.predicting:
            return {"num_replicas": context.num_replicas(), "rank": self._scopes.replicas.start}
        return {"num_replicas": context.num_instances(), "rank": context.instance_index()}

    def setup(self, trainer: Any) -> None:
        """Set up the model and the optimizers. Raises BatchError if replicas cannot replace processes here."""
        if self.has_replicas and trainer.state.fn == TrainerFn.FITTING:
            _refuse(trainer, self.lightning_module)
            for name in _HOOKS:
                setattr(self.lightning_module, name, self._then_share(getattr(self.lightning_module, name)))
        super().setup(trainer)

    def teardown(self) -> None:
        """Restore the module's own hooks, which :meth:`setup` has wrapped to share each wish to stop."""
        if self.lightning_module is not None:
            for name in _HOOKS:
                self.lightning_module.__dict__.pop(name, None)
        super().teardown()

    def _then_share(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls ``hook`` and then stops all instances if one instance is to stop."""

        @wraps(hook)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = hook(*args, **kwargs)
            self._share_wish_to_stop()
            return result

        return call

    def _share_wish_to_stop(self) -> None:
        """Stop the training on all instances if ``trainer.should_stop`` is true on one instance."""
        group = context.data_parallel_group()
        if len(group.instances) > 1:
            wishes = group.start("share the wish to stop", [int(self._trainer.should_stop)]).wait()
            self._trainer.should_stop = any(wish for (wish,) in wishes)

    def on_train_start(self) -> None:
        """Check that all instances train with equal arguments. Raises CollectiveError if the Trainers differ."""
        if self.has_replicas:
            _refuse_validation_inside_steps(self._trainer)
            values = ", ".join(f"{name}={getattr(self._trainer, name)}" for name in _OF_TRAINER)
            context.data_parallel_group().agree(f"Trainer({values}).fit({type(self.lightning_module).__name__})")
            self._share_wish_to_stop()
            schedulers = (it.monitor for it in self.lr_scheduler_configs if it.scheduler is not None)
            callbacks = (getattr(it, "monitor", None) for it in self._trainer.callbacks)
            self._monitored = {it for it in (*schedulers, *callbacks) if isinstance(it, str)}

    def on_validation_end(self) -> None:
        """Stop the training on all instances if one instance asks to stop after its validation."""
        if self.has_replicas:
            self._share_wish_to_stop()

    def _setup_model(self, model: nn.Module) -> Any:
        if not self.has_replicas:
            return super()._setup_model(model)
        self._steps = ReplicaSteps(model)
        return self._steps.model

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return a loader that yields one batch for each replica of this instance at once.

        Raises:
            BatchError: If the loader of a training does not give each replica its own samples.
            CollectiveError: If the instances have loaders of different lengths.
        """
        trainer = self._trainer
        if not self.has_replicas or trainer.predicting:
            if self.has_replicas and trainer.limit_predict_batches != 1.0 and is_main():
                warnings.warn(_LIMITED, PopdistWarning, stacklevel=2)
            return dataloader
        rows = row_loader(dataloader, self._steps_now, is_needed=trainer.training)
        length = None if rows is None else len(rows)
        context.data_parallel_group().agree(
            f"a loader of {length} batches for Lightning's stage {trainer.state.stage.value}"
        )
        if rows is None:
            return dataloader
        if trainer.training:
            return RowLoader(rows, self._begin_epoch, self._accumulation)
        return RowLoader(rows, self._begin_evaluation, lambda _position: 1)

    def _steps_now(self) -> ReplicaSteps | None:
        """Return the ReplicaSteps; None in Lightning's sanity check, which must not change random states."""
        return None if self._trainer.sanity_checking else self._steps

    def _accumulation(self, position: int) -> int:
        """Return the number of batches in the optimizer step that begins at the batch ``position`` of an epoch."""
        left = self._trainer.num_training_batches - position
        return max(0, min(int(self._trainer.accumulate_grad_batches), int(left)))

    def _begin_epoch(self, first: int) -> None:
        """Begin an epoch at its batch ``first``; in a resumed training, load the replicas' random states."""
        if self._steps is None:
            return
        if not first:
            self._load_states()
        self._steps.begin_epoch()
        self._load_states()

    def _begin_evaluation(self, _first: int) -> None:
        """Draw from each replica's random state the seed that a DataLoader draws when an evaluation begins."""
        if (steps := self._steps_now()) is not None:
            steps.draw_of_loader()

    def _load_states(self) -> None:
        states, self._saved_states = self._saved_states, None
        if states is not None and self._steps is not None:
            self._steps.randomness.load_state_dict(states)

    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        """Move the batch of each replica in ``batch`` to the device, with the random state of the replica."""
        move = super().batch_to_device
        if not isinstance(batch, ReplicaRow):
            return move(batch, device, dataloader_idx)
        for place, micro_batch in enumerate(batch.micro_batches):
            with self._scopes.of(batch.replica(micro_batch)):
                converted = self.precision_plugin.convert_input(micro_batch.content)
                batch.micro_batches[place] = replace(micro_batch, content=move(converted, device, dataloader_idx))
        return batch

    def training_step(self, batch: Any, *args: Any) -> Any:
        """Call ``training_step`` and ``backward`` for each local replica; Lightning calls the last ``backward``.

        Raises:
            BatchError: If ``batch`` is not from a loader of rows, or ``training_step`` returned None.
        """
        if not self.has_replicas:
            return super().training_step(batch, *args)
        if not isinstance(batch, ReplicaRow):
            raise BatchError(
                f"training_step would get {type(batch).__name__} and not the batches of one DataLoader: "
                "put several datasets into one, and take a batch and not dataloader_iter as the argument"
            )
        *earlier, last = batch.micro_batches
        for micro_batch in earlier:
            output = self._forward(batch, micro_batch, args)
            loss = output["loss"] if isinstance(output, Mapping) else output
            self.backward(loss / self._trainer.accumulate_grad_batches, self.optimizers[0])
        output = self._forward(batch, last, args)
        if last.is_last:
            for logs in batch.logs_of_batches():
                self._log(combine_logs(logs))
        return batch.as_of_first_replica(output)

    def _forward(self, row: ReplicaRow, micro_batch: ReplicaBatch, args: tuple[Any, ...]) -> Any:
        """Begin a micro batch, and return the result of the program's ``training_step`` for the micro batch."""
        steps: Any = self._steps
        steps.begin(micro_batch)
        with steps.abandoning(), self._recording(row, micro_batch):
            batch_idx = (row.batch_idx(micro_batch),) if args else ()
            output = super().training_step(micro_batch.content, *batch_idx)
            if output is None:
                raise BatchError("training_step returned None, and each replica needs a loss: return a loss")
        row.keep_output(micro_batch, output)
        return output

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the gradients of a loss; after a step's last loss, reduce the gradients of all replicas.

        The hooks ``on_after_backward`` are called then, because they read the gradients of all replicas.
        """
        if self._steps is None:
            reduced: Tensor = super().backward(closure_loss, optimizer, *args, **kwargs)
            return reduced
        plugin, module = self.precision_plugin, self.lightning_module
        with self._steps.abandoning():
            loss: Tensor = plugin.pre_backward(closure_loss, module)
            plugin.backward(loss, module, optimizer, *args, **kwargs)
        self._steps.end()
        if self._steps.is_between_steps:
            loss = plugin.post_backward(loss, module)
        return loss.detach()

    def validation_step(self, *args: Any) -> Any:
        """Return the list of ``validation_step``'s results for all local replicas, or the only one's result."""
        return self._evaluate(super().validation_step, *args)

    def test_step(self, *args: Any) -> Any:
        """Return the list of ``test_step``'s results for all local replicas, or the only one's result."""
        return self._evaluate(super().test_step, *args)

    def _evaluate(self, step: Any, batch: Any, *args: Any) -> Any:
        if not isinstance(batch, ReplicaRow):
            return step(batch, *args)
        outputs = []
        for micro_batch in batch.micro_batches:
            scope = self._scopes.of(batch.replica(micro_batch))
            with scope, self._recording(batch, micro_batch), self._in_turn():
                outputs.append(step(micro_batch.content, *args))
        for logs in batch.logs_of_batches():
            self._log(combine_logs(logs))
        if len(outputs) == 1:
            return outputs[0]
        return None if all(output is None for output in outputs) else outputs

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        """A context in which one replica computes; with several in the instance, collectives raise an error."""
        number = num_collectives()
        if len(self._scopes.replicas) > 1:
            replicas_in_turn.add(self)
        try:
            yield
            if self in replicas_in_turn and num_collectives() > number:
                refuse_in_turn(None, "a collective of torch.distributed")
        finally:
            replicas_in_turn.discard(self)

    @contextmanager
    def _recording(self, row: ReplicaRow, micro_batch: ReplicaBatch) -> Iterator[None]:
        """A context in which the module's ``log`` stores a micro batch's values in ``row``, for combine_logs.

        The loggers of the Trainer get only the values that the program logs for this instance's first replica.
        """
        module, trainer = self.lightning_module, self._trainer
        loggers, is_first = trainer.loggers, row.replica(micro_batch) == self._scopes.replicas.start
        log, logs = module.log, row.logs_of(micro_batch)

        def record(*args: Any, **kwargs: Any) -> None:
            options = _signature_of(type(module).log).bind(*args, **kwargs).arguments
            name, value = options.pop("name"), options.pop("value")
            if isinstance(value, Metric):  # it keeps its own sums, and a step's value is the first replica's
                if is_first:
                    log(*args, **kwargs)
                return
            logs[name] = self._logged(name, value, options, micro_batch.content)

        module.log = record
        if not is_first:
            trainer.loggers = [DummyLogger() for _ in loggers]
        try:
            yield
        finally:
            trainer.loggers = loggers
            del module.log

    def _logged(self, name: str, value: Any, options: dict[str, Any], content: Any) -> LoggedValue:
        if isinstance(value, Mapping) or options.pop("sync_dist_group", None) is not None:
            raise BatchError(f"self.log({name!r}, ...): log a number for all replicas, without sync_dist_group")
        if isinstance(value, Tensor):
            value = value.detach()
        size = options.pop("batch_size", None)
        is_summed = options.get("on_epoch")
        is_counted = not self._trainer.training if is_summed is None else is_summed
        if size is None and (is_counted or not self._monitored.isdisjoint((name, f"{name}_step"))):
            size = extract_batch_size(content)
        reduction = options.get("reduce_fx", "mean")
        word = str(getattr(reduction, "__name__", reduction)).lower().replace("avg", "mean")
        return LoggedValue(value, size, options.pop("sync_dist", False), word, options)

    def _log(self, logs: Logs) -> None:
        for name, logged in logs.items():
            if logged.is_shared and name not in self._shared_names:  # Lightning would advise sync_dist=True
                self._shared_names.add(name)
                warnings.filterwarnings("ignore", rf".*self\.log\('{re.escape(name)}'.*sync_dist=True")
            self.lightning_module.log(name, logged.value, batch_size=logged.size, **logged.options)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce ``tensor`` over the instances; as in Lightning with gloo, a mean of integers is truncated."""
        return reduce_by(super().reduce, tensor, group, reduce_op)

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint with the random states of all replicas. A checkpoint inside an optimizer step has no
        random states, and no training can be resumed from this checkpoint.
        """
        if self._steps is not None:
            checkpoint[STATES_KEY] = self._steps.gather_states() if self._steps.is_between_steps else {}
        super().save_checkpoint(checkpoint, *args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint, which may come from a job with another number of instances.

        Raises:
            BatchError: If the training would go on inside an optimizer step.
        """
        loaded: dict[str, Any] = super().load_checkpoint(*args, **kwargs)
        if self._trainer.state.fn == TrainerFn.FITTING:
            self._saved_states = loaded.get(STATES_KEY)
            if self._saved_states == {}:
                raise BatchError(
                    "the checkpoint was saved in the middle of an optimizer step, where no training can go on: "
                    "choose a checkpoint saved after a multiple of accumulate_grad_batches batches"
                )
        return loaded


_LIMITED = (
    "limit_predict_batches limits the batches of each instance, so the number of predicted samples depends on the "
    "number of instances: leave it out, and give the loader fewer samples"
)

_HOOKS = ("on_train_epoch_start", "on_train_batch_end", "on_train_epoch_end")
"""The hooks of a LightningModule after which Lightning looks whether to stop the training."""

_OF_TRAINER = (
    "max_steps",
    "max_epochs",
    "accumulate_grad_batches",
    "num_training_batches",
    "num_val_batches",
    "val_check_batch",
    "check_val_every_n_epoch",
    "gradient_clip_val",
    "gradient_clip_algorithm",
)
"""The attributes of Lightning's Trainer that must be equal on all instances."""

_REFUSED = {
    "on_before_batch_transfer": "on_before_batch_transfer would get the batches of all replicas: "
    "use on_after_batch_transfer",
    "optimizer_zero_grad": "optimizer_zero_grad has no effect, as each step makes new gradients: leave it out",
}
"""The hooks of Lightning that a program cannot have, and what to do without each."""


def _refuse(trainer: Any, module: Any) -> None:
    """Raise BatchError if ``trainer`` or ``module`` uses a feature of Lightning that replicas cannot have."""
    reason = next((reason for hook, reason in _REFUSED.items() if _overrides(trainer, module, hook)), None)
    if not module.automatic_optimization:
        reason = (
            "automatic_optimization=False makes the steps itself: use automatic optimization, with one optimizer"
        )
    elif trainer.strategy._layer_sync is not None:  # noqa: SLF001 - Lightning says it nowhere else
        reason = "sync_batchnorm=True adds over processes and not over replicas: leave it out"
    elif any(isinstance(callback, StochasticWeightAveraging) for callback in trainer.callbacks):
        reason = "StochasticWeightAveraging reads the data without steps: use Lightning's WeightAveraging"
    if reason is not None:
        raise BatchError(f"popdist.lightning.ReplicatedStrategy with {context.num_replicas()} replicas: {reason}")


@cache
def _signature_of(method: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of ``method``, a function of a class, without ``self``."""
    return inspect.Signature(list(inspect.signature(method).parameters.values())[1:])


def _overrides(trainer: Any, module: Any, hook: str) -> bool:
    """Whether the program has its own method ``hook``, in its module or its LightningDataModule."""
    owners = ((module, LightningModule), (trainer.datamodule, LightningDataModule))
    return any(getattr(type(it), hook, None) not in (None, getattr(base, hook, None)) for it, base in owners)


def _refuse_validation_inside_steps(trainer: Any) -> None:
    """Raise BatchError if a validation would begin before all batches of an optimizer step were taken."""
    every, accumulation = trainer.val_check_batch, trainer.accumulate_grad_batches
    if trainer.enable_validation and every and every < trainer.num_training_batches and every % accumulation:
        raise BatchError(
            f"a validation after each {every} batches would begin inside an optimizer step of {accumulation} "
            "batches: choose a val_check_interval that is a multiple of accumulate_grad_batches"
        )
