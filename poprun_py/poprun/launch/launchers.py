"""The launchers: commands that start shims, one per instance with MPI or srun, otherwise one for all.

Options tell an MPI runtime to bind no process to cores and to accept more processes than cores. They are from
MPICH's "Using the Hydra Process Manager", mpiexec.gforker's usage, mpirun(1) and prterun(1). Between hosts no
command line contains the value of a variable: the runtime passes the named variables on, and Slurm's tasks inherit
poprun's environment.
"""

import math
import os
import selectors
import signal
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from popdist.ground.contract import HYDRA_RANK, OMPI_RANK
from poprun.errors import LaunchError, describe_error
from poprun.launch.messages.control import abstract_address
from poprun.launch.process.process_tree import ProcessKey, descendants, has_reaped, reap, words_of
from poprun.launch.process.spawn import ProcessStart, start_process
from poprun.launch.shim import (
    CONTROL_ADDRESS,
    CONTROL_KEY_FILE,
    HOST_SHIM,
    INSTANCES,
    LISTENER,
    RANK_VARIABLE,
)
from poprun.plan.plan import LauncherKind, LaunchPlan
from poprun.plan.program_environment import HYDRA_SSH_OPTIONS
from poprun.plan.topology import MpiKind, MpiRuntime

if TYPE_CHECKING:
    from poprun.launch.routes import JobNetwork

_PACKAGE: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

SHIM_WORDS: Final = (sys.executable, "-I", "-S", os.path.join(_PACKAGE, "launch", "start_shim.py"))
"""The command line of the shim: an interpreter without site packages and sitecustomize, to start in a few ms."""

RANK_SHIM_WORDS: Final = (*SHIM_WORDS[:-1], os.path.join(_PACKAGE, "launch", "start_rank_shim.py"))
"""The command line of the rank shim, which an MPI runtime starts on this machine if a host shim forks agents."""

_ALL_SHIM_WORDS: Final = (SHIM_WORDS, RANK_SHIM_WORDS)

_SLURM_RANK: Final = "SLURM_PROCID"

SHIM_VARIABLES: Final = (CONTROL_ADDRESS, CONTROL_KEY_FILE, RANK_VARIABLE)
"""The variables that shims on other hosts need. A command line has the names; the MPI runtime sends the values."""

_LOOK_SECONDS: Final = 0.2
_READ_BYTES: Final = 64 * 1024
_KEPT_BYTES: Final = 16 * 1024
_JOB_PREFIXES: Final = ("PMI_", "PMIX_", "PRTE_", "OMPI_COMM_", "HYDI_", "MPI_LOCAL")
_SETTINGS_MARK: Final = "_MCA_"


class LaunchCommand(NamedTuple):
    """The argv, variables and death signal of one process that poprun starts, such as mpiexec or a shim."""

    words: tuple[str, ...]  # its argv
    environment: Mapping[str, str]  # variables added to its environment, among them the name of the rank variable
    death_signal: int  # the signal that it gets when poprun dies
    is_host_shim: bool = False  # whether rank shims connect to the process


def _hydra_words(plan: LaunchPlan, network: "JobNetwork | None") -> tuple[str, ...]:
    """Return the command-line options of poprun for MPICH's mpiexec (Hydra), such as the list of hosts."""
    fixed = ("-rmk", "user", "-bind-to", "none")
    if network is None:
        return ("-launcher", "fork", *fixed)
    return (
        *("-launcher", "ssh" if plan.remote.slurm_job is None else "slurm"),
        *(() if _is_ipv6(network.control_host) else ("-localhost", network.control_host)),
        *("-genvlist", ",".join(SHIM_VARIABLES)),
        *("-hosts", ",".join(_slots(plan))),
        *fixed,
    )


