"""The laws of what belongs to a replica, and of loops as people write them; every instance runs all of them."""

import random
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import popdist
from popdist.data.batch import MicroBatch
from popdist.data.randomness import ReplicaRandomness
from popdist.parallel import recompute
from tests.contract import batch_norm_laws, check_laws, old_gradient_laws, training_laws
from tests.contract.collective_laws import refused
from tests.contract.laws import TIMEOUT_SECONDS, laws_of
from tests.contract.training_laws import (
    Net,
    check_gradient,
    check_recovered,
    is_last,
    raise_error,
    samples,
    share,
    step_lost,
    train,
)


def own_device() -> torch.device:
    """Return the device on which tensors are made: the CPU, or that of a check on an accelerator."""
    return torch.empty(0).device


def all_laws() -> list[Callable[[], None]]:
    """Every law of training_laws.py, check_laws.py, old_gradient_laws.py, batch_norm_laws.py and this file."""
    modules = (training_laws, check_laws, old_gradient_laws, batch_norm_laws, sys.modules[__name__])
    return [law for module in modules for law in laws_of(module)]


def run_all() -> int:
    """Every law; how many there were."""
    popdist.init(timeout_seconds=TIMEOUT_SECONDS)
    for law in all_laws():
        popdist.barrier()
        law()
    return len(all_laws())


def draw() -> tuple[float, float, float]:
    """One number from each generator that programs draw from unasked."""
    return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: S311 - they are the subject


def gradients(model: nn.Module) -> list[Tensor]:
    """Copies of all gradients."""
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def same_bits(left: list[Tensor], right: list[Tensor]) -> bool:
    """Whether two lists of gradients are equal."""
    return len(left) == len(right) > 0 and all(map(torch.equal, left, right))


def law_random_numbers_belong_to_the_replica() -> None:
    """Each replica draws the same ones in every split, step after step; the program's own go on untouched."""
    model = popdist.ReplicatedModel(nn.Linear(4, 4), seed=3)
    batch = share(samples(popdist.num_replicas()))
    random.seed(1)
    torch.manual_seed(1)
    drawn, outside = [], []
    for _ in range(2):
        for x, _y in model.micro_batches(batch):
            drawn.append(draw())
            model(x).sum().backward()
        outside += [random.random(), float(torch.rand(()))]  # noqa: S311 - the subject
        model.zero_grad()

    alone = ReplicaRandomness(3, popdist.local_replicas())
    expected = []
    for _ in range(2):
        for replica in popdist.local_replicas():
            with alone.of(replica, own_device()):
                expected.append(draw())
    assert drawn == expected
    assert len(set(drawn)) == len(drawn)
    random.seed(1)
    torch.manual_seed(1)
    assert outside == [value for _ in range(2) for value in (random.random(), float(torch.rand(())))]  # noqa: S311 - as above


class Drawing(nn.Module):
    """A layer that draws from all generators."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        """Random numbers, in training."""
        result: Tensor = self.layers(x) * (sum(draw()) if self.training else 1)
        return result


def law_recomputed_layers_have_the_same_bits() -> None:
    """Each replica's layer is computed again with the numbers that it drew first, in every split."""

    def trained(change: Callable[[nn.Module], object]) -> dict[str, Tensor]:
        torch.manual_seed(1)
        module = nn.Sequential(Drawing(), Drawing(), nn.Linear(4, 4))
        change(module)
        model = popdist.ReplicatedModel(module)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(2):
            for x, y in model.micro_batches(share(samples(6 * popdist.num_replicas())), accumulation=2):
                cross_entropy(model(x), y).backward()
            optimizer.step()
        return module.state_dict()

    plain, again = trained(nn.Module.train), trained(recompute)
    assert [name for name in plain if not torch.equal(plain[name], again[name])] == []


def law_random_states_can_be_dealt_anew() -> None:
    """The union over all instances is a state that any replica finds its own in."""
    model = popdist.ReplicatedModel(nn.Linear(4, 4), seed=4)
    everyone = ReplicaRandomness(4, range(popdist.num_replicas()))
    with model.micro_batch(0):
        draw()
    model.reduce_gradients()
    with everyone.of(popdist.local_replicas()[0], own_device()):
        draw()

    model.randomness.load_state_dict(everyone.state_dict())

    with model.randomness.of(popdist.local_replicas()[-1], own_device()):
        found = draw()
    with everyone.of(popdist.local_replicas()[-1], own_device()):
        assert draw() == found
    with refused(popdist.WeightsError, "no random states"):
        model.randomness.load_state_dict({popdist.local_replicas()[0]: {"torch": torch.zeros(1)}})


