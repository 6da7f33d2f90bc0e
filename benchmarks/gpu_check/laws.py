"""Part 12: laws of the test suite, with their tensors on the device."""

from functools import partial
from typing import Final

from gpu_check.findings import Findings
from gpu_check.jobs import PROGRAMS, RANKS_SHARE, Setting, at_once, poprun

_MODULES: Final = (
    "training",
    "buffer",
    "loop",
    "old_gradient",
    "batch_norm",
    "checkpoint",
    "collective",
)
"""Those whose laws a program can run that has no pytest."""

_DIRECT: Final = "overlap"
"""The module whose laws hold where gradients go by messages: on a GPU, over NCCL."""


def part_12(setting: Setting, findings: Findings) -> None:
    """Run the laws of each module with one instance, and with two."""
    program = str(PROGRAMS / "law_modules.py")
    names = [f"tests.contract.{it}_laws" for it in _MODULES]
    law = partial(poprun, setting, seconds=setting.seconds / (2 if setting.on_cuda else 4))
    jobs = [(name, size) for name in names for size in ((2,) if setting.is_quick else (2, 1))]
    calls = [partial(law, size, [program, str(setting.folder), name]) for name, size in jobs]
    if setting.on_cuda:
        jobs.append((f"tests.contract.{_DIRECT}_laws", 2))
        words = [program, str(setting.folder), jobs[-1][0]]
        calls.append(partial(law, 2, words, variables={RANKS_SHARE: "1"}))
    else:
        findings.skip(f"{_DIRECT}_laws: need gradients that go by NCCL")
    ends = at_once(setting, calls)
    num_held = 0
    for (name, size), end in zip(jobs, ends, strict=True):
        wrong = {it["law"].rpartition(".")[2]: it["wrong"] for it in end.results if it["wrong"]}
        num_held += len({it["law"] for it in end.results}) - len(wrong)
        title = f"{name.rpartition('.')[2]}, {size} instance{'s' * (size > 1)}"
        findings.require(title, end.code == 0 and end.results and not wrong, wrong or end.trouble)
    findings.measure(laws_held=num_held)
