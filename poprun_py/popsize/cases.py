"""Predictions for the rows of a CSV file; a row describes a model, a machine and a division over devices."""

import csv
import io
from collections.abc import Iterator, Sequence
from collections.abc import Mapping as Table
from contextlib import suppress
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cache
from typing import Any, Final

from popsize.catalogue import FIELD_NAMES, model_numbers, named_model
from popsize.errors import SizingError
from popsize.hardware import GIB, Machine, named_machine
from popsize.mapping import (
    ACCUMULATION,
    NOT_PLANNED,
    Mapping,
    Training,
    Workload,
    completed,
    mapping_name,
    parse_count,
    parse_value,
)
from popsize.model import Model, Transformer, transformer
from popsize.search import Candidate, predict

_MODEL: Final = tuple(f.name for f in fields(Transformer))
_SHARDS: Final = {"weight_shards": "sharding_group", "optimizer_shards": "optimizer_sharding_group"}
_MAPPING: Final = tuple(_SHARDS.get(f.name, f.name) for f in fields(Mapping))

COLUMNS: Final = (
    *("model", *_MODEL),
    *("devices", "machine", "global_batch", "precision", "optimizer", "gradient_bytes", "engine"),
    *_MAPPING,
)
"""The names of all columns of a CSV file that poprun-size reads."""

PREDICTED: Final = ("seconds", "weights_gib", "gradients_gib", "optimizer_gib", "activations_gib", "fits")
"""The names of the columns with predictions that poprun-size adds to the CSV file."""

_NEAR: Final = 0.8
"""An unknown column that is at least so similar to a known column (from 0 to 1) counts as misspelled."""

_DELIMITERS: Final = (";", "\t", "|")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A row of the CSV file, with the predicted duration and memory, or with the row's error."""

    line: int  # the number of the row's line in the file, from 1
    row: Table[str, str]  # all cells of the row by column, also of columns that poprun-size does not read
    predicted: Candidate | None = None  # the prediction; None if the row has an error
    error: str = ""  # the text of the row's error; empty if there is none


def predict_cases(text: str, machines: Table[str, Machine]) -> tuple[Case, ...]:
    """Return the prediction, or the error, for each row of the CSV text ``text``.

    Columns that poprun-size does not read, such as ``note``, stay as they are.
    """
    names = header_of(text)
    columns = [_column(name) for name in names]
    cases = []
    for line, cells, wrong in _lines(text):
        row = dict(zip(names, cells, strict=False))
        given = {column: cell for column, cell in zip(columns, cells, strict=False) if cell and column in COLUMNS}
        many = f"it has {len(cells)} cells, and the file {len(names)} columns" if any(cells[len(names) :]) else ""
        candidate, error = None, wrong or many
        try:
            if not error:
                workload, mapping = _read(given, machines)
                _check_others(row, mapping, workload.training.global_batch)
                candidate = predict(workload, mapping)
        except SizingError as broken:
            error = str(broken)
        cases.append(Case(line=line, row=row, predicted=candidate, error=error))
    return tuple(cases)


def header_of(text: str) -> tuple[str, ...]:
    """Return the column names of a CSV text. Raises SizingError if one is misspelled or occurs twice."""
    names = tuple(next((cells for _, cells, _ in _lines(text, skips=0)), ()))
    known = [column for name in names if (column := _column(name)) in COLUMNS]
    if len(names) == 1 and not known and (found := [one for one in _DELIMITERS if one in names[0]]):
        raise SizingError(f"the delimiter is {found[0]!r}: separate columns by commas")
    if not known:
        raise SizingError(f"columns are {', '.join(COLUMNS)}; the file has {', '.join(names) or 'no header'}")
    if twice := [name for name in names if known.count(_column(name)) > 1]:
        raise SizingError(f"the columns {' and '.join(twice)} say the same: leave one of them")
    for name in names:
        near = get_close_matches(_column(name), set(COLUMNS) - set(known), 1, _NEAR)
        if near and _column(name) not in (*COLUMNS, *PREDICTED):
            raise SizingError(f"the file has {name}, which is no column: is it {near[0]}? (or give another name)")
    return names


def _lines(text: str, skips: int = 1) -> Iterator[tuple[int, list[str], str]]:
    """Yield number, cells and error ("" for none) of each CSV line that is not empty, after ``skips`` lines."""
    reader = csv.reader(io.StringIO(text, newline=None))
    while True:
        cells, error = [], ""
        try:
            cells = [cell.strip() for cell in next(reader)]
        except StopIteration:
            return
        except csv.Error as wrong:
            error = f"it is not CSV: {wrong}"
        if cells or error:
            skips -= 1
            if skips < 0:
                yield reader.line_num, cells, error


