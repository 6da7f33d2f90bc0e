"""Prediction of the memory of the device that needs most memory, by kind: weights, gradients, activations."""

from dataclasses import asdict, dataclass
from functools import lru_cache
from operator import itemgetter

from popsize.mapping import Mapping, Workload
from popsize.model import Layer
from popsize.phases import Loop, UnitCost, even_cuts, memory_with, parts_at, phase_cuts
from popsize.stages import Stage, shown_stages


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The bytes of memory that one device needs, divided by kind."""

    weights: float  # the model's weights
    gradients: float  # the gradients of the weights
    optimizer: float  # the optimizer's state, with the 32-bit copy of 16-bit weights
    activations: float  # activations that forward passes keep for backward passes
    # Memory that is needed briefly (gathered weights, a recomputed layer, the loss), and the driver's memory.
    workspace: float
    streaming: float = 0.0  # data in the slower memory beside the device

    @property
    def total(self) -> float:
        """Bytes in the device's own memory: weights, gradients, optimizer state, activations and workspace."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.workspace

    @property
    def own(self) -> dict[str, float]:
        """Bytes in the device's own memory, by kind, such as ``activations``."""
        return {kind: size for kind, size in asdict(self).items() if kind != "streaming"}

    @property
    def largest(self) -> tuple[str, float]:
        """Name and bytes of the kind, such as ``activations``, that needs most of the device's own memory."""
        return max(self.own.items(), key=itemgetter(1))


def memory_of(workload: Workload, mapping: Mapping) -> tuple[Memory, Stage]:
    """Return the memory that the fullest device needs, and the pipeline stage of this device."""
    every = (
        (_of_stage(stage, workload, mapping), stage) for stage in shown_stages(workload.model, mapping.pipeline)
    )
    return max(every, key=lambda pair: pair[0].total)


def in_flight(mapping: Mapping, stage: int, num_micro_batches: int) -> float:
    """Return how many micro batches' activations the pipeline stage ``stage`` keeps at the same time.

    1F1B keeps ``p - i`` on stage ``i``; interleaved ``p + (p - 1 - 2 i) / v`` (for the first stage: Korthikanti).
    """
    if mapping.schedule == "gpipe":
        return num_micro_batches
    stages = mapping.pipeline
    waiting = float(stages - stage)
    if mapping.interleave > 1:
        waiting = stages + (stages - 1 - 2 * stage) / mapping.interleave
    return min(waiting, num_micro_batches)


def _of_stage(stage: Stage, workload: Workload, mapping: Mapping) -> Memory:
    """Return the memory that each device of the pipeline stage ``stage`` needs."""
    if mapping.has_layer_phases:
        return _of_phases(workload, mapping)
    training, device = workload.training, workload.machine.device
    parameters = stage.parameters_on_device(mapping.tensor)
    weights = parameters * training.weight_bytes / mapping.weight_shards
    gradients = parameters * training.gradient_bytes / mapping.gradient_shards
    optimizer = parameters * training.optimizer_bytes / mapping.optimizer_shards
    activations = _activations(stage, workload, mapping)
    workspace = max(_passing_bytes(layer, workload, mapping) for layer, _ in stage.layers)
    workspace += _gathered_bytes(stage, parameters, workload, mapping)
    workspace += _torch_bytes(stage, workload, mapping)
    workspace += workload.constants.context_bytes if device.launches_ahead else 0.0
    streaming = 0.0
    if mapping.offload_optimizer or mapping.phases > 1:
        streaming, optimizer = optimizer, 0.0
    if mapping.phases > 1:
        streaming += weights + gradients + activations
        share = _phase_share(stage, mapping.tensor, mapping.phases)
        weights = gradients = share * parameters * training.used_bytes
        activations *= min(1.0, 1 / mapping.phases + 1 / sum(n for _, n in stage.layers))
    if mapping.offload_activations:
        kept = activations * min(1.0, 2 / (sum(n for _, n in stage.layers) * mapping.pipeline))
        activations, streaming = kept, streaming + activations - kept
    return Memory(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        workspace=workspace,
        streaming=streaming,
    )


def _of_phases(workload: Workload, mapping: Mapping) -> Memory:
    """Return the memory of a device that has two parts of the model (phases) in memory at the same time."""
    units, loop = phase_units(workload, mapping), phase_loop(workload, mapping)
    memory = memory_with(units, phase_cuts(units, mapping.phases, loop), loop)
    stored = sum(unit.updated_bytes + unit.state_bytes + loop.has_sums * unit.gradient_bytes for unit in units)
    return Memory(
        weights=memory.weights,
        gradients=memory.sums,
        optimizer=memory.state,
        activations=memory.activations,
        workspace=workload.constants.context_bytes if workload.machine.device.launches_ahead else 0.0,
        streaming=stored,
    )


def phase_loop(workload: Workload, mapping: Mapping) -> Loop:
    """Return a step's number of micro batches, and whether a host's replicas share weights in slower memory."""
    number = mapping.num_micro_batches(workload.training.global_batch)
    return Loop(num_micro_batches=number, is_shared=_num_sharing(workload, mapping) > 1)


