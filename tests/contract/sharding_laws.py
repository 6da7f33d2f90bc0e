"""The laws of the sharded optimizer, the same for any number of instances; each runs all of them."""

import copy
import gc
import pickle
import sys
import warnings
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

import popdist
import poptorch
from popdist.checkpoint import load_latest, save
from popdist.errors import BackendError
from popdist.exchange.host_memory.host_group import HostGroup
from popdist.exchange.host_memory.segments import whole_pages
from popdist.gradients.partial_gradients import PartialGradient
from popdist.job import context
from popdist.optim import LAMB, LARS, LowPrecision
from tests.contract.collective_laws import assert_leaves, refused
from tests.contract.laws import TIMEOUT_SECONDS, laws_of
from tests.contract.training_laws import Net, is_last, samples, share, train
from tests.torch_names import HAS_MUON

OPTIMIZERS: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (optim.SGD, {"lr": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (optim.Adam, {"amsgrad": True, "maximize": True, "foreach": True}),
    (optim.AdamW, {"weight_decay": 0.1}),
    (optim.NAdam, {}),
    (optim.RAdam, {}),
    (optim.Adamax, {}),
    (optim.RMSprop, {"centered": True, "momentum": 0.5}),
    (optim.Rprop, {}),
    (optim.Adagrad, {}),
    (optim.Adadelta, {}),
    (optim.ASGD, {}),
    (LAMB, {"lr": 0.01, "max_weight_norm": 3.0}),
    (LAMB, {"lr": 0.01, "bias_correction": False, "weight_decay": 0.0, "maximize": True}),
    (LARS, {"lr": 0.5, "weight_decay": 0.1, "nesterov": True, "foreach": False}),
]


def run_all(folder: Path, apart: bool) -> int:  # noqa: FBT001 - how popdist.launch passes it
    """Every law of this file, perhaps as if no two instances shared memory; how many there were."""
    popdist.init(timeout_seconds=TIMEOUT_SECONDS)
    backend: Any = context.current_group().backend
    if apart:
        type(backend).host_group = None
    else:
        assert (host_group() is None) == (popdist.num_instances() == 1)
    laws = laws_of(sys.modules[__name__])
    for law in laws:
        popdist.barrier()
        law(folder) if law.__code__.co_argcount else law()
    return len(laws)


def host_group() -> HostGroup | None:
    """Those that share this host's memory, in a job of one host or of several."""
    backend = context.current_group().backend
    return backend.host_group or (backend.local_collectives.group if backend.local_collectives else None)


class Wide(nn.Module):
    """Parameters of several shapes, memory orders and dtypes; none divides evenly, one has a single element."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution = nn.Conv2d(3, 7, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload] # torch's stubs lack this form
        self.hidden = nn.Linear(7 * 36, 61)
        self.last = nn.Linear(61, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.phases = nn.Parameter(torch.randn(5, dtype=torch.complex64), requires_grad=dtype == torch.float32)
        self.wide = nn.Parameter(torch.randn(301, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.never = nn.Parameter(torch.randn(40))
        if dtype != torch.float32:
            self.hidden.to(dtype)
            self.last.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """A loss."""
        rows = self.convolution(x).flatten(1).to(self.hidden.weight.dtype)
        out = self.last(torch.relu(self.hidden(rows))).float() * self.scale + self.frozen
        loss: Tensor = out.square().mean() + (self.phases * out).abs().mean() + self.wide.square().mean()
        return loss


NUM_TRAINED = 9
"""Parameters of it that get a gradient."""


def step(*models: popdist.ReplicatedModel, number: int = 0, add: bool = False) -> None:
    """Gradients of the same samples for each model, or added to those that it has."""
    x = torch.randn(popdist.num_replicas(), 3, 8, 8, generator=torch.Generator().manual_seed(number))
    rows = popdist.local_replicas()
    for model in models:
        if not add:
            model.zero_grad()
        for part in model.micro_batches(x[rows.start : rows.stop], add=add):
            model(part).backward()


def loss_of(model: popdist.ReplicatedModel, number: int) -> float:
    """A closure, once ``model`` and ``number`` are given."""
    step(model, number=number)
    return float(number)


def pair(
    optimizer_class: type[Optimizer],
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> tuple[popdist.ReplicatedModel, Optimizer, popdist.ReplicatedModel, popdist.ShardedOptimizer]:
    """A model with the optimizer itself, and another one with the sharded one."""
    model, other = popdist.ReplicatedModel(Wide(dtype)), popdist.ReplicatedModel(Wide(dtype))
    plain = optimizer_class(model.parameters(), **settings)
    return model, plain, other, popdist.ShardedOptimizer(other, optimizer_class, **settings)


def check_same(left: popdist.ReplicatedModel, right: popdist.ReplicatedModel) -> None:
    """Equal bits, here and on every other instance."""
    assert popdist.checksum(left) == popdist.checksum(right)
    digest = torch.tensor([int(popdist.checksum(right)[:15], 16)])
    assert (popdist.all_gather(digest) == digest).all()


def train_both(
    model: popdist.ReplicatedModel,
    plain: Optimizer,
    other: popdist.ReplicatedModel,
    sharded: popdist.ShardedOptimizer,
    numbers: Iterable[int],
) -> None:
    """A step of both on each of these samples; the weights have equal bits then."""
    for number in numbers:
        step(model, other, number=number)
        plain.step()
        sharded.step()
    check_same(model, other)


def check_same_state(left: dict[str, Any], right: dict[str, Any]) -> None:
    """Equal settings, and state of equal bits, dtypes and strides."""
    assert left["param_groups"] == right["param_groups"]
    assert list(left["state"]) == list(right["state"])
    for index, state in left["state"].items():
        assert state.keys() == right["state"][index].keys()
        for name, value in state.items():
            other = right["state"][index][name]
            if isinstance(value, Tensor):
                assert torch.equal(value, other), (index, name)
                assert (value.dtype, value.stride()) == (other.dtype, other.stride()), (index, name)
            else:
                assert value == other


def law_bits_are_those_without_it() -> None:
    """Of weights and of the state, for every optimizer of torch that treats each element by itself; LAMB; LARS."""
    for optimizer_class, settings in OPTIMIZERS:
        model, plain, other, sharded = pair(optimizer_class, **settings)
        train_both(model, plain, other, sharded, range(2))
        check_same_state(plain.state_dict(), sharded.state_dict())
        assert other.never.grad is None
        assert popdist.checksum(Wide()) != popdist.checksum(other)


def law_rounded_gradients_have_the_same_bits() -> None:
    """Whether an instance gets all of their sums or its part; clipped by both."""
    for dtype in (torch.bfloat16, torch.float16):
        model, other = (popdist.ReplicatedModel(Wide(), gradient_dtype=dtype) for _ in range(2))
        plain = optim.AdamW(model.parameters(), lr=0.1)
        sharded = popdist.ShardedOptimizer(other, optim.AdamW, lr=0.1)
        for number in range(3):
            step(model, other, number=number)
            assert num_in_parts(other) == (NUM_TRAINED if has_parts() else 0)
            for net in (model, other):
                net.clip_grad_norm_(0.1)
            plain.step()
            sharded.step()
        check_same(model, other)


def law_whole_numbers_stay_as_they_are() -> None:
    """A parameter of them is never trained; the others are, and the state is theirs."""
    net = nn.Linear(4, 4)
    net.register_parameter("places", nn.Parameter(torch.arange(9), requires_grad=False))
    model = popdist.ReplicatedModel(net)
    before = popdist.checksum({"weight": model.weight})
    optimizer = popdist.ShardedOptimizer(model, torch.optim.AdamW, lr=0.1)
    for x in model.micro_batches(torch.ones(popdist.num_local_replicas(), 4)):
        model(x).square().sum().backward()
    optimizer.step()
    assert popdist.checksum({"weight": model.weight}) != before
    assert model.places.tolist() == list(range(9))
    assert len(optimizer.state_dict()["state"]) == 2


def law_half_precision_has_the_same_bits() -> None:
    """Where instructions for many elements round otherwise than those for one, and fused kernels."""
    kinds: list[tuple[type[Optimizer], dict[str, Any]]] = [
        (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        (optim.AdamW, {"fused": True}),
    ]
    for kind, settings in kinds:
        model, plain, other, sharded = pair(kind, torch.bfloat16, **settings)
        train_both(model, plain, other, sharded, range(4))


def law_each_instance_holds_its_part_of_the_state() -> None:
    """All hold it once, and nobody much more than the others."""
    model = popdist.ReplicatedModel(nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100)))
    optimizer = popdist.ShardedOptimizer(model, optim.AdamW)
    rows = popdist.num_local_replicas()
    for x in model.micro_batches(torch.randn(rows, 100)):
        model(x).sum().backward()
    optimizer.step()
    held = sum(
        it.numel() for state in optimizer.own_state.values() for name, it in state.items() if name != "step"
    )
    total = 2 * 2 * 10_100
    everybody = popdist.all_gather(torch.tensor(held))
    assert everybody.sum() == total
    assert abs(held - total / popdist.num_instances()) <= 4 * 128


def law_groups_schedules_and_closures_are_torchs() -> None:
    """Each group has its settings, a schedule changes them, a group may come later, a closure gives the loss."""
    model, other = popdist.ReplicatedModel(Wide()), popdist.ReplicatedModel(Wide())

    def groups(net: popdist.ReplicatedModel) -> list[dict[str, Any]]:
        return [
            {"params": [net.hidden.weight, net.scale], "weight_decay": 0.3, "name": "decayed"},
            {"params": list(net.convolution.parameters()), "lr": 0.05},
        ]

    plain = optim.SGD(groups(model), lr=0.1, momentum=0.9)
    sharded = popdist.ShardedOptimizer(other, optim.SGD, groups(other), lr=0.1, momentum=0.9)
    schedules = [optim.lr_scheduler.ExponentialLR(it, 0.7) for it in (plain, sharded)]
    for number in range(4):
        for net, it, schedule in zip((model, other), (plain, sharded), schedules, strict=True):
            if number == 2:
                it.add_param_group({"params": list(net.last.parameters()), "momentum": 0.5})
            assert it.step(partial(loss_of, net, number)) == number
            schedule.step()
    check_same(model, other)
    check_same_state(plain.state_dict(), sharded.state_dict())


def law_schedules_may_change_any_setting() -> None:
    """Momentum and betas as well, by step or by a metric; gradients may be set to zero in place of None."""
    schedulers = optim.lr_scheduler
    kinds: list[tuple[type[Optimizer], dict[str, Any]]] = [(optim.SGD, {"momentum": 0.9}), (optim.AdamW, {})]
    for kind, settings in kinds:
        model, plain, other, sharded = pair(kind, lr=0.1, **settings)
        for net, optimizer in ((model, plain), (other, sharded)):
            cycle = schedulers.OneCycleLR(optimizer, max_lr=0.3, total_steps=6)
            plateau = schedulers.ReduceLROnPlateau(optimizer, patience=0)
            for number in range(4):
                step(net, number=number)
                optimizer.step()
                cycle.step()
                plateau.step(1.0)
                optimizer.zero_grad(set_to_none=False)
            assert not net.hidden.weight.grad.any()
        check_same(model, other)
        check_same_state(plain.state_dict(), sharded.state_dict())


def law_tied_parameters_are_updated_once() -> None:
    """They are one parameter under two names, of which the gradients add up."""
    model = popdist.ReplicatedModel(Net())
    other = popdist.ReplicatedModel(copy.deepcopy(model.module))
    optimizers = (optim.AdamW(model.parameters()), popdist.ShardedOptimizer(other, optim.AdamW))
    for net, optimizer in zip((model, other), optimizers, strict=True):
        for _ in range(2):
            train(net, share(samples(2 * popdist.num_replicas())))
            optimizer.step()
    assert other.second.weight is other.first.weight
    check_same(model, other)


def law_layers_may_come_later() -> None:
    """What the model got after the optimizer was made is a group like any other."""
    nets = []
    for is_sharded in (False, True):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(30, 30))
        net = popdist.ReplicatedModel(layers)
        optimizer: Optimizer = optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        if is_sharded:
            optimizer = popdist.ShardedOptimizer(net, optim.SGD, lr=0.1, momentum=0.9)
        for number in range(3):
            for x in net.micro_batches(torch.ones(popdist.num_local_replicas(), 30)):
                net(x).square().mean().backward()
            optimizer.step()
            if number == 1:
                layers.append(nn.Linear(30, 5))
                optimizer.add_param_group({"params": list(layers[1].parameters()), "lr": 0.3})
        nets.append(net)
    check_same(*nets)


def law_a_scaler_skips_the_same_steps() -> None:
    """One replica's infinity keeps every instance from stepping, and scales shrink alike; LAMB and LARS, too."""
    for optimizer_class in (optim.AdamW, LAMB, LARS):
        model, plain, other, sharded = pair(optimizer_class)
        for net in (model, other):
            net.phases.requires_grad_(requires_grad=False)  # torch's scaler knows no complex numbers
        scalers = [torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2) for _ in range(2)]
        for number in range(5):
            before = popdist.checksum(other)
            for net, optimizer, scaler in ((model, plain, scalers[0]), (other, sharded, scalers[1])):
                x = torch.ones(popdist.num_local_replicas(), 3, 8, 8)
                for part in net.micro_batches(x):
                    bad = [float("inf") if number == it and is_last() else 0.0 for it in (2, 3)]
                    scaler.scale(net(part) * (1 + bad[0]) + net.scale * bad[1]).backward()
                scaler.unscale_(optimizer)
                (nn.utils.clip_grad_norm_ if number % 2 else clip)(net.parameters(), 0.1)
                scaler.step(optimizer)
                scaler.update()
            assert (popdist.checksum(other) == before) == (number in (2, 3)), (optimizer_class, number)
        check_same(model, other)
        assert scalers[0].state_dict() == scalers[1].state_dict()
        if optimizer_class is not LARS:  # counts no steps
            assert plain.state_dict()["state"][0]["step"] == sharded.state_dict()["state"][0]["step"] == 3