def law_buffers_are_those_of_all_replicas() -> None:
    """Floats become the mean over the replicas that had samples, others replica 0's, equal everywhere."""
    module = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))
    module.register_buffer("constant", torch.randn(3))
    model = popdist.ReplicatedModel(module)
    for count in (2 * popdist.num_replicas(), 2 * popdist.num_replicas() + 1):
        before = model.state_dict()["0.running_mean"].clone(), model.state_dict()["constant"].clone()
        x, y = samples(count)
        model.zero_grad()
        for part, labels in model.micro_batches(share((x, y))):
            cross_entropy(model(part), labels).backward()
        means = torch.stack(
            [before[0] * 0.9 + part.mean(0) * 0.1 for part in x.tensor_split(popdist.num_replicas())]
        )

        state = model.state_dict()
        torch.testing.assert_close(state["0.running_mean"], means.mean(0))
        assert torch.equal(state["constant"], before[1])
    assert int(model.state_dict()["0.num_batches_tracked"]) == 2
    digest = popdist.checksum(model)
    assert all(popdist.broadcast_object(digest, root) == digest for root in range(popdist.num_instances()))


class Seen(nn.Linear):
    """Keeps the mean of what it has seen last."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        """Look at ``x``."""
        self.seen.copy_(x.detach().mean(0))
        return super().forward(x)


def law_replicas_without_samples_have_no_say_in_the_buffers() -> None:
    """Neither do they count in the mean."""
    num_samples = max(1, popdist.num_replicas() - 1)
    model = popdist.ReplicatedModel(Seen())
    for x, _ in model.micro_batches(share((torch.full((num_samples, 4), 6.0), torch.zeros(num_samples)))):
        model(x).sum().backward()

    assert torch.equal(model.state_dict()["seen"], torch.full((4,), 6.0))


def law_a_lost_step_leaves_no_trace_in_the_buffers() -> None:
    """When an instance raises within a micro batch of its own loop, all have the buffers of before again."""
    if popdist.num_replicas() == 1:
        return
    model = popdist.ReplicatedModel(nn.BatchNorm1d(4))
    before = popdist.checksum(model)
    with step_lost(f"instance {popdist.num_instances() - 1} left the micro_batches loop"), suppress(KeyError):
        for index in range(popdist.num_local_replicas()):
            with model.micro_batch(index):
                model(torch.randn(3, 4)).square().sum().backward()
                if is_last():
                    raise_error("enough")
        model.reduce_gradients()
    assert popdist.checksum(model) == before
    check_recovered(popdist.ReplicatedModel(Net()))


def law_a_step_by_hand_does_not_go_on_after_an_exception() -> None:
    """Whoever catches it within the step is told so, and the next step works on all instances."""
    model = popdist.ReplicatedModel(Net())
    x, y = share(samples(2 * popdist.num_replicas()))
    with step_lost(f"instance {popdist.num_instances() - 1} left the micro_batches loop"):
        with suppress(KeyError), model.micro_batch(0, accumulation=2):
            cross_entropy(model(x), y).backward()
            if is_last():
                raise_error("enough")
        if is_last():
            with refused(popdist.MicroBatchError, "micro batch 0 of this step was left by an exception"):
                model.micro_batch(1, accumulation=2)
            with refused(popdist.MicroBatchError, "begin the next one with micro_batch"):
                model.reduce_gradients()
        else:
            model.reduce_gradients()
    check_recovered(model)


def law_a_step_by_hand_has_the_bits_of_the_loop() -> None:
    """micro_batch and reduce_gradients, with several backward passes in one; what is left out is empty."""
    model = popdist.ReplicatedModel(Net())
    x, y = share(samples(4 * popdist.num_replicas()))
    train(model, (x, y), 2)
    expected = gradients(model)

    model.zero_grad()
    num_parts = 2 * popdist.num_local_replicas()
    pieces = zip(x.tensor_split(num_parts), y.tensor_split(num_parts), strict=True)
    for index, (part, labels) in enumerate(pieces):
        with model.micro_batch(index, accumulation=2):
            loss = cross_entropy(model(part), labels)
            (loss / 2).backward(retain_graph=True)
            (loss / 2).backward()
    model.reduce_gradients()
    assert same_bits(gradients(model), expected)

    model.zero_grad()
    if popdist.instance_index() == 0:
        with model.micro_batch(0):
            cross_entropy(model(x[:2]), y[:2]).backward()
    model.reduce_gradients()
    check_gradient(model, first_of_all(2))


def first_of_all(count: int) -> tuple[Tensor, Tensor]:
    """The first samples of the job's step."""
    x, y = samples(4 * popdist.num_replicas())
    return x[:count], y[:count]


