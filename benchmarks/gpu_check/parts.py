"""The parts of a check on one device, in the order of what they tell, and the time that each has; pure."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Final

DEVICES: Final = ("cuda", "simulated", "cpu")
"""The kinds of devices that can be checked; what a later kind shows, an earlier kind shows better."""

TOTAL_SECONDS: Final = 480.0
"""All parts together take no longer on a GPU."""

PATIENCE: Final = 5.0
"""On other devices each part has so many times as long: they are slow, and nobody waits for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of a check.

    Attributes:
        number: Its place in the order.
        name: A few words.
        shows: What a user learns from it.
        module: The module of this package whose function `part_<number>` does it.
        seconds: The longest that it may take, the end of its processes included.
        needs_device: Whether nothing of it can run on the CPU.
    """

    number: int
    name: str
    shows: str
    module: str
    seconds: float
    needs_device: bool = False


PARTS: Final = tuple(
    Part(number=number, name=name, shows=shows, module=module, seconds=seconds, needs_device=name == "two jobs")
    for number, (name, module, seconds, shows) in enumerate(
        (
            ("doctor", "launching", 20, "poprun finds the driver, torch and the device, and plans with it"),
            ("same bits", "bits", 75, "1, 2 and 4 instances that share the device train the same bits"),
            (
                "hard recipe",
                "bits",
                60,
                "so do BatchNorm, dropout, AMP, clipping, accumulation and a sharded optimizer",
            ),
            ("cost of a step", "costs", 40, "ReplicatedModel costs a step no more than DistributedDataParallel"),
            ("DDP and FSDP2", "neighbours", 45, "programs of torch run unmodified, also several ranks on one GPU"),
            ("checkpoints", "bits", 40, "a run goes on in mid-epoch, by way of the CPU, at another split"),
            ("phases", "costs", 60, "a model four times larger than the device's memory trains the same bits"),
            ("endings", "endings", 60, "a failure on the device is named, and nothing is left"),
            ("two jobs", "launching", 10, "two jobs are never on one GPU at the same time"),
            ("trace and report", "launching", 20, "a trace has the device's kernels, and shares of time add up"),
            ("poprun-size", "costs", 15, "seconds and memory of a step are predicted"),
            ("laws", "laws", 35, "the laws of the test suite hold on the device"),
        ),
        start=1,
    )
)


_OF_TIMES: Final = ("cost of a step", "poprun-size")


def planned(device: str, numbers: Collection[int] = (), patience: float | None = None) -> tuple[Part, ...]:
    """Return the parts with these numbers, all if there are none, with the time that each has on ``device``."""
    factor = patience or (1.0 if device == "cuda" else PATIENCE)
    chosen = [part for part in PARTS if not numbers or part.number in numbers]
    return tuple(replace(part, seconds=factor * part.seconds) for part in chosen)


def skip_reason(part: Part, device: str) -> str:
    """Return why ``part`` cannot run on ``device``; empty if it can."""
    if device == "simulated" and part.name in _OF_TIMES:
        return "times and memory of a simulated device say nothing of a real one"
    return "needs a device" if part.needs_device and device != "cuda" else ""


def seconds_left(parts: tuple[Part, ...], position: int, elapsed_seconds: float) -> float:
    """Return how long the part at ``position`` may take, ``elapsed_seconds`` after the first part began.

    A part may use what the parts before it left over, and never the time of the parts after it.
    """
    return sum(part.seconds for part in parts[: position + 1]) - elapsed_seconds
