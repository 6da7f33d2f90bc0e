"""What is marked on gradients."""

import torch
from torch import nn

from popdist.gradients.gradient_flags import is_reduced, is_used, mark_reduced, mark_used, remove_gradients


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