def clip(parameters: Iterable[nn.Parameter], limit: float) -> None:
    """In a way of one's own."""
    for it in parameters:
        if it.grad is not None:
            it.grad.mul_(limit)


def law_clipping_has_torchs_bits() -> None:
    """Of the norm and of the gradients, for each norm; one that is not finite is an error on demand."""
    model, _, other, sharded = pair(optim.SGD, lr=0.1)
    for norm_type in (2.0, 1.0, float("inf")):
        step(model, other)
        expected = nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type)
        assert torch.equal(other.clip_grad_norm_(0.01, norm_type), expected)
        assert num_in_parts(other) == (NUM_TRAINED if has_parts() else 0)
        for left, right in zip(model.parameters(), other.parameters(), strict=True):
            assert (left.grad is None) == (right.grad is None)
            assert left.grad is None or right.grad is None or torch.equal(left.grad, right.grad)
    other.hidden.weight.grad[0, 0] = float("nan")
    with refused(RuntimeError, "the norm is nan, and error_if_nonfinite=True"):
        other.clip_grad_norm_(1.0, error_if_nonfinite=True)
    other.zero_grad()
    assert other.clip_grad_norm_(1.0) == 0
    assert sharded.param_groups


def has_parts() -> bool:
    """Whether gradients are sent over a network, so that instances get only what they update."""
    return popdist.num_instances() > 1 and context.current_group().backend.host_group is None


