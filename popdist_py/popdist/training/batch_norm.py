"""New statistics of BatchNorm for finished weights, such as an average of them, from all replicas of the job."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from popdist import context
from popdist.errors import MicroBatchError, WeightsError
from popdist.gradients.buffer_changes import agree_on_changes, changes_of
from popdist.gradients.buffers import ReplicaBuffers
from popdist.gradients.reduction import check_whole_job
from popdist.groups import let_the_cause_come_first
from popdist.headers import name_instances
from popdist.training.micro_batches import Nest, split_batch, to_device
from popdist.training.randomness import ReplicaRandomness

_END = "update_bn(), the end of the loader"
_STEP = "update_bn(), a batch"


def update_bn(loader: Iterable[Nest], model: nn.Module, device: torch.device | int | str | None = None) -> None:
    """Make the running statistics of each BatchNorm layer of ``model`` anew, from the data of ``loader``.

    What ``torch.optim.swa_utils.update_bn`` does, for all replicas: each computes its micro batches, as in
    ``ReplicatedModel.micro_batches``, and after every batch the statistics are the mean over them. Afterwards they
    are the mean over all batches, equal on all instances and with the same bits for any split; in a job of one
    replica those of torch. Random numbers that ``forward`` draws are those of replicas, and no state of training
    goes on because of them. All instances call it.

    Args:
        loader: One of ``popdist.data_loader``, or any other whose batches can be cut along dim 0; as many batches
            on every instance. Of a micro batch that is a list or tuple the first item is handed to the model.
        model: A module with equal weights on all instances, wrapped or not: an ``AveragedModel``, for example. One
            without BatchNorm is left as it is.
        device: Where the micro batches go; None for the device of the model's first parameter.

    Raises:
        BatchError: If a batch cannot be split.
        MicroBatchError: If another instance could not compute its part; then the batch has changed nothing.
        WeightsError: If ``model`` is no module.
        CollectiveError, BackendError: If the instances do other things, or one was lost.
    """
    context.ensure_init()
    if not isinstance(model, nn.Module):
        raise WeightsError(f"update_bn updates a torch.nn.Module, and this is a {type(model).__name__}")
    layout = context.environment().contract.layout
    check_whole_job(context.current_group(), layout)
    norms = [it for it in model.modules() if isinstance(it, _BatchNorm)]
    if not norms:
        return
    place = next((it.device for it in model.parameters()), torch.device("cpu")) if device is None else device
    instance = context.instance_index()
    passes = _Passes(model, torch.device(place), ReplicaRandomness(0, layout.replicas_of(instance)))
    with _calibrating(model, norms), torch.no_grad():
        for batch in loader:
            passes.run(batch)
    context.current_group().agree(_END)


@contextmanager
def _calibrating(model: nn.Module, norms: list[_BatchNorm]) -> Iterator[None]:
    """Within it ``model`` trains, and its statistics are the mean over all batches, from none."""
    modes = {module: module.training for module in model.modules()}
    momenta = {norm: norm.momentum for norm in norms}
    model.train()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # torch's word for a mean in which all batches count alike
    try:
        yield
    finally:
        for norm, momentum in momenta.items():
            norm.momentum = momentum
        for module, mode in modes.items():
            module.training = mode


class _Passes:
    """The forward passes of this instance's replicas, batch by batch."""

    def __init__(self, model: nn.Module, device: torch.device, randomness: ReplicaRandomness) -> None:
        self._model = model
        self._device = device
        self._randomness = randomness
        self._group = context.current_group()
        self._layout = context.environment().contract.layout
        self._buffers = ReplicaBuffers(model, None)

    def run(self, batch: Nest) -> None:
        """Compute a batch, and give the buffers what all replicas made of them."""
        self._buffers.begin_step()
        try:
            try:
                self._compute(batch)
            except BaseException:
                self._group.start(_STEP, [True, 0])
                raise
            own = changes_of(0, 0, self._buffers)
            told = self._group.start(_STEP, [False, own.digest]).wait()
            _check([i for i, (it, _) in zip(self._group.instances, told, strict=True) if it])
            changes = agree_on_changes(self._group, own, [digest for _, digest in told], self._buffers)
            self._buffers.combine(self._group, self._layout, changes.mask, changes.others)
        except BaseException:
            self._buffers.undo()
            raise
        finally:
            self._buffers.end_step()

    def _compute(self, batch: Nest) -> None:
        replicas = self._layout.replicas_of(self._group.backend.instance_index)
        accumulation, contents, _ = split_batch(batch, len(replicas), 1)
        for position, replica in enumerate(replicas):
            mine = contents[position * accumulation : (position + 1) * accumulation]
            for content in mine:
                if content is not None:
                    first = content[0] if isinstance(content, list | tuple) else content
                    with self._randomness.of(replica, self._device):
                        self._model(to_device(first, self._device))
            self._buffers.end_replica(has_run=any(it is not None for it in mine))


def _check(failed: list[int]) -> None:
    """Raise if instances have ``failed``, after a moment in which they can end with their own errors."""
    if failed:
        let_the_cause_come_first()
        raise MicroBatchError(
            f"update_bn: {name_instances(failed)} could not compute a batch (see the error there), so it changed "
            "nothing on any instance"
        )
