"""The names that completion offers and only the machine knows: hosts, and partitions of virtual IPUs."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from poprun.cli.option import COMPLETION
from poprun.errors import PoprunError

if TYPE_CHECKING:
    from poprun.cli.completion import Names


def asked_completion() -> str | None:
    """What a shell asks poprun to complete, or None in every other call."""
    return os.environ.get(COMPLETION)


def names_of_this_machine() -> "Names":
    """Where completion looks for names; nothing is looked for before it is needed."""
    from poprun.cli.completion import Names  # noqa: PLC0415 - a job asks for nothing of this
    from poprun.probe.known_hosts import known_hosts  # noqa: PLC0415 - see above

    return Names(hosts=known_hosts, partitions=_partitions)


def _partitions() -> Sequence[str]:
    from poprun.pool.place import DEFAULT_POOL, POOL_VARIABLE  # noqa: PLC0415 - few complete a partition
    from poprun.pool.pool import Pool  # noqa: PLC0415 - see above

    try:
        state = Pool(os.environ.get(POOL_VARIABLE) or DEFAULT_POOL, busy_seconds=1.0).state()
    except (PoprunError, OSError):  # there is nobody to tell: the shell shows no messages
        return ()
    return sorted(partition.name for partition in state.partitions)
