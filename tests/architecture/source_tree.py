"""Read the packages as text: which modules there are and what each imports. Nothing is imported for it."""

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent

SOURCES = {
    "popsize": ROOT / "poprun_py",
    "popdist": ROOT / "popdist_py",
    "poprun": ROOT / "poprun_py",
    "poptorch": ROOT / "poptorch_py",
}
"""Each package, with the folder that holds it."""


_COMMENT = re.compile(r"(?:^|(?<=\s))# .*(?:\n *# .*)*", re.MULTILINE)


def words(text: str) -> frozenset[str]:
    """The words of ``text``."""
    return frozenset(text.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """One file of a package: its dotted name, where it is, its path below the package, all that is in it."""

    name: str
    path: Path
    place: str
    tree: ast.Module
    nodes: tuple[ast.AST, ...]

    @property
    def package(self) -> str:
        """Which of them it belongs to."""
        return self.name.partition(".")[0]

    @property
    def part(self) -> str:
        """The folder or file of the package that it is, or is in; empty for the package itself."""
        return self.name.partition(".")[2].partition(".")[0]

    @property
    def classes(self) -> Iterator[ast.ClassDef]:
        """Its classes."""
        return (node for node in self.nodes if isinstance(node, ast.ClassDef))

    @property
    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        """Its functions and methods."""
        return (node for node in self.nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@cache
def modules(*packages: str) -> tuple[Module, ...]:
    """Every module of ``packages``, of all where none is named, by name."""
    return tuple(_by_name()[name] for name in _by_name() if name.partition(".")[0] in (packages or SOURCES))


@cache
def _by_name() -> dict[str, Module]:
    found = {}
    for package, folder in SOURCES.items():
        for path in sorted((folder / package).rglob("*.py")):
            name = ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")
            tree = ast.parse(path.read_text(encoding="utf-8"))
            place = str(path.relative_to(folder / package))
            found[name] = Module(name=name, path=path, place=place, tree=tree, nodes=(*ast.walk(tree),))
    return found


@cache
def docstrings(module: Module) -> tuple[str, ...]:
    """Return the docstrings of ``module`` and of all in it, also of its attributes, each in one line."""
    return tuple(
        " ".join(node.value.value.split())
        for node in module.nodes
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


@cache
def comments(module: Module) -> tuple[str, ...]:
    """Return the comments of ``module``; lines that follow each other are one."""
    text = module.path.read_text(encoding="utf-8")
    return tuple(" ".join(it.replace("# ", "").split()) for it in _COMMENT.findall(text))


def names_read(module: Module) -> set[str]:
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


def imports(module: Module) -> frozenset[str]:
    """What ``module`` imports anywhere in its text, as names of modules."""
    return frozenset(_imported(module.nodes))


def _imported(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "the house imports by full name"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in _by_name() else str(node.module)


@cache
def graph() -> dict[str, frozenset[str]]:
    """Module → the modules of our packages that it imports anywhere."""
    return {name: (imports(module) & _by_name().keys()) - {name} for name, module in _by_name().items()}


def imports_on_import(module: Module) -> frozenset[str]:
    """What importing ``module`` itself runs: its imports outside functions and outside ``if TYPE_CHECKING``."""
    return frozenset(_imported(_executed(module.tree)))


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        is_for_types = isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING")
        if not is_for_types and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from _executed(child)


def reached_on_import(name: str) -> frozenset[str]:
    """Every module, foreign ones too, that ``import name`` runs, the packages that hold them included."""
    reached: set[str] = set()
    waiting = {name}
    while waiting:
        reached.add(current := waiting.pop())
        if current in _by_name():
            around = {current.rpartition(".")[0]} - {""}
            waiting |= (imports_on_import(_by_name()[current]) | around) - reached
    return frozenset(reached)
