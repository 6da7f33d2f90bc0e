"""Whether `popsize` predicts a small transformer on this CPU: many mappings, measured beside predicted.

    python benchmarks/sizing_cpu.py

Jobs of 1, 2 and 4 processes, each on its share of the cores, train a GPT (fp32, AdamW; see measuring/gpt.py)
shared over tensor groups, stages and replicas, with several micro batches and with recomputation.

Memory is that of the tensors that are alive at once in a step after the first, on the fullest instance: weights,
gradients, optimizer state, activations, and what operations return for a moment. Not counted are the interpreter,
torch itself, the buffers of gloo, and what an operation allocates and frees inside. Seconds are those of a step
that all processes of a job start together: the median over all rounds. `popsize` gets the figures of the machine
from `python -m popdist.parallel.measures.cpu_speed`. Where processes share a core, one works while another waits,
which no device of its own would do: of such jobs the seconds are shown, and do not count for the correlation.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from measuring.documents import put, table
from scipy.stats import spearmanr

from popsize.errors import MappingError
from popsize.hardware import Machine, machines_of
from popsize.mapping import Mapping, Training, Workload, check
from popsize.model import Recompute, Transformer, transformer
from popsize.search import Candidate

MOST_MEMORY_ERROR, LEAST_CORRELATION = 0.05, 0.9
MIB = 2**20
NUM_CORES = len(os.sched_getaffinity(0))
GPT = Transformer(
    layers=8,
    hidden=256,
    heads=8,
    sequence=64,
    vocab=1024,
    positions=64,
    dropout=False,
    fused_attention=True,
)
TRAINING = Training(global_batch=16, precision="fp32", engine="other")
COUNTS = (1, 2, 4)
WAYS: Sequence[tuple[int, Recompute]] = ((1, "none"), (1, "layer"), (4, "none"), (4, "layer"), (8, "none"))
"""Samples of a micro batch, and what is recomputed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a mapping took: bytes of the fullest instance, and seconds of steps."""

    mapping: Mapping
    peak: int
    seconds: list[float]


def mappings(machine: Machine) -> list[Mapping]:
    """All legal mappings to all devices of ``machine``, in each of `WAYS`."""
    workload = workload_on(machine)
    legal = []
    for tensor in COUNTS:
        for pipeline in COUNTS:
            replicas, rest = divmod(machine.num_devices, tensor * pipeline)
            for micro_batch, recompute in WAYS if replicas and not rest else ():
                mapping = Mapping(
                    tensor=tensor,
                    pipeline=pipeline,
                    replicas=replicas,
                    micro_batch=micro_batch,
                    recompute=recompute,
                )
                try:
                    check(mapping, workload)
                except MappingError:
                    continue
                legal.append(mapping)
    return legal


def workload_on(machine: Machine) -> Workload:
    """The training on ``machine``."""
    return Workload(model=transformer(GPT), machine=machine, training=TRAINING)


def instance(orders: Path, answer: Path) -> None:
    """Measure, as one instance of a job, the mappings in ``orders``; the first instance writes ``answer``."""
    import torch
    from measuring.gpt import Trainer
    from measuring.live_bytes import LiveBytes
    from torch import distributed

    import popdist

    asked = json.loads(orders.read_text(encoding="utf-8"))
    popdist.init()
    distributed.init_process_group("gloo")
    torch.set_num_threads(asked["threads"])
    found = []
    for numbers in asked["mappings"]:
        live = LiveBytes()
        if asked["memory"]:
            with live:
                trainer = Trainer(GPT, Mapping(**numbers), TRAINING.global_batch)
                trainer.step()
                live.peak = 0
                trainer.step()
        trainer = Trainer(GPT, Mapping(**numbers), TRAINING.global_batch)
        loss = trainer.step()
        seconds = [_seconds_together(trainer.step) for _ in range(asked["steps"])]
        everyone: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(everyone, (live.peak, seconds, loss))
        peaks, times, losses = zip(*everyone, strict=True)
        slowest = [max(each) for each in zip(*times, strict=True)]
        found.append({"peak": max(peaks), "seconds": slowest, "loss": sum(losses) / numbers["tensor"]})
    waited = _collective_seconds()
    if distributed.get_rank() == 0:
        answer.write_text(json.dumps({"collective_seconds": waited, "mappings": found}), encoding="utf-8")


def _collective_seconds() -> float:
    """What an all-reduce of a few bytes waits for, its start and the slower process, between pieces of work."""
    import torch
    from torch import distributed

    left, right, few = torch.ones(256, 512), torch.ones(512, 256), torch.ones(16)
    numbers = range(200)
    alone = _seconds_together(lambda: [left @ right for _ in numbers])
    summed = _seconds_together(lambda: [distributed.all_reduce(few + (left @ right)[0, 0]) for _ in numbers])
    return max(0.0, summed - alone) / len(numbers)


def _seconds_together(step: Callable[[], object]) -> float:
    """Seconds of ``step``, which all processes start together."""
    from torch import distributed

    distributed.barrier()
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def run_job(asked: Sequence[Mapping], steps: int, *, memory: bool) -> dict[str, Any]:
    """What the instances of a job measured: a collective, and each mapping, all of which take as many of them."""
    count = asked[0].num_devices
    numbers = [asdict(mapping) for mapping in asked]
    order = {"mappings": numbers, "steps": steps, "memory": memory, "threads": max(1, NUM_CORES // count)}
    with tempfile.TemporaryDirectory(prefix="popdist-benchmark-") as folder:
        orders, answer = Path(folder, "orders"), Path(folder, "answer")
        orders.write_text(json.dumps(order), encoding="utf-8")
        program = [sys.executable, __file__, "--instance", str(orders), str(answer)]
        job = [sys.executable, "-m", "poprun", "--launcher", "local", "-n", str(count), *program]
        subprocess.run(job, check=True, stdin=subprocess.DEVNULL)
        found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    return found


def this_machine(count: int) -> dict[str, float]:
    """The figures of this CPU as ``count`` devices."""
    command = [sys.executable, "-m", "popdist.parallel.measures.cpu_speed", str(count)]
    told = subprocess.run(command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout
    figures: dict[str, Any] = json.loads(told)
    speeds: dict[str, float] = figures.pop("tflops")
    return figures | speeds


def machine_of(rounds: Sequence[dict[str, float]]) -> Machine:
    """The machine whose figures are the medians of ``rounds``."""
    figures = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    speeds = {name: figures.pop(name) for name in ("fp32", "bf16")}
    return machines_of({"this CPU": figures | {"tflops": speeds}}, "cpu_speed")["this CPU"]


def figures_of(machine: Machine) -> dict[str, float]:
    """The figures of ``machine`` that seconds are predicted from."""
    return {
        "flops": machine.device.flops["fp32"],
        "memory_bytes_per_second": machine.device.memory_bytes_per_second,
        "operator_seconds": machine.device.operator_seconds,
        "link_bytes_per_second": machine.link_bytes_per_second,
        "collective_seconds": machine.collective_seconds,
    }


def measure(count: int, rounds: int, steps: int) -> tuple[Machine, list[Measured]]:
    """This CPU as ``count`` devices, and what all mappings to them took."""
    asked = mappings(machine_of([this_machine(count)]))
    figures, answers = [], []
    for number in range(rounds if count <= NUM_CORES else 1):
        answer = run_job(asked, steps, memory=not number)
        answers.append(answer["mappings"])
        figures.append(this_machine(count) | {"collective_seconds": answer["collective_seconds"]})
    found = []
    for mapping, *told in zip(asked, *answers, strict=True):
        seconds = [second for each in told for second in each["seconds"]]
        found.append(Measured(mapping=mapping, peak=told[0]["peak"], seconds=seconds))
    losses = [each["loss"] for answer in answers for each in answer]
    if max(losses) - min(losses) > 1e-4 * max(losses):
        raise SystemExit(f"mappings to {count} instances compute different losses: {losses}")
    return machine_of(figures), found


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A mapping as it was measured and predicted: bytes of the fullest instance, and seconds of a step."""

    mapping: Mapping
    measured: tuple[float, float]
    predicted: tuple[float, float]

    @property
    def has_cores(self) -> bool:
        """Whether each process has a core of its own: only such seconds count."""
        return self.mapping.num_devices <= NUM_CORES

    @property
    def memory_error(self) -> float:
        """How far the predicted memory is off, as a share of what was measured."""
        return self.predicted[0] / self.measured[0] - 1


