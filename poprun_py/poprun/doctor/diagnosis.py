"""What the facts mean, and what to do."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Final

from rich.table import Table
from rich.text import Text

from popdist.contract import VERSION
from poprun.doctor.facts import Symptoms
from poprun.render.table import Page
from poprun.text.formats import ReportFormat
from poprun.text.ranges import fold_numbers

MIN_SHARED_BYTES: Final = 2**30
"""Of /dev/shm; containers often have 64 MiB, and one batch of images takes more."""

_GIB: Final = 2**30
_SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108 - where it is mounted


class State(StrEnum):
    """How something is."""

    OK = "ok"
    ABSENT = "absent"
    WARNING = "warning"
    FAILS = "fails"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        subject: What it is.
        state: How it is. ``absent``: only some jobs need it; ``fails``: no job can run.
        found: What poprun found, and would use.
        remedy: What to do; empty where there is nothing to be done.
    """

    subject: str
    state: State
    found: str
    remedy: str = ""


def diagnose(symptoms: Symptoms) -> tuple[Finding, ...]:
    """A finding for each thing that jobs of this machine, or of several, need."""
    return tuple(
        finding
        for look in (_libraries, _mpi, _gpus, _cores, _memory, _shared_memory, _other_hosts)
        for finding in look(symptoms)
    )


def can_run(findings: tuple[Finding, ...]) -> bool:
    """Whether a job of this machine can run."""
    return all(finding.state is not State.FAILS for finding in findings)


def _libraries(symptoms: Symptoms) -> Iterator[Finding]:
    yield Finding(subject="Python", state=State.OK, found=f"{symptoms.python}, {symptoms.interpreter}")
    libraries = symptoms.libraries
    pip = f"{symptoms.interpreter} -m pip install"
    if "torch" not in libraries.versions:
        problem = libraries.problems.get("torch", "it cannot be imported")
        yield Finding(subject="torch", state=State.FAILS, found=problem, remedy=f"{pip} torch")
    elif not libraries.has_gloo:
        found = f"{libraries.versions['torch']}, which lacks gloo"
        yield Finding(
            subject="torch", state=State.FAILS, found=found, remedy=f"{pip} torch, as its project builds it"
        )
    else:
        build = f"for CUDA {libraries.cuda}" if libraries.cuda else "for the CPU"
        yield Finding(subject="torch", state=State.OK, found=f"{libraries.versions['torch']}, {build}")
    version = libraries.versions.get("popdist")
    if version == VERSION:
        yield Finding(subject="popdist", state=State.OK, found=version)
        yield _extension(symptoms)
    else:
        found = (
            f"{version}, but poprun is {VERSION}" if version else libraries.problems.get("popdist", "not found")
        )
        yield Finding(subject="popdist", state=State.FAILS, found=found, remedy=f"{pip} poprun=={VERSION}")


def _extension(symptoms: Symptoms) -> Finding:
    if symptoms.libraries.has_extension:
        return Finding(subject="extension", state=State.OK, found="popdist's, in C")
    return Finding(
        subject="extension",
        state=State.ABSENT,
        found="popdist has none, so small all-reduces take longer",
        remedy="install a C compiler and Python's headers (Debian: apt install gcc libc6-dev python3-dev), then "
        f"{symptoms.interpreter} -m pip install --force-reinstall --no-cache-dir --no-deps poprun",
    )


def _mpi(symptoms: Symptoms) -> Iterator[Finding]:
    facts, libraries = symptoms.facts, symptoms.libraries
    unknown = f"; of neither family: {', '.join(facts.unknown_mpi)}" if facts.unknown_mpi else ""
    if facts.mpi is None:
        yield Finding(
            subject="MPI",
            state=State.ABSENT,
            found=f"none, so jobs start without it, on this machine only{unknown}",
            remedy=f"{symptoms.interpreter} -m pip install mpich",
        )
        return
    yield Finding(subject="MPI", state=State.OK, found=f"{facts.mpi}{unknown}")
    if "mpi4py" in libraries.problems:
        yield Finding(
            subject="mpi4py",
            state=State.WARNING,
            found=libraries.problems["mpi4py"],
            remedy=f"{symptoms.interpreter} -m pip install mpi4py",
        )


