"""The findings of `poprun --doctor`: what a job can use on this machine, what is missing, and remedies. Pure."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Final

from rich.table import Table
from rich.text import Text

from popdist.ground.contract import VERSION
from poprun.hosts.doctor.facts import InstallationFacts, Libraries
from poprun.makers.maker import MAKERS, TORCH_BUILDS
from poprun.plan.advice import named
from poprun.plan.program_environment import HASH_SEED
from poprun.plan.render.table import terminal_text
from poprun.text.ranges import describe_bytes, fold_hosts, fold_numbers
from poprun.text.screen import ReportFormat, visible

FORM_VERSION: Final = 1  # version of the JSON format that --doctor prints
NEWEST_TORCH: Final = (2, 15)  # the newest torch with which the tests were run (scripts/test-torch)
MIN_SHARED_BYTES: Final = 2**30  # for /dev/shm; containers often have 64 MiB, less than a batch of images
_SHARED_MEMORY: Final = "/dev/shm"


class State(StrEnum):
    """The result of the check of one part of the machine, such as MPI or the GPUs."""

    OK = "ok"
    ABSENT = "absent"
    WARNING = "warning"
    FAILS = "fails"


_STYLES: Final = {State.OK: "green", State.ABSENT: "dim", State.WARNING: "yellow", State.FAILS: "bold red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result for one part of the machine that was examined, with the remedy for a problem."""

    subject: str  # the name of the part
    state: State  # ``absent``: only some jobs need the part; ``fails``: no job can run
    found: str  # what poprun found and will use
    remedy: str = ""  # what the user can do; empty if the user need not do anything


def diagnose(facts: InstallationFacts) -> tuple[Finding, ...]:
    """Return the findings about each part of the machine that a job may need, such as torch, MPI and GPUs."""
    return (
        *_libraries(facts),
        *_mpi(facts),
        *_gpus(facts),
        *_cores(facts),
        *_memory(facts),
        *_shared_memory(facts),
        *_sockets(facts),
        *_hash_seed(facts),
        *_other_hosts(facts),
    )


def judge_hosts(hosts: Sequence[str], problems: str) -> Finding:
    """Return the finding whether a job can run on ``hosts``; ``problems`` has the reasons why not, or is empty."""
    if problems:
        return Finding("hosts", State.FAILS, problems)
    return Finding("hosts", State.OK, f"{fold_hosts(hosts)}: a job can run there")


def can_run(findings: tuple[Finding, ...]) -> bool:
    """Whether a job can run on this machine, because no finding is a failure."""
    return all(finding.state is not State.FAILS for finding in findings)


def render_findings(
    findings: tuple[Finding, ...], report_format: ReportFormat, *, width: int = 80, has_color: bool = False
) -> str:
    """Return ``findings`` as a table or JSON, with a line break; ``width`` and ``has_color`` form the table."""
    if report_format is ReportFormat.JSON:
        rows = [asdict(finding) for finding in findings]
        values = {"version": FORM_VERSION, "can_run": can_run(findings), "findings": rows}
        return json.dumps(values, indent=2) + "\n"
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        table.add_row(
            finding.subject, Text(finding.state, _STYLES[finding.state]), visible(finding.found, keeps="\n")
        )
        if finding.remedy:
            table.add_row("", "", Text(f"→ {finding.remedy}", "cyan"))
    verdict = "jobs can run on this machine" if can_run(findings) else "no job can run before that is mended"
    return terminal_text(table, "", verdict, width=width, has_color=has_color)


