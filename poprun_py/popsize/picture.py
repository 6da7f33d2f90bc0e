"""SVG pictures of a mapping: the cube of devices that share a model, and a bar that shows its phases."""

from itertools import accumulate, pairwise, product
from typing import Final

from popsize.duration import phase_plan
from popsize.hardware import GIB
from popsize.mapping import Mapping
from popsize.model import Model
from popsize.phases import parts_at
from popsize.search import Candidate
from popsize.stages import stages_of
from popsize.svg import NUM_HUES, document, element, escaped, rect, text, text_width
from popsize.tables import heading, seconds

_MARGIN: Final = 24
_TITLE, _WORDS, _LABEL = 16, 12, 11  # sizes of fonts
_LINE: Final = 20  # height of a line of words
_PADDING: Final = 8  # space around the words of a device
_BEHIND: Final = (16, 14)  # offset of a replica from the replica in front of it, to the right and upwards
_BAR: Final = 28  # height of the bar of phases
_LEAST: Final = 592
_NARROWEST: Final = 20
"""The width in pixels that a phase in the bar must exceed to show its number."""
_SHOWN: Final = {"stages": 8, "shards": 8, "replicas": 4}
"""The largest numbers of stages, shards and replicas that a picture shows."""


def cube_svg(one: Candidate, style: str) -> str:
    """Return an SVG picture of the devices of a mapping as a cube; ``style`` is the style sheet.

    Stages are drawn from left to right, shards of a layer downwards, and replicas behind each other.
    """
    mapping, workload = one.mapping, one.workload
    sizes = {"stages": mapping.pipeline, "shards": mapping.tensor, "replicas": mapping.replicas}
    drawn = {name: min(number, _SHOWN[name]) for name, number in sizes.items()}
    hidden = [f"{number - drawn[name]} more {name}" for name, number in sizes.items() if number > drawn[name]]
    title = f"{workload.model.name} on {mapping.num_devices} x {workload.machine.device.name}"
    summary = (
        f"tensor {mapping.tensor} x pipeline {mapping.pipeline} x replicas {mapping.replicas}: "
        f"{seconds(one.duration.total)} a step, {one.memory.total / GIB:.1f} GiB on the fullest device"
    )
    words = [summary, *([f"not drawn: {', '.join(hidden)}"] if hidden else []), *_phase_words(one)]
    lines = [text(title, (_MARGIN, _MARGIN + _PADDING), _TITLE, "title")]
    for number, line in enumerate(words, 2):
        lines.append(text(line, (_MARGIN, _MARGIN + number * _LINE - _PADDING), _WORDS, "line"))
    top = _MARGIN + len(lines) * _LINE + _PADDING
    cells, (width, height) = _cube(one, drawn, top)
    width = max(width, _LEAST, text_width(title, _TITLE), *(text_width(line, _WORDS) for line in words))
    if mapping.phases > 1:
        cells += _bar(one, top + height + _LINE, width)
        height += 2 * _LINE + _BAR + _PADDING
    size = (width + 2 * _MARGIN, top + height + _MARGIN)
    paper = rect(size, class_="paper")
    return document(heading(workload), size, element("style", "\n", style), paper, *lines, *cells, role="img")


def _cube(one: Candidate, drawn: dict[str, int], top: int) -> tuple[list[str], tuple[int, int]]:
    """Return the SVG elements of all devices, from the y position ``top`` down, and the size of all together.

    The first replica is in front, and only its devices have words.
    """
    words = [_stage_words(one.workload.model, one.mapping, stage) for stage in range(drawn["stages"])]
    width = max(text_width(line, _LABEL) for lines in words for line in lines) + 2 * _PADDING
    height = max(map(len, words)) * (_LABEL + 3) + 2 * _PADDING
    stages, shards, replicas = (range(drawn[name]) for name in ("stages", "shards", "replicas"))
    cells = []
    for replica, stage, shard in product(reversed(replicas), stages, shards):
        x = _MARGIN + replica * _BEHIND[0] + stage * width
        y = top + (len(replicas) - 1 - replica) * _BEHIND[1] + shard * height
        about = f"replica {replica}, stage {stage}, shard {shard}: {', '.join(words[stage])}"
        labels = enumerate(words[stage] if not replica else [], 1)
        cells.append(
            element(
                "g",
                element("title", escaped(about)),
                rect((width, height), (x, y), "box"),
                *(text(it, (x + _PADDING, y + 4 + row * (_LABEL + 3)), _LABEL, "line") for row, it in labels),
                class_=f"h{stage % NUM_HUES}",
            )
        )
    behind = len(replicas) - 1
    return cells, (len(stages) * width + behind * _BEHIND[0], len(shards) * height + behind * _BEHIND[1])


def _stage_words(model: Model, mapping: Mapping, stage: int) -> list[str]:
    """Return the lines of text in a picture of a pipeline stage's devices: their layers, and each layer's part."""
    stages = stages_of(model, mapping.pipeline)
    blocks = [sum(n for layer, n in one.layers if layer is model.block) for one in stages]
    first, last = sum(blocks[:stage]), sum(blocks[: stage + 1])
    others = [layer.name for layer, _ in stages[stage].layers if layer is not model.block]
    words = [f"layers {first + 1}-{last}" if last > first + 1 else f"layer {last}"]
    words += [" and ".join(others)] if others else []
    return [*words, f"1/{mapping.tensor} of each"] if mapping.tensor > 1 else words


def _phase_words(one: Candidate) -> list[str]:
    """Return lines of text about phases, parts of a stage in memory one after the other; [] without phases."""
    mapping = one.mapping
    if mapping.phases == 1:
        return []
    words = [f"{mapping.phases} phases of a stage: one is in memory, the next is read meanwhile"]
    if mapping.has_layer_phases:
        step = phase_plan(one.workload, mapping).step
        words += [f"a step waits {seconds(step.reading)} for reads, {seconds(step.writing)} for writes"]
    return words


def _bar(one: Candidate, top: int, width: int) -> list[str]:
    """Return the SVG elements of a bar that shows how the layers of a stage are cut into phases."""
    mapping, workload = one.mapping, one.workload
    layers, number = [1] * mapping.phases, -(-workload.model.num_layers // mapping.pipeline)
    if mapping.has_layer_phases:
        layers = [len(phase) for phase in parts_at(phase_plan(workload, mapping).cuts, workload.model.every_layer)]
        number = sum(layers)
    places = [_MARGIN + round(width * layer / sum(layers)) for layer in accumulate(layers, initial=0)]
    parts = []
    for phase, (x, end) in enumerate(pairwise(places)):
        label = text(str(phase + 1), ((x + end) // 2, top + 18), _LABEL) if end - x > _NARROWEST else ""
        box = rect((end - x, _BAR), (x, top), "box")
        parts.append(element("g", box, label, class_=f"h{phase % NUM_HUES}"))
    first, last = text(f"layer 1 of {number}", (_MARGIN, top + 46), _LABEL, "line"), f"layer {number}"
    return [*parts, first, text(last, (_MARGIN + width - text_width(last, _LABEL) // 2, top + 46), _LABEL, "note")]
