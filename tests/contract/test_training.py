"""Gradients and weights obey the same laws in jobs of every size and split, the job of one included.

Holds popdist.step.checks.step_checks, popdist.gradients.buffers,
popdist.gradients.kept_gradients, popdist.gradients.memory, popdist.gradients.reduction,
popdist.gradients.step_headers, popdist.step.training.batch_norm, popdist.step.training.model_steps,
popdist.step.training.norm_sync, popdist.step.training.outside_step, popdist.step.training.replica_turns and
popdist.step.training.step.
"""

import os
import re
import runpy
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

import popdist
from popdist.job import context
from tests.contract import check_laws, joined_replica_laws, loop_laws, training_laws, training_recipes
from tests.contract.forked_calls import ForkedWorlds
from tests.docs.markdown import ROOT
from tests.running import DEADLINE_SECONDS


@pytest.mark.parametrize(("num_instances", "num_replicas"), [(1, 1), (1, 3), (2, 6), (3, 3), (4, 8)])
def test_laws(forked_world: ForkedWorlds, num_instances: int, num_replicas: int) -> None:
    """Every law of loop_laws.py and of the files that it names, on every instance."""
    counts = forked_world(
        loop_laws.run_all,
        num_instances=num_instances,
        num_replicas=num_replicas,
        timeout_seconds=DEADLINE_SECONDS,
    )
    assert counts == [len(loop_laws.all_laws())] * num_instances


def crash() -> None:
    """Instance 1 has an error of its own in the loop, and nobody catches anything."""
    popdist.init(timeout_seconds=DEADLINE_SECONDS)
    model = popdist.ReplicatedModel(training_laws.Net())
    for x, _ in model.micro_batches(training_laws.share(training_laws.samples(8))):
        if popdist.instance_index() == 1:
            raise ValueError("too many cooks")
        model(x).sum().backward()


def test_the_cause_is_reported_first() -> None:
    """The others give way to the instance that knows why the step was lost."""
    with pytest.raises(ValueError, match="too many cooks"):
        popdist.launch(crash, num_instances=2)


def step_alone() -> None:
    """The others have left, and this instance goes on with gradients of its own."""
    popdist.init(timeout_seconds=DEADLINE_SECONDS)
    model = popdist.ReplicatedModel(check_laws.net())
    if popdist.is_main():
        check_laws.backward_alone(model)
        torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_a_check_meets_nobody_who_has_left(forked_world: ForkedWorlds) -> None:
    """It is not made, and is no error."""
    forked_world(step_alone, num_instances=3, timeout_seconds=DEADLINE_SECONDS)


def test_recipes_have_the_same_bits_in_every_split(forked_world: ForkedWorlds) -> None:
    """What training_recipes.py trains on three replicas is the same with one instance and with three."""
    ((alone,), shared) = (
        forked_world(
            training_recipes.run_all, num_instances=number, num_replicas=3, timeout_seconds=DEADLINE_SECONDS
        )
        for number in (1, 3)
    )

    assert shared == [alone] * 3
    assert len(set(alone.values())) > 1


def test_replicas_that_a_program_says_have_the_bits_of_poprun_s(forked_world: ForkedWorlds) -> None:
    """Four replicas of one model: of one instance and of two, by the program and by poprun; split by place."""
    ends = {
        (is_said, number): forked_world(
            partial(training_recipes.run_four_replicas, is_said=is_said),
            num_instances=number,
            num_replicas=4,
            timeout_seconds=DEADLINE_SECONDS,
        )
        for is_said in (False, True)
        for number in (1, 2)
    }

    assert len({checksum for world in ends.values() for checksum, _ in world}) == 1
    for (_, number), world in ends.items():
        owned = [name for _, names in world for name in names]
        assert (owned, len(world)) == (["0", "1", "2", "3"], number)


def identical_curves(place: int) -> tuple[list[float], str]:
    """Two steps of one of the trainings of examples/identical_curves.py whose bits are equal."""
    example = runpy.run_path(str(ROOT / "examples" / "identical_curves.py"))
    losses, checksum = example["train"](example["EQUAL"][place], 2)
    return losses, checksum


def test_identical_curves_are_identical(forked_world: ForkedWorlds) -> None:
    """Micro batches of equal composition have the same bits with 1, 4 and 16 replicas."""
    first, *others = (
        forked_world(
            identical_curves, place, num_instances=1, num_replicas=replicas, timeout_seconds=DEADLINE_SECONDS
        )
        for place, replicas in enumerate((1, 4, 16))
    )

    assert others == [first, first]


@pytest.mark.skipif(
    shutil.which("g++") is None, reason="torch.compile needs a C++ compiler to make kernels for a CPU"
)
def test_compiled_kernels_have_the_same_bits(forked_world: ForkedWorlds, tmp_path: Path) -> None:
    """With ``dynamic=False``, also where the micro batches of a step differ in size."""
    alone, *shared = (
        end
        for number in (1, 2)
        for end in forked_world(
            training_recipes.run_inductor,
            tmp_path,
            num_instances=number,
            num_replicas=2,
            timeout_seconds=DEADLINE_SECONDS,
        )
    )

    assert shared == [alone] * 2


def disagree() -> str:
    """Instance 1 was told of other threads and has another version; what every instance hears of it."""
    if popdist.instance_index() == 1:
        os.environ["OMP_NUM_THREADS"] = "7"
        context.VERSION = "9.9"  # type: ignore[attr-defined] # as if it were installed there
    with pytest.raises(popdist.CollectiveError) as raised:
        popdist.init(timeout_seconds=DEADLINE_SECONDS)
    return str(raised.value)


def test_instances_must_compute_alike() -> None:
    """Threads and versions that differ are refused when the job starts; the error says who has which."""
    first, second = popdist.launch(disagree, num_instances=2, launcher="local")

    assert first == second
    assert re.search(r"instance 0: init.* popdist 0\S*, 1 threads", first)
    assert re.search(r"instance 1: init.* popdist 9\.9, 7 threads", first)


@pytest.mark.parametrize(("num_instances", "num_replicas"), [(1, 1), (1, 4), (2, 4), (2, 2)])
def test_replicas_are_not_joined_one_of_each_instance(
    forked_world: ForkedWorlds, num_instances: int, num_replicas: int
) -> None:
    """Every law of joined_replica_laws.py."""
    forked_world.keep_laws(joined_replica_laws, num_instances=num_instances, num_replicas=num_replicas)


def test_a_loss_over_all_samples_has_the_same_bits_in_every_split(forked_world: ForkedWorlds) -> None:
    """The documented loop gives the gradients of one process, and the same for 1, 2 and 4 instances."""
    ((alone,), two, four) = (
        forked_world(
            joined_replica_laws.gradients_over_all_samples,
            num_instances=number,
            num_replicas=4,
            timeout_seconds=DEADLINE_SECONDS,
        )
        for number in (1, 2, 4)
    )
    assert two + four == [alone] * 6
    assert len(alone) == 2
