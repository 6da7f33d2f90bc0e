"""The laws of what is looked for in checked steps: silent without it, named on every instance with it."""

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

import popdist
from popdist.errors import name_instances
from tests.contract.collective_laws import refused
from tests.contract.training_laws import is_last, samples, share


def net() -> nn.Module:
    """Two layers, the second with an odd number of weights."""
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1, bias=False))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """Some loss."""
    return torch.as_tensor(model(x).square().mean())


def loop(model: popdist.ReplicatedModel) -> None:
    """A step as a loop."""
    model.zero_grad()
    for x, _ in model.micro_batches(share(samples(2 * popdist.num_replicas()))):
        loss_of(model, x).backward()


def by_hand(model: popdist.ReplicatedModel) -> None:
    """A step of micro batches."""
    model.zero_grad()
    for index in range(popdist.num_local_replicas()):
        with model.micro_batch(index):
            loss_of(model, samples(3)[0]).backward()
    model.reduce_gradients()


def after_backward(model: popdist.ReplicatedModel) -> None:
    """A step outside the loop, where that is allowed."""
    if popdist.num_local_replicas() > 1:
        by_hand(model)
    else:
        model.zero_grad()
        loss_of(model, samples(3)[0]).backward()


STEPS = (loop, by_hand, after_backward)


def skip_steps(model: popdist.ReplicatedModel, number: int) -> None:
    """Go on as if the model had made ``number`` steps more."""
    for _ in range(number):
        model._model_steps._checks.end_step()


def law_weights_that_drift_apart_are_named() -> None:
    """In every form of a step, if it is checked: the parameter, the instance, and why that may be."""
    if popdist.num_instances() == 1:
        return
    model = popdist.ReplicatedModel(net())
    last = popdist.num_instances() - 1
    for step in STEPS:
        if is_last():
            model.get_parameter("module.1.weight").data[0, 1] += 1
        with refused(
            popdist.WeightsError,
            rf"1\.weight of instance {last} is not that of instance 0.*for a NaN.*learning rate.*load_state.*seed",
        ):
            step(model)
        popdist.broadcast_weights(model)
        step(model)


def law_other_steps_are_not_checked() -> None:
    """From the fourth on, up to the hundredth."""
    model = popdist.ReplicatedModel(net())
    skip_steps(model, 3)
    if is_last() and popdist.num_instances() > 1:
        model.get_parameter("module.0.bias").data += 1
    loop(model)
    skip_steps(model, 95)
    if popdist.num_instances() == 1:
        loop(model)
        return
    with refused(popdist.WeightsError, rf"0\.bias of instance {popdist.num_instances() - 1}"):
        loop(model)


def law_weights_that_one_instance_writes_are_compared_in_the_next_step() -> None:
    """Other weights are named in any step; equal weights are no fault, and are compared three times at most."""
    last = popdist.num_instances() - 1
    for step in STEPS:
        model = popdist.ReplicatedModel(net())
        skip_steps(model, 3)
        step(model)
        weight = model.get_parameter("module.1.weight")
        for _ in range(2):
            if is_last():
                weight.detach().add_(0)
            step(model)
        if is_last():
            weight.detach()[0, 1] += last
        if not last:
            step(model)
            continue
        with refused(popdist.WeightsError, rf"1\.weight of instance {last} is not that of instance 0"):
            step(model)
        popdist.broadcast_weights(model)
        step(model)


def law_a_learning_rate_of_one_instance_is_found_in_the_next_steps() -> None:
    """As of a scheduler that steps in `if is_main():`; a rate that all instances change is right."""
    model = popdist.ReplicatedModel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    skip_steps(model, 3)
    for rate in (0.1, 0.05):
        optimizer.param_groups[0]["lr"] = rate
        loop(model)
        optimizer.step()
    if is_last():
        optimizer.param_groups[0]["lr"] = 0.01
    loop(model)
    optimizer.step()
    if popdist.num_instances() == 1:
        return
    with refused(popdist.WeightsError, r"0\.weight of instance .* a learning rate differs"):
        loop(model)


class Momentum(nn.Module):
    """A network and a slow copy of it, which moves whenever it is used."""

    def __init__(self, *, through_data: bool) -> None:
        super().__init__()
        self.fast, self.slow = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(requires_grad=False)
        self._through_data = through_data

    def forward(self, x: Tensor) -> Tensor:
        """The difference of the two."""
        if self._through_data:
            self.slow.weight.data.mul_(0.9).add_(self.fast.weight.data, alpha=0.1)
        else:
            with torch.no_grad():
                self.slow.weight.mul_(0.9).add_(self.fast.weight, alpha=0.1)
        return torch.as_tensor(self.fast(x) - self.slow(x))


def law_a_parameter_that_is_written_in_a_micro_batch_is_named() -> None:
    """Where it is done for each replica, the result would depend on the split; for the one replica it is right."""
    for through_data in (False, True):
        for step in (loop, by_hand):
            model = popdist.ReplicatedModel(Momentum(through_data=through_data))
            if popdist.num_replicas() == 1:
                step(model)
                continue
            everyone = name_instances(range(popdist.num_instances()))
            with refused(
                popdist.WeightsError, rf"slow\.weight was written in a micro batch: .*found on {everyone}\)"
            ):
                step(model)


def law_a_parameter_of_another_model_is_written_outside_of_the_loop() -> None:
    """A teacher that is moved in the loop of its student would be moved more often where more replicas are."""
    student = popdist.ReplicatedModel(net())
    teacher = copy.deepcopy(student)

    def train(*, moves_inside: bool) -> None:
        student.zero_grad()
        for x, _ in student.micro_batches(share(samples(2 * popdist.num_replicas()))):
            loss_of(student, x).backward()
            if moves_inside:
                move()

    @torch.no_grad()
    def move() -> None:
        for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
            slow.lerp_(fast + 1.0, 0.1)

    train(moves_inside=False)
    move()
    if popdist.num_replicas() == 1:
        train(moves_inside=True)
        return
    with refused(popdist.WeightsError, r"0\.weight of Sequential was written in a micro batch of another model"):
        train(moves_inside=True)