def _hydra_variables(plan: LaunchPlan) -> dict[str, str]:
    """Return Hydra's environment variable with options for ssh; {} in Slurm, where Hydra does not use ssh."""
    if plan.remote.slurm_job is not None:
        return {}
    from poprun.launch.routes import ssh_options

    return {HYDRA_SSH_OPTIONS: " ".join(ssh_options(plan.remote.ssh_config))}


def _prrte_words(plan: LaunchPlan, network: "JobNetwork | None") -> tuple[str, ...]:
    """Return the command-line options of poprun for Open MPI's mpirun (PRRTE), such as the list of hosts."""
    fixed = ("--bind-to", "none", "--map-by", ":OVERSUBSCRIBE", "--allow-run-as-root")
    if network is None:
        return fixed
    from poprun.launch.routes import ssh_options

    subnet = plan.remote.subnet
    return (
        *("--host", ",".join(_slots(plan))),
        *("--prtemca", "plm_ssh_agent", " ".join(("ssh", *ssh_options(plan.remote.ssh_config)))),
        *(("--prtemca", "prte_if_include", subnet) if subnet and not _is_ipv6(subnet) else ()),
        *(word for name in SHIM_VARIABLES for word in ("-x", name)),
        *fixed,
    )


def _is_ipv6(address: str) -> bool:
    """Whether ``address`` is an IPv6 address or network, which some options of MPI runtimes do not accept."""
    return ":" in address


def _slots(plan: LaunchPlan) -> Iterator[str]:
    """Return texts HOST:COUNT for MPI's option that lists the hosts: each host and its number of instances."""
    return (f"{host}:{plan.num_instances_per_host}" for host in plan.hosts)


def mpi_command(plan: LaunchPlan, runtime: MpiRuntime, network: "JobNetwork | None") -> LaunchCommand:
    """Return the mpiexec or mpirun command for the job ``plan``; it starts one process of poprun per instance."""
    is_mpich = runtime.kind is MpiKind.MPICH
    forker = runtime.forker if network is None else None
    if forker:
        launcher: tuple[str, ...] = (forker,)  # the forker binds no process, counts no cores, and opens no port
    else:
        launcher = (runtime.path, *(_hydra_words(plan, network) if is_mpich else _prrte_words(plan, network)))
    environment = {RANK_VARIABLE: HYDRA_RANK if is_mpich else OMPI_RANK}
    if is_mpich and network is not None:  # last, because Hydra 5 loses the last variable of its environment
        environment |= _hydra_variables(plan)
    return LaunchCommand(
        words=(
            *launcher,
            *plan.mpi_global_args,
            "-n" if is_mpich else "-np",
            str(plan.num_instances),
            *plan.mpi_local_args,
            *(RANK_SHIM_WORDS if has_host_shim(plan, network) else SHIM_WORDS),
        ),
        environment=environment,
        death_signal=signal.SIGKILL if forker else signal.SIGTERM,  # a forker waits for seconds after SIGTERM
    )


def launch_commands(plan: LaunchPlan, network: "JobNetwork | None" = None) -> tuple[LaunchCommand, ...]:
    """Return the commands of srun, MPI or poprun that start shims: small processes that fork programs' parents."""
    if plan.launcher is LauncherKind.SRUN:
        return (srun_command(plan),)
    instances = f"0-{plan.num_instances - 1}"
    runtime = plan.mpi if plan.launcher is LauncherKind.MPI else None
    own_shim = LaunchCommand(
        words=SHIM_WORDS,
        environment={RANK_VARIABLE: INSTANCES, INSTANCES: instances},
        death_signal=signal.SIGKILL,
        is_host_shim=runtime is not None,
    )
    if runtime is None:
        return (own_shim,)
    rank_shims = mpi_command(plan, runtime, network)
    return (own_shim, rank_shims) if has_host_shim(plan, network) else (rank_shims,)


def has_host_shim(plan: LaunchPlan, network: "JobNetwork | None") -> bool:
    """Whether one process of poprun, the host shim, forks the parents (agents) of all programs. Then the MPI
    runtime starts only small processes, rank shims, which send the host shim their environment.
    """
    # with the user's options a runtime may give shims other things, such as cores; other hosts have no host shim
    return network is None and not plan.mpi_global_args and not plan.mpi_local_args


