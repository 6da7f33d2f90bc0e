"""The search over all legal mappings of a model to devices, for the fastest mappings that fit in memory."""

import math
from bisect import insort
from collections.abc import Iterator
from collections.abc import Mapping as Table
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import nlargest
from operator import attrgetter
from typing import Any, Final

from popsize.duration import Duration, running_duration, streamed, updated
from popsize.errors import MappingError
from popsize.footprint import Memory, memory_of
from popsize.hardware import GIB, gib
from popsize.mapping import MOST_DEVICES, Mapping, Schedule, Workload, check, completed, divisors
from popsize.model import RECOMPUTE
from popsize.phases import numbers_of_phases
from popsize.stages import Stage, most_phases

_LARGEST_MICRO_BATCH: Final = 64
_INTERLEAVE: Final = (1, 2, 3, 4, 6, 8)
_MORE_DEVICES: Final = (2, 4, 8, 16, 32, 64)
_FEW_SHARDS: Final = 4
"""If a shard group has at most so many possible sizes, each size is tried; otherwise only one host and all
replicas."""
_MOST_BETTER: Final = 100
"""The largest number of shapes without a fitting mapping that are tried to find the next faster mapping."""

_Values = dict[str, Any]
"""Values of fields of a mapping, by name."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """A legal mapping (division of a model over devices), with its predicted duration and memory."""

    workload: Workload
    mapping: Mapping
    running: Duration | None = None  # the duration of the passes, if it is known already

    @property
    def num_micro_batches(self) -> int:
        """Number of micro batches that a replica computes in a step."""
        return self.mapping.num_micro_batches(self.workload.training.global_batch)

    @cached_property
    def duration(self) -> Duration:
        """Predicted seconds of a step, divided by activity."""
        return streamed(self.unstreamed, self.workload, self.mapping)

    @cached_property
    def unstreamed(self) -> Duration:
        """Predicted seconds of a step without the waits for the slower memory, by activity."""
        running = self.running or running_duration(self.workload, self.mapping)
        return updated(running, self.workload, self.mapping)

    @cached_property
    def _fullest(self) -> tuple[Memory, Stage]:
        return memory_of(self.workload, self.mapping)

    @property
    def memory(self) -> Memory:
        """Predicted bytes of memory on the device that needs most, by kind."""
        return self._fullest[0]

    @property
    def stage(self) -> Stage:
        """The pipeline stage, as a `Stage`, whose devices need most memory."""
        return self._fullest[1]

    @property
    def missing_bytes(self) -> float:
        """Bytes by which the fullest device's memory is too small; 0 if it is large enough."""
        return max(0.0, self.memory.total - self.workload.limit_bytes)

    @property
    def missing_streaming_bytes(self) -> float:
        """Bytes by which the slower memory beside the device is too small; 0 if large enough."""
        return max(0.0, self.memory.streaming - self.workload.machine.device.streaming_bytes)

    @property
    def fits(self) -> bool:
        """Whether the mapping fits into the device's memory and the slower memory beside the device."""
        return not self.missing_bytes and not self.missing_streaming_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The result of a search: mappings (divisions of a model) that fit, and a faster mapping that does not."""

    # The mappings that fit, fastest first: for each shape only the fastest, and at least ``num_fastest`` shapes.
    fitting: tuple[Candidate, ...]
    # The slowest of the tried mappings that are faster than all fitting mappings but do not fit; None if none is.
    faster: Candidate | None
    num_mappings: int  # how many mappings were tried


def predict(workload: Workload, mapping: Mapping) -> Candidate:
    """Return ``mapping`` with its predicted duration and memory. Raises MappingError if the mapping is illegal."""
    check(mapping, workload)
    return Candidate(workload, mapping)


def search(workload: Workload, fixed: Table[str, Any], num_fastest: int = 500) -> Answer:
    """Return the fastest mappings (divisions of a model over devices) that fit in memory and have the ``fixed``
    values, at least ``num_fastest`` if so many fit. Raise MappingError if no mapping is legal.

    A shape is a mapping without a way to keep state (sharding, offloading, phases). Shapes are tried in the order
    of a lower bound of their durations. For each shape, the fastest way to keep state that fits is returned.
    """
    groups = _groups(workload, fixed)
    if not groups:
        raise MappingError(_why_none_is_legal(workload, fixed))
    waiting: list[_Shape] = []
    hopeless: list[_Shape] = []
    for ways, shapes in groups:
        fits = any(not one.missing_bytes for one in _smallest(workload, shapes, ways))
        (waiting if fits else hopeless).extend(
            _Shape(running_duration(workload, shape), shape, ways) for shape in shapes
        )
    fitting, too_large, seconds = list[Candidate](), list[Candidate](), list[float]()
    for one in sorted(waiting, key=attrgetter("running.total")):
        if len(seconds) >= num_fastest and seconds[num_fastest - 1] <= one.running.total:
            break
        tried = _tried(workload, one)
        too_large += [found for found in tried if not found.fits]
        if fitting_ways := [found for found in tried if found.fits]:
            fitting.append(fitting_ways[-1])
            insort(seconds, fitting[-1].duration.total)
    fitting.sort(key=_rank)
    return Answer(
        fitting=tuple(fitting),
        faster=_next_better(workload, fitting[0].duration.total, too_large, hopeless) if fitting else None,
        num_mappings=len(fitting) + len(too_large) + len(hopeless),
    )


@dataclass(frozen=True, slots=True)
class _Shape:
    """A mapping (division of a model) whose sharding, offloading and phases are open, with all legal choices.

    The duration of the passes is a lower bound of the duration with each choice.
    """

    running: Duration
    mapping: Mapping
    ways: list[_Values]

    def candidates(self, workload: Workload) -> Iterator[Candidate]:
        """Yield a mapping with predictions for each legal way to keep its state (sharding, offloading, phases)."""
        for way in self.ways:
            mapping = replace(self.mapping, **way)
            yield Candidate(workload, mapping, None if mapping.has_layer_phases else self.running)


def _tried(workload: Workload, shape: _Shape) -> list[Candidate]:
    """Return the mappings that ``shape`` allows, in order, except each no faster than a fitting one before it.

    The last mapping that fits is the fastest.
    """
    candidates, best = list[Candidate](), math.inf
    for one in shape.candidates(workload):
        if one.unstreamed.total >= best or (one.fits and one.duration.total >= best):  # of equals the simpler
            continue
        candidates.append(one)
        best = one.duration.total if one.fits else best
    return candidates


def _next_better(
    workload: Workload, best: float, too_large: list[Candidate], hopeless: list[_Shape]
) -> Candidate | None:
    """Return the slowest mapping that does not fit but takes less than ``best`` seconds a step; None if none."""
    bounded = (one for one in hopeless if one.running.total < best)
    near = nlargest(_MOST_BETTER, bounded, key=attrgetter("running.total"))
    every = [*too_large, *(found for one in near for found in one.candidates(workload))]
    faster = (one for one in every if one.unstreamed.total < best and one.duration.total < best)
    return max(faster, key=attrgetter("duration.total"), default=None)


def _smallest(workload: Workload, shapes: list[Mapping], ways: list[_Values]) -> list[Candidate]:
    """Return mappings among which is the one that needs least memory: one or two mappings of ``shapes``, each
    combined with every way in ``ways`` to keep state (sharding, offloading, phases).
    """
    # One large micro batch may need less memory than several small ones, because phases then keep no sums.
    ends = dict.fromkeys((min(shapes, key=_first_in_memory), max(shapes, key=attrgetter("micro_batch"))))
    return [Candidate(workload, replace(shape, **way)) for shape in ends for way in ways]


def _first_in_memory(shape: Mapping) -> tuple[int, bool, int]:
    """Return a sort key for mappings, by which the mapping that needs least memory comes first."""
    return shape.micro_batch, shape.schedule != "1f1b", -shape.interleave


def nearest_changes(workload: Workload, fixed: Table[str, Any]) -> list[str]:
    """Return, in words, changes of the machine or of the ``fixed`` values with which a mapping would fit."""
    changes = [_least_lacking(workload, fixed)]
    for name in fixed:
        rest = {key: value for key, value in fixed.items() if key != name}
        if fitting := _fitting(workload, rest):
            changes.append(f"{name} other than {fixed[name]}: {fitting[0].mapping.text}")
    for factor in _MORE_DEVICES:
        number = workload.machine.num_devices * factor
        if number <= MOST_DEVICES:
            larger = replace(workload, machine=replace(workload.machine, num_devices=number))
            if _fitting(larger, {"micro_batch": 1, **fixed}):  # larger micro batches need more memory
                return [*changes, f"{number} devices in place of {workload.machine.num_devices}"]
    return changes


def _least_lacking(workload: Workload, fixed: Table[str, Any]) -> str:
    """Return, in words, how much memory would be enough for the mapping that lacks the least memory."""
    tried = [one for ways, shapes in _groups(workload, fixed) for one in _smallest(workload, shapes, ways)]
    least = min(tried, key=lambda one: (one.missing_bytes + one.missing_streaming_bytes, one.missing_bytes))
    if not least.missing_bytes:
        return (
            f"slower memory of {least.memory.streaming / GIB:.2f} GiB beside a device in place of "
            f"{workload.machine.device.streaming_bytes / GIB:.2f}, for {least.mapping.text}"
        )
    kind, size = least.memory.largest
    return (
        f"devices of {least.memory.total / GIB:.2f} GiB in place of {gib(workload.limit_bytes)}, "
        f"for {least.mapping.text} ({size / GIB:.2f} GiB of it are {kind})"
    )


def _fitting(workload: Workload, fixed: Table[str, Any]) -> tuple[Candidate, ...]:
    """Return a few mappings that fit, the fastest mapping first; () if none fits, or none is legal."""
    try:
        return search(workload, fixed, 1).fitting
    except MappingError:
        return ()


def _rank(candidate: Candidate) -> tuple[float, float]:
    """Return a sort key for mappings: shorter durations come first; of equal durations, less memory first."""
    return candidate.duration.total, candidate.memory.total


def _groups(workload: Workload, fixed: Table[str, Any]) -> list[tuple[list[_Values], list[Mapping]]]:
    """Return pairs of lists: ways to keep state (sharding, offloading, phases), and mappings that can use each."""
    groups: dict[tuple[int, int, str], list[Mapping]] = {}
    for shape in _shapes(workload, fixed):
        groups.setdefault((shape.tensor, shape.pipeline, shape.recompute), []).append(shape)
    pairs = [(_ways(shapes[0], workload, fixed), shapes) for shapes in groups.values()]
    return [(ways, shapes) for ways, shapes in pairs if ways]


def _shapes(workload: Workload, fixed: Table[str, Any]) -> Iterator[Mapping]:
    """Yield every legal combination of tensor, pipeline, replicas, micro batch, schedule and recomputation."""
    model, num_devices, batch = workload.model, workload.machine.num_devices, workload.training.global_batch
    largest = max(_LARGEST_MICRO_BATCH, fixed.get("micro_batch", 1))
    for tensor in _divisors(num_devices, num_devices if model.divisors else 1, fixed.get("tensor")):
        is_divided = tensor > 1 and model.sequence % tensor == 0
        if model.undivided(tensor) or fixed.get("sequence_parallel", is_divided) > is_divided:
            continue
        for pipeline in _divisors(num_devices // tensor, model.num_layers, fixed.get("pipeline")):
            replicas = num_devices // (tensor * pipeline)
            if fixed.get("replicas", replicas) != replicas or batch % replicas:
                continue
            for micro_batch in _divisors(batch // replicas, largest, fixed.get("micro_batch")):
                shape = Mapping(
                    tensor=tensor,
                    pipeline=pipeline,
                    replicas=replicas,
                    micro_batch=micro_batch,
                    sequence_parallel=fixed.get("sequence_parallel", is_divided),
                )
                for schedule, interleave in _schedules(shape, workload, fixed):
                    for recompute in [fixed["recompute"]] if "recompute" in fixed else RECOMPUTE:
                        yield replace(shape, schedule=schedule, interleave=interleave, recompute=recompute)


def _ways(shape: Mapping, workload: Workload, fixed: Table[str, Any]) -> list[_Values]:
    """Return each legal way to keep the state of ``shape`` (sharding, offloading, phases), the simplest way first.

    Only programs that are compiled as a whole run parts of layers as phases, and move state to the slower memory
    and back: torch does neither for `popdist.parallel.parallelize`, and such ways are tried if they are fixed.
    """
    shardings = _shardings(shape, workload, fixed)
    device, ways = workload.machine.device, [*shardings]
    if device.streaming_bytes and device.is_compiled_for:
        most = most_phases(workload.model, shape.pipeline, are_layers=False)
        activations, optimizer = {"offload_activations": True}, {"offload_optimizer": True}
        offloads = (activations, optimizer, activations | optimizer)
        phases = [{"phases": n} for n in sorted({2, 4, 8, 16, most // 2, most}) if 1 < n <= most]
        ways += [sharding | way for way in offloads for sharding in shardings]
        ways += [sharding | way for way in phases for sharding in (shardings[0], shardings[-1])]
    if device.streaming_bytes and shape.pipeline == 1:
        most = most_phases(workload.model, 1, are_layers=True)
        ways += [{"phases": n} for n in numbers_of_phases(most) if n > 1]
    every = {replace(shape, **way): way for way in ({**way, **fixed} for way in ways)}
    return [way for mapping, way in every.items() if not _broken_rule(mapping, workload)]


def _shardings(shape: Mapping, workload: Workload, fixed: Table[str, Any]) -> list[_Values]:
    """Return the choices of sharding to try, each as values of fields of a mapping, the simplest first.

    Unsharded state is tried only if it is fixed or there is one replica, because sharded optimizer state takes
    less time and memory. Programs that cut a model into stages do not shard gradients alone.
    """
    everyone = fixed.get("optimizer_shards", shape.replicas)
    if everyone == 1 or fixed.get("sharding") == "none":
        return [{}]
    near = max(1, workload.machine.devices_per_host // shape.tensor)
    sizes = [size for size in divisors(everyone) if size > 1]
    if len(sizes) > _FEW_SHARDS:
        sizes = [size for size in sizes if size in (near, everyone)]
    gradients = shape.pipeline == 1 or fixed.get("sharding") == "gradients"
    return [
        {"sharding": "optimizer", "optimizer_shards": everyone},
        *([{"sharding": "gradients", "optimizer_shards": everyone}] if gradients else []),
        *({"sharding": "weights", "weight_shards": size, "optimizer_shards": everyone} for size in sizes),
    ]


def _divisors(number: int, most: int, fixed: int | None) -> list[int]:
    """Return the divisors of ``number`` up to ``most``; if ``fixed`` is given, only the divisor equal to it."""
    return [d for d in divisors(number) if d <= most and fixed in (None, d)]


def _schedules(shape: Mapping, workload: Workload, fixed: Table[str, Any]) -> list[tuple[Schedule, int]]:
    """Return the pipeline schedules to try, each with the number of groups into which a stage's layers are cut."""
    schedules: list[tuple[Schedule, int]] = [("gpipe" if fixed.get("schedule") == "gpipe" else "1f1b", 1)]
    if shape.pipeline > 1 and shape.num_micro_batches(workload.training.global_batch) % shape.pipeline == 0:
        pieces = sorted({*_INTERLEAVE, fixed.get("interleave", 2)} - {1})
        schedules += [("interleaved", v) for v in pieces if workload.model.num_layers % (shape.pipeline * v) == 0]
    return [
        (schedule, v)
        for schedule, v in schedules
        if fixed.get("schedule", schedule) == schedule and fixed.get("interleave", v) == v
    ]


def _why_none_is_legal(workload: Workload, fixed: Table[str, Any]) -> str:
    """Return the reason, in words, why no mapping with the ``fixed`` values is legal."""
    number, name = workload.machine.num_devices, workload.machine.name
    mapping = completed(fixed, number)
    asked = [key for key in ("tensor", "pipeline", "replicas") if key in fixed]
    size = math.prod(fixed[key] for key in asked)
    none = f"no mapping of {workload.model.name} uses all {number} devices of {name}"
    if rule := _broken_rule(replace(mapping, sharding="none", weight_shards=1, optimizer_shards=1), workload):
        return f"{none}: {rule}"
    if number % size:
        return f"{none}: {' x '.join(asked)} is {size}, which does not divide the {number} devices of {name}"
    rule = _broken_rule(mapping, workload)
    return f"{none}: {rule}" if rule else f"{none} with {', '.join(f'{k}={v}' for k, v in fixed.items())}"


def _broken_rule(mapping: Mapping, workload: Workload) -> str:
    """Return the error that `check` raises for ``mapping``, as text; "" if the mapping is legal."""
    try:
        check(mapping, workload)
    except MappingError as error:
        return str(error)
    return ""
