"""The laws of buffers that are written where no model has its step; every instance runs all of them."""

import copy
import gc
import warnings
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, update_bn

import popdist
from popdist import checkpoint
from tests.contract.check_laws import skip_steps
from tests.contract.collective_laws import refused
from tests.contract.training_laws import is_last, samples, share


def step(model: popdist.ReplicatedModel) -> None:
    """One step's gradient."""
    model.zero_grad()
    for x, _ in model.micro_batches(share(samples(2 * popdist.num_replicas()))):
        model(x).square().mean().backward()


def law_a_pass_outside_that_writes_a_buffer_is_an_error_on_all() -> None:
    """At the model's next step and save, also when one instance alone made it; loading makes it right again."""
    model = popdist.ReplicatedModel(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)))
    other = popdist.ReplicatedModel(nn.Linear(4, 4))
    state = {name: it.clone() for name, it in model.state_dict().items()}
    with torch.no_grad():
        model.eval()(samples(5)[0])
        if is_last():
            model.train()(samples(5)[0])
    model.train()
    if popdist.num_replicas() == 1:
        step(model)
        return
    step(other)
    for _ in range(2):
        with refused(
            popdist.WeightsError, r"0\.running_mean, 0\.running_var.* of Sequential was written by a forw"
        ):
            step(model)
    with TemporaryDirectory() as name:
        folder = Path(popdist.broadcast_object(name))
        error = popdist.WeightsError if is_last() else popdist.CheckpointError
        with refused(error, r"0\.running_mean.* of Sequential was written by a forward pass in training mode"):
            checkpoint.save(folder, model=model)
        with refused(error, r"0\.running_mean"):
            checkpoint.save(folder, model=nn.ModuleList([model]))
        checkpoint.save(folder, other=other)
        model.load_state_dict(state)
        checkpoint.save(folder, model=model)
        if is_last():
            model(samples(5)[0])
        checkpoint.load_latest(folder, model=model)
        popdist.barrier()
    step(model)


def law_statistics_of_torchs_update_bn_do_not_leave() -> None:
    """They are of one instance's samples: no state dict, file or copy has them; those of popdist's are right."""
    model = popdist.ReplicatedModel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    average = AveragedModel(model)
    batches = [share(samples(3 * popdist.num_replicas()))]
    update_bn(batches, average)
    exits: list[Any] = [
        average.state_dict,
        average.get_submodule("module").state_dict,
        lambda: torch.save(average, BytesIO()),
        lambda: copy.deepcopy(average),
    ]
    for leave in exits if popdist.num_replicas() > 1 else ():
        with refused(popdist.WeightsError, r"1\.running_mean.* of Sequential was written by a forward pass in tr"):
            leave()
    popdist.update_bn(batches, average)
    for leave in exits:
        leave()
    update_bn(batches, average)
    average.load_state_dict(AveragedModel(model).state_dict())
    average.state_dict()


def law_what_replaced_such_a_write_is_right() -> None:
    """Whatever did it: the error is only there as long as the buffer holds what the pass wrote."""
    model = popdist.ReplicatedModel(nn.BatchNorm1d(4))
    model(torch.randn(5, 4))
    model.get_submodule("module").reset_running_stats()  # type: ignore[operator] # torch's
    step(model)
    model(torch.randn(5, 4))
    popdist.update_bn([share(samples(3 * popdist.num_replicas()))], model)
    step(model)


def law_update_bn_is_torchs() -> None:
    """For one replica the bits; for more the mean over the replicas' batches. Modes and momenta stay."""
    first, second = nn.BatchNorm1d(4, momentum=0.3), nn.BatchNorm1d(4)
    module = nn.Sequential(nn.Linear(4, 4), first, nn.ReLU(), second)
    popdist.broadcast_weights(module)
    second.eval()
    batches = [samples(4 * popdist.num_replicas() + number) for number in (0, 4 * popdist.num_replicas())]
    popdist.update_bn([share(it) for it in batches], module)
    found = {name: it.clone() for name, it in module.state_dict().items()}
    assert (first.momentum, first.training, second.momentum, second.training) == (0.3, True, 0.1, False)

    parts = [x.tensor_split(popdist.num_replicas()) for x, _ in batches]
    update_bn([x for step_parts in parts for x in step_parts], module)
    for name, wanted in module.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            torch.testing.assert_close(found[name], wanted)
            assert popdist.num_replicas() > 1 or torch.equal(found[name], wanted)
    assert found["1.num_batches_tracked"] == len(batches)
    popdist.update_bn([object()], nn.Linear(4, 4))  # which has no statistics


