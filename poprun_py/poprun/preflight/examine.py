"""Ask every host at once whether the job can run there, and find out how the hosts reach each other."""

import asyncio
import os
import socket
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final

from popdist import contract
from poprun.errors import HostsError
from poprun.hosts import fold_hosts
from poprun.plan import LaunchPlan
from poprun.preflight.addresses import Choice, choose_addresses
from poprun.preflight.conversation import Answer, Conversation, NoAnswerError, python_file
from poprun.preflight.environment_copy import copy_environment, environment_folder
from poprun.preflight.judgement import (
    Problem,
    judge,
    judge_slots,
    judge_together,
    no_answer,
    program_files,
    render_problems,
)
from poprun.routes import HostRoute, JobNetwork

_FACTS_SECONDS: Final = 9.0
_ROUTE_SECONDS: Final = 3.0
_SLOTS_SECONDS: Final = 3.0
_USUAL_SECONDS: Final = 0.4
"""How long this machine takes for its own answer when it has nothing else to do."""
_FOLDERS: Final = (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
    os.path.dirname(os.path.abspath(contract.__file__)),
)
_HERE: Final = "this machine"
_MOST_NAMES: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """What was found, when nothing is wrong.

    Attributes:
        network: How the hosts reach each other.
        reason: Why these addresses, for the user.
    """

    network: JobNetwork
    reason: str


def examine_hosts(plan: LaunchPlan, here: Collection[str], tell: Callable[[str], None]) -> Examination:
    """Look at every host of ``plan``, and bring the Python environment to those that lack it, if the plan says so.

    Args:
        plan: The job.
        here: The names among its hosts that mean this machine; at most one.
        tell: Tells the user of something that takes long.

    Raises:
        HostsError: If a host cannot take part; the message has a table with all of them, with cause and remedy.
    """
    return asyncio.run(_examine(plan, next(iter(here), _HERE), tell))


async def _examine(plan: LaunchPlan, here: str, tell: Callable[[str], None]) -> Examination:
    found, problems = await _Examiner(plan, here).examine()
    lacking = list(dict.fromkeys(problem.host for problem in problems if problem.lacks_environment))
    if lacking and plan.remote.synchronises_venv:
        folder = environment_folder()
        tell(f"copying {folder} to {fold_hosts(lacking)}")
        problems = await copy_environment(folder, lacking, plan.remote.ssh_config)
        if not problems:
            found, problems = await _Examiner(plan, here).examine()
    if found is None:
        order = {host: number for number, host in enumerate(plan.hosts)}
        ordered = sorted(problems, key=lambda problem: order.get(problem.host, -1))
        raise HostsError(render_problems(ordered, len(plan.hosts)))
    return found


