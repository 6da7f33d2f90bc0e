"""What a job would hold if it were started now: a look at the pool that changes nothing there."""

from collections.abc import Callable, Sequence

from poprun.errors import PoprunError
from poprun.lease.asking import IpuAsker
from poprun.lease.ipus import in_only_partition
from poprun.lease.queue import pool_of
from poprun.plan.plan import LaunchPlan
from poprun.plan.topology import Gpu
from poprun.pool.records import PoolState, fold_names
from poprun.pool.requests import Wish, must_change, refusal
from poprun.text.host_names import fold_hosts


def would_hold(plan: LaunchPlan, gpus: Sequence[Gpu], *, is_here: bool, tell: Callable[[str], None]) -> str:
    """A line on the virtual IPUs that a job takes; why it would not start now is part of it.

    Args:
        plan: The job. It takes virtual IPUs.
        gpus: The GPUs of this machine.
        is_here: Whether this machine is the only host.
        tell: Tells the user of what is decided here.
    """
    count = plan.num_slots_per_host
    noun = f"{count} virtual IPU{'' if count == 1 else 's'}"
    if not is_here:
        where = "each of " if len(plan.hosts) > 1 else ""
        return f"would lease {noun} on {where}{fold_hosts(plan.hosts)}, from the pool of each host"
    try:
        pool = pool_of(plan)
        state = pool.state()
        plan = in_only_partition(plan, state, tell)
        asker = IpuAsker(plan, gpus, lambda: gpus, is_fixed=False)
        chosen = _chosen(asker.wish(), state)
        if not chosen:
            words = refusal(asker.wish(), asker.cluster, state, own=0, shares=plan.vipu.shares_devices)
            return f"would not start now: {words}"
    except PoprunError as error:
        return f"would not start now: {error}"
    told = {ipu.name: str(ipu) for ipu in asker.cluster.ipus}
    ipus = fold_names([told.get(name, name) for name in chosen])
    partition = plan.vipu.partition
    if partition is None:
        return f"would lease {ipus}, from the pool {pool.file}"
    is_there = state.partition(partition) is not None
    return (
        f"would lease partition {partition}{'' if is_there else ', made for it'}: {ipus}, in the pool {pool.file}"
    )


def _chosen(wish: Wish, state: PoolState) -> Sequence[str]:
    """Names of the IPUs that a job would be given; none where it would have to wait."""
    wanted = wish.partition
    found = None if wanted is None else state.partition(wanted.name)
    if wanted is None or found is None:
        return [ipu.name for ipu in wish.choose(state.taken)]
    if found.lease is not None:
        return ()
    if must_change(wanted, found):
        return [ipu.name for ipu in wish.choose(state.taken - set(found.ipus))]
    return found.ipus
