"""The output of poprun-size: tables and lines for users, JSON and CSV for programs."""

import csv
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, Final

from rich.table import Table

from popsize.duration import (
    exchanges,
    is_near,
    phase_plan,
    streamed_bytes,
    tensor_rounds,
    transfer_bytes,
)
from popsize.hardware import GIB, TERA, gib
from popsize.mapping import Mapping, Workload
from popsize.phases import parts_at
from popsize.search import Answer, Candidate
from popsize.stages import shown_stages

_WITHOUT_DIGITS: Final = 100

Part = Table | str
"""A part of the printed output: a table of rich, or a line of text."""


def peak_share(candidate: Candidate) -> float:
    """Return the share of the devices' peak speed that training uses (MFU); recomputed operations do not count."""
    workload = candidate.workload
    peak = workload.machine.device.flops_at(workload.training.precision) * candidate.mapping.num_devices
    return workload.model.flops_per_sample * workload.training.global_batch / (candidate.duration.total * peak)


def answer_table(answer: Answer, workload: Workload, num_rows: int) -> list[Part]:
    """Return the printed answer: a table of the fastest mappings, and why a faster one does not fit."""
    rows = [
        (
            str(place),
            seconds(one.duration.total),
            f"{peak_share(one):.0%}",
            f"{one.duration.bubble / one.duration.total:.0%}",
            f"{one.memory.total / GIB:.1f}",
            str(one.mapping.tensor),
            str(one.mapping.pipeline),
            str(one.mapping.replicas),
            str(one.mapping.micro_batch),
            str(one.num_micro_batches),
            choices(one.mapping),
        )
        for place, one in enumerate(answer.fitting[:num_rows], 1)
    ]
    head = ("", "a step", "peak", "bubble", "GiB", "tp", "pp", "dp", "batch", "accum")
    more = len(answer.fitting) - len(rows)
    first = answer.fitting[0]
    return [
        heading(workload),
        "",
        _table(rows, *head, words="and"),
        *([f"{more} more fit (--top {len(answer.fitting)} lists all)."] if more > 0 else []),
        "",
        f"The first, on its fullest device ({where(first)}):",
        _memory_table(first),
        *_phase_parts(first),
        *why_not_faster(answer),
    ]


def _table(rows: Iterable[Sequence[str]], *numbers: str, names: int = 0, words: str = "") -> Table:
    """Return a table of ``rows``: first ``names`` columns without titles, then a column for each title in
    ``numbers``, and a last column with the title ``words``.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=any(numbers), header_style="bold")
    for _ in range(names):
        table.add_column(no_wrap=True)
    for number in numbers:
        table.add_column(number, justify="right", no_wrap=True)
    table.add_column(words, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def heading(workload: Workload) -> str:
    """Return one line about the workload: its model, batch, precision, optimizer and devices."""
    model, training, machine = workload.model, workload.training, workload.machine
    return (
        f"{model.name}, {_count(model.num_parameters)} parameters, sequence {model.sequence}, "
        f"global batch {training.global_batch}, {training.precision}, {training.optimizer}, "
        f"on {machine.num_devices} x {machine.device.name}"
    )


def _count(number: float) -> str:
    """Return a number as text, such as ``1.3 billion`` or ``350 million``."""
    size, word = next((pair for pair in ((1e9, " billion"), (1e6, " million")) if number >= pair[0]), (1, ""))
    return f"{number / size:.{max(3, len(str(int(number / size))))}g}{word}"


def why_not_faster(answer: Answer) -> list[str]:
    """Return lines about a faster mapping that does not fit, and the memory that it lacks; [] if there is none."""
    one = answer.faster
    if one is None:
        return []
    kind, size = one.memory.largest
    place = where(one)
    headline = f"Faster, but does not fit: {one.mapping.text}: {seconds(one.duration.total)} a step."
    why = (
        f"  {place[:1].upper()}{place[1:]} needs {one.memory.total / GIB:.2f} GiB and has "
        f"{gib(one.workload.limit_bytes)}: {one.missing_bytes / GIB:.2f} GiB ({one.missing_bytes:,.0f} bytes) "
        f"too many; {kind} take {size / GIB:.2f}."
    )
    if not one.missing_bytes:
        why = (
            f"  The slower memory beside {place} needs {one.memory.streaming / GIB:.2f} GiB and has "
            f"{gib(one.memory.streaming - one.missing_streaming_bytes)}: "
            f"{one.missing_streaming_bytes:,.0f} bytes too many."
        )
    return ["", headline, why]


def where(candidate: Candidate) -> str:
    """Return the name of the devices that need most memory, such as ``each device of stage 0 of 4``."""
    if candidate.mapping.pipeline == 1:
        return "every device"
    return f"each device of stage {candidate.stage.index} of {candidate.mapping.pipeline}"


def choices(mapping: Mapping) -> str:
    """Return a mapping's values as text for `--fix`, except sizes and micro batch; ``-`` if all are default."""
    words = mapping.text.split(",")
    return " ".join(words[4:]) or "-"


