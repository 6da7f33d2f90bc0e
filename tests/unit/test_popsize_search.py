"""The search: what it finds is legal, fits and is sorted; and what it says where nothing fits.

Holds popsize.search.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from popsize.catalogue import named_model
from popsize.duration import phase_plan
from popsize.errors import MappingError
from popsize.hardware import GIB, machines_of, named_machine
from popsize.mapping import SHARDING, Mapping, Training, Workload, check, divisors
from popsize.model import RECOMPUTE
from popsize.picture import cube_svg
from popsize.search import Candidate, nearest_changes, predict, search
from popsize.tables import answer_table, explanation, seconds
from tests.unit.test_popsize_tables import printed


def workload(model: str, machine: str, global_batch: int, limit_gib: float | None = None) -> Workload:
    """A model on a machine."""
    return Workload(
        model=named_model(model),
        machine=named_machine(machine),
        training=Training(global_batch=global_batch),
        memory_limit_bytes=None if limit_gib is None else limit_gib * GIB,
    )


CASES = st.builds(
    workload,
    st.sampled_from(["bert-large", "gpt2", "gpt2-xl", "llama2-7b", "gpt3-2.7b"]),
    st.sampled_from(["8xA100-80GB", "2xA100-40GB", "16xH100", "12xH200", "POD16"]),
    st.sampled_from([8, 48, 64]),
    st.sampled_from([None, 24.0, 0.5]),
)


@given(CASES)
@settings(max_examples=20)
def test_what_fits_is_legal_sorted_and_within_memory(one: Workload) -> None:
    """On all devices; and what is said to be faster is faster, and does not fit."""
    answer = search(one, {})
    seconds = [found.duration.total for found in answer.fitting]

    assert seconds == sorted(seconds)
    assert len({found.mapping for found in answer.fitting}) == len(seconds) <= answer.num_mappings
    for found in answer.fitting:
        check(found.mapping, one)
        assert found.fits
        assert found.memory.total <= one.limit_bytes
        assert found.memory.streaming <= one.machine.device.streaming_bytes
        assert found.mapping.num_devices == one.machine.num_devices
    if answer.faster is not None:
        assert not answer.faster.fits
        assert answer.faster.missing_bytes + answer.faster.missing_streaming_bytes > 0
        assert not seconds or answer.faster.duration.total < seconds[0]


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "tensor": st.sampled_from([1, 2, 4, 8]),
            "pipeline": st.sampled_from([1, 2, 4]),
            "micro_batch": st.sampled_from([1, 2]),
            "recompute": st.sampled_from(["none", "attention", "layer"]),
            "schedule": st.sampled_from(["gpipe", "1f1b"]),
            "sharding": st.sampled_from(["none", "optimizer"]),
        },
    )
)
@settings(max_examples=20)
def test_what_is_fixed_stays(fixed: dict[str, Any]) -> None:
    """Every mapping has these values, or an error says why none is legal."""
    try:
        answer = search(workload("gpt3-2.7b", "8xA100-80GB", 64), fixed)
    except MappingError as error:
        assert str(error)  # noqa: PT017 - either is right
        return
    for found in answer.fitting:
        assert fixed == {name: getattr(found.mapping, name) for name in fixed}


def test_gpt3_on_65536_devices() -> None:
    """It has an answer, which uses all of them, and is no slower than weights that two replicas share."""
    torchs = workload("gpt3-175b", "65536xA100-80GB", 65536)
    one = replace(torchs, training=replace(torchs.training, engine="other"))
    answer = search(one, {})
    shape = Mapping(tensor=4, pipeline=8, replicas=2048, schedule="interleaved", interleave=6)
    shared = replace(shape, sequence_parallel=True, sharding="weights", weight_shards=2, optimizer_shards=2048)
    known = predict(one, shared)

    assert answer.num_mappings > 1000
    assert answer.fitting[0].mapping.num_devices == 65536
    assert known.fits
    assert answer.fitting[0].duration.total <= known.duration.total
    assert not predict(torchs, shared).fits  # six pieces of a stage have memory for 32 micro batches each


def test_state_that_the_slower_memory_cannot_hold_does_not_fit() -> None:
    """2.8 TB of state are more than eight times 64 GiB, though each phase has room in a device."""
    found = predict(
        workload("gpt3-175b", "8xA100-80GB", 64), Mapping(tensor=4, pipeline=2, micro_batch=8, phases=8)
    )

    assert found.missing_bytes == 0
    assert found.missing_streaming_bytes == found.memory.streaming - 64 * GIB > 0
    assert not found.fits


def test_nothing_fits_and_the_nearest_changes_are_said() -> None:
    """Each with its number: larger devices, what is fixed, more devices."""
    one = workload("llama3-70b", "8xA100-40GB", 64)
    fixed = {"tensor": 1, "offload_optimizer": False, "phases": 1}
    answer = search(one, fixed)
    changes = nearest_changes(one, fixed)

    assert answer.fitting == ()
    assert re.match(
        r"devices of \d+\.\d\d GiB in place of 39\.40, for tensor=1,.* GiB of it are \w+\)$", changes[0]
    )
    assert re.fullmatch(r"\d+ devices in place of 8", changes[-1])
    more = int(changes[-1].split()[0])
    assert search(workload("llama3-70b", f"{more}xA100-40GB", 64), fixed).fitting
    assert not search(workload("llama3-70b", f"{more // 2}xA100-40GB", 64), fixed).fitting


def test_another_value_of_what_is_fixed_is_a_change() -> None:
    """It is named with the mapping that would fit."""
    one = workload("llama3-8b", "8xA100-80GB", 64, limit_gib=40)
    fixed = {"tensor": 1, "pipeline": 1, "sharding": "none", "phases": 1, "offload_optimizer": False}

    assert any(change.startswith("sharding other than none: tensor=1") for change in nearest_changes(one, fixed))


@pytest.mark.parametrize(
    ("model", "batch", "fixed", "said"),
    [
        ("gpt2-xl", 64, {"tensor": 3}, "tensor=3 does not divide hidden=1600"),
        ("gpt2-xl", 64, {"pipeline": 49}, "gpt2-xl has 48"),
        ("gpt2-xl", 64, {"pipeline": 3}, "is 3, which does not divide the 8 devices of 8xA100-80GB"),
        ("gpt2-xl", 64, {"replicas": 8, "micro_batch": 16}, "a global batch of 64 does not divide"),
        ("gpt2-xl", 64, {"micro_batch": 128}, "micro_batch=128 does not divide a global batch of 64"),
        ("gpt2-xl", 64, {"optimizer_shards": 3}, "optimizer_shards=3 does not divide replicas=8"),
        (
            "llama3-8b",
            512,
            {"interleave": 3, "pipeline": 4},
            "32 layers of llama3-8b do not divide into pipeline=4",
        ),
    ],
)
def test_no_legal_mapping_has_what_is_fixed(model: str, batch: int, fixed: dict[str, Any], said: str) -> None:
    """The rule that is broken is said, not that of another value."""
    with pytest.raises(MappingError, match=re.escape(said)):
        search(workload(model, "8xA100-80GB", batch), fixed)


def test_a_batch_that_no_replicas_divide() -> None:
    """25 heads leave no tensor group of two, so that eight devices need eight replicas or stages."""
    with pytest.raises(MappingError, match=re.escape("no mapping of gpt2-xl uses all 7 devices of 7xA100")):
        search(workload("gpt2-xl", "7xA100", 4), {"pipeline": 1})


def legal(one: Workload, mappings: Iterable[Mapping]) -> Iterator[Candidate]:
    """What is predicted of those that a program could run."""
    for mapping in mappings:
        with suppress(MappingError):
            yield predict(one, mapping)


def every_mapping(one: Workload, recompute: tuple[Any, ...] = RECOMPUTE) -> list[Candidate]:
    """Most mappings to all devices that a search may find, without its order and its shortcuts."""
    number = one.machine.num_devices
    found = list[Candidate]()
    for tensor, pipeline, micro_batch, again in product(
        divisors(number), divisors(number), (1, 2, 4, 8), recompute
    ):
        shape = Mapping(
            tensor=tensor,
            pipeline=pipeline,
            replicas=max(1, number // (tensor * pipeline)),
            micro_batch=micro_batch,
            recompute=again,
            sequence_parallel=tensor > 1,
        )
        shards = divisors(shape.replicas)
        sharded = (
            replace(shape, sharding=sharding, weight_shards=weights, optimizer_shards=optimizer)
            for sharding, weights, optimizer in product(SHARDING, shards, shards)
            if sharding != "gradients" or pipeline == 1
        )
        for whole in legal(one, sharded):
            found += legal(
                one,
                (
                    replace(
                        whole.mapping,
                        offload_activations=activations,
                        offload_optimizer=state,
                        phases=phases,
                        schedule="1f1b" if pieces == 1 else "interleaved",
                        interleave=pieces,
                    )
                    for activations, state, phases, pieces in product(
                        (False, True), (False, True), (1, 2, 4), (1, 2, 3)
                    )
                ),
            )
    return [it for it in found if it.mapping.num_devices == number and can_start(one, it.mapping)]


def can_start(one: Workload, mapping: Mapping) -> bool:
    """Whether torch runs it: only what is compiled as a whole moves state, or has parts of layers as phases."""
    if one.machine.device.is_compiled_for:
        return True
    is_apart = mapping.offload_activations or mapping.offload_optimizer
    return not is_apart and (mapping.phases == 1 or mapping.has_layer_phases)


def test_what_torch_cannot_start_is_found_only_if_it_is_asked_for() -> None:
    """State beside a GPU and phases of parts of layers, which `popdist.parallel.parallelize` refuses."""
    one = workload("gpt2-xl", "4xA100-80GB", 16, 9.0)

    assert all(can_start(one, found.mapping) for found in search(one, {}).fitting)
    for name, value in (("offload_optimizer", True), ("phases", 4)):
        (first, *_) = search(one, {name: value, "pipeline": 2}).fitting
        assert getattr(first.mapping, name) == value


@pytest.mark.parametrize(
    ("model", "machine", "limit"),
    [
        ("gpt2-xl", "4xA100-80GB", None),
        ("gpt2-xl", "4xA100-80GB", 9.0),
        ("llama2-13b", "4xA100-40GB", None),
        ("bert-large", "POD4", None),
        ("gpt2-xl", "POD4", None),
    ],
)
def test_the_first_is_the_fastest_of_all(model: str, machine: str, limit: float | None) -> None:
    """Whatever is sharded, waits in slower memory or runs in phases; nothing that fits is faster."""
    one = workload(model, machine, 16, limit)
    recompute = ("none", "layer")
    every = every_mapping(one, recompute)
    fastest = min(found.duration.total for found in every if found.fits)
    found = [answer.fitting[:1] for answer in (search(one, {"recompute": way}) for way in recompute)]
    seconds = [first.duration.total for fitting in found for first in fitting]

    assert min(seconds) <= fastest * (1 + 1e-9)


def test_memory_beyond_what_is_needed_changes_nothing() -> None:
    """More room never makes the answer slower, and a limit above the device's memory is that memory."""
    seconds = [
        search(workload("gpt2-xl", "8xA100-80GB", 64, limit), {}).fitting[0].duration.total
        for limit in (24, 48, 52, None, 1000)
    ]

    assert seconds == sorted(seconds, reverse=True)
    assert (
        workload("gpt2-xl", "8xA100-80GB", 64, 1000).limit_bytes == named_machine("A100-80GB").device.memory_bytes
    )


