"""Read the packages as text: which modules there are and what each imports. Nothing is imported for it."""

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent

_SOURCE_ROOTS = {"poprun": ROOT / "poprun_py", "popdist": ROOT / "popdist_py", "poptorch": ROOT / "popdist_py"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """One file of a package.

    Attributes:
        name: Dotted name; a package's own name for its ``__init__.py``.
        path: Where it is.
        tree: Its syntax.
    """

    name: str
    path: Path
    tree: ast.Module

    @property
    def place(self) -> str:
        """Its path below the package, such as ``cli/main.py``."""
        package = self.name.partition(".")[0]
        return str(self.path.relative_to(_SOURCE_ROOTS[package] / package))


def root_of(package: str) -> Path:
    """The folder that holds ``package``."""
    return _SOURCE_ROOTS[package]


@cache
def modules(package: str) -> tuple[Module, ...]:
    """Every module of ``package``, by name."""
    root = _SOURCE_ROOTS[package]
    found = (
        Module(name=_dotted(path.relative_to(root)), path=path, tree=ast.parse(path.read_text(encoding="utf-8")))
        for path in (root / package).rglob("*.py")
    )
    return tuple(sorted(found, key=lambda module: module.name))


def _dotted(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def all_modules() -> tuple[Module, ...]:
    """Every module of the three packages."""
    return (*modules("popdist"), *modules("poprun"), *modules("poptorch"))


def imports(module: Module) -> frozenset[str]:
    """What ``module`` imports anywhere in its text, as names of modules."""
    return frozenset(_imported(ast.walk(module.tree)))


def imports_on_import(module: Module) -> frozenset[str]:
    """What importing ``module`` itself runs: its imports outside functions and outside ``if TYPE_CHECKING``."""
    return frozenset(_imported(_executed(module.tree)))


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            continue
        yield child
        yield from _executed(child)


def _imported(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "the house imports by full name"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in _names() else str(node.module)


@cache
def _names() -> frozenset[str]:
    return frozenset(module.name for module in all_modules())


@cache
def graph() -> dict[str, frozenset[str]]:
    """Module → the modules of both packages that it imports anywhere."""
    return {module.name: (imports(module) & _names()) - {module.name} for module in all_modules()}


def reached_on_import(name: str) -> frozenset[str]:
    """Every module, foreign ones too, that ``import name`` runs, the packages that hold them included."""
    by_name = {module.name: module for module in all_modules()}
    reached: set[str] = set()
    waiting = [name]
    while waiting:
        current = waiting.pop()
        if current in reached:
            continue
        reached.add(current)
        if current in by_name:
            waiting += imports_on_import(by_name[current])
            if "." in current:
                waiting.append(current.rpartition(".")[0])
    return frozenset(reached)


def find_cycle(edges: Mapping[str, frozenset[str]]) -> list[str]:
    """One circle of ``edges``, or an empty list when there is none."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for target in sorted(edges[name]):
            if circle := visit(target, [*path, name]):
                return circle
        done.add(name)
        return []

    return next((circle for name in edges if (circle := visit(name, []))), [])
