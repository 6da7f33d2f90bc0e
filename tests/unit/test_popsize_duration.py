"""Seconds of a step: the figures of papers, and what must hold whatever the constants are.

Holds popsize.duration and popsize.constants.
"""

from dataclasses import fields, replace
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measuring.sizing_fit import SHARE, split
from measuring.sizing_rows import grouped, megatron_seconds, pairs_of, score_of, step_cases

from popsize.catalogue import named_model
from popsize.constants import CONSTANTS
from popsize.duration import Duration, exchanges, is_near
from popsize.hardware import GIGA, machines_of, named_machine
from popsize.mapping import Mapping, Training, Workload, check
from popsize.model import RECOMPUTE, Recompute
from popsize.search import Candidate


def workload(machine: str = "64xA100-80GB", model: str = "gpt3-2.7b", global_batch: int = 512) -> Workload:
    """A model on hosts of eight devices."""
    return Workload(
        model=named_model(model),
        machine=named_machine(machine),
        training=Training(global_batch=global_batch),
    )


def test_iterations_of_large_models() -> None:
    """Of 22 to 1,000 billion parameters: each within 15 %, and 10 % in the mean."""
    errors = [pair.error for pair in megatron_seconds()]

    assert len(errors) == 8
    assert max(errors) <= 0.15
    assert fmean(errors) <= 0.1


def test_steps_of_one_host() -> None:
    """751 of them: error, first proposals and rank are those that other planners published, or better."""
    score = score_of(pairs_of(step_cases("times_one_host.csv")))

    assert (score.num_rows, score.num_groups) == (751, 51)
    assert score.error <= 0.084
    assert score.near >= 0.7
    assert score.loss <= 1.04
    assert score.rank >= 0.93


def test_steps_of_many_hosts() -> None:
    """73 of them, with the constants of one host."""
    score = score_of(pairs_of(step_cases("times_many_hosts.csv")))

    assert (score.num_rows, score.num_groups) == (73, 2)
    assert score.error <= 0.147


SHAPES = st.sampled_from([(1, 1, 64), (1, 8, 8), (2, 4, 8), (4, 2, 8), (8, 1, 8), (8, 8, 1), (2, 1, 32)])


@given(SHAPES, st.sampled_from([1, 2, 4, 8]), st.sampled_from(RECOMPUTE))
def test_a_step_is_its_terms(shape: tuple[int, int, int], micro_batch: int, recompute: Recompute) -> None:
    """All are 0 or more; those of what a mapping has not are 0; and no step beats the peak."""
    tensor, pipeline, replicas = shape
    one = workload()
    mapping = Mapping(
        tensor=tensor, pipeline=pipeline, replicas=replicas, micro_batch=micro_batch, recompute=recompute
    )
    check(mapping, one)
    found = Candidate(one, mapping).duration
    terms = {field.name: getattr(found, field.name) for field in fields(Duration)}
    least = one.model.flops_per_sample * 512 / (64 * one.machine.device.flops_at("bf16"))

    assert min(terms.values()) >= 0
    assert found.total == pytest.approx(sum(terms.values()))
    assert found.total > least
    assert (tensor > 1) == (found.tensor > 0)
    assert (pipeline > 1) == (found.bubble > 0) == (found.stages > 0)
    assert (replicas > 1) == (found.replicas > 0)
    assert found.gathering == found.streaming == 0


@given(SHAPES, st.sampled_from([1, 2, 4]))
def test_recomputation_takes_time(shape: tuple[int, int, int], micro_batch: int) -> None:
    """Of a layer more than of its attention, and that not less than none."""
    tensor, pipeline, replicas = shape
    one = workload()
    mapping = Mapping(tensor=tensor, pipeline=pipeline, replicas=replicas, micro_batch=micro_batch)
    none, attention, layer = (Candidate(one, replace(mapping, recompute=way)).duration.total for way in RECOMPUTE)

    assert none <= attention < layer


def test_more_pieces_make_a_smaller_bubble() -> None:
    """Interleaved schedules wait 1 / v as long for the pipeline, but for the logits."""
    one = workload()
    plain = Mapping(pipeline=8, replicas=8, micro_batch=1)
    bubbles = [
        Candidate(one, plain if v == 1 else replace(plain, schedule="interleaved", interleave=v)).duration.bubble
        for v in (1, 2, 4)
    ]

    assert bubbles == sorted(bubbles, reverse=True)
    assert bubbles[0] - bubbles[1] == pytest.approx(2 * (bubbles[1] - bubbles[2]))


def test_pieces_need_micro_batches_to_fill_the_pipeline() -> None:
    """One micro batch goes through all stages in turn, however many pieces these have."""
    one = workload("8xA100-80GB", global_batch=64)
    plain = Mapping(pipeline=8, micro_batch=64)
    pieces = replace(plain, schedule="interleaved", interleave=4)
    shares = [
        Candidate(one, replace(pieces, micro_batch=size)).duration.bubble
        / Candidate(one, replace(plain, micro_batch=size)).duration.bubble
        for size in (64, 16, 8)
    ]

    assert shares[0] == pytest.approx(1)
    assert shares == sorted(shares, reverse=True)
    assert shares[2] < 0.4


