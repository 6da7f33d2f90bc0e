"""Mappings: which are legal, what is said of the others, their words, and their file.

Holds popsize.mapping and popsize.stages.
"""

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popsize.catalogue import MODELS, named_model
from popsize.errors import MappingError
from popsize.hardware import PRECISIONS, PlannedDevices, named_machine
from popsize.mapping import (
    GRADIENT_BYTES,
    MOST_DEVICES,
    OPTIMIZER_BYTES,
    SCHEDULES,
    SCHEMA,
    SHARDING,
    Mapping,
    Training,
    Workload,
    check,
    completed,
    divisors,
    from_table,
    loaded,
    parse_mapping,
    saved,
)
from popsize.model import RECOMPUTE
from popsize.stages import most_phases, shown_stages, stages_of

_COUNTS = st.integers(1, 4096)
MAPPINGS = st.builds(
    Mapping,
    tensor=_COUNTS,
    pipeline=_COUNTS,
    replicas=_COUNTS,
    micro_batch=_COUNTS,
    schedule=st.sampled_from(SCHEDULES),
    interleave=_COUNTS,
    recompute=st.sampled_from(RECOMPUTE),
    sequence_parallel=st.booleans(),
    sharding=st.sampled_from(SHARDING),
    weight_shards=_COUNTS,
    optimizer_shards=_COUNTS,
    offload_activations=st.booleans(),
    offload_optimizer=st.booleans(),
    phases=_COUNTS,
)
TRAININGS = st.builds(
    Training,
    global_batch=_COUNTS,
    precision=st.sampled_from(PRECISIONS),
    optimizer=st.sampled_from(sorted(OPTIMIZER_BYTES)),
    gradient_bytes=st.sampled_from(GRADIENT_BYTES),
    full_weights=st.booleans(),
)


def workload(model: str = "gpt2-xl", global_batch: int = 64) -> Workload:
    """A model on eight devices."""
    return Workload(
        model=named_model(model),
        machine=named_machine("8xA100-80GB"),
        training=Training(global_batch=global_batch),
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("tensor=3", "tensor=3 does not divide hidden=1600 of gpt2-xl: nearest are 1 and 5"),
        ("tensor=2", "tensor=2 does not divide heads=25 of gpt2-xl: nearest are 1 and 5"),
        ("pipeline=49", "pipeline=49 with interleave=1 needs 49 layers, and gpt2-xl has 48: at most pipeline=48"),
        (
            "pipeline=8,schedule=interleaved,interleave=7",
            "needs 56 layers, and gpt2-xl has 48: at most pipeline=6",
        ),
        ("replicas=3", "a global batch of 64 does not divide into replicas=3 with micro_batch=1"),
        ("replicas=3", "nearest are replicas=2 and 4"),
        ("replicas=8,micro_batch=16", "nearest are replicas=2 and 4"),
        ("phases=99", "phases=99 are more than the 50 layers of gpt2-xl"),
        ("phases=99,sharding=weights,replicas=2,weight_shards=2,optimizer_shards=2", "the 98 parts of a stage of"),
        ("phases=2", "phases=2 of whole layers compute these again"),
        ("pipeline=2,interleave=2", "interleave is 2 or more with schedule=interleaved and several stages"),
        ("pipeline=2,schedule=interleaved", "interleave is 2 or more with schedule=interleaved"),
        ("schedule=interleaved,interleave=2", "several stages"),
        ("sequence_parallel=yes", "sequence_parallel=yes needs tensor=2 or more"),
        ("replicas=4,optimizer_shards=2", "need sharding=optimizer, gradients or weights"),
        ("replicas=4,sharding=optimizer,optimizer_shards=3", "optimizer_shards=3 does not divide replicas=4"),
        (
            "replicas=4,sharding=weights,weight_shards=3",
            "weight_shards=3 does not divide replicas=4: nearest are 2",
        ),
        ("replicas=4,sharding=optimizer,weight_shards=2", "weight_shards needs sharding=weights"),
        ("pipeline=4,schedule=interleaved,interleave=5", "48 layers of gpt2-xl do not divide into pipeline=4 x"),
        (
            "pipeline=8,schedule=interleaved,interleave=2,micro_batch=16",
            "needs a multiple of pipeline=8 micro batches, and a replica has 4",
        ),
        ("tensor=5,sequence_parallel=yes", "divides sequence=1024 of gpt2-xl over tensor=5: nearest are 2 and 4"),
        ("micro_batch=128", "micro_batch=128 does not divide a global batch of 64: nearest are 32 and 64"),
        ("replicas=8,sharding=weights", "sharding=weights with weight_shards=1 shards nothing"),
        ("replicas=8,sharding=optimizer", "sharding=optimizer with optimizer_shards=1 shards nothing"),
        (
            "replicas=8,sharding=weights,weight_shards=8",
            "weight_shards=8 does not divide optimizer_shards=1",
        ),
        (
            "replicas=8,sharding=weights,weight_shards=8,optimizer_shards=4",
            "weight_shards=8 does not divide optimizer_shards=4",
        ),
    ],
)
def test_a_mapping_that_breaks_a_rule_is_refused(words: str, said: str) -> None:
    """With what was asked, the rule, and what is nearest."""
    with pytest.raises(MappingError, match=re.escape(said)):
        check(Mapping(**parse_mapping(words)), workload())


