"""A plan as the ASCII table that PopRun prints: rows of hosts, IPU-Link domains (ILDs), instances, replicas.

A cell spans what belongs to it in the rows below. A table wider than ``MAX_WIDTH`` is folded from the bottom
up: the replicas of an instance into one range, then the instances of a host, then the hosts.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from poprun.plan.plan import LaunchPlan
from poprun.text.ranges import fold_hosts, fold_numbers

MAX_WIDTH: Final = 118

_TITLE: Final = "poprun topology"
_LABEL_WIDTH: Final = len("instances")
_TITLE_WIDTH: Final = len(_TITLE) + 2 - (_LABEL_WIDTH + 3)  # columns of the title that are not above labels
_MAX_HOSTS_LENGTH: Final = 60


@dataclass(frozen=True, slots=True)
class _Cells:
    """The rows of an ASCII table, by label; the cells of a row are all equally wide."""

    rows: Mapping[str, Sequence[str]]

    @property
    def leaves(self) -> Sequence[str]:
        """The last row of the table, which has the most cells."""
        return [*self.rows.values()][-1]

    @property
    def leaf_width(self) -> int:
        """The width of the last row's cells, large enough that in every row each text fits into its cell."""
        num_leaves = len(self.leaves)
        widest = max(map(len, self.leaves))
        for row in self.rows.values():
            needed = max(_TITLE_WIDTH // len(row), *(len(text) + 2 for text in row))
            span = num_leaves // len(row)
            widest = max(widest, -(-(needed + 1) // span) - 3)
        return widest

    @property
    def width(self) -> int:
        """The width of the table to the right of its labels, in characters."""
        return len(self.leaves) * (self.leaf_width + 3) - 1


def render_text(plan: LaunchPlan) -> str:
    """Return ``plan`` as the ASCII table of hosts, instances and replicas that Graphcore's PopRun prints."""
    for cells in _foldings(plan):
        if cells.width <= MAX_WIDTH:
            break
    label_rule = "-" * (_LABEL_WIDTH + 2)
    inner = len(label_rule) + 1 + cells.width
    lines = [" " + "=" * inner, f"|{_TITLE:^{inner}}|", f"|{'=' * inner}|"]
    for index, (label, row) in enumerate(cells.rows.items()):
        if index:
            lines.append(f"|{label_rule}|{'-' * cells.width}|")
        lines.append(f"| {label:<{_LABEL_WIDTH}} |{'|'.join(_row(row, cells))}|")
    return "\n".join([*lines, " " + "-" * inner]) + "\n"


def _row(row: Sequence[str], cells: _Cells) -> Iterator[str]:
    if row is cells.leaves:
        return (f" {text:<{cells.leaf_width}} " for text in row)
    span = (cells.width + 1) // len(row) - 1
    return (f"{text:^{span}}" for text in row)


def _cells(plan: LaunchPlan, hosts: Sequence[str], rows: Mapping[str, Sequence[str]]) -> _Cells:
    """Return a table of hosts, IPU-Link domains and ``rows``: a cell for each domain if the last row's cells
    divide evenly over the domains, otherwise one cell for all domains.
    """
    shown = {label: row for label, row in rows.items() if row}
    divides = len(_Cells(shown).leaves) % plan.num_ilds == 0
    ilds = _items(plan.num_ilds) if divides else [fold_numbers(range(plan.num_ilds))]
    return _Cells({"hosts": hosts, "ILDs": ilds, **shown})


def _foldings(plan: LaunchPlan) -> Iterator[_Cells]:
    """Yield tables of the plan, each with less detail than the table before, but none that is surely too wide."""
    num_hosts, num_instances, num_replicas = len(plan.hosts), plan.num_instances, plan.num_replicas
    if plan.parallelism.is_shared and num_instances <= MAX_WIDTH:
        yield _cells(plan, plan.hosts, _shared_rows(plan))
    if not plan.parallelism.is_shared and num_replicas <= MAX_WIDTH:
        yield _cells(plan, plan.hosts, _rows(_items(num_instances), _items(num_replicas), _bound_cores(plan)))
    if not plan.parallelism.is_shared and num_instances <= MAX_WIDTH:
        yield _cells(plan, plan.hosts, _rows(*_ranges(plan, num_instances), _bound_cores(plan)))
    if num_hosts <= MAX_WIDTH:
        yield _cells(plan, plan.hosts, _rows(*_ranges(plan, num_hosts)))
    hosts = fold_hosts(plan.hosts)
    if len(hosts) > _MAX_HOSTS_LENGTH:
        hosts = f"{plan.hosts[0]} ... {plan.hosts[-1]} ({len(plan.hosts)} hosts)"
    yield _cells(plan, [hosts], _rows(*_ranges(plan, 1)))


def _rows(
    instances: Sequence[str], replicas: Sequence[str], cores: Sequence[str] = ()
) -> Mapping[str, Sequence[str]]:
    return {"instances": instances, "cores": cores, "replicas": replicas}


def _shared_rows(plan: LaunchPlan) -> Mapping[str, Sequence[str]]:
    """Return the table's rows for replicas that instances share: replicas, stages, shards, instances."""
    size, tensor = plan.parallelism.instances_per_replica, plan.parallelism.tensor
    places = [plan.parallelism.place_of(index) for index in range(plan.num_instances)]
    return {
        "replicas": [str(place["replica"]) for place in places[::size]],
        "stages": [str(place["stage"]) for place in places[::tensor] if "stage" in place],
        "shards": [str(place["shard"]) for place in places if "shard" in place],
        "parts": [str(place["part"]) for place in places if "part" in place],
        "cores": _bound_cores(plan),
        "instances": _items(plan.num_instances),
    }


def _ranges(plan: LaunchPlan, num_parts: int) -> tuple[list[str], list[str]]:
    """Return the texts of ``num_parts`` equal ranges of instances, and the texts of the replicas of each range."""
    size = plan.num_instances // num_parts
    instances = [range(part * size, (part + 1) * size) for part in range(num_parts)]
    return [*map(fold_numbers, instances)], [fold_numbers(plan.replicas_of(part)) for part in instances]


def _items(count: int) -> list[str]:
    return [str(index) for index in range(count)]


def _bound_cores(plan: LaunchPlan) -> list[str]:
    """Return for each instance the text of the cores it is bound to; [] if instances are not bound."""
    bindings = (instance.binding for instance in plan.instances()) if plan.bindings else ()
    return [fold_numbers(binding.cores) for binding in bindings if binding is not None]
