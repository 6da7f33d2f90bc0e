"""Rows of a CSV file: what is predicted of each, and what is said of those with an error.

Holds popsize.cases.
"""

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popsize.cases import PREDICTED, Case, cases_text, header_of, predict_cases
from popsize.catalogue import named_model
from popsize.errors import SizingError
from popsize.hardware import GIB, machines_of, named_machine
from popsize.mapping import Mapping, Training, Workload
from popsize.search import predict


def only(text: str) -> Case:
    """The one row of a file."""
    (case,) = predict_cases(text, {})
    return case


def test_a_row_is_predicted_as_its_mapping_is() -> None:
    """All columns together."""
    case = only(
        "model,devices,machine,tensor,pipeline,replicas,global_batch,micro_batch,precision,optimizer,gradient_bytes,"
        "engine,sharding,sharding_group,optimizer_sharding_group,recompute,sequence_parallel,schedule,interleave\n"
        "gpt3-2.7b,64,A100-80GB,4,2,8,512,2,bf16,adam,4,torch,optimizer,1,4,attention,yes,interleaved,4\n"
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

    assert case.error == ""
    assert case.predicted is not None
    assert case.predicted.mapping == mapping
    assert case.predicted.duration == expected.duration
    assert case.predicted.memory == expected.memory
    (row,) = csv.DictReader(io.StringIO(cases_text((case,))))
    assert float(row["seconds"]) == pytest.approx(expected.duration.total, rel=1e-5)
    assert float(row["optimizer_gib"]) == pytest.approx(expected.memory.optimizer / GIB, abs=1e-6)
    assert row["fits"] == "yes"


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("hidden,layers\n1024,2\n", Mapping(recompute="layer")),
        (
            "hidden,layers,interleave,pipeline,global_batch\n64,8,2,4,4\n",
            Mapping(pipeline=4, schedule="interleaved", interleave=2),
        ),
        ("hidden,layers,devices,tensor\n128,8,8,2\n", Mapping(tensor=2, replicas=4)),
        ("hidden,layers,machine,pipeline\n64,8,8xH100,2\n", Mapping(pipeline=2, replicas=4)),
        (
            "hidden,layers,replicas,sharding\n64,8,4,zero3\n",
            Mapping(replicas=4, sharding="weights", weight_shards=4, optimizer_shards=4),
        ),
        (
            "hidden,layers,replicas,sharding\n64,8,4,zero1\n",
            Mapping(replicas=4, sharding="optimizer", optimizer_shards=4),
        ),
        ("hidden,layers,recompute\n64,8,selective\n", Mapping(recompute="attention")),
        ("hidden,layers,recompute,seconds\n64,8,no,99\n", Mapping(recompute="none")),
    ],
)
def test_columns_may_lack(row: str, expected: Mapping) -> None:
    """Defaults stand for them; words of other programs are taken."""
    case = only(row)

    assert case.error == ""
    assert case.predicted is not None
    recompute = expected.recompute if "recompute" in row else "layer"
    assert (
        case.predicted.mapping.text
        == Mapping(
            **{name: getattr(expected, name) for name in Mapping.__dataclass_fields__} | {"recompute": recompute}
        ).text
    )


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ("tensor=3", "tensor=3 does not divide hidden=64"),
        ("pipeline=9", "at most pipeline=8"),
        ("global_batch=3,replicas=2", "a global batch of 3 does not divide"),
        ("devices=4,replicas=2", "devices=4, but tensor x pipeline x replicas is 2"),
        ("devices=4,tensor=8", "devices=4, but tensor x pipeline x replicas is 8"),
        ("devices=many", "devices=many: give a whole number"),
        ("global_batch=1.5", "global_batch=1.5: give a whole number"),
        ("global_batch=nan", "give a whole number"),
        ("global_batch=1e99", "give a whole number"),
        ("global_batch=inf", "give a whole number"),
        ("machine=B100", "no machine is called 'B100'"),
        ("model=gtp2", "no model is called 'gtp2': nearest are gpt2"),
        ("precision=int8", "precision=int8: it is one of"),
        ("optimizer=best", "optimizer=best: it is one of"),
        ("sharding=zero9", "sharding=zero9: it is one of"),
        ("hidden=", "the row has neither a model nor hidden"),
        ("heads=7", "7 heads do not divide a hidden size of 64"),
        ("cp=2", "cp=2: not planned: context parallelism"),
        ("Expert-Parallel=8", "Expert-Parallel=8: not planned: expert parallelism"),
        ("gas=2", "gas=2, but global batch / (replicas x micro_batch) is 1"),
    ],
)
def test_a_row_with_an_error_does_not_stop_the_others(values: str, said: str) -> None:
    """Its line is known, and what is wrong."""
    changed = {"hidden": "64", "layers": "8"} | dict(pair.split("=") for pair in values.split(","))
    names = list(changed)
    good = ",".join({"hidden": "64", "layers": "8"}.get(name, "") for name in names)
    text = "\n".join([",".join(names), good, ",".join(changed.values()), good, ""])
    found = predict_cases(text, {})

    assert [case.line for case in found] == [2, 3, 4]
    assert [bool(case.error) for case in found] == [False, True, False]
    assert said in found[1].error
    rows = list(csv.reader(io.StringIO(cases_text(found))))
    assert [row[-1] for row in rows] == ["fits", "yes", "", "yes"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no header"),
        ("note\n1\n", "columns are model, layers, .*; the file has note"),
        ("hidden,layres\n1,2\n", "the file has layres, which is no column: is it layers?"),
        ("layers;hidden\n1;2\n", "the delimiter is ';': separate columns by commas"),
        ("layers,hidden,tp,tensor\n1,2,1,1\n", "the columns tp and tensor say the same"),
    ],
)
def test_a_file_with_a_wrong_header_is_refused(text: str, said: str) -> None:
    """With what is wrong, and what to write."""
    with pytest.raises(SizingError, match=said):
        predict_cases(text, {})


