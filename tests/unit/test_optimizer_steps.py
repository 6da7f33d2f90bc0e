"""What is marked on gradients, and where the steps of a training loop end."""

import pytest
import torch
from torch import nn

from popdist.gradients.optimizer_steps import (
    TrainingLoop,
    is_reduced,
    is_used,
    mark_reduced,
    mark_used,
    remove_gradients,
)


def test_used_gradients_are_told_from_others_when_all_are_removed() -> None:
    """One that was written since it was marked is unused again."""
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(4)]
    for parameter in parameters[1:]:
        parameter.grad = torch.ones(2)
    written, used, unmarked = (parameter.grad for parameter in parameters[1:])
    mark_used(iter(parameters[:3]))
    assert written is not None
    written += 1

    unused, are_some_used = remove_gradients(parameters)

    assert unused == {id(parameters[1]): written, id(parameters[3]): unmarked}
    assert unused[id(parameters[1])] is written
    assert are_some_used is True
    assert is_used(used)
    assert [parameter.grad for parameter in parameters] == [None] * 4
    assert remove_gradients(parameters) == ({}, False)


def test_a_gradient_of_one_instance_is_not_reduced() -> None:
    """Nor is one to which something of one instance was added."""
    gradient = torch.ones(2)
    assert not is_reduced(gradient)
    mark_reduced(gradient)
    assert is_reduced(gradient)
    mark_reduced(gradient, is_reduced=False)
    assert not is_reduced(gradient)


class Model:
    """Anything that has steps."""


def step_ends_of(loop: str) -> list[int]:
    """Step ends so far after each sign of ``loop``.

    ``a`` and ``b``: the step of a model begins. ``.``: an optimizer steps. ``[`` and ``]``: a loop over a loader
    begins and ends. ``,``: it asks for its next batch.
    """
    training_loop, models, loaders, asks, found = TrainingLoop(), {"a": Model(), "b": Model()}, [], [], []
    for sign in loop:
        if sign in models:
            training_loop.begin_step(models[sign])
        elif sign == ".":
            training_loop.num_optimizer_steps += 1
        elif sign == "[":
            loaders.append(training_loop.read_loader())
            asks.append(loaders[-1].__enter__())
        elif sign == ",":
            asks[-1]()
        else:
            asks.pop()
            loaders.pop().__exit__(None, None, None)
        found.append(training_loop.num_step_ends)
    return found


@pytest.mark.parametrize(
    ("loop", "numbers"),
    [
        ("[a.,a.,]a", "000111222"),
        ("[,,,]", "00000"),
        ("[a.[,,],a.,]", "000000011122"),
        ("[a.b.,a.b.,]", "000001111122"),
        ("[a.,a.", "000111"),
        ("a.a.a.", "001122"),
        ("aaa.aaa.", "00001111"),
        ("a.b.a.b.a.", "0000111122"),
        ("a.a.b.b.", "00111122"),
        ("a.[,,]a.", "00000011"),
        ("a[.a.]a", "0000001"),
    ],
    ids=[
        "a loader's loop, its last question included",
        "a loop that only evaluates",
        "an evaluation between two batches",
        "two models for each batch",
        "a loop that was left",
        "no loader",
        "a closure's steps",
        "two models in turn",
        "one model after the other",
        "an evaluation between two steps",
        "no step of the loader's own",
    ],
)
def test_step_ends(loop: str, numbers: str) -> None:
    """Between two steps of a loop, and nowhere else."""
    assert step_ends_of(loop) == [int(number) for number in numbers]


def test_the_end_of_a_step_is_told() -> None:
    """If somebody does."""
    training_loop = TrainingLoop()
    training_loop.end_step()
    waiting = [1]
    training_loop.on_step_end = waiting.clear
    training_loop.end_step()

    assert waiting == []
    assert training_loop.num_step_ends == 2
