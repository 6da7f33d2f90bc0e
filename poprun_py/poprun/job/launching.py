"""The launch of an attempt: its control socket is opened, and its launcher started.

That comes first, and with little of poprun: the rest of it is loaded while shims and agents come to life.
"""

import selectors
import time
from collections.abc import Mapping

from poprun.job.agents import AgentLinks
from poprun.job.identity import JobIdentity
from poprun.job.output.streams import ProgramStreams
from poprun.launch.launchers import LauncherProcesses, launch_commands
from poprun.launch.mpi_leftovers import remove_abandoned_sessions, session_parent
from poprun.launch.shim import CONTROL_ADDRESS, CONTROL_KEY_FILE
from poprun.plan.plan import LaunchPlan
from poprun.plan.topology import MpiKind
from poprun.text.screen import say


class Launch:
    """What an attempt of a job begins with.

    Args:
        plan: The job.
        environ: The environment that poprun was called in.
        identity: Which job this is, and which attempt of it.

    Attributes:
        plan: As above.
        environment: That which poprun was called in.
        identity: As above.
        began_at_seconds: Monotonic time at which the attempt began.
        began_at_epoch_seconds: The same in seconds since 1970.
        selector: Calls back when an agent or the launcher says something.
        links: The links to the agents.
        launcher: The processes of the launcher.
        streams: The streams that the programs will have.

    Raises:
        PlanError: If there are to be logs and they cannot be made.
        LaunchError: If poprun may not open as many files.
    """

    def __init__(self, plan: LaunchPlan, environ: Mapping[str, str], identity: JobIdentity) -> None:
        self.plan = plan
        self.environment = environ
        self.identity = identity
        self.began_at_seconds = time.monotonic()
        self.began_at_epoch_seconds = time.time()
        self.selector = selectors.DefaultSelector()
        self.links = AgentLinks(plan.num_instances, self.selector, say, identity.network)
        self.launcher = LauncherProcesses(self.selector)
        self.streams = ProgramStreams(plan, environ, identity)

    def start(self) -> None:
        """Start the launcher.

        Raises:
            LaunchError: If it cannot be executed.
        """
        self.remove_sessions()
        network = self.identity.network
        control = {
            CONTROL_ADDRESS: self.links.address,
            CONTROL_KEY_FILE: "" if network is None else network.key.file,
        }
        self.launcher.start(
            launch_commands(self.plan, network),
            {**self.identity.launcher_environment(self.environment), **control},
            self.plan.working_directory,
            self.identity.open_files_of_launcher,
        )

    def remove_sessions(self) -> None:
        """Remove what killed launchers of Open MPI have left, which would stop one with the same process id."""
        if self.plan.mpi is not None and self.plan.mpi.kind is MpiKind.OPEN_MPI:
            remove_abandoned_sessions(session_parent(self.environment))