@given(
    st.lists(
        st.tuples(st.sampled_from(["gpt2", "bert-large", "x"]), st.sampled_from(["1", "2", "5", "y"])), max_size=8
    )
)
def test_as_many_rows_come_out_as_went_in(rows: list[tuple[str, str]]) -> None:
    """In their order, each with its own columns and those that are predicted."""
    text = "\n".join(["model,tensor", *map(",".join, rows), ""])
    found = predict_cases(text, {})
    out = list(csv.DictReader(io.StringIO(cases_text(found))))

    assert [(row["model"], row["tensor"]) for row in out] == rows
    assert all(set(PREDICTED) <= row.keys() for row in out)
    assert [row["seconds"] == "" for row in out] == [
        model == "x" or tensor in ("5", "y") for model, tensor in rows
    ]


def test_a_thousand_rows() -> None:
    """Of all shapes: each has its prediction."""
    rows = [
        f"{layers},{hidden},{tensor},{micro_batch}"
        for layers in range(1, 26)
        for hidden in (512, 1024)
        for tensor in (1, 2, 4, 8)
        for micro_batch in (1, 2, 4, 8, 16)
    ]
    found = predict_cases("\n".join(["layers,hidden,tensor,micro_batch", *rows, ""]), {})

    assert len(found) == 1000
    assert not [case.error for case in found if case.error]


def test_other_columns_and_other_names_of_columns_are_kept() -> None:
    """With the cells that they have; a column of ours has the names of the field, too."""
    text = "note,Layers,hidden_size,tp,pp,dp,group,seconds\nfirst,8,64,1,2,4,a,99\n"
    found = predict_cases(text, {})
    (row,) = csv.DictReader(io.StringIO(cases_text(found)))

    assert found[0].error == ""
    assert found[0].predicted is not None
    assert found[0].predicted.mapping.text.startswith("tensor=1,pipeline=2,replicas=4")
    assert list(row) == ["note", "Layers", "hidden_size", "tp", "pp", "dp", "group", *PREDICTED]
    assert (row["note"], row["Layers"], row["group"]) == ("first", "8", "a")
    assert row["seconds"] != "99"


def test_what_is_not_planned_may_be_1() -> None:
    """Columns of parallelism that a row does not use, and of the accumulation that it has."""
    found = predict_cases("layers,hidden,cp,ep,global_batch,accumulation,tp\n8,64,1,,4,4,1.0\n", {})

    assert [case.error for case in found] == [""]


def test_a_file_of_a_header_keeps_it() -> None:
    """With the predicted columns behind it."""
    text = "layers,hidden,note\n"

    assert (
        cases_text(predict_cases(text, {}), header_of(text)) == ",".join(["layers,hidden,note", *PREDICTED]) + "\n"
    )


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_rows_that_are_no_csv_do_not_stop_the_others(end: str) -> None:
    """Nor any way to end a line."""
    found = predict_cases(end.join(["layers,hidden", "8,64", "8," + "9" * 200_000, "8,64,5", "8,64,", "8,64"]), {})

    assert [case.line for case in found] == [2, 3, 4, 5, 6]
    assert [bool(case.error) for case in found] == [False, True, True, False, False]
    assert found[1].error == "it is not CSV: field larger than field limit (131072)"
    assert found[2].error == "it has 3 cells, and the file 2 columns"


@pytest.mark.parametrize("value", ["0", "nan", "inf", "-1", "1e3", "9" * 400, "0x8"])
@pytest.mark.parametrize(
    "name", ["devices", "global_batch", "gradient_bytes", "layers", "replicas", "micro_batch"]
)
def test_what_is_no_count_is_an_error_of_its_row(name: str, value: str) -> None:
    """Of each column that counts."""
    changed = {"hidden": "64", "layers": "8"} | {name: value}

    assert only(f"{','.join(changed)}\n{','.join(changed.values())}\n").error


def test_machines_of_a_file_come_in_any_number() -> None:
    """As they do for --devices; what they lack is said."""
    figures = {"memory_gib": 1, "tflops": {"fp16": 1}, "memory_gb_per_second": 1}
    links = {"link_gb_per_second": 1, "network_gb_per_second": 1}
    machines = machines_of({"box": figures | links}, "machines.yaml")
    rows = "8,64,64xbox,,1\n8,64,64xbox,bf16,1\n64,1024,box,,64\n"
    good, bad, large = predict_cases(f"layers,hidden,machine,precision,micro_batch\n{rows}", machines)

    assert good.predicted is not None
    assert good.predicted.mapping.replicas == 64
    assert good.predicted.workload.training.precision == "fp16"
    assert bad.error == "precision=bf16: it is one of fp16 on box"
    assert large.predicted is not None
    assert large.predicted.workload.limit_bytes == GIB
    assert not large.predicted.fits


def test_an_empty_precision_is_the_machines() -> None:
    """In the model, too: with 16-bit floats it has the parts of an older one."""
    header = "model,layers,hidden,machine,devices,global_batch,precision\n"
    row = ",24,1024,POD16,16,16,{}\n"
    empty, written = (only(header + row.format(word)) for word in ("", "fp16"))
    assert empty.error == written.error == ""
    assert empty.predicted is not None
    assert written.predicted is not None
    assert empty.predicted.memory == written.predicted.memory
