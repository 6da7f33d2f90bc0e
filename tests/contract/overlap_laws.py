"""The laws of gradients that go while the backward pass runs; every instance runs all of them.

For jobs whose instances share no memory, or compute on GPUs. Buckets are tiny, so that a small model has many.
"""

import copy
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import popdist
from popdist.exchange.host_memory.barriers import wait_until
from popdist.exchange.transport import two_level
from popdist.exchange.transport.channel import Channel
from popdist.gradients import overlap, reduction
from popdist.gradients.flat_buffers import FlatGradient
from popdist.gradients.overlap import Overlap, OverlappedSum
from popdist.job import context
from tests.contract import training_laws, training_recipes
from tests.contract.collective_laws import refused
from tests.contract.laws import TIMEOUT_SECONDS, laws_of
from tests.contract.training_laws import Net, is_last, samples, share

BUCKET_SIZE = 48
"""Numbers; slots begin at multiples of 16."""

PIECE_SIZE = 32
FEW = 20
"""So some pieces go to everybody as a whole, and others in shares."""

place = SimpleNamespace(device=torch.device("cpu"))
"""Where the models of this instance are."""

Change = Callable[[nn.Module], None]

NUM_STEPS = 3
"""The first one ends as all did before; the next may go early."""


def run_all(on_gpus: bool) -> int:  # noqa: FBT001 - how popdist.launch passes it
    """Every law of this file; how many there were. Afterwards no thread is left."""
    popdist.init(timeout_seconds=TIMEOUT_SECONDS)
    if on_gpus:
        place.device = torch.device("cuda", popdist.local_instance_index())
        torch.backends.cudnn.deterministic = True
    laws = laws_of(sys.modules[__name__])
    with tiny_sizes():
        for law in laws:
            popdist.barrier()
            law()
    popdist.finalize()
    assert [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()] == []
    return len(laws)


prepare = training_recipes.prepare


def run_recipes() -> tuple[dict[str, str], int]:
    """What every recipe of training_recipes.py has trained, and how many steps went early and were right."""
    with tiny_sizes(), counted() as ends:
        return training_recipes.run_all(), sum(ends)


@contextmanager
def tiny_sizes() -> Iterator[None]:
    """Within it a small model has several buckets, of several pieces each."""
    with (
        mock.patch.object(overlap, "BUCKET_SIZE", BUCKET_SIZE),
        mock.patch.object(overlap, "NUM_DOUBLINGS", 0),
        mock.patch.object(overlap, "PIECE_SIZE", PIECE_SIZE),
        mock.patch.object(two_level, "FEW", FEW),
    ):
        yield


@contextmanager
def counted() -> Iterator[list[bool]]:
    """Of each step that went early, whether what had gone was right."""
    ends: list[bool] = []
    wait = OverlappedSum.wait

    def count(step: OverlappedSum, over: float, *, are_right: bool) -> FlatGradient | None:
        if step._is_closed:
            ends.append(are_right)
        return wait(step, over, are_right=are_right)

    with mock.patch.object(OverlappedSum, "wait", count):
        yield ends


def never_early() -> AbstractContextManager[object]:
    """Within it, this instance offers nothing."""
    return mock.patch.object(Overlap, "number_of_step", return_value=0)


def meet() -> None:
    """Wait until every instance is here, and with that until each knows that this step goes early."""
    context.current_job().group.agree("meet")  # within micro batches, where a program cannot


def channel() -> Channel:
    """The one of this job."""
    found = context.current_job().group.backend.channel([place.device])
    assert found is not None
    return found


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all gradients, by name."""
    return {name: it.grad.clone() for name, it in model.named_parameters() if it.grad is not None}


def same_bits(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Whether two models have the same gradients."""
    return left.keys() == right.keys() and popdist.checksum(left) == popdist.checksum(right)


class Waves(nn.Module):
    """Complex and double parameters beside single ones, one without elements, and one of many."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.first = nn.Linear(4, 5)
        self.phases = nn.Parameter(torch.randn(5, 3, dtype=torch.complex64))
        self.exact = nn.Parameter(torch.randn(3, 8, dtype=torch.float64))
        self.wide = nn.Linear(8, 33)
        self.last = nn.Linear(33, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Four scores."""
        turned = (self.first(x).to(torch.complex64) @ self.phases).abs().double()
        return torch.as_tensor(self.last(torch.relu(self.wide((turned @ self.exact).float()))))


class Half(nn.Module):
    """Parameters of half precision, in an order of memory of their own."""

    def __init__(self) -> None:
        super().__init__()
        net = nn.Sequential(nn.Conv2d(1, 8, 2), nn.Flatten(), nn.Linear(8, 4))
        self.net = net.to(torch.bfloat16).to(memory_format=torch.channels_last)  # type: ignore[call-overload] # torch's stubs lack this form

    def forward(self, x: Tensor) -> Tensor:
        """Four scores."""
        return torch.as_tensor(self.net(x.view(-1, 1, 2, 2).to(torch.bfloat16))).float()


