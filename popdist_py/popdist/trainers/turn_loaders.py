"""Loaders that yield the batches of local replicas in turn in a training, and a share of all in an evaluation."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from torch.utils.data import DataLoader

from popdist.errors import BatchError, PopdistWarning
from popdist.job import context
from popdist.job.instances import is_main
from popdist.trainers.evaluated_batches import seeded_turns
from popdist.trainers.replica_steps import ReplicaSteps


class TurnLoader(ABC):
    """A loader whose order of batches follows from the mode in which the model is when a loop begins.

    Args:
        steps: Returns the steps of the model; None before the program has given the model.
    """

    _frames: ClassVar = 2
    """The number of frames from this class's generator to the program's loop."""

    def __init__(self, steps: Callable[[], ReplicaSteps | None]) -> None:
        self._steps = steps
        self._evaluates: bool | None = None  # before the first loop
        self._told: int | None = None  # the length in a training, if the program may use it in an evaluation
        self._may_warn = True

    @abstractmethod
    def lengths(self) -> tuple[int, int]:
        """Return the number of batches of one replica, and of this instance's share in an evaluation."""

    @abstractmethod
    def train(self) -> Iterator[Any]:
        """Begin a training loop: yield the batches of this instance's replicas in turn."""

    @abstractmethod
    def evaluate(self) -> Iterator[Any]:
        """Begin an evaluation: yield this instance's share of the batches."""

    def __len__(self) -> int:
        """Return the number of batches of one replica; in an evaluation, of this instance's share.

        After the first loop, the mode in which the last loop began decides; before it, the mode of the model.
        """
        steps, evaluates = self._steps(), self._evaluates
        if evaluates is None:
            evaluates = steps is not None and not steps.is_training
        of_replica, of_share = self.lengths()
        if not evaluates and of_replica != of_share:
            self._told = of_replica
        return of_share if evaluates else of_replica

    def __iter__(self) -> Iterator[Any]:
        steps = self._steps()
        self._evaluates = steps is None or not steps.is_training
        if self._evaluates:
            released = None if steps is None else steps.release()
            return self._counted(self.evaluate(), lambda: None if steps is None else steps.reopen(released))
        self._may_warn = False  # the length was asked for the training
        return self.train()

    def _counted(self, batches: Iterator[Any], end: Callable[[], None]) -> Iterator[Any]:
        """Yield ``batches``, and call ``end``; then warn if the program knows another number of batches."""
        number = 0
        try:
            for number, batch in enumerate(batches, 1):  # noqa: B007 - the number is read after the loop
                yield batch
        finally:
            end()
        if self._may_warn and self._told not in (None, number) and is_main():
            self._may_warn = False
            warnings.warn(
                f"len(loader) was {self._told} before this evaluation, which has {number} batches here, because "
                f"the instance evaluates for {context.num_local_replicas()} replicas. Call len(loader) after "
                "model.eval(), or count the batches",
                PopdistWarning,
                stacklevel=self._frames,  # the line of the loop
            )


class PreparedLoader(TurnLoader):
    """A loader that popdist's Accelerator has prepared.

    An attribute that the class does not have is the attribute of accelerate's loader for the evaluation.

    Args:
        accelerator: The Accelerator of popdist.
        dealt: The loader of this instance's share in an evaluation.
        rows: Yields one batch for each replica of this instance.
    """

    def __init__(self, accelerator: Any, dealt: Any, rows: Any) -> None:
        super().__init__(lambda: accelerator.replica_steps)
        self.loaders = (dealt, rows)
        self._accelerator = accelerator

    def lengths(self) -> tuple[int, int]:
        """Return the number of batches of one replica, and of this instance's share in an evaluation."""
        dealt, rows = self.loaders
        return len(rows), len(dealt)

    def train(self) -> Iterator[Any]:
        """Begin a training loop of the Accelerator."""
        turns: Iterator[Any] = self._accelerator.turns(self.loaders[1])
        return turns

    def evaluate(self) -> Iterator[Any]:
        """Begin an evaluation. Raises BatchError inside an optimizer step."""
        steps = self._accelerator.replica_steps
        if steps is not None:
            if not (self._accelerator.loop_turns.is_last or steps.is_between_steps):
                raise BatchError(f"an evaluation began in the middle of an optimizer step. {ONE_LOOP}")
            steps.draw_of_loader()
        return seeded_turns(self.loaders[0])

    def __getattr__(self, name: str) -> Any:
        if name == "loaders":  # not set yet, while the loader is copied
            raise AttributeError(name)
        return getattr(self.loaders[0], name)

    @property  # type: ignore[misc]  # as accelerate's loaders do it
    def __class__(self) -> Any:
        """The class DataLoader, so that ``isinstance(loader, DataLoader)`` is true, as with accelerate."""
        return DataLoader

    def set_epoch(self, epoch: int) -> None:
        """Tell the samplers and the dataset the number of the epoch."""
        for loader in self.loaders:
            loader.set_epoch(epoch)


ONE_LOOP = (
    "Train on one loader, whose samples may contain samples of two datasets, and evaluate where "
    "accelerator.sync_gradients is True"
)
"""The advice to a program of accelerate that begins a loop inside another loop."""
