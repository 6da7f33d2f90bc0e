"""The meaning of options for Open MPI's launcher, such as -x, whichever launcher starts the job. Pure.

poprun itself gives programs their variables, shows their output and chooses their network. So poprun reads `-x`,
`--tag-output`, `--output-filename`, `--allow-run-as-root` and `--mca btl_tcp_if_include SUBNET` itself. The other
options go to the launcher if it is Open MPI's. All options:
https://docs.open-mpi.org/en/v5.0.x/man-openmpi/man1/mpirun.1.html.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Final

from popdist.ground.values import dataclass
from poprun.errors import PlanError
from poprun.plan.request import LaunchRequest
from poprun.plan.topology import MpiKind, MpiRuntime

Variables = tuple[tuple[str, str | None], ...]  # names and values; None means the value in poprun's environment
_VARIABLE: Final = "x"
_OWN: Final = {_VARIABLE: 1, "tag-output": 0, "output-filename": 1, "allow-run-as-root": 0}
_OPEN_MPI_ONLY: Final = {
    **dict.fromkeys(("mca", "gmca", "omca", "pmca", "prtemca", "pmixmca", "gpmixmca"), 2),
    **dict.fromkeys(("output", "display", "rank-by", "xterm", "prefix", "runtime-options", "tune", "am"), 1),
    **dict.fromkeys(
        (
            *("oversubscribe", "nooversubscribe", "report-bindings", "timestamp-output", "merge-stderr-to-stdout"),
            *("display-map", "display-allocation", "bind-to-core", "bind-to-socket", "bind-to-none", "nolocal"),
        ),
        0,
    ),
}
"""Options that only Open MPI's launcher has, each with the number of values that follow the option."""

_INTERFACES: Final = ("btl_tcp_if_include", "oob_tcp_if_include")
"""Parameters of Open MPI whose value is the network, or the network interface, between hosts."""

_NAME: Final = r"[A-Za-z_][A-Za-z0-9_]*\*?"

_ASSIGNMENT: Final = r"[A-Za-z_][A-Za-z0-9_]*="
"""A pattern for the word NAME=value, before which the user has forgotten -x: a launcher would run NAME=value as
the program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MpiWords:
    """The meaning of the words that the user gave in one option for the MPI launcher."""

    variables: Variables  # variables of the programs, in the order of the words
    is_tagged: bool  # whether output lines get tags
    log_dir: str | None
    subnet: str | None  # the network between hosts, such as 10.1.0.0/16
    launcher_words: tuple[str, ...]  # all other words, for the launcher
    left_out: tuple[str, ...]  # words that only Open MPI's launcher could use, if the job has another launcher


def read_mpi_words(words: Sequence[str], option: str, kind: MpiKind | None) -> MpiWords:
    """Parse ``words``, the value of ``option`` for the MPI launcher. ``kind`` is None if the job has no MPI."""
    variables: list[tuple[str, str | None]] = []
    is_tagged, log_dir, subnet = False, None, None
    for_launcher: list[str] = []
    left_out: list[str] = []
    is_value = False
    for name, written in _split(words, option):
        is_assigned = not (name or is_value) and re.match(_ASSIGNMENT, written[0])
        is_value = not is_assigned and name not in _OWN
        if name == _VARIABLE or is_assigned:
            variables.append(_variable(written[-1], option))
        elif name == "tag-output":
            is_tagged = True
        elif name == "output-filename":
            log_dir = written[-1]
        elif name != "allow-run-as-root":
            network = _subnet(written)
            subnet = network or subnet
            if network and kind is not MpiKind.OPEN_MPI:
                continue
            is_lost = kind is None or (kind is not MpiKind.OPEN_MPI and name in _OPEN_MPI_ONLY)
            (left_out if is_lost else for_launcher).extend(written)
    return MpiWords(
        variables=tuple(variables),
        is_tagged=is_tagged,
        log_dir=log_dir,
        subnet=subnet,
        launcher_words=tuple(for_launcher),
        left_out=tuple(left_out),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobWords:
    """The facts in the user's options for the MPI launcher: variables of the programs, tags, and so on."""

    variables: Variables  # variables of all programs
    instance_variables: tuple[tuple[int, Variables], ...]  # variables of single instances
    is_tagged: bool
    log_dir: str | None
    subnet: str | None
    global_words: tuple[str, ...]  # for the launcher, before the process count
    local_words: tuple[str, ...]  # for the launcher, after the process count
    left_out: tuple[str, ...]  # words that the launcher of the job cannot use


