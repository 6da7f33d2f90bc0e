"""Problems that keep hosts out of a job: the cause and remedy of each problem, and one table of all. Pure."""

import glob
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from poprun.hosts.probe.mpi_runtimes import read_version
from poprun.launch.routes import HostRoute, Places
from poprun.plan.plan import LaunchPlan
from poprun.plan.topology import MpiKind, MpiRuntime
from poprun.text.ranges import fold_hosts, fold_numbers

HOST: Final = "{host}"  # replaced by the host's name in a remedy, so that hosts with the same problem share a row
_HEADINGS: Final = ("host", "cause", "remedy")

_SAME_EVERYWHERE: Final = ("torch", "numpy")  # packages whose versions change the results in the last bits
_SSH_FAILED: Final = 255
_NO_COMMAND: Final = (126, 127)

_FILES_OF_DAEMON: Final = 96  # open files that prted of Open MPI 5.0 needs, and in addition for each instance
_FILES_OF_INSTANCE: Final = 8

_SSH_CAUSES: Final = (
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED|host key .*has changed",
        "its host key is not the one that ssh knows",
        "set up anew? then ssh-keygen -R {host}; if not, ask who answers there",
    ),
    (
        r"Host key verification failed|No .* host key is known",
        "ssh does not know its host key",
        "compare and accept the key once: ssh {host} true",
    ),
    (r"Permission denied", "ssh refuses the login", "let this user in without a password: ssh-copy-id {host}"),
    (
        r"Could not resolve hostname|Name or service not known",
        "nobody knows this name",
        "check the spelling, or give the host in ~/.ssh/config or /etc/hosts",
    ),
    (r"Connection refused", "no sshd listens there", "start sshd on the host, or name its port in ~/.ssh/config"),
    (
        r"timed out|No route to host|Network is unreachable|Host is down",
        "it does not answer",
        "see that the host is up and lets ssh in: ssh {host} true",
    ),
    (
        r"Can't open user config file (.*)",
        r"ssh cannot read its configuration file: \1",
        "name one that is there: --ssh-config FILE, or POPRUN_SSH_CONFIG",
    ),
)


@dataclass(frozen=True, slots=True)
class Problem:
    """One reason why a host cannot take part in a job, and what the user can do."""

    host: str
    cause: str  # what was found on the host
    remedy: str  # what the user can do; ``HOST`` in the text is replaced by the host's name
    lacks_environment: bool = False  # whether a copy of poprun's environment may also help


def render_problems(problems: Sequence[Problem], num_hosts: int) -> str:
    """Return a table, as text, of all problems of hosts; hosts with the same problem share a row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for problem in problems:
        rows.setdefault((problem.cause, problem.remedy), []).append(problem.host)
    cells = [
        (fold_hosts(hosts), cause, remedy.replace(HOST, hosts[0] if len(hosts) == 1 else "HOST"))
        for (cause, remedy), hosts in rows.items()
    ]
    widths = [max(len(row[column]) for row in [_HEADINGS, *cells]) for column in range(2)]
    lines = [f"  {host:{widths[0]}}  {cause:{widths[1]}}  {remedy}" for host, cause, remedy in [_HEADINGS, *cells]]
    num_bad = len({problem.host for problem in problems})
    return "\n".join([f"{num_bad} of {num_hosts} hosts cannot take part:", *lines])


def program_files(program: Sequence[str]) -> list[str]:
    """Return the files that the command line ``program`` names: the executable, and the first Python file."""
    script = next((word for word in program[1:] if word.endswith(".py")), None)
    return [program[0], *([script] if script else [])]


def package_places(program: Sequence[str], own_packages: str) -> list[str]:
    """Return glob patterns of the folders of torch and numpy, whose versions must be equal on all hosts."""
    environment = os.path.dirname(os.path.dirname(program[0]))
    folders = (
        glob.escape(own_packages),
        os.path.join(glob.escape(environment), "lib", "python3*", "site-packages"),
    )
    return [os.path.join(folder, name) for folder in folders for name in _SAME_EVERYWHERE]


def problems_of(
    host: str, answer: Mapping[str, Any], plan: LaunchPlan, here: Mapping[str, Any], environment: str
) -> Iterator[Problem]:
    """Yield every problem of ``host`` that its ``answer`` shows, compared with ``here``, this machine's answer."""
    if answer["python"] != here["python"]:
        cause = f"{answer['python_file']} is Python {answer['python']} there, {here['python']} here"
        yield Problem(host, cause, "install the same Python on both")
    if answer["sources"] != here["sources"]:
        yield _other_popdist(host, answer, here, environment)
    yield from _package_problems(host, answer, here, environment)
    if plan.mpi is not None:
        yield from _mpi_problems(host, plan.mpi, answer)
        yield from limits_of_open_mpi(host, answer, plan)
    if not answer["has_directory"]:
        cause = f"there is no directory {plan.working_directory}"
        yield Problem(host, cause, "make it there, or start the job in one that every host has")
    for file, problem in answer["files"].items():
        if here["files"][file]:
            continue  # if the word is not a file on this machine, the host need not have such a file
        if problem == "missing":
            what = "the file of --parallelism" if file == plan.mapping_path else "the program"
            yield Problem(host, f"there is no {file}", f"copy {what} to it")
        if problem and problem != "missing":
            yield Problem(host, f"{file} is {problem}", "let this user read it: chmod a+r")


