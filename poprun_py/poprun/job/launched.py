"""The launcher of one attempt, which poprun starts before it loads the modules that supervise the attempt.

A shim needs 30 ms until its agent reports. Meanwhile poprun loads its supervisor.
"""

import selectors
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from poprun.hosts.job_network import forget_key
from poprun.job.agents import AgentLinks
from poprun.job.output.streams import ProgramStreams
from poprun.launch.launchers import LauncherProcesses, StartWatch, launch_commands
from poprun.launch.mpi_leftovers import remove_abandoned, remove_abandoned_sessions, session_parent
from poprun.launch.process.limits import kill_counts
from poprun.launch.process.process_tree import ProcessKey, end_descendants
from poprun.launch.shim import CONTROL_ADDRESS, CONTROL_KEY_FILE
from poprun.observe.account.job_identity import JobIdentity
from poprun.plan.plan import LauncherKind, LaunchPlan
from poprun.plan.program_environment import launcher_environment
from poprun.plan.topology import MpiKind

_TICK_SECONDS: Final = 0.05
_LAUNCHER_SECONDS: Final = 0.3  # time in which a launcher can end by itself
_DRAIN_SECONDS: Final = 5.0  # time for a slow reader of poprun's output to read the rest of the pipes


class LaunchedAttempt:
    """One start of a job: the processes that launch it, and the sockets and streams that its instances use.

    The owner of a launched attempt must end it: with :meth:`end_launcher`, then with :meth:`end_rest`.
    """

    def __init__(
        self, plan: LaunchPlan, variables: Mapping[str, str], identity: JobIdentity, verbosity: int
    ) -> None:
        self.plan = plan
        self.variables = variables
        self.identity = identity
        self.verbosity = verbosity
        self.began_at_epoch_seconds = time.time()
        self.began_at_seconds = time.monotonic()
        self.kills_before = kill_counts()
        has_runtime = plan.launcher is LauncherKind.MPI and identity.network is None
        self.start_watch = StartWatch(time.monotonic(), plan.mpi if has_runtime else None)
        self.selector = selectors.DefaultSelector()
        self.links = AgentLinks(plan.num_instances, self.selector, identity.network)
        self.launcher = LauncherProcesses(self.selector)
        self.streams = ProgramStreams(plan, variables, identity, shows_all=verbosity > 0)

    def start_launcher(self) -> None:
        """Start the launcher, such as mpiexec, which starts on each host the processes that run the program."""
        self._remove_sessions()
        network = self.identity.network
        control = {
            CONTROL_ADDRESS: self.links.address,
            CONTROL_KEY_FILE: "" if network is None else network.key.file,
        }
        self.launcher.start(
            launch_commands(self.plan, network),
            {**(self.variables if network is None else launcher_environment(self.variables)), **control},
            self.plan.working_directory,
            # On this machine the launcher needs poprun's limit; agents set the user's limit for programs.
            0 if network is None else self.identity.open_files,
        )

    def end_launcher(self, listen: Callable[[float], object]) -> None:
        """End the launcher, such as mpiexec; while waiting, call ``listen(seconds)``, which reads its output."""
        # An agent whose connection is closed ends its process tree, even if poprun itself has failed.
        self.links.close()
        if self.plan.mpi is None or not self.plan.mpi.forker:  # a forker may wait for seconds
            self._await_launcher(listen)
            self.launcher.end(signal.SIGTERM)
            self._await_launcher(listen)
        self.launcher.end(signal.SIGKILL)
        self._await_launcher(listen)

    def _await_launcher(self, listen: Callable[[float], object]) -> None:
        deadline = time.monotonic() + _LAUNCHER_SECONDS
        while not self.launcher.has_ended and time.monotonic() < deadline:
            listen(_TICK_SECONDS)
            self.launcher.reap()

    def end_rest(self) -> list[ProcessKey]:
        """End all remaining processes of the job and close its streams; return processes that survived SIGKILL."""
        network = self.identity.network
        survivors = end_descendants(() if network is None else network.lease_holders)
        remove_abandoned(time.monotonic() - self.began_at_seconds)
        self._remove_sessions()
        self.streams.finish(_DRAIN_SECONDS)
        self.selector.close()
        return survivors

    @contextmanager
    def ended_on_failure(self) -> Iterator[None]:
        """A context in which an exception ends all processes of the job and deletes its key on all hosts."""
        try:
            yield
        except BaseException:
            self.end_launcher(time.sleep)
            self.end_rest()
            forget_key(self.plan, self.identity.network)
            raise

    def _remove_sessions(self) -> None:
        """Remove folders of killed Open MPI launchers, at which a launcher with the same process id would fail."""
        if self.plan.mpi is not None and self.plan.mpi.kind is MpiKind.OPEN_MPI:
            remove_abandoned_sessions(session_parent(self.variables))


def launch(
    plan: LaunchPlan, variables: Mapping[str, str], identity: JobIdentity, verbosity: int
) -> LaunchedAttempt:
    """Start the launcher of a job, such as mpiexec; return the started job. On an error, delete the job's key."""
    try:
        if plan.trace.folder is not None:
            from poprun.observe.show.trace.collection import prepare_folder

            prepare_folder(plan, identity.job_id, identity.restart_count)
        launched = LaunchedAttempt(plan, variables, identity, verbosity)
    except BaseException:
        forget_key(plan, identity.network)
        raise
    with launched.ended_on_failure():
        launched.start_launcher()
    return launched