def law_weights_make_the_mean_right() -> None:
    """Of sequences in a list, the mean over tokens is that of one process; a 0 drops a gradient."""
    model = popdist.ReplicatedModel(nn.Linear(4, 4))
    lengths = [1 + replica % 3 for replica in range(popdist.num_replicas())]
    x, y = samples(sum(lengths))
    sequences = list(zip(x.split(lengths), y.split(lengths), strict=True))
    own = [sequences[replica] for replica in popdist.local_replicas()]
    for part, labels in model.micro_batches(own, split=list, weights=[len(labels) for _, labels in own]):
        cross_entropy(model(part), labels).backward()
    check_gradient(model, (x, y))

    model.zero_grad()
    for part, labels in model.micro_batches(own, split=list, reduction="sum"):
        cross_entropy(model(part), labels, reduction="sum").backward()
    model.weight.grad /= len(x)
    model.bias.grad /= len(x)
    check_gradient(model, (x, y))

    model.zero_grad()
    only_the_first = [float(replica == 0) for replica in popdist.local_replicas()]
    for part, labels in model.micro_batches(own, split=list, weights=only_the_first):
        cross_entropy(model(part), labels).backward()
    check_gradient(model, sequences[0])

    model.zero_grad()
    for index, (part, labels) in enumerate(own):
        with model.micro_batch(index, weight=len(labels)):
            cross_entropy(model(part), labels).backward()
    model.reduce_gradients()
    check_gradient(model, (x, y))


def law_a_loaders_batch_brings_its_micro_batches() -> None:
    """With their numbers of samples, their accumulation, and None where there is nothing."""
    model = popdist.ReplicatedModel(Net())
    x, y = samples(2 * popdist.num_replicas())
    found = []
    for replica in popdist.local_replicas():
        rows = slice(2 * replica, 2 * replica + 2)
        found += [MicroBatch(replica, 0, 2, (x[rows], y[rows])), MicroBatch(replica, 1, 0, None)]
    for part, labels in model.micro_batches(SimpleNamespace(micro_batches=tuple(found))):
        cross_entropy(model(part), labels).backward()
    check_gradient(model, (x, y))


def law_instances_bring_batches_of_the_same_step() -> None:
    """One that leaves out a batch alone is one step ahead: an error on all, until they are together again."""
    model, last = popdist.ReplicatedModel(Net()), popdist.num_instances() - 1
    batches = list(popdist.data_loader(list(zip(*samples(3 * popdist.num_replicas()), strict=True)), 1))
    chosen = [batches[2 if is_last() else 1], batches[2]]
    ends = [number * popdist.num_replicas() for number in (2, 3)]
    words = rf"instances? 0.*: epoch 0 up to position {ends[0]}; instance {last}: .* up to position {ends[1]}\."
    for number, batch in enumerate(chosen if last else []):
        with refused(popdist.CollectiveError, words) if number == 0 else nullcontext():
            for part, labels in model.micro_batches(batch):
                cross_entropy(model(part), labels).backward()
    check_recovered(model)


def law_batches_of_two_loaders_are_paired() -> None:
    """As the first has samples. Where the second alone has none, and in zip(), it is an error."""
    num_replicas, model = popdist.num_replicas(), popdist.ReplicatedModel(Net())
    x, y = samples(2 * num_replicas - 1)
    ragged = popdist.data_loader(list(zip(x, y, strict=True)), 1, accumulation=2)
    full = popdist.data_loader(torch.arange(2.0 * num_replicas), 1, accumulation=2)
    for a, b in zip(ragged, full, strict=True):
        found = []
        for (part, labels), numbers in model.micro_batches((a, b)):
            cross_entropy(model(part), labels).backward()
            found.append(numbers.tolist())
            assert len(list(zip(found, b, strict=False))) == len(found)
        pairs = zip(a.micro_batches, b.micro_batches, strict=True)
        assert found == [of_b.content.tolist() for of_a, of_b in pairs if of_a.num_samples]
        check_gradient(model, (x, y))
        model.zero_grad()
    single = next(iter(popdist.data_loader(torch.arange(2.0 * num_replicas), 1)))
    a, b = next(iter(ragged)), next(iter(full))
    with refused(
        popdist.BatchError if is_last() else popdist.MicroBatchError,
        "batch 1 of this loop .* drop_last=True" if is_last() else "could not split the batch",
    ):
        for _, (part, labels) in model.micro_batches((b, a)):
            cross_entropy(model(part), labels).backward()
    with refused(popdist.BatchError, r"model\.micro_batches\(\(a, b\)\)"):
        for (part, labels), _ in zip(model.micro_batches(a), b, strict=False):
            cross_entropy(model(part), labels).backward()
    with refused(popdist.BatchError if is_last() else popdist.MicroBatchError, "accumulation|could not split"):
        for (part, labels), _ in model.micro_batches((a, single if is_last() else b)):
            cross_entropy(model(part), labels).backward()
    check_recovered(model)


