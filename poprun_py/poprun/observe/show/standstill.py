"""A hang of a job in words: who waits in which call, who is at fault, and all stacks. Pure."""

from collections.abc import Collection, Mapping, Sequence
from itertools import takewhile
from typing import Final

from popdist.errors import name_instances
from popdist.ground.layout import Parallelism
from popdist.ground.progress import FINALIZE, Progress
from poprun.observe.account.evidence import StackFrame, Stacks
from poprun.observe.account.judgements import Cause, Verdict
from poprun.observe.account.stacks import POPDIST, ReadLine
from poprun.observe.account.state import InstanceStatus, name_with_place
from poprun.observe.judge.hangs import Hang
from poprun.text.ranges import counted

MAX_LINES: Final = 8
MAX_FRAMES: Final = 24  # frames of a main thread that are shown; the middle of a longer stack is left out
MAX_HELPER_FRAMES: Final = 4  # frames of another thread: its latest calls
MAX_HELPERS: Final = 4  # other threads that are shown
_FIRST_FRAMES: Final = 8
_MAX_LETTERS: Final = 160
_MOST_LETTERS: Final = 80  # of a collective
_SAMPLER: Final = "/popdist/startup/phase_sampler.py"
_WORK_QUEUE: Final = "/popdist/exchange/process_group/work_queue.py"
_NOT_SHARED: Final = Parallelism()


def describe_hang(
    hang: Hang,
    statuses: Sequence[InstanceStatus],
    parallelism: Parallelism = _NOT_SHARED,
    findings: Sequence[str] = (),
) -> list[str]:
    """Return lines about a hang: who waits in which call, how long and for whom; ``findings`` come at the end."""
    lines = [
        f"{name_with_place(indices, parallelism)} {_verb(indices, 'wait')} in {collective}"
        for collective, indices in hang.waiting.items()
    ]
    if hang.standing:
        stand = f"{name_with_place(hang.standing, parallelism)} {_verb(hang.standing, 'stand')} still"
        lines.append(f"{stand}, and nobody waits in a collective")
    lines[0] = f"no progress for {hang.idle_seconds:.0f} s: {lines[0]}"
    groups: dict[str, list[int]] = {}
    for index in hang.absent:
        text = _describe_absence(statuses[index].progress or Progress(), hang.waiting)
        groups.setdefault(f": {text}" if hang.is_told_by_programs else "", []).append(index)
    lines += [f"{name_with_place(indices, parallelism)} did not arrive{text}" for text, indices in groups.items()]
    if hang.ended:
        lines.append(
            f"{name_with_place(hang.ended, parallelism)} {'has' if len(hang.ended) == 1 else 'have'} ended"
        )
    if findings:
        return [*lines, *findings]
    if FINALIZE in hang.waiting and len(hang.waiting) > 1:
        lines.append(f"{name_instances(hang.waiting[FINALIZE])} will take part in nothing more")
    elif hang.waiting and not hang.absent and not hang.ended:
        stuck = "the network between them, or a GPU, may be stuck"
        if len(hang.waiting) == 1:
            lines.append(f"all have arrived: {stuck}")
        else:
            lines.append(f"each waits in one of these: all must make the same calls in the same order; or {stuck}")
    return lines


def _verb(indices: Sequence[int], verb: str) -> str:
    return f"{verb}s" if len(indices) == 1 else verb


def _describe_absence(progress: Progress, awaited_in: Collection[str]) -> str:
    """Return in words the step and last call of an awaited instance, or that it has not called popdist."""
    if not (progress.has_joined or progress.collective):
        return f"{'popdist' if set(awaited_in) != {FINALIZE} else FINALIZE} not called yet"
    parts = []
    if progress.step is not None:
        parts.append(f"reported step {progress.step}")
    elif progress.num_steps:
        parts.append(f"{counted(progress.num_steps, 'step')} done")
    if progress.collective:
        parts.append(f"last call {_shorten(progress.collective)}")
    return ", ".join(parts) or "popdist.init() not called yet"