def test_more_devices_than_heads_of_keys_repeat_them() -> None:
    """Grouped queries: a tensor group of 16 has each of the eight heads of keys twice."""
    check(Mapping(tensor=16, sequence_parallel=True), workload("llama3-70b"))
    with pytest.raises(MappingError, match="tensor=3 does not divide"):
        check(Mapping(tensor=3), workload("llama3-70b"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("tensr=8", "a mapping has no 'tensr': nearest are tensor"),
        ("tensor", "'tensor' gives no value: write tensor=8"),
        ("tensor=many", "tensor=many: give a whole number of 1 or more"),
        ("pipeline=0", "pipeline=0: give a whole number of 1 or more"),
        ("pipeline=2x2", "pipeline=2x2: give a whole number"),
        ("recompute=some", "recompute=some: it is one of none, attention, layer"),
        ("sequence_parallel=perhaps", "say yes or no"),
        ("tp=2,tensor=4", "tensor is given twice: 2 and 4"),
        ("tensor=1_6", "tensor=1_6: give a whole number of 1 or more"),
        ("cp=2", "not planned: context parallelism"),
        ("expert_parallel=2", "not planned: expert parallelism"),
        ("accumulation=4", "give micro_batch: the accumulation is the global batch / (replicas x micro_batch)"),
        ("sharding=zero4", "sharding=zero4: it is one of none, optimizer, gradients, weights"),
    ],
)
def test_words_that_say_no_mapping_are_refused(words: str, said: str) -> None:
    """With the nearest ones, or what is given twice, not planned, or found from other numbers."""
    with pytest.raises(MappingError, match=re.escape(said)):
        parse_mapping(words)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"global_batch": 0}, "a global batch has 1 to 1000000000000 samples, and not 0"),
        ({"precision": "int8"}, "precision=int8: it is one of fp32"),
        ({"optimizer": "adagrad"}, "optimizer=adagrad: it is one of sgd"),
        ({"gradient_bytes": 3}, "gradients of 3 bytes are not planned: 2 or 4"),
    ],
)
def test_a_training_that_is_none_is_refused(values: dict[str, Any], said: str) -> None:
    """With the values that there are."""
    with pytest.raises(MappingError, match=said):
        Training(**{"global_batch": 8, **values})


def test_the_names_of_the_field_are_taken() -> None:
    """Of Megatron, vLLM and DeepSpeed; and a tensor group of two dimensions. A value may be given twice."""
    assert parse_mapping("tp=8, pp=4 dp=2 micro-batch-size=3") == parse_mapping(
        "tensor=8,pipeline=4,replicas=2,micro_batch=3"
    )
    assert parse_mapping("tensor-parallel-size=8x8") == {"tensor": 64}
    assert parse_mapping("zero=3,sp=yes,vpp=2,tp=4,tensor=4") == parse_mapping(
        "sharding=zero3,sequence_parallel=yes,interleave=2,tensor=4"
    )
    assert parse_mapping("sharding=fsdp,recompute=full") == {"sharding": "weights", "recompute": "layer"}


@given(MAPPINGS)
def test_the_words_of_a_mapping_say_it(mapping: Mapping) -> None:
    """What a table shows can be given to `--fix` and `--explain`."""
    assert Mapping(**parse_mapping(mapping.text)) == mapping


@given(MAPPINGS, TRAININGS)
def test_a_saved_mapping_is_read_as_it_was(mapping: Mapping, training: Training) -> None:
    """All fields, and how the model is trained."""
    planned = Workload(model=named_model("gpt2"), machine=named_machine("8xH100"), training=training)

    found = loaded(saved(mapping, planned), "mapping.json")
    assert (found.mapping, found.training) == (mapping, training)
    assert found.devices == PlannedDevices.of(planned.machine)