def law_a_scaler_steps_where_the_first_step_has_no_samples() -> None:
    """Torch makes the scale where the first loss is scaled: the others have none to scale."""
    model = popdist.ReplicatedModel(Net())
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(2):
        for part, labels in model.micro_batches(share(samples(1))):
            scaler.scale(cross_entropy(model(part), labels)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 1024.0
    optimizer.zero_grad()
    check_recovered(model)


def law_what_does_not_fit_is_an_error_on_every_instance() -> None:
    """A negative weight, a missing micro batch: its own error where it is, MicroBatchError elsewhere."""
    model = popdist.ReplicatedModel(Net())
    x, y = share(samples(popdist.num_replicas()))
    parts = [(x[i : i + 1], y[i : i + 1]) for i in range(len(x))]
    weights = [1.0] * len(parts)
    wrong: list[tuple[str, list[tuple[Tensor, Tensor]], list[float]]] = [
        ("weight -1.0 is not possible", parts, [*weights[1:], -1.0]),
        ("split gave", [*parts, parts[0]], weights),
    ]
    for words, own_parts, own_weights in wrong:
        error = popdist.BatchError if is_last() else popdist.MicroBatchError
        with refused(error, words if is_last() else f"instance {popdist.num_instances() - 1} could not split"):
            chosen = (own_parts, own_weights) if is_last() else (parts, weights)
            for part, labels in model.micro_batches(chosen[0], split=list, weights=chosen[1]):
                cross_entropy(model(part), labels).backward()
    with refused(popdist.BatchError, r"micro_batch\(99\), where 0 is the next"):
        model.micro_batch(99)
    model._model_steps.abandon() if popdist.num_instances() == 1 else None
    check_recovered(popdist.ReplicatedModel(Net()))


def law_backward_outside_the_loop_reduces_or_is_refused() -> None:
    """With one local replica the bits are those of the loop; with several the error shows it."""
    module = Net()
    model = popdist.ReplicatedModel(module)
    x, y = share(samples(2 * popdist.num_replicas()))
    if popdist.num_local_replicas() > 1:
        with refused(popdist.BatchError, r"outside micro_batches.*for x, y in model\.micro_batches\(batch\)"):
            cross_entropy(model(x), y).backward()
        with model.no_sync():
            cross_entropy(model(x), y).backward()
        return
    train(model, (x, y))
    expected = gradients(model)

    model.zero_grad()
    with model.no_sync():
        cross_entropy(model(x), y).backward()
    own = gradients(model)
    model.zero_grad()
    cross_entropy(model(x), y).backward()

    assert same_bits(gradients(model), expected)
    assert popdist.num_instances() == 1 or not same_bits(own, expected)
    model.zero_grad()
    model.frozen.requires_grad_(True)  # noqa: FBT003 - torch's own signature
    cross_entropy(module(x), y).backward()
    assert module.frozen.grad is not None
    assert torch.equal(popdist.all_reduce(module.frozen.grad.clone(), "mean"), module.frozen.grad)


def law_gradients_that_are_not_finite_are_named() -> None:
    """Parameter and replica, on every instance; then all is well."""
    model = popdist.ReplicatedModel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), check_finite=True)
    x, y = share(samples(2 * popdist.num_replicas()))
    last = popdist.num_replicas() - 1
    replicas = iter(popdist.local_replicas())
    with refused(popdist.GradientError, f"the gradient of 0.weight on replica {last} holds NaN"):
        for part, labels in model.micro_batches((x, y)):
            scale = float("nan") if next(replicas) == last else 1.0
            (cross_entropy(model(part), labels) * scale).backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    train(model, (x, y))


def law_arguments_are_the_same_everywhere() -> None:
    """A seed that differs is an error that says who has which."""
    if popdist.num_instances() == 1:
        return
    with refused(popdist.CollectiveError, rf"instance {popdist.num_instances() - 1}: ReplicatedModel\(seed=1,"):
        popdist.ReplicatedModel(nn.Linear(1, 1), seed=int(is_last()))