def _gpus(symptoms: Symptoms) -> Iterator[Finding]:
    gpus, seen = symptoms.facts.gpus, symptoms.libraries.num_devices
    if not gpus:
        yield Finding(subject="GPUs", state=State.ABSENT, found="none: virtual IPUs are shares of the cores")
        return
    free = [gpu.name for gpu in gpus if gpu.is_free]
    found = f"{len(gpus)}, free: {', '.join(free) or 'none'}"
    if seen == len(gpus):
        yield Finding(subject="GPUs", state=State.OK, found=found)
    else:
        yield Finding(
            subject="GPUs",
            state=State.WARNING,
            found=f"{found}; torch sees {seen}",
            remedy="install a torch that is built for the CUDA of this machine's driver",
        )


def _cores(symptoms: Symptoms) -> Iterator[Finding]:
    facts = symptoms.facts
    nodes = f", {len(facts.memory_nodes)} NUMA nodes" if len(facts.memory_nodes) > 1 else ""
    quota = symptoms.cpu_quota
    limit = "" if quota is None else f"; the control group grants the time of {quota:g}"
    cores = f"{len(facts.cores)} ({fold_numbers(facts.cores)}){nodes}{limit}"
    yield Finding(subject="cores", state=State.OK, found=cores)


def _memory(symptoms: Symptoms) -> Iterator[Finding]:
    memory = symptoms.memory
    parts = [_size(memory.machine_bytes)] if memory.machine_bytes else []
    if memory.group_bytes is not None and memory.group_bytes < (memory.machine_bytes or memory.group_bytes + 1):
        parts.append(f"the control group grants {_size(memory.group_bytes)}")
    if memory.address_space_bytes is not None:
        parts.append(f"ulimit -v {_size(memory.address_space_bytes)} for each process")
    if parts:
        yield Finding(subject="memory", state=State.OK, found="; ".join(parts))


def _shared_memory(symptoms: Symptoms) -> Iterator[Finding]:
    free = symptoms.memory.shared_free_bytes
    if not symptoms.can_share_memory or free is None:
        yield Finding(
            subject=_SHARED_MEMORY,
            state=State.FAILS,
            found="it is not there, or cannot be written",
            remedy="mount -t tmpfs tmpfs /dev/shm, or start the container with --shm-size 8g",
        )
    elif free < MIN_SHARED_BYTES:
        yield Finding(
            subject=_SHARED_MEMORY,
            state=State.WARNING,
            found=f"{_size(free)} free, where data loaders leave their batches",
            remedy="start the container with --shm-size 8g, or mount -o remount,size=8g /dev/shm",
        )
    else:
        yield Finding(subject=_SHARED_MEMORY, state=State.OK, found=f"{_size(free)} free")


def _other_hosts(symptoms: Symptoms) -> Iterator[Finding]:
    if symptoms.ssh:
        yield Finding(subject="ssh", state=State.OK, found=symptoms.ssh)
    else:
        remedy = "install an ssh client (Debian: apt install openssh-client)"
        yield Finding(subject="ssh", state=State.ABSENT, found="none: no jobs on other hosts", remedy=remedy)
    if symptoms.slurm:
        job = f", inside job {symptoms.slurm_job}" if symptoms.slurm_job else ", outside of a job"
        yield Finding(subject="Slurm", state=State.OK, found=f"{symptoms.slurm}{job}")
    else:
        yield Finding(subject="Slurm", state=State.ABSENT, found="none")


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB"


FORM_VERSION: Final = 1
"""Of the form of the JSON."""

_STYLES: Final = {State.OK: "green", State.ABSENT: "dim", State.WARNING: "yellow", State.FAILS: "bold red"}


def render_findings(
    findings: Sequence[Finding], report_format: ReportFormat, *, width: int = 80, has_color: bool = False
) -> str:
    """``findings`` as text that ends with a line break; only the table heeds ``width`` and ``has_color``."""
    is_fit = can_run(tuple(findings))
    if report_format is ReportFormat.JSON:
        values = {"version": FORM_VERSION, "can_run": is_fit, "findings": [asdict(it) for it in findings]}
        return json.dumps(values, indent=2) + "\n"
    page = Page(width=width, has_color=has_color)
    page.print(_table(findings))
    page.print()
    page.print("jobs of this machine can run" if is_fit else "no job can run before that is mended")
    return page.text()


def _table(findings: Sequence[Finding]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        table.add_row(finding.subject, Text(finding.state, _STYLES[finding.state]), finding.found)
        if finding.remedy:
            table.add_row("", "", Text(f"→ {finding.remedy}", "cyan"))
    return table
