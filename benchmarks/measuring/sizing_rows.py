"""Rows that others measured or published, with what is predicted of each."""

import csv
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

from measuring.sizing_cases import Case, predict_row
from scipy.stats import spearmanr

from popsize.catalogue import named_model
from popsize.constants import CONSTANTS, Constants
from popsize.hardware import GIB, GIGA, Machine, named_machine
from popsize.mapping import Training, Workload
from popsize.search import Answer, Candidate, search

DATA = Path(__file__).parent.parent / "data" / "planner"

GROUPED: Final = ("hidden", "devices", "global_batch", "layers", "heads", "sequence")
LEAST_ROWS = 5
NEAR = 1.03

MEGATRON: Final = {"machine": "A100-80GB", "vocab": "51200", "precision": "fp16", "recompute": "layer"}

MACHINES: Final[Mapping[str, Machine]] = {
    # Selene, which the paper's runs were on: eight network cards of 200 Gbit/s in a host.
    "selene": replace(named_machine("A100-80GB"), name="selene", network_bytes_per_second=200 * GIGA)
}

MPT: Final = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}
"""Layers, hidden and heads of the MPT models, as llm-foundry's configurations have them."""

Row = Mapping[str, str]
Timed = tuple[Case, float]
"""A row with the seconds of a step that were measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """What was measured of a row, in some unit, beside what is predicted."""

    row: Row
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """How far the prediction is off, as a share of what was measured."""
        return abs(self.predicted / self.measured - 1)


def rows_of(name: str) -> list[dict[str, str]]:
    """The rows of a file."""
    with (DATA / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def cases_of(rows: Sequence[Row]) -> tuple[Case, ...]:
    """The predictions for ``rows``."""
    return tuple(predict_row(row, MACHINES) for row in rows)


def step_cases(name: str) -> list[Timed]:
    """The cases of a table of times, with the measured seconds of each."""
    rows = rows_of(name)
    asked = [
        {key: value for key, value in row.items() if key not in ("measured_ms", "parameters_billion")}
        for row in rows
    ]
    cases = cases_of([{**row, **MEGATRON} for row in asked])
    return [(case, float(row["measured_ms"]) / 1e3) for case, row in zip(cases, rows, strict=True)]


def seconds_of(case: Case, constants: Constants = CONSTANTS) -> float:
    """What is predicted of a case with these constants."""
    return Candidate(replace(case.predicted.workload, constants=constants), case.predicted.mapping).duration.total


def pairs_of(cases: Iterable[Timed], constants: Constants = CONSTANTS) -> list[Pair]:
    """The seconds of cases, predicted and measured."""
    return [
        Pair(row=case.row, measured=measured, predicted=seconds_of(case, constants)) for case, measured in cases
    ]


def group_key(row: Row) -> tuple[int, ...]:
    """What the rows of a group have in common."""
    return tuple(int(row[name]) for name in GROUPED)


def grouped(items: Iterable[Any], row_of: Callable[[Any], Row]) -> dict[tuple[int, ...], list[Any]]:
    """The groups of ``items``, by what their rows have in common."""

    def key(item: object) -> tuple[int, ...]:
        return group_key(row_of(item))

    return {name: list(members) for name, members in groupby(sorted(items, key=key), key)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How well a table of times is predicted.

    Attributes:
        num_rows: Its rows.
        num_groups: Its groups that are large enough.
        error: Mean error of a row.
        near: Share of the groups whose first proposal is within 1.03 of the fastest that was measured.
        loss: How many times as long as the fastest the first proposal takes, in the mean.
        rank: Median rank correlation of a group.
    """

    num_rows: int
    num_groups: int
    error: float
    near: float
    loss: float
    rank: float

    @property
    def cells(self) -> tuple[str, ...]:
        """It as cells of a table."""
        return f"{self.error:.2%}", f"{self.near:.0%}", f"{self.loss:.4f}", f"{self.rank:.3f}"


def score_of(pairs: Sequence[Pair]) -> Score:
    """The score of a table."""
    large = [group for group in grouped(pairs, lambda pair: pair.row).values() if len(group) >= LEAST_ROWS]
    losses = [
        min(group, key=lambda pair: pair.predicted).measured / min(pair.measured for pair in group)
        for group in large
    ]
    ranks = [
        float(spearmanr([pair.predicted for pair in group], [pair.measured for pair in group])[0])
        for group in large
    ]
    return Score(
        num_rows=len(pairs),
        num_groups=len(large),
        error=fmean(pair.error for pair in pairs),
        near=fmean(loss <= NEAR for loss in losses),
        loss=fmean(losses),
        rank=median(ranks),
    )


def megatron_rows(**settings: str) -> list[dict[str, str]]:
    """The rows of the paper on recomputation as rows of a file of cases."""
    return [
        {
            "machine": "selene",
            **{
                name: row[name]
                for name in ("layers", "hidden", "heads", "interleave", "micro_batch", "global_batch")
            },
            "sequence": row["seq"],
            "tensor": row["tp"],
            "pipeline": row["pp"],
            "replicas": "1",
            "precision": "fp16",
            **settings,
        }
        for row in rows_of("memory_megatron.csv")
    ]


FULL: Final = {"recompute": "layer", "sequence_parallel": "no"}
SELECTIVE: Final = {"recompute": "attention", "sequence_parallel": "yes"}


def megatron_seconds(constants: Constants = CONSTANTS) -> list[Pair]:
    """The measured seconds of an iteration, with full and with selective recomputation."""
    found = []
    for settings, column in ((FULL, "s_per_iter_full_recompute"), (SELECTIVE, "s_per_iter_selective_seq")):
        cases = cases_of(megatron_rows(vocab="51200", **settings))
        measured = [float(row[column]) for row in rows_of("memory_megatron.csv")]
        found += pairs_of(zip(cases, measured, strict=True), constants)
    return found


