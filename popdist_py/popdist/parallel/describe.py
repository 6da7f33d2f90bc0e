"""The description of a module for a planner, measured without memory for the weights."""

import os
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from popdist.errors import DescriptionError
from popdist.ground.accelerators import accelerator
from popdist.ground.torch_private import fake_tensors, seen_operations
from popdist.parallel.measures.operation_meter import OperationMeter, Stretch, Weight, tensors_in
from popdist.phases.repeated_layers import repeated_layers
from popsize.catalogue import model_text
from popsize.model import Layer, Model, Split

_LOGIT_COPIES = 3
"""The number of tensors of the size of the logits in a loss: the logits, probabilities and gradients."""

_LOGIT_MOVES = 10
"""How often the forward pass of a loss reads or writes a tensor of the size of the logits."""

_TOKEN_DIMENSIONS = 3
"""The number of dimensions of a floating-point input: samples, tokens, features."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Description(Model):
    """The measured sizes and operations of a module, in the form that the planner `poprun-size` reads."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the description to a JSON file that ``poprun-size --model`` reads."""
        Path(path).write_text(model_text(self), encoding="utf-8")


def describe(
    module: nn.Module,
    sample: Any,
    *,
    device: str = "cpu",
) -> Description:
    """Measure the forward pass of ``module`` with tensors that have no memory, and return a description.

    The layers are the equal modules of the longest run in a ``ModuleList`` or ``Sequential``. The operations
    before these modules make one more layer, and the operations behind these modules another. The module is
    measured in its present mode: with dropout after ``module.train()``. Activations count as 16-bit numbers:
    floating-point tensors of a module with 32-bit parameters count half; integers, masks and the tensors of a
    16-bit module count as they are. Models of transformers are measured as they train if ``use_cache`` has its
    default; without ``use_cache`` more masks are made than in training.

    Args:
        module: The module to train, on any device, also on ``meta``. The module is not changed.
        sample: A batch: a tensor, or a tuple or dict of arguments. The first dimension counts samples, and amounts
            are for one sample. The sequence is the second dimension of the first integers, or of the first floats
            with three dimensions.
        device: Type of device: ``cpu``, or the type that torch is built for, such as ``cuda``; the device itself
            need not be there.

    Returns:
        The description.

    Raises:
        DescriptionError: If the module reads a value of a tensor (``.item()``, ``if``, numpy), has a shape that
            depends on values, or fails; the message names the operation and the layer. Also if torch lacks the
            device.
    """
    if not isinstance(module, nn.Module):
        raise DescriptionError(f"describe() measures an nn.Module, and was given {type(module).__name__}")
    given = list(tensors_in(sample))
    if not given or any(not it.dim() or not it.numel() for it in given):
        raise DescriptionError("sample needs a tensor or more, each with samples in its first dimension")
    if device not in {"cpu", accelerator.found_type()}:
        raise DescriptionError(
            f"device={device!r}, and torch {torch.__version__} is for {accelerator.found_type() or 'the CPU'}: "
            "measure with device='cpu', or with a torch that is built for the device, which need not be there"
        )
    blocks = repeated_layers(module)
    meter = _measure(module, sample, device, blocks)
    layers = _layers(meter)
    divisors = dict.fromkeys(pair for it in meter.stretches if it.name or not blocks for pair in it.divisors)
    return Description(
        name=type(module).__name__,
        sequence=_sequence(given),
        layers=tuple(layers),
        divisors=tuple(divisors) if meter.can_divide else (("largest_tensor_group", 1),),
        tied_parameters=float(sum(it.numel for it in meter.weights.values() if len(_owners(it, meter)) > 1)),
    )


