"""The leases of a job of several hosts: taken on each host's own pool before anything starts, on all or on none.

A process on each host (`host_keeper`) asks the pool there. Hosts are asked one after the other, in an order that
is the same for all jobs, whatever they call the hosts: a job that waits holds only hosts that come before the one
it waits for, so two jobs never wait for each other, and of two that want the same hosts at once one gets them all.
"""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from poprun.errors import HostsError, PoprunError
from poprun.hosts.routes import JobNetwork
from poprun.lease.keeper_line import Keeper, Message
from poprun.plan.plan import LaunchPlan
from poprun.plan.plan_file import plan_to_dict
from poprun.pool.records import HeldLease
from poprun.probe.machine import names_of_this_machine

_HELLO_SECONDS: Final = 60.0
_SLACK_SECONDS: Final = 60.0
_LEAVE_SECONDS: Final = 3.0


@contextmanager
def leased_on_hosts(plan: LaunchPlan, *, is_fixed: bool) -> Iterator["HostLeases"]:
    """Hold what the job needs on each of its hosts.

    Args:
        plan: The job.
        is_fixed: Whether the job needs just those devices that its plan names.

    Raises:
        PoprunError: What a host's pool answers, with the host's name: see `poprun.lease.ipus.leased`.
        HostsError: If a host does not answer, or two are one machine.
    """
    leases = HostLeases(plan, is_fixed=is_fixed)
    try:
        leases.take()
        yield leases
    finally:
        leases.end()


class HostLeases:
    """What a job holds on each of its hosts; :func:`leased_on_hosts` makes it."""

    def __init__(self, plan: LaunchPlan, *, is_fixed: bool) -> None:
        self._plan = plan
        self._is_fixed = is_fixed
        self._here = names_of_this_machine(plan.hosts)
        self._keepers: dict[str, Keeper] = {}
        self._granted: dict[str, Message] = {}

    def take(self) -> None:
        """Take everything; see :func:`leased_on_hosts` for what it raises."""
        for host in self._plan.hosts:
            self._begin(host, self._plan)
        until = time.monotonic() + _HELLO_SECONDS
        machines = {
            host: str(keeper.answer("machine", until)["machine"]) for host, keeper in self._keepers.items()
        }
        check_machines(machines)
        for host in sorted(self._keepers, key=lambda host: machines[host]):
            self._granted[host] = self._keepers[host].take(_until(self._plan))

    def renew(self) -> None:
        """Take anew what was lost with its host, before the job is started again.

        It never waits: a job that holds some hosts and waits for one that comes before them might wait for ever.

        Raises:
            HostsError: If a host does not give it.
        """
        plan = replace(self._plan, vipu=replace(self._plan.vipu, waits_for_devices=False))
        for host in [host for host, keeper in self._keepers.items() if not keeper.is_there()]:
            self._keepers[host].release()
            self._keepers[host].end(time.monotonic())
            try:
                keeper = self._begin(host, plan)
                keeper.answer("machine", time.monotonic() + _HELLO_SECONDS)
                self._granted[host] = keeper.take(_until(plan))
            except PoprunError as error:
                raise HostsError(str(error)) from None

    def on(self, network: JobNetwork) -> JobNetwork:
        """``network`` with what each host has given."""
        hosts = tuple(
            replace(
                route,
                devices=tuple(self._granted[route.name]["devices"]) or route.devices,
                keeper=self._granted[route.name]["address"],
            )
            for route in network.hosts
        )
        return replace(network, hosts=hosts, keepers=tuple(keeper.pid for keeper in self._keepers.values()))

    def held(self) -> tuple[HeldLease, ...]:
        """What the job holds, host by host."""
        return tuple(
            HeldLease(host=host, names=tuple(names), pool=pool, partition=partition)
            for host in self._plan.hosts
            for names, pool, partition in self._granted[host]["held"]
        )

    def end(self) -> None:
        """Give everything back."""
        for keeper in self._keepers.values():
            keeper.release()
        until = time.monotonic() + _LEAVE_SECONDS
        for keeper in self._keepers.values():
            keeper.end(until)

    def _begin(self, host: str, plan: LaunchPlan) -> Keeper:
        """Start who is to keep the lease on ``host``."""
        keeper = self._keepers[host] = Keeper(host, None if host in self._here else plan.remote)
        return keeper.say({"plan": json.dumps(plan_to_dict(plan)), "is_fixed": self._is_fixed})


def check_machines(machines: Mapping[str, str]) -> None:
    """See that each host has a pool of its own.

    Args:
        machines: What tells the pools of the hosts from each other, by host.

    Raises:
        HostsError: If two hosts share one: a job would wait for itself.
    """
    first: dict[str, str] = {}
    for host, machine in machines.items():
        if (twin := first.setdefault(machine, host)) != host:
            raise HostsError(
                f"{twin} and {host} have one pool of virtual IPUs, so they are one machine: name it once in "
                "--host, or give each a pool of its own with --pool, in a folder that each host has to itself"
            )


def _until(plan: LaunchPlan) -> float | None:
    """When a host must have answered; None where the job waits for others."""
    vipu = plan.vipu
    if vipu.waits_for_devices:
        return None
    return time.monotonic() + 2 * vipu.server_timeout_seconds + vipu.partition_attempts + _SLACK_SECONDS