def _memory_table(candidate: Candidate) -> Table:
    """Return a table of the memory that the fullest device needs, one row for each kind, such as weights."""
    memory, limit = candidate.memory, candidate.workload.limit_bytes
    rows = [(f"  {kind}", f"{size / GIB:.3f} GiB", "") for kind, size in memory.own.items()]
    rows += [("  in all", f"{memory.total / GIB:.3f} GiB", f"of {limit / GIB:.3f}")]
    rows += [("  in slower memory", f"{memory.streaming / GIB:.3f} GiB", "")] if memory.streaming else []
    return _table(rows, "", names=1)


def _phase_parts(candidate: Candidate) -> list[Part]:
    """Return a line and a table on phases, parts of a model in memory one after the other; [] without phases."""
    workload = candidate.workload
    if not candidate.mapping.has_layer_phases:
        return []
    plan, device = phase_plan(workload, candidate.mapping), workload.machine.device
    step = plan.step
    rows = [
        ("  read", step.read_bytes, device.streaming_bytes_per_second, step.reading),
        ("  written", step.written_bytes, device.streaming_write_bytes_per_second, step.writing),
    ]
    sizes = sorted({len(phase) for phase in parts_at(plan.cuts, workload.model.every_layer)})
    number = f"{sizes[0]} to {sizes[-1]} layers" if len(sizes) > 1 else f"{sizes[0]} layer{'s' * (sizes[0] > 1)}"
    shown = [
        (name, f"{size / GIB:.3f} GiB", f"in {seconds(size / speed)}", f"waiting {seconds(waited)}")
        for name, size, speed, waited in rows
    ]
    return [
        f"Phases of {number}, two at once in memory. Between it and the slower memory, in a step:",
        _table(shown, "", "", names=1),
    ]


def explanation(candidate: Candidate) -> list[Part]:
    """Return the printed explanation of one mapping: its duration, its memory, and its traffic."""
    workload, terms, total = candidate.workload, asdict(candidate.duration), candidate.duration.total
    peak = workload.machine.device.flops_at(workload.training.precision) / TERA
    times = [
        (f"  {name}", seconds(value), f"{value / total:.1%}", TERM_WORDS[name]) for name, value in terms.items()
    ]
    sent = [(f"  {name}", f"{size / GIB:.3f} GiB", link) for name, size, link in traffic(candidate)]
    return [
        heading(workload),
        candidate.mapping.text,
        "",
        f"A step takes {seconds(total)}, {peak_share(candidate):.1%} of the peak of {peak:.0f} TFLOP/s a device:",
        _table(times, "", "", names=1),
        "",
        f"Memory of {where(candidate)}: it {'fits' if candidate.fits else 'does not fit'}.",
        _memory_table(candidate),
        *_phase_parts(candidate),
        "Sent by a device in a step:",
        _table(sent, "", names=1),
    ]


TERM_WORDS: Final = {
    "layers": "forward and backward passes, and what is computed again",
    "tensor": "sums over the tensor group",
    "bubble": "waiting for the pipeline to fill and to drain",
    "stages": "activations sent between stages",
    "replicas": "sums of gradients over replicas",
    "gathering": "sharded weights gathered for use",
    "optimizer": "the update",
    "streaming": "waiting for the slower memory",
}
"""For each activity of a step, a field of `Duration`, the words that explain it to a user."""