def test_the_schema_of_a_saved_mapping() -> None:
    """What the file holds: a version, what was planned for, and the mapping in our own names."""
    table = json.loads(saved(Mapping(tensor=2), workload()))

    assert table["schema"] == SCHEMA == 1
    assert sorted(table) == ["machine", "mapping", "model", "model_sha256", "parameters", "schema", "training"]
    assert table["model"] == "gpt2-xl"
    assert table["machine"] == {
        "machine": "8xA100-80GB",
        "device": "A100-80GB",
        "memory_gib": 79.2,
        "per_host": 8,
        "are_gpus": True,
    }
    assert sorted(table["training"]) == [
        "engine",
        "full_weights",
        "global_batch",
        "gradient_bytes",
        "optimizer",
        "precision",
    ]
    assert table["mapping"] == {name: getattr(Mapping(tensor=2), name) for name in Mapping.__dataclass_fields__}
    assert from_table({"tp": 2}) == Mapping(tensor=2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda table: table.update(schema=2), "has schema 2; this version reads 1"),
        (lambda table: table.pop("schema"), "'schema'"),
        (lambda table: table.pop("mapping"), "'mapping'"),
        (lambda table: table["mapping"].update(tensor=0), "tensor=0: give a whole number"),
        (lambda table: table["mapping"].update(width=1), "a mapping has no 'width'"),
        (lambda table: table["training"].update(steps=1), "steps"),
        (lambda table: table.update(machine="8xA100"), "mapping"),
        (lambda table: table["machine"].update(per_host="8"), "are no devices"),
    ],
)
def test_a_file_that_is_no_mapping_is_named(change: Any, said: str) -> None:
    """With what it lacks, or has too much."""
    table = json.loads(saved(Mapping(), workload()))
    change(table)

    with pytest.raises(MappingError, match=re.escape(said)):
        loaded(json.dumps(table), "mapping.json")
    with pytest.raises(MappingError, match=r"mapping\.json is no mapping that poprun-size --save wrote"):
        loaded("{", "mapping.json")


@given(st.sampled_from(sorted(MODELS)), st.data())
def test_stages_have_every_layer_once(name: str, data: st.DataObject) -> None:
    """And as many as the others, give or take one; parameters are those of the model."""
    model = named_model(name)
    pipeline = data.draw(st.integers(1, model.num_layers))
    stages = stages_of(model, pipeline)
    blocks = [sum(number for layer, number in stage.layers if layer is model.block) for stage in stages]
    copies = model.tied_parameters if pipeline > 1 else 0.0

    assert sum(blocks) == model.num_layers
    assert max(blocks) - min(blocks) <= 1
    assert sum(stage.parameters_on_device(1) for stage in stages) == pytest.approx(model.num_parameters + copies)
    assert {stage.index for stage in shown_stages(model, pipeline)} >= {0, pipeline - 1}
    assert most_phases(model, pipeline, are_layers=False) >= 2 * max(blocks)
    assert most_phases(model, 1, are_layers=True) == model.num_layers + 2


@pytest.mark.parametrize("words", ["phases=2", "offload_activations=yes", "offload_optimizer=yes"])
def test_nothing_waits_in_memory_that_is_not_there(words: str) -> None:
    """A machine without slower memory beside its devices."""
    machine = named_machine("8xA100-80GB")
    device = replace(machine.device, streaming_bytes=0.0, streaming_bytes_per_second=0.0)
    one = replace(workload(), machine=replace(machine, device=device))

    with pytest.raises(MappingError, match="8xA100-80GB has no slower memory beside its devices"):
        check(Mapping(**parse_mapping(words)), one)


@given(st.integers(1, 10**6))
def test_divisors_are_all_numbers_that_divide(number: int) -> None:
    """Least first; also of a number with as many digits as no list has."""
    found = divisors(number)

    assert list(found) == sorted(set(found))
    assert all(number % one == 0 and number // one in found for one in found)
    assert {one for one in range(1, min(number, 100) + 1) if number % one == 0} <= set(found)
    assert divisors(10**300)[0] == 1


def test_shards_go_over_all_replicas_unless_they_say_otherwise() -> None:
    """Of what is sharded only."""
    everyone = Mapping(sharding="weights", weight_shards=8, optimizer_shards=8, replicas=8)
    assert completed({"sharding": "weights"}, 8) == everyone
    assert completed({"sharding": "optimizer", "optimizer_shards": 4}, 8).optimizer_shards == 4
    assert completed({"tensor": 2}, 8) == Mapping(tensor=2, replicas=4)
    assert completed({"tensor": 2, "replicas": 1, "interleave": 2}, 8).schedule == "interleaved"


def test_a_saved_mapping_is_of_one_model() -> None:
    """With another model at hand it is refused, also with one of the same name."""
    text = saved(Mapping(tensor=5), workload())

    assert loaded(text, "mapping.json", named_model("gpt2-xl")).mapping == Mapping(tensor=5)
    with pytest.raises(MappingError, match=r"was planned for gpt2-xl of 1,557,.* and not for this gpt2-xl of"):
        loaded(text, "mapping.json", named_model("gpt2-xl", ["layers=47"]))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"memory_limit_bytes": float("nan")}, "a memory limit of nan bytes is no limit"),
        ({"memory_limit_bytes": float("inf")}, "a memory limit of inf bytes is no limit"),
        (
            {"machine": named_machine(f"{MOST_DEVICES + 1}xA100")},
            "16777217 devices are not planned: at most 16777216",
        ),
        (
            {"model": named_model("gpt", ("layers=10001", "hidden=64", "heads=1", "sequence=8", "vocab=0"))},
            "gpt has 10001 layers: at most 10000 are planned",
        ),
    ],
)
def test_what_is_too_large_to_plan_is_refused(change: dict[str, Any], said: str) -> None:
    """With how much is planned."""
    with pytest.raises(MappingError, match=said):
        replace(workload(), **change)
