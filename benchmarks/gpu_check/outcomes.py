"""How the parts of a check ended: values, and what makes them from what a part's process wrote; pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from gpu_check.parts import DEVICES, Part


class Verdict(StrEnum):
    """How a part ended."""

    HOLDS = "holds"
    FAILS = "fails"
    SKIPPED = "skipped"
    TIMED_OUT = "timed out"
    CRASHED = "crashed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """Something that must hold, and what was found instead if it did not."""

    what: str
    holds: bool
    found: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a part has written of its findings until it ended.

    Attributes:
        requirements: What must hold, in the order in which it was checked.
        figures: Names and values of what was measured.
        skipped: What was left out, each with its reason.
    """

    requirements: tuple[Requirement, ...] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEnd:
    """How the process of a part ended.

    Attributes:
        code: Its exit code; None if its time was up.
        seconds: How long it ran.
        num_left: Processes that it left behind when it ended by itself.
        last_line: The last line that it printed.
    """

    code: int | None
    seconds: float
    num_left: int = 0
    last_line: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a part ended, and where.

    Attributes:
        card: What the device is called.
        software: The versions of torch and of the driver.
        seen_on: The day, in UTC.
    """

    number: int
    name: str
    device: str
    card: str
    software: str
    seen_on: str
    verdict: Verdict
    seconds: float
    found: Found = Found()


def found_in(table: Mapping[str, Any]) -> Found:
    """Return the findings that ``table``, read from JSON, holds."""
    return Found(
        requirements=tuple(Requirement(**row) for row in table.get("requirements", ())),
        figures=table.get("figures", {}),
        skipped=tuple(table.get("skipped", ())),
    )


def judged(found: Found, end: ProcessEnd) -> tuple[Verdict, Found]:
    """Return the verdict on a part, and its findings together with what its process itself shows."""
    added: list[Requirement] = []
    if end.num_left:
        added.append(Requirement(what="nothing is left", holds=False, found=f"{end.num_left} processes"))
    if end.code:
        added.append(
            Requirement(what="the part ends by itself", holds=False, found=end.last_line or f"{end.code}")
        )
    whole = Found(requirements=(*found.requirements, *added), figures=found.figures, skipped=found.skipped)
    if end.code is None:
        return Verdict.TIMED_OUT, whole
    if end.code:
        return Verdict.CRASHED, whole
    if not whole.requirements:
        return (Verdict.SKIPPED if whole.skipped else Verdict.CRASHED), whole
    return (Verdict.HOLDS if all(it.holds for it in whole.requirements) else Verdict.FAILS), whole


def outcome_in(table: Mapping[str, Any]) -> Outcome:
    """Return the outcome that ``table``, read from JSON, holds."""
    return Outcome(**{**table, "verdict": Verdict(table["verdict"]), "found": found_in(table["found"])})


def merged(old: Iterable[Outcome], new: Iterable[Outcome]) -> tuple[Outcome, ...]:
    """Return the newest outcome of each part on each kind of device, in the order of both."""
    newest = {(it.number, it.device): it for it in (*old, *new)}
    return tuple(newest[key] for key in sorted(newest, key=lambda key: (DEVICES.index(key[1]), key[0])))


def most_telling(part: Part, outcomes: Iterable[Outcome]) -> Outcome | None:
    """Return the outcome of ``part`` on the most telling kind of device on which it was not skipped."""
    seen = [it for it in outcomes if it.number == part.number and it.verdict is not Verdict.SKIPPED]
    return min(seen, key=lambda it: DEVICES.index(it.device), default=None)
