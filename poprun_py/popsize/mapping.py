"""Mappings: how the devices of a machine share a model (tensor, pipeline, replicas), and the rules of legality."""

import json
import math
import re
from collections.abc import Mapping as Table
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, Final, Literal, get_args

from popsize.catalogue import model_digest
from popsize.constants import CONSTANTS, Constants
from popsize.errors import MappingError
from popsize.hardware import PRECISIONS, Machine, PlannedDevices, Precision
from popsize.model import RECOMPUTE, Model, Recompute, Split
from popsize.stages import most_phases

Sharding = Literal["none", "optimizer", "gradients", "weights"]
SHARDING: Final[tuple[Sharding, ...]] = get_args(Sharding)
"""The choices of state to shard over replicas. Each choice after ``none`` also shards the state of the choices
before."""

Schedule = Literal["gpipe", "1f1b", "interleaved"]
SCHEDULES: Final[tuple[Schedule, ...]] = get_args(Schedule)

ENGINES: Final = ("torch", "other")

OPTIMIZER_BYTES: Final = {"sgd": 0, "momentum": 4, "lion": 4, "adam": 8, "adamw": 8, "lamb": 8}
"""The bytes of optimizer state per parameter, by optimizer, without a 32-bit copy of 16-bit weights."""

GRADIENT_BYTES: Final = (2, 4)

SCHEMA: Final = 1
"""The version of the format of a mapping's file, which `saved` writes."""

MOST_DEVICES: Final = 2**24
MOST_LAYERS: Final = 10_000
MOST_SAMPLES: Final = 10**12
"""The largest global batch that poprun-size plans, in samples; `MOST_DEVICES` and `MOST_LAYERS` are limits, too.
"""

