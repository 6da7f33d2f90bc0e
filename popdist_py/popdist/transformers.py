"""transformers' Trainer for a job of replicas: each replica has what one process of the Trainer has.

Needs the packages ``transformers`` and ``accelerate``. One line changes: ``from popdist.transformers import
Trainer``, or ``class MyTrainer(popdist.transformers.Replicated, SFTTrainer)`` for another library's Trainer.
"""

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice, zip_longest
from math import fsum
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.data_loader import BatchSamplerShard, DataLoaderShard
from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers.trainer_utils import get_last_checkpoint

from popdist.accelerate import Accelerator
from popdist.errors import BatchError, PopdistWarning
from popdist.job import context
from popdist.trainers.replica_rows import Row
from popdist.trainers.replica_steps import in_replica_order
from popdist.trainers.versions import check_version

check_version(transformers)

_Base: Any = object
"""The base class of the mixin, in place of the Trainer with which the mixin is combined, for type checkers."""

_REFUSED = {
    "auto_find_batch_size": "instances would find different batch sizes: choose per_device_train_batch_size",
    "batch_eval_metrics": "a batch of an evaluation contains a batch of each instance",
    "deepspeed": "DeepSpeed makes the steps itself",
    "eval_use_gather_object": "an evaluation would keep samples that an instance repeats",
    "fsdp": "FSDP cuts the model over processes",
    "parallelism_config": "replicas are whole models",
}
"""The arguments of TrainingArguments that a Trainer of replicas refuses, each with the reason."""


_GATHER_METRICS_ONLY = tuple(f"trl.trainer.{name}_trainer" for name in ("sft", "dpo", "reward"))
"""The modules of TRL whose ``compute_loss`` gathers metrics, and nothing that its loss needs."""


