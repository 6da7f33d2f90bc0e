"""A plan as a table for users: a row for each instance, with its host, replicas, virtual IPUs and GPUs.

A large plan is folded: the first host stands for all the hosts like it, and the first instances of a host for the
others, so any plan fits a screen.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from poprun.plan.plan import LaunchPlan
from poprun.plan.render.words import bound_to, facts_of, instances_of_host, size_of, stands_for
from poprun.text.ranges import fold_hosts, fold_numbers, numbered
from poprun.text.screen import visible


@dataclass(frozen=True, slots=True, kw_only=True)
class Details:
    """The commands, options and environment variables that ``-v`` adds to the printed table of a plan."""

    command: tuple[str, ...]  # argv of the first command that poprun starts
    num_commands: int  # number of commands that poprun starts
    origins: tuple[tuple[str, str, str], ...]  # name, value and origin of each option that was given, or of all
    environment: Mapping[str, str]  # variables that poprun adds to the environment of instance 0
    frameworks: Mapping[str, Mapping[str, str]]  # variables by framework; empty without -vv


MIN_WIDTH: Final = 40  # columns below which the cells would fall apart; a narrower terminal wraps whole rows
_WHOLE_WIDTH: Final = 60  # width of a terminal below which virtual IPUs are left out
_MAX_HOSTS: Final = 4
_MAX_INSTANCES: Final = 8
_NUM_SHOWN: Final = 3
_MAX_HOSTS_LENGTH: Final = 30
_MAX_VALUE_LENGTH: Final = 24  # a longer value pushes its origin to the right
_IPUS: Final = "virtual IPUs"
_PLACES: Final = ("stage", "shard", "part")
"""The columns for the place of an instance in a shared replica; a table has only those that the plan uses."""

_HEADINGS: Final = ("host", "instance", "replicas", *_PLACES, _IPUS, "device")
_STYLES: Final = ("bold", "green", "yellow", "yellow", "yellow", "yellow", "magenta", "cyan")
_FOLDED_HOSTS: Final = "the same on each"
_FOLDED_INSTANCES: Final = "and so on"
_KEPT: Final = "\n\t" + "".join(map(chr, range(0xDC80, 0xDD00)))
"""Characters that stay as they are: line breaks, and bytes of names that are no text (PEP 383)."""

_FOLDED: Final = (_FOLDED_HOSTS, _FOLDED_INSTANCES)


def render_table(plan: LaunchPlan, *, width: int, has_color: bool, details: Details | None) -> str:
    """Return ``plan`` as a table at most ``width`` columns wide, but at least 40; coloured if ``has_color``."""
    title = Text.assemble((f"{'poprun':<11}", "bold cyan"), size_of(plan))
    facts = [Text.assemble((f"{label:<11}", "bold"), _shown(value)) for label, value in _facts(plan, details)]
    return terminal_text(title, "", _placements(plan, width), "", *facts, width=width, has_color=has_color)


def terminal_text(*parts: Table | Text | str, width: int, has_color: bool) -> str:
    """Return tables and texts, one below the other, as text for a terminal ``width`` columns wide."""
    lines = StringIO()
    console = Console(
        file=lines,
        width=max(width, MIN_WIDTH),
        force_terminal=has_color,
        color_system="standard" if has_color else None,
        no_color=not has_color,
        highlight=False,
        emoji=False,
        markup=False,
        legacy_windows=False,
    )
    for part in parts:  # the terminal wraps the lines of a text, so that they copy whole
        console.print(part, soft_wrap=not isinstance(part, Table))
    return "\n".join(line.rstrip() for line in lines.getvalue().splitlines()) + "\n"


def _placements(plan: LaunchPlan, width: int) -> Table:
    gap = 2 if width >= _WHOLE_WIDTH else 1
    table = Table(box=SIMPLE_HEAD, header_style="bold", pad_edge=False, show_edge=False, padding=(0, gap, 0, 0))
    left_out = {_IPUS} if width < _WHOLE_WIDTH or plan.ipus_per_replica == 1 else set()
    left_out |= {*_PLACES} - {*plan.parallelism.place_of(0)}
    kept = [number for number, heading in enumerate(_HEADINGS) if heading not in left_out]
    for number in kept:
        heading = _HEADINGS[number]
        table.add_column(heading, style=_STYLES[number], overflow="fold", no_wrap=heading in _HEADINGS[1:-1])
    for row in _rows(plan):
        table.add_row(*(_shown(row[number]) for number in kept), style="dim" if row[-1] in _FOLDED else None)
    return table


def _shown(text: str) -> str:
    """Return ``text`` with escaped control codes, because another user may have written them into a plan file."""
    return visible(text, keeps=_KEPT)


def _rows(plan: LaunchPlan) -> Iterator[Sequence[str]]:
    """Yield the table's rows of all hosts; of more than 4 hosts, one row stands for all but first and last."""
    num_hosts = len(plan.hosts)
    if num_hosts <= _MAX_HOSTS:
        for host_index in range(num_hosts):
            yield from _host_rows(plan, host_index)
        return
    yield from _host_rows(plan, 0)
    between = _span(plan, plan.num_instances_per_host, plan.num_instances - plan.num_instances_per_host)
    names = fold_hosts(plan.hosts[1:-1])
    hosts = names if len(names) <= _MAX_HOSTS_LENGTH else f"{num_hosts - 2:,} hosts"
    yield (hosts, *between, _FOLDED_HOSTS)
    yield from _host_rows(plan, num_hosts - 1)


