"""The optimizer steps of all replicas in a training loop of another library, such as accelerate."""

import hashlib
import io
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import popdist.step.checks  # noqa: F401 - makes the checks of steps
from popdist.data.randomness import ReplicaRandomness
from popdist.errors import BatchError, PopdistWarning
from popdist.job import context
from popdist.job.collectives import gather_bytes
from popdist.job.instances import is_main
from popdist.step.checks.tensor_changes import UntrackedBuffers
from popdist.step.training.replicated_model import ReplicatedModel

_FILE = "replica_random_states.bin"
"""The name of the file with the random states of all replicas, in the folder of a checkpoint."""
STATES_KEY = "popdist_replica_random_states"
"""The key of the random states of all replicas, in a checkpoint that is a dict."""

_HAS_ACTED = (
    "after a step has acted: then accelerator.sync_gradients, or Fabric's strategy.sync_gradients, is True"
)
LEFT = f"the loop over the loader was left in the middle of an optimizer step. Leave the loop {_HAS_ACTED}"
"""The text for a program that leaves the loop there: its results depend on the number of instances."""


@dataclass(frozen=True, slots=True)
class ReplicaBatch:
    """A batch of one replica, and its place among the micro batches of this instance's optimizer step."""

    content: Any
    index: int
    accumulation: int
    is_last: bool

    @property
    def is_of_last_replica(self) -> bool:
        """Whether the batch belongs to the last replica of this instance."""
        return self.index // self.accumulation == context.num_local_replicas() - 1


def in_replica_order(rows: Sequence[Sequence[Any]]) -> list[ReplicaBatch]:
    """Return the micro batches of one optimizer step: all batches of the first replica, then of the second one.

    Args:
        rows: One row for each accumulation step; a row has one batch for each local replica.
    """
    contents = [row[replica] for replica in range(len(rows[0])) for row in rows] if rows else []
    last = len(contents) - 1
    return [ReplicaBatch(content, index, len(rows), index == last) for index, content in enumerate(contents)]


class _ForwardMark:
    """A hook of a model's forward passes: it notes that the model computes, and begins a waiting micro batch."""

    is_set = False

    def __init__(self, steps: "ReplicaSteps") -> None:
        self._steps = weakref.ref(steps)

    def __call__(self, *_arguments: object) -> None:
        """Note the forward pass that begins; torch calls this."""
        if (steps := self._steps()) is not None and steps.is_training:
            steps.begin_waiting()
        self.is_set = True


