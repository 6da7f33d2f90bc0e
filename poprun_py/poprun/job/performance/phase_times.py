"""Where an instance's time went, from its start to its end: parts that add up to the whole. Pure."""

from typing import Final

from popdist.progress import PhaseCounters

START: Final = "start"
WAITING: Final = "waiting"


def split_time(elapsed_seconds: float, counters: PhaseCounters, waiting_seconds: float = 0.0) -> dict[str, float]:
    """The seconds of each phase; ``waiting_seconds`` is for how long it waited for the slowest, as far as known.

    What the sampler has not seen is the time before it, so it counts as "start". In the backward pass of
    DistributedDataParallel a program waits in C++: where it uses no processor there it communicates or waits.
    """
    parts = dict(counters.seconds)
    parts[START] += max(0.0, elapsed_seconds - sum(parts.values()))
    idle = min(counters.idle_backward_seconds, parts["backward"])
    parts["backward"] -= idle
    parts["communication"] += idle
    waiting = min(waiting_seconds, parts["communication"])
    parts["communication"] -= waiting
    return {**parts, WAITING: waiting}