def law_strict_bits_is_about_powers_of_two() -> None:
    """Other numbers of local replicas are refused."""
    num_local = popdist.num_local_replicas()
    if num_local in (1, 2, 4):
        popdist.ReplicatedModel(nn.Linear(1, 1), strict_bits=True)
        return
    with refused(popdist.BatchError, f"{num_local} local replicas are no power of two"):
        popdist.ReplicatedModel(nn.Linear(1, 1), strict_bits=True)


def law_an_optimizer_waits_for_the_gradients() -> None:
    """A step in the middle of the loop is refused, for the optimizer of that model only."""
    model = popdist.ReplicatedModel(Net())
    other = nn.Linear(1, 1)
    with refused(popdist.MicroBatchError, r"before the gradients of all replicas are there"):
        for x, y in model.micro_batches(share(samples(2 * popdist.num_replicas()))):
            cross_entropy(model(x), y).backward()
            torch.optim.SGD(other.parameters()).step()
            torch.optim.SGD(model.parameters()).step()
    check_recovered(model)


def law_a_step_without_backward_is_warned_of() -> None:
    """On instance 0, where no micro batch has made a gradient; with the loop that wants none."""
    model = popdist.ReplicatedModel(Net())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x, y in model.micro_batches(share(samples(2 * popdist.num_replicas()))):
            cross_entropy(model(x), y)
        for x, y in model.micro_batches(share(samples(2 * popdist.num_replicas()))):
            cross_entropy(model(x), y).backward()
    found = [str(it.message) for it in caught if issubclass(it.category, popdist.PopdistWarning)]
    assert len(found) == popdist.is_main(), found
    assert all("this step has no gradient: backward() was called in no micro batch" in text for text in found)


def law_the_same_samples_on_several_instances_are_warned_of() -> None:
    """By the first instance that has them: equal batches, and a DataLoader that shuffles alike on each."""
    x, y = samples(16)
    dataset = torch.utils.data.TensorDataset(x, y)
    own = (x + popdist.instance_index(), y)
    one = (torch.ones(4, 4), torch.zeros(4, dtype=torch.int64))
    cases: list[tuple[Any, str]] = [
        ([(x, y)], "train on the same samples in this step"),
        (torch.utils.data.DataLoader(dataset, 8, shuffle=True), "train on the same samples in this step"),
        ([one], ""),
        (popdist.data_loader(dataset, 2, shuffle=True), ""),
        ([own], ""),
    ]
    for batches, wanted in cases:
        model = popdist.ReplicatedModel(Net())
        torch.manual_seed(1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for batch in batches:
                train(model, batch)
                break
        found = [str(it.message) for it in caught if issubclass(it.category, popdist.PopdistWarning)]
        assert len(found) == bool(wanted and popdist.num_instances() > 1 and popdist.is_main()), found
        assert all(wanted in text for text in found)


def law_the_same_samples_are_warned_of_outside_the_loop_too() -> None:
    """In DDP's loop, where each instance passes the same samples to the model; not where they differ."""
    if popdist.num_local_replicas() > 1:
        return
    x, y = samples(16)
    for is_moved in (False, True):
        model, own = popdist.ReplicatedModel(Net()), x + is_moved * popdist.instance_index()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                model.zero_grad()
                cross_entropy(model(own), y).backward()
        found = [str(it.message) for it in caught if "train on the same samples" in str(it.message)]
        wanted = not is_moved and popdist.num_instances() > 1 and popdist.is_main()
        assert len(found) == 2 * wanted, found


def law_a_loader_that_one_instance_reads_alone_is_warned_of() -> None:
    """By that instance, in the next checked step."""
    dataset = torch.utils.data.TensorDataset(*samples(16))
    model, aside = popdist.ReplicatedModel(Net()), popdist.data_loader(dataset, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in popdist.data_loader(dataset, 1):
            for x, y in model.micro_batches(batch):
                cross_entropy(model(x), y).backward()
            model.zero_grad()
            if popdist.is_main():
                list(aside)
    found = [str(it.message) for it in caught if "has read loaders of popdist.data_loader" in str(it.message)]
    assert bool(found) == (popdist.is_main() and popdist.num_instances() > 1), found


def law_some_instances_may_meet_in_the_loop() -> None:
    """While what the loop has sent to all is on its way still."""
    model = popdist.ReplicatedModel(Net())
    some = range(min(2, popdist.num_instances()))

    def meet() -> list[int]:
        popdist.barrier()
        return popdist.all_gather(torch.tensor(popdist.instance_index())).tolist()

    batch = samples(2 * popdist.num_replicas())
    for x, y in model.micro_batches(share(batch), 2):
        assert popdist.execute_on_instances(some, meet) == (
            list(some) if popdist.instance_index() in some else None
        )
        cross_entropy(model(x), y).backward()
    check_gradient(model, batch)
