"""What keeps hosts out of a job, and the one table in which all of it stands. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from poprun.text.host_names import fold_hosts

HOST: Final = "{host}"
"""Stands for the host's name in a remedy, so that hosts with the same problem share a row."""

_HEADINGS: Final = ("host", "cause", "remedy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What keeps a host out of a job.

    Attributes:
        host: The host.
        cause: What was found there.
        remedy: What to do about it; ``HOST`` in it is the host's name.
        lacks_environment: Whether a copy of poprun's Python environment may be the remedy, too.
    """

    host: str
    cause: str
    remedy: str
    lacks_environment: bool = False


def render_problems(problems: Sequence[Problem], num_hosts: int) -> str:
    """One table of all problems; hosts with the same one share a row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for problem in problems:
        rows.setdefault((problem.cause, problem.remedy), []).append(problem.host)
    cells = [
        (fold_hosts(hosts), cause, remedy.replace(HOST, hosts[0] if len(hosts) == 1 else "HOST"))
        for (cause, remedy), hosts in rows.items()
    ]
    widths = [max(len(row[column]) for row in [_HEADINGS, *cells]) for column in range(2)]
    lines = [f"  {host:{widths[0]}}  {cause:{widths[1]}}  {remedy}" for host, cause, remedy in [_HEADINGS, *cells]]
    num_bad = len({problem.host for problem in problems})
    return "\n".join([f"{num_bad} of {num_hosts} hosts cannot take part:", *lines])
