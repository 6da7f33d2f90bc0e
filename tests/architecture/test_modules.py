"""The form that every module keeps: its size, its name, and its hands off the environment."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import PurePath

from tests.architecture.source_tree import ROOT, Module, all_modules, modules

MOST_LINES_OF_A_MODULE = 500
MOST_LINES_OF_A_FUNCTION = 60
MOST_MODULES_OF_A_FOLDER = 15
MOST_LINES_OF_A_SCRIPT = 20

VAGUE_NAMES = frozenset({"utils", "util", "helpers", "common", "core", "manager", "misc"})

MAKERS_OF_TENSORS = frozenset(
    f"torch.{name}"
    for name in (
        "tensor",
        "zeros",
        "ones",
        "empty",
        "full",
        "rand",
        "randn",
        "arange",
        "linspace",
        "empty_strided",
    )
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

PUBLIC_ALL_THE_SAME = frozenset({"_make", "_replace", "_fields", "_exit"})
"""Private by their form only: Python documents them."""

OF_TORCHS_BACKENDS = frozenset(
    {
        "_allgather_base",
        "_allgather_base_",
        "_get_backend",
        "_get_sequence_number_for_group",
        "_reduce_scatter_base",
        "_reduce_scatter_base_",
        "_register_backend",
        "_set_default_backend",
        "_set_default_timeout",
        "_set_sequence_number_for_group",
    }
)
"""The methods that torch has a backend have, and their operators."""

OF_THE_START = frozenset(
    {
        "_frozen_importlib_external",
        "_getframe",
        "_clear_internal_caches",
        "_clear_type_cache",
        "_default_pg_init_method",
    }
)
"""What `popdist.startup` asks for, which runs in every Python of a job: guarded there."""

MOST_PRIVATE_NAMES = 20

_WRITING_METHODS = frozenset({"update", "setdefault", "pop", "popitem", "clear", "__setitem__", "__delitem__"})
_ENVIRONMENT_CALLS = frozenset({"getenv", "getenvb", "putenv", "unsetenv", "environb"})


def test_a_module_holds_one_idea() -> None:
    """A module that grows past the limit holds a second idea."""
    long = {module.name for module in all_modules() if len(_lines(module)) > MOST_LINES_OF_A_MODULE}

    assert long == set()


def _lines(module: Module) -> list[str]:
    return module.path.read_text(encoding="utf-8").splitlines()


def test_a_folder_is_seen_at_one_look() -> None:
    """One with more modules than that holds a folder within."""
    counts = Counter(module.path.parent for module in all_modules() if module.path.name != "__init__.py")

    assert {str(folder) for folder, count in counts.items() if count > MOST_MODULES_OF_A_FOLDER} == set()


def test_a_function_is_seen_at_one_look() -> None:
    """So does a function that does not fit on a screen."""
    long = {
        f"{module.name}.{node.name}"
        for module in all_modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno + 1 > MOST_LINES_OF_A_FUNCTION
    }

    assert long == set()


def test_a_script_only_says_what_to_run() -> None:
    """What needs more than that belongs to a program that is tested."""
    scripts = [*(ROOT / "scripts").iterdir(), *(ROOT / ".ci").iterdir()]
    long = {
        path.name
        for path in scripts
        if len(path.read_text(encoding="utf-8").splitlines()) > MOST_LINES_OF_A_SCRIPT
    }

    assert scripts
    assert long == set()


def test_a_name_says_what_is_inside() -> None:
    """No file and no folder has a name under which everything would fit."""
    folders = (ROOT / "poprun_py", ROOT / "popdist_py", ROOT / "tests", ROOT / "examples", ROOT / "benchmarks")
    parts = {part for folder in folders for path in folder.rglob("*.py") for part in _own_parts(path)}

    assert parts & VAGUE_NAMES == set()


def _own_parts(path: PurePath) -> tuple[str, ...]:
    return path.relative_to(ROOT).with_suffix("").parts


def test_every_module_says_why_it_is_there() -> None:
    """Each begins with a docstring."""
    assert {module.name for module in all_modules() if not ast.get_docstring(module.tree)} == set()


def test_the_environment_is_read_at_the_edges_only() -> None:
    """Everything between gets what it needs as an argument, and can be tested with a dictionary."""
    readers = {
        module.name
        for module in all_modules()
        if next(_touches(module), None) is not None and not _may_read(module)
    }

    assert readers == set()


def _may_read(module: Module) -> bool:
    place = PurePath(module.place)
    return any(place.is_relative_to(reader) for reader in READERS[module.name.partition(".")[0]])


def _touches(module: Module) -> Iterator[ast.AST]:
    for node in ast.walk(module.tree):
        if _is_environ(node) or (isinstance(node, ast.Attribute) and node.attr in _ENVIRONMENT_CALLS):
            yield node
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            names = {alias.name for alias in node.names}
            if names & (_ENVIRONMENT_CALLS | {"environ"}):
                yield node


def _is_environ(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "environ"


def test_nothing_writes_the_environment() -> None:
    """A program finds its environment as its launcher made it, and a test cannot leak into the next one."""
    writers = {module.name for module in all_modules() if any(_writes(node) for node in ast.walk(module.tree))}

    assert writers == set()


def _writes(node: ast.AST) -> bool:
    match node:
        case ast.Subscript(value=value, ctx=ast.Store() | ast.Del()):
            return _is_environ(value)
        case ast.AugAssign(target=target):
            return _is_environ(target)
        case ast.Attribute(value=value, attr=method) if method in _WRITING_METHODS:
            return _is_environ(value)
        case ast.Attribute(attr="putenv" | "unsetenv"):
            return True
        case _:
            return False


def test_no_tensor_takes_the_default_dtype() -> None:
    """A program may set another one with ``torch.set_default_dtype``, which is no choice of ours."""
    calls = {
        f"{module.name}:{node.lineno}"
        for module in all_modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in MAKERS_OF_TENSORS
        if not any(keyword.arg == "dtype" for keyword in node.keywords)
    }

    assert calls == set()


def test_private_names_of_others_stand_in_one_module() -> None:
    """In `popdist.torch_private`, at most 20; its unit tests say what a torch without them does."""
    packages = {module.name: module.tree for module in (*modules("popdist"), *modules("poptorch"))}
    ours = {name for tree in packages.values() for name in (*_variables(tree), *_attributes_set(tree))}
    ours |= {name.rpartition(".")[2] for name in packages} | {"_extension"}
    place = packages.pop("popdist.torch_private")
    inside = _private_names(place) - {"_C", "_dynamo", "_distributed_c10d", "_utils"}
    start = {name: packages.pop(name) for name in list(packages) if name.startswith("popdist.startup.")}
    found = {
        name: names
        for name, tree in packages.items()
        if (names := _private_names(tree) - ours - OF_TORCHS_BACKENDS - PUBLIC_ALL_THE_SAME)
    }

    assert found == {}
    assert set[str]().union(*map(_private_names, start.values())) - ours <= OF_THE_START | PUBLIC_ALL_THE_SAME
    assert MOST_PRIVATE_NAMES // 2 < len(inside | {"set_code_exec_strategy"}) <= MOST_PRIVATE_NAMES


def _variables(tree: ast.AST) -> Iterator[str]:
    """The names of a module's functions, classes and variables."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _attributes_set(tree: ast.AST) -> Iterator[str]:
    """The attributes that a module gives its objects."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name, ctx=ast.Store()):
                yield name
            case ast.Subscript(value=ast.Attribute(attr="__dict__"), slice=ast.Constant(value=str(name))):
                yield name


def _private_names(tree: ast.AST) -> set[str]:
    """Those that a module reads of anything, also as text, and those that it imports."""
    found = set[str]()
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
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