class ReplicaSteps:
    """The optimizer steps of a model in another library's loop: replicas' micro batches, then one all-reduce.

    The gradient of a step is the mean over all replicas of each replica's own gradient, as DistributedDataParallel
    takes it over processes. A replica's random states begin as a copy of the process's states.

    Args:
        module: The model.
        reads_ahead: Whether the library reads a row of samples before the optimizer step that precedes the row.
    """

    def __init__(self, module: nn.Module, *, reads_ahead: bool = False) -> None:
        self.model = ReplicatedModel(module)
        self.replicas = context.local_replicas()
        self._has_states = False
        self._reads_ahead = reads_ahead
        self._before_read = ReplicaRandomness(0, self.replicas)  # the states before the last row was read
        self._last_read = 0
        self._resumed_from: Path | None = None
        self._saved: dict[int, Any] = {}
        self._open: ReplicaBatch | None = None
        self._last_of_step: ReplicaBatch | None = None
        self._waiting: ReplicaBatch | None = None  # until the model computes
        self._released: ReplicaBatch | None = None  # until the program has evaluated or saved
        self._has_computed = _ForwardMark(self)
        self.model.register_forward_pre_hook(self._has_computed)
        self._was_left = False
        self._may_watch = is_main() and context.num_replicas() > 1 and context.current_job().is_checked
        self._outside: UntrackedBuffers | None = None  # in the first step
        self._scope = ExitStack()

    @property
    def is_open(self) -> bool:
        """Whether a micro batch has begun and its gradient was not added yet."""
        return self._open is not None

    @property
    def is_training(self) -> bool:
        """Whether the model is in training mode, and torch computes gradients."""
        return self.model.module.training and torch.is_grad_enabled()

    @property
    def is_between_steps(self) -> bool:
        """Whether all micro batches of the last optimizer step have ended, and no step has begun since."""
        return self._open is None and self._last_of_step is None

    @property
    def is_untouched(self) -> bool:
        """Whether the first micro batch of a step has begun, and the model has not computed since."""
        return self._open is not None and self._open.index == 0 and not self._has_computed.is_set

    @property
    def randomness(self) -> ReplicaRandomness:
        """The random states of this instance's replicas; the first use copies the process's random states."""
        if not self._has_states:
            self._has_states = True
            self.model.randomness.begin_as_program(self._device)
        return self.model.randomness

    @property
    def _device(self) -> Any:
        return next(self.model.parameters()).device

    def scope_of(self, replica: int) -> AbstractContextManager[None]:
        """Return the context in which the process draws the random numbers of the replica ``replica``."""
        return self.randomness.of(replica, self._device)

    def scope_of_read(self, replica: int, number: int) -> AbstractContextManager[None]:
        """Return the context in which a row of samples of ``replica`` is read; ``number`` counts the epoch's rows.

        accelerate reads a row before the optimizer step that precedes the row. So in a training that is resumed
        within an epoch, the first row is read with other states than the row after it.
        """
        if not self._reads_ahead:
            return self.scope_of(replica)
        saved = self._saved.get(replica)
        if saved is None or number < saved["row"]:
            self._before_read.copy_from(self.randomness, replica)
            self._last_read = number
            return self.scope_of(replica)
        self._before_read.load_state_dict({replica: saved["before_read"]})
        self._restore(replica)
        return self._before_read.of(replica, self._device)

    def _restore(self, replica: int) -> None:
        self.randomness.load_state_dict({replica: self._saved.pop(replica)})

    def begin_epoch(self) -> None:
        """Begin an epoch. At the first call, copy the process's random states for each replica; at later calls,
        let each replica draw the seed that torch's DataLoader draws when it begins.
        """
        self.draw_of_loader()
        if not self._has_states:
            _check_seeds()
        _ = self.randomness
        if self._resumed_from is not None:
            self._saved = self._saved_in(self._resumed_from)
            self._resumed_from = None

    def draw_of_loader(self) -> None:
        """Draw from each replica's random state the seed that torch's DataLoader draws when it begins."""
        self._check_not_left()
        self._check_between_steps("a loop over a loader began")
        if self._has_states:
            for replica in self.replicas:
                with self.scope_of(replica):
                    next(iter(DataLoader(TensorDataset(torch.zeros(1, dtype=torch.float32, device="cpu")))))

    def begin(self, micro_batch: ReplicaBatch) -> None:
        """Begin a micro batch; until :meth:`end`, the process computes as the replica that has this batch."""
        for replica in list(self._saved):  # workers have read the rows
            self._restore(replica)
        _ = self.randomness
        scope = self.model.micro_batch(
            micro_batch.index, weight=1 / context.num_replicas(), accumulation=micro_batch.accumulation
        )
        self._scope.enter_context(scope)
        self._open, self._has_computed.is_set = micro_batch, False
        if self._may_watch:
            self._may_watch, self._outside = False, UntrackedBuffers()

    def end(self, *, add: bool = False) -> None:
        """End the open micro batch, if there is one. After the last micro batch of a step, set ``.grad`` to the
        mean of all replicas' gradients, or add the mean if ``add``.
        """
        self._release_waiting()
        ended, self._open, self._released = self._open, None, None
        if ended is not None:
            self._scope.close()
            self._last_of_step = None if ended.is_last else ended
            if ended.is_last:
                self._close_outside(warns=True)
                self.model.reduce_gradients("sum", add=add)

    def _close_outside(self, *, warns: bool) -> None:
        """End the watch over buffers of modules outside of the model, such as a loss's; it lasts one step."""
        outside, self._outside = self._outside, None
        if outside is not None:
            outside.close(warns=warns)

    def abandon(self) -> None:
        """Discard the step that has begun, if there is one, so that no instance gets a gradient of the step."""
        last, self._last_of_step = self._last_of_step, None
        self._release_waiting()
        self._close_outside(warns=False)
        if self._open is None and last is not None:
            self.begin(replace(last, index=last.index + 1))
        if self._open is not None:
            self._open = None
            self._scope.__exit__(BatchError, BatchError(LEFT), None)

    def release(self) -> ReplicaBatch | None:
        """Discard a step that :attr:`is_untouched`, and return its micro batch for :meth:`reopen`; else None.

        So a program may evaluate or save at the beginning of the loop's body, before a batch of the step is used.
        """
        released = self._release_waiting()
        if self.is_untouched:
            released = self._open
            self.abandon()
        self._released = released
        return released

    def _release_waiting(self) -> ReplicaBatch | None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._scope.close()
        return waiting

    def reopen(self, released: ReplicaBatch | None) -> None:
        """Draw random numbers as the replica of a released micro batch, which begins when the model computes.

        Do nothing for None, or if the loop has gone on since :meth:`release`.
        """
        if released is not None and self._released is released:
            self._waiting, self._released = released, None
            self._scope.enter_context(self.scope_of(self.replicas[released.index]))

    def begin_waiting(self) -> None:
        """Begin the micro batch that waits for the model to compute, if there is one."""
        if (waiting := self._release_waiting()) is not None:
            self.begin(waiting)

    def exit(self) -> None:
        """End a training loop; if it ends inside an optimizer step, discard the step and refuse further loops."""
        self._was_left = self._last_of_step is not None
        self.abandon()

    def _check_not_left(self) -> None:
        if self._was_left:
            raise BatchError(LEFT)

    def _check_between_steps(self, what: str) -> None:
        """Raise BatchError if an optimizer step has begun and has not ended; ``what`` names the refused action."""
        if not self.is_between_steps:
            raise BatchError(
                f"{what} in the middle of an optimizer step, where the results depend on the number of instances: "
                f"save and evaluate {_HAS_ACTED}; in Lightning's Trainer after accumulate_grad_batches batches"
            )

    @contextmanager
    def abandoning(self) -> Iterator[None]:
        """A context that discards the step that has begun, if the context ends with an exception."""
        try:
            yield
        except BaseException:
            self.abandon()
            raise

    @contextmanager
    def micro_batch(self, micro_batch: ReplicaBatch) -> Iterator[Any]:
        """A context in which the process computes as the replica of ``micro_batch``; yields its content."""
        self.begin(micro_batch)
        with self.abandoning():
            yield micro_batch.content
        self.end(add=True)  # to what a stream's last batches left, as the Trainer adds it

    def gather_states(self) -> dict[str, Any]:
        """Return the random states of all replicas of the job; all instances call the method."""
        self._check_not_left()
        released = self.release()
        self._check_between_steps("a checkpoint was saved")
        try:
            return self._gathered_states()
        finally:
            self.reopen(released)

    def _gathered_states(self) -> dict[str, Any]:
        written = io.BytesIO()
        states, before_read = self.randomness.state_dict(), self._before_read.state_dict()
        program = _programs_randomness().state_dict()["0"]
        more = {it: {"row": self._last_read, "before_read": before_read[it], "program": program} for it in states}
        torch.save({it: {**states[it], **more[it]} for it in states}, written)
        group = context.data_parallel_group()
        received = gather_bytes(group, "save the replicas' random states", written.getvalue())
        parts = [torch.load(io.BytesIO(data), weights_only=True) for data in received]
        return {replica: states for part in parts for replica, states in part.items()}

    def save(self, folder: Path) -> None:
        """Save the random states of all replicas in the folder of a checkpoint; all instances call the method.

        Raises:
            BatchError: Inside an optimizer step; or before the batch that the loop has yielded is used, because
                the next batch was read already, with random numbers that a resumed training would not draw.
        """
        if self._waiting is not None or self.is_untouched:
            raise BatchError(
                "a checkpoint was saved at the top of the loop's body, where the loop has read more batches than "
                f"the checkpoint counts: save {_HAS_ACTED}"
            )
        states = self.gather_states()
        if is_main():
            unfinished = folder / f"{_FILE}.unfinished"
            torch.save(states, unfinished)
            unfinished.replace(folder / _FILE)

    def load(self, folder: Path) -> None:
        """Load the random states of this instance's replicas and of the program, if ``folder`` has them.

        All instances call the method. Instance 0 reads the file, because other hosts may have no copy of it.
        """
        self.randomness.load_state_dict(self._saved_in(folder))

    def resume(self, folder: Path) -> None:
        """Load the states that the checkpoint in ``folder`` has when the next epoch begins, in its middle."""
        self._resumed_from = folder

    def _saved_in(self, folder: Path) -> dict[int, Any]:
        file, group = folder / _FILE, context.data_parallel_group()
        found = file.read_bytes() if is_main() and file.exists() else b""
        saved = gather_bytes(group, "load the replicas' random states", found)[0]
        states = torch.load(io.BytesIO(saved), weights_only=True) if saved else {}
        found_here = {replica: states[str(replica)] for replica in self.replicas if str(replica) in states}
        for of_replica in list(found_here.values())[:1]:
            program = _programs_randomness()
            program.load_state_dict({0: of_replica["program"]})
            program.become_programs(0)
        return found_here


def _programs_randomness() -> ReplicaRandomness:
    """Return random states that are a copy of the program's states."""
    randomness = ReplicaRandomness(0, range(1))
    randomness.begin_as_program(torch.device("cpu"))
    return randomness


def _check_seeds() -> None:
    """Compare torch's random state between instances, before each replica copies the state of its process.

    Raises:
        BatchError: If the states differ, and this instance has several replicas. Processes of the library may
            differ, so with one replica in each instance the error is a PopdistWarning.
    """
    group = context.data_parallel_group()
    if len(group.instances) == 1:
        return
    digest = hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=4).digest()
    found = group.start("compare random states", [int.from_bytes(digest, "little")]).wait()
    if len({number for (number,) in found}) > 1:
        text = (
            "the instances begin this training with different random states of torch, so the weights depend on "
            "the number of instances. Seed all instances alike: no seed may contain a rank, and "
            "accelerate's set_seed has no device_specific=True. If a library does so, as TRL's GRPOTrainer, start "
            "one instance for each replica"
        )
        if context.num_local_replicas() > 1:
            raise BatchError(text)
        warnings.warn(text, PopdistWarning, stacklevel=2)