def _shorten(collective: str) -> str:
    return collective if len(collective) <= _MOST_LETTERS else f"{collective.partition('(')[0]}(…)"


def describe_verdict(verdict: Verdict, parallelism: Parallelism) -> list[str]:
    """Return at most ten lines about who is at fault for a hang or an end, and what to try."""
    lines = list(verdict.details)
    if verdict.cause is Cause.MISMATCH:
        who = name_with_place(verdict.culprits, parallelism) if verdict.culprits else ""
        verb = "differs" if len(verdict.culprits) == 1 else "differ"
        difference = (
            f"{who} {verb} from the others" if who else "these differ, and nothing shows which of them is wrong"
        )
        lines.insert(0, difference)
    if len(lines) > MAX_LINES:
        lines = [*lines[: MAX_LINES - 1], f"… {len(lines) - MAX_LINES + 1} more …"]
    return [*lines, verdict.advice] if verdict.advice and not verdict.is_about_absence else lines


def render_stacks(
    stacks: Mapping[int, Stacks],
    read_line: ReadLine,
    max_groups: int | None = None,
    parallelism: Parallelism = _NOT_SHARED,
) -> list[str]:
    """Return the stacks of all instances as lines, with equal stacks of several instances only once."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for index, of_one in stacks.items():
        groups.setdefault(tuple(_render(of_one, read_line)), []).append(index)
    shown = list(groups.items())[:max_groups]
    lines = [
        line
        for text, indices in shown
        for line in (f"{name_with_place(sorted(indices), parallelism)}:", *_quoted(text))
    ]
    num_left = len(stacks) - sum(len(indices) for _, indices in shown)
    return [*lines, f"and {num_left} more: Ctrl-\\ shows all"] if num_left else lines


def _quoted(lines: Sequence[str]) -> list[str]:
    return [f"  | {line if len(line) <= _MAX_LETTERS else line[:_MAX_LETTERS] + '…'}" for line in lines]


def _render(stacks: Stacks, read_line: ReadLine) -> list[str]:
    if not stacks.threads:
        return list(stacks.processes) or ["it has no process"]
    main, *others = stacks.threads
    helpers = [stack for stack in others if not _is_idle(stack)]
    lines = _render_thread(main, MAX_FRAMES, _FIRST_FRAMES, read_line)
    for number, helper in enumerate(helpers[:MAX_HELPERS], 1):
        lines += [f"thread {number}:", *_render_thread(helper, MAX_HELPER_FRAMES, 0, read_line)]
    num_left = len(helpers) - MAX_HELPERS
    return [*lines, f"… {num_left} more threads …"] if num_left > 0 else lines


def _is_idle(thread: Sequence[StackFrame]) -> bool:
    """Whether a thread is not worth showing: popdist's sampler, or a thread of a process group without work."""
    if any(frame.file.endswith(_SAMPLER) for frame in thread):
        return True
    return bool(thread) and thread[-1].function == "_work" and thread[-1].file.endswith(_WORK_QUEUE)


def _render_thread(frames: Sequence[StackFrame], most: int, num_first: int, read_line: ReadLine) -> list[str]:
    if not frames:
        return ["no Python code: it starts, or it is about to end"]
    num_inside = len(list(takewhile(lambda frame: frame.file.startswith(POPDIST), reversed(frames))))
    if num_inside > 1:  # the way to where popdist waits is the same for all
        frames = frames[: 1 - num_inside]
    left_out = len(frames) - most
    shown = list(frames) if left_out <= 0 else [*frames[:num_first], *frames[left_out + num_first :]]
    rendered = [_render_frame(frame, read_line) for frame in shown]
    if left_out > 0:
        rendered.insert(num_first, [f"… {left_out} calls …"])
    if num_inside > 1:
        rendered.append([f"… {num_inside - 1} calls inside popdist …"])
    return [line for lines in rendered for line in lines]


def _render_frame(frame: StackFrame, read_line: ReadLine) -> list[str]:
    source = read_line(frame.file, frame.line).strip()
    where = f'File "{frame.file}", line {frame.line}, in {frame.function}'
    return [where, f"  {source}"] if source else [where]
