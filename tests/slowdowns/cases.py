"""What slows an instance down, and what poprun should say of it; and jobs in which nobody is slow."""

from dataclasses import dataclass
from typing import Final

DDP: Final = "DDP"
DDP_ON_HOSTS: Final = "DDP on hosts"
REPLICAS_ON_HOSTS: Final = "ReplicatedModel on hosts"
ON_HOSTS: Final = (DDP_ON_HOSTS, REPLICAS_ON_HOSTS)
"""With a host for each instance."""

TWO, THREE, FOUR = 2, 3, 4
_PHASES: Final = ("data", "forward", "backward", "optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One job."""

    kind: str  # how the program trains
    what: str  # what is slow, in words
    fault: str = "none"  # the same for the program: in instance 1
    phases: tuple[str, ...] = ()  # any of these is right; none where nobody is slow
    cause: str = ""  # what the reasons must tell
    culprit: str = "instance 1"  # whom poprun has to name
    num_instances: int = TWO
    delayed_host: str = ""  # of those on hosts n1, n2 ...: poprun runs on the first
    frame_seconds: float = 0.0  # what each frame to it or from it takes longer
    narrow_host: str = ""  # one whose link carries no more than ``link_rate``, as tc(8) has it
    link_rate: str = ""

    @property
    def is_control(self) -> bool:
        """Whether nobody is slow."""
        return not self.phases

    @property
    def group(self) -> tuple[str, str]:
        """The cases that it is counted with: how they train, and the one phase that is slow, or what is."""
        is_one_phase = len(self.phases) == 1 and not self.cause
        return self.kind, self.phases[0] if is_one_phase else self.what


def _slow(kind: str, phase: str, manner: str, milliseconds: int, one_in: int, num_instances: int = TWO) -> Case:
    often = "each step" if one_in == 1 else f"one step in {one_in}, at random"
    place = " (host n2)" if kind in ON_HOSTS else ""
    return Case(
        kind=kind,
        what=f"{phase} {'waits' if manner == 'sleep' else 'computes'} {milliseconds} ms more, {often}",
        fault=f"{phase}:{manner}-{milliseconds}-{one_in}",
        phases=(phase,),
        culprit=f"instance 1{place}",
        num_instances=num_instances,
    )


def _slow_link(num_instances: int, delayed_host: str, culprit: str) -> Case:
    return Case(
        kind=DDP_ON_HOSTS,
        what=f"frames of {delayed_host} take 10 ms more",
        phases=("communication",),
        cause="and back takes",
        culprit=culprit,
        num_instances=num_instances,
        delayed_host=delayed_host,
        frame_seconds=0.01,
    )


def _narrow_link(kind: str, num_instances: int, link_rate: str) -> Case:
    return Case(
        kind=kind,
        what=f"the link of n2 carries {link_rate}",
        fault="apart",
        phases=("communication",),
        culprit="the network",
        num_instances=num_instances,
        narrow_host="n2",
        link_rate=link_rate,
    )


_ANY: Final = (*_PHASES, "outside")

FAULTS: Final = (
    *(_slow(DDP, phase, "sleep", 30, 1) for phase in _PHASES),
    *(_slow(DDP, phase, "lose", 100, 1) for phase in _PHASES),
    *(_slow(DDP, phase, "sleep", 200, 3) for phase in _PHASES),
    *(_slow(DDP, phase, "lose", 500, 6) for phase in _PHASES),
    *(_slow(DDP, phase, "sleep", 600, 10) for phase in ("data", "backward")),
    *(_slow(DDP, phase, "sleep", 150, 1, FOUR) for phase in _PHASES),
    *(_slow("ReplicatedModel", phase, "sleep", 60, 1) for phase in ("forward", "backward", "optimizer")),
    *(_slow("backend popdist", phase, "sleep", 60, 1) for phase in ("data", "backward")),
    *(_slow("FSDP2", phase, "sleep", 60, 1) for phase in ("data", "forward")),
    Case(
        kind="DDP, workers",
        what="a loader's worker waits 150 ms",
        fault="data:sleep-150-1",
        phases=("data",),
        cause="worker",
    ),
    Case(kind=DDP, what="its control group may use half a core", fault="group", phases=_ANY, cause="throttled"),
    Case(kind=DDP, what="three other programs on its core", fault="core", phases=_ANY, cause="wanted a core"),
    Case(kind=DDP, what="its disk reads 512 KiB/s", fault="disk", phases=("data",), cause="disk"),
    Case(kind=DDP, what="Python collects garbage", fault="garbage", phases=_ANY, cause="garbage"),
    Case(kind=DDP, what="four times as many samples", fault="uneven", phases=_ANY),
    Case(kind="ReplicatedModel", what="four times as many samples", fault="uneven", phases=_ANY, cause="samples"),
    _slow_link(THREE, "n3", "the link of host n3"),
    _slow_link(THREE, "n1", "the link of host n1"),
    _slow_link(TWO, "n2", "the network"),
    *(_narrow_link(DDP_ON_HOSTS, number, "100mbit") for number in (TWO, THREE)),
    *(_narrow_link(REPLICAS_ON_HOSTS, number, "100mbit") for number in (TWO, THREE)),
    *(_slow(DDP_ON_HOSTS, phase, "sleep", 150, 1, THREE) for phase in ("data", "backward")),
)

CONTROLS: Final = (
    *(Case(kind=DDP, what="nothing", num_instances=number) for number in (2, 2, 3, 3, 4, 4, 4, 4)),
    *(Case(kind="DDP, workers", what="nothing", num_instances=number) for number in (2, 2)),
    *(Case(kind="ReplicatedModel", what="nothing", num_instances=number) for number in (2, 3, 4, 4)),
    *(Case(kind="backend popdist", what="nothing", num_instances=number) for number in (2, 4)),
    *(Case(kind="FSDP2", what="nothing", num_instances=number) for number in (2, 2, 4)),
    *(Case(kind="pipelining", what="nothing", num_instances=number) for number in (2, 3, 4)),
    *(Case(kind=DDP, what="instance 0 saves at times", fault="checkpoint", num_instances=it) for it in (2, 4)),
    *(Case(kind=DDP, what="instance 0 validates at times", fault="validation", num_instances=it) for it in (2, 4)),
    *(Case(kind=DDP_ON_HOSTS, what="nothing", num_instances=number) for number in (2, 3)),
    Case(
        kind=DDP_ON_HOSTS,
        what="frames of n3 take 0.4 ms more",
        num_instances=THREE,
        delayed_host="n3",
        frame_seconds=0.0004,
    ),
    Case(
        kind=DDP_ON_HOSTS,
        what="frames of n3 take 10 ms more, all pause 500 ms a step",
        fault="pause",
        num_instances=THREE,
        delayed_host="n3",
        frame_seconds=0.01,
    ),
)