def law_update_bn_tells_all_of_an_error() -> None:
    """One instance cannot compute its part, or has fewer batches."""
    model = nn.BatchNorm1d(4)
    batches = [share(samples(4 * popdist.num_replicas())) for _ in range(2)]
    if is_last():
        batches[1] = (torch.zeros(4 * popdist.num_local_replicas(), 3), batches[1][1])
    with refused(
        *((RuntimeError, "running_mean") if is_last() else (popdist.MicroBatchError, "could not compute"))
    ):
        popdist.update_bn(batches, model)
    assert model.momentum == 0.1
    if popdist.num_instances() > 1:
        with refused(popdist.CollectiveError, r"update_bn\(\), the end"):
            popdist.update_bn(batches[:1] * (1 + is_last()), model)
    popdist.barrier()


class Queue(nn.Module):
    """Keeps what it has seen, in a buffer that forward makes."""

    def __init__(self, *, is_reshaped: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        if is_reshaped:
            self.register_buffer("seen", torch.zeros(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        """Remember ``x``."""
        self.register_buffer("seen", x.clone())
        return torch.as_tensor(self.layer(x))


def law_a_buffer_that_forward_makes_from_samples_is_named() -> None:
    """Also as part of another model; instances have different ones. Where one has all replicas, there is one."""
    for is_reshaped in (False, True):
        if popdist.num_instances() == 1:
            step(popdist.ReplicatedModel(Queue(is_reshaped=is_reshaped)))
            continue
        with refused(popdist.WeightsError, r"the buffer seen was made in a micro batch, or changed its shape"):
            step(popdist.ReplicatedModel(Queue(is_reshaped=is_reshaped)))
        model, other = (
            popdist.ReplicatedModel(nn.Linear(4, 4)),
            popdist.ReplicatedModel(Queue(is_reshaped=is_reshaped)),
        )
        with refused(popdist.WeightsError, r"the buffer seen of Queue was made in a micro batch"):
            for x, _ in model.micro_batches(share(samples(2 * popdist.num_replicas()))):
                with other.no_sync():
                    other(model(x)).square().mean().backward()


class Codes(nn.Module):
    """A large buffer, written through ``.data`` when it is told to."""

    codes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("codes", torch.zeros(70_000))

    def forward(self, x: Tensor, *, writes: bool) -> Tensor:
        """Write what ``x`` is."""
        if writes:
            self.codes.data.add_(x.mean())
        return torch.as_tensor(self.layer(x))


def law_a_large_buffer_that_is_written_late_through_data_is_named() -> None:
    """In the next checked step, since steps in between do not look."""
    model = popdist.ReplicatedModel(Codes())
    for number in range(5):
        for x, _ in model.micro_batches(share(samples(2 * popdist.num_replicas()))):
            model(x, writes=number == 4).square().mean().backward()
        model.zero_grad()
    skip_steps(model, 94)
    if popdist.num_replicas() == 1:
        return
    with refused(popdist.WeightsError, r"codes was written through \.data"):
        for x, _ in model.micro_batches(share(samples(2 * popdist.num_replicas()))):
            model(x, writes=False).square().mean().backward()


def law_a_pass_outside_gives_all_models_what_the_replicas_made() -> None:
    """Where a backward pass outside of the loop is reduced, from the first one on, and whatever was called."""
    if popdist.num_local_replicas() > 1:
        return
    model, critic = (popdist.ReplicatedModel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))) for _ in range(2))
    for _ in range(2):
        out = model.get_submodule("module")(share(samples(3 * popdist.num_replicas()))[0])
        with critic.no_sync():
            critic.get_submodule("module")(out).square().mean().backward()
        for net in (model, critic):
            digest = popdist.checksum(dict(net.named_buffers()))
            assert popdist.broadcast_object(digest, popdist.num_instances() - 1) == digest
    assert critic.state_dict()["1.running_mean"].any()


def law_buffers_that_drift_apart_are_named() -> None:
    """In a checked step, however they were written: here a part of the model is called by itself."""
    if popdist.num_instances() == 1:
        return
    model = popdist.ReplicatedModel(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)))
    model.get_submodule("module.0")(torch.full((2, 4), float(is_last())))
    with refused(
        popdist.WeightsError, rf"0\.running_mean of instance {popdist.num_instances() - 1} was not that of in"
    ):
        step(model)
    popdist.broadcast_weights(model)
    step(model)


