"""The laws of the gradients that are there when a step begins; every instance runs all of them."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

import popdist
from popdist.errors import name_instances
from tests.contract.check_laws import loss_of, net
from tests.contract.collective_laws import refused
from tests.contract.training_laws import is_last, samples, share

Form = Callable[..., None]


def loop(model: popdist.ReplicatedModel, number: int = 0, *, add: bool = False) -> None:
    """The step of a batch, as a loop."""
    for x, _ in model.micro_batches(share(samples(2 * popdist.num_replicas() + number)), add=add):
        loss_of(model, x).backward()


def by_hand(model: popdist.ReplicatedModel, number: int = 0, *, add: bool = False) -> None:
    """A step of micro batches, of which some instances have none."""
    if popdist.instance_index() % 2 == 0:
        for index in range(popdist.num_local_replicas()):
            with model.micro_batch(index):
                loss_of(model, samples(3 + number)[0]).backward()
    model.reduce_gradients(add=add)


FORMS: tuple[Form, ...] = (loop, by_hand)


def gradients(model: nn.Module) -> list[Tensor]:
    """Copies of all gradients."""
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def unused(names: str = r"0\.weight") -> str:
    """What the error says, on all instances."""
    everyone = name_instances(range(popdist.num_instances()))
    ways = r"zero_grad\(\).*micro_batches\(batch, add=True\)"
    return rf"{names} has a gradient that no optimizer.*on {everyone}, .*{ways}"


def law_loops_need_no_zero_grad() -> None:
    """What an optimizer has used is dropped: the bits are those of the same loops with zero_grad()."""
    torch.manual_seed(0)
    module = net()
    ends = []
    for zeros in (False, True):
        model = popdist.ReplicatedModel(copy.deepcopy(module))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for number in range(4):
            if zeros:
                optimizer.zero_grad(set_to_none=number < 2)
            FORMS[number % 2](model, number)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        ends.append(popdist.checksum(model))
    assert ends[0] == ends[1]


def law_a_layer_that_is_frozen_stays_where_it_is() -> None:
    """Its old gradient goes when the next step begins; that of a parameter that is unfrozen comes back."""
    model = popdist.ReplicatedModel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, second = model.get_submodule("module.0"), model.get_submodule("module.1")
    for form in FORMS:
        form(model)
        optimizer.step()
        first.requires_grad_(requires_grad=False)
        before = popdist.checksum(first), popdist.checksum(second)
        form(model)
        optimizer.step()
        assert popdist.checksum(first) == before[0]
        assert popdist.checksum(second) != before[1]
        first.requires_grad_(requires_grad=True)
    loop(model)
    optimizer.step()
    assert popdist.checksum(first) != before[0]


def law_gradients_that_nothing_has_used_are_an_error() -> None:
    """Of a loop before without a step, whatever the form; the parameter and both ways are named, on all."""
    for form in FORMS:
        model = popdist.ReplicatedModel(net())
        form(model)
        with refused(popdist.GradientError, unused()):
            form(model, 1)
        form(model)
        model.zero_grad()
        form(model)


def law_a_gradient_of_one_instance_is_an_error_on_all() -> None:
    """Set by hand, on a parameter that is frozen, too; who has it is named."""
    last = popdist.num_instances() - 1
    for form in FORMS:
        for is_trained in (True, False):
            model = popdist.ReplicatedModel(net())
            weight = model.get_parameter("module.1.weight").requires_grad_(is_trained)
            if is_last():
                weight.grad = torch.ones_like(weight)
            with refused(popdist.GradientError, rf"1\.weight has a gradient .* on instance {last}, "):
                form(model)
            form(model)


def law_gradients_of_several_loops_are_added() -> None:
    """In the order of the loops; an optimizer that steps after every second one needs no zero_grad()."""
    for form in FORMS:
        model = popdist.ReplicatedModel(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            parts = []
            for number in range(3):
                form(model, number)
                parts.append(gradients(model))
                model.zero_grad()
            for number in range(3):
                form(model, number, add=True)
            expected = [first + second + third for first, second, third in zip(*parts, strict=True)]
            assert all(map(torch.equal, gradients(model), expected))
            assert len(expected) == len(list(model.parameters()))
            optimizer.step()


def law_a_frozen_gradient_waits_for_its_step() -> None:
    """With add=True, what a loop does not make stays as it was."""
    model = popdist.ReplicatedModel(net())
    loop(model)
    expected = gradients(model)[:2]
    model.get_submodule("module.0").requires_grad_(requires_grad=False)
    loop(model, 1, add=True)
    assert all(map(torch.equal, gradients(model), expected))


def law_all_instances_add_to_the_same() -> None:
    """Else all raise: where one has nothing to add to, or does not add."""
    if popdist.num_instances() == 1:
        return
    for form in FORMS:
        model = popdist.ReplicatedModel(net())
        form(model)
        if is_last():
            model.zero_grad()
        with refused(popdist.GradientError, r"gradients of the same parameters: call zero_grad\(\) on all"):
            form(model, add=True)
        model.zero_grad()
        with refused(popdist.CollectiveError, "add=True|to those of before"):
            form(model, add=is_last())
        form(model)


def law_zeros_are_no_gradients() -> None:
    """As zero_grad(set_to_none=False) leaves them."""
    model = popdist.ReplicatedModel(net())
    for form in FORMS:
        form(model)
        model.zero_grad(set_to_none=False)
    loop(model)


def law_parameters_without_an_optimizer_do_not_matter() -> None:
    """As where only the last layer is trained, and nobody has frozen the others."""
    model = popdist.ReplicatedModel(net())
    optimizer = torch.optim.SGD(model.get_submodule("module.1").parameters(), lr=0.1)
    for form in FORMS:
        form(model)
        optimizer.step()
    loop(model)
    with refused(popdist.GradientError, unused()):
        loop(model)


def law_an_optimizer_that_steps_more_rarely_is_noticed() -> None:
    """When it has stepped once."""
    model = popdist.ReplicatedModel(net())
    first, second = (torch.optim.SGD(model.get_submodule(f"module.{i}").parameters(), lr=0.1) for i in range(2))
    loop(model)
    first.step()
    second.step()
    loop(model)
    first.step()
    with refused(popdist.GradientError, unused(r"1\.weight")):
        loop(model)


def law_what_a_scaler_leaves_out_is_dropped() -> None:
    """Of all models of its optimizer, also those whose gradients are finite."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100, backoff_factor=2.0**-60, growth_interval=100)
    models = [popdist.ReplicatedModel(net()) for _ in range(2)]
    optimizer = torch.optim.SGD([it for model in models for it in model.parameters()], lr=0.1)
    for step, order in enumerate(((0, 1), (0, 1), (1, 0))):
        before = [popdist.checksum(model) for model in models]
        for place in order:
            model = models[place]
            for x, _ in model.micro_batches(share(samples(2 * popdist.num_replicas()))):
                scaler.scale(loss_of(model, x) * (1.0 if place else 1e30)).backward()
        scaler.step(optimizer)
        scaler.update()
        is_left_out = [popdist.checksum(model) for model in models] == before
        assert is_left_out == (step < 2), step


