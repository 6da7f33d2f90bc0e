"""The loaders of Lightning for the replicas of an instance, and the job as Lightning's cluster environment."""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from popdist.errors import BatchError
from popdist.job import context
from popdist.step.training.ddp_answers import refuse_options
from popdist.trainers.replica_logs import Logs
from popdist.trainers.replica_rows import DealtRows, ReplicaScopes, row_options
from popdist.trainers.replica_steps import ReplicaBatch, ReplicaSteps, in_replica_order


class JobEnvironment(ClusterEnvironment):  # type: ignore[misc]  # Lightning has no types
    """The job as a cluster environment of Lightning, whose processes are the instances of the job."""

    creates_processes_externally = True
    main_address = "127.0.0.1"
    """Unused, like :attr:`main_port`, because popdist makes torch's default process group."""
    main_port = 0

    @staticmethod
    def detect() -> bool:
        """Return False, because only strategies of popdist use this environment."""
        return False

    def world_size(self) -> int:
        """Return the number of instances of the job."""
        return context.num_instances()

    def global_rank(self) -> int:
        """Return the index of this instance in the job."""
        return context.instance_index()

    def local_rank(self) -> int:
        """Return the index of this instance on its host."""
        return context.local_instance_index()

    def node_rank(self) -> int:
        """Return 0, because hosts have no numbers here."""
        return 0

    def set_world_size(self, size: int) -> None:
        """Do nothing, because the launcher has set the number of instances."""

    def set_global_rank(self, rank: int) -> None:
        """Do nothing, because the launcher has set the index of this instance."""


def options_for_job(options: dict[str, Any], strategy: type[Any]) -> dict[str, Any]:
    """Return ``options`` of ``strategy`` with a JobEnvironment, unless ``options`` have a cluster environment.

    Raises:
        WeightsError: In a job of several replicas, for an option of torch's DistributedDataParallel, unless the
            option has torch's default, which LightningCLI passes.
    """
    if context.num_replicas() > 1:
        known, torchs = (inspect.signature(it).parameters for it in (strategy, DistributedDataParallel))
        others = {name: value for name, value in options.items() if name not in known}
        refuse_options({n: it for n, it in others.items() if n not in torchs or it != torchs[n].default})
    return {**options, "cluster_environment": options.get("cluster_environment") or JobEnvironment()}


class ReplicaProcess:
    """The mixin of strategies for Lightning's Trainer and Fabric, which joins the job and chooses the device."""

    parallel_devices: list[torch.device]
    local_rank: int

    @property
    def has_replicas(self) -> bool:
        """Whether the job has more than one replica."""
        return context.num_replicas() > 1

    @property
    def root_device(self) -> torch.device:
        """The torch device of this instance; instance i of a host uses device i modulo the number of devices."""
        return self.parallel_devices[self.local_rank % len(self.parallel_devices)]

    def setup_environment(self) -> None:
        """Join the job, whose instances are the ranks of torch's default process group."""
        context.ensure_init()
        context.ensure_default_group("the ReplicatedStrategy of Lightning")
        super().setup_environment()  # type: ignore[misc]  # of the strategy beside this class


def reduce_by(reduce: Callable[..., Any], tensor: Any, group: Any, reduce_op: Any) -> Any:
    """Return ``reduce(tensor, group, reduce_op)``; a mean of integers is truncated, as in Lightning with gloo."""
    is_mean = isinstance(reduce_op, str) and reduce_op.lower() in ("avg", "mean")
    if not is_mean or not isinstance(tensor, torch.Tensor) or tensor.is_floating_point():
        return reduce(tensor, group, reduce_op)
    total = reduce(tensor, group, "sum")
    return total.copy_(total / torch.distributed.get_world_size(group))


