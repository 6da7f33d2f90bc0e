"""Replicas that several instances share: the mapping (tensor, pipeline) from the user, and its counts. Pure."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from popdist.ground.layout import Parallelism
from poprun.errors import PlanError
from poprun.plan.plan import LaunchPlan
from poprun.plan.request import MAX_COUNT, AskedMapping, LaunchRequest, check_count
from poprun.plan.topology import Gpu
from poprun.text.ranges import counted
from popsize.errors import MappingError
from popsize.hardware import DEVICES, GIB, gib, is_called
from popsize.mapping import loaded, parse_mapping

if TYPE_CHECKING:
    from popsize.hardware import PlannedDevices

_ENOUGH: Final = 0.95  # a device may have 95 % of the planned memory, because drivers use a part
_OF_JOB = ("tensor", "pipeline", "replicas")


def mapping_in_words(words: str) -> AskedMapping:
    """Parse the user's mapping of replicas to instances: ``tensor=2,pipeline=2``. Raises PlanError if wrong."""
    try:
        sizes = parse_mapping(words)
    except MappingError as error:
        raise PlanError(f"--parallelism {words}: {error}") from None
    if others := [name for name in sizes if name not in _OF_JOB]:
        raise PlanError(
            f"--parallelism {words}: {', '.join(others)} is for the program: leave it out, or give the file of "
            "poprun-size --save, which the program reads, too"
        )
    return AskedMapping(text=words, **sizes)


def mapping_in_file(content: str, name: str, path: str) -> AskedMapping:
    """Parse the mapping of replicas to instances in ``content``, the text of a file. Raises PlanError if wrong."""
    try:
        saved = loaded(content, name)
    except MappingError as error:
        where = "" if str(error).startswith(name) else f"{name}: "
        raise PlanError(f"--parallelism {where}{error}") from None
    mapping = saved.mapping
    return AskedMapping(
        text=name,
        tensor=mapping.tensor,
        pipeline=mapping.pipeline,
        replicas=mapping.replicas,
        path=path,
        devices=saved.devices,
    )


def choose_parallelism(request: LaunchRequest) -> Parallelism:
    """Return how many instances, stages and shards a replica has. Raises PlanError if options contradict."""
    asked, size = request.mapping, request.instances_per_replica
    if size is not None:
        check_count("--instances-per-replica", size)
    if asked is None:
        return Parallelism(instances_per_replica=size or 1)
    number = asked.tensor * asked.pipeline
    if number > MAX_COUNT:
        raise PlanError(f"--parallelism {asked.text} asks for {number} instances a replica: at most {MAX_COUNT}")
    if size not in (None, number):
        raise PlanError(
            f"--instances-per-replica {size} contradicts --parallelism {asked.text}, with which a replica has "
            f"{number}, tensor={asked.tensor} times pipeline={asked.pipeline}: leave out one of them"
        )
    return Parallelism(instances_per_replica=number, tensor=asked.tensor, pipeline=asked.pipeline)


def with_counts(request: LaunchRequest, size: int, *, is_counted: bool) -> tuple[LaunchRequest, bool]:
    """Return ``request`` with the numbers of replicas and instances that its mapping sets; and, as a bool, whether
    the user or the mapping has set the number of instances.

    The argument ``size`` is the number of instances of a replica. Raises PlanError if counts contradict the
    mapping.
    """
    asked, num_replicas = request.mapping, request.num_replicas
    if asked is not None and asked.replicas is not None:
        number = asked.replicas * size
        is_other = size > 1 and is_counted and request.num_instances not in (None, number)
        if is_other or num_replicas not in (None, asked.replicas):
            raise PlanError(_contradiction(request, asked, number, is_other=is_other))
        num_replicas = asked.replicas
    if num_replicas is not None and not is_counted and (size > 1 or asked is not None):
        request, is_counted = replace(request, num_instances=num_replicas * size), True
    return replace(request, num_replicas=num_replicas), is_counted


def _contradiction(request: LaunchRequest, asked: AskedMapping, number: int, *, is_other: bool) -> str:
    """Return the error that ``--num-instances`` or ``--num-replicas`` contradicts the mapping ``asked``."""
    option, given, right = (
        ("--num-instances", request.num_instances, number)
        if is_other
        else ("--num-replicas", request.num_replicas, asked.replicas)
    )
    sizes = f"tensor={asked.tensor},pipeline={asked.pipeline}"
    other = f"make a mapping for {given}: poprun-size" if is_other and asked.path else f"--parallelism {sizes}"
    return (
        f"{option} {given} contradicts --parallelism {asked.text}, which is for {number} devices: "
        f"{sizes},replicas={asked.replicas}; give {option} {right}, or {other}"
    )


def check_found(plan: LaunchPlan, asked: AskedMapping, num_gpus: int) -> None:
    """Raise PlanError if hosts have GPUs (``num_gpus`` each), but too few for the user's mapping (``asked``)."""
    if asked.replicas is None or plan.devices or not num_gpus:
        return
    counts = f"{num_gpus} on each of {len(plan.hosts)} hosts" if len(plan.hosts) > 1 else str(num_gpus)
    size = plan.parallelism.instances_per_replica
    fitting, step = num_gpus // plan.num_devices_per_instance * len(plan.hosts), math.lcm(size, len(plan.hosts))
    num_replicas = fitting // step * step // size
    sizes = f"tensor={asked.tensor},pipeline={asked.pipeline}"
    nearest = f"{sizes},replicas={num_replicas}" if num_replicas else "fewer instances a replica"
    raise PlanError(
        f"--parallelism {asked.text} is for {plan.num_gpus_needed * len(plan.hosts)} GPUs, and found are "
        f"{counts}; nearest: {nearest}, or --offline-mode to compute on the CPU"
    )


def other_devices(plan: LaunchPlan, asked: AskedMapping, gpus: Sequence[Gpu]) -> tuple[str, ...]:
    """Return a tuple of one warning if the job has other devices than its mapping was planned for; () if not."""
    if asked.devices is None or (plan.vipu.is_offline and asked.devices.are_gpus):
        return ()
    planned, on_gpus = asked.devices, bool(plan.devices)
    num_devices = plan.num_replicas * plan.parallelism.instances_per_replica
    per_host = num_devices // len(plan.hosts)
    if planned.are_gpus != on_gpus:
        actual = "GPUs" if on_gpus else "the CPU"
        cure = f"plan for {actual}: poprun-size {'--devices' if on_gpus else f'--cpu {num_devices}'}"
    elif on_gpus and (other := _other_kind(planned, next(gpu for gpu in gpus if gpu.name == plan.devices[0]))):
        actual, cure = other, "plan for these: poprun-size without --devices"
    elif per_host != planned.per_host and plan.vipu.pod is None:
        actual = f"{per_host} devices a host, not {planned.per_host}"
        cure = f"nearest: {counted(max(1, num_devices // planned.per_host), 'host')}"
    else:
        return ()
    start = f"{asked.text} was planned for {planned.machine}"
    return (f"{start}, and the job computes on {actual}: memory and seconds are not as predicted; {cure}",)


def _other_kind(planned: "PlannedDevices", gpu: Gpu) -> str:
    """Return the model and memory of ``gpu`` as text if ``planned`` has another model or more memory; else ""."""
    is_other = gpu.model and planned.device in DEVICES and not is_called(planned.device, gpu.model)
    if is_other or 0 < gpu.memory_bytes < _ENOUGH * planned.memory_gib * GIB:
        return f"{gpu.model} with {gib(gpu.memory_bytes)} GiB, not {planned.memory_gib:.2f}"
    return ""