_LARGEST_ROOT: Final = 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The training settings that do not depend on the mapping: batch, precision, optimizer, gradients."""

    global_batch: int  # samples of a step, over all replicas
    precision: Precision = "bf16"  # precision of the computation
    optimizer: str = "adamw"  # one of `OPTIMIZER_BYTES`
    gradient_bytes: int = 4  # bytes of a gradient; 4 where it is added in 32 bits
    # whether weights are kept in 32 bits and cast when they are used (autocast, FSDP), in place of 16-bit weights
    # with a 32-bit copy in the optimizer
    full_weights: bool = False
    # The library of pipelines and tensor groups. ``torch`` allocates memory for what each micro batch sends, and
    # keeps whole sequences where sequence parallelism joins their parts; ``other`` needs only what is computed.
    engine: str = "torch"

    def __post_init__(self) -> None:
        """Check the settings. Raise MappingError if one is unknown, or the global batch is out of range."""
        if not 1 <= self.global_batch <= MOST_SAMPLES:
            raise MappingError(f"a global batch has 1 to {MOST_SAMPLES} samples, and not {self.global_batch}")
        _one_of("precision", self.precision, PRECISIONS)
        _one_of("optimizer", self.optimizer, tuple(OPTIMIZER_BYTES))
        _one_of("engine", self.engine, ENGINES)
        if self.gradient_bytes not in GRADIENT_BYTES:
            raise MappingError(f"gradients of {self.gradient_bytes} bytes are not planned: 2 or 4")

    @property
    def half(self) -> bool:
        """Whether activations have 16 bits, as in fp16, bf16 and fp8."""
        return self.precision not in ("fp32", "tf32")

    @property
    def weight_bytes(self) -> int:
        """Bytes of one weight in the memory of the device."""
        return 2 if self.half and not self.full_weights else 4

    @property
    def used_bytes(self) -> int:
        """Bytes of one weight while a forward or backward pass uses it, after a gather or a cast."""
        return 2 if self.half else 4

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of optimizer state per parameter, including the 32-bit copy of each weight that has 16 bits."""
        return OPTIMIZER_BYTES[self.optimizer] + (4 if self.half and not self.full_weights else 0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Workload:
    """A model, the machine that trains it, and the training settings: the input of every prediction."""

    model: Model  # the model
    machine: Machine  # the machine; all its devices are used
    training: Training  # batch, precision and optimizer
    memory_limit_bytes: float | None = None  # how much of a device's memory may be used; None: all
    constants: Constants = CONSTANTS  # which share of the machine's speeds programs reach

    def __post_init__(self) -> None:
        """Check the sizes. Raise MappingError if one is too large, or the memory limit is not above 0."""
        limit = self.memory_limit_bytes
        if limit is not None and not (math.isfinite(limit) and limit > 0):
            raise MappingError(f"a memory limit of {limit} bytes is no limit: give a number above 0")
        if self.machine.num_devices > MOST_DEVICES:
            raise MappingError(f"{self.machine.num_devices} devices are not planned: at most {MOST_DEVICES}")
        if self.model.num_layers > MOST_LAYERS:
            raise MappingError(
                f"{self.model.name} has {self.model.num_layers} layers: at most {MOST_LAYERS} are planned"
            )

    @property
    def limit_bytes(self) -> float:
        """Bytes of a device's memory that a mapping may use: the user's limit, or the whole memory."""
        memory = self.machine.device.memory_bytes
        return memory if self.memory_limit_bytes is None else min(memory, self.memory_limit_bytes)

    @property
    def width(self) -> int:
        """Size of one number in an activation, in units of 16 bits: 1 or 2."""
        return 1 if self.training.half else 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapping:
    """A division of a model: each layer on ``tensor`` devices, in ``pipeline`` stages, in ``replicas`` copies."""

    tensor: int = 1  # devices that share each layer
    pipeline: int = 1  # stages that the layers are cut into
    replicas: int = 1  # copies of the model that train on other samples
    micro_batch: int = 1  # samples that a replica computes at once
    schedule: Schedule = "1f1b"  # in which order a stage computes forward and backward passes
    interleave: int = 1  # pieces of the model that a stage has if ``schedule`` is ``interleaved``; otherwise 1
    recompute: Recompute = "none"  # the activations that the backward pass computes again
    sequence_parallel: bool = False  # whether a tensor group also divides norms and dropout, along the sequence
    sharding: Sharding = "none"  # the state that is sharded over replicas
    weight_shards: int = 1  # over how many replicas weights are sharded
    optimizer_shards: int = 1  # over how many replicas the optimizer's state is sharded
    offload_activations: bool = False  # whether activations wait in the slower memory beside the device
    offload_optimizer: bool = False  # whether the optimizer's state is in the slower memory
    phases: int = 1  # parts of a stage's layers that are in memory one after the other; 1: all layers at once

    @property
    def num_devices(self) -> int:
        """Number of devices that the mapping uses."""
        return self.tensor * self.pipeline * self.replicas

    @property
    def has_layer_phases(self) -> bool:
        """Whether whole layers are in memory one after the other, as in `popdist.parallel.phased`."""
        return self.phases > 1 and self.pipeline == 1 and self.sharding == "none"

    @property
    def gradient_shards(self) -> int:
        """Number of replicas over which gradients are sharded; 1 if gradients are not sharded."""
        return {"gradients": self.optimizer_shards, "weights": self.weight_shards}.get(self.sharding, 1)

    def share(self, amount: Split) -> float:
        """Return the part of a layer's ``amount``, such as bytes, that each device of a tensor group has."""
        return amount.on_device(self.tensor, sequence_parallel=self.sequence_parallel)

    def num_micro_batches(self, global_batch: int) -> int:
        """Return the number of micro batches per replica and step (gradient accumulation)."""
        return max(1, global_batch // (self.replicas * self.micro_batch))

    @property
    def text(self) -> str:
        """The mapping as text for `--fix`: tensor, pipeline, replicas, micro_batch, others if not default."""
        shown = [f.name for f in fields(self) if f.name in _ALWAYS or getattr(self, f.name) != f.default]
        return ",".join(f"{name}={_word(getattr(self, name))}" for name in shown)


_ALWAYS: Final = ("tensor", "pipeline", "replicas", "micro_batch")

_NAMES: Final = {
    name: ours
    for ours, names in {
        "tensor": "t tp tensor_parallel_size tensor_model_parallel_size",
        "pipeline": "p pp pipeline_parallel_size pipeline_model_parallel_size",
        "replicas": "r dp data_parallel_size num_replicas",
        "micro_batch": "b mb micro_batch_size",
        "weight_shards": "rts sharding_group",
        "optimizer_shards": "optimizer_sharding_group",
        "sequence_parallel": "sp",
        "interleave": "vp vpp virtual_pipeline virtual_pipeline_parallel_size",
        "sharding": "zero zero_stage",
    }.items()
    for name in names.split()
}
"""For each name that other libraries use for a value of a mapping, such as ``tp``, the name of the field in
`Mapping`."""

ACCUMULATION: Final = (
    *("accumulation", "accumulate", "ga", "gas", "grad_accum"),
    *("gradient_accumulation", "gradient_accumulation_steps"),
)
"""Names that other libraries use for the number of micro batches, which `Mapping` computes from other values."""

NOT_PLANNED: Final = {
    **dict.fromkeys(("cp", "context", "context_parallel", "context_parallel_size"), "context parallelism"),
    **dict.fromkeys(("ep", "expert", "expert_parallel", "expert_parallel_size"), "expert parallelism"),
}
"""For each name of a parallelism that poprun-size does not plan, such as ``ep``, the words for an error."""

_VALUES: Final[Table[str, Table[str, str]]] = {
    "recompute": {"full": "layer", "selective": "attention"}
    | dict.fromkeys(("true", "yes"), "layer")
    | dict.fromkeys(("false", "no"), "none"),
    "schedule": dict.fromkeys(("1f1b-interleaved", "interleaved_1f1b", "interleaved1f1b"), "interleaved"),
    "sharding": {
        **{f"{zero}{stage}": kind for zero in ("", "zero", "zero-") for stage, kind in enumerate(SHARDING)},
        "fsdp": "weights",
        "no": "none",
    },
}
"""For each field of `Mapping`, the words of other libraries for its values, each with the value in `Mapping`."""

_CHOICES: Final = {"schedule": SCHEDULES, "recompute": RECOMPUTE, "sharding": SHARDING}


def parse_mapping(words: str) -> dict[str, Any]:
    """Return a mapping's values, by name, from a text such as ``tensor=8``. Raise MappingError if it is wrong."""
    values: dict[str, Any] = {}
    for part in filter(None, (piece.strip() for piece in words.replace(" ", ",").split(","))):
        name, equals, value = part.partition("=")
        key = mapping_name(name)
        if not equals or not value:
            raise MappingError(f"{part!r} gives no value: write {key}=8")
        parsed = parse_value(key, value)
        if values.setdefault(key, parsed) != parsed:
            raise MappingError(f"{key} is given twice: {_word(values[key])} and {_word(parsed)}")
    return values


def mapping_name(name: str) -> str:
    """Return the field of `Mapping` that ``name`` means, as ``tensor`` for ``tp``. Raise MappingError if none."""
    plain = name.strip().lower().lstrip("-").replace("-", "_")
    known = [f.name for f in fields(Mapping)]
    key = _NAMES.get(plain, plain)
    if plain in NOT_PLANNED:
        raise MappingError(f"a mapping has no {name!r}: not planned: {NOT_PLANNED[plain]}")
    if plain in ACCUMULATION:
        raise MappingError(
            f"a mapping has no {name!r}: give micro_batch: the accumulation is the global batch / "
            "(replicas x micro_batch)"
        )
    if key not in known:
        near = get_close_matches(plain, known, 3, 0.4) or known[:4]
        raise MappingError(f"a mapping has no {name!r}: nearest are {', '.join(near)}")
    return key


def parse_value(key: str, value: str) -> Any:
    """Return ``value``, a text, in the type of the field ``key`` of `Mapping`; for tensor, ``8x8`` means 64."""
    word = value.strip().lower()
    if key in _CHOICES:
        return _one_of(key, _VALUES[key].get(word, word), _CHOICES[key])
    if isinstance(getattr(Mapping(), key), bool):
        if word not in ("yes", "no", "true", "false", "1", "0"):
            raise MappingError(f"{key}={value}: say yes or no")
        return word in ("yes", "true", "1")
    return math.prod(parse_count(key, part) for part in (word.split("x") if key == "tensor" else [word]))


def parse_count(name: str, value: str) -> int:
    """Return the whole number in a text such as ``8`` or ``8.0``. Raises MappingError if it is not above 0."""
    match = re.fullmatch(r"0*([1-9][0-9]{0,14})(?:\.0*)?", value)
    if match is None:
        raise MappingError(f"{name}={value:.40}: give a whole number of 1 or more")
    return int(match[1])


def completed(values: Table[str, Any], num_devices: int) -> Mapping:
    """Return the mapping with the given ``values``; by default, replicas use all ``num_devices`` devices, and all
    replicas share the sharded state.

    If a stage has several pieces, the schedule is interleaved. Layers that run in phases are recomputed.
    """
    size = values.get("tensor", 1) * values.get("pipeline", 1)
    replicas = values.get("replicas", max(1, num_devices // size))
    schedule = "interleaved" if values.get("interleave", 1) > 1 else "1f1b"
    sharding = values.get("sharding", "none")
    shards = ["optimizer_shards"] * (sharding != "none") + ["weight_shards"] * (sharding == "weights")
    mapping = Mapping(**{"replicas": replicas, "schedule": schedule, **dict.fromkeys(shards, replicas), **values})
    return replace(mapping, recompute=values.get("recompute", "layer")) if mapping.has_layer_phases else mapping


def check(mapping: Mapping, workload: Workload) -> None:
    """Check that a program can run ``mapping``. Raise MappingError, with the nearest legal values, if not."""
    if (mapping.offload_activations or mapping.offload_optimizer or mapping.phases > 1) and not (
        workload.machine.device.streaming_bytes_per_second
    ):
        raise MappingError(
            f"{workload.machine.name} has no slower memory beside its devices: nothing can wait there"
        )
    check_model(mapping, workload.model)
    _check_pipeline(mapping, workload)
    _check_batch(mapping, workload.training.global_batch)
    _check_shards(mapping)


def check_model(mapping: Mapping, model: Model) -> None:
    """Check that the sizes of ``model`` divide over the devices of ``mapping``. Raise MappingError if not."""
    _check_tensor(mapping, model)
    pipeline, interleave = mapping.pipeline, mapping.interleave
    if pipeline * interleave > model.num_layers:
        raise MappingError(
            f"pipeline={pipeline} with interleave={interleave} needs {pipeline * interleave} layers, and "
            f"{model.name} has {model.num_layers}: at most pipeline={max(1, model.num_layers // interleave)}"
        )
    if interleave > 1 and model.num_layers % (pipeline * interleave):
        raise MappingError(
            f"{model.num_layers} layers of {model.name} do not divide into pipeline={pipeline} x "
            f"interleave={interleave}: pieces of stages are equally large"
        )


def _check_tensor(mapping: Mapping, model: Model) -> None:
    """Check that tensor and sequence parallelism divide the model's sizes. Raise MappingError if not."""
    if undivided := model.undivided(mapping.tensor):
        name, number = undivided[0]
        near = [t for t in divisors(number) if not model.undivided(t)]
        raise MappingError(
            f"tensor={mapping.tensor} does not divide {name}={number} of {model.name}: "
            f"nearest are {_nearest(mapping.tensor, near)}"
        )
    if not mapping.sequence_parallel:
        return
    if mapping.tensor == 1:
        raise MappingError("sequence_parallel=yes needs tensor=2 or more")
    if model.sequence % mapping.tensor:
        raise MappingError(
            f"sequence_parallel=yes divides sequence={model.sequence} of {model.name} over "
            f"tensor={mapping.tensor}: nearest are {_nearest(mapping.tensor, divisors(model.sequence))}"
        )


def _check_pipeline(mapping: Mapping, workload: Workload) -> None:
    """Check that phases, interleaving and schedule agree, and fit the model. Raise MappingError if not."""
    model, pipeline, interleave = workload.model, mapping.pipeline, mapping.interleave
    most = most_phases(model, pipeline, are_layers=mapping.has_layer_phases)
    if mapping.phases > most:
        what = "layers of" if mapping.has_layer_phases else "parts of a stage of"
        raise MappingError(f"phases={mapping.phases} are more than the {most} {what} {model.name}")
    if mapping.has_layer_phases and (
        mapping.recompute != "layer" or mapping.offload_activations or mapping.offload_optimizer
    ):
        raise MappingError(
            f"phases={mapping.phases} of whole layers compute these again, and keep the optimizer's state outside "
            "the device: recompute=layer, and neither offload_activations nor offload_optimizer"
        )
    if (interleave > 1) != (mapping.schedule == "interleaved") or (interleave > 1 and pipeline == 1):
        raise MappingError("interleave is 2 or more with schedule=interleaved and several stages, and 1 otherwise")
    number = mapping.num_micro_batches(workload.training.global_batch)
    if interleave > 1 and number % pipeline:
        raise MappingError(
            f"schedule=interleaved needs a multiple of pipeline={pipeline} micro batches, "
            f"and a replica has {number}"
        )


def _check_batch(mapping: Mapping, global_batch: int) -> None:
    """Check that replicas times micro batch divides the global batch. Raise MappingError if it does not."""
    if global_batch % mapping.micro_batch:
        raise MappingError(
            f"micro_batch={mapping.micro_batch} does not divide a global batch of {global_batch}: "
            f"nearest are {_nearest(mapping.micro_batch, divisors(global_batch))}"
        )
    if global_batch % (mapping.replicas * mapping.micro_batch):
        near = [r for r in divisors(global_batch) if global_batch // r % mapping.micro_batch == 0]
        raise MappingError(
            f"a global batch of {global_batch} does not divide into replicas={mapping.replicas} with "
            f"micro_batch={mapping.micro_batch}: nearest are replicas={_nearest(mapping.replicas, near)}"
        )


def _check_shards(mapping: Mapping) -> None:
    """Check the numbers of shards. Raise MappingError if one does not divide the replicas, or fit ``sharding``."""
    weights, optimizer = mapping.weight_shards, mapping.optimizer_shards
    for name, number in (("weight_shards", weights), ("optimizer_shards", optimizer)):
        if mapping.replicas % number:
            raise MappingError(
                f"{name}={number} does not divide replicas={mapping.replicas}: "
                f"nearest are {_nearest(number, divisors(mapping.replicas))}"
            )
    if mapping.sharding == "none" and (weights > 1 or optimizer > 1):
        raise MappingError("weight_shards and optimizer_shards need sharding=optimizer, gradients or weights")
    if mapping.sharding != "weights" and weights > 1:
        raise MappingError(
            f"weight_shards needs sharding=weights; sharding={mapping.sharding} leaves weights whole"
        )
    name = "weight_shards" if mapping.sharding == "weights" else "optimizer_shards"
    if mapping.sharding != "none" and getattr(mapping, name) == 1 < mapping.replicas:
        raise MappingError(f"sharding={mapping.sharding} with {name}=1 shards nothing: give 2 or more")
    if optimizer % weights:
        raise MappingError(
            f"weight_shards={weights} does not divide optimizer_shards={optimizer}: "
            "the optimizer's state is sharded as finely as the weights, or finer"
        )


def saved(mapping: Mapping, workload: Workload) -> str:
    """Return ``mapping`` as the text of a JSON file, which `poprun --parallelism` reads."""
    table = {
        "schema": SCHEMA,
        "model": workload.model.name,
        "model_sha256": model_digest(workload.model),
        "parameters": workload.model.num_parameters,
        "machine": asdict(PlannedDevices.of(workload.machine)),
        "training": asdict(workload.training),
        "mapping": asdict(mapping),
    }
    return json.dumps(table, indent=2) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedMapping:
    """The contents of a mapping's file: the mapping, the training settings and the planned devices."""

    mapping: Mapping
    training: Training
    devices: PlannedDevices | None  # None if the file has no ``machine``


def loaded(text: str, origin: str, model: Model | None = None) -> SavedMapping:
    """Return the mapping in ``text``, which `saved` wrote. Raises MappingError if it is for another ``model``."""
    try:
        table = json.loads(text)
        if table["schema"] != SCHEMA:
            raise MappingError(
                f"{origin} has schema {table['schema']!r}; this version reads {SCHEMA}: save it again"
            )
        if model is not None and table["model_sha256"] != model_digest(model):
            raise MappingError(
                f"{origin} was planned for {table['model']} of {table['parameters']:,.0f} parameters, and not for "
                f"this {model.name} of {model.num_parameters:,.0f}: plan again, or give the same model"
            )
        return SavedMapping(
            mapping=from_table(table["mapping"]),
            training=Training(**table["training"]),
            devices=PlannedDevices(**table["machine"]) if "machine" in table else None,
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise MappingError(f"{origin} is no mapping that poprun-size --save wrote: {error}") from None


def from_table(table: Table[str, Any]) -> Mapping:
    """Return the mapping with the values in ``table``, whose keys are names such as ``tensor`` or ``tp``."""
    values = {mapping_name(name): value for name, value in table.items()}
    return Mapping(**{name: parse_value(name, _word(value)) for name, value in values.items()})


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> str:
    """Return ``value`` of the field ``name``. Raise MappingError if ``value`` is not one of ``choices``."""
    if value not in choices:
        raise MappingError(f"{name}={value}: it is one of {', '.join(choices)}")
    return value


def _word(value: object) -> str:
    """Return a value of a mapping as text: ``yes`` or ``no`` for a bool, ``str(value)`` for all others."""
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


@lru_cache(maxsize=512)
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of ``number`` in ascending order; if it is above 10^12, only those up to 10^6 and their
    quotients ``number`` / divisor.
    """
    low = [d for d in range(1, min(math.isqrt(number), _LARGEST_ROOT) + 1) if number % d == 0]
    return tuple(sorted({*low, *(number // d for d in low)}))


def _nearest(number: int, legal: Sequence[int]) -> str:
    """Return the text of the two numbers in ``legal`` that are nearest to ``number``, for an error."""
    return " and ".join(map(str, sorted(sorted(legal, key=lambda n: abs(n - number))[:2])))