def megatron_activations(**settings: str) -> list[float]:
    """GiB of activations of the four models; without embedding and logits, as the paper counts."""
    return [case.predicted.memory.activations / GIB for case in cases_of(megatron_rows(**settings))]


def megatron_memory() -> list[tuple[str, Pair]]:
    """What the paper's equations give, in GiB and in per cent of all activations."""
    rows = rows_of("memory_megatron.csv")
    none = {"recompute": "none", "sequence_parallel": "no"}
    kept = megatron_activations(**none)
    state = [
        (case.predicted.memory.weights + case.predicted.memory.gradients + case.predicted.memory.optimizer) / GIB
        for case in cases_of(megatron_rows(**none))
    ]
    columns = {
        "gib_params_and_optimizer": state,
        "gib_activations_none": kept,
        "gib_activations_selective_seq": megatron_activations(**SELECTIVE),
    }
    ways = {
        "pct_seq": {"recompute": "none", "sequence_parallel": "yes"},
        "pct_sel": {"recompute": "attention", "sequence_parallel": "no"},
        "pct_seqsel": SELECTIVE,
        "pct_full_recompute": FULL,
    }
    for column, settings in ways.items():
        shares = zip(megatron_activations(**settings), kept, strict=True)
        columns[column] = [100 * share / whole for share, whole in shares]
    return [
        (column, Pair(row=row, measured=float(row[column]), predicted=value))
        for column, values in columns.items()
        for row, value in zip(rows, values, strict=True)
    ]


def mpt_cases(factor: int) -> tuple[Case, ...]:
    """FSDP runs, with ``factor`` times the micro batch that was the largest to fit."""
    rows = []
    for row in rows_of("fits_mpt.csv"):
        layers, hidden, heads = MPT[row["Model"]]
        samples = factor * int(row["MicroBatchSize"])
        gpu, size = row["GPU"].upper().removesuffix("GB").split("_")
        rows.append(
            {
                "layers": str(layers),
                "hidden": str(hidden),
                "heads": str(heads),
                "sequence": row["SeqLen (T)"],
                "positions": row["SeqLen (T)"],
                "vocab": "50368",
                "biases": "no",
                "devices": row["# GPUs"],
                "machine": f"{gpu}-{size}GB",
                "micro_batch": str(samples),
                "global_batch": str(samples * int(row["# GPUs"])),
                "precision": row["Precision"],
                "sharding": "weights" if row["Sharding Strategy"] == "FULL_SHARD" else "gradients",
                "recompute": "layer" if row["Activation Checkpointing"] == "True" else "none",
            }
        )
    return cases_of(rows)


def titan_pairs() -> list[Pair]:
    """Peaks of Llama models, in GiB; rows with context parallelism, which is not planned, are left out."""
    rows, asked = [], []
    for row in rows_of("peaks_torchtitan.csv"):
        sizes = {name: int(number) for name, number in re.findall(r"(fsdp|tp|pp|cp)(\d+)", row["parallel"])}
        if not row["mem_gib"] or sizes.get("cp", 1) > 1:
            continue
        tensor, pipeline, replicas = sizes.get("tp", 1), sizes.get("pp", 1), sizes["fsdp"]
        samples = int(row["local_batch"])
        rows.append(row)
        asked.append(
            {
                "model": f"llama3-{row['model'].lower()}",
                "sequence": row["seq"],
                "machine": "H100-96GB",
                "tensor": str(tensor),
                "pipeline": str(pipeline),
                "replicas": str(replicas),
                "micro_batch": str(samples if pipeline == 1 else samples // pipeline),
                "global_batch": str(samples * replicas),
                "precision": "bf16",
                "sharding": "weights",
                "sequence_parallel": "yes" if tensor > 1 else "no",
                "recompute": row["ac"],
            }
        )
    return [
        Pair(row=row, measured=float(row["mem_gib"]), predicted=case.predicted.memory.total / GIB)
        for row, case in zip(rows, cases_of(asked), strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class PodRow:
    """How a model was dealt to an IPU-POD, and what the planner finds for it."""

    row: Row
    workload: Workload
    fixed: Mapping[str, Any]

    @cached_property
    def answer(self) -> Answer:
        """The mappings that have all the values that were published."""
        return search(self.workload, self.fixed)


def _bert_tokens(row: Row) -> int:
    """Tokens of a row that does not say them: those of the first part of pretraining, else those of SQuAD."""
    return 128 if row["global_batch"] == "65536" else 384


def pod_rows() -> list[PodRow]:
    """Each row as a search with all that was published fixed."""
    found = []
    for row in rows_of("mappings_pods.csv"):
        sequence = re.search(r"sequence (\d+)", row["model"])
        model = row["model"].split(" ")[0]
        words = [f"sequence={sequence[1] if sequence else _bert_tokens(row)}"] if model.startswith("bert") else []
        fixed: dict[str, Any] = {
            name: int(row[name]) for name in ("tensor", "pipeline", "replicas", "micro_batch") if row[name]
        }
        if row["recompute"]:
            fixed["recompute"] = "layer"
        if row["optimizer_state"]:
            fixed["offload_optimizer"] = row["optimizer_state"] == "streaming memory"
        if row["execution"].startswith("pipeline;"):
            fixed["phases"] = 1
        training = Training(
            global_batch=int(row["global_batch"] or 1024), precision="fp16", optimizer="lamb", gradient_bytes=2
        )
        workload = Workload(
            model=named_model(model, words), machine=named_machine(row["machine"]), training=training
        )
        found.append(PodRow(row=row, workload=workload, fixed=fixed))
    return found
