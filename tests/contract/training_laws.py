"""The laws of the training library, written once over instances and replicas; every instance runs all of them.

What each instance brings depends on its index, so each can work out the gradient that one process would have had.
"""

import copy
import gc
import operator
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, embedding

import popdist
from popdist.gradients import reduction
from popdist.ground.layout import parts
from popdist.job import context
from tests.contract.collective_laws import refused
from tests.tree_sums import tree_sum

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Net(nn.Module):
    """A little of everything: shared, frozen, partly used and unused parameters, and buffers."""

    statistics: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.sometimes = nn.Parameter(torch.randn(4))
        self.never = nn.Parameter(torch.randn(4))
        self.register_buffer("statistics", torch.randn(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Use ``sometimes`` only for samples that say so in their first number, and only if there is one."""
        out = torch.as_tensor(self.second(torch.relu(self.first(x))) + self.frozen)
        marked = x[:, :1] > MARK
        return out + self.sometimes * marked if marked.any() else out


MARK = 2.5


def samples(count: int) -> tuple[Tensor, Tensor]:
    """The job's samples of a step, the same on every instance; the first one is marked."""
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, 4, generator=generator).clamp(-2, 2)
    if count:
        x[0, 0] = MARK + 1
    return x, torch.randint(0, 4, (count,), generator=generator)


def share(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """This instance's part of the samples, as the sampler deals them."""
    rows = parts(range(len(batch[0])), popdist.local_replicas(), popdist.num_replicas())
    return batch[0][rows.start : rows.stop], batch[1][rows.start : rows.stop]


def is_last() -> bool:
    """Whether this is the instance that misbehaves."""
    return popdist.instance_index() == popdist.num_instances() - 1


def train(model: popdist.ReplicatedModel, batch: tuple[Tensor, Tensor], accumulation: int = 1) -> None:
    """One step's gradient."""
    model.zero_grad()
    for x, y in model.micro_batches(batch, accumulation):
        assert all(parameter.grad is None for parameter in model.parameters() if parameter.requires_grad)
        assert len(x) == len(y) > 0
        cross_entropy(model(x), y).backward()


def check_equal_everywhere(model: nn.Module) -> None:
    """All instances hold the same bits of gradients, and none where another has none."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    digest = popdist.checksum(found)
    numbers = torch.tensor([int(digest[start : start + 8], 16) for start in range(0, 32, 8)])
    assert (popdist.all_gather(numbers) == numbers).all()


def check_gradient(model: popdist.ReplicatedModel, batch: tuple[Tensor, Tensor]) -> None:
    """The gradient is the one that a single process has for the mean over all samples."""
    plain = copy.deepcopy(model.module)
    plain.zero_grad()
    cross_entropy(plain(batch[0]), batch[1]).backward()
    check_equal_everywhere(model)
    for (name, found), (_, expected) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        if expected.grad is None:
            assert found.grad is None, name
        else:
            assert found.grad is not None, name
            torch.testing.assert_close(found.grad, expected.grad)


def law_gradient_is_the_mean_over_all_samples() -> None:
    """Whatever the number of samples: full, ragged, one a replica, and one in the whole job."""
    model = popdist.ReplicatedModel(Net())
    for accumulation in (1, 3):
        full = popdist.num_replicas() * accumulation * 2
        for count in (full, full - 1, full // 2 + 1, popdist.num_replicas(), 1):
            train(model, share(samples(count)), accumulation)
            check_gradient(model, samples(count))


def law_instances_may_have_any_number_of_samples() -> None:
    """Batches that no sampler would have dealt are weighted by their samples all the same; one may be empty."""
    model = popdist.ReplicatedModel(Net())
    sizes = [5 * instance for instance in range(popdist.num_instances())] or [0]
    sizes[-1] += 3
    starts = [sum(sizes[:instance]) for instance in range(len(sizes) + 1)]
    x, y = samples(starts[-1])
    mine = slice(starts[popdist.instance_index()], starts[popdist.instance_index() + 1])

    train(model, (x[mine], y[mine]), 2)

    check_gradient(model, (x, y))


def law_one_replica_has_the_gradient_of_torch() -> None:
    """Bit for bit; half precision too."""
    if popdist.num_replicas() > 1:
        return
    for dtype in (torch.float32, torch.bfloat16):
        model = popdist.ReplicatedModel(Net().to(dtype))
        x, y = samples(7)
        plain = copy.deepcopy(model.module)
        train(model, (x.to(dtype), y))
        cross_entropy(plain(x.to(dtype)), y).backward()
        for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert (found.grad is None) == (expected.grad is None)
            assert found.grad is None or expected.grad is None or torch.equal(found.grad, expected.grad)


def law_unused_somewhere_is_zero_there() -> None:
    """``sometimes`` has its one micro batch's gradient over the whole job, weighted; ``never`` has none."""
    model = popdist.ReplicatedModel(Net())
    batch = samples(2 * popdist.num_replicas())
    train(model, share(batch))
    plain = copy.deepcopy(model.module)
    plain.zero_grad()
    cross_entropy(plain(batch[0][:2]), batch[1][:2]).backward()

    expected = plain.get_parameter("sometimes").grad
    assert model.sometimes.grad is not None
    assert expected is not None
    torch.testing.assert_close(model.sometimes.grad, expected / popdist.num_replicas())
    assert model.never.grad is None
    assert model.frozen.grad is None


def law_gradients_are_added_wide() -> None:
    """Half precision is added in float32 and rounded once; double precision stays double; strides are kept."""
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        plain = nn.Conv2d(2, 3, 3).to(dtype).to(memory_format=torch.channels_last)  # type: ignore[call-overload] # torch's stubs lack this form
        model = popdist.ReplicatedModel(copy.deepcopy(plain))
        replicas = range(popdist.num_replicas())
        data = torch.randn(len(replicas), 2, 5, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
        rows = popdist.local_replicas()
        for x in model.micro_batches(data[rows.start : rows.stop]):
            model(x).square().mean().backward()

        plain.load_state_dict(model.state_dict())
        total = torch.zeros(3, 2, 3, 3, dtype=wide)
        for replica in replicas:
            loss = plain(data[replica : replica + 1]).square().mean()
            total += torch.autograd.grad(loss, plain.weight)[0].to(wide)
        assert model.weight.grad.dtype == dtype
        assert model.weight.grad.stride() == model.weight.stride()
        torch.testing.assert_close(model.weight.grad, (total / len(replicas)).to(dtype))


def rounded_gradient(
    model: popdist.ReplicatedModel, batch: tuple[Tensor, Tensor], weights: list[list[float]], dtype: torch.dtype
) -> dict[str, Tensor]:
    """The mean with each replica's gradient, and each sum of replicas, rounded to ``dtype``."""
    plain, unit = copy.deepcopy(model.module), max(map(max, weights))
    micro_batches_of = zip(*(rows.chunk(sum(map(len, weights))) for rows in batch), strict=True)
    replicas: list[list[Tensor]] = []
    for replica_weights in weights:
        found = []
        for weight, (x, y) in zip(replica_weights, micro_batches_of, strict=False):
            found.append(
                [
                    it * (weight / unit)
                    for it in torch.autograd.grad(cross_entropy(plain(x), y), [*plain.parameters()])
                ]
            )
        replicas.append(
            [tree_sum(micro_batches, torch.add).to(dtype) for micro_batches in zip(*found, strict=True)]
        )
    over = tree_sum([tree_sum(it, operator.add) for it in weights], operator.add) / unit
    sums = [tree_sum(of_replicas, torch.add) for of_replicas in zip(*replicas, strict=True)]
    assert {it.dtype for it in sums} == {dtype}
    names = [name for name, _ in plain.named_parameters()]
    return {name: it.float() / over for name, it in zip(names, sums, strict=True)}


def check_same_bits(model: popdist.ReplicatedModel, expected: dict[str, Tensor]) -> None:
    """The gradients of ``model`` are these."""
    for name, gradient in expected.items():
        found = model.get_parameter(name).grad
        assert found is not None
        assert torch.equal(found, gradient), name


def layers() -> nn.Sequential:
    """A small network in which every parameter is used."""
    return nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 4))


def law_gradients_are_rounded_where_it_is_asked_for() -> None:
    """Each replica's weighted gradient and every sum of replicas, the last one too, whoever adds them."""
    for dtype in (torch.bfloat16, torch.float16):
        model = popdist.ReplicatedModel(layers(), gradient_dtype=dtype)
        for accumulation in (1, 3):
            weights = [
                [1.0 + (3 * replica + k) % 4 for k in range(accumulation)]
                for replica in range(popdist.num_replicas())
            ]
            batch = samples(2 * popdist.num_replicas() * accumulation)
            mine = [weight for replica in popdist.local_replicas() for weight in weights[replica]]
            for _ in range(3):
                model.zero_grad()
                for x, y in model.micro_batches(share(batch), accumulation, weights=mine):
                    cross_entropy(model(x), y).backward()
                check_same_bits(model, rounded_gradient(model, batch, weights, dtype))
        if popdist.num_local_replicas() == 1:
            model.zero_grad()
            batch = samples(2 * popdist.num_replicas())
            x, y = share(batch)
            cross_entropy(model(x), y).backward()
            check_same_bits(model, rounded_gradient(model, batch, [[1.0]] * popdist.num_replicas(), dtype))


def law_a_sum_too_large_for_half_precision_is_infinite() -> None:
    """On every instance, and a GradScaler leaves out the step until its scale is small enough."""
    model = popdist.ReplicatedModel(layers(), gradient_dtype=torch.float16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    before, x = popdist.checksum(model), torch.ones(popdist.num_local_replicas(), 4)
    scales = []
    while popdist.checksum(model) == before:
        scales.append(scaler.get_scale())
        for part in model.micro_batches(x):
            scaler.scale(model(part).sum()).backward()
        last = list(model.parameters())[-1].grad
        assert last is not None
        assert (last == float("inf")).all() == (scales[-1] * popdist.num_replicas() > MOST_HALF)
        scaler.step(optimizer)
        scaler.update()
    assert scales[0] > 2 * scales[-1]
    check_equal_everywhere(model)


MOST_HALF = torch.finfo(torch.float16).max


def law_gradients_are_rounded_to_half_precision_only_and_alike() -> None:
    """Another dtype is an error, and so is one that not all instances have."""
    for wrong in (torch.float32, torch.float64, torch.int32, torch.bool, torch.complex64, "bfloat16", 16):
        with refused(popdist.GradientError, rf"gradient_dtype={wrong!r}: .* torch.bfloat16 or torch.float16"):
            popdist.ReplicatedModel(layers(), gradient_dtype=wrong)  # type: ignore[arg-type] # the subject
    if popdist.num_instances() > 1:
        with refused(
            popdist.CollectiveError, r"gradient_dtype=torch.bfloat16[^$]*gradient_dtype=None|None[^$]*bfloat16"
        ):
            popdist.ReplicatedModel(layers(), gradient_dtype=torch.bfloat16 if is_last() else None)


def address(parameter: nn.Parameter) -> int:
    """Where its gradient is."""
    assert parameter.grad is not None
    return parameter.grad.data_ptr()


def law_gradients_are_added_where_they_lie() -> None:
    """On one host: after the first step nothing but headers is sent, and each gradient keeps its place."""
    backend = context.current_group().backend
    if backend.host_group is None:
        return
    model = popdist.ReplicatedModel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    batch = samples(2 * popdist.num_replicas())
    train(model, share(batch))
    places = [address(it) for it in model.parameters()]
    with (
        mock.patch.object(backend, "all_gather", side_effect=AssertionError),
        mock.patch.object(backend, "broadcast", side_effect=AssertionError),
    ):
        for _ in range(2):
            model.zero_grad()
            train(model, share(batch))
    check_gradient(model, batch)
    assert [address(it) for it in model.parameters()] == places


def law_memory_of_models_that_are_gone_is_given_back() -> None:
    """Shared pages stay as long as a gradient is in them, and no longer."""
    host = context.current_group().backend.host_group
    if host is None:
        return
    numbers = samples(2 * popdist.num_replicas())
    wide = 1 << 19  # more than what collectives keep for themselves, which may grow on the way
    before = host.num_bytes
    model = popdist.ReplicatedModel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, wide)))
    train(model, share((numbers[0], numbers[1])))
    weight = model.get_parameter("1.weight")
    assert host.num_bytes >= before + 16 * wide
    del model
    gc.collect()
    assert weight.grad is not None
    assert weight.grad.any()
    weight.grad = None
    gc.collect()
    assert host.num_bytes < before + 16 * wide