def limits_of_open_mpi(host: str, answer: Mapping[str, Any], plan: LaunchPlan) -> Iterator[Problem]:
    """Yield a problem for each limit of ``host``, even this machine, with which Open MPI's daemon would fail."""
    if plan.mpi is None or plan.mpi.kind is not MpiKind.OPEN_MPI:
        return
    if answer["temporary"]:
        cause = f"Open MPI cannot write to {answer['temporary']}"
        yield Problem(host, cause, "make room there, or set TMPDIR to another folder for logins on the host")
    needed = _FILES_OF_DAEMON + _FILES_OF_INSTANCE * plan.num_instances_per_host
    if 0 <= answer["open_files"] < needed:
        cause = f"a process may open {answer['open_files']} files, and Open MPI's daemon needs {needed}"
        yield Problem(host, cause, "raise `ulimit -n` for logins on the host: /etc/security/limits.conf")


def _package_problems(
    host: str, answer: Mapping[str, Any], own_answer: Mapping[str, Any], environment: str
) -> Iterator[Problem]:
    for folder, version in own_answer["packages"].items():
        other = answer["packages"].get(folder, version)  # a host without the package may not need the package
        if other != version:
            cause = f"{os.path.basename(folder)} is {other} there, {version} here, in {os.path.dirname(folder)}"
            yield Problem(host, cause, *_remedy_of_copy(folder, environment))


def _other_popdist(
    host: str, answer: Mapping[str, Any], own_answer: Mapping[str, Any], environment: str
) -> Problem:
    folder = next(
        folder for folder, digest in own_answer["sources"].items() if answer["sources"][folder] != digest
    )
    if not answer["sources"][folder]:
        cause = f"there is no {os.path.basename(folder)} in {folder}"
    elif answer["version"] and answer["version"] != own_answer["version"]:
        cause = f"poprun and popdist are {answer['version']} there, {own_answer['version']} here"
    else:
        cause = f"{os.path.basename(folder)} is not the same there as here, in {folder}"
    return Problem(host, cause, *_remedy_of_copy(folder, environment))


def _remedy_of_copy(folder: str, environment: str) -> tuple[str, bool]:
    """Return the remedy if ``folder`` differs on a host, and whether a copy of ``environment`` is a remedy."""
    is_copied = folder.startswith(os.path.join(environment, ""))
    return (
        f"install the same as here{', or have poprun do so: --synchronise-python-venv yes' * is_copied}",
        is_copied,
    )


def _mpi_problems(host: str, runtime: MpiRuntime, answer: Mapping[str, Any]) -> Iterator[Problem]:
    other_runtime = read_version(runtime.path, answer["mpi"])
    if ":" in host:
        cause = "the MPI launchers do not take an IPv6 address in place of a name"
        yield Problem(host, cause, "name it in /etc/hosts or ~/.ssh/config, and use that name")
    elif runtime.kind is MpiKind.MPICH and all(
        ":" in address or _is_loopback(address) for _, address in answer["addresses"]
    ):
        cause = "it has no IPv4 address, and MPICH's launcher knows no IPv6"
        yield Problem(host, cause, "give it one, or use Open MPI")
    if other_runtime is None:
        cause = f"there is no MPI at {runtime.path}"
        yield Problem(host, cause, f"install {runtime.name} there", lacks_environment=True)
    elif other_runtime.name != runtime.name:
        cause = f"{runtime.path} is {other_runtime.name} there, {runtime.name} here"
        yield Problem(host, cause, "install the same on both", lacks_environment=True)


