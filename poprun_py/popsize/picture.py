"""Pictures of a mapping in SVG: the cube of devices, and the phases over the layers."""

from collections.abc import Iterator
from itertools import accumulate, pairwise, product
from typing import Final

from popsize.duration import phase_plan
from popsize.footprint import phase_units
from popsize.hardware import GIB
from popsize.mapping import Mapping
from popsize.model import Model
from popsize.search import Candidate
from popsize.stages import stages_of
from popsize.svg import document, element, escaped, rect, text
from popsize.tables import heading, seconds

_WIDTH, _HEIGHT = 118, 52
_RIGHT, _UP = 16, 14
_MARGIN, _TOP = 24, 64
_LEAST: Final = 640
_NARROWEST: Final = 20
"""A phase that is narrower bears no number."""
_SHOWN: Final = {"stages": 8, "shards": 8, "replicas": 4}
"""How many of each are drawn."""

_HUES: Final = ("#dbe9f6", "#fde6cf", "#def0d8", "#f6dcdc", "#e8e0f1", "#efe5e0", "#fbe3f0", "#eeeeee")


def cube_svg(one: Candidate) -> str:
    """Draw the cube of a mapping: stages to the right, shards of a layer downwards, replicas behind each other."""
    mapping, workload = one.mapping, one.workload
    sizes = {"stages": mapping.pipeline, "shards": mapping.tensor, "replicas": mapping.replicas}
    drawn = {name: min(number, _SHOWN[name]) for name, number in sizes.items()}
    width = max(_LEAST, 2 * _MARGIN + drawn["stages"] * _WIDTH + drawn["replicas"] * _RIGHT)
    bottom = _TOP + drawn["replicas"] * _UP + drawn["shards"] * _HEIGHT + 24
    title = f"{workload.model.name} on {mapping.num_devices} x {workload.machine.device.name}"
    words = (
        f"tensor {mapping.tensor} x pipeline {mapping.pipeline} x replicas {mapping.replicas}: "
        f"{seconds(one.duration.total)} a step, {one.memory.total / GIB:.1f} GiB on the fullest device"
    )
    parts = [text(title, (_MARGIN, 28), 16), text(words, (_MARGIN, 48), 12), *_cells(one, drawn)]
    if hidden := [f"{number - drawn[name]} more {name}" for name, number in sizes.items() if number > drawn[name]]:
        parts.append(text(f"not drawn: {', '.join(hidden)}", (_MARGIN, bottom), 12))
        bottom += 24
    if mapping.phases > 1:
        parts += _phases(one, bottom, width - 2 * _MARGIN)
        bottom += 84
    paper, font = rect((width, bottom), fill="#ffffff"), "Helvetica, Arial, sans-serif"
    return document(heading(workload), (width, bottom), paper, *parts, font_family=font, fill="#222", role="img")


def _cells(one: Candidate, drawn: dict[str, int]) -> Iterator[str]:
    """Draw the rectangle of each device; the first replica stands before the others, with words."""
    words = [_stage_words(one.workload.model, one.mapping, stage) for stage in range(drawn["stages"])]
    stages, shards, replicas = (range(drawn[name]) for name in ("stages", "shards", "replicas"))
    for replica, stage, shard in product(reversed(replicas), stages, shards):
        x = _MARGIN + replica * _RIGHT + stage * _WIDTH
        y = _TOP + (len(replicas) - replica) * _UP + shard * _HEIGHT
        about = f"replica {replica}, stage {stage}, shard {shard}: {', '.join(words[stage])}"
        yield element(
            "g",
            element("title", escaped(about)),
            rect((_WIDTH, _HEIGHT), (x, y), fill=_HUES[stage % len(_HUES)], stroke="#555"),
            *(text(line, (x + 8, y + 17 + 14 * row), 11) for row, line in enumerate(words[stage]) if not replica),
        )


def _stage_words(model: Model, mapping: Mapping, stage: int) -> list[str]:
    """What the devices of a stage have: layers, what stands before or behind them, and the share of each."""
    stages = stages_of(model, mapping.pipeline)
    blocks = [sum(n for layer, n in one.layers if layer is model.block) for one in stages]
    first, last = [0, *accumulate(blocks)][stage], list(accumulate(blocks))[stage]
    others = [layer.name for layer, _ in stages[stage].layers if layer is not model.block]
    words = [f"layers {first + 1}-{last}" if last > first + 1 else f"layer {last}"]
    words += [" and ".join(others)] if others else []
    return [*words, f"1/{mapping.tensor} of each"] if mapping.tensor > 1 else words


def _phases(one: Candidate, top: int, width: int) -> Iterator[str]:
    """Draw the layers of a stage as a bar, cut into phases."""
    mapping, workload = one.mapping, one.workload
    words = f"{mapping.phases} phases of a stage: one is in memory, the next is read meanwhile"
    layers = [1] * mapping.phases
    if mapping.has_layer_phases:
        plan = phase_plan(workload, mapping)
        layers = [b - a for a, b in pairwise((*plan.cuts, len(phase_units(workload, mapping))))]
        words += f"; a step waits {seconds(plan.step.reading)} for reads, {seconds(plan.step.writing)} for writes"
    yield text(words, (_MARGIN, top), 12)
    ends = [_MARGIN + round(width * layer / sum(layers)) for layer in accumulate(layers, initial=0)]
    for phase, (x, end) in enumerate(pairwise(ends)):
        yield rect((end - x, 28), (x, top + 10), fill=_HUES[phase % len(_HUES)], stroke="#555")
        if end - x > _NARROWEST:
            yield text(str(phase + 1), ((x + end) // 2 - 4, top + 28), 11)
    number = sum(layers) if mapping.has_layer_phases else -(-workload.model.num_layers // mapping.pipeline)
    yield text(f"layer 1 of {number}", (_MARGIN, top + 54), 11)
    yield text(f"layer {number}", (_MARGIN + width - 60, top + 54), 11)
