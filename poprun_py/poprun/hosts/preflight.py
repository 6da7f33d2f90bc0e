"""The check of every host before a job starts: whether the job can run there, and how hosts reach each other.

If the plan says so, a host that lacks poprun's virtual environment gets a copy at the same path. Programs get
addresses, because a name may mean different addresses on different hosts. All addresses have the same IP version,
because a connection has only one version.
"""

import asyncio
import ipaddress
import os
import socket
import sys
import sysconfig
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from popdist.ground import contract
from poprun.errors import HostsError
from poprun.hosts.problems import (
    Problem,
    judge_places,
    judge_routes,
    judge_slots,
    limits_of_open_mpi,
    name_problems,
    no_answer,
    package_places,
    problems_of,
    program_files,
    render_problems,
)
from poprun.hosts.questions import Answer, HostConnections
from poprun.launch.messages.proofs import new_key
from poprun.launch.routes import HostRoute, JobKey, JobNetwork, Places, ssh_options
from poprun.plan.plan import LaunchPlan
from poprun.text.ranges import fold_hosts

_SILENCE_SECONDS: Final = 60  # time without data after which rsync ends with an error
_MAX_COPIES: Final = 8  # number of hosts that receive a copy at the same time
_FACTS_SECONDS: Final = 9.0
_ROUTE_SECONDS: Final = 3.0
_SLOTS_SECONDS: Final = 3.0
_HOLD_SECONDS: Final = 3.0
_KEY_FILE: Final = "/dev/shm/poprun-key-{}"
_VERSION_FILE: Final = os.path.abspath(contract.__file__)
_FOLDERS: Final = (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
    os.path.dirname(os.path.dirname(_VERSION_FILE)),
)
_HERE: Final = "this machine"
_MOST_NAMES: Final = 256
_NO_SOCKET: Final = "UNKNOWN"  # sshd's word for an address if ssh uses a pipe, such as a ProxyCommand


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteChoice:
    """The network address chosen for each host, and a problem for each host without a usable address."""

    routes: Mapping[str, HostRoute]  # the routes of the hosts, without the hosts that have no route
    problems: tuple[Problem, ...]  # a problem for each host without a route
    reason: str  # the reason of the choice, for the user


def choose_addresses(places: Mapping[str, Places], reached: Mapping[str, str], subnet: str | None) -> RouteChoice:
    """Choose each host's address: an address in ``subnet`` if it is given, otherwise the address that ssh uses."""
    if subnet is not None:
        network = ipaddress.ip_network(subnet)
        candidates = {
            host: [place for place in own if ipaddress.ip_address(place[1]) in network]
            for host, own in places.items()
        }
        missing, reason = f"no address in --host-subnet {subnet}", f"--host-subnet {subnet}"
    else:
        version = _family(places, reached)
        candidates = {host: _usable(own, reached.get(host), version) for host, own in places.items()}
        missing, reason = f"no IPv{version} address", "the way that ssh takes" if reached else "the first address"
    remedy = "give --host-subnet a subnet that all hosts are in"
    return RouteChoice(
        routes={
            host: HostRoute(name=host, interface=own[0][0], address=own[0][1])
            for host, own in candidates.items()
            if own
        },
        problems=tuple(Problem(host, f"it has {missing}", remedy) for host, own in candidates.items() if not own),
        reason=reason,
    )


def _usable(own: Places, reached: str | None, version: int) -> list[tuple[str, str]]:
    """Return the addresses of IP ``version`` that a job can use on a host; those that ssh uses come first."""
    family = [place for place in own if ipaddress.ip_address(place[1]).version == version]
    interface = next((name for name, address in own if address == reached), None)
    outside = [place for place in family if place[1] == reached or not ipaddress.ip_address(place[1]).is_loopback]
    return sorted(outside, key=lambda place: (place[1] != reached, place[0] != interface))


def _family(places: Mapping[str, Places], reached: Mapping[str, str]) -> int:
    """Return the IP version that ssh used for all hosts; otherwise 4 if all hosts have IPv4, otherwise 6."""
    versions = {ipaddress.ip_address(address).version for address in reached.values()}
    if len(versions) == 1:
        return versions.pop()
    return 4 if all(_usable(own, None, 4) for own in places.values()) else 6


def examine_hosts(plan: LaunchPlan, here: Collection[str], tell: Callable[[str], None]) -> tuple[JobNetwork, str]:
    """Check all hosts; return the job's network, and how addresses were chosen. Raise HostsError on failure."""
    return asyncio.run(_examine(plan, next(iter(here), _HERE), tell))