def num_in_parts(model: popdist.ReplicatedModel) -> int:
    """Of its gradients."""
    return sum(isinstance(it.grad, PartialGradient) for it in model.parameters())


def replace_data(gradient: Tensor) -> int:
    """As older programs change gradients."""
    gradient.data = gradient.data * 2
    return 0


def law_an_instance_interrupted_in_an_update_leaves() -> None:
    """Before it has sent its part of the weights, which the others wait for."""

    def update(come: Callable[[], object]) -> None:
        model = popdist.ReplicatedModel(nn.Linear(2, 1))
        optimizer = popdist.ShardedOptimizer(model, optim.SGD, lr=0.1)
        for part in model.micro_batches(torch.ones(popdist.num_replicas(), 2)):
            model(part).sum().backward()
        come()
        optimizer.step()

    assert_leaves(r"ShardedOptimizer\.step\(\)", update, within="report")


def law_who_reads_a_gradient_in_parts_gets_all_of_it() -> None:
    """By any way that torch has to read one, with the bits it has elsewhere; then all are ordinary tensors."""
    reads: list[Callable[[Tensor], Any]] = [
        torch.norm,
        lambda it: it.numpy().copy(),
        lambda it: it.tolist(),
        copy.deepcopy,
        lambda it: it.add_(1.0).clone(),
        lambda it: torch.stack([it, it]),
        lambda it: it[:1] * 3,
        lambda it: pickle.loads(pickle.dumps(it)),  # noqa: S301 - the subject
        torch.utils.dlpack.from_dlpack,
        replace_data,
    ]
    model, _, other, sharded = pair(optim.SGD, lr=0.1)
    for number, read in enumerate(reads):
        step(model, other, number=number)
        assert num_in_parts(other) == (NUM_TRAINED if has_parts() else 0)
        assert num_in_parts(model) == 0
        found, expected = (torch.as_tensor(read(it.last.weight.grad)) for it in (other, model))
        assert torch.equal(found, expected), number
        assert num_in_parts(other) == 0
        for left, right in zip(model.parameters(), other.parameters(), strict=True):
            assert (left.grad is None) == (right.grad is None)
            assert left.grad is None or right.grad is None or torch.equal(left.grad, right.grad)
    if has_parts():
        step(other)
        with refused(popdist.CollectiveError, r"barrier.*gather 9 gradients.*read them on all instances"):
            other.last.bias.grad.norm() if is_last() else popdist.barrier()
        assert "last.bias" in repr(other.last.bias.grad)
        assert torch.equal(torch.stack([other.last.bias.grad])[0], gradient_alone(model, other).last.bias.grad)
    del sharded
    gc.collect()
    step(other)
    assert num_in_parts(other) == 0


