"""The control groups that this process is in, as cgroups(7) describes them: where limits and counts stand."""

import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Final, NamedTuple

CGROUPS: Final = "/sys/fs/cgroup"
MEMBERSHIP: Final = "/proc/self/cgroup"


class ControlGroup(NamedTuple):
    """One group.

    Attributes:
        folder: Where its files are. It need not exist: inside a container the names may be those outside.
        is_unified: Whether it is of version 2.
    """

    folder: str
    is_unified: bool

    def read(self, name: str) -> str:
        """The text of one of its files.

        Raises:
            OSError: If there is none.
        """
        return read_text(os.path.join(self.folder, name))


def control_groups(
    controller: str, membership: str = MEMBERSHIP, cgroups: str = CGROUPS
) -> Iterator[ControlGroup]:
    """The groups of this process that may hold files of ``controller``, inner ones first: each one's limit holds.

    Args:
        controller: Such as ``cpu`` or ``memory``.
        membership: The file that says which groups this process is in.
        cgroups: Where the groups are mounted.
    """
    try:
        lines = read_text(membership).splitlines()
    except OSError:
        return
    for line in lines:
        with suppress(ValueError):
            _, controllers, path = line.split(":", 2)
            if not controllers or controller in controllers.split(","):
                root = os.path.join(cgroups, controller) if controllers else cgroups
                names = [name for name in path.split("/") if name]
                for depth in range(len(names), -1, -1):
                    yield ControlGroup(os.path.join(root, *names[:depth]), is_unified=not controllers)


def read_text(path: str) -> str:
    """The whole text of a file.

    Raises:
        OSError: If it cannot be read.
    """
    with open(path, encoding="utf-8") as file:
        return file.read()