def _libraries(facts: InstallationFacts) -> Iterator[Finding]:
    yield Finding("Python", State.OK, f"{facts.python}, {facts.interpreter}")
    yield from _torch(facts.libraries, pip := f"{facts.interpreter} -m pip install")
    libraries = facts.libraries
    version = libraries.versions.get("popdist")
    if version != VERSION:
        problem = libraries.problems.get("popdist", "not found")
        found = f"{version}, but poprun is {VERSION}" if version else problem
        yield Finding("popdist", State.FAILS, found, f"{pip} poprun=={VERSION}")
        return
    yield Finding("popdist", State.OK, version)
    if libraries.has_extension:
        yield Finding("extension", State.OK, "popdist's, in C")
    else:
        yield Finding(
            "extension",
            State.ABSENT,
            "popdist has none, so small all-reduces take longer",
            "install a C compiler and Python's headers (Debian: apt install gcc libc6-dev python3-dev), then "
            f"{pip} --force-reinstall --no-cache-dir --no-deps poprun",
        )


def _torch(libraries: Libraries, pip: str) -> Iterator[Finding]:
    torch = libraries.versions.get("torch")
    if torch is None and "torch" not in libraries.problems:
        found = "none: programs of torch and popdist need it, others run without it"
        yield Finding("torch", State.ABSENT, found, f"{pip} 'poprun[torch]'")
        return
    if torch is None:
        yield Finding("torch", State.FAILS, libraries.problems["torch"], f"{pip} --force-reinstall torch")
        return
    if libraries.torch_folders[1:]:
        first, *others = libraries.torch_folders
        remedy = "uninstall all but one; PYTHONNOUSERSITE=1 leaves out those of your home"
        yield Finding("torch", State.WARNING, f"programs import {first}, and not {', '.join(others)}", remedy)
    if libraries.torch_trouble:
        found, _, remedy = libraries.torch_trouble.partition(": ")
        yield Finding("torch", State.FAILS, found, remedy)
    elif not libraries.has_gloo:
        yield Finding("torch", State.FAILS, f"{torch}, which lacks gloo", f"{pip} torch, as its project builds it")
    else:
        built = (f"for {TORCH_BUILDS[name]} {version}" for name, version in libraries.builds.items() if version)
        build = next(built, "for the CPU")
        if _is_untested(torch):
            newest = ".".join(map(str, NEWEST_TORCH))
            found = f"{torch}, {build}; poprun was tested with versions up to {newest}"
            yield Finding("torch", State.WARNING, found)
        else:
            yield Finding("torch", State.OK, f"{torch}, {build}")


def _is_untested(torch: str) -> bool:
    numbers = re.match(r"(\d+)\.(\d+)", torch)
    return numbers is not None and (int(numbers[1]), int(numbers[2])) > NEWEST_TORCH


def _mpi(facts: InstallationFacts) -> Iterator[Finding]:
    pip = f"{facts.interpreter} -m pip install"
    unknown = f"; of neither family: {', '.join(facts.machine.unknown_mpi)}" if facts.machine.unknown_mpi else ""
    if facts.machine.mpi is None:
        found = f"none, so jobs start without it, on this machine only{unknown}"
        yield Finding("MPI", State.ABSENT, found, f"{pip} 'poprun[mpich]'")
        return
    yield Finding("MPI", State.OK, f"{facts.machine.mpi}{unknown}")
    if problem := facts.libraries.problems.get("mpi4py"):
        yield Finding("mpi4py", State.WARNING, problem, f"{pip} --force-reinstall mpi4py")
    elif "mpi4py" not in facts.libraries.versions:
        yield Finding("mpi4py", State.ABSENT, "none: only programs that import it need it", f"{pip} mpi4py")


def _gpus(facts: InstallationFacts) -> Iterator[Finding]:
    gpus, num_visible = facts.machine.gpus, facts.libraries.num_devices
    for problem in facts.machine.gpu_problems:
        cause, _, remedy = problem.rpartition(": ")
        yield Finding("GPUs", State.WARNING, cause, remedy)
    if not gpus:
        if not facts.machine.gpu_problems:
            yield Finding("GPUs", State.ABSENT, "none: virtual IPUs are shares of the cores")
        return
    maker = MAKERS[facts.machine.maker]
    free = [gpu.name for gpu in gpus if gpu.is_free]
    kinds = ", ".join(sorted({gpu.model for gpu in gpus if gpu.model})) or maker.name
    state = f"{named('GPU', free)} {'is' if len(free) == 1 else 'are'} free" if free else "none is free"
    source = facts.machine.gpu_source
    found = f"{len(gpus)} ({kinds}){f', found by {source}' if source else ''}; {state}"
    # a process sees only one slice, even if the machine has several slices
    expected = 1 if any(maker.is_slice(gpu.name) for gpu in gpus) else len(gpus)
    if num_visible == expected or not {"torch"} & {*facts.libraries.versions, *facts.libraries.problems}:
        yield Finding("GPUs", State.OK, found)
    else:
        remedy = f"install a torch that is built for devices of {maker.name}, and for this machine's driver"
        yield Finding("GPUs", State.WARNING, f"{found}; torch sees {num_visible}", remedy)


