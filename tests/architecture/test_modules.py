"""The form that every module keeps: its size, its name, and its hands off the environment."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePath
from sysconfig import get_path

from tests.architecture.source_tree import ROOT, Module, modules, words

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
        " text/screen.py command.py start.py size.py"
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
    "_frozen_importlib_external _getframe _current_frames _clear_internal_caches _clear_type_cache"
    " _default_pg_init_method"
    " _context _collective_ops_server_def _server_def"
)
"""What `popdist.startup` asks for, which runs in every Python of a job: guarded there."""

MOST_PRIVATE_NAMES = 27

TORCH = Path(get_path("platlib"), "torch")

EXTENDED = {
    **dict.fromkeys(words("DataLoader ReplicaLoader"), "utils/data/dataloader.py"),
    **dict.fromkeys(words("Module BlockModule"), "nn/modules/module.py"),
    **dict.fromkeys(words("Optimizer PieceOptimizer"), "optim/optimizer.py"),
}
"""The classes of torch that ours extend, directly or not, and the files of torch that define them."""

_OWN_ATTRIBUTE = re.compile(r"\bself\.(_[a-z]\w*)")

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
    readers = {module.name for module in modules() if _ENVIRONMENT & _names_read(module)}

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


def test_private_names_of_others_stand_in_one_module() -> None:
    """In `popdist.ground.torch_private`, at most 27, whose unit tests say what a torch without them does."""
    library = {module.name: module for module in modules("popdist", "poptorch")}
    ours = {name for module in library.values() for name in _given_names(module)} | {"_extension"}
    inside = _private_names(library.pop("popdist.ground.torch_private")) - words(
        "_C _dynamo _distributed_c10d _utils"
    )
    inside -= set(OF_TORCHS_BACKENDS)
    foreign = {
        f"{module.name}: {name}"
        for module in library.values()
        for name in _private_names(module) - ours - PUBLIC_ALL_THE_SAME
        if name not in (OF_THE_START if module.part == "startup" else OF_TORCHS_BACKENDS)
    }

    assert foreign == set()
    assert {it for module in library.values() for it in _inherited_names(module)} == set()
    assert MOST_PRIVATE_NAMES // 2 < len(inside | {"set_code_exec_strategy"}) <= MOST_PRIVATE_NAMES


def _given_names(module: Module) -> Iterator[str]:
    """Its own name, those of its functions, classes and variables, and of the attributes that it gives objects."""
    yield module.name.rpartition(".")[2]
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


def _inherited_names(module: Module) -> Iterator[str]:
    """The private attributes of torch's classes that classes of the module, which extend them, read or replace."""
    for node in module.classes:
        bases = {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases}
        for file in {EXTENDED[base] for base in bases & EXTENDED.keys()}:
            theirs = _OWN_ATTRIBUTE.findall((TORCH / file).read_text(encoding="utf-8"))
            ours = _OWN_ATTRIBUTE.findall(ast.unparse(node))
            yield from (f"{module.name}.{node.name}: {name}" for name in {*theirs} & {*ours})


def _private_names(module: Module) -> set[str]:
    return {name for name in _names_read(module) if PRIVATE.fullmatch(name) and not name.startswith("_foreach_")}


def _names_read(module: Module) -> set[str]:
    """The names that it reads of anything, also as text, and the parts of those that it imports."""
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
    return found


def test_what_ci_leaves_out_exists() -> None:
    """Nothing is said of a test that pytest shall leave out and does not find."""
    lines = (ROOT / "tests" / "further.txt").read_text(encoding="utf-8").splitlines()
    found = [re.fullmatch(r"--deselect=(tests/\S+\.py)::(\w+)(\[.+\])?", line) for line in lines]

    assert all(found)
    for path, name, _ in (it.groups() for it in found if it):
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8")