def law_a_graph_of_gradients_is_kept() -> None:
    """Within a micro batch a gradient may be differentiated again, and passes add up."""
    model = popdist.ReplicatedModel(nn.Linear(4, 4))
    x, _ = share(samples(2 * popdist.num_replicas()))
    for part in model.micro_batches(x):
        with warnings.catch_warnings(action="ignore"):  # torch's, of a cycle between parameter and gradient
            model(part).square().mean().backward(create_graph=True)
        model.weight.grad.square().sum().backward()
    found = [it.grad.clone() for it in model.parameters() if it.grad is not None]
    model.zero_grad()
    for part in model.micro_batches(x):
        loss = model(part).square().mean()
        (slope,) = torch.autograd.grad(loss, model.weight, create_graph=True)
        (loss + slope.square().sum()).backward()
    for first, second in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(first, second.grad)


def law_no_sample_at_all_is_an_error() -> None:
    """There is no mean over nothing, on any instance."""
    model = popdist.ReplicatedModel(Net())
    with refused(popdist.BatchError, "all instances have 0 samples"):
        train(model, samples(0))


@contextmanager
def step_lost(pattern: str) -> Iterator[None]:
    """On the instances that did nothing wrong the block raises MicroBatchError; on the last one it must not."""
    if is_last():
        yield
    else:
        with refused(popdist.MicroBatchError, pattern):
            yield