def gradient_alone(model: popdist.ReplicatedModel, other: popdist.ReplicatedModel) -> popdist.ReplicatedModel:
    """``model`` with the gradient of a step from the weights of ``other``."""
    model.load_state_dict(other.state_dict())
    step(model)
    return model


def law_gradients_are_whole_where_another_optimizer_needs_them() -> None:
    """One that has a part of the model, beside a sharded one that has the rest."""
    model, other = popdist.ReplicatedModel(Wide()), popdist.ReplicatedModel(Wide())
    pairs = []
    for net, make in ((model, optim.SGD), (other, partial(popdist.ShardedOptimizer, other, optim.SGD))):
        rest = [it for name, it in net.named_parameters() if not name.startswith("last")]
        pairs.append((make(rest, lr=0.1), optim.SGD(net.last.parameters(), lr=0.1)))
    step(model, other)
    assert num_in_parts(other) == 0
    for optimizers in pairs:
        for it in optimizers:
            it.step()
    check_same(model, other)


def law_gradients_of_several_loops_are_added() -> None:
    """Whether they are in parts or not, and whether or not anybody clips or reads them in between."""
    model, plain, other, sharded = pair(optim.Adam, lr=0.1)
    for change in ("none", "clip", "read"):
        for number in range(3):
            step(model, other, number=number, add=number > 0)
            if number == 1 and change == "clip":
                model.clip_grad_norm_(0.01)
                other.clip_grad_norm_(0.01)
            elif number == 1 and change == "read":
                assert torch.equal(other.last.weight.grad, model.last.weight.grad)
        plain.step()
        sharded.step()
    check_same(model, other)


def law_backward_passes_outside_the_loop_add_to_what_is_there() -> None:
    """Whether that is in parts or not, and whether or not anybody clips it."""
    if popdist.num_local_replicas() > 1 or popdist.num_instances() == 1:
        return
    model, plain, other, sharded = pair(optim.SGD, lr=0.1)
    for net, optimizer in ((model, plain), (other, sharded)):
        for number in range(3):
            x = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(number))
            net(x * (1 + popdist.instance_index())).backward()
            if number == 1:
                net.clip_grad_norm_(0.01)
        optimizer.step()
    check_same(model, other)


def law_states_load_either_way_round() -> None:
    """The sharded optimizer goes on from the state of one that is not, and that one from its."""
    model, plain, other, sharded = pair(optim.AdamW, lr=0.01)
    train_both(model, plain, other, sharded, range(2))
    whole, gathered = copy.deepcopy(plain.state_dict()), sharded.state_dict()
    plain, sharded = optim.AdamW(model.parameters()), popdist.ShardedOptimizer(other, optim.AdamW)
    plain.load_state_dict(gathered)
    sharded.load_state_dict(whole)
    assert sharded.param_groups[0]["lr"] == 0.01
    train_both(model, plain, other, sharded, [2])
    check_same_state(plain.state_dict(), sharded.state_dict())


def law_checkpoints_hold_the_whole_state(folder: Path) -> None:
    """One that the sharded optimizer saved is loaded by one that is not, and the other way round."""
    model, plain, other, sharded = pair(optim.AdamW, lr=0.01)
    train_both(model, plain, other, sharded, [0])
    save(folder / "sharded", model=other, optimizer=sharded)
    save(folder / "plain", model=model, optimizer=plain)
    new_model, new_plain, new_other, new_sharded = pair(optim.AdamW)
    load_latest(folder / "sharded", model=new_model, optimizer=new_plain)
    load_latest(folder / "plain", model=new_other, optimizer=new_sharded)
    train_both(new_model, new_plain, new_other, new_sharded, [1])
    with refused(popdist.CheckpointError, "its settings are"):
        load_latest(folder / "plain", model=other, optimizer=popdist.ShardedOptimizer(other, optim.SGD, lr=0.1))


