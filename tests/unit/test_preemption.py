"""Leaving at a signal, in a job of one: real signals to this process, which catches the SystemExit."""

import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import popdist


@pytest.fixture(autouse=True)
def _own_handlers() -> Iterator[None]:
    """A job of one, in which SIGTERM and SIGUSR1 are handled before popdist is asked to."""
    before = [(signum, signal.signal(signum, _refuse)) for signum in (signal.SIGTERM, signal.SIGUSR1)]
    popdist.init()
    yield
    popdist.finalize()
    for signum, handler in before:
        signal.signal(signum, handler)


def _refuse(signum: int, _frame: object) -> None:
    raise AssertionError(f"nobody took {signal.Signals(signum).name}")


class Training:
    """A loop that gets ``signum`` in one of its steps.

    Args:
        with_loader: Whether it loops over a loader of popdist.
    """

    def __init__(self, *, with_loader: bool) -> None:
        self.model = popdist.ReplicatedModel(nn.Linear(2, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.loader = popdist.data_loader(torch.randn(10, 2), 2)
        self.batches = self.loader if with_loader else list(torch.randn(5, 2, 2))
        self.step = 0

    def run(self, signum: int = signal.SIGTERM, at: int | None = None) -> None:
        """Train for two epochs; send ``signum`` after ``at`` steps, in the middle of the next one."""
        for _ in range(2):
            for batch in self.batches:
                for x in self.model.micro_batches(batch):
                    if self.step == at:
                        os.kill(os.getpid(), signum)
                    self.model(x).sum().backward()
                self.optimizer.step()
                self.step += 1


@pytest.mark.parametrize("with_loader", [True, False])
@pytest.mark.parametrize(("signum", "exit_code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 0)])
def test_a_signal_ends_the_training_after_its_step(signum: int, exit_code: int, *, with_loader: bool) -> None:
    """What ``fn`` sees is the state between two steps."""
    training, seen = Training(with_loader=with_loader), []
    popdist.on_preemption(lambda: seen.append(training.step), exit_code=exit_code)

    with pytest.raises(SystemExit) as leaving:
        training.run(signum, at=6)

    assert (leaving.value.code, seen) == (exit_code, [7])


def test_the_loader_says_where_the_loop_stands() -> None:
    """After the last step of an epoch that is its end, not yet the next epoch's start."""
    training, seen = Training(with_loader=True), []
    popdist.on_preemption(lambda: seen.append(training.loader.state_dict()))

    with pytest.raises(SystemExit):
        training.run(at=4)

    assert (seen[0]["epoch"], seen[0]["position"]) == (0, 10)


def test_a_signal_after_the_last_step_changes_nothing() -> None:
    """Evaluation goes on to its end; the next training is where the program leaves."""
    training, seen = Training(with_loader=True), []
    popdist.on_preemption(lambda: seen.append(training.step))
    training.run()
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)

    assert len(list(training.loader)) == 5
    assert seen == []
    with pytest.raises(SystemExit):
        popdist.check_preemption()
    assert seen == [10]


def test_check_preemption_is_no_place_within_a_step() -> None:
    """What would be saved there belongs to no step."""
    training = Training(with_loader=True)
    micro_batches = training.model.micro_batches(next(iter(training.loader)))
    next(micro_batches)

    with pytest.raises(popdist.MicroBatchError, match="in the middle of a step"):
        popdist.check_preemption()
    del micro_batches
    popdist.check_preemption()


def test_what_fn_raises_goes_on() -> None:
    """The program ends with that, not as if it had saved."""
    training = Training(with_loader=True)
    popdist.on_preemption(lambda: 1 // 0)

    with pytest.raises(ZeroDivisionError):
        training.run(at=0)


def test_the_last_call_counts_and_gives_back_what_it_does_not_take() -> None:
    """Handlers that were there are back when nobody asks for their signals any more."""
    popdist.on_preemption(lambda: 1 // 0, signals=[signal.SIGTERM, signal.SIGUSR1])
    assert signal.getsignal(signal.SIGTERM) is not _refuse
    popdist.on_preemption(lambda: None, signals=[signal.SIGUSR1])
    assert signal.getsignal(signal.SIGTERM) is _refuse

    training = Training(with_loader=True)
    with pytest.raises(SystemExit):
        training.run(signal.SIGUSR1, at=0)


def test_a_forked_child_has_the_handlers_of_before() -> None:
    """It is no instance of the job, and ends as it would have."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    popdist.on_preemption(lambda: None)
    child = os.fork()
    if not child:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


def test_a_loop_without_boundaries_is_told_of_the_other_way() -> None:
    """Here the backward pass and the step are the program's own, as under DistributedDataParallel."""
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight])
    popdist.on_preemption(lambda: None)
    os.kill(os.getpid(), signal.SIGTERM)

    def train() -> None:
        for _ in range(11):
            weight.sum().backward()
            optimizer.step()

    with pytest.warns(popdist.PopdistWarning, match=r"check_preemption\(\) between two steps"):
        train()
    with pytest.raises(SystemExit):
        popdist.check_preemption()


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: popdist.on_preemption(None), "expected a function without arguments"),  # type: ignore[arg-type]
        (lambda: popdist.on_preemption(print, signals=15), "expected some that can be"),  # type: ignore[arg-type]
        (lambda: popdist.on_preemption(print, signals=[signal.SIGKILL]), "expected some that can be handled"),
        (lambda: popdist.on_preemption(print, signals=[]), r"such as \(signal.SIGTERM,\)"),
        (lambda: popdist.on_preemption(print, exit_code=256), "exit_code=256 must be 0 to 255"),
        (lambda: popdist.on_preemption(print, exit_code=-1), "exit_code=-1 must be a whole number"),
    ],
)
def test_what_is_refused(ask: Callable[[], None], message: str) -> None:
    """And nothing has changed."""
    with pytest.raises(popdist.CollectiveError, match=message):
        ask()
    assert signal.getsignal(signal.SIGTERM) is _refuse


def test_threads_are_refused() -> None:
    """Python handles signals in the main one."""
    errors: list[popdist.CollectiveError] = []

    def ask() -> None:
        try:
            popdist.on_preemption(print)
        except popdist.CollectiveError as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()

    assert "in a thread" in str(errors[0])
