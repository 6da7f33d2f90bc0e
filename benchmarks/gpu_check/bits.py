"""Parts 2, 3 and 6: the bits do not depend on how many instances share the device."""

import re
from functools import partial
from typing import Final

from gpu_check.findings import Findings
from gpu_check.jobs import DEVICE, PROGRAMS, RANKS_SHARE, ROOT, JobEnd, Setting, at_once, poprun

_DETERMINISTIC: Final = ("--deterministic",)
_DIGITS: Final = (
    str(PROGRAMS / "run_example.py"),
    str(ROOT / "examples" / "train_digits.py"),
    "--epochs",
    "2",
)
_WEIGHTS: Final = re.compile(r", weights (\w+)")
_MOST_DIFFERENCE: Final = 1e-6


def part_2(setting: Setting, findings: Findings) -> None:
    """Train the digits at 1, 2 and 4 instances, three times each with --deterministic and once without."""
    rounds = [_DETERMINISTIC] * (1 if setting.is_quick else 3) + [()]
    digits = partial(poprun, setting, program=_DIGITS, seconds=setting.seconds / 2)
    fixed: list[str] = []
    for options in rounds:
        ends = at_once(setting, [partial(digits, number, options=options) for number in (1, 2, 4)])
        require_runs(findings, ends)
        weights = [match[1] if (match := _WEIGHTS.search(end.out)) else "" for end in ends]
        if options:
            fixed += weights
            findings.measure(digest=fixed[0][:8], device_chosen_by=chosen_by(ends[0]))
        else:
            same = "the same digest" if {*weights} == {*fixed} else f"other digests: {counted(weights)}"
            findings.measure(without_deterministic=same)
    findings.require(f"one digest in {len(fixed)} runs with --deterministic", is_one(fixed), counted(fixed))


def part_3(setting: Setting, findings: Findings) -> None:
    """Train the hard recipe at 1, 2 and 4 instances, on a GPU with NCCL between two, and by hand."""
    recipe = partial(poprun, setting, options=_DETERMINISTIC, seconds=0.9 * setting.seconds)
    program = str(PROGRAMS / "hard_recipe.py")
    calls = [partial(recipe, number, [program]) for number in (1, 2, 4)]
    calls += [partial(recipe, 2, [program], variables={RANKS_SHARE: "1"})] if setting.on_cuda else []
    *ends, by_hand = at_once(setting, [*calls, partial(recipe, 1, [program, "--by-hand"])])
    require_runs(findings, [*ends, by_hand])
    digests = [end.result.get("digest", "") for end in ends]
    over_nccl = ", and at 2 over NCCL" if setting.on_cuda else ""
    findings.require(f"one digest at 1, 2 and 4 instances{over_nccl}", is_one(digests), counted(digests))
    skipped = [end.result.get("num_skipped") for end in ends]
    skipped.append(by_hand.result.get("num_skipped_by_hand"))
    is_alike = len({*skipped}) == 1 and skipped[0]
    findings.require("the scaler skips as many steps as by hand, one at least", is_alike, skipped)
    apart = by_hand.result.get("difference", float("inf"))
    findings.require(f"a loop by hand differs by {_MOST_DIFFERENCE} at most", apart <= _MOST_DIFFERENCE, apart)
    findings.measure(digest=digests[0][:8], difference_to_a_loop_by_hand=apart)


def part_6(setting: Setting, findings: Findings) -> None:
    """Save on the device in mid-epoch, load and save on the CPU, and go on at another split."""
    program, folder = str(PROGRAMS / "resumed.py"), str(setting.folder / "run")
    resumed = partial(poprun, setting, options=_DETERMINISTIC, seconds=setting.seconds / 2)
    whole, first = at_once(
        setting,
        [
            partial(resumed, 1, [program, "--folder", str(setting.folder / "whole")]),
            partial(resumed, 2, [program, "--folder", folder, "--stop-after", "5"]),
        ],
    )
    copy = resumed(1, [program, "--folder", folder, "--copies"], variables={DEVICE: "cpu"})
    last = resumed(4, [program, "--folder", folder])
    require_runs(findings, [whole, first, copy, last])
    saved, loaded = first.result.get("digest"), copy.result.get("loaded")
    findings.require("the CPU loads the weights that the device saved", saved == loaded, (saved, loaded))
    wanted, found = whole.result.get("digest"), last.result.get("digest")
    findings.require("the resumed run ends as the undisturbed one", wanted and wanted == found, (wanted, found))
    findings.measure(digest=str(found)[:8])


def require_runs(findings: Findings, ends: list[JobEnd]) -> None:
    """Record that all jobs ended well, or the first trouble."""
    troubles = [end.trouble for end in ends if end.trouble]
    findings.require(
        f"{len(ends)} jobs end well", not troubles, f"{len(troubles)} do not; {''.join(troubles[:1])}"
    )


def is_one(digests: list[str]) -> bool:
    """Whether all digests are there and equal."""
    return len({*digests}) == 1 and "" not in digests


def chosen_by(end: JobEnd) -> str:
    """Return who chose the device of a job's programs."""
    found = re.search(r"^device (\S+), chosen by (.+)$", end.out, re.MULTILINE)
    return f"{found[2]} ({found[1]})" if found else "nobody"


def counted(digests: list[str]) -> str:
    """Return how often each digest is there."""
    return ", ".join(f"{digests.count(it)} x {it[:8] or 'none'}" for it in sorted({*digests}))