def raise_error(what: str) -> None:
    """What a user's own code may do in the loop."""
    raise KeyError(what)


def leave(model: popdist.ReplicatedModel, *, by: str) -> None:
    """Start a step that the last instance leaves before its end."""
    batch = share(samples(2 * popdist.num_replicas()))
    model.zero_grad()
    with step_lost(f"instance {popdist.num_instances() - 1} left the micro_batches loop"):
        try:
            for x, y in model.micro_batches(batch):
                cross_entropy(model(x), y).backward()
                if is_last():
                    if by == "break":
                        break
                    raise_error(by)
        except KeyError:
            assert by != "break"
    assert all(parameter.grad is None for parameter in model.parameters())


def check_recovered(model: popdist.ReplicatedModel) -> None:
    """The next step is in order again on every instance."""
    batch = samples(2 * popdist.num_replicas())
    train(model, share(batch))
    check_gradient(model, batch)


def law_leaving_the_loop_is_an_error_on_every_instance() -> None:
    """By break or exception: the others hear of it, and optimizers refuse their steps; what comes next works."""
    model = popdist.ReplicatedModel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for by in ("break", "exception"):
        leave(model, by=by)
        with refused(popdist.MicroBatchError, r"without a gradient: the last step .* was lost on all instances"):
            optimizer.step()
        if by == "exception":
            popdist.barrier()
        check_recovered(model)
        optimizer.step()