def test_a_faster_machine_is_not_slower() -> None:
    """In each of its figures; and links between hosts matter to groups that span hosts alone."""
    figures = {
        "memory_gib": 80,
        "tflops": 312,
        "memory_gb_per_second": 2039,
        "devices_per_host": 8,
        "link_gb_per_second": 300,
        "network_gb_per_second": 100,
        "num_devices": 64,
    }
    mapping = Mapping(tensor=4, pipeline=2, replicas=8, micro_batch=4)

    def seconds(name: str, factor: float) -> float:
        machines = machines_of({"box": figures | {name: factor * figures[name]}}, "a test")
        return Candidate(replace(workload(), machine=machines["box"]), mapping).duration.total

    for name in ("tflops", "memory_gb_per_second", "link_gb_per_second", "network_gb_per_second"):
        assert seconds(name, 2) < seconds(name, 1) < seconds(name, 0.5)


def test_sharded_weights_are_gathered() -> None:
    """For each pass of each micro batch; in a pipeline once a step."""
    one = workload()
    whole = Mapping(replicas=64, micro_batch=2)
    sharded = replace(whole, sharding="weights", weight_shards=64, optimizer_shards=64)
    gathered = Candidate(one, sharded).duration.gathering
    twice = Candidate(one, replace(sharded, micro_batch=1)).duration.gathering

    assert gathered > 0
    assert twice == pytest.approx(2 * gathered)
    assert Candidate(one, sharded).duration.optimizer == pytest.approx(
        Candidate(one, whole).duration.optimizer / 64
    )


def test_what_is_offloaded_is_waited_for() -> None:
    """Optimizer state is read and written while nothing is computed."""
    one = workload()
    mapping = Mapping(replicas=64, micro_batch=8)
    waited = Candidate(one, replace(mapping, offload_optimizer=True)).duration.streaming
    state = 2 * 12 * one.model.num_parameters

    assert waited == pytest.approx(state / (25 * GIGA), rel=0.01)


def test_a_workload_has_the_constants() -> None:
    """At most twelve; a program can try others."""
    one = workload()
    slow = replace(one, constants=replace(CONSTANTS, matmul_efficiency=CONSTANTS.matmul_efficiency / 2))
    mapping = Mapping(replicas=64, micro_batch=8)

    assert len(fields(CONSTANTS)) <= 12
    assert Candidate(slow, mapping).duration.layers > 1.5 * Candidate(one, mapping).duration.layers
    for name in ("matmul_efficiency", "memory_efficiency", "link_efficiency"):
        assert 0.5 < getattr(CONSTANTS, name) < 1


def test_the_constants_are_fitted_on_a_fifth_of_the_groups() -> None:
    """Each fifth has other groups, and what is scored has none of those that were fitted."""
    cases = step_cases("times_one_host.csv")
    num_groups = len(grouped(cases, lambda timed: timed[0].row))
    fifths = [split(cases, offset) for offset in range(SHARE)]
    numbers = {id(case): number for number, (case, _) in enumerate(cases)}
    lines = [[numbers[id(case)] for group in groups for case, _ in group] for groups, _ in fifths]

    assert sorted(line for fifth in lines for line in fifth) == sorted({line for fifth in lines for line in fifth})
    for fifth, (groups, rest) in zip(lines, fifths, strict=True):
        assert len(groups) <= num_groups / 5
        assert sorted([*fifth, *(numbers[id(case)] for case, _ in rest)]) == list(range(751))


def rounds(mapping: Mapping, *, global_batch: int = 64) -> dict[str, float]:
    """How often the parameters of a device go round its replicas in a step, by term."""
    return {one.name: one.rounds for one in exchanges(workload("8xA100-80GB", global_batch=global_batch), mapping)}


def test_shards_are_exchanged_as_the_papers_say() -> None:
    """Rajbhandari et al.: 2 rounds; with sharded weights 3 for each micro batch."""
    whole = Mapping(replicas=8, micro_batch=8)
    weights = replace(whole, sharding="weights", weight_shards=8, optimizer_shards=8)

    assert rounds(replace(whole, replicas=1)) == {}
    assert rounds(whole) == {"replicas": 2}
    assert rounds(replace(whole, sharding="optimizer", optimizer_shards=8)) == {"replicas": 2}
    gradients = replace(whole, sharding="gradients", optimizer_shards=8)
    assert rounds(gradients) == {"replicas": 2}
    assert rounds(weights) == {"replicas": 1, "gathering": 2}
    assert rounds(weights, global_batch=512) == {"replicas": 8, "gathering": 16}
    assert rounds(gradients, global_batch=512) == {"replicas": 9}


@pytest.mark.parametrize(
    ("group", "near"),
    [((8, 1, 64), 1), ((4, 2, 64), 1), ((2, 8, 64), 0), ((16, 1, 64), 0), ((5, 1, 10), 0), ((3, 1, 6), 1)],
)
def test_a_group_inside_a_host_straddles_none(group: tuple[int, int, int], near: int) -> None:
    """Groups that do not divide a host of eight lie on two of them, unless all devices are on one host."""
    devices, stride, num_devices = group

    assert is_near(devices, stride, named_machine("64xA100-80GB"), num_devices) == bool(near)