@cache
def _column(name: str) -> str:
    """Return the name in `COLUMNS` that the column ``name`` means; ``name`` itself if it is unknown."""
    plain = name.lower().replace(" ", "_").replace("-", "_")
    if plain in (*COLUMNS, *PREDICTED):
        return plain
    with suppress(SizingError):
        ours = mapping_name(plain)
        return _SHARDS.get(ours, ours)
    others = {"global_batch": ("batch_size", "global_batch_size"), "devices": ("gpus",), **FIELD_NAMES}
    return next((ours for ours, names in others.items() if plain in names), plain)


def cases_text(cases: tuple[Case, ...], names: Sequence[str] = ()) -> str:
    """Return rows as CSV text with predictions added; ``names`` are the columns of the file that was read."""
    names = [name for name in names or (cases[0].row if cases else ()) if _column(name) not in PREDICTED]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*names, *PREDICTED])
    for case in cases:
        writer.writerow([*(case.row.get(name, "") for name in names), *_figures(case.predicted)])
    return out.getvalue()


def _figures(candidate: Candidate | None) -> list[str]:
    """Return the cells with a row's predicted duration and memory; empty cells if ``candidate`` is None."""
    if candidate is None:
        return [""] * len(PREDICTED)
    memory = candidate.memory
    kinds = (memory.weights, memory.gradients, memory.optimizer, memory.activations)
    return [
        f"{candidate.duration.total:.6g}",
        *(f"{kind / GIB:.6f}" for kind in kinds),
        "yes" if candidate.fits else "no",
    ]


def _read(given: Table[str, str], machines: Table[str, Machine]) -> tuple[Workload, Mapping]:
    """Return the workload and the mapping (division over devices) that a row's cells ``given`` describe."""
    machine = named_machine(given.get("machine", "A100-80GB"), machines)
    words = {mapping_name(column): given[column] for column in _MAPPING if column in given}
    values = {"recompute": "layer", **{name: parse_value(name, word) for name, word in words.items()}}
    devices = parse_count("devices", given["devices"]) if "devices" in given else None
    mapping = completed(values, devices or machine.num_devices)
    if devices not in (None, mapping.num_devices):
        raise SizingError(f"devices={devices}, but tensor x pipeline x replicas is {mapping.num_devices}")
    training = _training(given, mapping, machine)
    numbers = tuple(sorted((name, value) for name, value in given.items() if name in _MODEL))
    model = _model(given.get("model", ""), numbers, given.get("precision", training.precision))
    return Workload(model=model, machine=machine, training=training), mapping


def _check_others(row: Table[str, str], mapping: Mapping, global_batch: int) -> None:
    """Raise SizingError if a row contradicts its ``mapping``, or has parallelism that is not planned."""
    number = str(mapping.num_micro_batches(global_batch))
    for name, cell in row.items():
        column = _column(name)
        if column in NOT_PLANNED and cell.lower() not in ("", "0", "1", "1.0", "no", "none", "false"):
            raise SizingError(f"{name}={cell:.40}: not planned: {NOT_PLANNED[column]}")
        if column in ACCUMULATION and cell.removesuffix(".0") not in ("", number):
            raise SizingError(f"{name}={cell:.40}, but global batch / (replicas x micro_batch) is {number}")


def _training(given: Table[str, str], mapping: Mapping, machine: Machine) -> Training:
    """Return the training settings of a row; with ``amp_bf16`` or sharded weights, weights have 32 bits."""
    word = given.get("precision", machine.device.precision(None)).lower()
    precision = word.removeprefix("amp_")
    names = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
    half = precision not in ("fp32", "float32", "tf32")
    return Training(
        global_batch=parse_count(
            "global_batch", given.get("global_batch", str(mapping.replicas * mapping.micro_batch))
        ),
        precision=machine.device.precision(names.get(precision, precision)),
        optimizer=given.get("optimizer", "adamw").lower(),
        gradient_bytes=parse_count("gradient_bytes", given.get("gradient_bytes", "4")),
        engine=given.get("engine", "other").lower(),
        full_weights=half and (word.startswith("amp_") or mapping.sharding == "weights"),
    )


@cache
def _model(name: str, words: tuple[tuple[str, str], ...], precision: str) -> Model:
    """Return the model that a row describes: by the name ``name``, or by sizes such as layers and hidden.

    In fp16 rows, attention is not fused and has dropout, because programs with fp16 are older than fused kernels.
    """
    if name:
        return named_model(name, tuple(f"{key}={value}" for key, value in words))
    older = precision.lower() in ("fp16", "float16", "amp_fp16")
    values: dict[str, Any] = {"sequence": 2048, "tied": True, "dropout": older, "fused_attention": not older}
    values |= model_numbers(f"{key}={value}" for key, value in words)
    missing = [key for key in ("layers", "hidden") if key not in values]
    if missing:
        raise SizingError(f"the row has neither a model nor {' and '.join(missing)}")
    values.setdefault("heads", max(1, values["hidden"] // 64))
    return transformer(Transformer(**values))