class Replicated(_Base):
    """A mixin for a ``transformers.Trainer``, in whose training replicas take the place of processes.

    In a job of R replicas, replica r trains on the batches that the Trainer gives to process r of R processes, and
    the weights and the logged losses are bitwise equal for any number of instances. Steps, epochs, learning rates,
    logs and checkpoints are counted in steps of the job. An evaluation deals its batches to the instances, and a
    batch's random numbers follow from the batch's samples. A checkpoint can be resumed with another number of
    instances. In a job of one replica, all is as in transformers.

    Raises:
        BatchError: For what is not the same for any number of instances, before the first step: the arguments
            ``deepspeed``, ``fsdp``, ``parallelism_config``, ``auto_find_batch_size``, ``batch_eval_metrics``,
            ``eval_use_gather_object``, ``eval_do_concat_batches=False``; several GPUs by DataParallel; a batch
            sampler that deals batches to processes; a subclass that replaces a method of the mixin for the batches
            of a training.
    """

    accelerator: Accelerator
    gather_function: Any

    def create_accelerator_and_postprocess(self) -> None:
        """Create the Trainer's accelerator, popdist's Accelerator in a job of several replicas."""
        self._has_replicas = context.num_replicas() > 1
        if not self._has_replicas:
            super().create_accelerator_and_postprocess()
            return
        _refuse(self.args)
        _refuse_overridden(type(self))
        context.ensure_init()
        super().create_accelerator_and_postprocess()
        Accelerator.take_over(self.accelerator)
        self.gather_function = self.accelerator.gather_for_metrics  # of the new class
        self.accelerator.gathers_later = type(self).compute_loss.__module__ in _GATHER_METRICS_ONLY
        self._resumed_from: Path | None = None
        self._replica = 0  # the local replica that trains now

    def get_train_dataloader(self) -> Any:
        """Return the training loader, which yields rows: lists with one batch for each local replica."""
        if not self._has_replicas:
            return super().get_train_dataloader()
        self.accelerator.deals_rows = True
        try:
            loader = super().get_train_dataloader()
        finally:
            self.accelerator.deals_rows = False
        if not isinstance(loader, DataLoaderShard):
            raise BatchError(
                f"get_train_dataloader() returned {type(loader).__name__}, whose batches all replicas would get: "
                "return self.accelerator.prepare(loader)"
            )
        return loader

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, *args: Any
    ) -> tuple[list[Any], Any]:
        """Return a step's rows of micro batches, and None: the number of items is stored for each replica."""
        if not self._has_replicas:
            return super().get_batch_samples(epoch_iterator, num_batches, *args)  # type: ignore[no-any-return]
        rows = list(islice(epoch_iterator, num_batches))
        if not rows:
            return [], None
        count = super().get_batch_samples
        numbers = [count(iter(contents), len(rows), *args)[1] for contents in zip(*rows, strict=True)]
        is_shared = self.args.average_tokens_across_devices
        self._items = [sum(numbers)] * len(numbers) if is_shared and None not in numbers else numbers
        micro_batches, width = in_replica_order(rows), len(rows[0])
        return [Row(micro_batches[start : start + width]) for start in range(0, len(micro_batches), width)], None

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Run the Trainer's ``training_step`` for each micro batch of the row ``inputs``; return the mean loss."""
        step = super().training_step
        if not self._has_replicas:
            return step(model, inputs, num_items_in_batch)  # type: ignore[no-any-return]  # the Trainer has no types
        losses = []
        for micro_batch in inputs:
            replica = self._replica = micro_batch.index // micro_batch.accumulation
            try:
                with self._steps.micro_batch(micro_batch) as content, self._numbers.watched():
                    losses.append(step(model, content, self._items[replica]))
            finally:
                self._replica = 0
            self._losses.add(replica, losses[-1])
        return torch.stack(losses).mean()

    @property
    def _steps(self) -> Any:
        return self.accelerator.replica_steps

    def floating_point_ops(self, inputs: Any) -> int:
        """Return the number of floating-point operations of the micro batches of a row."""
        count = super().floating_point_ops
        contents = [it.content for it in inputs] if isinstance(inputs, Row) else [inputs]
        return sum(count(content) for content in contents)

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does; a checkpoint may come from a job with another number of instances."""
        train = super().train
        if not self._has_replicas:
            return train(resume_from_checkpoint, *args, **kwargs)
        folder = resume_from_checkpoint
        if folder is True:
            folder = get_last_checkpoint(self.args.output_dir)
        self._resumed_from = Path(folder) if folder else None
        self._losses, self._numbers = _ReplicaLosses(self), _ChangedNumbers(self)
        together = _Together(self)  # after the program's callbacks, whose wishes it shares
        self.add_callback(together)
        try:
            output = train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self.remove_callback(together)
        return output._replace(training_loss=output.metrics["train_loss"])

    def load_random_states(self, *, is_within_epoch: bool) -> None:
        """Load the replicas' random states in a resumed training; if ``is_within_epoch``, as the epoch begins."""
        if self._resumed_from is not None:
            load = self._steps.resume if is_within_epoch else self._steps.load
            load(self._resumed_from)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:  # noqa: FBT001, FBT002 - the Trainer's signature
        """Save the model; in a checkpoint, also the random states of all replicas."""
        super().save_model(output_dir, _internal_call)
        if self._has_replicas and _internal_call and output_dir is not None and self._steps is not None:
            self._steps.save(Path(output_dir))

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate or predict as the Trainer does, but divide a batch's loss by the batch's own number of tokens.

        (The Trainer of several processes divides by the tokens of all processes' batches at this time, so its loss
        of an evaluation depends on the number of processes.)
        """
        loop = super().evaluation_loop
        if not self._has_replicas:
            return loop(*args, **kwargs)
        arguments = self.args
        if self.gather_function == self.accelerator.gather:  # Seq2SeqTrainer's, which keeps repeated samples
            self.gather_function = self.accelerator.gather_for_metrics
        is_shared, arguments.average_tokens_across_devices = arguments.average_tokens_across_devices, False
        try:
            with self.accelerator.counting_instances():
                self._num_repeated = _num_repeated(args[0] if args else kwargs["dataloader"])
                return loop(*args, **kwargs)
        finally:
            arguments.average_tokens_across_devices = is_shared

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the Trainer's ``prediction_step``, in which TRL's metrics describe this instance's batch."""
        step = super().prediction_step
        if not self._has_replicas:
            return step(*args, **kwargs)
        self.accelerator.is_predicting = True
        try:
            return step(*args, **kwargs)
        finally:
            self.accelerator.is_predicting = False

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Replace the losses in ``logs`` by the means over all replicas, and log ``logs`` as the Trainer does.

        Of the logs that a program's ``compute_loss`` writes, an instance keeps the logs of its first replica.
        """
        if self._has_replicas and self._replica > 0:
            return
        if self._has_replicas and self.is_in_train:
            self._losses.put_in(logs)
        if self._has_replicas and self.accelerator.gathers_later:
            self._share_metrics(logs)
        super().log(logs, *args, **kwargs)

    def _share_metrics(self, logs: dict[str, float]) -> None:
        """Replace each of TRL's metrics by the mean over the job's batches, but ``num_tokens`` by the sum."""
        if _is_of_training(logs) or any(name.endswith("runtime") for name in logs):
            metrics = self._metrics["train" if self.model.training else "eval"]
            num_repeated = 0 if self.model.training else self._num_repeated
            of_instances = gather_object([dict(metrics)])
            for name in metrics:
                dealt = zip_longest(*(of_instance.get(name, ()) for of_instance in of_instances))
                values = [value for turn in dealt for value in turn if value is not None]
                if name == "num_tokens":
                    metrics[name] = [sum(values)]
                else:
                    counted = values[: len(values) - num_repeated]
                    metrics[name] = [fsum(counted) / len(counted)]


def _num_repeated(loader: Any) -> int:
    """Return the number of an evaluation's batches that repeat batches, so that each instance has as many."""
    dealt = getattr(loader, "batch_sampler", None)
    if not isinstance(dealt, BatchSamplerShard):
        return 0
    return len(dealt) * int(dealt.num_processes) - len(dealt.batch_sampler)


