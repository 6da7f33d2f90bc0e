"""Pods (groups of IPUs), found by name or described in YAML, and the part of a pod on one machine. Pure.

The functions get text and return a :class:`Cluster`. A pod may have any size, because nothing of the pod need
exist for a plan.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Final

from poprun.errors import PlanError
from poprun.plan.inventory import IPUS_PER_MACHINE, MAX_DOMAIN_SIZE, POD, Cluster, VirtualIpu
from poprun.plan.request import VipuSettings
from poprun.text.fields import between, read_record
from poprun.text.input_files import parse_yaml
from poprun.text.ranges import Hosts, parse_numbers

_NAME: Final = re.compile(r"(?:Bow-)?POD[-_]?(\d+)", re.IGNORECASE)
_SAFE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_MAX_IPUS: Final = 2**20
_IPU_MEMORY_BYTES: Final = 900 * 10**6  # in-processor memory of one IPU in an IPU-Machine M2000: 900 MB


def _check_name(name: str) -> str:
    if not _SAFE.fullmatch(name):
        raise ValueError(f"{name!r} is no name: give letters, digits, dots and dashes")
    return name


def _machine_numbers(value: object) -> tuple[int, ...]:
    """Return the numbers of IPU-Machines in ``value``: a text such as ``0-3``, or one int from YAML."""
    return (value,) if type(value) is int and value >= 0 else parse_numbers(str(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class PodDescription:
    """The contents of a YAML file that describes a pod: its size, hosts and named parts."""

    name: Annotated[str, _check_name]
    num_machines: Annotated[int, between(1, _MAX_IPUS // IPUS_PER_MACHINE)]  # IPU-Machines, of 4 IPUs each
    # IPU-Machines of an IPU-Link domain; None for the largest possible number
    machines_per_domain: Annotated[int, between(1, MAX_DOMAIN_SIZE // IPUS_PER_MACHINE)] | None = None
    hosts: Hosts | None = None  # the hosts of the pod, in range notation, or None
    memory_per_ipu_bytes: int | None = None  # memory of an IPU, or None if unknown
    # names of allocations with their IPU-Machines, such as ``0-7``, or None
    allocations: Mapping[str, Annotated[Any, _machine_numbers]] | None = None


_OPTIONAL: Final = [field.name for field in fields(PodDescription) if field.default is None]


def named_pod(name: str) -> Cluster | None:
    """Return the pod called ``name``, such as ``POD16`` or ``POD256``; None if ``name`` names no pod."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    num_ipus = int(match[1])
    if num_ipus % IPUS_PER_MACHINE or not 0 < num_ipus <= _MAX_IPUS:
        raise PlanError(f"{name}: a pod has a multiple of {IPUS_PER_MACHINE} IPUs, at most {_MAX_IPUS:,}")
    return _pod(f"POD{num_ipus}", num_ipus, min(num_ipus, MAX_DOMAIN_SIZE), memory_bytes=_IPU_MEMORY_BYTES)


def read_pod(text: str, source: str) -> Cluster:
    """Return the pod that the YAML ``text`` of the file ``source`` describes (:class:`PodDescription`)."""
    try:
        values = parse_yaml(text)
    except ValueError as error:
        raise PlanError(f"{source}: no YAML ({error})") from None
    if isinstance(values, dict):
        values = dict.fromkeys(_OPTIONAL) | values
    described = read_record(PodDescription, values, source, noun="a pod")
    num_machines, most = described.num_machines, MAX_DOMAIN_SIZE // IPUS_PER_MACHINE
    per_domain = described.machines_per_domain or min(most, num_machines)
    if num_machines > per_domain and num_machines % per_domain:
        raise PlanError(
            f"{source}: num_machines {num_machines} is no multiple of machines_per_domain {per_domain}: the "
            "IPU-Link domains of a pod are alike"
        )
    return _pod(
        described.name,
        num_machines * IPUS_PER_MACHINE,
        per_domain * IPUS_PER_MACHINE,
        memory_bytes=described.memory_per_ipu_bytes,
        allocations=_allocations(described, source),
        hosts=described.hosts or (),
    )


def on_machine(pod: Cluster, names: Collection[str]) -> Cluster:
    """Return ``pod`` with only the IPUs of its host that has one of ``names``; all IPUs if no host has one."""
    return replace(pod, ipus=next((share_of(pod, host) for host in pod.hosts if host in names), pod.ipus))


def share_of(pod: Cluster, host: str) -> tuple[VirtualIpu, ...]:
    """Return the IPUs that the host ``host`` has in ``pod``; each host has equally many consecutive IPUs."""
    size, number = len(pod.ipus) // len(pod.hosts), pod.hosts.index(host)
    return pod.ipus[number * size : (number + 1) * size]


def allocation_of(pod: Cluster, vipu: VipuSettings) -> str | None:
    """Return the name of the pod's part (allocation) that the user chose by an option; None for the whole pod."""
    name = vipu.allocation or vipu.cluster
    # a pod without allocations is itself one allocation, whatever name the user gave
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


def _allocations(described: PodDescription, source: str) -> dict[str, range]:
    """Return the IPUs of each named part (allocation) of a pod. Raises PlanError if a part is not possible."""
    last, ranges = described.num_machines - 1, {}
    for name, machines in (described.allocations or {}).items():
        if not _SAFE.fullmatch(name):
            raise PlanError(f"{source}: allocations: {name!r} is no name: give letters, digits, dots and dashes")
        numbers = tuple(machines)
        if not numbers or numbers[-1] > last or len(numbers) != numbers[-1] - numbers[0] + 1:
            raise PlanError(f"{source}: allocations.{name}: give neighbours of 0 to {last}, such as 0-3")
        ranges[name] = range(numbers[0] * IPUS_PER_MACHINE, (numbers[-1] + 1) * IPUS_PER_MACHINE)
    return ranges