def pairs_of(jobs: Sequence[tuple[Machine, list[Measured]]]) -> list[Pair]:
    """All mappings of all jobs."""
    found = []
    for machine, measured in jobs:
        workload = workload_on(machine)
        for one in measured:
            candidate = Candidate(workload, one.mapping)
            predicted = (candidate.memory.total, candidate.duration.total)
            figures = (float(one.peak), statistics.median(one.seconds))
            found.append(Pair(mapping=one.mapping, measured=figures, predicted=predicted))
    return found


def correlation(pairs: Sequence[Pair]) -> float:
    """The rank correlation of measured and predicted seconds."""
    return float(spearmanr([one.measured[1] for one in pairs], [one.predicted[1] for one in pairs]).statistic)


def every_row(pairs: Sequence[Pair]) -> str:
    """A table of all mappings."""
    head = ["mapping", "MiB", "predicted", "error", "seconds", "predicted"]
    rows = []
    for one in pairs:
        sizes = [f"{one.measured[0] / MIB:.1f}", f"{one.predicted[0] / MIB:.1f}", f"{one.memory_error:+.1%}"]
        rows.append([one.mapping.text, *sizes, f"{one.measured[1]:.3f}", f"{one.predicted[1]:.3f}"])
    return table(head, rows)


def summary(pairs: Sequence[Pair]) -> tuple[str, bool]:
    """A row for each number of instances, both figures with their limits, and whether these hold."""
    rows = []
    for count in sorted({one.mapping.num_devices for one in pairs}):
        job = [one for one in pairs if one.mapping.num_devices == count]
        worst = max((one.memory_error for one in job), key=abs)
        ratio = statistics.median(one.predicted[1] / one.measured[1] for one in job)
        rank = f"{correlation(job):.3f}" + ("" if job[0].has_cores else " (cores are shared)")
        rows.append([f"{count}", f"{len(job)}", f"{worst:+.1%}", f"{ratio:.2f}", rank])
    worst = max((one.memory_error for one in pairs), key=abs)
    counted = [one for one in pairs if one.has_cores]
    holds = abs(worst) <= MOST_MEMORY_ERROR and correlation(counted) >= LEAST_CORRELATION
    head = ["instances", "mappings", "worst memory", "seconds predicted/measured", "rank correlation"]
    text = (
        f"Worst error of memory {worst:+.1%} (limit {MOST_MEMORY_ERROR:.0%}); rank correlation of seconds, of the "
        f"{len(counted)} mappings with a core for each process, {correlation(counted):.3f} "
        f"(limit {LEAST_CORRELATION})."
    )
    return f"{table(head, rows)}\n\n{text}", holds


def main() -> None:
    """Measure, print a table, and write the files that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, nargs="+", default=list(COUNTS), help="of the jobs (1 2 4)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each job runs (3)")
    parser.add_argument("--steps", type=int, default=3, help="that are timed of each mapping in a round (3)")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    parser.add_argument("--document", type=Path, help="a Markdown file whose part `sizing_cpu` gets the summary")
    parser.add_argument("--instance", type=Path, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.instance:
        instance(*options.instance)
        return
    jobs = [measure(count, options.rounds, options.steps) for count in options.instances]
    pairs = pairs_of(jobs)
    text, holds = summary(pairs)
    command = shlex.join(["python", *sys.argv])
    text = f"{NUM_CORES} cores, {options.rounds} rounds: `{command}`\n\n{text}"
    print(f"{every_row(pairs)}\n\n{text}")
    if options.json:
        found = [
            {"machine": figures_of(machine), "measured": [asdict(one) for one in measured]}
            for machine, measured in jobs
        ]
        options.json.write_text(json.dumps({"command": command, "jobs": found}, indent=1) + "\n", encoding="utf-8")
    if options.document:
        put(options.document, "sizing_cpu", text)
    if not holds:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
