"""Build both distributions, look into them, and use them where there is nothing else of this repository.

``scripts/wheel`` runs it. Each command is shown, and the first that fails ends it.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

from tests.docs.markdown import ROOT, blocks

PROJECTS = (ROOT, ROOT / "poptorch_py")
PACKAGES = {"poprun": {"poprun", "popsize", "popdist", "popdist_backend.py"}, "poprun_poptorch": {"poptorch"}}
"""What lies in each wheel beside its metadata."""

NEVER = re.compile(r"(^|/)(tests?|benchmarks|examples|__pycache__)/|\.(c|h|pyc)$")
"""What no wheel holds."""


def say(line: str) -> None:
    """Write a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def call(*command: object, cwd: Path | None = None) -> str:
    """Show a command, run it and return what it printed; end all with what it printed if it fails."""
    words = [*map(str, command)]
    say(f"$ {shlex.join(words)}")
    path = f"{Path(words[0]).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        words,
        cwd=cwd,
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\nexit code {done.returncode}: {shlex.join(words)}")
    return done.stdout


def build(out: Path) -> list[Path]:
    """Build all into an empty folder, check their metadata and return the two wheels, poprun's first."""
    shutil.rmtree(out, ignore_errors=True)
    for project in PROJECTS:
        call(sys.executable, "-m", "build", "--outdir", out, project)
    made = sorted(out.iterdir())
    call(sys.executable, "-m", "twine", "check", "--strict", *made)
    for path in made:
        say(f"{path.stat().st_size / 2**20:8.2f} MiB  {path.name}")
    return [path for path in made if path.suffix == ".whl"]


def faults(wheel: Path, names: list[str]) -> Iterator[str]:
    """Yield what is wrong with the files in a wheel, or with its name."""
    distribution, version = wheel.name.split("-")[:2]
    expected = PACKAGES[distribution] | {f"{distribution}-{version}.dist-info"}
    yield from (f"{name} is in it" for name in names if NEVER.search(name))
    yield from (f"{name} is in it" for name in {it.partition("/")[0] for it in names} - expected)
    is_compiled = any(name.endswith(".abi3.so") for name in names)
    if ("-abi3-" in wheel.name, wheel.name.endswith("-py3-none-any.whl")) != (is_compiled, not is_compiled):
        yield "its name does not say for which machines it is"


def interpreters() -> list[str]:
    """Return a Python of each version for which poprun says it is, as far as there is one that starts."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = (re.search(r"Python :: (3\.\d+)$", it) for it in project["classifiers"])
    versions = [match[1] for match in named if match]
    places = [*map(Path, os.environ["PATH"].split(os.pathsep)), *Path.home().glob(".pyenv/versions/*/bin")]
    found = ((version, place / f"python{version}") for version in versions for place in places)
    first: dict[str, str] = {}
    for version, python in found:
        if version not in first and python.exists() and _starts(python):
            first[version] = str(python)
    say(
        f"not here: Python {', '.join({*versions} - first.keys())}"
        if first.keys() < {*versions}
        else "every Python"
    )
    return [*first.values()]


def _starts(python: Path) -> bool:
    """Whether it runs, and can make environments: a shim of pyenv may stand for a version that is not there."""
    return not subprocess.run([python, "-c", "import ensurepip"], capture_output=True, check=False).returncode


def use(python: str, wheel: Path, place: Path) -> None:
    """Install poprun's wheel alone into an empty environment, and plan and run a job elsewhere."""
    folder = place / "alone"
    call(python, "-m", "venv", "--clear", folder)
    call(folder / "bin" / "python", "-m", "pip", "install", "--quiet", wheel)
    call(folder / "bin" / "python", "-m", "pip", "check")
    say(call(folder / "bin" / "poprun", "--version", cwd=place).strip())
    call(folder / "bin" / "poprun", "-n", "2", "--num-replicas", "4", "--dry-run", "echo", cwd=place)
    call(folder / "bin" / "poprun", "-n", "2", "--launcher", "local", "echo", "Hello", cwd=place)


def train(python: str, wheels: list[Path], place: Path) -> None:
    """Install both wheels with torch and MPICH, and train the README's model elsewhere."""
    (block,) = (it for it in blocks(ROOT / "README.md") if it.language == "diff")
    script = "\n".join(line[1:] for line in block.text.splitlines() if not line.startswith("-"))
    (place / "train.py").write_text(script, encoding="utf-8")
    folder, (poprun, poptorch) = place / "training", wheels
    call(python, "-m", "venv", "--clear", folder)
    pip = (folder / "bin" / "python", "-m", "pip")
    call(*pip, "install", "--quiet", "--constraint", ROOT / "constraints.txt", f"{poprun}[torch,mpich]", poptorch)
    call(*pip, "check")
    call(folder / "bin" / "poprun", "-n", "2", "--num-replicas", "4", "python", "train.py", cwd=place)
    call(folder / "bin" / "python", "-c", "import poptorch, popart", cwd=place)


def main() -> None:
    """Build, look, install, plan and run; train where that is asked for."""
    parser = argparse.ArgumentParser(prog="scripts/wheel", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--torch", action="store_true", help="train with them, too: pip fetches torch")
    given = parser.parse_args()
    wheels = build(given.out.absolute())
    wrong = [f"{it.name}: {fault}" for it in wheels for fault in faults(it, zipfile.ZipFile(it).namelist())]
    if wrong:
        sys.exit("\n".join(wrong))
    pythons = interpreters()
    with tempfile.TemporaryDirectory(prefix="poprun-wheel-") as place:
        for python in pythons:
            use(python, wheels[0], Path(place))
        uvx = Path(sys.executable).parent / "uvx"
        say(call(uvx, "--from", wheels[0], "poprun", "--version", cwd=Path(place)).strip())
        if given.torch:
            train(pythons[0], wheels, Path(place))


if __name__ == "__main__":
    main()
