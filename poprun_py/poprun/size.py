"""The `poprun-size` program: it says which mappings of a model to devices fit, and which is fastest."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

import click

from popdist.ground.contract import VERSION
from poprun.errors import OutputError, PlanError, UsageError
from poprun.hosts.probe.gpus import find_gpus
from poprun.plan.topology import Gpu
from poprun.text.atomic_file import check_target, write_whole
from poprun.text.input_files import parse_json, parse_yaml, read_text
from poprun.text.screen import log, print_out, run_click, width
from popsize.catalogue import MODELS, config_model, model_of, named_model
from popsize.errors import SizingError
from popsize.hardware import (
    DEVICES,
    FIGURES,
    PRECISIONS,
    Machine,
    Precision,
    bytes_of,
    is_called,
    machines_of,
    named_machine,
)
from popsize.mapping import OPTIMIZER_BYTES, Training, Workload, completed, loaded, parse_mapping, saved
from popsize.mapping import Mapping as SizeMapping
from popsize.model import Model, Transformer
from popsize.search import Answer, Candidate, nearest_changes, predict, search
from popsize.tables import answer_csv, answer_json, answer_table, explanation

_MEASURE_SECONDS: Final = 60
_LEAST_WIDTH: Final = 80  # columns of a table; a narrower terminal wraps its lines

_EPILOG: Final = f"""
Words of --fix and --explain: {", ".join(f.name for f in fields(SizeMapping))}.

Numbers of a model: {", ".join(f.name for f in fields(Transformer))}.

Figures of a machine in the file of --machines: tflops, {", ".join(FIGURES)}.

The table: the share of the devices' peak that the model's operations use; the GiB on the fullest device; tensor
(tp), pipeline (pp), replicas (dp); samples of a micro batch, and how many of them a replica adds up.

\b
Examples:
  poprun-size --model gpt2-xl --devices 8xA100-80GB --global-batch 64
  poprun-size --model gpt3-175b --devices 1024xA100 \\
      --global-batch 1536 --fix tensor=8
  poprun-size --pod POD16 --global-batch 512 \\
      --model gpt layers=24 hidden=2048 heads=16 sequence=1024
  poprun-size --model llama3-8b --devices 8xH100 --global-batch 64 \\
      --explain tensor=8 --format json
  poprun-size --model config.json --devices 64xH100 \\
      --global-batch 512 --save mapping.json
