"""The laws of batch norm groups, and of micro batches that a function computes; every instance runs all of them.

Each instance can work out what one BatchNorm would have made of all samples of a group, in one process.
"""

import contextvars
import copy
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import popdist
from popdist.data.randomness import ReplicaRandomness
from tests.contract.collective_laws import refused
from tests.contract.training_laws import Net, is_last, samples, share, train

Batch = list[tuple[Tensor, Tensor] | None]

TOLERANCE = 1e-12


def sizes_of_groups() -> list[int]:
    """Every size above 1 that divides the replicas."""
    number = popdist.num_replicas()
    return [size for size in range(2, number + 1) if number % size == 0]


def net() -> nn.Sequential:
    """Two batch norm layers, one of them without weights, in double precision."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(3, affine=False, momentum=None)
    return nn.Sequential(
        nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3), norm, nn.Linear(3, 2)
    ).double()


def parts(sizes: list[int], shape: tuple[int, ...] = (4,)) -> Batch:
    """The micro batch of each replica of the job, with its size."""
    generator = torch.Generator().manual_seed(sum(sizes))

    def draw(count: int, *rest: int) -> Tensor:
        return torch.randn(count, *rest, generator=generator, dtype=torch.float64)

    return [(draw(size, *shape), draw(size, 2)) if size else None for size in sizes]


def loss_of(out: Tensor, y: Tensor) -> Tensor:
    """A mean over samples, in which no two of them have the same gradient."""
    return (out - y).square().mean() + (out * y).sum(1).sin().mean()


def one_batch(plain: nn.Module, batch: Batch, size: int, *, is_mean: bool) -> dict[str, Tensor]:
    """The gradients when each group is one batch of one process, and the mean of its statistics over replicas."""
    ends: list[dict[str, Tensor]] = []
    gradients = {name: torch.zeros_like(it) for name, it in plain.named_parameters()}
    weight = sum(len(part[1]) for part in batch if part is not None) if is_mean else 1
    for first in range(0, len(batch), size):
        members = [part for part in batch[first : first + size] if part is not None]
        if not members:
            continue
        group = copy.deepcopy(plain)
        out = group(torch.cat([x for x, _ in members]))
        losses = [
            loss_of(rows, y) * (len(y) if is_mean else 1)
            for rows, (_, y) in zip(out.split([len(y) for _, y in members]), members, strict=True)
        ]
        torch.stack(losses).sum().backward()
        ends += [dict(group.named_buffers())] * len(members)
        for name, it in group.named_parameters():
            if it.grad is not None:
                gradients[name] += it.grad / weight
    return gradients | {name: torch.stack([it[name].double() for it in ends]).mean(0) for name in ends[0]}


def check_gradients(
    model: popdist.ReplicatedModel, batch: Batch, expected: dict[str, Tensor], *, is_mean: bool = True
) -> None:
    """A step with ``batch`` gives what is ``expected``."""

    def body(x: Tensor, y: Tensor) -> None:
        loss_of(model(x), y).backward()

    mine = [batch[replica] for replica in popdist.local_replicas()]
    model.run_micro_batches(mine, body, split=list, reduction="mean" if is_mean else "sum")
    for name, it in model.named_parameters():
        assert it.grad is not None
        assert (it.grad - expected[name]).abs().max() < TOLERANCE, name


def check_one_batch(module: nn.Module, batch: Batch, size: int, *, is_mean: bool = True) -> None:
    """A step of the job has what one process has, to the last digits of double precision."""
    expected = one_batch(copy.deepcopy(module), batch, size, is_mean=is_mean)
    model = popdist.ReplicatedModel(module, batch_norm_group_size=size)
    check_gradients(model, batch, expected, is_mean=is_mean)
    for name, value in model.named_buffers():
        assert (value - expected[name]).abs().max() < TOLERANCE, name


def uneven(number: int) -> list[int]:
    """5 + 3 samples and so on; the third replica has none."""
    return [0 if replica == 2 else 5 - 2 * (replica % 2) + replica // 4 for replica in range(number)]


def law_a_group_is_one_batch() -> None:
    """Forward, backward and in its statistics, with any samples; for means and for sums."""
    for size in sizes_of_groups():
        for is_mean in (True, False):
            check_one_batch(net(), parts(uneven(popdist.num_replicas())), size, is_mean=is_mean)


def law_two_replicas_of_twenty_are_forty() -> None:
    """Batches of equal size; and one sample for each replica, whose own variance is nothing."""
    for count in (20, 1):
        for size in sizes_of_groups():
            check_one_batch(net(), parts([count] * popdist.num_replicas()), size)


def images(norm: nn.Module) -> nn.Module:
    """A layer of two or three dimensions between others; channels last for those of two."""
    conv: Any = nn.Conv3d if isinstance(norm, nn.BatchNorm3d) else nn.Conv2d
    module = nn.Sequential(conv(2, 4, 2), norm, nn.ReLU(), nn.Flatten(), nn.LazyLinear(2)).double()
    dims = 3 if conv is nn.Conv3d else 2
    module.eval()(torch.zeros(1, 2, *[3] * dims, dtype=torch.float64))
    if conv is nn.Conv2d:
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload] # torch's stubs lack this form
    return module.train()


def law_layers_of_all_dimensions_take_part() -> None:
    """Two and three of them, a SyncBatchNorm that was converted, and one whose input needs no gradient."""
    for size in sizes_of_groups()[-1:]:
        for norm, dims in ((nn.BatchNorm2d(4), 2), (nn.BatchNorm3d(4), 3)):
            torch.manual_seed(0)
            check_one_batch(images(norm), parts(uneven(popdist.num_replicas()), (2, *[3] * dims)), size)
        batch = parts(uneven(popdist.num_replicas()))
        converted = nn.SyncBatchNorm.convert_sync_batchnorm(net())
        expected = one_batch(net(), batch, size, is_mean=True)
        model = popdist.ReplicatedModel(converted, batch_norm_group_size=size)
        check_gradients(model, batch, expected)
        model.eval()(torch.zeros(1, 4, dtype=torch.float64))
        first = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
        check_one_batch(first, batch, size)


def law_a_model_in_half_precision_takes_part() -> None:
    """Its running statistics are in half precision, too; they are those of all samples."""
    number = popdist.num_replicas()
    model = popdist.ReplicatedModel(nn.BatchNorm1d(4, momentum=1.0).bfloat16(), batch_norm_group_size=number)
    whole = torch.arange(8.0 * number).view(-1, 4)
    replicas = popdist.local_replicas()
    mine = whole[2 * replicas.start : 2 * replicas.stop]
    model.run_micro_batches(mine.bfloat16(), lambda x: model(x).float().square().sum().backward())
    found = dict(model.named_buffers())["running_mean"]
    assert found.dtype == torch.bfloat16
    assert torch.allclose(found.float(), whole.mean(0), rtol=0.01), (found, whole.mean(0))


def net_of(model: popdist.ReplicatedModel) -> nn.Sequential:
    """The module inside."""
    assert isinstance(model.module, nn.Sequential)
    return model.module


def check_groups(model: popdist.ReplicatedModel) -> None:
    """The next step is in order on every instance."""
    batch = parts(uneven(popdist.num_replicas()))
    model.zero_grad()
    expected = one_batch(copy.deepcopy(net()), batch, popdist.num_replicas(), is_mean=True)
    model.load_state_dict(net().state_dict())
    check_gradients(model, batch, expected)


@contextmanager
def group_broken(pattern: str, *, cause: type[Exception] | None = None) -> Iterator[None]:
    """Every instance raises; where the last replica is, its own ``cause`` if it has one."""
    if is_last() and cause is not None:
        with refused(cause, ""):
            yield
    else:
        with refused(popdist.MicroBatchError, pattern):
            yield


def oddities(model: popdist.ReplicatedModel) -> dict[str, Callable[[Tensor, Tensor], None]]:
    """What the last replica may do in place of its work."""
    body, head = net_of(model)[:5], net_of(model)[5]

    def raises(x: Tensor, _y: Tensor) -> None:
        model(x)
        raise KeyError("odd")

    def stops(_x: Tensor, _y: Tensor) -> None:
        """Nothing at all."""

    def again(x: Tensor, y: Tensor) -> None:
        loss_of(model(x) + model(x), y).backward()

    def forward_only(x: Tensor, _y: Tensor) -> None:
        model(x)

    def cut_off(x: Tensor, y: Tensor) -> None:
        loss_of(head(body(x).detach()), y).backward()

    return {it.__name__: it for it in (raises, stops, again, forward_only, cut_off)}


def law_replicas_of_a_group_end_together() -> None:
    """One that raises, stops early, calls a layer again, or leaves one out backward: an error on all, no hang."""
    last = popdist.num_replicas() - 1
    if not last:
        return
    model = popdist.ReplicatedModel(net(), batch_norm_group_size=last + 1)
    replicas, of_layer_4 = popdist.local_replicas(), "is in the backward pass of the layer 4 of Sequential"
    batch = [(it, *part) for it, part in zip(replicas, parts([2] * len(replicas)), strict=True) if part]
    patterns = {
        "raises": rf"replica {last} has left its micro batch \(by break, return or an exception",
        "stops": rf"replica {last} has ended its micro batch; replica 0 is in the forward pass of the layer 1",
        "again": rf"replica 0 {of_layer_4}; replica {last} is in the forward pass of the layer 1 of Sequential",
        "forward_only": rf"replica 0 {of_layer_4}; replica {last} has ended its micro batch",
        "cut_off": rf"replica 0 {of_layer_4}; replica {last} has ended its micro batch",
    }
    for name, odd in oddities(model).items():

        def body(replica: int, x: Tensor, y: Tensor) -> None:
            if replica == last:
                odd(x, y)  # noqa: B023 - called at once
            else:
                loss_of(model(x), y).backward()

        with group_broken(patterns[name], cause=KeyError if name == "raises" else None):
            model.run_micro_batches(batch, body, split=list)
        assert all(parameter.grad is None for parameter in model.parameters())
    check_groups(model)


def law_a_failure_in_one_group_ends_all_groups() -> None:
    """Also those in which no replica has failed, on instances that wait for one that has; then all is in order."""
    for size in sizes_of_groups():
        model = popdist.ReplicatedModel(net(), batch_norm_group_size=size)
        replicas = popdist.local_replicas()
        batch = [(it, *part) for it, part in zip(replicas, parts([4] * len(replicas)), strict=True) if part]

        def body(replica: int, x: Tensor, y: Tensor) -> None:
            out = model(x)  # noqa: B023 - called at once
            if replica == 0:
                raise KeyError("odd")
            loss_of(out, y).backward()

        lost = r"replica \d has left its micro batch|left the micro_batches loop"
        with refused(KeyError, "odd") if 0 in replicas else refused(popdist.MicroBatchError, lost):
            model.run_micro_batches(batch, body, 2, split=lambda it: [part for one in it for part in (one, None)])
        popdist.barrier()
    if sizes_of_groups():
        check_groups(popdist.ReplicatedModel(net(), batch_norm_group_size=popdist.num_replicas()))


def law_nobody_waits_for_a_loop_that_was_left() -> None:
    """By break, in the loop of an instance with one replica: the others hear of it in their next layer."""
    if popdist.num_local_replicas() > 1 or popdist.num_replicas() == 1:
        return
    model = popdist.ReplicatedModel(net(), batch_norm_group_size=popdist.num_replicas())
    mine = parts([2])
    with nullcontext() if is_last() else refused(popdist.MicroBatchError, r"replica \d has left its micro batch"):
        for x, y in model.micro_batches(mine, split=list):
            if is_last():
                break
            loss_of(model(x), y).backward()
    check_groups(model)


def law_evaluation_meets_nobody() -> None:
    """By one instance alone; and update_bn makes statistics of replicas by themselves."""
    for size in sizes_of_groups()[-1:]:
        model = popdist.ReplicatedModel(net(), batch_norm_group_size=size)
        x = torch.randn(3, 4, dtype=torch.float64)
        if popdist.is_main():
            assert torch.equal(model.eval()(x), net().eval()(x))
        popdist.barrier()
        model.train()
        with refused(
            popdist.BatchError, r"layer 1 of Sequential has .* in training mode outside .* model.eval\(\)"
        ):
            model(x)
        popdist.update_bn([torch.randn(2 * popdist.num_local_replicas(), 4, dtype=torch.float64)], model)
        assert (model.get_buffer("1.running_mean") != 0).all()


def law_what_cannot_be_a_group_is_refused() -> None:
    """Sizes that do not divide; layers without statistics, or with a forward pass of their own; weights of 0."""
    number = popdist.num_replicas()
    for wrong in (0, -1, 1.5, "2", True):
        with refused(popdist.BatchError, "batch_norm_group_size=.* must be a whole number of at least 1"):
            popdist.ReplicatedModel(net(), batch_norm_group_size=wrong)  # type: ignore[arg-type] # the subject
    with refused(popdist.BatchError, rf"does not divide the {number} replicas .* nearest that does is {number}$"):
        popdist.ReplicatedModel(net(), batch_norm_group_size=number + 1)
    if number == 8:
        with refused(popdist.BatchError, r"batch_norm_group_size=3 .* the nearest that do are 2 and 4$"):
            popdist.ReplicatedModel(net(), batch_norm_group_size=3)
    if number == 1:
        return

    class Own(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            return x

    for norm, pattern in (
        (nn.BatchNorm1d(4, track_running_stats=False), "layer 0 of Sequential has track_running_stats=False"),
        (Own(4), "layer 0 of Sequential has a forward pass of its own"),
    ):
        with refused(popdist.WeightsError, pattern):
            popdist.ReplicatedModel(nn.Sequential(norm), batch_norm_group_size=number)
    with refused(popdist.WeightsError, "layer 0 of Sequential is a SyncBatchNorm.*batch_norm_group_size=k"):
        popdist.ReplicatedModel(nn.Sequential(nn.SyncBatchNorm(4)))
    module = net()
    model = popdist.ReplicatedModel(module, batch_norm_group_size=number)
    with refused(popdist.WeightsError, f"with batch_norm_group_size={number} already, and this one has 1"):
        popdist.ReplicatedModel(module)
    with refused(popdist.BatchError, "run_micro_batches"), model.micro_batch(0):
        pass
    if popdist.num_local_replicas() > 1:
        with refused(popdist.BatchError, r"call model.run_micro_batches\(batch, body\)"):
            list(model.micro_batches(torch.zeros(popdist.num_local_replicas(), 4)))
    batch, weights = torch.zeros(popdist.num_local_replicas(), 4), [1.0] * popdist.num_local_replicas()
    if is_last():
        with refused(popdist.BatchError, "has samples and weighs 0"):
            model.run_micro_batches(batch, model, weights=[*weights[1:], 0.0])
    else:
        with refused(popdist.MicroBatchError, "could not split"):
            model.run_micro_batches(batch, model, weights=weights)
    lone = [torch.zeros(1, 4).double() if it == 0 else None for it in popdist.local_replicas()]
    with refused(popdist.PopdistError, r"has 1 values in each channel|left the micro_batches loop"):
        model.run_micro_batches(lone, model, split=list)
    check_groups(model)


VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("VARIABLE", default=0)


def law_what_belongs_to_a_replica_goes_with_its_turn() -> None:
    """Random states, buffers, gradients, modes and context variables; one replica runs at a time."""
    number = popdist.num_replicas()
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    module.register_buffer("seen", torch.zeros(()))
    model = popdist.ReplicatedModel(module, batch_norm_group_size=number, seed=5)
    replicas = iter([*popdist.local_replicas()] * 2)
    running: list[int] = []

    def body(x: Tensor) -> list[float]:
        replica = next(replicas)
        assert VARIABLE.get() == 7
        VARIABLE.set(replica)
        assert torch.is_autocast_enabled("cpu")
        drawn = [random.random()]  # noqa: S311 - the subject
        net_of(model)[0](x).sum().backward()
        gradient = model.get_parameter("0.bias").grad
        assert gradient is not None
        found = gradient.clone()
        model.seen.add_(replica + 1)
        with torch.no_grad():
            model(x)
            assert not torch.is_grad_enabled()
        assert VARIABLE.get() == replica
        assert float(model.seen) % (replica + 1) == 0
        assert model.get_parameter("0.bias").grad is gradient
        assert torch.equal(gradient, found)
        running.append(replica)
        return [*drawn, random.random()]  # noqa: S311 - as above

    VARIABLE.set(7)
    x = torch.ones(4 * len(popdist.local_replicas()), 4)
    with torch.autocast("cpu", torch.bfloat16):
        drawn = model.run_micro_batches(x, body, accumulation=2)
    assert VARIABLE.get() == 7
    assert sorted(running) == sorted([*popdist.local_replicas()] * 2)
    alone = ReplicaRandomness(5, popdist.local_replicas())
    for position, replica in enumerate(popdist.local_replicas()):
        with alone.of(replica, torch.device("cpu")):
            expected_draws = [random.random() for _ in range(4)]  # noqa: S311 - as above
            assert drawn[2 * position] + drawn[2 * position + 1] == expected_draws
    expected = 2 * sum(range(1, number + 1)) / number
    assert abs(float(model.seen) - expected) < 1e-6
    assert {it.name for it in threading.enumerate() if it.name.startswith("popdist-replica")} == set()


def law_a_function_computes_what_the_loop_does() -> None:
    """Without groups: the same bits; what it returns comes back in order; a mapping is its only argument."""
    model = popdist.ReplicatedModel(Net())
    batch = share(samples(2 * popdist.num_replicas() + 1))
    train(model, batch, 2)
    expected = [it.grad.clone() for it in model.parameters() if it.grad is not None]
    model.zero_grad()

    def body(x: Tensor, y: Tensor) -> int:
        cross_entropy(model(x), y).backward()
        return len(x)

    assert sum(model.run_micro_batches(batch, body, 2)) == len(batch[0])
    found = [it.grad for it in model.parameters() if it.grad is not None]
    assert all(map(torch.equal, found, expected))

    def of_mapping(parts: dict[str, Tensor]) -> None:
        model(parts["x"]).sum().backward()

    model.zero_grad()
    model.run_micro_batches({"x": batch[0]}, of_mapping)
