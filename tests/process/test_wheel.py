"""The distribution: what is built from a checkout runs where there is nothing else of it, not even torch."""

import importlib.metadata
import os
import shutil
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from popdist.ground.contract import VERSION
from tests.running import MpiEnvironment, run
from tests.wheels import faults

ROOT = Path(__file__).parent.parent.parent

NEEDED_BY_THE_LAUNCHER = ("click", "pyyaml", "psutil", "rich", "markdown-it-py", "mdurl", "pygments")
"""What `poprun` needs, and what that needs in turn; no torch, no numpy, no MPI."""

EXTENSION = "popdist/ground/extension/_extension.abi3.so"

LOAD = """
import sys
from importlib.machinery import ExtensionFileLoader
print(dir(ExtensionFileLoader(sys.argv[1], sys.argv[2]).load_module()))
"""

WITHOUT_TORCH = """
import sys
import popdist, popdist.popart
print(popdist.getNumInstances(), popdist.getInstanceIndex(), popdist.getReplicaIndexOffset(), end=" ")
print(popdist.getDeviceId(), popdist.isPopdistEnvSet(), popdist.popart.getDevice().numIpus)
told = set()
for wish in (
    "from popdist import ReplicatedModel", "import popdist.optim", "import popdist.checkpoint", "popdist.packing",
    "import popdist.parallel", "popdist.poptorch", "import popdist.poptorch", "popdist.init()", "popdist.device()",
    "popdist.synchronize()",
):
    try:
        exec(wish)
    except popdist.InstallationError as error:
        told.add(str(error))
print(*told)
for foreign in ("horovod.torch", "popart", "poptorch"):
    try:
        print("there is", __import__(foreign))
    except ModuleNotFoundError:
        pass
"""

REDUCE = "from mpi4py.MPI import COMM_WORLD as world; print(world.allreduce(1), world.size)"