async def _examine(plan: LaunchPlan, this_machine: str, log_line: Callable[[str], None]) -> tuple[JobNetwork, str]:
    result, problems = await _Examiner(plan, this_machine).examine()
    lacking = list(dict.fromkeys(problem.host for problem in problems if problem.lacks_environment))
    if lacking and plan.remote.synchronises_venv:
        folder = _environment_folder()
        log_line(f"copying {folder} to {fold_hosts(lacking)}")
        problems = await _copy_environment(folder, lacking, plan.remote.ssh_config)
        if not problems:
            result, problems = await _Examiner(plan, this_machine).examine()
    if result is None:
        order = {host: number for number, host in enumerate(plan.hosts)}
        ordered = sorted(problems, key=lambda problem: order.get(problem.host, -1))
        raise HostsError(render_problems(ordered, len(plan.hosts)))
    return result


def forget_key(plan: LaunchPlan, key: JobKey, here: Collection[str]) -> None:
    """Make each host delete the file with the job's key, because no instance was started that would delete it."""

    async def ask() -> None:
        this_machine = next(iter(here), _HERE)
        connections = HostConnections(dict.fromkeys((this_machine, *plan.hosts)), this_machine, plan.remote)
        async with aclosing(connections):
            await _forget(connections, plan, key, _FACTS_SECONDS)

    asyncio.run(ask())


async def _forget(connections: HostConnections, plan: LaunchPlan, key: JobKey, seconds: float) -> None:
    question: Answer = {"ask": "forget", "file": key.file}
    await connections.ask(dict.fromkeys(plan.hosts, question), seconds)


class _Examiner:
    """A check of all hosts of a job; ``here`` is the name of this machine, which may be one of the hosts."""

    def __init__(self, plan: LaunchPlan, here: str) -> None:
        self._plan = plan
        self._here = here
        self._connections = HostConnections(dict.fromkeys((here, *plan.hosts)), here, plan.remote)
        self._problems: list[Problem] = []

    async def examine(self) -> tuple[tuple[JobNetwork, str] | None, list[Problem]]:
        """Check all hosts. Return (network, how its addresses were chosen), or None, and all problems found."""
        async with aclosing(self._connections):
            answers = await self._ask_for_facts()
            self._record_problems(answers)
            await self._ask_for_slots(answers)
            choice = self._choose(answers)
            self._problems += choice.problems
            if self._here in choice.routes:
                await self._try_routes(choice.routes)
            key = JobKey(text=new_key(), file=_KEY_FILE.format(os.urandom(16).hex()))
            if not self._problems:
                await self._hand_over(key)
        if self._problems:
            return None, self._problems
        routes = tuple(choice.routes[host] for host in self._plan.hosts)
        network = JobNetwork(control_host=choice.routes[self._here].address, hosts=routes, key=key)
        return (network, choice.reason), []

    async def _ask(self, questions: Mapping[str, Answer], seconds: float) -> dict[str, Answer]:
        """Return the hosts' answers to ``questions``; a host that does not answer in time becomes a problem."""
        answers, failures = await self._connections.ask(questions, seconds)
        in_slurm = self._plan.remote.slurm_job is not None
        for name, error in failures.items():
            self._problems.append(no_answer(name, error.code, error.words, sys.executable, in_slurm=in_slurm))
        return answers

    async def _ask_for_facts(self) -> dict[str, Answer]:
        plan = self._plan
        files = [*program_files(plan.program), *([plan.mapping_path] if plan.mapping_path else [])]
        question = {
            "ask": "facts",
            "folders": list(_FOLDERS),
            "version_file": _VERSION_FILE,
            "packages": package_places(plan.program, sysconfig.get_path("purelib")),
            "mpi": plan.mpi.path if plan.mpi else "",
            "working_directory": plan.working_directory,
            "files": [os.path.join(plan.working_directory, file) for file in files],
            "names": () if plan.remote.slurm_job else plan.hosts[:_MOST_NAMES],
        }
        return await self._ask(dict.fromkeys((self._here, *plan.hosts), question), _FACTS_SECONDS)

    def _record_problems(self, answers: Mapping[str, Answer]) -> None:
        own_answer = answers.get(self._here)
        if own_answer is None:
            return
        for name, answer in answers.items():
            if name in self._plan.hosts:
                self._problems += problems_of(name, answer, self._plan, own_answer, sys.prefix)
        if self._here not in self._plan.hosts:
            self._problems += limits_of_open_mpi(self._here, own_answer, self._plan)
        self._problems += name_problems(answers, self._plan.hosts)

    async def _ask_for_slots(self, answers: Mapping[str, Answer]) -> None:
        """Check that all hosts without a problem have the cores, and the folder for caches, that the job needs."""
        bad = {problem.host for problem in self._problems}
        names = [name for name in answers if name in self._plan.hosts and name not in bad]
        question = {"ask": "slots", "folders": list(_FOLDERS), "cache": self._plan.cache_directory or ""}
        for name, slots in (await self._ask(dict.fromkeys(names, question), _SLOTS_SECONDS)).items():
            self._problems += judge_slots(name, slots, self._plan)

    async def _hand_over(self, key: JobKey) -> None:
        """Store the job's secret key on each host, as a launcher such as mpiexec might pass it on unencrypted."""
        question = {"ask": "hold", "file": key.file, "key": key.text}
        for name, answer in (await self._ask(dict.fromkeys(self._plan.hosts, question), _HOLD_SECONDS)).items():
            if answer["problem"]:
                cause = f"it cannot hold the job's key in {os.path.dirname(key.file)}: {answer['problem']}"
                self._problems.append(Problem(name, cause, "make room there, or mount it"))
        if self._problems:
            await _forget(self._connections, self._plan, key, _HOLD_SECONDS)

    def _choose(self, answers: Mapping[str, Answer]) -> RouteChoice:
        """Choose the network addresses of this machine and of all hosts that have answered."""
        places = {
            name: [(place[0], place[1]) for place in answer["addresses"]] for name, answer in answers.items()
        }
        in_slurm = self._plan.remote.slurm_job is not None  # Slurm's steps inherit ssh's variables from the login
        ways = {
            name: answer["ssh"]
            for name, answer in answers.items()
            if not in_slurm and name != self._here and answer["ssh"] and _NO_SOCKET not in answer["ssh"]
        }
        reached = {name: way[2] for name, way in ways.items()}
        if ways:
            reached[self._here] = next(iter(ways.values()))[0]
        choice = choose_addresses(places, reached, self._plan.remote.subnet)
        if not in_slurm:  # several nodes of Slurm may be on one machine
            routes = {host: choice.routes[host] for host in self._plan.hosts if host in choice.routes}
            self._problems += judge_places(places, routes)
        return choice

    async def _try_routes(self, routes: Mapping[str, HostRoute]) -> None:
        """Check that every host can connect, from its chosen address, to this machine and to instance 0's host."""
        # Agents connect to this machine, and instances to instance 0's host; this machine may be a host as well.
        first = self._plan.hosts[0]
        host = routes[self._here].address
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=family, backlog=socket.SOMAXCONN) as listener:
            targets = {_HERE: (host, listener.getsockname()[1])}
            if first in routes and first != self._here:
                question = {"ask": "listen", "host": routes[first].address}
                for answer in (await self._ask({first: question}, _ROUTE_SECONDS)).values():
                    targets[first] = (routes[first].address, answer["port"])
            questions = {
                name: {"ask": "route", "from": route.address, "targets": list(targets.values())}
                for name, route in routes.items()
                if name in self._plan.hosts
            }
            for name, answer in (await self._ask(questions, _ROUTE_SECONDS)).items():
                self._problems += judge_routes(routes[name], targets, answer["problems"])


