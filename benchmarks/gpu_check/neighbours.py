"""Part 5: programs of torch that know nothing of popdist."""

from functools import partial
from typing import Final

from gpu_check.bits import require_runs
from gpu_check.findings import Findings
from gpu_check.jobs import PROGRAMS, RANKS_SHARE, JobEnd, Setting, at_once, poprun

_CASES: Final = {
    "cuda": (
        ("ddp", "nccl", 1),
        ("fsdp", "nccl", 1),
        ("ddp", "cpu:popdist,cuda:nccl", 1),
        ("fsdp", "cpu:popdist,cuda:nccl", 1),
        ("ddp", "gloo", 2),
        ("ddp", "nccl", 2),
        ("fsdp", "nccl", 2),
    ),
    "simulated": (("ddp", "popdist", 1), ("ddp", "popdist", 2)),
    "cpu": (
        ("ddp", "gloo", 1),
        ("fsdp", "gloo", 1),
        ("ddp", "popdist", 1),
        ("fsdp", "popdist", 1),
        ("ddp", "gloo", 2),
        ("ddp", "popdist", 2),
        ("fsdp", "popdist", 2),
    ),
}
"""For each device: the wrapper, the backend, and the number of ranks."""

_MOST_DIFFERENCE: Final = 1e-4
"""Of a loss, where ranks add their gradients in another order."""


def part_5(setting: Setting, findings: Findings) -> None:
    """Train with each wrapper over each backend, and compare the losses."""
    cases = _CASES[setting.device]
    ends = at_once(setting, [partial(_trained, setting, *case) for case in cases])
    losses = [end.result.get("losses") for end in ends]
    alone: dict[str, list[float]] = {}
    for (wrap, backend, size), end, found in zip(cases, ends, losses, strict=True):
        name = f"{wrap} over {backend}, {size} rank{'s' * (size > 1)}"
        require_runs(findings, [end])
        if found is None:
            findings.require(f"{name} has losses", holds=False, found=end.trouble)
        elif size == 1:
            first = alone.setdefault(wrap, found)
            findings.require(f"{name} has the losses of the first backend", found == first, _worst(first, found))
        else:
            apart = _worst(losses[0], found)
            findings.require(f"{name} has the losses of one rank", apart <= _MOST_DIFFERENCE, apart)
    findings.measure(cases=len(cases), first_loss=losses[0][0] if losses[0] else None)


def _trained(setting: Setting, wrap: str, backend: str, size: int) -> JobEnd:
    shares = {RANKS_SHARE: "1"} if "nccl" in backend and size > 1 else {}
    words = [str(PROGRAMS / "wrapped.py"), "--wrap", wrap, "--backend", backend]
    return poprun(setting, size, words, variables=shares, seconds=setting.seconds / 2)


def _worst(wanted: list[float] | None, found: list[float]) -> float:
    """Return the largest relative difference of losses."""
    if not wanted:
        return float("inf")
    return max(abs(a - b) / abs(a) for a, b in zip(wanted, found, strict=True))
