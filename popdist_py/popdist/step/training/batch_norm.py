"""BatchNorm over the samples of several replicas.

With ``batch_norm_group_size=k`` a layer normalises over k consecutive replicas, as if their samples were one
batch. In the forward pass the replicas exchange means and variances (`popdist.step.training.norm_sync`). In the
backward pass they exchange the sums for the gradients of means and variances, weighted like the loss.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import SyncBatchNorm
from torch.nn.functional import batch_norm

from popdist.data.randomness import ReplicaRandomness
from popdist.errors import BatchError, MicroBatchError, WeightsError
from popdist.exchange.groups import Group, wait_for_first_error
from popdist.gradients.buffers import ReplicaBuffers, accept_buffers
from popdist.gradients.reduction import check_whole_job
from popdist.gradients.step_headers import agree_on_changes, changes_of
from popdist.ground.torch_private import skip_tracing
from popdist.job import context
from popdist.step.training.micro_batches import Nest, split_batch, to_device
from popdist.step.training.norm_sync import (
    GroupValues,
    NormTurn,
    ReplicaValues,
    SyncPoint,
    layer_number,
    tree_sum_of_values,
)

_HALVES: Final = (torch.float16, torch.bfloat16)

_NUM_DIMENSIONS: Final[dict[type, tuple[int, ...]]] = {
    nn.BatchNorm1d: (2, 3),
    nn.BatchNorm2d: (4,),
    nn.BatchNorm3d: (5,),
}
"""Allowed numbers of dimensions of the inputs of torch's own layers."""


if TYPE_CHECKING:
    BatchNorm: TypeAlias = SyncBatchNorm
else:
    BatchNorm = SyncBatchNorm.__base__  # the base class of torch's own layers and of many libraries' layers

_calibrated: Final[list[nn.Module]] = []
"""The models whose statistics :func:`update_bn` is computing; each of their replicas is its own group."""


class GroupedNorm:
    """The forward pass of one BatchNorm layer in training, with the statistics of ``size`` replicas."""

    def __init__(self, layer: BatchNorm, size: int, name: str) -> None:
        self.layer = layer
        self.size = size
        self.name = name  # equal on all instances
        self.number = layer_number(name)

    @skip_tracing
    def __call__(self, x: Tensor) -> Tensor:
        """Return ``x``, of shape (samples, channels, ...), normalised over the samples of the group."""
        layer = self.layer
        if not layer.training or _calibrated:
            return nn.BatchNorm1d.forward(layer, x)
        turn = NormTurn.current
        if turn is None or turn.size != self.size:
            where = "outside of its micro batches" if turn is None else f"in a loop with groups of {turn.size}"
            raise BatchError(
                f"{self.name} has batch_norm_group_size={self.size} and is called in training mode {where}, where "
                "the other replicas of its group do not wait: call model.eval() before such a pass, make it in "
                "model.run_micro_batches(), or give both models the same batch_norm_group_size"
            )
        if x.dim() not in _NUM_DIMENSIONS.get(type(layer), (x.dim(),)):
            raise ValueError(f"{self.name}: {type(layer).__name__} got an input of shape {tuple(x.shape)}")
        y: Tensor = _Normalise.apply(x, layer.weight, layer.bias, self, turn)  # type: ignore[no-untyped-call] # torch's
        return y

    @torch.no_grad()
    def track(self, mean: ReplicaValues, variance: ReplicaValues, count: float) -> None:
        """Update the running statistics of the layer with the statistics of one batch."""
        buffers: Any = self.layer
        buffers.num_batches_tracked.add_(1)
        momentum = self.layer.momentum
        rate = 1.0 / float(buffers.num_batches_tracked) if momentum is None else momentum
        unbiased = variance * (count / (count - 1))
        for running, new in ((buffers.running_mean, mean), (buffers.running_var, unbiased)):
            before = running.double().cpu().numpy()
            running.copy_(torch.from_numpy(before * (1 - rate) + new * rate))


def _array_of(tensors: Sequence[Tensor], *numbers: float) -> ReplicaValues:
    """Return the elements of ``tensors`` and then ``numbers`` as one flat array, which replicas can exchange."""
    return np.concatenate([*(it.cpu().numpy() for it in tensors), numbers], dtype=np.float64)


def _pooled(values: GroupValues) -> tuple[ReplicaValues, ReplicaValues, float]:
    """Return each channel's mean, variance and count over the replicas of a group (Chan, Golub, LeVeque 1979)."""
    num_channels, counts = values.shape[1] // 2, values[:, -1:]
    means, variances = values[:, :num_channels], values[:, num_channels:-1]
    count = float(tree_sum_of_values(counts)[0])
    mean = tree_sum_of_values(means * counts) / count
    squares = tree_sum_of_values((variances + np.square(means - mean)) * counts)
    return mean, squares / count, count


