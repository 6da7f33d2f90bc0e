"""Prediction of the duration of a step: a roofline for each layer, communication, and the pipeline's bubble."""

import math
from dataclasses import dataclass, fields, replace
from functools import lru_cache

from popsize.footprint import phase_loop, phase_units
from popsize.hardware import Machine
from popsize.mapping import Mapping, Training, Workload
from popsize.model import Layer, Recompute
from popsize.phases import PhasePlan, StoreSpeed, phase_cuts, plan_with
from popsize.stages import Stage, most_parameters, shown_stages

_AGAIN = 4
"""Duration of the passes of a recomputed layer, in forward passes: two forward, and a backward of two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Duration:
    """The predicted seconds of a step on the slowest device, divided by activity."""

    layers: float  # forward and backward passes, including recomputation
    tensor: float  # all-reduces over the tensor group
    bubble: float  # waiting for the pipeline to fill and to drain
    stages: float  # sending activations between stages
    replicas: float = 0  # all-reduces of gradients over replicas
    gathering: float = 0  # all-gathers of sharded weights
    optimizer: float = 0.0  # the update of the weights
    streaming: float = 0.0  # waiting for the slower memory while nothing is computed

    @property
    def total(self) -> float:
        """Predicted seconds of the whole step: the sum of all activities, such as passes and collectives."""
        return math.fsum(getattr(self, f.name) for f in fields(self))


@dataclass(frozen=True, slots=True)
class _Passes:
    """The seconds of a micro batch's forward and backward pass: computing, and all-reduces of a tensor group."""

    layers: float
    tensor: float

    @property
    def total(self) -> float:
        return self.layers + self.tensor


_Way = tuple[int, int, Recompute, bool, bool]
"""Tensor group's size, micro batch, recomputation, whether the sequence is divided, and whether a tensor group is
inside one host."""


def running_duration(workload: Workload, mapping: Mapping) -> Duration:
    """Return the seconds of a step's passes, by activity, without what sharding and offloading add."""
    shown = shown_stages(workload.model, mapping.pipeline)
    stages = [_stage_passes(stage, workload, mapping) for stage in shown]
    slowest = max(stages, key=lambda passes: passes.total)
    number = mapping.num_micro_batches(workload.training.global_batch)
    return Duration(
        layers=number * slowest.layers,
        tensor=number * slowest.tensor,
        bubble=(_all_stages(mapping, stages) - slowest.total) * _waiting_share(mapping, number)
        + _drained_seconds(workload, mapping),
        stages=(number * mapping.interleave + mapping.pipeline - 1) * _transfer_seconds(workload, mapping),
    )


def updated(running: Duration, workload: Workload, mapping: Mapping) -> Duration:
    """Add a step's weight update and collectives over replicas to ``running``, the duration of its passes."""
    parameters = most_parameters(workload.model, mapping.pipeline, mapping.tensor)
    collectives = {one.name: one.seconds(workload) for one in exchanges(workload, mapping)}
    return replace(running, **collectives, optimizer=_optimizer_seconds(parameters, workload, mapping))


def streamed(found: Duration, workload: Workload, mapping: Mapping) -> Duration:
    """Return a step's duration with waits for slower memory added; ``found`` is its duration without the waits."""
    if mapping.has_layer_phases:
        step = phase_plan(workload, mapping).step
        return replace(found, streaming=step.reading + step.writing)
    waiting, behind = streamed_bytes(workload, mapping)
    if not waiting + behind:
        return found
    speed, computing = workload.machine.device.streaming_bytes_per_second, found.layers + found.tensor
    return replace(found, streaming=waiting / speed + max(0.0, behind / speed - computing))


