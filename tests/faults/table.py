"""The tables of what came of the faults, as Markdown. Pure."""

import math
from collections.abc import Sequence

from tests.faults.catalogue import GRACE_SECONDS, PATIENCE_SECONDS, Fault
from tests.faults.outcome import Outcome

_MEDIAN, _TAIL = 0.5, 0.99
_NOTHING = "\N{EN DASH}"


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of all values do not exceed; 0 when there are none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def render_matrix(outcomes: Sequence[Outcome]) -> str:
    """What came of poprun's runs: one row for each fault, then all of them."""
    head = ["what goes wrong", "runs", "exit code", "wrong", "tracebacks of poprun's own"]
    head += ["processes left", "files, sockets left", "p50", "p99"]
    rows = [[fault.name, *_row(_of(outcomes, fault), _codes(fault))] for fault in _faults(outcomes)]
    obeying = [outcome for outcome in outcomes if outcome.fault.obeys]
    others = [outcome for outcome in outcomes if not outcome.fault.obeys]
    rows.append(["**all whose programs end when asked**", *_row(obeying, "")])
    rows.append([f"**all others: {GRACE_SECONDS:g} s of grace**", *_row(others, "")])
    return _table(head, rows)


def render_comparison(outcomes: Sequence[Outcome]) -> str:
    """The same faults under several launchers: one column for each; poprun's launchers share one."""
    names = list(dict.fromkeys(outcome.column for outcome in outcomes))
    rows = [
        [fault.name, *(_cell([run for run in _of(outcomes, fault) if run.column == name]) for name in names)]
        for fault in _faults(outcomes)
    ]
    return _table(["what goes wrong", *names], rows)


def _row(outcomes: Sequence[Outcome], codes: str) -> list[str]:
    seconds = [outcome.seconds for outcome in outcomes]
    return [
        str(len(outcomes)),
        codes,
        str(sum(not (outcome.is_code_right and outcome.is_name_right) for outcome in outcomes)),
        str(sum(outcome.has_own_traceback for outcome in outcomes)),
        str(sum(len(outcome.survivors) for outcome in outcomes)),
        str(sum(len(outcome.memory) + len(outcome.sockets) for outcome in outcomes)),
        f"{percentile(seconds, _MEDIAN):.2f} s",
        f"{percentile(seconds, _TAIL):.2f} s",
    ]


def _cell(outcomes: Sequence[Outcome]) -> str:
    """The worst of a launcher's runs; empty when the fault cannot happen to it."""
    if not outcomes:
        return _NOTHING
    worst = max(outcomes, key=lambda outcome: (outcome.code is None, len(outcome.survivors), outcome.seconds))
    if worst.code is None:
        return f"> {PATIENCE_SECONDS:g} s"
    left = f"; **{len(worst.survivors)} live on**" if worst.survivors else ""
    if worst.fault.kills_launcher:
        return left.removeprefix("; ") or f"all gone, {worst.seconds:.2f} s"
    code = worst.code if worst.code >= 0 else 128 - worst.code
    shown = f"{code}" if code in worst.fault.codes else f"**{code}**"
    return f"{shown}, {worst.seconds:.2f} s{left}"


def _codes(fault: Fault) -> str:
    """As a shell shows them."""
    codes = sorted({code if code >= 0 else 128 - code for code in fault.codes})
    return _NOTHING if fault.kills_launcher else " or ".join(map(str, codes)) or "not 0"


def _faults(outcomes: Sequence[Outcome]) -> list[Fault]:
    return list(dict.fromkeys(outcome.fault for outcome in outcomes))


def _of(outcomes: Sequence[Outcome], fault: Fault) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.fault == fault]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:" for _ in head[1:]]], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