WHERE = "import poprun, popdist; print(poprun.__file__); print(popdist.__file__)"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the two source distributions, and the wheels built from these."""
    directory = tmp_path_factory.mktemp("built")
    for project in (ROOT, ROOT / "poptorch_py"):
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(directory), str(project)]
        run(command).succeeded()
    return directory


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``bin`` of a fresh environment that holds the wheel, and links to the launcher's requirements."""
    environment = tmp_path_factory.mktemp("fresh")
    python = environment / "bin" / "python"
    run([sys.executable, "-m", "venv", "--without-pip", str(environment)]).succeeded()
    wheel = next(built.glob("poprun-*.whl"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    run([*pip, "install", "--no-deps", "--no-index", str(wheel)]).succeeded()
    _link_requirements(next(environment.glob("lib/python3*/site-packages")))
    return python.parent


def _link_requirements(site_packages: Path) -> None:
    for requirement in NEEDED_BY_THE_LAUNCHER:
        distribution = importlib.metadata.distribution(requirement)
        for top in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
            (site_packages / top).symlink_to(str(distribution.locate_file(top)))


def test_the_source_distribution_holds_what_its_tests_need(built: Path) -> None:
    """It is the whole repository, and no environment or build output that lies in the checkout."""
    with tarfile.open(next(built.glob("poprun-*.tar.gz"))) as archive:
        names = {Path(name).relative_to(f"poprun-{VERSION}").parts for name in archive.getnames()}

    assert {"tests", "examples", "benchmarks", "docs", "scripts", "LICENSE", "constraints.txt"} <= {
        parts[0] for parts in names
    }
    assert not [parts for parts in names if "__pycache__" in parts or parts[0].startswith(".venv")]


def test_the_wheel_holds_the_packages_and_nothing_else(built: Path) -> None:
    """The packages with their type marker, the licence, and where torch finds the backend: beside the metadata."""
    with zipfile.ZipFile(next(built.glob("poprun-*.whl"))) as archive:
        names = set(archive.namelist())
        entry_points = archive.read(f"poprun-{VERSION}.dist-info/entry_points.txt").decode()

    information = f"poprun-{VERSION}.dist-info"
    assert "[torch.backends]\npopdist = popdist_backend:register" in entry_points
    assert {f"{name}/py.typed" for name in ("poprun", "popsize", "popdist")} <= names
    assert f"{information}/licenses/LICENSE" in names


def test_poptorch_is_a_wheel_of_its_own(built: Path) -> None:
    """It has nothing else, is for every machine, and stands on the poprun of its own version, which names it."""
    with zipfile.ZipFile(next(built.glob("poprun_poptorch-*.whl"))) as archive:
        names = set(archive.namelist())
        metadata = archive.read(f"poprun_poptorch-{VERSION}.dist-info/METADATA").decode()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    assert {"poptorch/py.typed", f"poprun_poptorch-{VERSION}.dist-info/licenses/LICENSE"} <= names
    assert f"Requires-Dist: poprun[torch]=={VERSION}" in metadata
    assert project["optional-dependencies"]["poptorch"] == [f"poprun-poptorch=={VERSION}"]


def test_a_wheel_holds_nothing_else(built: Path) -> None:
    """What scripts/wheel finds in a wrong one: names that are not its own, tests, sources in C, a wrong tag."""
    wheels = [*built.glob("*.whl")]
    names = {wheel: zipfile.ZipFile(wheel).namelist() for wheel in wheels}

    assert [[*faults(wheel, names[wheel])] for wheel in wheels] == [[], []]
    wrong = ["poptorch/x.abi3.so", "poptorch/tests/x.py", "poptorch/x.c", "popart.py"]
    assert len([*faults(Path("poprun_poptorch-1-py3-none-any.whl"), wrong)]) == 4


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler that could make the extension")
def test_the_wheel_holds_the_extension_for_every_later_python(built: Path) -> None:
    """It is for machines like this one, and the extension in it can be imported."""
    wheel = next(built.glob("poprun-*.whl"))

    assert "-cp311-abi3-linux_" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(EXTENSION, built)
    shown = run([sys.executable, "-W", "ignore", "-c", LOAD, "_extension", str(built / EXTENSION)]).succeeded().out
    assert "'add_rows'" in shown
    assert "'square_sum'" in shown


def test_without_a_compiler_the_wheel_is_for_every_machine(tmp_path: Path) -> None:
    """And says that it goes without its extension."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(tmp_path), str(ROOT)]
    finished = run(command, env={"CC": "no-such-compiler"}).succeeded()

    assert f"popdist goes without {EXTENSION}" in finished.out + finished.err
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert EXTENSION not in zipfile.ZipFile(wheel).namelist()


def test_both_packages_come_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    """What is imported elsewhere is the installed copy, and it needs no torch."""
    finished = run([str(installed / "python"), "-c", WHERE], cwd=tmp_path).succeeded()

    assert [Path(line).is_relative_to(installed.parent) for line in finished.out.splitlines()] == [True, True]
    assert run([str(installed / "python"), "-c", "import torch"], cwd=tmp_path).code == 1


def test_the_installed_command_plans(installed: Path, tmp_path: Path) -> None:
    """``poprun --dry-run`` works where there is neither torch nor MPI."""
    words = ["--launcher", "local", "--num-instances", "2", "--num-replicas", "4", "--dry-run", "true"]
    finished = run([str(installed / "poprun"), *words], cwd=tmp_path).succeeded()

    assert finished.out
    assert run([str(installed / "poprun"), "--version"], cwd=tmp_path).out.split()[-1] == VERSION


@pytest.mark.parametrize("how", [("poprun",), ("python", "-m", "poprun")], ids=["script", "module"])
def test_the_installed_command_runs_a_job(installed: Path, tmp_path: Path, how: tuple[str, ...]) -> None:
    """The script and ``python -m poprun`` start a job, agents included."""
    command = [str(installed / how[0]), *how[1:], "-n", "2", "--launcher", "local", "echo", "Hello"]
    finished = run(command, cwd=tmp_path).succeeded()

    assert [line.endswith("Hello") for line in finished.lines] == [True, True]


@pytest.mark.parametrize(
    "command",
    [
        "poprun --doctor",
        "poprun-report --version",
        "poprun-size --model gpt2 --devices 8xH100 --global-batch 64",
        "poprun-top --version",
        "vipu list ipus",
    ],
)
def test_every_command_works_without_torch(installed: Path, tmp_path: Path, command: str) -> None:
    """None of them needs torch, numpy or mpi4py."""
    name, *words = command.split()
    run([str(installed / name), *words], cwd=tmp_path).succeeded()


def test_a_program_asks_popdist_without_torch(installed: Path, tmp_path: Path) -> None:
    """Its place in the job is told; what trains says what to install; no library of others is there unasked."""
    (tmp_path / "ask.py").write_text(WITHOUT_TORCH, encoding="utf-8")
    words = ["-n", "2", "--num-replicas", "4", "--launcher", "local", "--tag-output=no"]
    words += [str(installed / "python"), "ask.py"]
    finished = run([str(installed / "poprun"), *words], cwd=tmp_path).succeeded()

    told = "popdist trains with torch, which is not installed: pip install 'poprun[torch]'"
    assert finished.lines == ["2 0 0 0 True 2", "2 1 2 1 True 2", told, told]


@pytest.mark.parametrize("program", [["sh", "-c", "echo 2 2"], ["python", "-c", REDUCE]], ids=["shell", "mpi4py"])
def test_mpi_starts_programs_without_torch(
    installed: Path, mpi_environments: dict[str, MpiEnvironment], tmp_path: Path, program: list[str]
) -> None:
    """A program that uses no MPI, and one of an interpreter that has mpi4py, which poprun's own lacks."""
    if "mpich" not in mpi_environments:
        pytest.skip("there is no MPICH")
    mpich = mpi_environments["mpich"]
    words = ["-n", "2", "--launcher", "mpi", "--tag-output=no", *program]
    path = f"{mpich.python.parent}{os.pathsep}{os.environ['PATH']}"
    finished = run([str(installed / "poprun"), *words], cwd=tmp_path, env={"PATH": path}).succeeded()

    assert finished.lines == ["2 2"] * 2