def _cores(facts: InstallationFacts) -> Iterator[Finding]:
    cores, num_nodes, quota = facts.machine.cores, len(facts.machine.memory_nodes), facts.cpu_quota
    nodes = f", {num_nodes} NUMA nodes" if num_nodes > 1 else ""
    limit = "" if quota is None else f"; the control group grants the time of {quota:g}"
    yield Finding("cores", State.OK, f"{len(cores)} ({fold_numbers(cores)}){nodes}{limit}")


def _memory(facts: InstallationFacts) -> Iterator[Finding]:
    memory = facts.memory
    parts = [describe_bytes(memory.machine_bytes)] if memory.machine_bytes else []
    if memory.group_bytes is not None and memory.group_bytes < (memory.machine_bytes or memory.group_bytes + 1):
        parts.append(f"the control group grants {describe_bytes(memory.group_bytes)}")
    if memory.address_space_bytes is not None:
        parts.append(f"ulimit -v {describe_bytes(memory.address_space_bytes)} for each process")
    if parts:
        yield Finding("memory", State.OK, "; ".join(parts))


def _shared_memory(facts: InstallationFacts) -> Iterator[Finding]:
    free = facts.memory.shared_free_bytes
    if not facts.can_share_memory or free is None:
        remedy = "mount -t tmpfs tmpfs /dev/shm, or start the container with --shm-size 8g"
        yield Finding(_SHARED_MEMORY, State.FAILS, "it is not there, or cannot be written", remedy)
    elif free < MIN_SHARED_BYTES:
        found = f"{describe_bytes(free)} free, where data loaders leave their batches"
        remedy = "start the container with --shm-size 8g, or mount -o remount,size=8g /dev/shm"
        yield Finding(_SHARED_MEMORY, State.WARNING, found, remedy)
    else:
        yield Finding(_SHARED_MEMORY, State.OK, f"{describe_bytes(free)} free")


def _sockets(facts: InstallationFacts) -> Iterator[Finding]:
    if facts.loopback_problem:
        found, _, remedy = facts.loopback_problem.rpartition(": ")
        yield Finding("loopback", State.FAILS, found, remedy)
    if facts.tmpdir_problem:
        found, _, remedy = facts.tmpdir_problem.rpartition(": ")
        yield Finding("TMPDIR", State.WARNING, found, remedy)


def _hash_seed(facts: InstallationFacts) -> Iterator[Finding]:
    default = f"poprun sets {HASH_SEED}=0; with torchrun, mpiexec and srun, export {HASH_SEED}=0 yourself"
    found = f"{HASH_SEED}={facts.hash_seed}, as you have set it" if facts.hash_seed else default
    yield Finding("hash seed", State.OK, found)


def _other_hosts(facts: InstallationFacts) -> Iterator[Finding]:
    if facts.ssh:
        yield Finding("ssh", State.OK, facts.ssh)
    else:
        remedy = "install an ssh client (Debian: apt install openssh-client)"
        yield Finding("ssh", State.ABSENT, "none: no jobs on other hosts", remedy)
    if facts.slurm:
        job = f", inside job {facts.slurm_job}" if facts.slurm_job else ", outside of a job"
        yield Finding("Slurm", State.OK, f"{facts.slurm}{job}")
    else:
        yield Finding("Slurm", State.ABSENT, "none")
