"""Pods, by their names or by a description in YAML, and the part of a pod that a machine stands for.

Pure: text in, a :class:`Cluster` out. A pod may be of any size, because nothing of it need exist to plan for it.
"""

import re
from collections.abc import Collection
from dataclasses import replace
from typing import Final

from poprun.errors import PlanError
from poprun.plan.inventory import IPUS_PER_MACHINE, MAX_DOMAIN_SIZE, POD, Cluster, VirtualIpu
from poprun.plan.request import VipuSettings, check_count
from poprun.text.fields import FieldReader
from poprun.text.host_names import parse_hosts
from poprun.text.input_files import parse_yaml
from poprun.text.ranges import parse_numbers

_NAME: Final = re.compile(r"(?:Bow-)?POD[-_]?(\d+)", re.IGNORECASE)
_SAFE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_KEYS: Final = ("name", "num_machines", "machines_per_domain", "hosts", "memory_per_ipu_bytes", "allocations")
_OPTIONAL: Final = ("machines_per_domain", "hosts", "memory_per_ipu_bytes", "allocations")
_MAX_IPUS: Final = 2**20
_IPU_MEMORY_BYTES: Final = 900 * 10**6
"""In-processor memory of one IPU of an IPU-Machine M2000: 900 MB."""


def named_pod(name: str) -> Cluster | None:
    """The pod with a name such as ``POD16``, ``POD64`` or ``POD256``; None when that is no name of one.

    Raises:
        PlanError: If it has no whole number of IPU-Machines.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    num_ipus = int(match[1])
    if num_ipus % IPUS_PER_MACHINE or not 0 < num_ipus <= _MAX_IPUS:
        raise PlanError(f"{name}: a pod has a multiple of {IPUS_PER_MACHINE} IPUs, at most {_MAX_IPUS:,}")
    return _pod(f"POD{num_ipus}", num_ipus, min(num_ipus, MAX_DOMAIN_SIZE), memory_bytes=_IPU_MEMORY_BYTES)


def read_pod(text: str, source: str) -> Cluster:
    """The pod that YAML describes.

    Keys: ``name``, ``num_machines`` (of 4 IPUs), and optionally ``machines_per_domain`` (IPU-Machines of an
    IPU-Link domain, at most 16), ``hosts``, ``memory_per_ipu_bytes``, and ``allocations``: names with the
    IPU-Machines that belong to them, such as ``0-7``.

    Args:
        text: The file's.
        source: Its name, for messages.

    Raises:
        PlanError: If it is no YAML, or describes no pod; the message names the file and the key.
    """
    try:
        values = parse_yaml(text)
    except ValueError as error:
        raise PlanError(f"{source}: no YAML ({error})") from None
    if isinstance(values, dict):
        values = dict.fromkeys(_OPTIONAL) | values
    read = FieldReader(source=source, values=values)
    read.expect_keys(_KEYS)
    num_ipus = _num_ipus(read)
    domain_size = _machines_per_domain(read) * IPUS_PER_MACHINE
    if num_ipus > domain_size and num_ipus % domain_size:
        raise PlanError(
            f"{source}: num_machines {read.count('num_machines')} is no multiple of machines_per_domain "
            f"{domain_size // IPUS_PER_MACHINE}: the IPU-Link domains of a pod are alike"
        )
    return _pod(
        _checked_name(read.text("name"), "name", source),
        num_ipus,
        domain_size,
        memory_bytes=read.optional("memory_per_ipu_bytes", read.count),
        allocations=_allocations(read, source, num_ipus // IPUS_PER_MACHINE),
        hosts=() if read.is_null("hosts") else read.converted("hosts", parse_hosts),
    )


def on_machine(pod: Cluster, names: Collection[str]) -> Cluster:
    """The part of ``pod`` that the machine with these ``names`` stands for.

    A pod that names hosts is shared out to them evenly. One that names none, or others, is all the machine's.
    """
    return replace(pod, ipus=next((share_of(pod, host) for host in pod.hosts if host in names), pod.ipus))


def share_of(pod: Cluster, host: str) -> tuple[VirtualIpu, ...]:
    """The IPUs of one of the hosts that a pod names: neighbours, equally many for each."""
    size, number = len(pod.ipus) // len(pod.hosts), pod.hosts.index(host)
    return pod.ipus[number * size : (number + 1) * size]


def allocation_of(pod: Cluster, vipu: VipuSettings) -> str | None:
    """The allocation of the pod that is asked for, under either name of the option; None for all of the pod.

    A pod that describes none is one, whatever it is called.
    """
    name = vipu.allocation or vipu.cluster
    return None if name == pod.name or not pod.allocations else name


def _pod(
    name: str,
    num_ipus: int,
    domain_size: int,
    *,
    memory_bytes: int | None,
    allocations: dict[str, range] | None = None,
    hosts: tuple[str, ...] = (),
) -> Cluster:
    ipus = (VirtualIpu(index=i, name=f"{name}/{i}", domain=i // domain_size) for i in range(num_ipus))
    return Cluster(
        name=name,
        kind=POD,
        ipus=tuple(ipus),
        memory_bytes=memory_bytes,
        allocations=allocations or {},
        hosts=hosts,
    )


def _num_ipus(read: FieldReader) -> int:
    num_machines = read.count("num_machines")
    if not 0 < num_machines <= _MAX_IPUS // IPUS_PER_MACHINE:
        raise PlanError(
            f"{read.source}: num_machines {num_machines}: it is 1 to {_MAX_IPUS // IPUS_PER_MACHINE:,}"
        )
    return num_machines * IPUS_PER_MACHINE


def _machines_per_domain(read: FieldReader) -> int:
    most = MAX_DOMAIN_SIZE // IPUS_PER_MACHINE
    num_machines = read.optional("machines_per_domain", read.count)
    if num_machines is None:
        return min(most, read.count("num_machines"))
    if not 0 < num_machines <= most:
        raise PlanError(
            f"{read.source}: machines_per_domain {num_machines}: IPU-Links connect 1 to {most} IPU-Machines"
        )
    return num_machines


def _allocations(read: FieldReader, source: str, num_machines: int) -> dict[str, range]:
    if read.is_null("allocations"):
        return {}
    nested = read.nested("allocations")
    nested.expect_keys(list(nested.values) if isinstance(nested.values, dict) else ())
    found = {}
    for name in nested.values if isinstance(nested.values, dict) else ():
        machines = _machines(nested, name)
        if not machines or machines[-1] >= num_machines or len(machines) != machines[-1] - machines[0] + 1:
            raise PlanError(
                f"{source}: allocations.{name}: give neighbours of 0 to {num_machines - 1}, such as 0-3"
            )
        first, end = machines[0] * IPUS_PER_MACHINE, (machines[-1] + 1) * IPUS_PER_MACHINE
        found[_checked_name(str(name), "allocations", source)] = range(first, end)
    return found


def _machines(read: FieldReader, name: str) -> tuple[int, ...]:
    """A range, or one number, which YAML reads as such."""
    value = read.values[name] if isinstance(read.values, dict) else None
    if isinstance(value, int) and not isinstance(value, bool):
        check_count(f"allocations.{name}", value, minimum=0)
        return (value,)
    return read.converted(name, parse_numbers)


def _checked_name(name: str, key: str, source: str) -> str:
    if not _SAFE.fullmatch(name):
        raise PlanError(f"{source}: {key}: {name!r} is no name: give letters, digits, dots and dashes")
    return name
