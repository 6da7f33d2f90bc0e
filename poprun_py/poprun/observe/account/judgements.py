"""Judgements about a job, as values: which instance is at fault for its end or hang, and which one is slow."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from popdist.errors import name_instances
from poprun.observe.account.field_types import Count, Index, Text


class Cause(StrEnum):
    """The kind of failure because of which a job ended or hangs, such as out of memory."""

    EXCEPTION = "exception"
    EXIT = "exit code"
    SIGNAL = "signal"
    OUT_OF_MEMORY = "out of memory"
    FULL_DISK = "full disk"
    MISMATCH = "collective mismatch"
    ABSENT = "did not come back from its own code"
    HELPER = "helper process"  # such as a data loader's worker
    EARLY_END = "ended before the others"
    LOST = "lost"  # with its host, its agent, or the launcher
    UNKNOWN = "not known"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The judgement which instances are at fault for the end or the hang of an attempt, and why."""

    cause: Cause = Cause.UNKNOWN
    culprits: tuple[Index, ...] = ()  # instances, ascending; empty if the culprits are not known
    victims: tuple[Index, ...] = ()  # instances that failed, or wait, only because of the culprits
    torn_down: tuple[Index, ...] = ()  # instances that poprun ended
    places: Mapping[int, Text] = field(default_factory=dict)  # ``file:line`` where an instance failed or stands
    details: tuple[Text, ...] = ()  # the evidence in words, one line each
    since_epoch_seconds: float | None = None  # when the victims began to wait; None if torch did not record that
    advice: Text = ""

    @property
    def is_about_absence(self) -> bool:
        """Whether the instances at fault run, but do not call the collective in which other instances wait."""
        return self.cause in (Cause.ABSENT, Cause.HELPER) and bool(self.culprits)

    def place_of(self, instance: int) -> str:
        """Return the line of code where ``instance`` failed or waits, as ``file:line``; "" if not known."""
        return self.places.get(instance, "")

    def at(self, instance: int) -> str:
        """Return ``, at file:line`` for the code where ``instance`` failed, to append to a text; "" if unknown."""
        place = self.place_of(instance)
        return f", at {place}" if place else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowness:
    """The judgement that one instance, or the network between hosts, was slow for some time."""

    instance: Index | None  # None if the network is slow
    phase: Text
    delay_seconds: float  # delay in a step against most other instances; or the communication of a slow network
    share: float  # the delay divided by the time of a step, 0 to 1
    since_seconds: float  # from the beginning of the attempt
    since_step: Count  # number of optimizer steps at that moment; 0 if nobody counts the steps
    until_seconds: float | None = None  # None as long as the slowness lasts
    reasons: tuple[Text, ...] = ()  # causes that the machine shows
    num_windows: Count = 0  # number of windows of a few seconds in which an instance was seen to be slow
    # the host of the instance in a job of several hosts; or the hosts with a slow link, empty if not known
    hosts: tuple[Text, ...] = ()

    @property
    def name(self) -> str:
        """The name of the slow thing, to print: an instance, the network link of a host, or the whole network."""
        if self.instance is not None:
            return name_instances([self.instance]) + (f" (host {self.hosts[0]})" if self.hosts else "")
        return f"the link of host {self.hosts[0]}" if len(self.hosts) == 1 else "the network"

    @property
    def text(self) -> str:
        """One line about the slowness: what is slow, in which phase, since when, by how much, and why."""
        since = f"step {self.since_step}" if self.since_step else f"{self.since_seconds:.0f} s"
        until = "" if self.until_seconds is None else f" until {self.until_seconds:.0f} s"
        seconds = f"{self.delay_seconds * 1000:.0f} ms a step ({self.share:.0%})"
        if self.instance is None:
            line = f"{self.name} is slow since {since}: communication takes {seconds}"
        else:
            line = f"{self.name} is slow in {self.phase} since {since}{until}: +{seconds}"
        return ": ".join([line, *(["; ".join(self.reasons)] if self.reasons else [])])