class _Examiner:
    """One look at all hosts.

    Args:
        plan: The job.
        here: What this machine is called: one of the hosts' names, or none of them.
    """

    def __init__(self, plan: LaunchPlan, here: str) -> None:
        self._plan = plan
        self._here = here
        names = dict.fromkeys((here, *plan.hosts))
        self._lines = {name: Conversation(name, None if name == here else plan.remote) for name in names}
        self._problems: list[Problem] = []
        self._slowness = 1.0

    async def examine(self) -> tuple[Examination | None, list[Problem]]:
        """What was found when nothing is wrong, and what is."""
        try:
            answers = await self._ask_all()
            self._judge(answers)
            await self._ask_for_slots(answers)
            choice = self._choose(answers)
            self._problems += choice.problems
            if self._here in choice.routes:
                await self._try_routes(choice.routes)
        finally:
            await asyncio.gather(*(line.end() for line in self._lines.values()))
        if self._problems:
            return None, self._problems
        routes = tuple(choice.routes[host] for host in self._plan.hosts)
        network = JobNetwork(control_host=choice.routes[self._here].address, hosts=routes)
        return Examination(network=network, reason=choice.reason), []

    async def _ask_all(self) -> dict[str, Answer]:
        """The answer of every host that gives one in time."""
        question = self._question()
        tasks = {name: asyncio.create_task(self._ask(line, question)) for name, line in self._lines.items()}
        await self._wait(tasks.values(), _FACTS_SECONDS)
        answers = {}
        for name, task in tasks.items():
            if not task.done():
                task.cancel()
                self._problems.append(no_answer(name, None, "", python_file()))
            elif isinstance(error := task.exception(), NoAnswerError):
                self._problems.append(no_answer(name, error.code, error.words, python_file()))
            else:
                answers[name] = task.result()
        return answers

    async def _ask(self, line: Conversation, question: Answer) -> Answer:
        began_at_seconds = time.monotonic()
        await line.begin()
        answer = await line.ask(question)
        if line.host == self._here:
            self._slowness = max(1.0, (time.monotonic() - began_at_seconds) / _USUAL_SECONDS)
        return answer

    async def _wait(self, tasks: Collection["asyncio.Task[Answer]"], seconds: float) -> None:
        """Wait for hosts; longer on a machine that is so busy that its own answer took longer than usual."""
        _, pending = await asyncio.wait(tasks, timeout=seconds)
        if pending and self._slowness > 1:
            await asyncio.wait(pending, timeout=seconds * (self._slowness - 1))

    def _question(self) -> Answer:
        plan = self._plan
        return {
            "ask": "facts",
            "folders": list(_FOLDERS),
            "version_file": os.path.abspath(contract.__file__),
            "mpi": plan.mpi.path if plan.mpi else "",
            "working_directory": plan.working_directory,
            "files": [os.path.join(plan.working_directory, file) for file in program_files(plan.program)],
            "names": () if plan.remote.slurm_job else plan.hosts[:_MOST_NAMES],
        }

    def _judge(self, answers: Mapping[str, Answer]) -> None:
        here = answers.get(self._here)
        if here is None:
            return
        for name, answer in answers.items():
            if name in self._plan.hosts:
                self._problems += judge(name, answer, self._plan, here)
        self._problems += judge_together(answers, self._plan.hosts)

    async def _ask_for_slots(self, answers: Mapping[str, Answer]) -> None:
        """See that the hosts with nothing wrong have the virtual IPUs that the job uses."""
        bad = {problem.host for problem in self._problems}
        asked = [name for name in answers if name in self._plan.hosts and name not in bad]
        question = {"ask": "slots", "folders": list(_FOLDERS)}
        tasks = [asyncio.create_task(self._lines[name].ask(question)) for name in asked]
        if tasks:
            await self._wait(tasks, _SLOTS_SECONDS)
        for name, task in zip(asked, tasks, strict=True):
            if task.done() and not task.exception():
                self._problems += judge_slots(name, task.result(), self._plan)
            else:
                task.cancel()
                self._problems.append(no_answer(name, None, "", python_file()))

    def _choose(self, answers: Mapping[str, Answer]) -> Choice:
        """The addresses of the hosts that answered, and of this machine."""
        places = {
            name: [(place[0], place[1]) for place in answer["addresses"]] for name, answer in answers.items()
        }
        ways = {name: answer["ssh"] for name, answer in answers.items() if name != self._here and answer["ssh"]}
        reached = {name: way[2] for name, way in ways.items()}
        if ways:
            reached[self._here] = next(iter(ways.values()))[0]
        return choose_addresses(places, reached, self._plan.remote.subnet)

    async def _try_routes(self, routes: Mapping[str, HostRoute]) -> None:
        """See that every host reaches this machine from the address that it is to use."""
        host = routes[self._here].address
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=family, backlog=socket.SOMAXCONN) as listener:
            question = {"ask": "route", "host": host, "port": listener.getsockname()[1]}
            asked = [name for name in routes if name != self._here]
            tasks = [
                asyncio.create_task(self._lines[name].ask({**question, "from": routes[name].address}))
                for name in asked
            ]
            if tasks:
                await self._wait(tasks, _ROUTE_SECONDS)
            for name, task in zip(asked, tasks, strict=True):
                self._note_route(routes[name], host, task)

    def _note_route(self, route: HostRoute, host: str, task: "asyncio.Task[Answer]") -> None:
        if not task.done():
            task.cancel()
            problem = "timed out"
        else:
            problem = str(task.exception() or task.result()["problem"])
        if problem:
            self._problems.append(
                Problem(
                    host=route.name,
                    cause=f"it does not reach this machine from {route.address} at {host}: {problem}",
                    remedy="open the network between them to all ports, or choose another with --host-subnet",
                )
            )