def law_checkpoints_go_on_in_jobs_of_any_size(folder: Path) -> None:
    """With the optimizer itself as with the sharded one; the jobs of all tests leave theirs in one place."""
    place = folder.parent / "of any size"
    model, plain, other, sharded = pair(optim.AdamW, lr=0.01)
    for net, optimizer in ((model, plain), (other, sharded)):
        if place.exists():
            load_latest(place, model=net, optimizer=optimizer)
    check_same_state(plain.state_dict(), sharded.state_dict())
    train_both(model, plain, other, sharded, [popdist.num_instances()])
    save(place, model=other, optimizer=sharded)


class Scaled(Optimizer):
    """Steps by the norm of the whole parameter, under a name that nobody knows."""

    def __init__(self, params: ParamsT, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override] # torch's has two overloads
        """Scale by the norm."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad * group["lr"] * parameter.norm())


class Lamb(Scaled):
    """The same under a name that is known."""


class Turning(Scaled):
    """Steps as SGD does, until it is told to look at the whole."""

    has_turned = False

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override] # as above
        """Scale by the norm, or not."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    factor = parameter.norm() if self.has_turned else 1.0
                    parameter.sub_(parameter.grad * group["lr"] * factor)


def law_an_optimizer_that_turns_is_refused_in_training() -> None:
    """On every instance, in a checked step, before anything was updated."""
    model = popdist.ReplicatedModel(nn.Linear(32, 64))
    optimizer = popdist.ShardedOptimizer(model, Turning, lr=0.1)
    for has_turned in (False, True):
        for x in model.micro_batches(torch.ones(popdist.num_local_replicas(), 32)):
            model(x).square().sum().backward()
        before = popdist.checksum(model)
        with mock.patch.object(Turning, "has_turned", has_turned):
            if has_turned:
                with refused(popdist.OptimizerError, "cannot shard Turning: it updates a part of a parameter"):
                    optimizer.step()
            else:
                optimizer.step()
        assert (popdist.checksum(model) == before) == has_turned


def law_optimizers_that_look_at_whole_parameters_are_refused() -> None:
    """With the reason, whether the name is known or the bits tell."""
    model = popdist.ReplicatedModel(Net())
    reasons: dict[Any, str] = {
        optim.LBFGS: "inner products",
        optim.Adafactor: "rows and columns",
        optim.SparseAdam: "sparse",
        Lamb: "norms of the whole parameter",
    }
    if HAS_MUON:
        reasons[optim.Muon] = "orthogonal"
    for kind, reason in reasons.items():
        with refused(popdist.OptimizerError, rf"cannot shard {kind.__name__}: it .*{reason}"):
            popdist.ShardedOptimizer(model, kind)
    with refused(popdist.OptimizerError, "updates a part of a parameter to other bits than the whole"):
        popdist.ShardedOptimizer(model, Scaled)


def law_parameters_are_one_copy_on_a_host() -> None:
    """What one instance writes, all read; another optimizer, which would step once per instance, is refused."""
    if host_group() is None:
        return
    host = host_group()
    assert host is not None
    model = popdist.ReplicatedModel(Net())
    with torch.no_grad():
        model.first.weight.fill_(1.0 + popdist.instance_index())
    optimizer = popdist.ShardedOptimizer(model, optim.SGD, lr=0.1)
    assert (model.first.weight == 1.0 + popdist.instance_index() - host.rank).all()
    popdist.barrier()
    with torch.no_grad():
        if host.rank == host.size - 1:
            model.first.weight.fill_(7.0)
    popdist.barrier()
    assert (model.first.weight == 7.0).all()
    with refused(
        popdist.OptimizerError, r"SGD.step\(\) on a parameter of shape .* that all instances of this host share"
    ):
        optim.SGD(model.parameters(), lr=0.1).step()
    train(model, share(samples(popdist.num_replicas())))
    optimizer.step()
    own = copy.deepcopy(model)
    optim.SGD(own.parameters(), lr=0.1).step()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    optim.SGD(model.parameters(), lr=0.1).step()


def law_what_does_not_fit_is_refused() -> None:
    """Another model's parameter, no class, no model, gaps in memory, a parameter that was moved."""
    model = popdist.ReplicatedModel(Net())
    with refused(popdist.OptimizerError, r"shape \(3, 3\) is none of the model's"):
        popdist.ShardedOptimizer(model, optim.SGD, [nn.Parameter(torch.zeros(3, 3))])
    with refused(popdist.OptimizerError, "holds one of them twice"), warnings.catch_warnings(action="ignore"):
        popdist.ShardedOptimizer(model, optim.SGD, [model.first.bias, model.first.bias])
    with refused(popdist.OptimizerError, "takes a class of optimizers"):
        popdist.ShardedOptimizer(model, optim.SGD(model.parameters()))  # type: ignore[arg-type] # the subject
    with refused(popdist.OptimizerError, "takes a popdist.ReplicatedModel, not a Net"):
        popdist.ShardedOptimizer(Net(), optim.SGD)  # type: ignore[arg-type] # the subject
    optimizer = popdist.ShardedOptimizer(model, optim.SGD)
    model.first.weight.data = model.first.weight.data.clone()
    with refused(popdist.OptimizerError, "first.weight was given other memory"):
        optimizer.step()


