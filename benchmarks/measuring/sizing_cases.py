"""Predictions for published rows; a row describes a model, a machine and a division over devices by its cells."""

from collections.abc import Mapping as Table
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Final

from popsize.catalogue import model_numbers, named_model
from popsize.errors import SizingError
from popsize.hardware import Machine, named_machine
from popsize.mapping import Mapping, Training, Workload, completed, mapping_name, parse_count, parse_value
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
"""The names of the cells that a prediction reads; other cells of a row stay as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A published row with the predicted duration and memory."""

    row: Table[str, str]  # all cells of the row by column
    predicted: Candidate


def predict_row(row: Table[str, str], machines: Table[str, Machine]) -> Case:
    """Return the prediction for a row. Raises SizingError if the cells contradict each other or are wrong."""
    cells = {column: cell for column, cell in row.items() if cell and column in COLUMNS}
    workload, mapping = _read(cells, machines)
    return Case(row=row, predicted=predict(workload, mapping))


def _read(cells: Table[str, str], machines: Table[str, Machine]) -> tuple[Workload, Mapping]:
    """Return the workload and the mapping (division over devices) that the cells of a row describe."""
    machine = named_machine(cells.get("machine", "A100-80GB"), machines)
    words = {mapping_name(column): cells[column] for column in _MAPPING if column in cells}
    values = {"recompute": "layer", **{name: parse_value(name, word) for name, word in words.items()}}
    devices = parse_count("devices", cells["devices"]) if "devices" in cells else None
    mapping = completed(values, devices or machine.num_devices)
    if devices not in (None, mapping.num_devices):
        raise SizingError(f"devices={devices}, but tensor x pipeline x replicas is {mapping.num_devices}")
    training = _training(cells, mapping, machine)
    numbers = tuple(sorted((name, value) for name, value in cells.items() if name in _MODEL))
    model = _model(cells.get("model", ""), numbers, cells.get("precision", training.precision))
    return Workload(model=model, machine=machine, training=training), mapping


def _training(cells: Table[str, str], mapping: Mapping, machine: Machine) -> Training:
    """Return the training settings of a row; with ``amp_bf16`` or sharded weights, weights have 32 bits."""
    word = cells.get("precision", machine.device.precision(None)).lower()
    precision = word.removeprefix("amp_")
    half = precision not in ("fp32", "tf32")
    return Training(
        global_batch=parse_count(
            "global_batch", cells.get("global_batch", str(mapping.replicas * mapping.micro_batch))
        ),
        precision=machine.device.precision(precision),
        optimizer=cells.get("optimizer", "adamw").lower(),
        gradient_bytes=parse_count("gradient_bytes", cells.get("gradient_bytes", "4")),
        engine=cells.get("engine", "other").lower(),
        full_weights=half and (word.startswith("amp_") or mapping.sharding == "weights"),
    )


@cache
def _model(name: str, words: tuple[tuple[str, str], ...], precision: str) -> Model:
    """Return the model that a row describes: by the name ``name``, or by sizes such as layers and hidden.

    In fp16 rows, attention is not fused and has dropout, because programs with fp16 are older than fused kernels.
    """
    if name:
        return named_model(name, tuple(f"{key}={value}" for key, value in words))
    older = precision.lower() in ("fp16", "amp_fp16")
    values: dict[str, Any] = {"sequence": 2048, "tied": True, "dropout": older, "fused_attention": not older}
    values |= model_numbers(f"{key}={value}" for key, value in words)
    missing = [key for key in ("layers", "hidden") if key not in values]
    if missing:
        raise SizingError(f"the row has neither a model nor {' and '.join(missing)}")
    values.setdefault("heads", max(1, values["hidden"] // 64))
    return transformer(Transformer(**values))