class Counter(nn.Linear):
    """Counts its passes where it is told to."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.passes = 0

    def forward(self, x: Tensor, *, counts: bool = True) -> Tensor:
        """Scale by the count."""
        self.passes += counts
        return super().forward(x) * self.passes


def law_a_counter_in_python_is_named_on_all() -> None:
    """In a checked step, also if one instance alone has counted; not for one replica, and not without checks."""
    for everywhere in (True, False):
        model = popdist.ReplicatedModel(Counter())

        def train(model: popdist.ReplicatedModel = model, *, counts: bool = everywhere or is_last()) -> None:
            for number in range(3):
                model.zero_grad()
                for x, _ in model.micro_batches(share(samples(2 * popdist.num_replicas() + number))):
                    model(x, counts=counts).square().mean().backward()

        if popdist.num_replicas() == 1:
            train()
            continue
        with refused(
            popdist.WeightsError, r"the attribute passes of Counter changes in each forward pass, and the"
        ):
            train()
        skip_steps(model, 3)
        train()


class Centre(nn.Module):
    """What is left of numbers when the mean of all that came before is taken away."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        """Move the centre, too."""
        self.centre = self.centre * 0.9 + x.detach().mean(0) * 0.1
        return x - self.centre


def law_a_buffer_that_moves_and_nothing_wraps_is_warned_of() -> None:
    """In the first step of a model, on the first instance; not when it is wrapped, or stays as it is."""
    loose = [Centre(), nn.BatchNorm1d(4)]
    cases: list[tuple[list[nn.Module], str]] = [
        ([loose[0]], "centre of Centre changed in a loop"),
        ([loose[1]], "running_mean of BatchNorm1d, running_var of BatchNorm1d, num_batches_tracked of "),
        ([nn.BatchNorm1d(4).eval()], ""),
        ([popdist.ReplicatedModel(Centre())], ""),
    ]
    for beside, wanted in cases:
        # the layer is last, because the mean of two normalized samples may be 0, and then no buffer moves
        model = popdist.ReplicatedModel(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                model.zero_grad()
                for x, _ in model.micro_batches(share(samples(2 * popdist.num_replicas()))):
                    sum(part(model(x)).square().mean() for part in beside).backward()
        found = [str(it.message) for it in caught if issubclass(it.category, popdist.PopdistWarning)]
        assert len(found) == bool(wanted and popdist.num_replicas() > 1 and popdist.is_main()), found
        assert all(wanted in text for text in found)


class LossWeight(nn.Module):
    """A learned weight of a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.log_variance = nn.Parameter(torch.zeros(2))


def law_a_parameter_beside_a_wrapped_model_is_refused() -> None:
    """By name, when the optimizer steps; wrapped, not trained or with an optimizer of its own it may be."""
    model, weight = popdist.ReplicatedModel(nn.Linear(4, 4)), LossWeight()
    loose = torch.zeros(3, requires_grad=True)
    unused = nn.Linear(2, 2)

    def train(*parameters: Tensor) -> None:
        optimizer = torch.optim.SGD([*model.parameters(), *unused.parameters(), *parameters], lr=0.1)
        model.zero_grad()
        for x, _ in model.micro_batches(share(samples(2 * popdist.num_replicas()))):
            (model(x).square().mean() * weight.log_variance.exp().sum() + loose.sum()).backward()
        optimizer.step()

    train()
    if popdist.num_replicas() == 1:
        train(loose, weight.log_variance)
        return
    with refused(popdist.OptimizerError, r"SGD\.step\(\) would move parameter 4 of group 0, of shape \(2,\)"):
        train(weight.log_variance)
    with refused(popdist.OptimizerError, r"would move parameter 4 of group 0, of shape \(3,\), by the gradient"):
        train(loose)
    model.zero_grad()
    named = torch.optim.SGD([*model.named_parameters(), *weight.named_parameters()], lr=0.1)
    for x, _ in model.micro_batches(share(samples(2 * popdist.num_replicas()))):
        (model(x).square().mean() * weight.log_variance.exp().sum()).backward()
    with refused(popdist.OptimizerError, r"SGD\.step\(\) would move log_variance, of shape \(2,\)"):
        named.step()
    own = torch.optim.SGD([loose, weight.log_variance], lr=0.1)
    own.step()
    wrapped = popdist.ReplicatedModel(weight)
    weight.log_variance.grad = None
    with wrapped.no_sync():
        if popdist.num_instances() == 1:
            train(weight.log_variance)
            return
        with refused(popdist.GradientError, "not equal on all instances: log_variance of"):
            train(weight.log_variance)


def law_nan_in_a_buffer_of_a_dropped_model_stops_no_other() -> None:
    """One instance has collected the model already, and another has not: nothing has changed in it."""
    model = popdist.ReplicatedModel(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)))
    dropped = [popdist.ReplicatedModel(nn.BatchNorm1d(4))]
    for buffer in dropped[0].buffers():
        if buffer.is_floating_point():
            buffer.fill_(torch.nan)
    step(model)
    if is_last():
        dropped.clear()
        gc.collect()
    for one_step in (step, step):
        one_step(model)
    assert all(bool(it.isfinite().all()) for it in model.buffers())
