"""The contents of a pool (leases, partitions, virtual IPUs) as rows of a table or of JSON. Pure."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from poprun.devices.pool.records import Partition, PoolState, fold_names
from poprun.plan.inventory import IPUS_PER_MACHINE, Cluster
from poprun.text.ranges import fold_numbers
from poprun.text.screen import visible

Row = Mapping[str, object]

ALL: Final = "all"
_GAP: Final = "   "


def partition_rows(state: PoolState) -> list[Row]:
    """Return a dict for each partition (set of IPUs) in a pool, to print as a row of a table or as JSON."""
    return [partition_row(partition, state) for partition in state.partitions]


def partition_row(partition: Partition, state: PoolState) -> Row:
    """Return a dict that describes ``partition``: size, IPUs, user, and the job that uses it."""
    lease = state.lease(partition.lease)
    return {
        "partition": partition.name,
        "size": partition.size,
        "ilds": partition.num_domains,
        "state": "free" if lease is None else "in use",
        "ipus": fold_names(partition.ipus),
        "cluster": partition.cluster,
        "allocation": partition.allocation or ALL,
        "created_by": partition.user,
        "created_at": _moment(partition.created_at_epoch_seconds),
        "used_by": "" if lease is None else str(lease.holder),
        "used_since": "" if lease is None else _moment(lease.since_epoch_seconds),
        "waiting": len(state.waiting(partition.name)),
    }


def ipu_rows(cluster: Cluster, state: PoolState) -> list[Row]:
    """Return a dict per virtual IPU of ``cluster``, then per other IPU in use; each dict names the IPU's user."""
    partitions = {name: partition.name for partition in state.partitions for name in partition.ipus}
    leases = {name: lease for lease in state.leases for name in lease.ipus}
    known = {ipu.name: ipu for ipu in cluster.ipus}

    def row(name: str) -> Row:
        ipu, lease = known.get(name), leases.get(name)
        occupants = ", ".join(map(str, ipu.occupants)) if ipu else ""
        return {
            "ipu": ipu and ipu.index,
            "name": name,
            "machine": ipu and ipu.index // IPUS_PER_MACHINE,
            "ild": ipu and ipu.domain,
            "partition": partitions.get(name, ""),
            "used_by": str(lease.holder) if lease else occupants,
        }

    return [row(name) for name in (*known, *sorted(state.taken - known.keys(), key=_by_number))]


def cluster_rows(cluster: Cluster, state: PoolState) -> list[Row]:
    """Return a list with one dict, which describes ``cluster``: its size, free IPUs, memory and hosts."""
    return [
        {
            "cluster": cluster.name,
            "kind": cluster.kind,
            "ipus": None if cluster.is_open else len(cluster.ipus),
            "free": None if cluster.is_open else _num_free(cluster, _whole(cluster), state),
            "ilds": cluster.num_domains,
            "ild_size": cluster.domain_size,
            "memory_per_ipu_bytes": cluster.memory_bytes,
            "hosts": ",".join(cluster.hosts) or "this machine",
        }
    ]


def allocation_rows(cluster: Cluster, state: PoolState) -> list[Row]:
    """Return a dict for the whole ``cluster`` of virtual IPUs, then one for each named part (allocation) of it."""
    parts = {ALL: _whole(cluster), **cluster.allocations}
    return [
        {
            "allocation": name,
            "cluster": cluster.name,
            "ipus": fold_numbers(part) if not cluster.is_open else "",
            "free": None if cluster.is_open else _num_free(cluster, part, state),
            "partitions": sum((partition.allocation or ALL) == name for partition in state.partitions),
        }
        for name, part in parts.items()
    ]


def render_rows(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """Return ``rows`` as the text of a table with ``columns``, in which unknown values are dashes."""
    titles = {"ilds": "ILDs", "ild": "ILD", "ild_size": "ILD size", "ipus": "IPUs", "ipu": "IPU"}
    header = [titles.get(name, name.replace("_", " ").capitalize()) for name in columns]
    cells = [["-" if row[name] in (None, "") else visible(str(row[name])) for name in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    lines = [
        _GAP.join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in [header, *cells]
    ]
    rule = "─" * (sum(widths) + len(_GAP) * (len(widths) - 1))
    return "\n".join([lines[0], rule, *lines[1:]]) + "\n"


def render_json(rows: object) -> str:
    """Return ``rows`` as JSON text that ends with a line break."""
    return json.dumps(rows, indent=2) + "\n"


def _by_number(name: str) -> tuple[str, int, str]:
    stem, _, number = name.rpartition("/")
    return stem, int(number) if number.isdecimal() else 0, name


def _num_free(cluster: Cluster, part: range, state: PoolState) -> int:
    taken = state.taken
    return sum(ipu.index in part and ipu.name not in taken and not ipu.occupants for ipu in cluster.ipus)


def _whole(cluster: Cluster) -> range:
    """Return the range of the indices of the virtual IPUs in ``cluster``; the first index need not be 0."""
    return range(cluster.ipus[0].index, cluster.ipus[-1].index + 1) if cluster.ipus else range(0)


def _moment(epoch_seconds: float) -> str:
    return datetime.fromtimestamp(epoch_seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