def _host_rows(plan: LaunchPlan, host_index: int) -> Iterator[Sequence[str]]:
    """Yield the rows of a host's instances; of more than 8 instances, one row stands for most of them."""
    indices = instances_of_host(plan, host_index)
    num_shown = len(indices) if len(indices) <= _MAX_INSTANCES else _NUM_SHOWN
    yield _instance_row(plan, indices[0], plan.hosts[host_index])
    for index in indices[1:num_shown]:
        yield _instance_row(plan, index)
    if num_shown < len(indices):
        yield ("", *_span(plan, indices[num_shown], indices[-1]), _FOLDED_INSTANCES)
        yield _instance_row(plan, indices[-1])


def _instance_row(plan: LaunchPlan, index: int, host: str = "") -> Sequence[str]:
    return (host, *_span(plan, index, index + 1), stands_for(plan.instance(index)))


def _span(plan: LaunchPlan, first: int, last: int) -> Sequence[str]:
    """Return the table's cells, number ranges as text, for the instances from ``first`` up to ``last - 1``."""
    instances, size = range(first, last), plan.parallelism.instances_per_replica
    places = [plan.parallelism.place_of(index) for index in instances[:size]]
    numbers_of = ((place[name] for place in places if name in place) for name in _PLACES)
    start, end = plan.instance(first).ipus, plan.instance(last - 1).ipus
    ipus = range(min(start.start, end.start), max(start.stop, end.stop))
    inside = (sorted(set(numbers)) for numbers in numbers_of)
    return tuple(map(fold_numbers, (instances, plan.replicas_of(instances), *inside, ipus)))


def _facts(plan: LaunchPlan, details: Details | None) -> Iterator[tuple[str, str]]:
    """Yield label and text of each line below the table: facts about all instances, and ``-v``'s details."""
    yield from _bindings(plan)
    yield from facts_of(plan).items()
    if details is not None:
        yield from _origins(details)
        yield "command", shlex.join(details.command)
        if details.num_commands > 1:
            yield "", f"and {details.num_commands - 1:,} more like it"
        yield "variables", "of instance 0"
        yield from (("", f"{name}={value}") for name, value in sorted(details.environment.items()))
        if details.frameworks:
            yield "frameworks", "what instance 0 is told for each; port 0 stands for one that the start chooses"
        for framework, variables in details.frameworks.items():
            yield "", f"{framework}: {' '.join(f'{name}={value}' for name, value in variables.items())}"


def _origins(details: Details) -> Iterator[tuple[str, str]]:
    """Yield a line for each option: its name, its value, and where the value comes from."""
    names, values = (max((len(row[column]) for row in details.origins), default=0) for column in (0, 1))
    for index, (name, value, origin) in enumerate(details.origins):
        yield "" if index else "options", f"{name:<{names}}  {value:<{min(values, _MAX_VALUE_LENGTH)}}  {origin}"


def _bindings(plan: LaunchPlan) -> Iterator[tuple[str, str]]:
    """Yield lines that say to which cores a host's instances are bound; of more than 8 lines most are left out."""
    bindings = plan.bindings
    if not bindings:
        return
    where, local = ("", "") if len(plan.hosts) == 1 else (", on each host", "local ")
    rows = [f"{local}{numbered('instance', binding.instances)}: {bound_to(binding)}" for binding in bindings]
    if len(rows) > _MAX_INSTANCES:
        rows[_NUM_SHOWN:-1] = [f"{len(rows) - _NUM_SHOWN - 1:,} more like these"]
    yield "placement", f"{plan.placement}{where}"
    yield from (("", row) for row in rows)
