"""The law of the project: the bits depend on the replicas, and on nothing else.

Not on the instances that the replicas are dealt to, the launcher that starts them, the workers that read the data,
or a restart in the middle of an epoch at another size. It is worth something only where bits can differ at all, so
`law_program` trains a model whose gradients have other bits with two threads than with one, that draws random
numbers and that keeps statistics; and the launcher alone must keep the threads of a replica the same.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn.functional import cross_entropy

import popdist
from tests.contract import law_program
from tests.contract.forked_calls import ForkedWorlds
from tests.contract.law_program import MICRO_BATCH_SIZE, STOP_AFTER, Augmented, Net
from tests.running import DEADLINE_SECONDS, MpiEnvironment, Poprun

if TYPE_CHECKING:
    import subprocess

Cell = tuple[str, int]
"""A launcher and a number of instances."""

RESTARTED: list[tuple[int, Cell, Cell]] = [
    (8, ("mpich", 2), ("local", 4)),
    (6, ("openmpi", 3), ("local", 1)),
]
"""Replicas, and where the first and the second part of a run take place. Six are dealt in blocks that are no whole
subtrees."""

LOCAL = ("--launcher", "local")


def start_by(name: str, environments: dict[str, MpiEnvironment]) -> Poprun:
    """The command with the launcher ``name``."""
    if name == "local":
        return Poprun(options=LOCAL)
    if name not in environments:
        pytest.skip(f"no environment with the {name} wheel: scripts/test makes it")
    return Poprun(python=environments[name].python, options=("--launcher", "mpi"))


def run_program(poprun: Poprun, num_replicas: int, num_instances: int, folder: Path, *, stops: bool) -> list[str]:
    """What the instances print; only one that has the job for itself reads its data without workers."""
    num_workers, stop_after = 2 * (num_instances > 1), STOP_AFTER[num_replicas] if stops else 0
    return (
        poprun(
            *("-n", str(num_instances), "--num-replicas", str(num_replicas), "--tag-output=no"),
            *(str(poprun.python), law_program.__file__, str(folder), str(num_workers), str(stop_after)),
        )
        .succeeded()
        .lines
    )


@pytest.fixture(scope="module")
def whole(forking: "subprocess.Popen[bytes]", tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """For each number of replicas the digest of one instance's run, with one thread, that nothing interrupts."""
    assert "OMP_NUM_THREADS" not in os.environ
    runs = {
        number: ForkedWorlds(forking)(
            *(law_program.train, str(tmp_path_factory.mktemp("whole")), 0, 0),
            num_instances=1,
            num_replicas=number,
            timeout_seconds=DEADLINE_SECONDS,
        )
        for number in law_program.NUM_STEPS
    }
    return {number: digest for number, (digest,) in runs.items()}


@pytest.mark.parametrize(("num_replicas", "first", "second"), RESTARTED)
def test_same_replicas_same_bits(
    num_replicas: int,
    first: Cell,
    second: Cell,
    tmp_path: Path,
    mpi_environments: dict[str, MpiEnvironment],
    whole: dict[int, str],
) -> None:
    """Begun in one split with one launcher, ended in another: every instance has the digest of the whole run."""
    ends = [
        run_program(start_by(name, mpi_environments), num_replicas, num_instances, tmp_path, stops=stops)
        for (name, num_instances), stops in ((first, True), (second, False))
    ]

    assert ends == [[], [whole[num_replicas]] * second[1]]


def test_other_replicas_other_bits(whole: dict[int, str]) -> None:
    """The law's test would notice if everybody trained the same thing."""
    assert whole[8] != whole[6]


def gradients_with(*numbers_of_threads: int) -> list[str]:
    """The bits of one gradient, computed by each of these numbers of threads."""
    images = Augmented().images[:MICRO_BATCH_SIZE]
    digests = []
    for num_threads in numbers_of_threads:
        torch.set_num_threads(num_threads)
        torch.manual_seed(0)
        model = Net()
        cross_entropy(model(images), torch.arange(MICRO_BATCH_SIZE)).backward()
        digests.append(popdist.checksum({name: p.grad for name, p in model.named_parameters()}))
    return digests


def test_the_model_can_show_a_difference(forked_world: ForkedWorlds) -> None:
    """Its gradients differ between one and two threads, and with one they are the same each time."""
    ((one, two, again),) = forked_world(gradients_with, 1, 2, 1, num_instances=1, timeout_seconds=DEADLINE_SECONDS)

    assert one == again
    assert one != two