def law_a_write_of_one_instance_is_an_error_on_all() -> None:
    """Which one, is said."""
    model = popdist.ReplicatedModel(net())
    last = popdist.num_instances() - 1

    def step() -> None:
        for x, _ in model.micro_batches(share(samples(2 * popdist.num_replicas()))):
            loss_of(model, x).backward()
            if is_last():
                model.get_parameter("module.0.bias").data.zero_()

    if popdist.num_replicas() == 1:
        step()
        return
    with refused(popdist.WeightsError, rf"0\.bias was written in a micro batch: .*found on instance {last}\)"):
        step()


def weights_of(model: nn.Module) -> str:
    """A checksum."""
    return popdist.checksum(model)


def backward_alone(model: popdist.ReplicatedModel) -> None:
    """Gradients of this instance's own, from other samples on each."""
    model.zero_grad()
    with model.no_sync():
        loss_of(model, torch.full((2, 4), 1.0 + popdist.instance_index())).backward()


def set_by_hand(model: popdist.ReplicatedModel) -> None:
    """As many gradients on all instances, one of which the last has for itself."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    if is_last():
        model.get_parameter("module.1.weight").grad = torch.zeros(1, 4)


def law_a_step_on_gradients_that_differ_is_refused() -> None:
    """Before it changes a weight, on all instances; the next step is in order."""
    if popdist.num_instances() == 1:
        return
    model = popdist.ReplicatedModel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before, others = weights_of(model), name_instances(range(1, popdist.num_instances()))
    words = r"SGD\.step\(\) on gradients that popdist has not reduced, and they are not equal on all instances: "
    for make, difference in (
        (backward_alone, rf"0\.weight of {others} is not that of instance 0"),
        (set_by_hand, rf"1\.weight of instance {popdist.num_instances() - 1} is not that of instance 0"),
    ):
        make(model)
        with refused(popdist.GradientError, words + difference):
            optimizer.step()
        assert weights_of(model) == before
    loop(model)
    optimizer.step()


def law_gradients_that_the_program_has_made_equal_pass() -> None:
    """By an all_reduce of its own, or by setting the same ones; so do those of a sum that one instance clipped."""
    model = popdist.ReplicatedModel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backward_alone(model)
    for parameter in model.parameters():
        if parameter.grad is not None:
            popdist.all_reduce(parameter.grad, "mean")
    optimizer.step()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    loop(model)


def law_a_gradient_that_was_added_to_is_no_longer_reduced() -> None:
    """As a critic's own gradients, when its generator is trained before the critic has stepped."""
    if popdist.num_instances() == 1:
        return
    model = popdist.ReplicatedModel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop(model)
    with model.no_sync():
        loss_of(model, torch.full((2, 4), 1.0 + popdist.instance_index())).backward()
    with refused(popdist.GradientError, r"0\.weight of"):
        optimizer.step()


def law_closures_are_looked_at_when_they_have_run() -> None:
    """Not when the step begins, when there are gradients of before."""
    model = popdist.ReplicatedModel(net())
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure() -> float:
        optimizer.zero_grad()
        if is_wrong:
            backward_alone(model)
        else:
            loop(model)
        return 1.0

    for is_wrong in (False, popdist.num_instances() > 1):
        backward_alone(model)
        if is_wrong:
            with refused(popdist.GradientError, r"LBFGS\.step\(\) on gradients"):
                optimizer.step(closure)
        else:
            optimizer.step(closure)


def law_steps_are_compared_in_the_first_three_only() -> None:
    """And in every hundredth, of those that are made on such gradients."""
    if popdist.num_instances() == 1:
        return
    model = popdist.ReplicatedModel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(3):
        backward_alone(model)
        with refused(popdist.GradientError, "not equal"):
            optimizer.step()
    optimizer.step()
    loop(model)
    optimizer.step()


def law_a_step_of_some_instances_meets_nobody() -> None:
    """In execute_on_instances, and on a copy that an instance has made for itself."""
    model = popdist.ReplicatedModel(net())
    if is_last():
        probe = copy.deepcopy(model)
        backward_alone(probe)
        torch.optim.SGD(probe.parameters(), lr=0.1).step()

    def alone() -> None:
        backward_alone(model)
        torch.optim.SGD(model.parameters(), lr=0.0).step()

    popdist.execute_on_instances({0}, alone)
    loop(model)


def law_a_step_that_one_instance_takes_alone_is_an_error_on_all() -> None:
    """They hear which one it was."""
    if popdist.num_instances() == 1:
        return
    model = popdist.ReplicatedModel(net())
    last = popdist.num_instances() - 1
    words = rf"instance {last}: SGD\.step\(\) on gradients that popdist has not reduced"
    with refused(popdist.CollectiveError, words):
        if is_last():
            backward_alone(model)
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        else:
            popdist.barrier()
    popdist.broadcast_weights(model)
    loop(model)


def law_dropout_in_an_evaluation_is_named() -> None:
    """Once, in training mode and without gradients; an evaluation in the mode for it says nothing."""
    model = popdist.ReplicatedModel(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)))
    with torch.no_grad():
        if popdist.num_replicas() > 1:
            with pytest.warns(popdist.PopdistWarning, match="as dropout does.*model.eval()"):
                model(torch.ones(1, 4))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(torch.ones(1, 4))
            popdist.ReplicatedModel(copy.deepcopy(model.module)).eval()(torch.ones(1, 4))
