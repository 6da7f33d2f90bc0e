"""Rows of the pool are read as they were written; what anybody else may have written is an error, or harmless."""

import copy
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from poprun.devices.pool.contents import read_row, row_data
from poprun.devices.pool.holders import boot_id
from poprun.devices.pool.listing import ipu_rows, partition_rows, render_json, render_rows
from poprun.devices.pool.listing import partition_row as listed
from poprun.devices.pool.pool import Pool
from poprun.devices.pool.records import REMOTE, Holder, Lease, Partition, PoolState
from poprun.devices.pool.requests import PartitionRequest, PoolRequest, refusal
from poprun.errors import PlanError, PoolError
from poprun.plan.inventory import cpu_cluster

KEY = "0" * 32
CLUSTER = cpu_cluster("box", 4)
HOLDER = Holder(pid=7, start_ticks=9, boot_id=boot_id(), pid_namespace="pid:[1]", user="ann", words="train.py")
LEASE = Lease(id=1, holder=HOLDER, since_epoch_seconds=1e9, num_ipus=2, queue="p", ipus=("cpu/0", "cpu/1"))
PARTITION = Partition(
    name="p",
    ipus=("cpu/0", "cpu/1"),
    cluster="box",
    allocation="",
    num_domains=1,
    user="ann",
    created_at_epoch_seconds=1e9,
)
NAMES = st.text(st.characters(categories=["L", "N", "P", "S"]), min_size=1, max_size=20)
NASTY = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([2**31, 2**63, -1, 10**400, 1e300, -1e300, float("nan"), float("inf"), 0.5]),
    st.floats(),
    st.text(max_size=300),
    st.sampled_from(["\x1b]0;x\x07", "\x1b[2J", "a\nb", "\r", "\u202e", "\ud800", "\0", "", REMOTE, "x" * 256]),
    st.binary(max_size=9).map(lambda data: data.decode("latin-1")),
    st.lists(st.one_of(st.text(max_size=3), st.integers(), st.none()), max_size=4),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
    st.just(json.loads("[" * 40 + "]" * 40)),
)


@given(NAMES, NAMES, st.lists(NAMES, unique=True, max_size=3), st.integers(1, 2**53), st.floats(0, 1e11))
def test_rows_are_read_as_they_were_written(
    user: str, name: str, ipus: list[str], number: int, seconds: float
) -> None:
    """A lease of a client of a server keeps its user; any other is its file's owner's."""
    holder = Holder(pid=7, start_ticks=9, boot_id=REMOTE, pid_namespace=KEY, user=f"{user}@{name}", words=user)
    lease = Lease(id=number, holder=holder, since_epoch_seconds=seconds, num_ipus=1, queue=name, ipus=tuple(ipus))
    values = {**asdict(PARTITION), "name": name, "ipus": tuple(ipus), "user": f"{user}@{name}"}
    partition = Partition(**{**values, "created_at_epoch_seconds": seconds})

    assert read_row(Lease, row_data(lease), 5) == lease
    assert read_row(Partition, row_data(partition), 5) == partition
    assert read_row(Lease, row_data(LEASE), 2**31).holder.user == str(2**31)


def leaves(values: dict[str, Any], *path: str) -> Iterator[tuple[str, ...]]:
    """Where every value stands, those that hold others among them."""
    for key, value in values.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from leaves(value, *path, key)


ROWS = {"lease": json.loads(row_data(LEASE)), "partition": json.loads(row_data(PARTITION))}
COLUMNS = [(kind, path) for kind, row in ROWS.items() for path in leaves(row)]


def within(row: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """The mapping that holds the last key of a path."""
    for key in path[:-1]:
        row = row[key]
    return row


@pytest.mark.parametrize(("kind", "path"), COLUMNS, ids=str)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=NASTY)
def test_a_column_that_somebody_edited(tmp_path: Path, kind: str, path: tuple[str, ...], value: object) -> None:
    """Whatever stands in it: an error about the pool, or what can be shown; never a traceback."""
    folder = tmp_path / "pool"
    folder.mkdir(mode=0o700, exist_ok=True)
    row = copy.deepcopy(ROWS[kind])
    within(row, path)[path[-1]] = value
    (folder / f"{kind}-{KEY}").write_text(json.dumps(row))
    problem = f"{kind}-{KEY} is not as poprun writes it"
    try:
        show_all(Pool(str(folder)).state())
    except PoolError as error:
        told = str(error)
    else:
        told = problem
    assert problem in told
    assert told.isprintable()


def show_all(state: PoolState) -> None:
    """Show a state in all the ways there are: nothing in it makes a terminal do anything."""
    partition = PartitionRequest(name="p", size=2)
    for wanted in (None, partition):
        wish = PoolRequest(num_ipus=9, choose=CLUSTER.pick(9), partition=wanted)
        shown = refusal(wish, CLUSTER, state, own=2**60, shares=True)
        assert shown.replace("\n", "").isprintable()
    rows = [*partition_rows(state), *(listed(partition, state) for partition in state.partitions)]
    for table in (rows, ipu_rows(CLUSTER, state)):
        if table:
            assert render_rows(table, list(table[0])).replace("\n", "").isprintable()
            assert render_json(table).replace("\n", "").isprintable()


@pytest.mark.parametrize(("kind", "path"), COLUMNS, ids=str)
@pytest.mark.parametrize("name", [None, "colour"])
def test_a_column_that_is_missing_or_unknown(kind: str, path: tuple[str, ...], name: str | None) -> None:
    """As in a row of another version."""
    kinds: dict[str, Any] = {"lease": Lease, "partition": Partition}
    row = copy.deepcopy(ROWS[kind])
    inner = within(row, path)
    value = inner.pop(path[-1])
    if name is not None:
        inner |= {path[-1]: value, name: 1}

    with pytest.raises(PlanError, match="missing" if name is None else "colour is no key of a row"):
        read_row(kinds[kind], json.dumps(row).encode(), os.getuid())