def law_instances_must_do_the_same() -> None:
    """Other optimizers or other calls on one instance are an error on all of them."""
    if popdist.num_instances() == 1:
        return
    model = popdist.ReplicatedModel(Net())
    other = popdist.ReplicatedModel(Wide())
    if is_last():
        other.hidden.weight.data = other.hidden.weight.data.t().contiguous().t()
    with refused(popdist.CollectiveError, "names and shapes"):
        popdist.ShardedOptimizer(other, optim.SGD)
    with refused(popdist.CollectiveError, r"ShardedOptimizer\(Adam.*ShardedOptimizer\(SGD"):
        popdist.ShardedOptimizer(model, optim.SGD if is_last() else optim.Adam)
    optimizer = popdist.ShardedOptimizer(model, optim.SGD)
    train(model, share(samples(popdist.num_replicas())))
    with refused(popdist.CollectiveError, r"ShardedOptimizer.state_dict.*ShardedOptimizer.step|step.*state_dict"):
        optimizer.state_dict() if is_last() else optimizer.step()
    optimizer.step()


def law_trust_ratios_are_those_of_whole_parameters() -> None:
    """With groups that have none, a group that comes later, other memory orders, and a state that goes on."""
    nets = [popdist.ReplicatedModel(Wide()) for _ in range(2)]
    optimizers: list[Optimizer] = []
    makers: list[Callable[..., Optimizer]] = [LAMB, partial(popdist.ShardedOptimizer, nets[1], LAMB)]
    for net, make in zip(nets, makers, strict=True):
        groups = [
            {"params": [net.hidden.weight, net.wide]},
            {"params": [net.scale, *net.convolution.parameters()], "trust_ratio": False, "weight_decay": 0.0},
        ]
        optimizers.append(make(groups, lr=0.01))
    schedules = [optim.lr_scheduler.ExponentialLR(it, 0.7) for it in optimizers]
    for number in range(4):
        step(*nets, number=number)
        if number == 1:
            for net, it in zip(nets, optimizers, strict=True):
                it.add_param_group({"params": [net.last.weight, net.phases], "lr": 0.1})
        if number == 2:
            states = [it.state_dict() for it in optimizers]
            check_same_state(*states)
            for it, state in zip(optimizers, reversed(states), strict=True):
                it.load_state_dict(copy.deepcopy(state))
        for it, schedule in zip(optimizers, schedules, strict=True):
            it.step()
            schedule.step()
    check_same(*nets)


def law_a_failure_before_norms_are_exchanged_is_one_on_all() -> None:
    """Nobody waits for norms that do not come, and the next step works."""
    model = popdist.ReplicatedModel(nn.Linear(100, 100))
    optimizer = popdist.ShardedOptimizer(model, LAMB, lr=0.1)
    for x in model.micro_batches(torch.randn(popdist.num_local_replicas(), 100)):
        model(x).sum().backward()
    before = popdist.checksum(model)
    last = f"instance {popdist.num_instances() - 1}"
    with ExitStack() as stack:
        if is_last():
            stack.enter_context(mock.patch.object(LAMB, "prepare", side_effect=ValueError("no room")))
        with refused(*((ValueError, "no room") if is_last() else (popdist.OptimizerError, f"{last} failed in"))):
            optimizer.step()
    popdist.barrier()
    assert popdist.checksum(model) == before
    optimizer.step()
    assert popdist.checksum(model) != before


def low_precision_pair(
    dtype: torch.dtype,
    **settings: Any,
) -> tuple[popdist.ReplicatedModel, Optimizer, popdist.ReplicatedModel, popdist.ShardedOptimizer]:
    """A model in half precision with LowPrecision, and another one with the sharded one; two groups of each."""
    models, optimizers = [], []
    for is_sharded in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(60, 61), nn.Tanh(), nn.Linear(61, 5)).to(dtype)
        net.append(nn.LayerNorm(5))
        model = popdist.ReplicatedModel(net)
        groups = [{"params": list(net[2].parameters())}, {"params": [*net[0].parameters(), *net[3].parameters()]}]
        given = {"optimizer_class": optim.AdamW, "lr": 0.01, "seed": 3, **settings}
        make = (
            partial(popdist.ShardedOptimizer, model) if is_sharded else lambda kind, *rest, **kw: kind(*rest, **kw)
        )
        optimizers.append(make(LowPrecision, groups, **given))
        models.append(model)
    return models[0], optimizers[0], models[1], optimizers[1]


def low_precision_step(
    *pairs: tuple[popdist.ReplicatedModel, Optimizer], number: int, scaler: torch.amp.GradScaler | None = None
) -> None:
    """With the same samples for each pair; with a scaler one replica overflows in step 1."""
    rows = popdist.local_replicas()
    x = torch.randn(popdist.num_replicas(), 60, generator=torch.Generator().manual_seed(number))
    scale = 1.0 if scaler is None else scaler.get_scale()
    for model, optimizer in pairs:
        for part in model.micro_batches(x[rows.start : rows.stop]):
            first, activation, second, last = model.module.children()
            hidden = second(activation(first(part.to(next(first.parameters()).dtype))))
            is_too_large = scaler is not None and number == 1 and bool((part == x[-1]).all())
            loss = last(hidden.float()).square()[:, :3].mean() * (1e30 if is_too_large else 1.0)
            (loss * scale).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)