def srun_command(plan: LaunchPlan) -> LaunchCommand:
    """Return the srun command of ``plan``. It starts shims: small processes that fork the programs' parents."""
    from poprun.launch.routes import srun_words

    step = srun_words(plan.remote.slurm_job, plan.hosts, plan.num_instances_per_host)
    return LaunchCommand(
        words=(*step, "--input=none", *SHIM_WORDS),
        environment={RANK_VARIABLE: _SLURM_RANK},
        death_signal=signal.SIGTERM,
    )


class StartWatch:
    """A watch at the start of a job that notices if a shim, a small process that forks the parent (agent) of a
    program, has ended before this agent has reported to poprun.
    """

    # A shim that ends early is not visible on the control socket, and Hydra waits for the shim forever.

    def __init__(self, now_seconds: float, runtime: MpiRuntime | None) -> None:
        self.runtime = runtime  # the MPI runtime that starts all shims on this machine; None: no watch
        self._has_reaped = False
        self._next_seconds = now_seconds + _LOOK_SECONDS
        self._shims: set[ProcessKey] = set()
        self._seen: set[int] = set()
        self._num_reported = 0
        self._idle_since_seconds = math.inf
        self.has_lost_one = False  # whether a shim or an agent ended before the agent had reported
        self.idle_seconds = 0.0  # time since when no living shim can still report

    def update(self, roots: Iterable[int], reported: set[int], now_seconds: float) -> None:
        """Update this watch: search the descendants of the processes ``roots``, which poprun started, for running
        shims (processes that fork agents). The agents of the shims ``reported`` (ids) have reported to poprun.
        """
        if len(reported) > self._num_reported:  # the runtime is working, even if it was slow with its first shim
            self._num_reported = len(reported)
            self._idle_since_seconds, self.idle_seconds = math.inf, 0.0
        if self.runtime is not None and now_seconds >= self._next_seconds:
            self._next_seconds = now_seconds + _LOOK_SECONDS
            # Only at the next look: an agent that saw the end of its shim first reports which shim ended.
            self.has_lost_one = self.has_lost_one or self._has_reaped
            self._has_reaped = any(has_reaped(root) and _is_mpich(root, self.runtime) for root in roots)
            below = {key for root in roots for key in descendants(root) if key.pid not in reported}
            # Reading a command line waits while the process maps memory, so each process is read only once.
            self._shims |= {key for key in below - self._shims if tuple(words_of(key.pid)) in _ALL_SHIM_WORDS}
            self.note_living({key.pid for key in below & self._shims}, reported, now_seconds)

    def note_living(self, living: set[int], reported: set[int], now_seconds: float) -> None:
        """Record that the shims ``living`` (small processes that fork agents) run at ``now_seconds``.

        ``reported`` has the shims whose agents have reported to poprun. Afterwards ``has_lost_one`` says whether
        a shim ended without a report, and ``idle_seconds`` for how long poprun has waited for no running shim.
        """
        self.has_lost_one = self.has_lost_one or bool(self._seen - living - reported)
        self._seen |= living
        self._idle_since_seconds = math.inf if living - reported else min(self._idle_since_seconds, now_seconds)
        self.idle_seconds = max(0.0, now_seconds - self._idle_since_seconds)


def _is_mpich(pid: int, runtime: MpiRuntime) -> bool:
    """Whether the process ``pid`` runs MPICH's mpiexec, and not, for example, a script that calls mpiexec."""
    try:
        return runtime.kind is MpiKind.MPICH and os.path.samefile(f"/proc/{pid}/exe", runtime.launcher)
    except OSError:  # the process has ended
        return False


