"""What can go wrong with a job: one description for each fault, and what must come of it. Pure."""

import signal
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

POPRUNS: Final = frozenset({"local", "mpich", "hydra", "openmpi"})
"""poprun with each of its launchers, as the tests call them."""

WITH_MPI: Final = frozenset({"mpich", "hydra", "openmpi"})

PROMPT_SECONDS: Final = 1.0
"""From the failure to the end when the programs obey; beside the grace when they do not."""

GRACE_SECONDS: Final = 2.0
"""What each program is given between the request to end and its end by force."""

START_SECONDS: Final = 10.0
"""After which poprun gives up a start of which the MPI runtime says nothing."""

PATIENCE_SECONDS: Final = 10.0
"""How long the end of another launcher's job is waited for."""


class Moment(StrEnum):
    """When something is done to a job from outside."""

    READY = "ready"  # every instance has called ready()
    TOLD = "told"  # an instance has left the note "told"
    RANDOM = "random"  # any time in the job's first moments
    FIRST = "first"  # any time in the first 50 ms of the process that the user started


class Target(StrEnum):
    """Whom it is done to."""

    LAUNCHER = "launcher"  # the process that the user started
    TERMINAL = "terminal"  # its process group, as a terminal's Ctrl-C
    READER = "reader"  # whoever reads its output
    RUNTIME = "runtime"  # the MPI runtime's launcher under poprun
    PROXY = "proxy"  # Hydra's process between that and the shims
    SHIM = "shim"
    AGENT = "agent"
    ANY = "any"  # any descendant


ANYONE: Final = -1
"""Named where poprun may hear of the end of the MPI runtime, or of other shims, before that of the first."""

_PUBLIC: Final = frozenset({Moment.READY, Moment.TOLD})
_FOREIGN: Final = frozenset({Target.LAUNCHER, Target.TERMINAL, Target.READER})


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One act from outside.

    Attributes:
        when: Its moment.
        target: Whom it is done to.
        signum: The signal that is sent; 0 to a reader, who goes away.
    """

    when: Moment
    target: Target
    signum: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        name: In the words of the table.
        program: What each instance does (see `tests.process.endings`); the note "failed" is its failure's moment.
        codes: Exit codes of poprun that are right; empty: any but 0.
        named: The instance that the report has to name, None when it names none, or ``ANYONE``.
        steps: What is done from outside, in order; the last is the failure's moment when no program notes one.
        under: poprun's launchers under which it can happen.
        needs_mpi: Whether the program calls MPI.
        obeys: Whether every program ends when it is asked to.
        is_quick: Whether it belongs to the part that runs with every change.
        has_full_disk: Whether the disk of instance 1's log is full.
        scarce: What poprun has too few of, at random, as an option of ``ulimit``; empty: nothing.
    """

    name: str
    program: str
    codes: frozenset[int]
    named: int | None = None
    steps: tuple[Step, ...] = ()
    under: frozenset[str] = POPRUNS
    needs_mpi: bool = False
    obeys: bool = True
    is_quick: bool = True
    has_full_disk: bool = False
    scarce: str = ""

    @property
    def bound_seconds(self) -> float:
        """From the failure to the end, at most; where poprun has too few of something, from its start."""
        if self.scarce:
            return START_SECONDS + GRACE_SECONDS + PROMPT_SECONDS
        return PROMPT_SECONDS if self.obeys else GRACE_SECONDS + PROMPT_SECONDS

    @property
    def is_comparable(self) -> bool:
        """Whether it can happen under other launchers, too: what is hit is no part of poprun, nor of its start."""
        is_foreign = all(step.target in _FOREIGN and step.when in _PUBLIC for step in self.steps)
        return is_foreign and not self.has_full_disk and not self.scarce

    @property
    def kills_launcher(self) -> bool:
        """Whether the process that the user started is killed, so that nobody is left to tell an exit code."""
        return any(step.target is Target.LAUNCHER and step.signum == signal.SIGKILL for step in self.steps)


