"""The memory that a model in phases may use: sizes in words, refusals, and the same bits with what is planned.

Holds popdist.phases.phase_budget.
"""

import re
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import popdist
from popdist.errors import WeightsError
from popdist.parallel import PhasedOptimizer, phased
from popdist.phases.phase_budget import limit_of


@pytest.fixture(autouse=True)
def _job_of_one() -> None:
    popdist.init()


@pytest.mark.parametrize(
    ("memory", "size"),
    [(5000, 5000), ("5000", 5000), ("2 GB", 2 * 10**9), ("1.5gib", 3 * 2**29), (" 7 MB ", 7 * 10**6)],
)
def test_sizes_in_words(memory: str | int, size: int) -> None:
    """Of bytes, thousands and powers of two."""
    assert limit_of(memory) == size


@pytest.mark.parametrize("memory", ["2 lb", "GB", "-1 GB", "", 0, True, "0 MB", "1e9"])
def test_what_is_no_size(memory: str | int) -> None:
    """With what it was, and how to say it."""
    with pytest.raises(WeightsError, match=re.escape(f"memory={memory!r} is no size: give bytes")):
        limit_of(memory)


def trained(folder: Path, num_steps: int, **settings: str | int) -> list[torch.Tensor]:
    """The weights of a small model after some steps of two micro batches."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)) for _ in range(3)))
    model = phased(net, store=folder, **settings)  # type: ignore[arg-type]
    try:
        optimizer = PhasedOptimizer(model, torch.optim.AdamW, lr=0.01)
        for _ in range(num_steps):
            assert not model(torch.zeros(1, 16)).isnan().any()  # between steps nothing is measured
            batch = (torch.randn(8, 16), torch.randint(16, (8,)))
            for x, y in model.micro_batches(batch, 2):
                cross_entropy(model(x), y).backward()
            optimizer.step()
        assert len(model.phase_seconds) > 0
        assert all(seconds > 0 for seconds in model.phase_seconds)
        assert num_steps < 2 or (model.predicted_seconds or 0) > 0
        return [tensor.clone() for tensor in model.state_dict().values()]
    finally:
        model.close()


def test_phases_are_planned_behind_two_steps(disk_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the bits of phases that were given, and two lines for a person: the plan, and what steps took."""
    room = psutil.Process().memory_info().rss + 300 * 10**6
    planned = trained(disk_folder / "memory", 5, memory=f"{room // 10**6} MB")
    lines = capsys.readouterr().err.splitlines()
    given = trained(disk_folder / "phases", 5, phases=3)

    assert all(torch.equal(one, other) for one, other in zip(planned, given, strict=True))
    assert len(lines) == 2
    assert re.fullmatch(
        r"popdist: \d phases?: [\d.]+ MiB for [12] at once and [\d.]+ MiB for the rest\. A step is predicted "
        r"to take [\de.-]+ s: [\de.-]+ s computing, [\de.-]+ s waiting for reads, [\de.-]+ s waiting for writes\.",
        lines[0],
    )
    assert re.fullmatch(r"popdist: Steps 3 to 5 took [\de.-]+ s each; [\de.-]+ s were predicted\.", lines[1])
    assert capsys.readouterr().err.splitlines()[0].startswith("popdist: 3 phases: ")


def test_too_little_memory_is_refused_before_the_first_step(disk_folder: Path) -> None:
    """With what is there, what two layers take, and what would be enough for these."""
    with pytest.raises(
        WeightsError, match=r"memory='50 MB' is too little for phases of one layer each: this process has"
    ):
        trained(disk_folder, 1, memory="50 MB")