class LauncherProcesses:
    """The processes that poprun itself has started, and the last lines of their output."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._running: set[int] = set()
        self.started: set[int] = set()  # the process ids of all started processes, also of ended processes
        self._output = b""
        self._was_signalled = False
        self.exit_code: int | None = None
        """Exit code of the first failed process, negative for a signal; 0 if none failed, None while all run."""

    def start(
        self,
        commands: Iterable[LaunchCommand],
        environ: Mapping[str, str],
        working_directory: str,
        open_files: int = 0,
    ) -> None:
        """Start all ``commands`` with the soft limit ``open_files`` of open files; 0 leaves poprun's own limit."""
        inherited = {name: value for name, value in environ.items() if not _is_of_another_job(name)}
        reader, writer = os.pipe()
        null = os.open(os.devnull, os.O_RDONLY)
        with _listen_to_rank_shims() as listener:  # closed here, so that no rank shim waits for a dead host shim
            inherited[HOST_SHIM] = listener.getsockname()[1:].decode()
            for command in commands:
                listening = {LISTENER: str(listener.fileno())} if command.is_host_shim else {}
                start = ProcessStart(
                    words=command.words,
                    working_directory=working_directory,
                    environment={**inherited, **command.environment, **listening},
                    streams=(null, writer, writer),
                    death_signal=command.death_signal,
                    kept=tuple(map(int, listening.values())),
                    open_files=open_files,
                )
                self._start(start)
        os.close(null)
        os.close(writer)
        self._selector.register(reader, selectors.EVENT_READ, lambda: self._read(reader))

    def _start(self, start: ProcessStart) -> None:
        try:
            pid = start_process(start)
            self._running.add(pid)
            self.started.add(pid)
        except OSError as error:
            self.end(signal.SIGKILL)
            while self._running:
                os.waitpid(self._running.pop(), 0)
            verb = "enter" if error.filename == start.working_directory else "run"
            raise LaunchError(f"cannot {verb} {error.filename}: {describe_error(error.errno or 0)}") from None

    @property
    def running(self) -> frozenset[int]:
        """The process ids of the processes that poprun started and that still run."""
        return frozenset(self._running)

    @property
    def has_ended(self) -> bool:
        """Whether all processes that poprun started have ended."""
        return not self._running

    @property
    def has_failed(self) -> bool:
        """Whether a process that poprun started has ended with a failure."""
        return bool(self.exit_code)

    @property
    def output(self) -> list[str]:
        """The last lines that the processes which poprun started have printed."""
        return self._output.decode(errors="replace").splitlines()

    def reap(self) -> bool:
        """Reap all ended children, also adopted ones; return whether a process ended that poprun had started."""
        num_running = len(self._running)
        for ended in reap():
            if ended.pid in self._running:
                self._running.remove(ended.pid)
                self.exit_code = self.exit_code or (0 if self._was_signalled else ended.code)
        return len(self._running) < num_running

    def end(self, signum: int) -> None:
        """End the processes that poprun started, by the signal ``signum``; a later exit code is no failure."""
        self.reap()
        self._was_signalled = True
        for pid in self._running:
            os.kill(pid, signum)

    def _read(self, reader: int) -> Iterator[tuple[int, dict[str, Any]]]:
        data = os.read(reader, _READ_BYTES)
        self._output = (self._output + data)[-_KEPT_BYTES:]
        if not data:
            self._selector.unregister(reader)
            os.close(reader)
        yield from ()


def _listen_to_rank_shims() -> socket.socket:
    """Return a listening socket, at which MPI's processes (rank shims) connect to a process that forks agents."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(abstract_address(f"poprun-shims-{os.getpid()}-{os.urandom(16).hex()}"))
    listener.listen(socket.SOMAXCONN)
    return listener


def _is_of_another_job(name: str) -> bool:
    """Whether the variable ``name`` belongs to an outer MPI job, which a new mpiexec would otherwise join."""
    return name.startswith(_JOB_PREFIXES) and _SETTINGS_MARK not in name