def law_low_precision_has_the_bits_of_one_that_is_not_sharded(folder: Path) -> None:
    """Weights, moments and counts, in both halves; states load either way, in jobs of any size."""
    for dtype in (torch.bfloat16, torch.float16):
        model, plain, other, sharded = low_precision_pair(dtype)
        place = folder.parent / f"low precision {dtype}"
        if place.exists():
            load_latest(place, model=model, optimizer=plain)
            load_latest(place, model=other, optimizer=sharded)
        for number in range(2):
            low_precision_step((model, plain), (other, sharded), number=number)
        check_same(model, other)
        states = plain.state_dict(), sharded.state_dict()
        check_same_state(*states)
        assert states[1]["param_groups"][0]["num_steps"] % 2 == 0
        assert {it["exp_avg"].dtype for it in states[1]["state"].values()} == {torch.bfloat16}
        plain.load_state_dict(copy.deepcopy(states[1]))
        sharded.load_state_dict(copy.deepcopy(states[0]))
        save(place, model=other, optimizer=sharded)
        low_precision_step((model, plain), (other, sharded), number=2)
        check_same(model, other)
        check_same_state(plain.state_dict(), sharded.state_dict())


def law_low_precision_skips_what_a_scaler_finds_anywhere() -> None:
    """One replica's overflow in float16 keeps every instance from stepping, and the step is not counted."""
    model, plain, other, sharded = low_precision_pair(torch.float16)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
    for number in range(3):
        before = popdist.checksum(other)
        for pair_of_both, scaler in zip(((model, plain), (other, sharded)), scalers, strict=True):
            scaler.scale(torch.zeros(()))  # makes its scale
            low_precision_step(pair_of_both, number=number, scaler=scaler)
            scaler.update()
        assert (popdist.checksum(other) == before) == (number == 1)
    check_same(model, other)
    check_same_state(plain.state_dict(), sharded.state_dict())
    assert sharded.param_groups[0]["num_steps"] == 2
    assert [it.get_scale() for it in scalers] == [512.0, 512.0]


def law_low_precision_is_refused_where_it_does_not_fit() -> None:
    """An optimizer inside that is not elementwise, none at all, and a state of another precision."""
    model = popdist.ReplicatedModel(nn.Linear(64, 64).to(torch.bfloat16))
    with refused(popdist.OptimizerError, "LowPrecision cannot hold Adafactor"):
        popdist.ShardedOptimizer(model, LowPrecision, optimizer_class=optim.Adafactor)
    with refused(popdist.OptimizerError, "optimizer_class=None must be a class of optimizers"):
        popdist.ShardedOptimizer(model, LowPrecision)
    sharded = popdist.ShardedOptimizer(model, LowPrecision, optimizer_class=optim.SGD)
    with refused(popdist.OptimizerError, "not one of LowPrecision"):
        sharded.load_state_dict(optim.SGD(nn.Linear(64, 64).parameters()).state_dict())


