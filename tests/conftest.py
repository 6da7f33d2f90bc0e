"""What every test may use, and what every test must leave behind: nothing."""

import faulthandler
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

import hypothesis
import pytest
from measuring.control_group import ControlGroup, NoControlGroupError, control_group

from tests import leftovers
from tests.contract.forked_calls import ForkedWorlds
from tests.running import DEADLINE_SECONDS, MpiEnvironment, Poprun

_ROOT = Path(__file__).parent.parent

_OPEN_MPI_VARIABLE = "POPRUN_TEST_OPENMPI"
_FRAMEWORKS_VARIABLE = "POPRUN_TEST_FRAMEWORKS"

_CALLERS = (
    "OMP_NUM_THREADS",
    "PYTHONUNBUFFERED",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_CALLERS_PREFIXES = ("POPDIST_", "PMI_", "PMIX_", "OMPI_", "MPI_", "HYDRA_", "MPIEXEC_", "SLURM_")

_TEST_DEADLINE_SECONDS = 2 * DEADLINE_SECONDS

_environment = pytest.MonkeyPatch()

hypothesis.settings.register_profile("house", deadline=None)  # no test asserts how long something takes
hypothesis.settings.register_profile("ci", deadline=None, max_examples=30)
hypothesis.settings.register_profile("fast", deadline=None, max_examples=10)  # of scripts/test --fast
hypothesis.settings.load_profile("house")


def pytest_configure(config: pytest.Config) -> None:
    """Take from the caller's environment what would tell a program of another job; torch reads some on import.

    A shell starts what runs in its background with SIGINT ignored, nohup with SIGHUP, and the tests' programs
    would inherit that. And take care that no other run's files in shared memory are seen here.
    """
    leftovers.make_shared_memory_private()
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in list(os.environ):
        if name in _CALLERS or name.startswith(_CALLERS_PREFIXES):
            _environment.delenv(name)


def pytest_unconfigure() -> None:
    """Give the caller's environment back."""
    _environment.undo()


@pytest.fixture(autouse=True)
def _deadline() -> Iterator[None]:
    """A test that hangs fails with every thread's stack; one that hangs in C is ended by the config."""

    def fail(_signum: int, _frame: FrameType | None) -> None:
        faulthandler.dump_traceback(file=sys.__stderr__ or 2)
        pytest.fail(f"the test took longer than {_TEST_DEADLINE_SECONDS:g} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, _TEST_DEADLINE_SECONDS)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(autouse=True)
def _leaves_environment(_deadline: None) -> Iterator[None]:
    """A test leaves ``os.environ`` as it was."""
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    changed = {name for name in before | after if before.get(name) != after.get(name)}
    assert changed <= {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}  # torch sets it with the first optimizer


@pytest.fixture(autouse=True)
def _leaves_nothing(_leaves_environment: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test leaves no process, no thread and no file in shared memory."""
    token = uuid.uuid4().hex
    monkeypatch.setenv(leftovers.TOKEN_VARIABLE, token)
    children, threads, files = leftovers.living_children(), leftovers.threads(), leftovers.shared_memory_files()
    yield
    processes = leftovers.wait_until_none(
        lambda: {*leftovers.processes_of(token), *(leftovers.living_children() - children)}
    )
    described = [leftovers.describe(process) for process in processes]
    leftovers.kill(processes)
    assert described == []
    assert leftovers.wait_until_none(lambda: leftovers.threads() - threads) == []
    assert leftovers.abandoned_files(files) == []


@pytest.fixture(autouse=True)
def _leaves_job(_leaves_nothing: None) -> Iterator[None]:
    """The job that a test, or a model of it, has joined ends with it: the next one is to read its environment."""
    yield
    if "popdist.job.context" in sys.modules:
        sys.modules["popdist.job.context"].finalize()


@pytest.fixture
def limited_memory() -> Iterator[Callable[[int], ControlGroup]]:
    """Makes a control group in which commands have so many bytes of memory; skips where there is none."""
    with ExitStack() as groups:

        def make(limit_bytes: int) -> ControlGroup:
            try:
                return groups.enter_context(control_group(limit_bytes))
            except NoControlGroupError as why:
                pytest.skip(str(why))

        yield make


@pytest.fixture
def disk_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder that is not in memory, as ``tmp_path`` is in a secluded run; skips where there is none."""
    for place in (tmp_path, Path("/tmp"), _ROOT):
        kind = subprocess.check_output(["stat", "--file-system", "--format=%T", str(place)], text=True).strip()
        if kind not in ("tmpfs", "ramfs"):
            with tempfile.TemporaryDirectory(prefix="popdist-test-", dir=place) as folder:
                yield Path(folder)
            return
    pytest.skip("no folder here is on a disk")


@pytest.fixture(scope="session")
def framework_python() -> str:
    """The Python of the environment that has JAX, and nothing of ours."""
    python = Path(os.environ.get(_FRAMEWORKS_VARIABLE, _ROOT / ".venv-frameworks")).absolute() / "bin" / "python"
    if not python.exists():
        pytest.skip("there is no .venv-frameworks: scripts/environments makes it")
    return str(python)


@pytest.fixture
def poprun() -> Poprun:
    """The command as a user of this environment calls it."""
    return Poprun()


@pytest.fixture(scope="session")
def forking() -> Iterator["subprocess.Popen[bytes]"]:
    """The process that all instances of forked worlds are forked from."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.contract.forked_worlds"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=_ROOT,
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join(sys.path),
            "OMP_NUM_THREADS": "1",
            "ORT_INTRA_OP_NUM_THREADS": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # torch 2.6 starts a process for each as it is imported
        },
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(DEADLINE_SECONDS)
        finally:
            process.kill()


@pytest.fixture
def forked_world(forking: "subprocess.Popen[bytes]") -> ForkedWorlds:
    """Many small worlds, at the price of one import of torch."""
    return ForkedWorlds(forking)


@pytest.fixture(scope="session")
def mpi_environments() -> dict[str, MpiEnvironment]:
    """The environments that hold an MPI runtime, by the name of its extra; those that are absent are left out."""
    openmpi = Path(os.environ.get(_OPEN_MPI_VARIABLE, _ROOT / ".venv-openmpi")).absolute() / "bin" / "python"
    environments = (
        MpiEnvironment(name="mpich", python=Path(sys.executable)),
        MpiEnvironment(name="openmpi", python=openmpi),
    )
    return {found.name: found for found in environments if found.mpiexec.exists()}


@pytest.fixture(params=["mpich", "openmpi"])
def mpi(request: pytest.FixtureRequest, mpi_environments: dict[str, MpiEnvironment]) -> MpiEnvironment:
    """Each of the two MPI runtimes in turn."""
    return _environment_with(request.param, mpi_environments)


@pytest.fixture(params=["local", "mpich", "openmpi"])
def launcher(request: pytest.FixtureRequest, mpi_environments: dict[str, MpiEnvironment]) -> Poprun:
    """The command with each launcher in turn: none but ourselves, and the two MPI runtimes."""
    if request.param == "local":
        return Poprun(options=("--launcher", "local"), name="local")
    environment = _environment_with(request.param, mpi_environments)
    return Poprun(python=environment.python, options=("--launcher", "mpi"), name=environment.name)


def _environment_with(name: str, environments: dict[str, MpiEnvironment]) -> MpiEnvironment:
    if name not in environments:
        pytest.skip(f"no environment with the {name} wheel: scripts/test makes it")
    return environments[name]