def train(early: nn.Module, late: nn.Module, step: Callable[[nn.Module], None]) -> None:
    """The same step of two models, one of which offers nothing: they have the same gradients."""
    early.zero_grad()
    late.zero_grad()
    step(early)
    with never_early():
        step(late)
    assert same_bits(gradients(early), gradients(late))


def train_as_usual(model: nn.Module, batch: tuple[Tensor, Tensor], accumulation: int = 1) -> None:
    """A step without anything in between."""
    assert isinstance(model, popdist.ReplicatedModel)
    training_laws.train(model, batch, accumulation)


def pair_of(
    module: nn.Module, gradient_dtype: torch.dtype | None = None
) -> tuple[popdist.ReplicatedModel, popdist.ReplicatedModel]:
    """Two models that are the same."""
    modules = module.to(place.device), copy.deepcopy(module).to(place.device)
    first, second = (popdist.ReplicatedModel(it, gradient_dtype=gradient_dtype) for it in modules)
    return first, second


def chain(num_layers: int) -> nn.Sequential:
    """Layers of 32 numbers each."""
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(num_layers)]).to(place.device)


def full_batch() -> tuple[Tensor, Tensor]:
    """This instance's part of a step in which each replica has two samples."""
    return share(samples(2 * popdist.num_replicas()))