def _measure(module: nn.Module, sample: Any, device: str, blocks: set[nn.Module]) -> OperationMeter:
    """Count the operations in a forward pass of ``module``, on tensors without memory; return all counts."""
    names = {name for name, member in module.named_modules() if member in blocks}
    entered = [type(module).__name__]
    meter: OperationMeter | None = None
    try:
        with fake_tensors(), torch.enable_grad():
            memo: dict[int, Any] = {id(it): _without_memory(it, device) for it in _tensors_of(module)}
            weights = {id(it): memo[id(it)] for it in module.parameters()}
            constants = [it for key, it in memo.items() if key not in weights]
            copy = deepcopy(module, memo)
            batch = _without_memory((sample,) if isinstance(sample, Tensor) else sample, device)
            inputs = list(tensors_in(batch))
            meter = OperationMeter([*weights.values()], constants, inputs, has_layers=bool(blocks))
            _watch(copy, meter, names, entered)
            with saved_tensors_hooks(meter.keep, lambda it: it), seen_operations(meter.see):
                result = copy(**batch) if isinstance(batch, dict) else copy(*batch)
            meter.exit(result)
    except DescriptionError:
        raise
    except Exception as error:
        operation = f" in the operation {meter.operator}" if meter is not None and meter.operator else ""
        raise DescriptionError(
            f"{type(module).__name__} cannot be measured without its weights: {entered[-1]} failed{operation} "
            f"with {type(error).__name__}: {str(error).partition(chr(10))[0]}. A module that is measured reads no "
            "value of a tensor (.item(), if, numpy) and has no shape that depends on values"
        ) from error
    return meter


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters and buffers of ``module``, and the tensors that are plain attributes."""
    yield from module.parameters()
    yield from module.buffers()
    for member in module.modules():
        yield from (value for value in vars(member).values() if isinstance(value, Tensor))


def _without_memory(value: Any, device: str) -> Any:
    """Return ``value`` with each tensor replaced by a tensor without memory, of the same shape and strides."""
    if isinstance(value, Mapping):
        return {key: _without_memory(part, device) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_without_memory(part, device) for part in value)
    if not isinstance(value, Tensor):
        return value
    empty = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return nn.Parameter(empty, requires_grad=value.requires_grad) if isinstance(value, nn.Parameter) else empty


def _watch(copy: nn.Module, meter: OperationMeter, names: set[str], entered: list[str]) -> None:
    """Register hooks on the modules of ``copy``: they report begin and end of each layer to ``meter``, and keep
    the modules that run at the moment in ``entered``.
    """
    for name, member in copy.named_modules():
        title = f"{name or 'the module'} ({type(member).__name__})"
        member.register_forward_pre_hook(lambda *_, title=title: entered.append(title), prepend=True)
        member.register_forward_hook(lambda *_: entered.pop() and None)
        if name in names:
            kind = type(member).__name__
            member.register_forward_pre_hook(
                lambda _, args, kwargs, kind=kind: meter.enter(kind, (args, kwargs)), with_kwargs=True
            )
            member.register_forward_hook(lambda *args: meter.exit(args[-1]))


def _place(stretch: int, meter: OperationMeter) -> int:
    """Return the index of the layer to which part ``stretch`` of the forward pass belongs; the operations between
    two layers belong to the first of these layers.
    """
    is_last = stretch == len(meter.stretches) - 1
    return stretch // 2 + 1 if is_last and stretch else (stretch + 1) // 2


def _owners(weight: Weight, meter: OperationMeter) -> set[int]:
    """Return the numbers of the layers that count ``weight``: the first and the last layer if both use it,
    otherwise only the first layer that uses it; the last layer if no layer uses it.
    """
    last = _place(len(meter.stretches) - 1, meter)
    users = {_place(user, meter) for user in weight.users} or {last}
    return {0, last} if {0, last} <= users else {min(users)}


def _layers(meter: OperationMeter) -> list[Layer]:
    """Return the measured layers of the model; a run of equal layers becomes one layer with a count."""
    last = _place(len(meter.stretches) - 1, meter)
    joined = [Stretch() for _ in range(last + 1)]
    for index, stretch in enumerate(meter.stretches):
        joined[_place(index, meter)].join(stretch)
    _add_held(joined, meter)
    if last:
        joined[0].name, joined[-1].name = "before", "behind"
    layers: list[Layer] = []
    for index, stretch in enumerate(joined):
        if last and not stretch.amounts:
            continue
        layer = _layer(stretch, meter, is_repeated=0 < index < last or not last)
        if index == last:
            layer = _with_loss(layer, stretch, meter, layers[-1].output_bytes if layers else 0.0)
        if layers and asdict(replace(layers[-1], count=1)) == asdict(layer):
            layers[-1] = replace(layers[-1], count=layers[-1].count + 1)
        else:
            layers.append(layer)
    return layers


def _add_held(layers: list[Stretch], meter: OperationMeter) -> None:
    """Add to each layer's costs its parameters and the bytes that autograd keeps for the backward pass."""
    for weight in meter.weights.values():
        for owner in _owners(weight, meter):
            amount = weight.numel * meter.num_samples
            layers[owner].add("parameters", amount, divided=weight.divided)
            layers[owner].raise_to("largest_matrix", amount, divided=weight.divided)
    for storage in meter.storages.values():
        places = {_place(it, meter) for it in storage.keepers}
        if places and not storage.constant:
            # memory that several layers read, such as rotations of positions, counts once, for its maker
            keeper = layers[places.pop() if len(places) == 1 else _place(storage.maker, meter)]
            keeper.add("kept", storage.kept_bytes, divided=storage.divided)
            if storage.score:
                keeper.add("scores", storage.kept_bytes, divided=storage.divided)
            # the gradient of the largest tensor exists while all other kept tensors still exist
            keeper.raise_to("backward_bytes", storage.kept_bytes, divided=storage.divided)