def law_a_closure_makes_the_gradients_of_its_step() -> None:
    """Each of its calls anew; what was there before its step is not its own."""
    model = popdist.ReplicatedModel(net())
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    calls = []

    def closure() -> float:
        calls.append(1)
        loop(model)
        return popdist.weighted_mean(float(len(calls)), 1)

    for _ in range(2):
        optimizer.step(closure)
    assert len(calls) > 2
    loop(model)
    with refused(popdist.GradientError, unused()):
        optimizer.step(closure)
    model.zero_grad()
    torch.optim.Adam(model.parameters()).step(closure=closure)


def law_what_comes_while_another_model_is_trained_is_dropped() -> None:
    """Under no_sync(), around each backward pass and around the whole loop; but not if it was added to others."""
    generator, critic = (popdist.ReplicatedModel(nn.Linear(4, 4)) for _ in range(2))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, critic)]

    def train_generator() -> None:
        for x, _ in generator.micro_batches(share(samples(2 * popdist.num_replicas()))):
            with critic.no_sync():
                loss_of(critic, generator(x)).backward()

    for _ in range(2):
        train_generator()
        optimizers[0].step()
        with critic.no_sync():
            for x, _ in generator.micro_batches(share(samples(2 * popdist.num_replicas()))):
                loss_of(critic, generator(x)).backward()
        optimizers[0].step()
        loop(critic)
        optimizers[1].step()

    loop(critic)
    train_generator()
    with refused(popdist.GradientError, unused("weight")):
        loop(critic)


def law_what_comes_outside_of_all_loops_is_kept() -> None:
    """Under no_sync() or not: it is the program's."""
    model = popdist.ReplicatedModel(net())
    with model.no_sync():
        loss_of(model, samples(3)[0]).backward()
    with refused(popdist.GradientError, unused()):
        loop(model)
    if popdist.num_local_replicas() == 1:
        loss_of(model, samples(3)[0]).backward()
        with refused(popdist.GradientError, unused()):
            loop(model)
