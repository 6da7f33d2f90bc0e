"""Calls of a function in small worlds, which a process that is started once forks: see `forked_worlds`."""

import io
import os
import pickle
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from popdist.ground.layout import Parallelism
from tests.contract.laws import laws_of, run_laws
from tests.running import DEADLINE_SECONDS

if TYPE_CHECKING:
    import subprocess


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call in a world of its own.

    Attributes:
        fn: What every instance calls; a function of a module that can be imported.
        arguments: Its arguments.
        num_instances: Forked processes.
        num_replicas: A multiple of that, where replicas are not shared.
        num_hosts: On how many hosts the instances are told to be, the same number on each.
        victim: The instance that ends by SIGKILL and has no result; None for none.
        timeout_seconds: How long all of it may take.
        environments: What each instance is told in place of a launcher's variables; None: those.
        parallelism: How the instances of a replica share it.
    """

    fn: Callable[..., object]
    arguments: tuple[object, ...]
    num_instances: int
    num_replicas: int
    num_hosts: int
    victim: int | None
    timeout_seconds: float
    environments: Sequence[Mapping[str, str]] | None = None
    parallelism: Parallelism = Parallelism()  # noqa: RUF009 - it is frozen


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of a call: what ``fn`` returned on each instance, or what went wrong, in words."""

    values: list[Any]
    problem: str = ""


class ForkedWorlds:
    """Calls functions as ``popdist.launch`` does, in worlds of :mod:`tests.contract.forked_worlds`."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process

    def __call__(  # noqa: PLR0913 - what a world can be
        self,
        fn: Callable[..., object],
        *arguments: object,
        num_instances: int,
        num_replicas: int | None = None,
        num_hosts: int = 1,
        tensor: int = 1,
        pipeline: int = 1,
        victim: int | None = None,
        timeout_seconds: float,
    ) -> list[Any]:
        """What ``fn`` returns on each instance, in their order; the test fails where one has no result.

        The ``victim`` must be killed, and None stands in its place.
        """
        return self._values(
            Call(
                fn=fn,
                arguments=arguments,
                num_instances=num_instances,
                num_replicas=num_replicas or num_instances // (tensor * pipeline),
                num_hosts=num_hosts,
                parallelism=Parallelism(instances_per_replica=tensor * pipeline, tensor=tensor, pipeline=pipeline),
                victim=victim,
                timeout_seconds=timeout_seconds,
            )
        )

    def keep_laws(self, module: ModuleType, *folder: Path, num_instances: int, **world: int) -> None:
        """Run the laws of ``module`` on every instance, each in a folder of its own where they take one."""
        arguments = module.__name__, *folder
        counts = self(run_laws, *arguments, num_instances=num_instances, timeout_seconds=DEADLINE_SECONDS, **world)
        assert counts == [len(laws_of(module))] * num_instances

    def in_environments(self, fn: Callable[..., object], environments: Sequence[Mapping[str, str]]) -> list[Any]:
        """What ``fn`` returns on instances that are told these variables in place of a launcher's."""
        return self._values(
            Call(
                fn=fn,
                arguments=(),
                num_instances=len(environments),
                num_replicas=len(environments),
                num_hosts=1,
                victim=None,
                timeout_seconds=DEADLINE_SECONDS,
                environments=environments,
            )
        )

    def script(
        self,
        script: Path,
        *words: str,
        num_instances: int | None = None,
        num_replicas: int | None = None,
        parallelism: Parallelism = Parallelism(),  # noqa: B008 - it is frozen
    ) -> list[list[str]]:
        """The lines that ``script`` prints in each instance; it runs in its own folder.

        With ``num_instances=None`` it runs as under plain ``python``: no launcher told it anything.
        """
        return self._values(
            Call(
                fn=run_script,
                arguments=(script, words),
                num_instances=num_instances or 1,
                num_replicas=num_replicas or (num_instances or 1) // parallelism.instances_per_replica,
                num_hosts=1,
                parallelism=parallelism,
                victim=None,
                timeout_seconds=DEADLINE_SECONDS,
                environments=None if num_instances else [{}],
            )
        )

    def _values(self, call: Call) -> list[Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            pickle.dump(call, self._process.stdin)
            self._process.stdin.flush()
            answer: Answer = pickle.load(self._process.stdout)  # noqa: S301 - from a process of ours
        except BaseException:
            self._process.kill()
            raise
        assert not answer.problem, answer.problem
        return answer.values


def run_script(script: Path, words: Sequence[str]) -> list[str]:
    """Run ``script`` in this process, in its own folder; the lines that it prints."""
    os.chdir(script.parent)
    sys.path.insert(0, str(script.parent))
    sys.argv = [str(script), *words]
    with redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(script), run_name="__main__")
    return printed.getvalue().splitlines()