def job_words(request: LaunchRequest, mpi: MpiRuntime | None) -> JobWords:
    """Parse all options for the MPI launcher that ``request`` contains. ``mpi`` is None in a job without MPI."""
    kind = mpi.kind if mpi else None
    for_job = read_mpi_words(request.mpi_global_args, "--mpi-global-args", kind)
    for_all = read_mpi_words(request.mpi_local_args, "--mpi-local-args", kind)
    own: dict[int, Variables] = {}
    left_out = [*for_job.left_out, *for_all.left_out]
    for index, words in request.instance_mpi_local_args:
        # words for the launcher are left out, because one launcher starts all instances
        for_one = read_mpi_words(words, f"--instance-mpi-local-args {index}", None)
        own[index] = merged(own.get(index, ()), for_one.variables)
        left_out.extend(for_one.left_out)
    return JobWords(
        variables=merged(for_job.variables, for_all.variables),
        instance_variables=tuple((index, variables) for index, variables in own.items() if variables),
        is_tagged=for_job.is_tagged or for_all.is_tagged,
        log_dir=for_all.log_dir or for_job.log_dir,
        subnet=for_all.subnet or for_job.subnet,
        global_words=for_job.launcher_words,
        local_words=for_all.launcher_words,
        left_out=tuple(left_out),
    )


def merged(variables: Variables, stronger: Variables) -> Variables:
    """Merge two lists of environment variables. A variable in both lists gets the value in ``stronger``."""
    return tuple(dict((*variables, *stronger)).items())


def check_instance_variables(pairs: Sequence[tuple[int, Variables]], num_instances: int) -> None:
    """Raise PlanError if ``pairs`` has variables for an instance that does not exist in the job."""
    for index, _ in pairs:
        if not 0 <= index < num_instances:
            raise PlanError(
                f"--instance-mpi-local-args {index}: there is no such instance; "
                f"--num-instances {num_instances} numbers them from 0 to {num_instances - 1}"
            )


def _split(words: Sequence[str], option: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the name of each option in ``words``, and the option with its values; other words have the name ""."""
    rest = list(reversed(words))
    while rest:
        word = rest.pop()
        name, equals, value = word.lstrip("-").partition("=")
        num_values = (_OWN | _OPEN_MPI_ONLY).get(name, 0) if word.startswith("-") else 0
        if word.startswith("-") and equals and num_values == 1:
            yield name, [word.partition("=")[0], value]
            continue
        if len(rest) < num_values:
            raise PlanError(f"{option}: {word} lacks its value")
        yield name if word.startswith("-") else "", [word, *(rest.pop() for _ in range(num_values))]


def _subnet(written: Sequence[str]) -> str | None:
    """Return the network to which ``--mca btl_tcp_if_include 10.1.0.0/16`` restricts MPI; None for other words."""
    if len(written) != len(("--mca", "name", "value")) or written[1] not in _INTERFACES:
        return None
    from ipaddress import ip_network

    try:
        return str(ip_network(written[2], strict=False)) if "/" in written[2] else None
    except ValueError:
        return None


def _variable(text: str, option: str) -> tuple[str, str | None]:
    name, equals, value = text.partition("=")
    if not re.fullmatch(_NAME, name):
        raise PlanError(f"{option}: -x {text!r} names no variable: write -x NAME or -x NAME=value")
    return name, value if equals else None