class _Normalise(torch.autograd.Function):
    """A BatchNorm layer over a group's samples: the group's replicas run its forward and backward together."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        norm: GroupedNorm,
        turn: NormTurn,
    ) -> Tensor:
        """Return ``x`` normalised with the mean and variance over all samples of the group."""
        num_channels = x.shape[1]
        own = torch.batch_norm_update_stats(x.float() if x.dtype in _HALVES else x, None, None, 0.0)
        mine = _array_of(own, x.numel() / num_channels)
        values = turn.sync_values(SyncPoint("forward", norm.number, len(mine)), mine)
        means, variances, count = _pooled(values)
        if count < 2:
            raise BatchError(
                f"{norm.name} has {count:g} values in each channel over all replicas of its group, and a "
                "variance needs two"
            )
        norm.track(means, variances, count)
        wide = own[0].dtype
        mean, variance = (torch.from_numpy(it).to(x.device, wide) for it in (means, variances))
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.norm, ctx.turn, ctx.count = norm, turn, count
        scale, shift = (None if it is None else it.to(wide) for it in (weight, bias))
        return batch_norm(x, mean, variance, scale, shift, training=False, eps=norm.layer.eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        """Return gradients: of ``x`` by all losses of the group, and of weight and bias by this replica's loss."""
        x, weight, mean, variance = ctx.saved_tensors
        norm, turn, wide = ctx.norm, ctx.turn, mean.dtype
        eps, dtype = norm.layer.eps, x.dtype
        x, slope = x.to(wide), _laid_out_as(slope.to(wide), x)
        scale = torch.ones_like(mean) if weight is None else weight.to(wide)
        nothing = x.new_empty(0, dtype=wide)  # kernels of accelerators need an empty tensor in place of None
        _, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
            slope,
            x,
            scale,
            running_mean=mean,
            running_var=variance,
            save_mean=nothing,
            save_invstd=nothing,
            train=False,
            eps=eps,
            output_mask=[False, True, True],
        )
        of_x = None
        if ctx.needs_input_grad[0]:
            mine = _array_of((of_weight, of_bias)) * turn.share
            values = turn.sync_values(SyncPoint("backward", norm.number, len(mine)), mine)
            sums = tree_sum_of_values(values) / (turn.share * ctx.count)
            means = torch.from_numpy(sums).to(x.device, wide).view(2, -1)
            scale = scale * (variance + eps).rsqrt()
            slopes = means * -scale
            of_x = batch_norm(x, mean, variance, slopes[0], slopes[1], training=False, eps=eps)
            by_channel = scale.view(1, -1, *[1] * (x.dim() - 2))
            of_x = of_x.addcmul_(slope, by_channel).to(dtype)
        if weight is None:
            return of_x, None, None, None, None
        return of_x, of_weight.to(weight.dtype), of_bias.to(weight.dtype), None, None


def _laid_out_as(tensor: Tensor, like: Tensor) -> Tensor:
    """Return ``tensor`` contiguous, in the memory format channels_last if ``like`` has only this format."""
    is_last = like.dim() == 4 and like.is_contiguous(memory_format=torch.channels_last)
    if is_last and not like.is_contiguous():
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor.contiguous()


def group_norms(module: nn.Module, size: int) -> None:
    """Make the BatchNorm layers of ``module`` normalise over ``size`` replicas together; 1 changes nothing.

    Raises:
        WeightsError: If a layer cannot do this; or if ``size`` is 1, and a SyncBatchNorm would join no replicas.
    """
    model = type(module).__name__
    has_processes = context.num_local_replicas() == 1 and torch.distributed.is_initialized()
    is_alone = size == 1 < context.num_replicas() and not has_processes
    for path, layer in module.named_modules():
        if is_alone and isinstance(layer, SyncBatchNorm):
            raise WeightsError(
                f"the layer {path or type(layer).__name__} of {model} is a SyncBatchNorm, which would normalise "
                "the samples of each replica alone. Write ReplicatedModel(module, batch_norm_group_size=k), whose "
                "layers normalise over k replicas, or use BatchNorm"
            )
        if not isinstance(layer, BatchNorm):
            continue
        name = f"the layer {path or type(layer).__name__} of {model}"
        known = vars(layer).get("forward")
        before = known.size if isinstance(known, GroupedNorm) else 1
        if before not in (1, size):
            raise WeightsError(
                f"{name} belongs to a model with batch_norm_group_size={before} already, and this one has {size}: "
                "wrap a module with one size, or make it anew"
            )
        if before == size:
            continue
        if known is not None or type(layer).forward not in (nn.BatchNorm1d.forward, SyncBatchNorm.forward):
            raise WeightsError(
                f"{name} has a forward pass of its own, whose statistics cannot be those of a group: use torch's "
                "BatchNorm1d, 2d or 3d, or leave out batch_norm_group_size"
            )
        if layer.running_mean is None:
            raise WeightsError(
                f"{name} has track_running_stats=False, so its evaluation would need the other replicas of its "
                "group: leave that out, or leave out batch_norm_group_size"
            )
        layer.forward = GroupedNorm(layer, size, name)  # type: ignore[assignment] # found before the class's