class Trainer(Replicated, transformers.Trainer):
    """``transformers.Trainer`` with replicas in place of processes: see :class:`Replicated`."""


class _Together(transformers.TrainerCallback):
    """A callback that lets all instances stop, save, evaluate and log at the same step, if one instance asks."""

    def __init__(self, trainer: Replicated) -> None:
        self._trainer = trainer
        self._group = context.data_parallel_group()

    def on_train_begin(self, args: Any, state: Any, _control: Any, **_kwargs: Any) -> None:
        """Check that the instances train with equal arguments, and load the random states of a resumed training.

        A training that is resumed within an epoch loads the states as it reads the first batches.

        Raises:
            CollectiveError: If instances have different arguments.
        """
        values = {name: getattr(state, name) for name in _OF_STATE} | {
            name: getattr(args, name) for name in _OF_ARGS
        }
        self._group.agree("Trainer.train(" + ", ".join(f"{name}={value}" for name, value in values.items()) + ")")
        if state.epoch is not None:
            self._trainer.load_random_states(is_within_epoch=state.epoch != int(state.epoch))

    def on_step_end(self, _args: Any, _state: Any, control: Any, **_kwargs: Any) -> Any:
        """Stop, save, evaluate and log on all instances if a callback of one instance asks for it."""
        if len(self._group.instances) > 1:
            own = [int(getattr(control, name)) for name in _WISHES]
            wishes = self._group.start("share the wishes of callbacks", own).wait()
            for name, of_instances in zip(_WISHES, zip(*wishes, strict=True), strict=True):
                setattr(control, name, any(of_instances))
        return control

    on_substep_end = on_epoch_end = on_evaluate = on_save = on_step_end

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_kwargs: Any) -> Any:
        """Share the callbacks' wishes to stop, save, evaluate or log, after a log that all instances write."""
        return self.on_step_end(args, state, control) if _is_of_training(logs) else control


_WISHES = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
"""The attributes of TrainerControl with which a callback can ask to stop, save, evaluate or log."""

_OF_STATE = ("max_steps", "num_train_epochs", "logging_steps", "eval_steps", "save_steps")
_OF_ARGS = ("gradient_accumulation_steps", "per_device_train_batch_size", "learning_rate", "max_grad_norm", "seed")
"""The attributes of TrainerState and TrainingArguments that must be equal on all instances."""


def _is_of_training(logs: dict[str, float]) -> bool:
    """Whether ``logs`` are the Trainer's own log of its training, which it writes on all instances."""
    return logs.keys() >= {"loss", "learning_rate"} or logs.keys() >= {"train_loss", "train_runtime"}


