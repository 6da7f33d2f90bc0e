"""Pictures of a mapping in SVG: the cube of devices, and the phases over the layers."""

from html import escape
from itertools import accumulate, pairwise
from typing import Final

from popsize.duration import phase_plan
from popsize.footprint import phase_units
from popsize.hardware import GIB
from popsize.mapping import Mapping
from popsize.model import Model
from popsize.search import Candidate
from popsize.stages import stages_of
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
    """The cube of a mapping: stages to the right, shards of a layer downwards, replicas behind each other."""
    mapping, workload, model = one.mapping, one.workload, one.workload.model
    drawn = {name: min(number, _SHOWN[name]) for name, number in _sizes(mapping).items()}
    width = max(_LEAST, 2 * _MARGIN + drawn["stages"] * _WIDTH + drawn["replicas"] * _RIGHT)
    front = _TOP + drawn["replicas"] * _UP
    bottom = front + drawn["shards"] * _HEIGHT + 24
    parts = [
        _text(_MARGIN, 28, f"{model.name} on {mapping.num_devices} x {workload.machine.device.name}", 16),
        _text(
            _MARGIN,
            48,
            f"tensor {mapping.tensor} x pipeline {mapping.pipeline} x replicas {mapping.replicas}: "
            f"{seconds(one.duration.total)} a step, {one.memory.total / GIB:.1f} GiB on the fullest device",
            12,
        ),
    ]
    words = [_stage_words(model, mapping, stage) for stage in range(drawn["stages"])]
    for replica in reversed(range(drawn["replicas"])):
        for stage in range(drawn["stages"]):
            for shard in range(drawn["shards"]):
                x = _MARGIN + replica * _RIGHT + stage * _WIDTH
                y = front - replica * _UP + shard * _HEIGHT
                title = f"replica {replica}, stage {stage}, shard {shard}: {', '.join(words[stage])}"
                parts.append(_cell(x, y, _HUES[stage % len(_HUES)], words[stage] if replica == 0 else [], title))
    if hidden := [f"{n - drawn[name]} more {name}" for name, n in _sizes(mapping).items() if n > drawn[name]]:
        parts.append(_text(_MARGIN, bottom, f"not drawn: {', '.join(hidden)}", 12))
        bottom += 24
    if mapping.phases > 1:
        parts.append(_phases(one, bottom, width - 2 * _MARGIN))
        bottom += 84
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{bottom}" '
        f'viewBox="0 0 {width} {bottom}" font-family="Helvetica, Arial, sans-serif" role="img">'
        f"<title>{escape(heading(workload))}</title>"
        f'<rect width="100%" height="100%" fill="#ffffff"/>{"".join(parts)}</svg>\n'
    )


def _sizes(mapping: Mapping) -> dict[str, int]:
    """How many devices each side of the cube has, by name."""
    return {"stages": mapping.pipeline, "shards": mapping.tensor, "replicas": mapping.replicas}


def _stage_words(model: Model, mapping: Mapping, stage: int) -> list[str]:
    """What the devices of a stage have: layers, what stands before or behind them, and the share of each."""
    stages = stages_of(model, mapping.pipeline)
    blocks = [sum(n for layer, n in one.layers if layer is model.block) for one in stages]
    first, last = [0, *accumulate(blocks)][stage], list(accumulate(blocks))[stage]
    others = [layer.name for layer, _ in stages[stage].layers if layer is not model.block]
    words = [f"layers {first + 1}-{last}" if last > first + 1 else f"layer {last}"]
    words += [" and ".join(others)] if others else []
    return [*words, f"1/{mapping.tensor} of each"] if mapping.tensor > 1 else words


def _phases(one: Candidate, top: int, width: int) -> str:
    """The layers of a stage as a bar, cut into phases."""
    mapping, workload = one.mapping, one.workload
    words = f"{mapping.phases} phases of a stage: one is in memory, the next is read meanwhile"
    layers = [1] * mapping.phases
    if mapping.has_layer_phases:
        plan = phase_plan(workload, mapping)
        layers = [b - a for a, b in pairwise((*plan.cuts, len(phase_units(workload, mapping))))]
        words += f"; a step waits {seconds(plan.step.reading)} for reads, {seconds(plan.step.writing)} for writes"
    parts = [_text(_MARGIN, top, words, 12)]
    step = width / sum(layers)
    for phase, (first, last) in enumerate(pairwise((0, *accumulate(layers)))):
        x, wide = _MARGIN + first * step, (last - first) * step
        parts.append(
            f'<rect x="{x:.1f}" y="{top + 10}" width="{wide:.1f}" height="28" '
            f'fill="{_HUES[phase % len(_HUES)]}" stroke="#555"/>'
        )
        if wide > _NARROWEST:
            parts.append(_text(x + wide / 2 - 4, top + 28, str(phase + 1), 11))
    number = sum(layers) if mapping.has_layer_phases else -(-workload.model.num_layers // mapping.pipeline)
    parts.append(_text(_MARGIN, top + 54, f"layer 1 of {number}", 11))
    parts.append(_text(_MARGIN + width - 60, top + 54, f"layer {number}", 11))
    return "".join(parts)


def _cell(x: float, y: float, fill: str, words: list[str], title: str) -> str:
    """The rectangle of a device, with words in it."""
    lines = "".join(_text(x + 8, y + 17 + 14 * row, line, 11) for row, line in enumerate(words[:3]))
    return (
        f'<g><title>{escape(title)}</title><rect x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" '
        f'fill="{fill}" stroke="#555"/>{lines}</g>'
    )


def _text(x: float, y: float, words: str, size: int) -> str:
    """A line of text in a picture."""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="#222">{escape(words)}</text>'