_END = "update_bn(), the end of the loader"
_STEP = "update_bn(), a batch"


def update_bn(loader: Iterable[Nest], model: nn.Module, device: torch.device | int | str | None = None) -> None:
    """Compute the running statistics of each BatchNorm layer of ``model`` anew, from the data of ``loader``.

    Does the work of ``torch.optim.swa_utils.update_bn`` for all replicas: each replica computes its micro batches,
    as in ``ReplicatedModel.micro_batches``, and after every batch the statistics are the mean over the replicas.
    At the end the statistics are the mean over all batches, bitwise equal on all instances and for any number of
    instances; in a job of one replica they are equal to torch's. Random numbers in ``forward`` come from the
    replicas' own generators, and the random states of training do not change. All instances must call this
    function.

    Args:
        loader: A loader of ``popdist.data_loader``, or any other whose batches can be cut along dim 0; with equal
            numbers of batches on every instance. If a micro batch is a list or tuple, only its first item is
            passed to the model.
        model: A module with equal weights on all instances, wrapped or not: an ``AveragedModel``, for example. A
            model without BatchNorm stays unchanged.
        device: The device for the micro batches; None for the device of the model's first parameter.

    Raises:
        BatchError: If a batch cannot be split.
        MicroBatchError: If another instance could not compute its part; then the batch has changed nothing.
        WeightsError: If ``model`` is no module.
        CollectiveError, BackendError: If the instances make other calls, or an instance was lost.
    """
    context.ensure_init()
    if not isinstance(model, nn.Module):
        raise WeightsError(f"update_bn updates a torch.nn.Module, and this is a {type(model).__name__}")
    layout = context.environment().contract.layout
    check_whole_job(context.data_parallel_group(), layout)
    norms = [it for it in model.modules() if isinstance(it, BatchNorm)]
    if not norms:
        return
    place = next((it.device for it in model.parameters()), torch.device("cpu")) if device is None else device
    instance = context.environment().contract.data_parallel_index
    passes = _Passes(model, torch.device(place), ReplicaRandomness(0, layout.replicas_of(instance)))
    with _calibrating(model, norms), torch.no_grad():
        for batch in loader:
            passes.run(batch)
    context.data_parallel_group().agree(_END)
    accept_buffers(model)


@contextmanager
def _calibrating(model: nn.Module, norms: list[BatchNorm]) -> Iterator[None]:
    """A context in which ``model`` is in training mode and its BatchNorm statistics are means over batches."""
    modes = {module: module.training for module in model.modules()}
    momenta = {norm: norm.momentum for norm in norms}
    model.train()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # torch's setting for a mean in which all batches have equal weight
    _calibrated.append(model)
    try:
        yield
    finally:
        _calibrated.pop()
        for norm, momentum in momenta.items():
            norm.momentum = momentum
        for module, mode in modes.items():
            module.training = mode


class _Passes:
    """The forward passes of :func:`update_bn` for this instance's replicas, batch by batch."""

    def __init__(self, model: nn.Module, device: torch.device, randomness: ReplicaRandomness) -> None:
        self._model = model
        self._device = device
        self._randomness = randomness
        self._group = context.data_parallel_group()
        self._layout = context.environment().contract.layout
        self._buffers = ReplicaBuffers(model, None)

    def run(self, batch: Nest) -> None:
        """Run the forward passes of a batch, and set the buffers to the mean over the replicas."""
        self._buffers.begin_step()
        try:
            try:
                self._compute(batch)
            except BaseException:
                self._group.start(_STEP, [True, 0])
                raise
            own = changes_of(0, 0, self._buffers)
            headers = self._group.start(_STEP, [False, own.digest]).wait()
            _check(self._group, [i for i, (it, _) in zip(self._group.instances, headers, strict=True) if it])
            changes = agree_on_changes(self._group, own, [digest for _, digest in headers], self._buffers)
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


def _check(group: Group, failed: list[int]) -> None:
    """Raise MicroBatchError if instances have ``failed``, after a wait in which their own errors can appear."""
    if failed:
        wait_for_first_error()
        raise MicroBatchError(
            f"update_bn: {group.name(failed)} could not compute a batch (see the error there), so it changed "
            "nothing on any instance"
        )
