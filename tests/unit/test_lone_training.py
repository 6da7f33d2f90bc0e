"""A program that has trained by itself, as its modules show at its end: with modules made up for that."""

import os
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from popdist.startup import lone_training, sitecustomize
from popdist.startup.lone_training import has_trained_alone

GROUPS = "torch.distributed.distributed_c10d"


class Optimizer:
    """torch's, of which a class is marked when its first object is made."""

    def step(self) -> None:
        """A step."""


class Adam(Optimizer):
    """One that was made."""

    def step(self) -> None:
        """A step."""


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The modules of a program that has made an optimizer."""
    monkeypatch.setattr(Adam.step, "hooked", True, raising=False)
    return {"torch": None, "torch.optim": SimpleNamespace(Optimizer=Optimizer), GROUPS: groups_of(0, None)}


def groups_of(size: int, method: str | None) -> SimpleNamespace:
    """Torch's module of process groups, with a group of ``size`` ranks, and how its processes met."""
    return SimpleNamespace(
        __name__=GROUPS,
        is_initialized=lambda: size > 0,
        get_world_size=lambda: size,
        _default_pg_init_method=method,
    )


def is_alone(modules: dict[str, Any], *words: str, **variables: str) -> bool:
    """Whether a program with these modules, arguments and variables has trained alone."""
    return has_trained_alone(modules, ("train.py", *words), sys.__excepthook__, variables)


def test_an_optimizer_without_any_group_is_lone_training(modules: dict[str, Any]) -> None:
    """So is one in a group of one rank."""
    assert is_alone(modules)
    assert is_alone({**modules, GROUPS: groups_of(1, "env://")})


@pytest.mark.parametrize(
    ("name", "module"),
    [
        (GROUPS, groups_of(2, "env://")),
        (GROUPS, groups_of(0, "env://")),  # it was destroyed
        ("mpi4py.MPI", SimpleNamespace(Is_initialized=lambda: True)),
        ("horovod", None),
    ],
)
def test_whoever_was_connected_was_not_alone(modules: dict[str, Any], name: str, module: object) -> None:
    """By torch.distributed, MPI, or a library that connects processes by itself."""
    assert not is_alone({**modules, name: module})


def test_a_group_over_a_store_leaves_its_way_to_print_exceptions(modules: dict[str, Any]) -> None:
    """Where the program made the store itself, nothing says how its processes met."""

    def excepthook(*_: object) -> None:
        """torch's, which puts the rank before each line."""

    excepthook.__module__ = GROUPS

    assert not has_trained_alone(modules, ("train.py",), excepthook, {})


def test_a_torch_without_its_private_name_is_not_announced(
    modules: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing shows then whether a group that was destroyed has connected the process."""
    system = SimpleNamespace(modules=modules, argv=[], excepthook=sys.__excepthook__)
    monkeypatch.setattr(sitecustomize, "sys", system)
    monkeypatch.setattr(sitecustomize, "load_module", lambda *_: lone_training)
    signals = Mock()
    sitecustomize.announce_lone_training(os.getpid(), 0, signals)
    del modules[GROUPS]._default_pg_init_method
    sitecustomize.announce_lone_training(os.getpid(), 0, signals)

    signals.announce_lone_training.assert_called_once_with(0)


def test_a_program_that_trained_nothing_is_left_alone(
    modules: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an optimizer it may compute what needs no others; without a library it trains nothing."""
    assert not is_alone({name: module for name, module in modules.items() if name != "torch"})

    monkeypatch.setattr(Adam.step, "hooked", False)

    assert not is_alone(modules)


@pytest.mark.parametrize("number", [0, 3])
def test_where_popdist_watched_the_steps_it_knows(modules: dict[str, Any], number: int) -> None:
    """It has counted those on gradients of this instance alone."""
    watched = SimpleNamespace(lone_steps=SimpleNamespace(number=number))

    assert is_alone({**modules, "popdist.step.checks.optimizer_checks": watched}) == (number > 0)


def test_torchrun_in_each_instance(modules: dict[str, Any]) -> None:
    """Each is a job of its own unless it is told of the others."""
    modules = {**modules, "torch.distributed.run": None}

    assert is_alone(modules)
    assert not is_alone(modules, "--nnodes=2")


def test_what_poptorch_has_for_horovod_connects_nobody(modules: dict[str, Any]) -> None:
    """Popdist says itself when it does."""
    served = SimpleNamespace(__spec__=SimpleNamespace(origin="poptorch"))
    assert has_trained_alone(modules | {"horovod": served}, [], sys.excepthook, {})


JAX, TENSORFLOW = "jax._src.distributed", "tensorflow.python.eager.context"


def jax(num_processes: int) -> dict[str, Any]:
    """The library, which was connected to so many processes or has connected none."""
    return {"jax": None, JAX: SimpleNamespace(global_state=SimpleNamespace(num_processes=num_processes))}


def tensorflow(server: object) -> dict[str, Any]:
    """The library, with its server that connects it to others, or None."""
    context = SimpleNamespace(_collective_ops_server_def=server, _server_def=None)
    return {"tensorflow": None, TENSORFLOW: SimpleNamespace(_context=context)}


@pytest.mark.parametrize(
    ("imported", "variables", "alone"),
    [
        ({"keras": None, "torch": None}, {}, True),
        ({"keras": None, "torch": None, GROUPS: groups_of(2, "env://")}, {}, False),
        ({"tensorflow": None, "keras": None}, {}, True),
        (
            tensorflow(None),
            {"TF_CONFIG": '{"cluster": {"worker": []}}'},
            True,
        ),  # poprun's own, which nobody has read
        (tensorflow(None), {"TF_CONFIG": '{"cluster": {"ps": []}}'}, False),
        (tensorflow("server"), {}, False),
        ({"tensorflow": None, "torch": None}, {}, False),
        (jax(1), {}, True),
        (jax(2), {}, False),
        ({"tensorflow": None, "popdist.job.context": None}, {}, False),
        ({"paddle": None}, {}, True),
        ({"numpy": None}, {}, False),
    ],
)
def test_other_libraries_that_train(imported: dict[str, Any], variables: dict[str, str], alone: object) -> None:
    """They leave no mark, so their import counts; beside torch only that of Keras, which may run on it."""
    assert is_alone(imported, **variables) is alone
