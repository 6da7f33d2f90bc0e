"""The laws of what is looked for in checked steps: silent without it, named on every instance with it."""

import torch
from torch import Tensor, nn

import popdist
from popdist.headers import name_instances
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
    for x, _ in model.micro_batches(share(samples(2 * popdist.num_replicas()))):
        loss_of(model, x).backward()


def by_hand(model: popdist.ReplicatedModel) -> None:
    """A step of micro batches."""
    for index in range(popdist.num_local_replicas()):
        with model.micro_batch(index):
            loss_of(model, samples(3)[0]).backward()
    model.reduce_gradients()


def after_backward(model: popdist.ReplicatedModel) -> None:
    """A step outside the loop, where that is allowed."""
    if popdist.num_local_replicas() > 1:
        by_hand(model)
    else:
        loss_of(model, samples(3)[0]).backward()


STEPS = (loop, by_hand, after_backward)


def skip_steps(model: popdist.ReplicatedModel, number: int) -> None:
    """Go on as if the model had made ``number`` steps more."""
    model._model_steps._checked_steps._num_ended += number


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
        model.zero_grad()


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
            with refused(popdist.WeightsError, rf"slow\.weight was written in a micro batch, on {everyone}: .*"):
                step(model)


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
    with refused(popdist.WeightsError, rf"0\.bias was written in a micro batch, on instance {last}:"):
        step()