def test_the_next_better_mapping_is_the_slowest_of_the_faster() -> None:
    """Between it and the first there is none of those that are too large."""
    one = workload("gpt2-xl", "4xA100-80GB", 16, 10)
    fixed = {"tensor": 1, "pipeline": 1, "sharding": "weights", "optimizer_shards": 4, "phases": 1}
    fixed |= {"offload_activations": False, "offload_optimizer": False}
    answer = search(one, fixed)
    best = answer.fitting[0].duration.total
    too_large = [
        found.duration.total
        for found in every_mapping(one)
        if not found.fits and all(getattr(found.mapping, name) == value for name, value in fixed.items())
    ]

    assert answer.faster is not None
    assert answer.faster.duration.total == pytest.approx(max(second for second in too_large if second < best))


def test_interleaved_stages_have_micro_batches_for_all() -> None:
    """Four samples on eight devices leave none that interleaves eight stages or four."""
    for found in search(workload("gpt2-xl", "8xA100-80GB", 4), {}).fitting:
        if found.mapping.interleave > 1:
            assert found.mapping.num_micro_batches(4) % found.mapping.pipeline == 0


def test_a_batch_with_many_divisors_is_searched_in_few_tries() -> None:
    """17,000 shapes: those that cannot be among the fastest are not predicted in full."""
    answer = search(workload("gpt3-175b", "55440xH200-141GB", 720720), {})

    assert len(answer.fitting) >= 500
    assert answer.num_mappings < 60_000
    assert answer.faster is None or answer.faster.duration.total < answer.fitting[0].duration.total