def judge_slots(host: str, slots: Mapping[str, Any], plan: LaunchPlan) -> Iterator[Problem]:
    """Yield a problem if ``host`` lacks cores or a cache folder for the job, as its answer ``slots`` says."""
    if slots["cache"]:
        yield Problem(host, slots["cache"], "give another --executable-cache-path")
    missing = {core for binding in plan.bindings for core in binding.cores} - set(slots["cores"])
    if missing:
        there = fold_numbers(slots["cores"])
        cause = f"the job may use its cores {there}, not {fold_numbers(sorted(missing))}"
        yield Problem(host, cause, "place nothing there: --process-placement disabled; or leave the host out")


def name_problems(answers: Mapping[str, Mapping[str, Any]], hosts: Sequence[str]) -> Iterator[Problem]:
    """Yield a problem for each name in ``hosts`` that means different addresses on different hosts."""
    for name in hosts:
        # How a host resolves its own name does not matter: the result is often a loopback address.
        views = {
            host: found
            for host, answer in answers.items()
            if host != name
            and (found := {text for text in answer["names"].get(name, ()) if not _is_loopback(text)})
        }
        other, first = next(iter(views.items()), ("", set()))
        for host, found in views.items():
            if not found & first:
                cause = f"{name} is {min(found)} there and {min(first)} on {other}"
                yield Problem(host, cause, f"give {name} the same address in the /etc/hosts or DNS of both")


def judge_places(places: Mapping[str, Places], routes: Mapping[str, HostRoute]) -> Iterator[Problem]:
    """Yield a problem for each host name whose addresses show that another name means the same machine."""
    own = {host: {address for _, address in places[host]} for host in routes}
    owners: dict[str, str] = {}
    for host, route in routes.items():
        first = owners.get(route.address, host)
        if first != host and routes[first].address in own[host]:
            yield Problem(host, f"it is the same host as {first}", "name each host once in --host")
        for address in own[host]:
            owners.setdefault(address, host)


def judge_routes(
    route: HostRoute, targets: Mapping[str, tuple[str, int]], problems: Sequence[str]
) -> Iterator[Problem]:
    """Yield a problem for each of ``targets`` to which the host could not connect, with its error as the cause."""
    for (name, (address, _)), problem in zip(targets.items(), problems, strict=True):
        if problem:
            cause = f"it does not reach {name} from {route.address} at {address}: {problem}"
            remedy = "open the network between them to all ports, or choose another with --host-subnet"
            yield Problem(route.name, cause, remedy)


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def no_answer(host: str, code: int | None, words: str, python_file: str, *, in_slurm: bool = False) -> Problem:
    """Return the problem of a host that did not answer; ``code`` is ssh's exit code, or None after a timeout."""
    last_line = words.splitlines()[-1] if words else ""
    if in_slurm:
        ended = "no answer in time" if code is None else f"exit code {code}"
        cause = f"srun could not ask it: {last_line or ended}"
        remedy = f"see that this works: srun --overlap --nodelist={{host}} {python_file} --version"
        return Problem(host, cause, remedy)
    if code is None:
        return Problem(host, "it does not answer in time", "see that this is quick: ssh {host} true")
    if code in _NO_COMMAND and words.startswith("ssh:"):
        return Problem(host, "there is no ssh here", "install an ssh client on this machine")
    if code in _NO_COMMAND:
        cause = f"there is no Python at {python_file}"
        remedy = "make the same environment there, or have poprun do so: --synchronise-python-venv yes"
        return Problem(host, cause, remedy, lacks_environment=True)
    if code != _SSH_FAILED:
        cause = f"{python_file} ended there with exit code {code}{last_line and f': {last_line}'}"
        return Problem(host, cause, f"see that this works: ssh {{host}} {python_file} --version")
    for pattern, cause, remedy in _SSH_CAUSES:
        if match := re.search(pattern, words, re.IGNORECASE):
            return Problem(host, match.expand(cause), remedy)
    cause = f"ssh failed: {last_line or f'exit code {code}'}"
    return Problem(host, cause, "see that this works: ssh {host} true")
