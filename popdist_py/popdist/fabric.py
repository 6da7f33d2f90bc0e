"""Lightning Fabric for a job of replicas: each replica has what one process of Fabric has.

Needs the package ``lightning``. One line changes: ``Fabric(strategy=popdist.fabric.FabricStrategy())``.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from types import SimpleNamespace
from typing import Any

import lightning
import torch
from lightning.fabric.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from popdist.errors import BatchError, WeightsError, whole_number
from popdist.job import context
from popdist.trainers.lightning_rows import ReplicaProcess, options_for_job, reduce_by, row_loader
from popdist.trainers.loop_turns import LoopTurns
from popdist.trainers.replica_steps import STATES_KEY, ReplicaSteps
from popdist.trainers.turn_loaders import TurnLoader
from popdist.trainers.versions import check_version

check_version(lightning)


_NO_MODEL = "no model was set up: call fabric.setup(model, optimizer) before the loop"


class FabricStrategy(ReplicaProcess, DDPStrategy):  # type: ignore[misc]  # Lightning has no types
    """A strategy of Lightning Fabric in which replicas take the place of processes.

    In a job of R replicas, replica r trains on the batches that Fabric gives to process r of R processes, and the
    weights are bitwise equal for any number of instances. A loop over a loader, while the model is in training
    mode, yields the batches of the instance's replicas one after the other: with ``accumulation=N`` the N batches
    of the first replica, then of the second one. ``optimizer.step()`` and ``fabric.clip_gradients()`` act at the
    last of these batches, and ``scheduler.step()`` at the batches of the last replica. ``len(loader)`` is the
    number of batches of one replica. In evaluation mode a loop yields the batches of all replicas of the instance,
    and ``len(loader)`` is their number. In a job of one replica, all is as in Fabric's DDPStrategy.

    Args:
        accumulation: The number of batches of each replica in an optimizer step.
        **options: As of ``lightning.fabric.strategies.DDPStrategy``.

    Raises:
        BatchError: For what is not the same for any number of instances: two calls of ``fabric.backward`` in one
            turn, a closure, ``fabric.all_reduce`` and ``fabric.all_gather`` in a training loop, gradients
            accumulated without ``accumulation``, loaders that deal no samples, numbers of batches that are no
            multiple of ``accumulation``.
        WeightsError: For a second model that is trained.
    """

    def __init__(self, accumulation: int = 1, **options: Any) -> None:
        super().__init__(**options_for_job(options, DDPStrategy))
        self.accumulation = whole_number("accumulation", accumulation, BatchError)
        self.steps: ReplicaSteps | None = None
        self._turns: LoopTurns | None = None
        if self.has_replicas:
            # without effect, because gradients are reduced at the last batch of a step
            self._backward_sync_control = SimpleNamespace(no_backward_sync=lambda *_module: nullcontext())

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The arguments of a DistributedSampler that deals samples to all replicas of the job."""
        return {"num_replicas": context.num_replicas(), "rank": context.local_replicas().start}

    @property
    def sync_gradients(self) -> bool:
        """Whether ``optimizer.step()`` updates weights now: at a step's last batch, or outside of a loop."""
        if self._turns is not None:
            self._turns.is_asked = True
        return self._acts

    @property
    def _acts(self) -> bool:
        return self._turns is None or self._turns.is_last

    def setup_module(self, module: nn.Module) -> Any:
        """Return a ReplicatedModel; ``module`` if not trained. Raises WeightsError for a second trained model."""
        if not self.has_replicas:
            return super().setup_module(module)
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return module
        if self.steps is not None:
            raise WeightsError(
                "popdist.fabric.FabricStrategy sets up one model that is trained, and this is the second one: "
                "put both into one nn.Module, or call requires_grad_(False) for a model that is not trained. For "
                "a model that is trained after the first one, make another Fabric with another FabricStrategy"
            )
        self.steps = ReplicaSteps(module)
        accumulate_by, asks_by = "popdist.fabric.FabricStrategy(accumulation=N)", "fabric.strategy.sync_gradients"
        self._turns = LoopTurns(self.steps, accumulate_by, asks_by)
        return self.steps.model

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return a loader of this instance's replicas' batches; ``dataloader`` itself if no change is needed."""
        if not self.has_replicas:
            return dataloader
        rows = row_loader(dataloader, lambda: self.steps, is_needed=False)
        if rows is None and context.num_local_replicas() == 1:
            return dataloader
        return FabricLoader(self, dataloader, rows)

    def turns(self, rows: Any) -> Iterator[Any]:
        """Yield each local replica's batches in turn; the loop's body then uses this replica's random states."""
        if self.steps is None or self._turns is None:
            raise BatchError(_NO_MODEL)
        if len(rows) % self.accumulation:
            raise BatchError(
                f"FabricStrategy(accumulation={self.accumulation}), and each replica has {len(rows)} batches, so "
                "the last step would be incomplete: choose a dataset or a batch_size that makes all steps complete"
            )
        taken = iter(rows)
        self.steps.begin_epoch()
        steps = iter(lambda: list(islice(taken, self.accumulation)), [])
        for content in self._turns.over(steps):
            self._turns.accumulates = self.accumulation > 1
            yield content

    def backward(self, tensor: Tensor, module: Any, *args: Any, **kwargs: Any) -> None:
        """Compute gradients of the loss ``tensor``; at the last batch of a step, reduce all replicas' gradients.

        Raises:
            BatchError: If the function is called twice in one turn, or no model was set up.
        """
        if self._turns is None and context.num_local_replicas() > 1:
            raise BatchError(_NO_MODEL)
        if self._turns is not None:
            self._turns.check_backward("fabric.backward")
        super().backward(tensor, module, *args, **kwargs)
        if self._turns is not None:
            self._turns.end_micro_batch()

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Update the weights, if the gradients of all replicas are complete.

        Raises:
            BatchError: For a closure, or if the turns of one step have different learning rates.
        """
        turns = self._turns
        if turns is None or not turns.is_running:
            return super().optimizer_step(optimizer, **kwargs)
        turns.begin_step(optimizer, kwargs.get("closure"))
        return super().optimizer_step(optimizer) if turns.is_last else None

    def clip_gradients_norm(self, *args: Any, **kwargs: Any) -> Any:
        """Clip the gradients of all replicas by their norm; do nothing before the last batch of a step."""
        if self._acts:
            return super().clip_gradients_norm(*args, **kwargs)
        return torch.zeros((), dtype=torch.float32, device=self.root_device)

    def clip_gradients_value(self, *args: Any, **kwargs: Any) -> None:
        """Clip the gradients of all replicas by value; do nothing before the last batch of a step."""
        if self._acts:
            super().clip_gradients_value(*args, **kwargs)

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce ``tensor`` over the instances; as in Lightning with gloo, a mean of integers is truncated.

        Raises:
            BatchError: In a training loop, if this instance has several replicas; as :meth:`all_gather`.
        """
        self._check_collective("fabric.all_reduce")
        return reduce_by(super().all_reduce, tensor, group, reduce_op)

    def all_gather(self, *args: Any, **kwargs: Any) -> Any:
        """Return all instances' tensors, stacked. Raises BatchError in a loop of several local replicas."""
        self._check_collective("fabric.all_gather")
        return super().all_gather(*args, **kwargs)

    def _check_collective(self, name: str) -> None:
        if self._turns is not None:
            self._turns.check_collective(name, may_be_over=True)

    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint with the random states of all replicas."""
        if self.steps is not None:
            state = {**state, STATES_KEY: self.steps.gather_states()}
        super().save_checkpoint(path, state, *args, **kwargs)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint, which may come from a job with another number of instances."""
        rest: dict[str, Any] = super().load_checkpoint(path, *args, **kwargs)
        if (states := rest.pop(STATES_KEY, None)) is not None and self.steps is not None:
            self.steps.randomness.load_state_dict(states)
        return rest


