"""What all instances of a job do when some of them are asked to leave; here each catches its SystemExit."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import popdist
from tests.contract.laws import run_laws

SLOW_SECONDS = 0.5
"""How long work takes that the others must wait for."""


class Training:
    """A loop over three epochs of four steps in which instance ``whom`` gets SIGTERM.

    Args:
        whom: Job-wide number of the instance.
        at: After so many steps.
        where: Before the loop asks for ``"batch"``, or in the middle of a ``"step"``.
    """

    def __init__(self, whom: int, at: int, where: str = "step") -> None:
        self.model = popdist.ReplicatedModel(nn.Linear(2, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.loader: DataLoader[Any] = popdist.data_loader(torch.randn(32, 2), 2)
        self.step = 0
        self._signal_at = at if popdist.instance_index() == whom else -1
        self._where = where

    def come_to(self, where: str) -> None:
        """Send the signal, if it is to come here."""
        if (self.step, where) == (self._signal_at, self._where):
            os.kill(os.getpid(), signal.SIGTERM)

    def train_on(self, batch: Any) -> None:
        """One step."""
        for x in self.model.micro_batches(batch):
            self.come_to("step")
            self.model(x).sum().backward()
        self.optimizer.step()
        self.step += 1
        self.come_to("batch")

    def run(self) -> None:
        """All steps, with an evaluation after each epoch."""
        for _ in range(3):
            for batch in self.loader:
                self.train_on(batch)
            for _ in popdist.data_loader(torch.randn(16, 2), 2):
                popdist.weighted_mean(1, 1)


def leaving(run: Callable[[], object], exit_code: int = 143) -> None:
    """Run something that is to be left with ``exit_code``."""
    with pytest.raises(SystemExit) as left:
        run()
    assert left.value.code == exit_code


def law_all_leave_after_the_same_step() -> None:
    """Whoever is asked, and wherever: before the step's first exchange, or after its last."""
    for whom in (0, 1):
        for at, where, end in ((5, "step", 6), (5, "batch", 6), (4, "batch", 5), (0, "step", 1)):
            training, seen = Training(whom, at, where), list[int]()
            popdist.on_preemption(lambda seen=seen, it=training: seen.append(it.step))  # type: ignore[misc]
            leaving(training.run)
            assert len(set(popdist.all_gather(torch.tensor(seen)).flatten().tolist())) == 1
            assert seen in ([end], [end + 1])


def law_an_evaluation_is_no_place_to_leave() -> None:
    """What the loop has counted is not up to date there: the first step of the next epoch is the last."""
    training, seen = Training(1, 99), list[int]()
    popdist.on_preemption(lambda: seen.append(training.step))
    for batch in training.loader:
        training.train_on(batch)
    for _ in popdist.data_loader(torch.randn(16, 2), 2):
        os.kill(os.getpid(), signal.SIGTERM)
        popdist.weighted_mean(1, 1)
    assert seen == []
    leaving(training.run)
    assert seen == [5]


def law_a_failure_of_fn_is_one_of_all() -> None:
    """Those on which it succeeded do not end as if all was well."""
    training = Training(0, 3)
    popdist.on_preemption(lambda: 1 // popdist.instance_index())
    error, message = [
        (ZeroDivisionError, "division"),
        (popdist.CollectiveError, "failed on instance 0 "),
    ][popdist.instance_index()]
    with pytest.raises(error, match=message):
        training.run()
    popdist.barrier()


def law_all_wait_until_fn_has_returned() -> None:
    """Also one that only the first instance has work in: a launcher would stop it when the others have gone."""
    training, path = Training(0, 3), FOLDER[0] / "written"
    popdist.on_preemption(lambda: _write_late(path) if popdist.is_main() else None, exit_code=0)
    leaving(training.run, 0)
    assert path.exists()


def _write_late(path: Path) -> None:
    time.sleep(SLOW_SECONDS)
    path.touch()


def law_a_sampler_has_the_same_place() -> None:
    """A torch DataLoader asks it when the loop asks for its next batch."""
    training = Training(1, 2)
    sampler = popdist.ReplicaSampler(32, 2)
    points: Any = torch.randn(32, 2)
    training.loader = DataLoader(points, batch_sampler=sampler)
    states = list[dict[str, Any]]()
    popdist.on_preemption(lambda: states.append(sampler.state_dict()))
    leaving(training.run)
    assert (training.step, states[0]["position"]) == (3, 24)


def law_workers_are_left_alone() -> None:
    """They are forked with the handlers of before, and what they have read ahead is not counted."""
    training, states = Training(1, 1), list[dict[str, Any]]()
    training.loader = loader = popdist.data_loader(torch.randn(32, 2), 2, num_workers=1)
    popdist.on_preemption(lambda: states.append(loader.state_dict()))
    leaving(training.run)
    assert (training.step, states[0]["position"]) == (2, 16)


def law_check_preemption_is_a_place_everywhere() -> None:
    """Also where nothing is trained; it costs its own exchange."""
    seen = list[int]()
    popdist.on_preemption(lambda: seen.append(7))
    popdist.check_preemption()
    if popdist.is_main():
        os.kill(os.getpid(), signal.SIGTERM)
    leaving(popdist.check_preemption)
    assert seen == [7]


def law_a_part_of_the_job_does_not_leave() -> None:
    """What runs on some instances is not interrupted; the signal counts afterwards."""
    popdist.on_preemption(lambda: None)

    def check() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        popdist.check_preemption()

    popdist.execute_on_instances({0}, check)
    leaving(popdist.check_preemption)


def law_other_arguments_are_told() -> None:
    """All instances are to leave in the same way."""
    with pytest.raises(popdist.CollectiveError, match=r"instance 1: on_preemption\(signals=\(SIGTERM, SIGUSR1\)"):
        popdist.on_preemption(lambda: None, exit_code=popdist.instance_index())


FOLDER: list[Path] = []


def run_all(folder: Path) -> int:
    """Run each law; how many there are."""
    FOLDER.append(folder)
    num_laws = run_laws(__name__)
    popdist.barrier()
    return num_laws
