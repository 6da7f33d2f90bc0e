"""Which address of each host the job's traffic uses, and why. Pure.

Addresses and not names go to the programs: what a name means may differ from host to host. All hosts have one of
the same family, because a connection has one.
"""

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass

from poprun.hosts.problems import Problem
from poprun.hosts.routes import HostRoute, Places


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What was chosen.

    Attributes:
        routes: A route for each host that has one.
        problems: The hosts that have none.
        reason: Why these, for the user.
    """

    routes: Mapping[str, HostRoute]
    problems: tuple[Problem, ...]
    reason: str


def choose_addresses(places: Mapping[str, Places], reached: Mapping[str, str], subnet: str | None) -> Choice:
    """The route to each host.

    Args:
        places: The addresses of each host, by its name.
        reached: The address at which ssh reached it, where that is known.
        subnet: The subnet that the user wants, or None.
    """
    if subnet is not None:
        network = ipaddress.ip_network(subnet)
        found = {host: [p for p in own if ipaddress.ip_address(p[1]) in network] for host, own in places.items()}
        return _chosen(found, f"no address in --host-subnet {subnet}", f"--host-subnet {subnet}")
    version = _family(places, reached)
    usable = {host: _usable(own, reached.get(host), version) for host, own in places.items()}
    return _chosen(
        usable, f"no IPv{version} address", "the way that ssh takes" if reached else "the first address"
    )


def _chosen(found: Mapping[str, Places], lack: str, reason: str) -> Choice:
    routes = {
        host: HostRoute(name=host, interface=own[0][0], address=own[0][1]) for host, own in found.items() if own
    }
    problems = tuple(
        Problem(host=host, cause=f"it has {lack}", remedy="give --host-subnet a subnet that all hosts are in")
        for host, own in found.items()
        if not own
    )
    return Choice(routes=routes, problems=problems, reason=reason)


def _usable(own: Places, reached: str | None, version: int) -> Places:
    """The addresses of a family, best first: where ssh came in, then others of that interface, then the rest."""
    family = [place for place in own if ipaddress.ip_address(place[1]).version == version]
    interface = next((name for name, address in own if address == reached), None)
    outside = [place for place in family if place[1] == reached or not ipaddress.ip_address(place[1]).is_loopback]
    return sorted(outside, key=lambda place: (place[1] != reached, place[0] != interface))


def _family(places: Mapping[str, Places], reached: Mapping[str, str]) -> int:
    """The IP version that ssh used everywhere; else 4 if every host has it, else 6."""
    versions = {ipaddress.ip_address(address).version for address in reached.values()}
    if len(versions) == 1:
        return versions.pop()
    return 4 if all(_usable(own, None, 4) for own in places.values()) else 6