class FabricLoader(TurnLoader):
    """A loader that :class:`FabricStrategy` has set up.

    Args:
        strategy: Begins and ends the turns.
        loader: The program's loader.
        rows: Yields one batch for each replica of this instance; None if ``loader`` deals no samples to replicas.
    """

    _frames = 3  # one more for Fabric's own loader

    def __init__(self, strategy: FabricStrategy, loader: DataLoader[Any], rows: Any) -> None:
        super().__init__(lambda: strategy.steps)
        self.dataset, self.batch_size, self.drop_last = loader.dataset, loader.batch_size, loader.drop_last
        self.batch_sampler = None if rows is None else rows.batch_sampler
        self._strategy, self._loader, self._rows = strategy, loader, rows

    def lengths(self) -> tuple[int, int]:
        """Return the number of batches of one replica, and of all local replicas."""
        if self._rows is None:
            return len(self._loader), len(self._loader)
        return len(self._rows), len(self._rows) * context.num_local_replicas()

    def train(self) -> Iterator[Any]:
        """Begin a training loop. Raises BatchError if the program's loader deals no samples to replicas."""
        if self._rows is None:
            raise BatchError(
                "the loader deals no samples to replicas: use a DataLoader with a batch_size, over a dataset with "
                "a length, and fabric.setup_dataloaders(loader) with use_distributed_sampler=True"
            )
        return self._strategy.turns(self._rows)

    def evaluate(self) -> Iterator[Any]:
        """Begin an evaluation on the batches of all local replicas."""
        if self._strategy.steps is not None:
            self._strategy.steps.draw_of_loader()  # as each process of Fabric does
        return iter(self._loader) if self._rows is None else self._evaluated()

    def _evaluated(self) -> Iterator[Any]:
        """Yield each local replica's batches in turn; the loop's body draws the replica's random numbers."""
        steps = self._strategy.steps
        for row in self._rows:
            for replica, batch in zip(context.local_replicas(), row, strict=True):
                with nullcontext() if steps is None else steps.scope_of(replica):
                    yield batch
