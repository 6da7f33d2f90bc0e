"""The form that every module keeps: its size, its name, and its hands off the environment."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import PurePath

from tests.architecture.source_tree import ROOT, Module, modules, names_read, words

MOST = {"lines of a module": 500, "lines of a function": 60, "modules of a folder": 15, "lines of a script": 20}
"""What is larger holds a second idea, does not fit on a screen, or belongs to a program that is tested."""

VAGUE_NAMES = words("utils util helpers common core manager misc")

MAKERS_OF_TENSORS = frozenset(
    f"torch.{name}" for name in words("tensor zeros ones empty full rand randn arange linspace empty_strided eye")
)

READERS = {
    "popdist": words(
        "__init__.py job/context.py exchange/process_group/registration.py ground/progress.py"
        " metrics/reported_numbers.py startup launching"
    ),
    "poptorch": words("environment.py"),
    "popsize": words(""),
    "poprun": words(
        "cli vipu.py hosts/probe launch devices/lease devices/server hosts/remote_side.py"
        " text/screen.py command.py start.py outcome.py size.py"
    ),
}
"""Where each package may read ``os.environ``: everybody else is handed what they need."""

_ENVIRONMENT = words("environ environb getenv getenvb putenv unsetenv")
_WRITING_METHODS = words("update setdefault pop popitem clear __setitem__ __delitem__")


def test_nothing_is_too_large_for_one_look() -> None:
    """A module holds one idea, a function does one thing, and a script only says what to run."""
    sizes = list(_sizes())

    assert {kind for kind, _, _ in sizes} == MOST.keys()
    assert {f"{size} {kind}: {name}" for kind, name, size in sizes if size > MOST[kind]} == set()


def _sizes() -> Iterator[tuple[str, str, int]]:
    """The kind, name and size of all whose size has a limit."""
    folders = Counter(str(module.path.parent) for module in modules() if module.path.name != "__init__.py")
    yield from (("modules of a folder", name, size) for name, size in folders.items())
    scripts = [*(ROOT / "scripts").iterdir(), *(ROOT / ".ci").iterdir()]
    for kind, paths in (("module", [module.path for module in modules()]), ("script", scripts)):
        for path in paths:
            yield f"lines of a {kind}", str(path), len(path.read_text(encoding="utf-8").splitlines())
    for module in modules():
        for it in module.functions:
            yield "lines of a function", f"{module.name}.{it.name}", (it.end_lineno or 0) - it.lineno + 1


def test_a_name_says_what_is_inside() -> None:
    """No file and no folder has a name under which everything would fit."""
    folders = ("poprun_py", "popdist_py", "poptorch_py", "tests", "examples", "benchmarks")
    paths = [path.relative_to(ROOT) for folder in folders for path in (ROOT / folder).rglob("*.py")]

    assert {part for path in paths for part in path.with_suffix("").parts} & VAGUE_NAMES == set()


def test_the_environment_is_read_at_the_edges_only() -> None:
    """Everything between gets what it needs as an argument, and can be tested with a dictionary."""
    readers = {module.name for module in modules() if _ENVIRONMENT & names_read(module)}

    assert {module.name for module in modules() if not _may_read(module)} & readers == set()


def _may_read(module: Module) -> bool:
    return any(PurePath(module.place).is_relative_to(reader) for reader in READERS[module.package])


def test_our_own_processes_import_nothing_from_the_working_directory() -> None:
    """A command of poprun's own Python begins with ``-P`` or ``-I``: another user may have put modules there."""
    commands = [
        [ast.unparse(word) for word in node.elts]
        for module in modules()
        for node in module.nodes
        if isinstance(node, ast.Tuple | ast.List) and ast.unparse(node).lstrip("([").startswith("sys.executable, ")
    ]

    assert len(commands) > 5
    assert [
        words for words in commands if {"'-m'", "'-c'"}.intersection(words) and words[1] not in ("'-P'", "'-I'")
    ] == []


def test_nothing_writes_the_environment() -> None:
    """A program finds its environment as its launcher made it, and a test cannot leak into the next one.

    But torch's worker server takes the path of its socket from there only: one call long, it stands there. And
    JAX's coordinator has the address at which it listens from there, once JAX has asked where processes connect.
    """
    assert {module.name for module in modules() if any(map(_writes, module.nodes))} == {
        "popdist.startup.jax_cluster",
        "popdist.startup.recorder_server",
    }


def _writes(node: ast.AST) -> bool:
    match node:
        case (
            ast.Subscript(value=ast.Attribute(attr="environ"), ctx=ast.Store() | ast.Del())
            | ast.AugAssign(target=ast.Attribute(attr="environ"))
            | ast.Attribute(attr="putenv" | "unsetenv")
        ):
            return True
        case ast.Attribute(value=ast.Attribute(attr="environ"), attr=method):
            return method in _WRITING_METHODS
    return False


def test_no_tensor_takes_the_default_dtype_or_device() -> None:
    """A program may set others with ``torch.set_default_dtype`` and its like, which is no choice of ours."""
    assert {
        f"{module.name}:{node.lineno}"
        for module in modules()
        for node in module.nodes
        if isinstance(node, ast.Call) and ast.unparse(node.func) in MAKERS_OF_TENSORS
        if not {"dtype", "device"} <= {keyword.arg for keyword in node.keywords}
    } == set()


def test_what_ci_leaves_out_exists() -> None:
    """Nothing is said of a test that pytest shall leave out and does not find."""
    lines = (ROOT / "tests" / "further.txt").read_text(encoding="utf-8").splitlines()
    found = [re.fullmatch(r"--deselect=(tests/\S+\.py)::(\w+)(\[.+\])?", line) for line in lines]

    assert all(found)
    for path, name, _ in (it.groups() for it in found if it):
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8")
