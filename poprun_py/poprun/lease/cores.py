"""Cores of a job's own: asked of the pool before it starts, given back when it has ended."""

import shlex
import socket
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from poprun.errors import PlanError
from poprun.lease.queue import pool_of, wait_for
from poprun.plan.inventory import CORE, Cluster, VirtualIpu
from poprun.plan.placement import flat_map
from poprun.plan.plan import LaunchPlan
from poprun.plan.planner import place
from poprun.plan.topology import MachineFacts
from poprun.pool.records import HeldLease
from poprun.pool.requests import Wish
from poprun.text import screen

_QUEUE = "core/"
"""Who waits for cores does not wait behind those who wait for virtual IPUs."""


@contextmanager
def cores_leased(
    plan: LaunchPlan, facts: MachineFacts | None, tell: Callable[[str], None] = screen.tell
) -> Iterator[tuple[LaunchPlan, HeldLease]]:
    """Hold the cores that the instances have to themselves on this machine; the plan with them, and the lease.

    Args:
        plan: The job.
        facts: What the job may use of the machine; None when it needs just those cores that its plan names.
        tell: Tells the user of waiting.

    Raises:
        IpusTakenError: If other jobs hold them, and this one does not wait.
        PoolError: If the pool cannot be used.
    """
    asker = CoreAsker(plan, facts)
    pool = pool_of(plan)
    ticket = pool.ask(shlex.join(plan.program), asker.wish())
    try:
        ticket = wait_for(pool, ticket, asker, tell)
        held = HeldLease(host=plan.hosts[0], names=ticket.ipus, pool=pool.file, descriptor=ticket.descriptor)
        yield asker.placed, held
    finally:
        pool.release(ticket)


class CoreAsker:
    """The cores that a job wishes for; ``placed`` is its plan on those that it was offered last."""

    waits_for_others = False

    def __init__(self, plan: LaunchPlan, facts: MachineFacts | None) -> None:
        self.plan = self.placed = plan
        self._facts = facts
        cpus = () if facts is None else facts.cpus or flat_map(facts.cores)
        self._siblings = {cpu: [_name(it.number) for it in cpus if it.core == cpu.core] for cpu in cpus}
        there = (cpu.number for cpu in cpus) if cpus else _bound(plan)
        self.cluster = Cluster(name=socket.gethostname(), kind=CORE, ipus=_named(there))

    def wish(self, *, looks_again: bool = False) -> Wish:
        """As many cores as there are threads, or just those that the plan names; they are the same at any time."""
        del looks_again
        threads = self.plan.num_instances_per_host * (self.plan.threads_per_replica or 1)
        num_cores = len(_bound(self.plan)) if self._facts is None else threads
        return Wish(num_ipus=num_cores, choose=self._choose, queue_name=_QUEUE)

    def _choose(self, taken: Collection[str]) -> tuple[VirtualIpu, ...]:
        """The cores for the job beside those that are taken; of a physical core all hardware threads or none."""
        if self._facts is None:
            wanted = _named(_bound(self.plan))
            return () if any(core.name in taken for core in wanted) else wanted
        free = tuple(cpu for cpu, siblings in self._siblings.items() if not any(it in taken for it in siblings))
        if not free:
            return ()
        try:
            self.placed = place(self.plan, self._facts.with_cpus(free))
        except PlanError:
            return ()
        return _named(_bound(self.placed))


def _bound(plan: LaunchPlan) -> list[int]:
    return sorted({core for binding in plan.bindings for core in binding.cores})


def _named(numbers: Collection[int] | Iterator[int]) -> tuple[VirtualIpu, ...]:
    return tuple(VirtualIpu(index=number, name=_name(number)) for number in numbers)


def _name(number: int) -> str:
    return f"{CORE}/{number}"