def law_those_that_come_late_hear_of_it_too() -> None:
    """An instance that has left its loop, and waits no longer, tells them before the next thing that it does."""
    store = context._state.store
    if store is None:
        return
    model, name = popdist.ReplicatedModel(Net()), f"left in {popdist.num_replicas()}"
    if is_last():
        with mock.patch.object(reduction, "ABANDON_SECONDS", 0.0):
            leave(model, by="exception")
        store.set(name, "yes")
    else:
        store.wait([name])
        leave(model, by="exception")
    check_recovered(model)


def law_a_loop_within_a_loop_is_an_error_on_every_instance() -> None:
    """Of the same model: both steps are lost, on all instances; then all is well."""
    model = popdist.ReplicatedModel(Net())
    batch = share(samples(2 * popdist.num_replicas()))
    kept = model.micro_batches(batch)
    if is_last():
        next(kept)
        with refused(popdist.MicroBatchError, "a step began before the one before it had ended"):
            train(model, batch)
    else:
        for pattern in ("left the micro_batches loop", "began this loop in the middle of another one"):
            with refused(popdist.MicroBatchError, pattern):
                train(model, batch)
    check_recovered(model)


def law_a_batch_that_does_not_split_is_an_error_on_every_instance() -> None:
    """Its own error where it is, naming the place; MicroBatchError elsewhere; no gradient stays; all goes on."""
    model = popdist.ReplicatedModel(Net())
    x, y = share(samples(2 * popdist.num_replicas()))
    train(model, (x, y))
    if is_last():
        with refused(popdist.BatchError, r"batch\[1\] holds 1 samples"):
            train(model, (x, y[:1]))
    else:
        with refused(popdist.MicroBatchError, f"instance {popdist.num_instances() - 1} could not split"):
            train(model, (x, y))
    assert all(parameter.grad is None for parameter in model.parameters())
    check_recovered(model)


def law_accumulation_is_the_same_everywhere() -> None:
    """Else every instance raises and says who has which."""
    if popdist.num_instances() == 1:
        return
    model = popdist.ReplicatedModel(Net())
    with refused(popdist.CollectiveError, r"accumulation=1\).*accumulation=2\)"):
        train(model, share(samples(8 * popdist.num_replicas())), 1 + is_last())
    check_recovered(model)


