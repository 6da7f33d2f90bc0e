"""Run poprun on one of the hosts, as a user who is logged in there does."""

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from tests.hosts.network import TMPDIR, Network
from tests.running import Finished, run

ROOT = Path(__file__).parents[2]
NO_VARIABLES: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPoprun:
    """poprun under one interpreter, with the MPI runtime that is beside it, on one of the hosts."""

    python: Path  # the interpreter that runs ``-m poprun``
    name: str  # what the runtime is called
    host: str = "n1"  # where it is called

    def words(
        self, network: Network, arguments: Sequence[str], cwd: Path = ROOT, env: Mapping[str, str] = NO_VARIABLES
    ) -> list[str]:
        """The argv of one call, from here."""
        path = f"{self.python.parent}{os.pathsep}{os.environ['PATH']}"
        settings = {"PATH": path, "TMPDIR": TMPDIR, "POPRUN_SSH_CONFIG": str(network.ssh_config), **env}
        told = [f"{name}={value}" for name, value in settings.items()]
        command = ["env", f"--chdir={cwd}", *told, str(self.python), "-m", "poprun", *arguments]
        return network.hosts[self.host].enter(command)

    def __call__(
        self,
        network: Network,
        *arguments: str,
        cwd: Path = ROOT,
        env: Mapping[str, str] | None = None,
        stdin: str = "",
    ) -> Finished:
        """Run a job to its end, with variables beside those of this process, and what it can read."""
        words = self.words(network, arguments, cwd, env or NO_VARIABLES)
        return run(words, stdin=stdin)

    @contextmanager
    def started(self, network: Network, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
        """A job that runs on when the block begins; it must have ended when the block ends."""
        words = self.words(network, arguments)
        with subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            try:
                yield process
            except BaseException:
                for host in network.hosts.values():
                    host.end()
                raise
