"""Published rows: the prediction for each, and the error of a row that contradicts itself.

Holds measuring.sizing_cases.
"""

import pytest
from measuring.sizing_cases import predict_row

from popsize.catalogue import named_model
from popsize.errors import SizingError
from popsize.hardware import GIB, machines_of, named_machine
from popsize.mapping import Mapping, Training, Workload
from popsize.search import predict

SMALL = {"hidden": "64", "layers": "8"}


def test_a_row_is_predicted_as_its_mapping_is() -> None:
    """All columns together."""
    case = predict_row(
        {
            "model": "gpt3-2.7b",
            "devices": "64",
            "machine": "A100-80GB",
            "tensor": "4",
            "pipeline": "2",
            "replicas": "8",
            "global_batch": "512",
            "micro_batch": "2",
            "precision": "bf16",
            "optimizer": "adam",
            "gradient_bytes": "4",
            "engine": "torch",
            "sharding": "optimizer",
            "sharding_group": "1",
            "optimizer_sharding_group": "4",
            "recompute": "attention",
            "sequence_parallel": "yes",
            "schedule": "interleaved",
            "interleave": "4",
            "note": "kept",
        },
        {},
    )
    mapping = Mapping(
        tensor=4,
        pipeline=2,
        replicas=8,
        micro_batch=2,
        sharding="optimizer",
        optimizer_shards=4,
        recompute="attention",
        sequence_parallel=True,
        schedule="interleaved",
        interleave=4,
    )
    workload = Workload(
        model=named_model("gpt3-2.7b"),
        machine=named_machine("A100-80GB"),
        training=Training(global_batch=512, optimizer="adam"),
    )
    expected = predict(workload, mapping)

    assert case.row["note"] == "kept"
    assert case.predicted.mapping == mapping
    assert case.predicted.duration == expected.duration
    assert case.predicted.memory == expected.memory


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (
            {"interleave": "2", "pipeline": "4", "global_batch": "4"},
            Mapping(pipeline=4, interleave=2, recompute="layer", schedule="interleaved"),
        ),
        ({"devices": "8", "tensor": "2", "heads": "2"}, Mapping(tensor=2, replicas=4, recompute="layer")),
        ({"machine": "8xH100", "pipeline": "2"}, Mapping(pipeline=2, replicas=4, recompute="layer")),
        (
            {"replicas": "4", "sharding": "zero1", "recompute": "no"},
            Mapping(replicas=4, sharding="optimizer", optimizer_shards=4),
        ),
        ({"recompute": "selective"}, Mapping(recompute="attention")),
    ],
)
def test_columns_may_lack(row: dict[str, str], expected: Mapping) -> None:
    """Defaults stand for them; words of other programs are taken."""
    found = predict_row(SMALL | row, {}).predicted.mapping
    names = ("tensor", "pipeline", "replicas", "interleave", "sharding", "optimizer_shards", "recompute")

    assert [getattr(found, name) for name in names] == [getattr(expected, name) for name in names]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"tensor": "3"}, "tensor=3 does not divide hidden=64"),
        ({"devices": "4", "replicas": "2"}, "devices=4, but tensor x pipeline x replicas is 2"),
        ({"devices": "many"}, "devices=many: give a whole number"),
        ({"global_batch": "1.5"}, "global_batch=1.5: give a whole number"),
        ({"machine": "B100"}, "no machine is called 'B100'"),
        ({"model": "gtp2"}, "no model is called 'gtp2': nearest are gpt2"),
        ({"precision": "int8"}, "precision=int8: it is one of"),
        ({"hidden": ""}, "the row has neither a model nor hidden"),
    ],
)
def test_a_row_with_an_error_is_refused(row: dict[str, str], said: str) -> None:
    """The error says what is wrong."""
    with pytest.raises(SizingError) as refused:
        predict_row(SMALL | row, {})

    assert said in str(refused.value)


def test_a_described_machine_computes_in_its_precision() -> None:
    """The rows name the machine as --devices does."""
    figures = {"memory_gib": 1, "tflops": {"fp16": 1}, "memory_gb_per_second": 1}
    links = {"link_gb_per_second": 1, "network_gb_per_second": 1}
    machines = machines_of({"box": figures | links}, "machines.yaml")
    good = predict_row(SMALL | {"machine": "64xbox"}, machines).predicted
    large = predict_row(
        {"layers": "64", "hidden": "1024", "machine": "box", "micro_batch": "64"}, machines
    ).predicted

    assert good.mapping.replicas == 64
    assert good.workload.training.precision == "fp16"
    assert large.workload.limit_bytes == GIB
    assert not large.fits