def _fails(name: str, text: str, *codes: int, named: int | None = 1, obeys: bool = True) -> Fault:
    """A fault of instance 1's own while the others work."""
    program = f"ready()\nif rank == 1:\n    note('failed')\n    {text}\nhang()"
    return Fault(name=name, program=program, codes=frozenset(codes), named=named, obeys=obeys)


def _ends_mpi(how: str, text: str, *codes: int, named: int | None = 1, is_quick: bool = False) -> Fault:
    """An end of instance 1's own after MPI_Init, while the others are far from MPI_Finalize."""
    program = f"from mpi4py import MPI\nready()\nif rank == 1:\n    note('failed')\n    {text}\nhang()"
    return Fault(
        name=f"{how} after MPI_Init",
        program=program,
        codes=frozenset(codes),
        named=named,
        needs_mpi=True,
        is_quick=is_quick,
    )


def _ends_mpi_well(name: str, text: str) -> Fault:
    """An end of instance 1's own that waits for the others, which end a little later."""
    program = f"from mpi4py import MPI\nready()\nif rank == 1:\n    {text}\ntime.sleep(0.2)\nnote('failed')"
    return Fault(name=name, program=program, codes=frozenset({0}), needs_mpi=True, is_quick=False)


def _lacks(name: str, scarce: str, *codes: int) -> Fault:
    """A job that may be too large for the machine; its programs may notice first."""
    return Fault(name=name, program="ready()", codes=frozenset(codes), named=ANYONE, scarce=scarce)


def _hit(
    name: str,
    target: Target,
    *codes: int,
    when: Moment = Moment.READY,
    under: frozenset[str] = POPRUNS,
    named: int | None = None,
) -> Fault:
    """A SIGKILL from outside."""
    step = Step(when=when, target=target, signum=signal.SIGKILL)
    return Fault(name=name, program=_ENDLESS, codes=frozenset(codes), named=named, steps=(step,), under=under)


def _asked(name: str, signum: int, *codes: int, target: Target, when: Moment = Moment.READY) -> Fault:
    """A request to end."""
    step = Step(when=when, target=target, signum=signum)
    return Fault(name=name, program=_ENDLESS, codes=frozenset(codes), steps=(step,))


_ENDLESS: Final = "ready()\nhang()"

_STUBBORN: Final = """
def tell(*_):
    note("told")
signal.signal(signal.SIGTERM, tell)
signal.signal(signal.SIGINT, tell)
ready()
"""

_INTERRUPT: Final = Step(when=Moment.READY, target=Target.TERMINAL, signum=signal.SIGINT)
_INTERRUPT_AGAIN: Final = Step(when=Moment.TOLD, target=Target.TERMINAL, signum=signal.SIGINT)