def _waiting_share(mapping: Mapping, num_micro_batches: int) -> float:
    """Return a stage's wait for the pipeline, divided by a micro batch's seconds in all other stages together.

    If stages have several pieces and micro batches are enough, a stage waits for one piece of each other stage.
    """
    if mapping.interleave == 1:
        return 1.0
    filled = min(num_micro_batches, mapping.pipeline)
    return (mapping.pipeline - filled + (filled - 1) / mapping.interleave) / (mapping.pipeline - 1)


def _all_stages(mapping: Mapping, shown: list[_Passes]) -> float:
    """Return a micro batch's seconds in all stages; ``shown`` has the first, one of all between, and the last."""
    between = mapping.pipeline - 2
    return sum(passes.total for passes in shown) + max(0, between - 1) * shown[len(shown) // 2].total


def _drained_seconds(workload: Workload, mapping: Mapping) -> float:
    """Return the seconds that stages wait for the last stage's logits while a pipeline fills and drains."""
    last = workload.model.layers[-1]
    if mapping.pipeline == 1 or not last.loss_bytes.divided:
        return 0.0
    passes = _passes(last, workload, mapping)
    return (mapping.pipeline - 1) * workload.constants.drained_logits * passes.total


def _stage_passes(stage: Stage, workload: Workload, mapping: Mapping) -> _Passes:
    """Return the seconds of a micro batch's forward and backward pass through the pipeline stage ``stage``."""
    passes = [(n, _passes(layer, workload, mapping)) for layer, n in stage.layers]
    return _Passes(sum(n * one.layers for n, one in passes), sum(n * one.tensor for n, one in passes))


def _passes(layer: Layer, workload: Workload, mapping: Mapping) -> _Passes:
    """Return a micro batch's seconds in ``layer``, which is recomputed if layers are loaded in groups (phases)."""
    near = is_near(mapping.tensor, 1, workload.machine, mapping.num_devices)
    way = mapping.tensor, mapping.micro_batch, mapping.recompute, mapping.sequence_parallel, near
    passes = _layer_passes(layer, workload, way)
    if not mapping.has_layer_phases or layer.can_recompute:
        return passes
    return _Passes(passes.layers * _AGAIN / 3, passes.tensor * _AGAIN / 3)


@lru_cache(maxsize=8192)
def _layer_passes(layer: Layer, workload: Workload, way: _Way) -> _Passes:
    """Return the seconds of a micro batch's passes through ``layer`` on each device of a tensor group."""
    tensor, micro_batch, recompute, sequence_parallel, is_near = way
    training, constants, width = workload.training, workload.constants, workload.width
    device = workload.machine.device
    speed = device.flops_at(training.precision) * constants.matmul_efficiency
    moved = device.memory_bytes_per_second * constants.memory_efficiency / width
    again = recompute if layer.can_recompute else "none"
    whole = 4 if again == "layer" else 3
    selective = again == "attention" and layer.cheap_flops.divided > 0
    core = 3 if again == "none" or selective else 4
    matmul = layer.matmul_flops.on_device(tensor) / speed
    if layer.loss_bytes.divided and tensor == 1 and device.launches_ahead:
        matmul *= constants.whole_logits_slowdown
    elementwise = layer.memory_bytes.on_device(tensor, sequence_parallel=sequence_parallel) / moved
    attention = layer.attention_flops.on_device(tensor) / speed + layer.score_bytes.on_device(tensor) / moved
    twice = layer.cheap_flops.on_device(tensor) / speed + elementwise if selective else 0.0
    kernels = (4 if selective else whole) * layer.num_kernels
    each = constants.ramp_seconds if device.launches_ahead else device.operator_seconds
    busy = micro_batch * (whole * (matmul + elementwise) + twice + core * attention) + kernels * each
    started = kernels + (constants.skew_kernels if tensor > 1 and kernels else 0)
    if layer.mask_heads and (micro_batch * layer.mask_heads / tensor) % 4:
        started += constants.unfused_kernels
    sums = 0.0
    if tensor > 1:
        size = micro_batch * layer.output_bytes * width
        ring = Exchange("tensor", tensor_rounds(layer, recompute), size, tensor, stride=1, is_near=is_near)
        sums = ring.seconds(workload)
    if device.launches_ahead:
        busy = max(busy, started * constants.launch_seconds - sums)
        busy += constants.outside_seconds if layer.loss_bytes.divided else 0.0
    elif device.operator_seconds:
        busy += _parameter_bytes(layer.parameters.on_device(tensor), whole, training) / (moved * width)
    return _Passes(busy, sums)


def _parameter_bytes(parameters: float, passes: int, training: Training) -> float:
    """Return the bytes of weights and gradients that a CPU moves in a micro batch; a GPU hides this traffic."""
    return parameters * ((passes + 1) * training.weight_bytes + 2 * training.gradient_bytes)


@dataclass(frozen=True, slots=True)
class Exchange:
    """The collectives that a group of devices makes for one purpose in a step, counted as rounds in a ring."""

    name: str  # the field of `Duration` to which the time is added
    rounds: float  # rounds in the ring: an all-reduce takes 2, a reduce-scatter or all-gather 1
    size: float  # bytes of a device's whole buffer
    devices: int  # number of devices in the group
    stride: int  # distance of two neighbours, in devices; as many groups share the network of a host
    is_near: bool  # whether each group is inside a host

    @property
    def sent(self) -> float:
        """Bytes that each device of the group sends in a step for the group's collectives of one purpose."""
        return self.rounds * (self.devices - 1) / self.devices * self.size

    def seconds(self, workload: Workload) -> float:
        """Return the seconds of the group's collectives in a step, from the links' bandwidth and latency."""
        latency = workload.machine.collective_seconds or workload.constants.collective_seconds
        waits = latency * math.sqrt(math.log2(self.devices))
        return self.sent / _bandwidth(workload, self.stride, is_near=self.is_near) + self.rounds / 2 * waits


def tensor_rounds(layer: Layer, recompute: Recompute) -> float:
    """Return how often a micro batch's output of ``layer`` goes round a tensor group's ring, in all passes."""
    return 2.0 * layer.num_reductions * (3 if recompute == "layer" and layer.can_recompute else 2)


def _bandwidth(workload: Workload, stride: int, *, is_near: bool) -> float:
    """Return the bytes per second that a device sends to its neighbour, ``stride`` devices away, in a ring."""
    machine = workload.machine
    link = machine.link_bytes_per_second * workload.constants.link_efficiency
    return link if is_near else min(link, machine.network_bytes_per_second / min(stride, machine.devices_per_host))


def is_near(devices: int, stride: int, machine: Machine, num_devices: int) -> bool:
    """Whether each group of ``devices`` devices, ``stride`` apart, lies inside one host."""
    reach, host = devices * stride, machine.devices_per_host
    return num_devices <= host or (reach <= host and host % reach == 0)


def exchanges(workload: Workload, mapping: Mapping) -> tuple[Exchange, ...]:
    """Return the collectives of a step over replicas: all-reduces of gradients, all-gathers of weights.

    An all-reduce takes 2 rounds. Sharded gradients are scattered for each micro batch, and the
    updated weights gathered once. Sharded weights are gathered for each forward and each backward pass of a micro
    batch, and not after the update; in a pipeline they stay gathered for all micro batches of a step (Rajbhandari
    et al., arXiv 1910.02054, section 7; Zhao et al., arXiv 2304.11277).
    """
    if mapping.replicas == 1:
        return ()
    size = most_parameters(workload.model, mapping.pipeline, mapping.tensor) * 2 * workload.width
    number = mapping.num_micro_batches(workload.training.global_batch) if mapping.pipeline == 1 else 1

    def among(name: str, rounds: float, devices: int) -> Exchange:
        near = is_near(devices, mapping.tensor, workload.machine, mapping.num_devices)
        return Exchange(name, rounds, size, devices, mapping.tensor, near)

    if mapping.sharding == "gradients":
        return (among("replicas", number + 1, mapping.replicas),)
    if mapping.sharding == "weights" and mapping.weight_shards > 1:
        gathered = among("gathering", 2 * number if mapping.pipeline == 1 else 1, mapping.weight_shards)
        return (among("replicas", number, mapping.replicas), gathered)
    return (among("replicas", 2, mapping.replicas),)


def _transfer_seconds(workload: Workload, mapping: Mapping) -> float:
    """Return the seconds to send a micro batch's activations to the next stage and receive gradients."""
    if mapping.pipeline == 1:
        return 0.0
    stride = mapping.tensor * mapping.replicas
    near = is_near(2, stride, workload.machine, mapping.num_devices)
    return transfer_bytes(workload, mapping) / _bandwidth(workload, stride, is_near=near)


def transfer_bytes(workload: Workload, mapping: Mapping) -> float:
    """Return the bytes that a device sends to and receives from the next stage for a micro batch."""
    return 2 * mapping.micro_batch * workload.model.block.output_bytes * workload.width / mapping.tensor


def _optimizer_seconds(parameters: float, workload: Workload, mapping: Mapping) -> float:
    """Return the seconds to update ``parameters`` weights, limited by the memory traffic of weights and state."""
    training, device = workload.training, workload.machine.device
    moved = 2 * training.optimizer_bytes + training.gradient_bytes + training.weight_bytes
    speed = device.memory_bytes_per_second * workload.constants.memory_efficiency
    return parameters / mapping.optimizer_shards * moved / speed


def streamed_bytes(workload: Workload, mapping: Mapping) -> tuple[float, float]:
    """Return how many bytes a device moves in a step to and from the slower memory beside the device's own memory:
    the bytes for which computing waits, and the bytes that move during computing.
    """
    training, model = workload.training, workload.model
    parameters = most_parameters(model, mapping.pipeline, mapping.tensor)
    number = mapping.num_micro_batches(training.global_batch)
    waiting = behind = 0.0
    if mapping.has_layer_phases:
        step = phase_plan(workload, mapping).step
        return 0.0, step.read_bytes + step.written_bytes
    if mapping.offload_optimizer or mapping.phases > 1:
        waiting = 2 * parameters * training.optimizer_bytes / mapping.optimizer_shards
    if mapping.phases > 1:
        shards = mapping.weight_shards
        behind += number * parameters * (2 * training.weight_bytes + training.gradient_bytes) / shards
    if mapping.offload_activations or mapping.phases > 1:
        layers = number * mapping.micro_batch * model.num_layers / mapping.pipeline
        size = mapping.share(model.block.stored(mapping.recompute)) * workload.width
        behind += 2 * layers * size
    return waiting, behind


@lru_cache(maxsize=1024)
def phase_plan(workload: Workload, mapping: Mapping) -> PhasePlan:
    """Return the predicted memory and time of a step that loads the layers in groups (phases), one by one."""
    device, units, loop = workload.machine.device, phase_units(workload, mapping), phase_loop(workload, mapping)
    passes = [_passes(layer, workload, mapping).total for layer in workload.model.every_layer]
    parameters = sum(unit.gradient_bytes for unit in units)
    update = _optimizer_seconds(most_parameters(workload.model, 1, mapping.tensor), workload, mapping)
    timed = [
        replace(
            unit,
            forward_seconds=seconds / _AGAIN,
            backward_seconds=seconds * (1 - 1 / _AGAIN),
            update_seconds=update * unit.gradient_bytes / parameters,
        )
        for unit, seconds in zip(units, passes, strict=True)
    ]
    speed = StoreSpeed(
        read_bytes_per_second=device.streaming_bytes_per_second,
        write_bytes_per_second=device.streaming_write_bytes_per_second,
    )
    return plan_with(timed, phase_cuts(units, mapping.phases, loop), speed, loop)