class ReplicaRow:
    """One batch for each replica of this instance, and the values that the program logs for these batches.

    Attributes:
        micro_batches: Consecutive micro batches of one optimizer step, in the order of the replicas.
    """

    def __init__(
        self, micro_batches: list[ReplicaBatch], first: int, logs: dict[int, Logs], outputs: dict[int, Any]
    ) -> None:
        self.micro_batches = micro_batches
        self._first = first
        self._logs = logs
        self._outputs = outputs

    def __len__(self) -> int:
        """Raise BatchError, as :meth:`__getitem__`."""
        raise self._error()

    def __getitem__(self, index: object) -> None:
        """Raise BatchError: a hook that unpacks this row as a batch would get the batches of several replicas."""
        raise self._error()

    @staticmethod
    def _error() -> BatchError:
        return BatchError(
            "a hook of Lightning reads its batch, which here holds a batch for each replica of this instance: "
            "read the batch in training_step. If validation_step reads it, put the datasets of a CombinedLoader "
            "into one"
        )

    def batch_idx(self, micro_batch: ReplicaBatch) -> int:
        """Return the number that ``micro_batch`` has among the batches of its replica in this epoch."""
        return self._first + micro_batch.index % micro_batch.accumulation

    def replica(self, micro_batch: ReplicaBatch) -> int:
        """Return the job-wide number of the replica of ``micro_batch``."""
        return context.local_replicas()[micro_batch.index // micro_batch.accumulation]

    def keep_output(self, micro_batch: ReplicaBatch, output: Any) -> None:
        """Keep what the program's ``training_step`` returned for a batch of this instance's first replica."""
        if micro_batch.index < micro_batch.accumulation:
            self._outputs[micro_batch.index] = output

    def as_of_first_replica(self, output: Any) -> Any:
        """Return the first replica's output with the autograd graph of ``output``, which is the row's last output.

        So instance 0 shows to hooks, such as the search for a learning rate, what process 0 of Lightning shows.
        """
        first = self._outputs[self.micro_batches[0].index // len(self.micro_batches)]
        if first is output:
            return output
        if not isinstance(output, Mapping):
            return first.detach() + (output - output.detach())
        loss = first["loss"].detach() + (output["loss"] - output["loss"].detach())
        return {**first, "loss": loss}

    def logs_of(self, micro_batch: ReplicaBatch) -> Logs:
        """Return the dict of the values that the program logs for ``micro_batch``."""
        return self._logs.setdefault(micro_batch.index, {})

    def logs_of_batches(self) -> list[Sequence[Logs]]:
        """Return the logs of one optimizer step: for each batch number, the logs of each replica."""
        accumulation = self.micro_batches[-1].accumulation
        logs = [self._logs[index] for index in sorted(self._logs)]
        return [logs[number::accumulation] for number in range(accumulation)]


class RowLoader:
    """A loader of ReplicaRows (one batch for each local replica), which can be resumed in the middle of an epoch.

    Args:
        rows: Yields one batch for each replica of this instance.
        begin_epoch: Called with the number of the first batch of a pass over the loader.
        accumulation: Returns for the number of a batch how many batches the step has that begins there.
    """

    def __init__(self, rows: Any, begin_epoch: Callable[[int], None], accumulation: Callable[[int], int]) -> None:
        self.batch_sampler = rows.batch_sampler
        self._rows = rows
        self._begin_epoch = begin_epoch
        self._accumulation = accumulation
        self._first = self._position = 0

    def __len__(self) -> int:
        """Return the number of batches of one replica."""
        return len(self._rows)

    @property
    def worker_init_fn(self) -> Any:
        """The seed function of loader workers, which Lightning sets after ``seed_everything(workers=True)``."""
        return self._rows.worker_init_fn

    @worker_init_fn.setter
    def worker_init_fn(self, function: Any) -> None:
        self._rows.worker_init_fn = self._rows.dataset.scopes.worker_init_fn = function

    def __iter__(self) -> Iterator[ReplicaRow]:
        self._position, self._first = self._first, 0
        self.batch_sampler.first = self._position
        rows = iter(self._rows)  # draws from the program's generator, which the replicas copy at first
        self._begin_epoch(self._position)
        while step := list(islice(rows, self._accumulation(self._position))):
            micro_batches, width = in_replica_order(step), len(step[0])
            first, logs, outputs = self._position, dict[int, Logs](), dict[int, Any]()
            for start in range(0, len(micro_batches), width):
                self._position += 1
                yield ReplicaRow(micro_batches[start : start + width], first, logs, outputs)

    def state_dict(self) -> dict[str, int]:
        """Return the number of batches that the current pass has yielded; 0 at its end."""
        return {"position": self._position % max(1, len(self))}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Let the next pass over this loader leave out the batches that the saved pass had yielded."""
        self._first = state["position"]


def row_loader(
    loader: Any, steps: Callable[[], ReplicaSteps | None], *, is_needed: bool
) -> DataLoader[Any] | None:
    """Return a loader of rows, one batch for each local replica; None if ``loader`` has no sampler for replicas.

    Raises:
        BatchError: If ``is_needed``, and ``loader`` deals no samples to replicas.
    """
    sampler = getattr(loader, "sampler", None)
    batch_sampler = getattr(loader, "batch_sampler", None)
    is_dealt = isinstance(sampler, DistributedSampler) and sampler.num_replicas == context.num_replicas()
    if not is_dealt or getattr(batch_sampler, "sampler", None) is not sampler:
        if is_needed:
            raise BatchError(
                f"{type(loader).__name__} with the sampler {type(sampler).__name__} deals no samples to replicas. "
                "Use a DataLoader with a batch_size, over a dataset with a length, without a DistributedSampler, "
                "in a Trainer with use_distributed_sampler=True"
            )
        return None
    scopes = ReplicaScopes(steps, loader.worker_init_fn)
    rows = DealtRows({it: _batches_of(batch_sampler, it) for it in scopes.replicas}, scopes)
    return DataLoader(**row_options(loader, scopes, rows))


def _batches_of(batch_sampler: Any, replica: int) -> Any:
    """Return a copy of ``batch_sampler`` whose DistributedSampler deals the samples of the replica ``replica``."""
    batches = copy.copy(batch_sampler)
    batches.sampler = copy.copy(batch_sampler.sampler)
    batches.sampler.rank = replica
    if isinstance(batches.sampler, DistributedSamplerWrapper):  # its dataset is the order that a sampler has drawn
        batches.sampler.dataset = copy.copy(batches.sampler.dataset)
    return batches