def traffic(candidate: Candidate) -> list[tuple[str, float, str]]:
    """Return the bytes that a device sends in a step, as rows of kind, bytes and link; without rows of 0 bytes."""
    mapping, workload, number = candidate.mapping, candidate.workload, candidate.num_micro_batches
    machine = workload.machine
    stage = shown_stages(workload.model, mapping.pipeline)[0]
    samples = number * mapping.micro_batch * workload.width * (mapping.tensor - 1) / mapping.tensor
    sums = sum(n * tensor_rounds(layer, mapping.recompute) * layer.output_bytes for layer, n in stage.layers)
    sent = number * mapping.interleave * transfer_bytes(workload, mapping) if mapping.pipeline > 1 else 0.0
    stride = mapping.tensor * mapping.replicas
    flows = [
        ("tensor", samples * sums, is_near(mapping.tensor, 1, machine, mapping.num_devices)),
        ("stages", sent, is_near(2, stride, machine, mapping.num_devices)),
        *((one.name, one.sent, one.is_near) for one in exchanges(workload, mapping)),
    ]
    rows = [(name, size, "links inside a host" if near else "network between hosts") for name, size, near in flows]
    rows += [("streaming", sum(streamed_bytes(workload, mapping)), "slower memory beside the device")]
    return [row for row in rows if row[1]]


def answer_json(answer: Answer, workload: Workload, num_rows: int) -> str:
    """Return the fastest mappings as JSON text, each with its duration and memory."""
    table = {
        "model": workload.model.name,
        "parameters": workload.model.num_parameters,
        "machine": workload.machine.name,
        "devices": workload.machine.num_devices,
        "training": asdict(workload.training),
        "mappings_tried": answer.num_mappings,
        "fitting": sum(one.fits for one in answer.fitting),
        "mappings": [candidate_table(one) for one in answer.fitting[:num_rows]],
        "faster_but_too_large": None if answer.faster is None else candidate_table(answer.faster),
    }
    return json.dumps(table, indent=2) + "\n"


def candidate_table(one: Candidate) -> dict[str, Any]:
    """Return a mapping and its predictions as a dict for JSON."""
    return {
        "mapping": asdict(one.mapping),
        "seconds": one.duration.total,
        "seconds_by_term": asdict(one.duration),
        "share_of_peak": peak_share(one),
        "bubble_share": one.duration.bubble / one.duration.total,
        "accumulation": one.num_micro_batches,
        "memory_bytes": asdict(one.memory),
        "fullest_stage": one.stage.index,
        "limit_bytes": one.workload.limit_bytes,
        "missing_bytes": one.missing_bytes,
        "missing_streaming_bytes": one.missing_streaming_bytes,
        "fits": one.fits,
        "phases": asdict(phase_plan(one.workload, one.mapping)) if one.mapping.has_layer_phases else None,
        "sent_bytes": {name: {"bytes": size, "over": link} for name, size, link in traffic(one)},
    }


def answer_csv(answer: Answer, num_rows: int) -> str:
    """Return the fastest mappings as CSV text, a row for each."""
    rows = [
        asdict(one.mapping)
        | {"accumulation": one.num_micro_batches}
        | {"seconds": f"{one.duration.total:.6g}"}
        | {f"{term}_seconds": f"{value:.6g}" for term, value in asdict(one.duration).items()}
        | {f"{kind}_gib": f"{size / GIB:.6f}" for kind, size in one.memory.own.items()}
        | {"fits": "yes" if one.fits else "no"}
        for one in answer.fitting[:num_rows]
    ]
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def seconds(value: float) -> str:
    """Return ``value`` seconds as text, such as ``1.25 s`` or ``3.0 ms``; ``-`` for 0."""
    if not value:
        return "-"
    if value >= _WITHOUT_DIGITS:
        return f"{value:.0f} s"
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.1f} ms"