class _ReplicaLosses:
    """The sum of losses of each local replica since the last log, which the Trainer has for each process."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._sums = torch.zeros(context.num_local_replicas(), dtype=torch.float32, device="cpu")
        self._total = 0.0
        self._first_step: int | None = None
        self._last_step = 0

    def add(self, replica: int, loss: Tensor) -> None:
        """Add the loss of a micro batch of the local replica ``replica``."""
        trainer = self._trainer
        if self._first_step is None:
            self._first_step = self._last_step = trainer.state.global_step
        if trainer.args.logging_nan_inf_filter and not torch.isfinite(loss):
            loss = self._sums[replica] / (1 + trainer.state.global_step - self._last_step)
        self._sums[replica] += loss.cpu()

    def put_in(self, logs: dict[str, float]) -> None:
        """Replace this instance's losses in ``logs`` by all replicas' mean losses; all instances call this."""
        if not _is_of_training(logs):
            return
        device, step = self._trainer.args.device, self._trainer.state.global_step
        sums = self._trainer.accelerator.gather(self._sums.to(device))
        if "loss" in logs:
            mean = sums.mean().item()
            logs["loss"] = mean / max(step - self._last_step, 1)
            self._total += mean
            self._last_step = step
            self._sums.zero_()
        else:
            steps = step - (self._first_step or 0)
            rest = sums[0].item()  # the Trainer, too, adds the rest of process 0 alone
            logs["train_loss"] = (self._total + rest) / max(steps, 0.001)


class _ChangedNumbers:
    """The numbers that a program keeps in attributes of its Trainer, and how often replicas have changed each."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._num_changes: Counter[str] = Counter()
        self._num_left = 12 if context.num_local_replicas() > 1 else 0  # of the micro batches to watch

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A context for a micro batch of one replica, which warns of a number that every replica has changed."""
        self._num_left -= 1
        before = self._now() if self._num_left >= 0 else {}
        yield
        now = self._now() if before else {}
        for name in [it for it in before.keys() & now.keys() if now[it] != before[it]]:
            self._num_changes[name] += 1
            if self._num_changes[name] == _ENOUGH_CHANGES:
                kind = type(self._trainer).__name__
                warnings.warn(
                    f"{kind}.{name} changes for each replica that an instance trains, so its value depends on the "
                    "number of instances: count steps by self.state.global_step, or in a callback's on_step_end",
                    PopdistWarning,
                    stacklevel=3,  # past contextlib
                )

    def _now(self) -> dict[str, str]:
        """Return the text of each number, by the attribute's name; the text of NaN is always the same."""
        values = {name: it for name, it in vars(self._trainer).items() if name not in _COUNTED}
        numbers = {name: it for name, it in values.items() if isinstance(it, int | float)}
        tensors = {name: it.item() for name, it in values.items() if isinstance(it, Tensor) and it.numel() == 1}
        return {name: repr(it) for name, it in (numbers | tensors).items()}


_COUNTED = ("_replica", "_total_train_tokens")
"""The attributes that each replica changes rightly: popdist's own, and TRL's, whose sum ``log`` logs."""

_ENOUGH_CHANGES = 3
"""The number of micro batches that have changed a number, before a warning names this number."""


def _refuse(args: Any) -> None:
    """Raise BatchError if TrainingArguments ``args`` make it impossible that replicas replace processes."""
    for name, reason in _REFUSED.items():
        if getattr(args, name, None):
            raise BatchError(
                f"TrainingArguments({name}=...): {reason}. Leave {name} out, or use transformers.Trainer"
            )
    if not args.eval_do_concat_batches:
        raise BatchError(
            "eval_do_concat_batches=False returns one item for the batches of all instances: leave it out"
        )
    if args.accelerator_config.split_batches:
        raise BatchError(
            "accelerator_config with split_batches: the Trainer would weight an evaluation's losses by whole "
            "batches. Leave split_batches out, and choose the batch sizes of one replica"
        )
    if args.n_gpu > 1:
        raise BatchError(
            f"the Trainer would use {args.n_gpu} GPUs by DataParallel: start one instance for each GPU with "
            "poprun, which shows each instance its own GPU"
        )
    if getattr(args, "include_num_input_tokens_seen", "no") not in ("no", False):
        raise BatchError("include_num_input_tokens_seen counts the tokens of one replica only: leave it out")
    if getattr(args, "train_sampling_strategy", "") == "batch_rebalance":
        raise BatchError(
            "train_sampling_strategy='batch_rebalance' deals batches to processes: choose another one"
        )


def _refuse_overridden(kind: type[Replicated]) -> None:
    """Raise BatchError if ``kind`` overrides a method that would get the training batches of several replicas."""
    for name in ("get_train_dataloader", "get_batch_samples", "training_step"):
        if getattr(kind, name) is not getattr(Replicated, name):
            raise BatchError(
                f"{kind.__name__}.{name} would get the batches of several replicas: define {name} in a subclass "
                f"Mine of transformers.Trainer, and write class {kind.__name__}(Replicated, Mine)"
            )