class Fragile(optim.SGD):
    """Fails when it is told to."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        """Half of a step, perhaps."""
        if Fragile.fails:
            raise ValueError("no room for the state")
        return super().step(closure)


def law_a_failure_on_one_instance_is_one_on_all() -> None:
    """In its part of the update, in what comes before it, and when its settings are others."""
    model = popdist.ReplicatedModel(Net())
    optimizer = popdist.ShardedOptimizer(model, Fragile, lr=0.1)
    train(model, share(samples(popdist.num_replicas())))
    last = f"instance {popdist.num_instances() - 1}"
    Fragile.fails = is_last()
    try:
        with refused(*((ValueError, "no room") if is_last() else (popdist.OptimizerError, f"{last} failed in"))):
            optimizer.step()
    finally:
        Fragile.fails = False
    optimizer.step()
    if popdist.num_instances() > 1:
        optimizer.param_groups[0]["lr"] = 0.2 if is_last() else 0.1
        with refused(popdist.OptimizerError, "settings of the parameter groups of instance . are not those of"):
            optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.step()
    if is_last():
        model.first.weight.data = model.first.weight.data.clone()
    with refused(popdist.OptimizerError, "given other memory" if is_last() else f"{last} failed in"):
        optimizer.step()


def law_only_its_owner_steps_on_the_one_copy() -> None:
    """Not an optimizer that has the address which a sharded one had before it was thrown away."""
    if host_group() is None:
        return
    model = popdist.ReplicatedModel(Net())
    optimizer = popdist.ShardedOptimizer(model, optim.SGD, lr=0.1)
    del optimizer
    gc.collect()
    for _ in range(50):
        with refused(popdist.OptimizerError, "that all instances of this host share"):
            optim.SGD(model.parameters(), lr=0.1).step()


def law_a_host_without_room_leaves_all_instances_weights_of_their_own() -> None:
    """On the other hosts as well, where room that was found is given back; the bits are the same."""
    host = host_group()
    if host is None:
        return
    before = host.num_bytes
    with ExitStack() as stack:
        if on_last_host():
            stack.enter_context(mock.patch.object(HostGroup, "allocate", side_effect=BackendError("no room")))
        model, plain, other, sharded = pair(optim.AdamW, lr=0.1)
    assert host.num_bytes <= before
    train_both(model, plain, other, sharded, range(2))
    optim.SGD(other.parameters(), lr=0.1).step()


def law_weights_that_nobody_reads_give_their_memory_back() -> None:
    """When the next optimizer is made; not as long as one instance still holds a view of them."""
    host = host_group()
    if host is None:
        return

    def make(value: float = 1.0) -> tuple[Tensor, int]:
        """A view of new weights, and how much memory this instance has in the group."""
        gc.collect()
        popdist.barrier()
        layer = nn.Linear(500, 500)
        nn.init.constant_(layer.weight, value)
        popdist.ShardedOptimizer(popdist.ReplicatedModel(layer), optim.SGD)
        popdist.barrier()
        return layer.weight.detach()[:1], host.num_bytes

    gc.collect()
    gc.freeze()  # so what follows collects what it leaves itself, which is soon done
    kept, _ = make(7.0)
    if not is_last():
        del kept
    sizes = [make()[1] for _ in range(3)]
    assert len(set(sizes)) == 1, sizes
    if is_last():
        assert (kept == 7.0).all()
        del kept
    after = make()[1]
    gc.unfreeze()
    assert after == sizes[0] - (host.rank == 0 and on_last_host()) * whole_pages(500 * 501 * 4)


def on_last_host() -> bool:
    """Whether this instance is on the host of the last one."""
    host = host_group()
    return host is not None and popdist.instance_index() - host.rank == popdist.num_instances() - host.size


def law_frozen_parameters_leave_the_shares_even() -> None:
    """The state of a small part that is trained is held by all, wherever it stands in the model."""
    frozen = nn.Linear(200, 200).requires_grad_(requires_grad=False)
    model = popdist.ReplicatedModel(nn.Sequential(frozen, nn.Linear(200, 40)))
    optimizer = popdist.ShardedOptimizer(model, optim.SGD, lr=0.1, momentum=0.9)
    for x in model.micro_batches(torch.randn(popdist.num_local_replicas(), 200)):
        model(x).sum().backward()
    optimizer.step()
    held = sum(it.numel() for state in optimizer.own_state.values() for it in state.values())
    assert abs(held - 8040 / popdist.num_instances()) <= 2 * 128
    assert list(optimizer.state_dict()["state"]) == [2, 3]


def law_states_are_whole_or_refused() -> None:
    """One that only one instance has loaded, one that belongs to no parameter, and copies of the optimizer."""
    model = popdist.ReplicatedModel(nn.Linear(100, 100))
    optimizer = popdist.ShardedOptimizer(model, optim.SGD, lr=0.1, momentum=0.9)
    for duplicate in (copy.deepcopy, pickle.dumps):
        with refused(popdist.OptimizerError, "cannot be copied or pickled"):
            duplicate(optimizer)
    state = optimizer.state_dict()
    state["state"] = {0: {"momentum_buffer": torch.ones(100, 100)}}
    if popdist.num_instances() > 1:
        if is_last():
            optimizer.load_state_dict(state)
        with refused(popdist.OptimizerError, "state of (weight|bias) is not of one step on instances 0"):
            optimizer.state_dict()
    optimizer.load_state_dict(state)
    assert torch.equal(optimizer.state_dict()["state"][0]["momentum_buffer"], torch.ones(100, 100))
    if is_last():
        inner: Any = optimizer.own_state
        inner["norms"]["of all"] = 1.0
    with refused(popdist.OptimizerError, "belongs to no parameter"):
        optimizer.state_dict()


POPTORCH_OPTIMIZERS: list[tuple[type[Any], torch.dtype, dict[str, Any]]] = [
    (poptorch.optim.SGD, torch.float32, {"lr": 0.1, "momentum": 0.9, "loss_scaling": 4.0}),
    (poptorch.optim.AdamW, torch.float32, {"lr": 0.1, "bias_correction": False, "max_grad_norm": 0.01}),
    (poptorch.optim.LAMB, torch.float32, {"lr": 0.01}),
    (poptorch.optim.Adam, torch.bfloat16, {"lr": 0.01, "first_order_momentum_accum_type": torch.half}),
    (poptorch.optim.LAMB, torch.bfloat16, {"lr": 0.01}),
]


class Rated(nn.Module):
    """A layer of 3,030 parameters, and its loss."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(100, 30).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        return poptorch.identity_loss(self.layer(x).square(), reduction="mean")


def law_poptorch_shards_where_its_options_ask() -> None:
    """The state of large parameters is dealt to the instances, with the bits of one that is not."""
    for kind, dtype, settings in POPTORCH_OPTIMIZERS:
        found = []
        for is_sharded in (False, True):
            options = popdist.poptorch.Options().randomSeed(3)
            options.Precision.enableStochasticRounding(enabled=True)
            location = poptorch.TensorLocationSettings().useReplicatedTensorSharding(is_sharded)
            options.TensorLocations.setOptimizerLocation(location)
            module = Rated(dtype)
            optimizer = kind(module.parameters(), **settings)
            model = poptorch.trainingModel(module, options, optimizer)
            for step in range(3):
                generator = torch.Generator().manual_seed(10 * step + popdist.instance_index())
                model(torch.randn(popdist.num_local_replicas(), 100, generator=generator).to(dtype))
            state = optimizer.state_dict()["ipu_state"]
            optimizer.load_state_dict({**optimizer.state_dict(), "ipu_state": state})
            assert optimizer.state_dict()["ipu_state"].keys() == state.keys()
            found.append([*module.state_dict().values(), *(state[name] for name in sorted(state))])
            model.destroy()
        assert all(map(torch.equal, *found)), (kind, dtype)