def law_the_bits_are_those_of_the_end_of_the_step() -> None:
    """For parameters that are shared, frozen, rarely used, unused, complex, double or half, and ragged steps."""
    for make, gradient_dtype, accumulation in (
        (Net, None, 1),
        (Net, None, 3),
        (Waves, None, 3),
        (Half, None, 1),
        (Net, torch.bfloat16, 3),
        (Waves, torch.float16, 1),
    ):
        early, late = pair_of(make(), gradient_dtype)
        full = 2 * popdist.num_replicas() * accumulation
        with counted() as ends:
            for count in (full, full, full, full - 1, full // 2 + 1, popdist.num_replicas(), 1):
                batch = share(samples(count))
                train(early, late, partial(train_as_usual, batch=batch, accumulation=accumulation))
        assert ends == [True] * 6


def law_buckets_go_while_the_backward_pass_runs() -> None:
    """When the first layer's turn comes, the sums of most of the others are there already."""
    model = popdist.ReplicatedModel(chain(6))
    num_pieces = [-(-48 // PIECE_SIZE)] * 4
    num_done: list[int] = []

    def look(*_: object) -> None:
        if is_watched:
            assert wait_until(lambda: channel()._num_done >= before + sum(num_pieces[:3]), TIMEOUT_SECONDS)
            num_done.append(channel()._num_done - before)

    first = model.module.get_submodule("0")
    first.register_forward_hook(lambda _module, _inputs, outputs: outputs.register_hook(look) and None)
    for step in range(NUM_STEPS):
        for index, (x, y) in enumerate(model.micro_batches(full_batch())):
            is_watched = step > 1 and index + 1 == popdist.num_local_replicas()
            before = channel().num_issued
            meet()
            cross_entropy(model(x), y).backward()
        model.zero_grad()
    assert num_done == [sum(num_pieces[:3])]
    assert channel().num_issued == before + 2 * sum(num_pieces)  # each is waited for once more, at the end


def law_the_threads_that_carry_gradients_step_back() -> None:
    """The kernel does not let them interrupt what computes; the program's own thread is as it was."""
    policies = {os.sched_getscheduler(int(it.name)) for it in Path("/proc/self/task").iterdir()}
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    assert os.SCHED_BATCH in policies


def clip(model: nn.Module) -> None:
    """As programs did before torch counted writes."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.data.clamp_(-1e-3, 1e-3)


def replace(model: nn.Module) -> None:
    """Another tensor in the last gradient's place."""
    last = list(model.parameters())[-1]
    last.grad = torch.ones_like(last)


def drop(model: nn.Module) -> None:
    """No gradient where there was one."""
    list(model.parameters())[-1].grad = None


def double(model: nn.Module) -> None:
    """A gradient that is changed in place."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(2)


def add_more(model: nn.Module) -> None:
    """A second backward pass."""
    model(full_batch()[0].to(place.device)).square().mean().backward()


def law_what_is_changed_after_it_was_sent_counts() -> None:
    """On one instance, in the last micro batch: all add again, and nothing goes early from then on."""

    def step(model: nn.Module, change: Change | None) -> None:
        assert isinstance(model, popdist.ReplicatedModel)
        for index, (x, y) in enumerate(model.micro_batches(full_batch())):
            meet()
            cross_entropy(model(x), y).backward()
            if change is not None and is_last() and index + 1 == popdist.num_local_replicas():
                change(model)

    for change in (clip, replace, drop, double, add_more):
        early, late = pair_of(chain(3))
        with counted() as ends:
            for chosen in (None, None, None, change, None):
                train(early, late, partial(step, change=chosen))
        assert ends == [True, True, False], change


def law_a_gradient_that_is_no_number_may_go_early() -> None:
    """Rounding makes one NaN of another, which is no change."""
    model = popdist.ReplicatedModel(chain(3), gradient_dtype=torch.bfloat16)
    with counted() as ends:
        for _ in range(NUM_STEPS):
            model.zero_grad()
            for x, y in model.micro_batches(full_batch()):
                meet()
                (cross_entropy(model(x), y) * float("nan")).backward()
            assert all(bool(it.isnan().all()) for it in gradients(model).values())
    assert ends == [True] * (NUM_STEPS - 1)


class Recomputed(nn.Module):
    """A layer that is used twice, whose gradient comes in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Four scores."""
        x = x.clone().requires_grad_()
        for _ in range(2):
            x = checkpoint(self.shared, x, use_reentrant=True)
        return torch.as_tensor(self.last(x))


def law_a_gradient_that_comes_in_parts_counts_as_a_whole() -> None:
    """Its first part has gone when the second comes: all add again, and nothing goes early from then on."""

    def step(model: nn.Module) -> None:
        assert isinstance(model, popdist.ReplicatedModel)
        for x, y in model.micro_batches(full_batch()):
            loss = cross_entropy(model(x), y)
            meet()
            loss.backward()

    early, late = pair_of(Recomputed())
    with counted() as ends:
        for _ in range(NUM_STEPS + 1):
            train(early, late, step)
    assert ends == [True, False]


class Branching(nn.Module):
    """The first in use and the last in order is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = chain(3)
        self.extra = nn.Parameter(torch.ones(4))
        self.is_used = False

    def forward(self, x: Tensor) -> Tensor:
        """Four scores."""
        return torch.as_tensor(self.layers(x * self.extra if self.is_used else x))


def law_a_gradient_that_nobody_expected_is_expected_from_then_on() -> None:
    """It comes when its bucket has gone; that step's gradients are added again."""

    def step(model: nn.Module, *, is_used: bool) -> None:
        assert isinstance(model, popdist.ReplicatedModel)
        model.module.is_used = is_used and is_last()  # type: ignore[assignment] # a module's attribute
        for x, y in model.micro_batches(full_batch()):
            meet()
            cross_entropy(model(x), y).backward()

    early, late = pair_of(Branching())
    with counted() as ends:
        for is_used in (False, False, False, True, True, False):
            train(early, late, partial(step, is_used=is_used))
    assert ends == [True, True, False, True, True]


def law_one_model_at_a_time() -> None:
    """A model that takes its steps within another's micro batches does so as before; alone, it goes early."""

    def step(both: nn.Module) -> None:
        outer, inner = both.children()
        assert isinstance(outer, popdist.ReplicatedModel)
        assert isinstance(inner, popdist.ReplicatedModel)
        for x, y in outer.micro_batches(full_batch()):
            meet()
            cross_entropy(outer(x), y).backward()
            training_laws.train(inner, full_batch())
        training_laws.train(inner, full_batch())

    pairs = [pair_of(chain(3)), pair_of(chain(2))]
    early, late = (nn.ModuleList(models) for models in zip(*pairs, strict=True))
    with counted() as ends:
        for _ in range(NUM_STEPS):
            train(early, late, step)
    assert ends == [True] * (2 * NUM_STEPS - 2 + popdist.num_local_replicas())


def law_a_step_that_is_left_is_owed_to_the_others() -> None:
    """An instance leaves when buckets have gone: the others hear of it, and the next steps go early."""
    early, late = pair_of(chain(4))
    step = partial(train_as_usual, batch=full_batch())
    with counted() as ends:
        for _ in range(NUM_STEPS):
            train(early, late, step)
            early.zero_grad()
            with training_laws.step_lost(f"instance {popdist.num_instances() - 1} left the micro_batches loop"):
                for index, (x, y) in enumerate(early.micro_batches(full_batch())):
                    meet()
                    cross_entropy(early(x), y).backward()
                    if is_last() and index + 1 == popdist.num_local_replicas():
                        break
        train(early, late, step)
    assert ends == [True] * NUM_STEPS
    assert not channel().is_broken


def law_who_leaves_before_all_have_spoken_ends_it_for_all() -> None:
    """It cannot know whether the others will send anything: from then on nothing goes early, and all is right."""
    early, late = pair_of(chain(4))
    step = partial(train_as_usual, batch=full_batch())
    for _ in range(NUM_STEPS):
        train(early, late, step)
    store = context._state.store
    assert store is not None
    early.zero_grad()
    if is_last():
        with mock.patch.object(reduction, "ABANDON_SECONDS", 0.01):
            for x, y in early.micro_batches(full_batch()):
                cross_entropy(early(x), y).backward()
                break
        store.set("left", "")
    else:
        store.wait(["left"], timedelta(seconds=TIMEOUT_SECONDS))
        with refused(popdist.MicroBatchError, "left the micro_batches loop"):
            step(early)
    with counted() as ends:
        train(early, late, step)
    assert ends == []
    assert wait_until(lambda: channel().is_broken, TIMEOUT_SECONDS)
