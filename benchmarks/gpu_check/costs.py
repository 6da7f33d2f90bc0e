"""Parts 4, 7 and 11: what a step costs, phases of a model larger than the device, and predictions."""

import json
import statistics
import sys
from typing import Any, Final

from gpu_check.bits import is_one, require_runs
from gpu_check.findings import Findings
from gpu_check.jobs import PROGRAMS, JobEnd, Setting, run
from measuring.medians import Median, median, ratio

_MOST_OF_DDP: Final = {"gpt": 1.01, "layers": 1.05}
_GIB: Final = 2**30
_WALL_BYTES: Final = _GIB
_LARGE: Final = ("--layers", "21", "--width", "1024", "--steps", "4")
_SMALL: Final = ("--layers", "6", "--width", "128", "--steps", "4")
"""Of AdamW in float32, weights, gradients and state of the large model take four times the wall."""

_BYTES_OF_PARAMETER: Final = 28
"""That a step with AdamW moves between store and device: 16 are read, 12 are written."""

_WARM_STEPS: Final = 2
_SECONDS_WITHIN, _MEMORY_WITHIN = 0.15, 0.10
_TINY: Final = ("gpt", "layers=2", "hidden=64", "heads=2", "sequence=32", "vocab=256")
_NUMBERS: Final = {"cuda": (("gpt2", "vocab=50304", "full_loss=yes"), "8"), "cpu": (_TINY, "4")}
"""For poprun-size: the model of part 4, and its micro batch."""


def part_4(setting: Setting, findings: Findings) -> None:
    """Time a plain loop, DistributedDataParallel and ReplicatedModel, of a GPT and of small layers."""
    for model, most in _MOST_OF_DDP.items():
        rounds = "6" if setting.is_quick else {"gpt": "15", "layers": "25"}[model]
        end = program("step_cost.py", "--model", model, "--rounds", rounds, seconds=setting.seconds / 2)
        require_runs(findings, [end])
        if not (times := end.result.get("seconds")):
            continue
        against = {name: ratio(times["replicated"], times[name]) for name in ("ddp", "plain")}
        milliseconds = {name: round(1e3 * statistics.median(it), 3) for name, it in times.items()}
        of_ddp, of_plain = (in_words(it) for it in against.values())
        findings.measure(**{f"{model}_ms": milliseconds, f"{model}_of_ddp": of_ddp, f"{model}_of_plain": of_plain})
        if setting.on_cuda:
            holds = against["ddp"].value <= most
            findings.require(f"{model}: ReplicatedModel takes {most} of DDP's time at most", holds, of_ddp)
        else:
            findings.skip(f"{model}: the limit of {most} of DDP's time is that of a GPU")


def part_7(setting: Setting, findings: Findings) -> None:
    """Train a model in memory, with a store on the host, and with a store on the disk."""
    size = (
        [*_LARGE, "--memory", str(int(0.9 * _WALL_BYTES)), "--wall", str(_WALL_BYTES)]
        if setting.on_cuda
        else [*_SMALL]
    )
    stores = {"memory": "", "host": "host", "disk": str(setting.folder / "store")}
    if setting.device == "cpu":
        del stores["host"]
        findings.skip("a store in the memory of the host: needs a device")
    digests, losses = {}, {}
    for name, store in stores.items():
        words = [*_LARGE] if setting.on_cuda and not store else size
        end = program("phased_gpt.py", "--store", store, *words, seconds=setting.seconds / 2)
        require_runs(findings, [end])
        digests[name] = end.result.get("digest", "")
        losses[name] = end.result.get("losses")
        if end.result:
            findings.measure(**{name: speed_of(end.result, moves=bool(store))})
    findings.require("phases have the bits of the model in memory", is_one([*digests.values()]), (digests, losses))


def part_11(setting: Setting, findings: Findings) -> None:
    """Predict a step of part 4's GPT, and measure it."""
    end = program(
        "step_cost.py", "--model", "gpt", "--loops", "replicated", "--rounds", "6", seconds=setting.seconds
    )
    (model, batch), precision = (
        _NUMBERS.get(setting.device, _NUMBERS["cpu"]),
        "bf16" if setting.on_cuda else "fp32",
    )
    words = ["--model", *model, "--global-batch", batch, "--precision", precision, "--format", "json"]
    words += [] if setting.on_cuda else ["--cpu", "1"]
    size = run(
        [sys.executable, "-c", "from poprun.size import main; main()", *words, "--explain", f"micro_batch={batch}"]
    )
    require_runs(findings, [end, size])
    if not end.result or size.code:
        return
    predicted = json.loads(size.out)["mappings"][0]
    seconds = predicted["seconds"], statistics.median(end.result["seconds"]["replicated"])
    memory = (
        sum(predicted["memory_bytes"].values()),
        end.result["used_bytes"] - (end.result["before_bytes"] if setting.device == "cpu" else 0),
    )
    findings.measure(
        bytes_of_the_device=end.result["bytes"],
        milliseconds_predicted_and_measured=[round(1e3 * it, 3) for it in seconds],
        GiB_predicted_and_measured=[round(it / _GIB, 3) for it in memory],
    )
    for name, (said, found), within in (("seconds", seconds, _SECONDS_WITHIN), ("memory", memory, _MEMORY_WITHIN)):
        error = said / found - 1
        if setting.on_cuda:
            findings.require(f"{name} within {within:.0%}", abs(error) <= within, f"{error:+.1%}")
        else:
            findings.skip(f"{name} within {within:.0%}, for the limit is that of a GPU: {error:+.1%}")


def program(name: str, *words: str, seconds: float) -> JobEnd:
    """Run a program without poprun: a job of one replica."""
    return run([sys.executable, str(PROGRAMS / name), *words], seconds=seconds)


def in_words(found: Median) -> str:
    """Return a ratio with its interval."""
    return f"{found.value:.3f} ({found.lower:.3f} to {found.upper:.3f})"


def speed_of(result: dict[str, Any], *, moves: bool) -> str:
    """Return the seconds of a step, and the bytes a second that the store gave and took."""
    seconds = median(result["seconds"][_WARM_STEPS:]).value
    speed = _BYTES_OF_PARAMETER * result["num_parameters"] / seconds / 1e9
    return f"{seconds:.3g} s a step{f', {speed:.3g} GB/s' if moves else ''}"
