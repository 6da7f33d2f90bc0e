"""The outcomes of a check as a line, as JSON and as a table of Markdown; pure."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from gpu_check.outcomes import Found, Outcome, Verdict, most_telling, outcome_in
from gpu_check.parts import PARTS

VERSION: Final = 1
"""Of the form of the JSON file."""


def line(outcome: Outcome) -> str:
    """Return what is printed when a part ends: its name, seconds, verdict and figures."""
    head = f"{outcome.number:2} {outcome.name:17} {outcome.seconds:6.1f} s  {outcome.verdict:9}"
    figures = [f"{name} {_value(value)}" for name, value in outcome.found.figures.items()]
    return f"{head}  {summary(outcome.found, figures)}".rstrip()


def summary(found: Found, figures: Sequence[str] = ()) -> str:
    """Return what failed and how much holds, then ``figures``, then what was left out."""
    wrong = [
        f"NOT {it.what}: {it.found}" if it.found else f"NOT {it.what}" for it in found.requirements if not it.holds
    ]
    num_held = len(found.requirements) - len(wrong)
    held = [f"{num_held} of {len(found.requirements)} hold"] if found.requirements else []
    return "; ".join([*wrong, *held, *figures, *(f"skipped: {it}" for it in found.skipped)])


def _value(value: Any) -> str:
    match value:
        case bool() | str() | int():
            return str(value)
        case float():
            return f"{value:.4g}"
        case Mapping():
            return ", ".join(f"{name} {_value(one)}" for name, one in value.items())
    return ", ".join(map(_value, value))


def as_json(outcomes: Sequence[Outcome]) -> str:
    """Return the outcomes as the text of a JSON file."""
    return json.dumps({"version": VERSION, "outcomes": [asdict(it) for it in outcomes]}, indent=1) + "\n"


def outcomes_in(text: str) -> tuple[Outcome, ...]:
    """Return the outcomes that :func:`as_json` wrote.

    Raises:
        ValueError: If ``text`` has another form.
    """
    table = json.loads(text)
    if not isinstance(table, dict) or table.get("version") != VERSION:
        raise ValueError(
            f"a file of version {VERSION} of this check was expected: remove it, or name another --out"
        )
    return tuple(map(outcome_in, table["outcomes"]))


def as_markdown(outcomes: Iterable[Outcome]) -> str:
    """Return a table of all parts: what each shows, where that was seen, and the result."""
    known = tuple(outcomes)
    rows = ["| part | what it shows | seen on | result |", "|---|---|---|---|"]
    for part in PARTS:
        outcome = most_telling(part, known)
        cells = [f"{part.number} {part.name}", part.shows, "nothing yet", ""]
        if outcome is not None:
            cells[2] = f"{_place(outcome)}, {outcome.software}, {outcome.seen_on}"
            cells[3] = f"{_mark(outcome.verdict)} in {outcome.seconds:.0f} s: {summary(outcome.found)}"
        rows.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join(rows)


def _place(outcome: Outcome) -> str:
    return outcome.card if outcome.device == "cuda" else f"no GPU: {outcome.card}"


def _mark(verdict: Verdict) -> str:
    return str(verdict) if verdict is Verdict.HOLDS else f"**{verdict}**"
