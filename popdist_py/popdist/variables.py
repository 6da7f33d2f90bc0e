"""Numbers in environment variables, as launchers and people write them. Pure: takes the environment."""

import re
from collections.abc import Mapping
from typing import Final

from popdist.errors import ContractError

_NODE_COUNT: Final = r"([0-9]{1,9})(?:\(x([0-9]{1,6})\))?"


def read_count(env: Mapping[str, str], name: str, *, minimum: int = 1, default: int | None = None) -> int:
    """The whole number in variable ``name``.

    Raises:
        ContractError: If it is absent and there is no default, is no whole number, or is below ``minimum``.
    """
    text = env.get(name)
    if text is None:
        if default is None:
            raise ContractError(f"{name} is not set")
        return default
    if not text.strip().isdecimal() or int(text) < minimum:
        raise ContractError(f"{name}={text!r} must be a whole number of at least {minimum}")
    return int(text)


def read_threads(env: Mapping[str, str], name: str) -> int | None:
    """The first number of OpenMP's list in variable ``name``, or None without one.

    A value that OpenMP does not understand, it does not obey either.
    """
    first = env.get(name, "").partition(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) else None


def read_ordinals(env: Mapping[str, str], name: str) -> tuple[int, ...]:
    """The numbers of devices in variable ``name``; none when it is absent or empty.

    Raises:
        ContractError: If it holds anything but whole numbers with commas between them.
    """
    text = env.get(name, "")
    words = text.split(",") if text else []
    if not all(word.isdecimal() for word in words):
        raise ContractError(f"{name}={text!r} must be device ordinals with commas between them, such as 0,1")
    return tuple(map(int, words))


def read_node_counts(env: Mapping[str, str], name: str) -> tuple[int, ...]:
    """One number for each node of a Slurm job in variable ``name``; none when it is absent or empty.

    Slurm writes 2, 2, 2, 1 as ``2(x3),1``: srun(1), SLURM_TASKS_PER_NODE.

    Raises:
        ContractError: If it is not of that form.
    """
    counts: list[int] = []
    for item in filter(None, env.get(name, "").split(",")):
        match = re.fullmatch(_NODE_COUNT, item.strip())
        if match is None:
            raise ContractError(f"{name}={env[name]!r} is not of Slurm's form, such as 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)