def _layer(stretch: Stretch, meter: OperationMeter, *, is_repeated: bool) -> Layer:
    """Return the planner's description of one layer, from ``stretch``, the counts of the layer's operations."""
    amounts: dict[str, Any] = {what: _share(amount, meter) for what, amount in stretch.amounts.items()}
    stored, scores = amounts.pop("stored", Split()), amounts.pop("scores", Split())
    kept = amounts.get("kept", Split())
    saved = Split(divided=max(0.0, kept.divided - stored.divided), whole=max(0.0, kept.whole - stored.whole))
    total = sum(stretch.parts)
    parts = tuple(part / total for part in stretch.parts if part)
    return Layer(
        name=stretch.name or "module",
        parameters=amounts.pop("parameters", Split()),
        cheap=saved if stretch.fused else scores,
        output_bytes=meter.bytes_of(stretch.output) / meter.num_samples,
        num_kernels=stretch.num_kernels,
        num_reductions=stretch.num_reductions if meter.can_divide else 0,
        mask_heads=0 if stretch.fused else stretch.heads,
        can_recompute=is_repeated,
        parts=parts or (1.0,),
        **amounts,
    )


def _share(amount: Split, meter: OperationMeter) -> Split:
    """Return the cost ``amount`` per sample, all of it as undivided if tensor parallelism cannot divide layers."""
    share = Split(divided=amount.divided / meter.num_samples, whole=amount.whole / meter.num_samples)
    return share if meter.can_divide else Split(whole=share.divided + share.whole)


def _with_loss(layer: Layer, stretch: Stretch, meter: OperationMeter, read_bytes: float) -> Layer:
    """Return the last layer with the added costs of a loss function, which reads the output of the layer.

    If the output is divided, a tensor group adds the gradients of the input of the layer.
    """
    tensor = stretch.output
    if tensor is None or not tensor.dim():
        return layer
    divided = meter.can_divide and meter.known(tensor).divided
    size, part = layer.output_bytes, "divided" if divided else "whole"
    return replace(
        layer,
        loss_bytes=Split(**{part: _LOGIT_COPIES * size}),
        memory_bytes=layer.memory_bytes + Split(**{part: _LOGIT_MOVES * size}),
        output_bytes=read_bytes if divided else size,
        num_reductions=layer.num_reductions + divided,
    )


def _sequence(given: list[Tensor]) -> int:
    """Return a sample's number of tokens: dimension 1 of the first integer or 3-dimensional input; else 1."""
    for tensor in given:
        if tensor.dim() == _TOKEN_DIMENSIONS or (tensor.dim() > 1 and not tensor.is_floating_point()):
            return tensor.shape[1]
    return 1