def law_trained_parameters_are_the_same_everywhere() -> None:
    """Also where what is frozen has the size of what is trained elsewhere."""
    if popdist.num_instances() == 1:
        return
    model = popdist.ReplicatedModel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    model.module.get_submodule(str(int(is_last()))).requires_grad_(requires_grad=False)
    with refused(popdist.CollectiveError, "names .* names "):
        train(model, share(samples(popdist.num_replicas())))
    popdist.barrier()


def law_sparse_gradients_are_refused() -> None:
    """Replicas add dense ones; the message names the parameter."""
    if popdist.num_replicas() == 1:
        return
    model = popdist.ReplicatedModel(nn.Embedding(3, 2, sparse=True))
    with refused(popdist.CollectiveError, "the gradient of weight is sparse"):
        for ids in model.micro_batches(torch.zeros(popdist.num_local_replicas(), dtype=torch.int64)):
            embedding(ids, model.weight, sparse=True).sum().backward()
    popdist.barrier()


def law_weights_become_those_of_the_root() -> None:
    """Parameters and buffers of every dtype, tied ones staying tied, of a module or of a state dict."""
    root = popdist.num_instances() - 1
    torch.manual_seed(popdist.instance_index())
    net = Net()
    net.register_buffer("flags", torch.rand(5) > 0.5)
    net.register_buffer("low", torch.randn(3, 2, dtype=torch.bfloat16).t())
    net.register_buffer("phase", torch.randn(2, dtype=torch.complex64))
    expected = popdist.checksum(net)

    popdist.broadcast_weights(net, root)

    assert net.second.weight is net.first.weight
    torch.manual_seed(root)
    own = Net()
    assert torch.equal(own.first.weight, net.first.weight)
    assert torch.equal(own.statistics, net.statistics)
    assert (popdist.checksum(net) == expected) == is_last()
    state = {"x": torch.full((2,), float(popdist.instance_index())), "step": 3}
    popdist.broadcast_weights(state, root)
    assert state["x"].tolist() == [root, root]  # type: ignore[attr-defined] # a tensor by its name


def law_different_models_are_refused() -> None:
    """Before any weight changes; the message names who differs."""
    if popdist.num_instances() == 1:
        return
    net = nn.Linear(3, 4 if is_last() else 2)
    before = popdist.checksum(net)
    with refused(
        popdist.WeightsError, f"of instance {popdist.num_instances() - 1} differ from those of instance 0"
    ):
        popdist.ReplicatedModel(net)
    assert popdist.checksum(net) == before
    with refused(popdist.WeightsError, "no such instance"):
        popdist.broadcast_weights(net, popdist.num_instances())


def law_plain_loops_reduce_after_backward() -> None:
    """all_reduce_gradients gives the bits of ReplicatedModel; with several local replicas it shows that loop."""
    model = popdist.ReplicatedModel(Net())
    plain = copy.deepcopy(model.module)
    batch = samples(2 * popdist.num_replicas())
    x, y = share(batch)
    cross_entropy(plain(x), y).backward()
    if popdist.num_local_replicas() > 1:
        with refused(popdist.BatchError, r"for x, y in model\.micro_batches\(batch\)"):
            popdist.all_reduce_gradients(plain)
        return
    single = copy.deepcopy(plain)

    popdist.all_reduce_gradients(plain)
    popdist.all_reduce_gradients(single, op="sum")

    train(model, (x, y))
    check_equal_everywhere(plain)
    for mean, total, replicated in zip(plain.parameters(), single.parameters(), model.parameters(), strict=True):
        assert (mean.grad is None) == (replicated.grad is None)
        if mean.grad is not None and total.grad is not None and replicated.grad is not None:
            assert torch.equal(mean.grad, replicated.grad)
            assert torch.equal(mean.grad, total.grad / popdist.num_instances())


def law_a_part_of_the_job_has_no_gradient() -> None:
    """Within execute_on_instances the other replicas are missing."""
    if popdist.num_instances() == 1:
        return
    model = popdist.ReplicatedModel(Net())

    def alone() -> None:
        with refused(popdist.CollectiveError, "on instance 0 only"):
            train(model, samples(4))

    popdist.execute_on_instances({0}, alone)
    check_recovered(model)
