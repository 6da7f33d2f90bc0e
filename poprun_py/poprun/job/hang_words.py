"""What a person is told of a hang. Pure."""

from collections.abc import Sequence
from typing import Final

from popdist.progress_page import Progress
from poprun.job.hangs import Hang
from poprun.job.report.other_instances import name_instances
from poprun.job.state import InstanceStatus

_MOST_LETTERS: Final = 80


def describe_hang(hang: Hang, statuses: Sequence[InstanceStatus]) -> list[str]:
    """Who waits in what, for how long, and who did not come."""
    lines = [
        f"{name_instances(indices)} {_verb(indices, 'wait')} in {collective}"
        for collective, indices in hang.waiting.items()
    ]
    lines[0] = f"no progress for {hang.idle_seconds:.0f} s: {lines[0]}"
    groups: dict[str, list[int]] = {}
    for index in hang.absent:
        groups.setdefault(_describe_absence(statuses[index].progress or Progress()), []).append(index)
    lines += [f"{name_instances(indices)} did not arrive: {text}" for text, indices in groups.items()]
    if hang.ended:
        lines.append(f"{name_instances(hang.ended)} {'has' if len(hang.ended) == 1 else 'have'} ended")
    elif not hang.absent:
        everyone = "all have arrived" if len(hang.waiting) == 1 else "each has arrived in one of these"
        lines.append(f"{everyone}: the network between them, or a GPU, may be stuck")
    return lines


def _verb(indices: Sequence[int], verb: str) -> str:
    return f"{verb}s" if len(indices) == 1 else verb


def _describe_absence(progress: Progress) -> str:
    if not progress.has_joined:
        return "it has not called popdist yet"
    done = f"it has done {progress.num_steps} step{'s' if progress.num_steps > 1 else ''}"
    parts = [
        f"it reported step {progress.step}" if progress.step is not None else "",
        done if progress.num_steps and progress.step is None else "",
        f"its last call was {_shorten(progress.collective)}" if progress.collective else "",
    ]
    return "; ".join(filter(None, parts)) or "it has not called popdist.init() yet"


def _shorten(collective: str) -> str:
    return collective if len(collective) <= _MOST_LETTERS else f"{collective.partition('(')[0]}(…)"