def _num_sharing(workload: Workload, mapping: Mapping) -> int:
    """Return the number of replicas on a host, which share one copy of the weights in slower memory."""
    return min(mapping.replicas, max(1, workload.machine.devices_per_host // mapping.tensor))


@lru_cache(maxsize=256)
def phase_units(workload: Workload, mapping: Mapping) -> tuple[UnitCost, ...]:
    """Return the bytes of each layer of a model whose layers are loaded one after the other (in phases)."""
    training, tensor = workload.training, mapping.tensor
    sharing = _num_sharing(workload, mapping)
    every = workload.model.every_layer
    samples = mapping.micro_batch * workload.width
    units = list[UnitCost]()
    for before, layer in zip([None, *every], every, strict=False):
        parameters = layer.parameters.on_device(tensor)
        own = parameters - (workload.model.tied_parameters / tensor if len(units) == len(every) - 1 else 0.0)
        running = mapping.share(layer.kept + layer.loss_bytes + layer.backward_bytes)
        units.append(
            UnitCost(
                weight_bytes=parameters * training.weight_bytes,
                updated_bytes=own * training.weight_bytes / sharing,
                gradient_bytes=own * training.gradient_bytes,
                state_bytes=own * training.optimizer_bytes / sharing,
                input_bytes=samples * before.output_bytes if before else 0.0,
                running_bytes=samples * (running + layer.output_bytes),
            )
        )
    return tuple(units)


def _activations(stage: Stage, workload: Workload, mapping: Mapping) -> float:
    """Return the bytes of activations that a device keeps for the backward passes of all micro batches."""
    stored = sum(n * mapping.share(layer.stored(mapping.recompute)) for layer, n in stage.layers)
    number = in_flight(mapping, stage.index, mapping.num_micro_batches(workload.training.global_batch))
    return mapping.micro_batch * workload.width * stored * number


def _passing_bytes(layer: Layer, workload: Workload, mapping: Mapping) -> float:
    """Return the bytes that a device needs only while ``layer`` runs, besides kept activations."""
    whole, kept = mapping.share(layer.kept), mapping.share(layer.stored(mapping.recompute))
    brief = (layer.loss_bytes + layer.backward_bytes).on_device(mapping.tensor) + layer.output_bytes
    # Sharded gradients are added while scattered, and the gradients of a phase stay: both are counted elsewhere.
    is_added = mapping.gradient_shards == 1 and mapping.phases == 1
    added = layer.largest_matrix.on_device(mapping.tensor) if is_added else 0.0
    samples = mapping.micro_batch * workload.width
    return samples * (max(0.0, whole - kept) + brief) + added * workload.training.weight_bytes


def _torch_bytes(stage: Stage, workload: Workload, mapping: Mapping) -> float:
    """Return the bytes of torch's pipelines and sequence parallelism that are not in the published equations."""
    if workload.training.engine != "torch" or workload.machine.device.is_compiled_for:
        return 0.0
    number = mapping.num_micro_batches(workload.training.global_batch)
    under_way = in_flight(mapping, stage.index, number)
    block = workload.model.block
    sent = _sent_bytes(stage, block, mapping, number, under_way) if mapping.pipeline > 1 else 0.0
    joined = _joined_bytes(stage, mapping, under_way) if mapping.sequence_parallel else 0.0
    return mapping.micro_batch * workload.width * (sent + joined)


def _sent_bytes(stage: Stage, block: Layer, mapping: Mapping, number: int, under_way: float) -> float:
    """Return the bytes of a stage's buffers for sends and receives, per sample, if numbers have 16 bits.

    A stage has buffers for the activations and gradients that it receives for each micro batch of a step. The
    received activations of micro batches under way are counted with the layers. A stage keeps a sent tensor until
    its gradient arrives. Sequences are whole here, because models compute positions from whole sequences.
    """
    num_receiving = mapping.interleave - (stage.index == 0)
    num_sending = mapping.interleave - (stage.index == mapping.pipeline - 1)
    return block.output_bytes * (num_receiving * (number - under_way) + num_sending * (number + under_way))


def _joined_bytes(stage: Stage, mapping: Mapping, under_way: float) -> float:
    """Return the bytes of the sequences that sequence parallelism joins from parts, per sample, as 16-bit numbers.

    torch keeps the joined sequences; other libraries join the parts again in the backward pass. Embedding and
    logits are not divided along the sequence.
    """
    kept = passing = 0.0
    for layer, n in stage.layers:
        whole = layer.num_reductions * layer.output_bytes if layer.can_recompute else layer.kept.whole
        size = (1 - 1 / mapping.tensor) * whole
        is_kept = mapping.recompute == "none" or not layer.can_recompute
        if is_kept or (mapping.recompute == "attention" and not layer.cheap.whole):
            kept += n * size
        else:
            passing = max(passing, size)
    return kept * under_way + passing


def _gathered_bytes(stage: Stage, parameters: float, workload: Workload, mapping: Mapping) -> float:
    """Return the bytes of sharded weights that a device has gathered, and of their gradients before the scatter.

    One layer is used while the next layer is gathered. In a pipeline all layers of the stage stay gathered,
    because the next micro batch needs these layers at once.
    """
    if mapping.weight_shards == 1 or mapping.phases > 1:  # the weights of a phase are counted as whole weights
        return 0.0
    if mapping.pipeline > 1:
        return parameters * (workload.training.used_bytes + workload.training.gradient_bytes)
    largest = max(layer.parameters.on_device(mapping.tensor) for layer, _ in stage.layers)
    return largest * (2 * workload.training.used_bytes + workload.training.gradient_bytes)


@lru_cache(maxsize=4096)
def _phase_share(stage: Stage, tensor: int, phases: int) -> float:
    """Divide a stage's layers evenly into ``phases`` groups; return the largest group's share of the parameters.

    While one phase runs, the next phase is read: a part of a layer replaces the part that has been computed.
    """
    parts = tuple(
        share * layer.parameters.on_device(tensor)
        for layer, n in stage.layers
        for _ in range(n)
        for share in layer.parts
    )
    cuts = even_cuts(parts, phases)
    return max(map(sum, parts_at(cuts, parts))) / sum(parts)
