"""The settings of optimizers and of their groups of parameters."""

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

PLAIN = (bool, int, float, str, tuple, type(None))
"""Kinds of settings that have a text of their own."""


def is_optimizer_class(kind: object) -> bool:
    """Whether ``kind`` is one."""
    return isinstance(kind, type) and issubclass(kind, Optimizer)


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a group of an optimizer says beside its parameters."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def in_words(settings: Mapping[str, Any]) -> str:
    """Settings as further arguments of a call; what has no text of its own by its name only."""
    return "".join(
        f", {name}={value!r}" if isinstance(value, PLAIN) else f", {name}" for name, value in settings.items()
    )