FAULTS: Final = (
    _fails("exits with 7", "sys.exit(7)", 7),
    _fails("raises an exception", "raise ValueError('bad batch')", 1),
    _fails("is killed (SIGKILL)", "os.kill(os.getpid(), signal.SIGKILL)", 137),
    _fails("crashes (SIGSEGV)", "os.kill(os.getpid(), signal.SIGSEGV)", 139),
    _fails(
        "runs out of memory",
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 28, 1 << 28)); bytearray(1 << 30)",
        1,
    ),
    _fails(
        "is killed, a child holds its output",
        "subprocess.Popen(['sleep', '600']); os.kill(os.getpid(), signal.SIGKILL)",
        137,
    ),
    _fails(
        "exits with 7, a daemon ignores SIGTERM",
        """subprocess.run(["setsid", "-f", "sh", "-c", "trap '' TERM; sleep 600; sleep 600"]); sys.exit(7)""",
        7,
        obeys=False,
    ),
    Fault(
        name="sys.exit(5) in a thread, which Python ignores",
        program="ready()\nthread = threading.Thread(target=sys.exit, args=(5,))\nthread.start()\nthread.join()\n"
        "note('failed')",
        codes=frozenset({0}),
    ),
    Fault(
        name="exits with 7 while another is stopped (SIGSTOP)",
        program="ready()\nif rank == 1:\n    wait_for('stopped', 1)\n    note('failed')\n    sys.exit(7)\n"
        "if rank == 0:\n    note('stopped')\n    os.kill(os.getpid(), signal.SIGSTOP)\nhang()",
        codes=frozenset({7}),
        named=1,
    ),
    Fault(
        name="exits with 7, the others ignore SIGTERM",
        program=_STUBBORN + "if rank == 1:\n    note('failed')\n    sys.exit(7)\nhang()",
        codes=frozenset({7}),
        named=1,
        obeys=False,
    ),
    Fault(
        name="exits with 7 while another starts slowly",
        program="if rank != 1: time.sleep(600)\nnote('failed')\nsys.exit(7)",
        codes=frozenset({7}),
        named=1,
    ),
    Fault(
        name="MPI_Abort(9)",
        program="from mpi4py import MPI\nready()\nif rank == 1:\n    note('failed')\n    MPI.COMM_WORLD.Abort(9)\n"
        "hang()",
        codes=frozenset({9}),
        named=1,
        under=WITH_MPI,
        needs_mpi=True,
    ),
    Fault(
        name="is killed while the others wait in a collective",
        program="from mpi4py import MPI\nready()\nif rank == 1:\n    note('failed')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\nMPI.COMM_WORLD.Barrier()",
        codes=frozenset({137}),
        named=1,
        under=WITH_MPI,
        needs_mpi=True,
    ),
    Fault(
        name="raises an exception after MPI_Init",
        program="from mpi4py import MPI\nready()\nif rank == 1:\n    note('failed')\n    raise ValueError\n"
        "MPI.COMM_WORLD.Barrier()",
        codes=frozenset({1}),
        named=1,
        under=WITH_MPI,
        needs_mpi=True,
    ),
    _ends_mpi("sys.exit(7)", "sys.exit(7)", 7, is_quick=True),
    _ends_mpi("sys.exit('text')", "sys.exit('bad batch')", 1),
    _ends_mpi("raise SystemExit(7)", "raise SystemExit(7)", 7),
    _ends_mpi("KeyboardInterrupt", "raise KeyboardInterrupt", 128 + signal.SIGINT),
    _ends_mpi("another BaseException", "raise GeneratorExit", 1),
    _ends_mpi(
        "sys.exit(7) beside a thread", "threading.Thread(target=time.sleep, args=(0.1,)).start(); sys.exit(7)", 7
    ),
    replace(
        _ends_mpi("sys.exit(256)", "sys.exit(256)", 1, 9, 70, 128 + signal.SIGKILL, named=ANYONE), under=WITH_MPI
    ),
    _ends_mpi_well("sys.exit(0) after MPI_Init, the others later", "sys.exit(0)"),
    _ends_mpi_well(
        "sys.exit(7) after MPI_Init that is caught", "with contextlib.suppress(SystemExit): sys.exit(7)"
    ),
    Fault(
        name="never calls MPI_Init, the others wait; Ctrl-C",
        program="import mpi4py\nmpi4py.rc.initialize = False\nfrom mpi4py import MPI\nnote('ready')\n"
        "if rank == 1:\n    hang()\nMPI.Init()",
        codes=frozenset({130}),
        steps=(_INTERRUPT,),
        under=WITH_MPI,
        needs_mpi=True,
        obeys=False,
    ),
    Fault(
        name="never joins a collective, the others wait; Ctrl-C",
        program="from mpi4py import MPI\nnote('ready')\nif rank == 1:\n    hang()\nMPI.COMM_WORLD.Barrier()",
        codes=frozenset({130}),
        steps=(_INTERRUPT,),
        under=WITH_MPI,
        needs_mpi=True,
        obeys=False,
    ),
    Fault(
        name="exits with 7, the disk of its log is full",
        program="ready()\nif rank == 1:\n    print('x' * 100_000)\n    note('failed')\n    sys.exit(7)\nhang()",
        codes=frozenset({7}),
        named=1,
        has_full_disk=True,
    ),
    _lacks("too few open files (ulimit -n)", "-n", 0, 70),
    _lacks("too few processes (ulimit -u)", "-u", 0, 1, 70),
    Fault(
        name="the output's reader goes away",
        program="ready()\nwhile True:\n    print('x' * 1000)\n    time.sleep(0.01)",
        codes=frozenset({141}),
        steps=(Step(when=Moment.READY, target=Target.READER),),
    ),
    _asked("Ctrl-C", signal.SIGINT, 130, target=Target.TERMINAL),
    _asked(
        "Ctrl-C while it starts", signal.SIGINT, 130, -signal.SIGINT, target=Target.TERMINAL, when=Moment.RANDOM
    ),
    _asked(
        "Ctrl-C in poprun's first 50 ms",
        signal.SIGINT,
        *(1, 128 + signal.SIGINT, -signal.SIGINT),
        target=Target.TERMINAL,
        when=Moment.FIRST,
    ),
    Fault(
        name="Ctrl-C twice, the programs ignore it",
        program=_STUBBORN + "hang()",
        codes=frozenset({130}),
        steps=(_INTERRUPT, _INTERRUPT_AGAIN),
        is_quick=False,
    ),
    Fault(
        name="Ctrl-C during the stop",
        program=_STUBBORN + "if rank == 1:\n    note('failed')\n    sys.exit(7)\nhang()",
        codes=frozenset({7}),
        named=1,
        steps=(_INTERRUPT_AGAIN,),
        obeys=False,
        is_quick=False,
    ),
    _asked("SIGTERM to the launcher", signal.SIGTERM, 143, target=Target.LAUNCHER),
    _hit("the launcher is killed", Target.LAUNCHER, -signal.SIGKILL),
    replace(
        _hit("the launcher is killed, its programs use MPI", Target.LAUNCHER, -signal.SIGKILL, under=WITH_MPI),
        program="from mpi4py import MPI\nready()\nhang()",
        needs_mpi=True,
    ),
    _hit("the launcher is killed while it starts", Target.LAUNCHER, -signal.SIGKILL, when=Moment.RANDOM),
    _hit("mpiexec is killed", Target.RUNTIME, 137, under=WITH_MPI),
    _hit("mpiexec is killed while it starts", Target.RUNTIME, 70, 137, when=Moment.RANDOM, under=WITH_MPI),
    _hit("mpiexec's proxy is killed", Target.PROXY, 137, under=frozenset({"hydra"}), named=ANYONE),
    _hit("a shim is killed", Target.SHIM, 137, under=frozenset({"local"}), named=ANYONE),
    _hit("a shim is killed, and mpiexec kills others", Target.SHIM, 137, under=frozenset({"mpich"}), named=ANYONE),
    _hit(
        "a shim is killed, and mpiexec notices",
        *(Target.SHIM, 9, 137),
        under=frozenset({"hydra", "openmpi"}),
        named=ANYONE,
    ),
    _hit("an agent is killed", Target.AGENT, 137, named=1),
    Fault(
        name="exits with 7, its agent is stopped (SIGSTOP)",
        program="note('ready')\nif rank == 1:\n    os.kill(os.getppid(), signal.SIGSTOP)\n    note('failed')\n"
        "    sys.exit(7)\nhang()",
        codes=frozenset({7}),
        named=1,
        under=frozenset({"local", "mpich"}),
        obeys=False,
    ),
    Fault(
        name="the launcher is killed, an agent is stopped (SIGSTOP)",
        program=_ENDLESS,
        codes=frozenset({-signal.SIGKILL}),
        under=frozenset({"local", "openmpi"}),
        steps=(
            Step(when=Moment.READY, target=Target.AGENT, signum=signal.SIGSTOP),
            Step(when=Moment.READY, target=Target.LAUNCHER, signum=signal.SIGKILL),
        ),
    ),
    replace(_hit("any process of a starting job is killed", Target.ANY, when=Moment.RANDOM), is_quick=False),
)
"""Every fault, in the order of the table."""