def _environment_folder() -> str:
    """Return the folder of the virtual environment in which poprun runs. Raises HostsError if there is none."""
    if sys.prefix == sys.base_prefix:
        raise HostsError(
            f"--synchronise-python-venv: poprun runs under {sys.executable}, which is in no virtual environment "
            "that could be copied: install it in one (python -m venv), or install it on each host"
        )
    return os.path.abspath(sys.prefix)


async def _copy_environment(folder: str, hosts: Sequence[str], ssh_config: str | None) -> list[Problem]:
    """Copy ``folder`` to each of ``hosts`` with rsync over ssh; return a problem for each failed copy."""
    free_copies = asyncio.Semaphore(_MAX_COPIES)

    async def copy(host: str) -> Problem | None:
        async with free_copies:
            error = await _rsync(folder, host, ssh_config)
        if not error:
            return None
        remedy = "see that rsync is installed there and the folder may be written"
        return Problem(host, f"rsync could not copy {folder} to it: {error}", remedy)

    return [problem for problem in await asyncio.gather(*map(copy, hosts)) if problem is not None]


async def _rsync(folder: str, host: str, ssh_config: str | None) -> str:
    """Copy ``folder`` to the same path on ``host``; return rsync's error message, or an empty text on success."""
    ssh = " ".join(("ssh", *ssh_options(ssh_config)))
    options = ("--archive", "--delete", "--mkpath", f"--timeout={_SILENCE_SECONDS}", f"--rsh={ssh}")
    target = f"[{host}]" if ":" in host else host
    command = ("rsync", *options, "--", f"{folder}/", f"{target}:{folder}/")
    try:
        process = await asyncio.create_subprocess_exec(*command, stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE)
    except FileNotFoundError:
        raise HostsError(
            f"--synchronise-python-venv: there is no rsync here to copy {folder} to {host}: install it"
        ) from None
    _, complaint = await process.communicate()
    if process.returncode == 0:
        return ""
    return (complaint.decode(errors="replace").strip() or f"exit code {process.returncode}").splitlines()[0]
