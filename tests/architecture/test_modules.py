"""The form that every module keeps: its size, its name, and its hands off the environment."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePath

from tests.architecture.source_tree import ROOT, Module, modules, words

MOST_LINES_OF_A_MODULE = 500
MOST_LINES_OF_A_FUNCTION = 60
MOST_MODULES_OF_A_FOLDER = 15
MOST_LINES_OF_A_SCRIPT = 20

VAGUE_NAMES = words("utils util helpers common core manager misc")

MAKERS_OF_TENSORS = frozenset(
    f"torch.{name}" for name in words("tensor zeros ones empty full rand randn arange linspace empty_strided")
)

READERS = {
    "popdist": ("__init__.py", "context.py", "process_group/registration.py", "progress.py", "startup", "testing"),
    "poptorch": ("environment.py",),
    "poprun": (
        "cli",
        "vipu.py",
        "probe",
        "launch",
        "devices/lease",
        "devices/server",
        "hosts/remote_side.py",
        "process/spawn.py",
        "text/screen.py",
        "command.py",
        "start.py",
    ),
}
"""Where each package may read ``os.environ``: everybody else is handed what they need."""

PRIVATE = re.compile(r"_(?!_)\w*[a-z]\w*|__\w+(?<!__)")

PUBLIC_ALL_THE_SAME = words("_make _replace _fields _exit")
"""Private by their form only: Python documents them."""

OF_TORCHS_BACKENDS = words(
    "_allgather_base _allgather_base_ _get_backend _get_sequence_number_for_group _reduce_scatter_base"
    " _reduce_scatter_base_ _register_backend _set_default_backend _set_default_timeout"
    " _set_sequence_number_for_group"
)
"""The methods that torch has a backend have, and their operators."""

OF_THE_START = words(
    "_frozen_importlib_external _getframe _clear_internal_caches _clear_type_cache _default_pg_init_method"
)
"""What `popdist.startup` asks for, which runs in every Python of a job: guarded there."""

MOST_PRIVATE_NAMES = 20

_ENVIRONMENT = words("environ environb getenv getenvb putenv unsetenv")
_WRITING_METHODS = words("update setdefault pop popitem clear __setitem__ __delitem__")


def test_a_module_holds_one_idea() -> None:
    """A module that grows past the limit holds a second idea."""
    assert {module.name for module in modules() if _num_lines(module.path) > MOST_LINES_OF_A_MODULE} == set()


def _num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_a_folder_is_seen_at_one_look() -> None:
    """One with more modules than that holds a folder within."""
    counts = Counter(module.path.parent for module in modules() if module.path.name != "__init__.py")

    assert {str(folder) for folder, count in counts.items() if count > MOST_MODULES_OF_A_FOLDER} == set()


def test_a_function_is_seen_at_one_look() -> None:
    """One that does not fit on a screen does more than one thing."""
    long = {
        f"{module.name}.{node.name}"
        for module in modules()
        for node in module.functions
        if (node.end_lineno or 0) - node.lineno + 1 > MOST_LINES_OF_A_FUNCTION
    }

    assert long == set()


def test_a_script_only_says_what_to_run() -> None:
    """What needs more than that belongs to a program that is tested."""
    scripts = [*(ROOT / "scripts").iterdir(), *(ROOT / ".ci").iterdir()]

    assert scripts
    assert {path.name for path in scripts if _num_lines(path) > MOST_LINES_OF_A_SCRIPT} == set()


def test_a_name_says_what_is_inside() -> None:
    """No file and no folder has a name under which everything would fit."""
    folders = ("poprun_py", "popdist_py", "tests", "examples", "benchmarks")
    paths = [path.relative_to(ROOT) for folder in folders for path in (ROOT / folder).rglob("*.py")]

    assert {part for path in paths for part in path.with_suffix("").parts} & VAGUE_NAMES == set()


def test_every_module_says_why_it_is_there() -> None:
    """Each begins with a docstring."""
    assert {module.name for module in modules() if not ast.get_docstring(module.tree)} == set()


def test_the_environment_is_read_at_the_edges_only() -> None:
    """Everything between gets what it needs as an argument, and can be tested with a dictionary."""
    assert {module.name for module in modules() if _touches_environment(module) and not _may_read(module)} == set()


def _may_read(module: Module) -> bool:
    return any(PurePath(module.place).is_relative_to(reader) for reader in READERS[module.package])


def _touches_environment(module: Module) -> bool:
    used = {node.attr for node in module.nodes if isinstance(node, ast.Attribute)}
    imported = {
        alias.name
        for node in module.nodes
        if isinstance(node, ast.ImportFrom) and node.module == "os"
        for alias in node.names
    }
    return not _ENVIRONMENT.isdisjoint(used | imported)


def test_nothing_writes_the_environment() -> None:
    """A program finds its environment as its launcher made it, and a test cannot leak into the next one."""
    assert {module.name for module in modules() if any(_writes(node) for node in module.nodes)} == set()


def _writes(node: ast.AST) -> bool:
    match node:
        case ast.Subscript(value=target, ctx=ast.Store() | ast.Del()) | ast.AugAssign(target=target):
            return _is_environ(target)
        case ast.Attribute(value=value, attr=method) if method in _WRITING_METHODS:
            return _is_environ(value)
        case _:
            return isinstance(node, ast.Attribute) and node.attr in {"putenv", "unsetenv"}


def _is_environ(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "environ"


def test_no_tensor_takes_the_default_dtype() -> None:
    """A program may set another one with ``torch.set_default_dtype``, which is no choice of ours."""
    calls = {
        f"{module.name}:{node.lineno}"
        for module in modules()
        for node in module.nodes
        if isinstance(node, ast.Call) and ast.unparse(node.func) in MAKERS_OF_TENSORS
        if not any(keyword.arg == "dtype" for keyword in node.keywords)
    }

    assert calls == set()


def test_private_names_of_others_stand_in_one_module() -> None:
    """In `popdist.torch_private`, at most 20; its unit tests say what a torch without them does."""
    library = {module.name: module for module in modules("popdist", "poptorch")}
    ours = {name for module in library.values() for name in _given_names(module)} | {"_extension"}
    foreign = {name: _private_names(module) - ours - PUBLIC_ALL_THE_SAME for name, module in library.items()}
    inside = _private_names(library["popdist.torch_private"]) - words("_C _dynamo _distributed_c10d _utils")
    del foreign["popdist.torch_private"]
    allowed = {name: OF_THE_START for name in foreign if name.startswith("popdist.startup.")}
    found = {
        name: more for name, names in foreign.items() if (more := names - allowed.get(name, OF_TORCHS_BACKENDS))
    }

    assert found == {}
    assert MOST_PRIVATE_NAMES // 2 < len(inside | {"set_code_exec_strategy"}) <= MOST_PRIVATE_NAMES


def _given_names(module: Module) -> Iterator[str]:
    """Its own name, those of its functions, classes and variables, and of the attributes that it gives objects."""
    yield module.path.parent.name if module.path.stem == "__init__" else module.path.stem
    for node in module.nodes:
        match node:
            case (
                ast.FunctionDef(name=name)
                | ast.ClassDef(name=name)
                | ast.Name(id=name, ctx=ast.Store())
                | ast.Attribute(attr=name, ctx=ast.Store())
                | ast.Subscript(value=ast.Attribute(attr="__dict__"), slice=ast.Constant(value=str(name)))
            ):
                yield name


def _private_names(module: Module) -> set[str]:
    """Those that it reads of anything, also as text, and those that it imports."""
    found = set[str]()
    parts = {id(part) for node in module.nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in module.nodes:
        match node:
            case ast.Attribute(attr=name):
                found.add(name)
            case ast.Constant(value=str(name)) if id(node) not in parts:
                found.add(name)
            case ast.ImportFrom(module=path, names=names):
                found |= {*(path or "").split("."), *(alias.name for alias in names)}
            case ast.Import(names=names):
                found |= {part for alias in names for part in alias.name.split(".")}
    return {name for name in found if PRIVATE.fullmatch(name) and not name.startswith("_foreach_")}
