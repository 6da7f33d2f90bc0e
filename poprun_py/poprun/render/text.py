"""A plan as PopRun's own ASCII table: rows of hosts, ILDs (IPU-Link domains), instances, bound cores, replicas.

A cell spans what belongs to it in the rows below. A table wider than ``MAX_WIDTH`` is folded from the bottom
up: the replicas of an instance into one range, then the instances of a host, then the hosts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from poprun.plan.plan import LaunchPlan
from poprun.text.ranges import fold_hosts, fold_numbers

MAX_WIDTH: Final = 118

_TITLE: Final = "poprun topology"
_LABELS: Final = ("hosts", "ILDs", "instances", "cores", "replicas")
_LABEL_WIDTH: Final = max(map(len, _LABELS))
_TITLE_WIDTH: Final = len(_TITLE) + 2 - (_LABEL_WIDTH + 3)  # columns of the title that are not above labels
_MAX_HOSTS_LENGTH: Final = 60


@dataclass(frozen=True, slots=True)
class _Cells:
    """The rows of a table; the cells of each row span equally many cells of the last row."""

    hosts: Sequence[str]
    instances: Sequence[str]
    replicas: Sequence[str]
    cores: Sequence[str] = ()
    ilds: Sequence[str] = ("0",)

    @property
    def labelled_rows(self) -> Sequence[tuple[str, Sequence[str]]]:
        """The rows that are shown."""
        rows = (self.hosts, self.ilds, self.instances, self.cores, self.replicas)
        return [(label, row) for label, row in zip(_LABELS, rows, strict=True) if row]

    @property
    def leaf_width(self) -> int:
        """Width of a cell of the last row such that every text above fits its span."""
        num_leaves = len(self.replicas)
        widest = max(map(len, self.replicas))
        for _, row in self.labelled_rows:
            needed = max(_TITLE_WIDTH // len(row), *(len(text) + 2 for text in row))
            span = num_leaves // len(row)
            widest = max(widest, -(-(needed + 1) // span) - 3)
        return widest

    @property
    def width(self) -> int:
        """Columns of everything to the right of the labels."""
        return len(self.replicas) * (self.leaf_width + 3) - 1


def render_text(plan: LaunchPlan) -> str:
    """``plan`` as a table of ASCII characters."""
    foldings = (_with_ilds(cells, plan.num_ilds) for cells in _foldings(plan))
    widest = (cells for cells in foldings if cells.width <= MAX_WIDTH)
    cells = next(widest, _with_ilds(_folded_hosts(plan), plan.num_ilds))
    label_rule = "-" * (_LABEL_WIDTH + 2)
    inner = len(label_rule) + 1 + cells.width
    lines = [" " + "=" * inner, f"|{_TITLE:^{inner}}|", f"|{'=' * inner}|"]
    for index, (label, row) in enumerate(cells.labelled_rows):
        if index:
            lines.append(f"|{label_rule}|{'-' * cells.width}|")
        lines.append(f"| {label:<{_LABEL_WIDTH}} |{'|'.join(_row(row, cells))}|")
    return "\n".join([*lines, " " + "-" * inner]) + "\n"


def _row(row: Sequence[str], cells: _Cells) -> Iterator[str]:
    if row is cells.replicas:
        return (f" {text:<{cells.leaf_width}} " for text in row)
    span = (cells.width + 1) // len(row) - 1
    return (f"{text:^{span}}" for text in row)


def _with_ilds(cells: _Cells, num_ilds: int) -> _Cells:
    """``cells`` with a cell for each IPU-Link domain where that divides their columns, else with one for all."""
    divides = len(cells.replicas) % num_ilds == 0
    return replace(cells, ilds=_items(num_ilds) if divides else [fold_numbers(range(num_ilds))])


def _foldings(plan: LaunchPlan) -> Iterator[_Cells]:
    """The tables from the fullest to the second narrowest; those with too many cells to fit are left out."""
    num_hosts, num_instances, num_replicas = len(plan.hosts), plan.num_instances, plan.num_replicas
    if num_replicas <= MAX_WIDTH:
        yield _Cells(plan.hosts, _items(num_instances), _items(num_replicas), _bound_cores(plan))
    if num_instances <= MAX_WIDTH:
        yield _Cells(plan.hosts, _items(num_instances), _shares(num_replicas, num_instances), _bound_cores(plan))
    if num_hosts <= MAX_WIDTH:
        yield _Cells(plan.hosts, _shares(num_instances, num_hosts), _shares(num_replicas, num_hosts))


def _folded_hosts(plan: LaunchPlan) -> _Cells:
    hosts = fold_hosts(plan.hosts)
    if len(hosts) > _MAX_HOSTS_LENGTH:
        hosts = f"{plan.hosts[0]} ... {plan.hosts[-1]} ({len(plan.hosts)} hosts)"
    return _Cells((hosts,), _shares(plan.num_instances, 1), _shares(plan.num_replicas, 1))


def _items(count: int) -> list[str]:
    return [str(index) for index in range(count)]


def _shares(count: int, num_parts: int) -> list[str]:
    """``count`` numbers dealt to ``num_parts`` ranges."""
    size = count // num_parts
    return [fold_numbers(range(part * size, (part + 1) * size)) for part in range(num_parts)]


def _bound_cores(plan: LaunchPlan) -> list[str]:
    """The cores that each instance is bound to; nothing when none is."""
    bindings = (instance.binding for instance in plan.instances()) if plan.bindings else ()
    return [fold_numbers(binding.cores) for binding in bindings if binding is not None]
