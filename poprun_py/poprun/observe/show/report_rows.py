"""Rows of tables in a report: the cells of an instance, and rows of cells as a table for a terminal. Pure."""

from collections.abc import Mapping, Sequence
from itertools import chain
from statistics import fmean
from typing import Final, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from poprun.observe.account.job_record import AttemptRecord, InstanceRecord
from poprun.text.ranges import describe_bytes, describe_rate, describe_seconds

INSTANCE: Final = "instance"
"""The heading of the column with the indices of instances."""

_LEFT: Final = ("host", "replicas", "end", "figure", "change", "operation")  # headings of columns with words


class Cell(NamedTuple):
    """A cell of a table: the value by which the table can be sorted, and its text."""

    value: object
    text: str


def instance_cells(instance: InstanceRecord, attempt: AttemptRecord) -> dict[str, Cell]:
    """Return the cells of an instance's row in a report's table, by heading; unknown values have no text."""
    seconds, peak, steps = instance.duration_seconds, instance.peak_memory_bytes, instance.num_steps
    speed = steps / seconds if steps and seconds else None
    known = [it for it in instance.curves["cpu"].middle if it is not None] if "cpu" in instance.curves else ()
    busy = fmean(known) if known else None
    waiting = instance.phase_seconds.get("waiting")
    end = instance.describe_end(is_over=attempt.is_over)
    return {
        INSTANCE: Cell(instance.index, str(instance.index)),
        **{name: Cell(value, str(value)) for name, value in (instance.place or {}).items()},
        "host": Cell(instance.host, instance.host),
        "end": Cell(end, end),
        "ran for": Cell(seconds or 0, "" if seconds is None else describe_seconds(seconds)),
        "steps": Cell(steps or 0, f"{steps:,}" if steps else ""),
        "steps/s": Cell(speed or 0, "" if speed is None else describe_rate(speed)),
        "waited": Cell(waiting or 0, "" if waiting is None else describe_seconds(waiting)),
        "processors": Cell(busy or 0, "" if busy is None else f"{busy:.2f}"),
        "peak memory": Cell(peak or 0, "" if peak is None else describe_bytes(peak)),
        "replicas": Cell(instance.replicas, instance.replicas),
    }


def text_table(rows: Sequence[Mapping[str, str]]) -> Table:
    """Return ``rows``, dicts from heading to text, as a table for a terminal, without columns that are empty."""
    table = Table(box=SIMPLE_HEAD, header_style="bold", pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    headings = [heading for heading in dict.fromkeys(chain(*rows)) if any(row.get(heading) for row in rows)]
    for heading in headings:
        table.add_column(Text(heading), justify="left" if heading in _LEFT else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(row.get(heading, "")) for heading in headings))
    return table