def test_nothing_fits_on_many_devices() -> None:
    """One GiB is too little for any mapping, and the least of those is said."""
    one = workload("gpt3-175b", "65536xA100-80GB", 65536, limit_gib=0.5)

    assert search(one, {}).fitting == ()
    assert re.match(r"devices of \d+\.\d\d GiB in place of 0\.50, for tensor=", nearest_changes(one, {})[0])


def test_a_large_micro_batch_that_is_asked_for_is_tried() -> None:
    """The bound of a search is not one of what programs run."""
    answer = search(workload("gpt2", "8xA100-80GB", 2048), {"micro_batch": 128, "recompute": "layer"})

    assert {found.mapping.micro_batch for found in answer.fitting} == {128}


def test_what_is_asked_to_be_sharded_is() -> None:
    """Over as many replicas as there are; one replica shards nothing."""
    for found in search(workload("gpt2-xl", "8xA100-80GB", 64), {"sharding": "weights"}).fitting:
        assert found.mapping.weight_shards > 1 or found.mapping.replicas == 1


def test_a_cpu_with_a_store_trains_a_larger_model_in_phases() -> None:
    """Of whole layers that are computed again; memory and waiting are those of the phases that are planned."""
    figures = {"memory_gib": 8, "tflops": 0.2, "memory_gb_per_second": 20, "operator_seconds": 3e-6}
    figures |= {"link_gb_per_second": 1, "network_gb_per_second": 1}
    store = {"streaming_gib": 100, "streaming_gb_per_second": 0.5, "streaming_write_gb_per_second": 0.25}
    one = Workload(
        model=named_model("gpt2-large"),
        machine=machines_of({"box": figures | store}, "m.yaml")["box"],
        training=Training(global_batch=4, precision="fp32"),
        memory_limit_bytes=3 * GIB,
    )
    answer = search(one, {})
    first = answer.fitting[0]
    plan = phase_plan(one, first.mapping)

    assert first.mapping.has_layer_phases
    assert first.mapping.recompute == "layer"
    assert first.memory.total == plan.memory.total <= 3 * GIB
    assert first.duration.streaming == plan.step.reading + plan.step.writing > 0
    assert first.duration.layers + first.duration.optimizer == pytest.approx(plan.step.computing)
    assert first.memory.streaming >= 12 * one.model.num_parameters
    assert "  written " in printed(answer_table(answer, one, 1))
    assert f"waiting {seconds(plan.step.reading)}" in printed(explanation(first))
    assert f"{seconds(plan.step.writing)} for writes" in cube_svg(first, "")
    assert search(replace(one, memory_limit_bytes=GIB / 4), {}).fitting == ()


def test_one_micro_batch_may_need_least_memory() -> None:
    """In phases several keep the sums of gradients between them; what fits with one only is found."""
    figures = {"memory_gib": 8, "tflops": 0.2, "memory_gb_per_second": 20, "operator_seconds": 3e-6}
    figures |= {"link_gb_per_second": 1, "network_gb_per_second": 1}
    store = {"streaming_gib": 100, "streaming_gb_per_second": 0.5, "streaming_write_gb_per_second": 0.25}
    one = Workload(
        model=named_model("gpt2-xl", ("sequence=64",)),
        machine=machines_of({"box": figures | store}, "m.yaml")["box"],
        training=Training(global_batch=2, precision="fp32"),
    )
    phased = [Mapping(micro_batch=size, recompute="layer", phases=50) for size in (1, 2)]
    several, single = (predict(one, it).memory.total for it in phased)
    assert single < several
    (found, *_) = search(replace(one, memory_limit_bytes=single), {}).fitting
    assert found.mapping.micro_batch == 2