"""


def main() -> None:
    """Run `poprun-size` with the arguments of this process and end the process."""
    sys.exit(run_click(size, "poprun-size"))


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}, epilog=_EPILOG)
@click.version_option(VERSION, message="poprun-size %(version)s")
@click.option(
    "--model",
    metavar="NAME",
    help="A name, such as gpt2-xl; a family (gpt, bert, llama) with numbers behind it; a config.json of "
    "Hugging Face; or a file that popdist.parallel.describe(...).save() wrote.",
)
@click.argument("numbers", nargs=-1, metavar="[NUMBER=…]...")
@click.option(
    "--devices", metavar="MACHINE", help="Such as 64xA100-80GB, 8xH100, 8xH200, or a name of --machines."
)
@click.option("--pod", metavar="POD", help="POD16, POD64, POD128, POD256, or several of them: 4xPOD64.")
@click.option(
    "--cpu",
    metavar="N",
    type=click.IntRange(1),
    help="N instances on this machine's CPU, which is measured in two seconds.  "
    "[default without a machine: the GPUs found]",
)
@click.option(
    "--store",
    metavar="FOLDER",
    type=click.Path(exists=True, file_okay=False),
    help="With --cpu: a folder on a disk, which is measured, where phases of a model may wait that is larger than "
    "the memory.",
)
@click.option(
    "--machines",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False),
    help="A YAML file that describes other machines.",
)
@click.option("--global-batch", metavar="N", type=click.IntRange(1), help="Samples of a step, over all replicas.")
@click.option(
    "--precision",
    type=click.Choice(PRECISIONS),
    help="What is computed in.  [default: bf16, or fp16 where there is no bf16]",
)
@click.option(
    "--optimizer",
    type=click.Choice(sorted(OPTIMIZER_BYTES)),
    default="adamw",
    show_default=True,
    help="Its state takes memory.",
)
@click.option(
    "--gradient-bytes",
    type=click.Choice(["2", "4"]),
    default="4",
    show_default=True,
    help="Bytes in which a gradient is added.",
)
@click.option(
    "--fix",
    metavar="WORDS",
    multiple=True,
    help="Search only mappings with these values: tensor=8,pipeline=8. The names tp, pp, dp are taken too; "
    "tensor=8x8 is a group of 64.",
)
@click.option("--tensor-parallel-size", metavar="N", type=click.IntRange(1), help="As --fix tensor=N.")
@click.option("--pipeline-parallel-size", metavar="N", type=click.IntRange(1), help="As --fix pipeline=N.")
@click.option(
    "--memory-limit",
    metavar="SIZE",
    help="Use at most so much of a device's memory: GiB, or with a unit, as 2GB.",
)
@click.option(
    "--explain",
    metavar="WORDS",
    help="Explain one mapping, of WORDS or a saved FILE.json: each term of its time, and its memory.",
)
@click.option(
    "--top",
    metavar="N",
    type=click.IntRange(1),
    default=10,
    show_default=True,
    help="How many mappings are listed; of a large search at least the fastest 500 are known.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "json", "csv", "svg"]),
    default="table",
    show_default=True,
    help="How to print it; svg draws the first, or the explained one.",
)
@click.option(
    "--save",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    help="Write the first, or the explained one, to a file that poprun --parallelism takes.",
)
def size(**words: Any) -> None:
    """Say which mappings of a model to devices fit, and which is fastest.

    A mapping divides the layers over TENSOR devices, cuts them into PIPELINE stages, and trains REPLICAS
    copies: it uses tensor x pipeline x replicas devices. All that are legal are predicted, and those that
    fit are ranked by the seconds of a step.

    Not planned: context and expert parallelism, LoRA, inference, quantized states.
    """
    asked = _Asked(**words)
    try:
        machines = {} if asked.machines is None else _described_machines(asked.machines)
        _print_mappings(asked, _workload(asked, machines))
    except SizingError as error:
        raise PlanError(str(error)) from None


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """The options and arguments of one call of `poprun-size`, as click has parsed the command line."""

    model: str | None
    numbers: tuple[str, ...]
    devices: str | None
    pod: str | None
    cpu: int | None
    store: str | None
    machines: str | None
    global_batch: int | None
    precision: Precision | None
    optimizer: str
    gradient_bytes: str
    fix: tuple[str, ...]
    tensor_parallel_size: int | None
    pipeline_parallel_size: int | None
    memory_limit: str | None
    explain: str | None
    top: int
    form: str
    save: str | None

    def values(self, words: str = "") -> dict[str, Any]:
        """Return the sizes, such as tensor=8, that the user has fixed with options or in ``words``, by name."""
        sizes = {"tensor": self.tensor_parallel_size, "pipeline": self.pipeline_parallel_size}
        given = [f"{name}={number}" for name, number in sizes.items() if number is not None]
        return parse_mapping(",".join([*self.fix, *given, words]))


def _workload(asked: _Asked, machines: Mapping[str, Machine]) -> Workload:
    """Return the workload to map to devices: the model, the machine and the training that ``asked`` describes."""
    model = _model(asked.model, asked.numbers)
    machine = _machine(asked, machines)
    if asked.global_batch is None:
        raise UsageError("a step needs its number of samples: give --global-batch")
    return Workload(
        model=model,
        machine=machine,
        training=Training(
            global_batch=asked.global_batch,
            precision=machine.device.precision(asked.precision),
            optimizer=asked.optimizer,
            gradient_bytes=int(asked.gradient_bytes),
        ),
        memory_limit_bytes=None if asked.memory_limit is None else _size("--memory-limit", asked.memory_limit),
    )


def _size(option: str, text: str) -> int:
    """Return the number of bytes in ``text``, the value of ``option``; a number without a unit is in GiB."""
    size = bytes_of(text, "gib")
    if size is None:
        raise UsageError(f"{option} {text} is no size: give GiB, or a unit, as 2GB")
    return size


def _print_mappings(asked: _Asked, workload: Workload) -> None:
    """Print the mapping of --explain, or the mappings that a search finds; --save stores the first in a file."""
    if asked.explain is not None:
        first = _explained(asked, workload)
        answer = Answer(fitting=(first,), faster=None, num_mappings=1)
        table = explanation(first)
    else:
        answer = search(workload, asked.values())
        if not answer.fitting:
            raise PlanError(_nothing_fits(answer, workload, asked.values()))
        first = answer.fitting[0]
        table = answer_table(answer, workload, asked.top)
    if asked.save is not None:
        if not first.fits:
            log(f"warning: {first.mapping.text} does not fit; {asked.save} has it nevertheless")
        _save(asked.save, saved(first.mapping, workload))
    if asked.form == "table":
        from poprun.plan.render.table import terminal_text

        print_out(terminal_text(*table, width=max(width(), _LEAST_WIDTH), has_color=False))
    elif asked.form == "svg":
        from poprun.plan.render.picture.documents import picture_css
        from popsize.picture import cube_svg

        print_out(cube_svg(first, picture_css()))
    elif asked.form == "csv":
        print_out(answer_csv(answer, asked.top))
    else:
        print_out(answer_json(answer, workload, asked.top))


def _nothing_fits(answer: Answer, workload: Workload, fixed: Mapping[str, Any]) -> str:
    """Return an error text: no mapping fits the devices, and these are the nearest changes that make one fit."""
    machine = workload.machine
    return (
        f"none of {answer.num_mappings} mappings of {workload.model.name} fits {machine.num_devices} x "
        f"{machine.device.name}; what would fit:\n  " + "\n  ".join(nearest_changes(workload, fixed))
    )


def _explained(asked: _Asked, workload: Workload) -> Candidate:
    """Return the predicted time and memory of the mapping that --explain names, in words or as a saved file."""
    file = asked.explain or ""
    if file.endswith(".json"):
        if asked.values():
            raise UsageError(f"{file} has all values of a mapping: leave out --fix and sizes")
        mapping = loaded(read_text(file, "--explain"), file, workload.model).mapping
    else:
        mapping = completed(asked.values(file), workload.machine.num_devices)
    number = workload.machine.num_devices
    if mapping.num_devices > number:
        raise PlanError(f"{mapping.text} uses {mapping.num_devices} devices; {workload.machine.name} has {number}")
    found = predict(workload, mapping)
    if mapping.num_devices < number:
        log(f"warning: {mapping.text} uses {mapping.num_devices} of {number} devices")
    return found


def _save(path: str, content: str) -> None:
    """Write ``content`` to the file ``path``. Raise OutputError, and leave the file unchanged, on failure."""
    try:
        check_target(path)
        write_whole(path, content)
    except (OSError, ValueError) as error:
        raise OutputError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from None


def _model(name: str | None, numbers: tuple[str, ...]) -> Model:
    """Return the model called ``name`` with the sizes ``numbers``, or the model from the JSON file ``name``."""
    if name is None:
        if meant := next((word for word in numbers if "=" not in word), ""):
            raise UsageError(f"there is no model: write --model {meant}")
        raise UsageError(f"there is no model: give --model with a name ({', '.join(MODELS)}), numbers, or a file")
    if not name.endswith(".json"):
        return named_model(name, numbers)
    try:
        table = parse_json(read_text(name, "--model"))
    except ValueError as error:
        raise PlanError(f"{name} is not JSON: {error}") from None
    if isinstance(table, dict) and "popsize_model" in table:
        if numbers:
            raise UsageError(f"{name} is a measured model, which {numbers[0]} cannot change: measure it again")
        return model_of(table, name)
    return config_model(table, name, numbers)


def _machine(asked: _Asked, known: Mapping[str, Machine]) -> Machine:
    """Return the machine that the options describe; without such options, a machine with the GPUs found here."""
    if sum(word is not None for word in (asked.devices, asked.pod, asked.cpu)) > 1:
        raise UsageError("give one of --devices, --pod and --cpu")
    if asked.store is not None and asked.cpu is None:
        raise UsageError("--store is measured with --cpu; other machines have streaming figures (--machines)")
    if asked.cpu is not None:
        return _measured_cpu(asked.cpu, asked.store)
    name = asked.pod if asked.devices is None else asked.devices
    if name is not None:
        return named_machine(name, known)
    gpus = find_gpus(os.environ)
    if not gpus:
        raise UsageError("this machine has no GPU: give --devices, --pod, or --cpu 4")
    return named_machine(f"{len(gpus)}x{_known_device(gpus[0])}", known)


def _described_machines(path: str) -> dict[str, Machine]:
    """Return the machines that the YAML file ``path`` describes, by name."""
    try:
        return machines_of(parse_yaml(read_text(path, "--machines")), path)
    except ValueError as error:
        raise PlanError(f"{path} is not YAML: {error}") from None


def _known_device(gpu: Gpu) -> str:
    """Return popsize's name for the type of ``gpu``. Raises UsageError if popsize does not know the type."""
    fits = [key for key in DEVICES if is_called(key, gpu.model)]
    if not fits:
        raise UsageError(
            f"the GPUs here are {gpu.model or 'of no known kind'}: describe them in a YAML file (--machines) and "
            "name them (--devices)"
        )
    return min(fits, key=lambda key: abs(DEVICES[key].device.memory_bytes - gpu.memory_bytes))


def _measured_cpu(num_instances: int, store: str | None) -> Machine:
    """Measure this machine's CPU in another process; return the CPU as a machine of ``num_instances`` devices."""
    words = [sys.executable, "-P", "-m", "popdist.parallel.measures.cpu_speed", str(num_instances)]
    words += [] if store is None else ["--store", store]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_MEASURE_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        lines = str(getattr(error, "stderr", "") or error).strip().splitlines()
        raise PlanError(f"the CPU could not be measured: {lines[-1] if lines else error}") from None
    name = f"{num_instances} instances on this CPU"
    return machines_of({name: json.loads(done.stdout)}, "the measurement of this CPU")[name]
