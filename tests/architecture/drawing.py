"""Draw the law of the house, and what the code shows of it, into the documents: ``scripts/draw``.

A drawing stands between two comments, ``<!-- NAME begins -->`` and ``<!-- NAME ends -->``. A test finds a stale
one.
"""

import ast
import re
from collections.abc import Callable
from itertools import zip_longest
from typing import Final, TypeGuard

from tests.architecture.floors import FLOORS
from tests.architecture.rooms import draw_map
from tests.architecture.source_tree import ROOT, Module, graph, modules, root_of

PLACES: Final = (
    ("docs/architecture.md", "poprun"),
    ("docs/architecture.md", "popdist"),
    ("docs/architecture.md", "poptorch"),
    ("docs/poptorch.md", "options"),
    ("docs/poptorch.md", "operations"),
    ("CONTRIBUTING.md", "floors"),
    ("docs/tests.md", "tests"),
)
"""Each document with the name of a drawing in it."""


def draw_floors() -> str:
    """Both packages side by side, the highest floor at the top."""
    columns = {package: [package] for package in ("poprun", "popdist")}
    for package, lines in columns.items():
        lines += ["  " + "  ".join(floor) for floor in reversed(FLOORS[package])]
    width = max(map(len, columns["poprun"])) + 4
    rows = zip_longest(*columns.values(), fillvalue="")
    return "\n".join(["```", *(f"{left:<{width}}{right}".rstrip() for left, right in rows), "```"])


def draw_package(package: str) -> str:
    """The floors of ``package`` as a table: each folder with what it is, its modules, and what it imports."""
    rows = [
        f"| {_link(package, part)} | {says} | {_modules(package, part)} | {_imports(package, part)} |"
        for floor in reversed(FLOORS[package])
        for part, says in floor.items()
    ]
    return "\n".join(["| folder | what it is | modules | imports |", "|---|---|---|---|", *rows])


def _link(package: str, part: str) -> str:
    folder = root_of(package).relative_to(ROOT) / package
    is_folder = (ROOT / folder / part).is_dir()
    return f"[`{part}{'/' if is_folder else ''}`](../{folder}/{part}{'' if is_folder else '.py'})"


def _modules(package: str, part: str) -> str:
    """The modules of a folder, then those of each folder in it behind its name."""
    inside = f"{package}.{part}."
    folders: dict[str, list[str]] = {"": []}
    for module in modules(package):
        if module.name.startswith(inside) and module.path.stem not in {"__init__", "__main__"}:
            folder, _, name = module.name.removeprefix(inside).rpartition(".")
            folders.setdefault(folder, []).append(name)
    return "; ".join(f"{folder}{': ' if folder else ''}{', '.join(names)}" for folder, names in folders.items())


def _imports(package: str, part: str) -> str:
    """The folders and files of lower floors that ``part`` imports, the highest first."""
    own = f"{package}.{part}"
    found = {
        target.split(".")[1]
        for source, targets in graph().items()
        if source == own or source.startswith(f"{own}.")
        for target in targets
        if target.startswith(f"{package}.")
    }
    return ", ".join(other for floor in reversed(FLOORS[package]) for other in floor if other in found - {part})


_NO_EFFECT: Final = " No effect: "
"""What the docstring of a setter or an operation has where it changes nothing."""


def draw_options() -> str:
    """Each setter of poptorch's options with what it means, and why it changes nothing where that is so."""
    rows = ["| setter | meaning | no effect, because |", "|---|---|---|"]
    for module in modules("poptorch"):
        if module.name not in {"poptorch.options.model_options", "poptorch.options.sub_options"}:
            continue
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                rows += [_option_row(node.name, setter) for setter in node.body if _is_public(setter)]
    return "\n".join(rows)


def _is_public(node: ast.stmt) -> TypeGuard[ast.FunctionDef]:
    return isinstance(node, ast.FunctionDef) and not node.name.startswith("_")


def _option_row(kind: str, setter: ast.FunctionDef) -> str:
    part = kind.strip("_").removesuffix("Options").replace("TensorLocation", "TensorLocations")
    owner = {"": "", "Popart": "_Popart.", "TensorLocationsSettings": "TensorLocationSettings()."}.get(
        part, f"{part}."
    )
    return f"| `{owner}{setter.name}` | {_meaning(setter)} |"


def _meaning(node: ast.FunctionDef | ast.ClassDef) -> str:
    """What the docstring says of it, and after a bar why it has no effect."""
    meaning, _, why = (ast.get_docstring(node) or "").partition("\n")[0].partition(_NO_EFFECT)
    return f"{meaning} | {why.removesuffix('.')}"


_OF_OPERATIONS: Final = ("poptorch.blocks.", "poptorch.options.execution_strategies", "poptorch.ops.")


def draw_operations() -> str:
    """Each block, strategy and operation that poptorch has under a public name, as its docstring says."""
    public = {
        alias.name
        for module in modules("poptorch")
        if module.name == "poptorch"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    rows = [
        f"| `{node.name}({_arguments(node, module)})` | {_meaning(node)} |"
        for module in modules("poptorch")
        if module.name.startswith(_OF_OPERATIONS)
        for node in module.tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in public
    ]
    return "\n".join(["| name | meaning | no effect, because |", "|---|---|---|", *rows])


def _arguments(node: ast.stmt, module: Module) -> str:
    """The arguments of a function, or of what makes an object of a class, without their types."""
    if isinstance(node, ast.ClassDef):
        made = [it for it in node.body if isinstance(it, ast.FunctionDef) and it.name == "__init__"]
        bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
        inherited = [it for it in module.tree.body if isinstance(it, ast.ClassDef) and it.name in bases]
        return next((_arguments(it, module) for it in (*made, *inherited)), "")
    assert isinstance(node, ast.FunctionDef)
    given = node.args
    defaults = [f"={ast.unparse(value)}" for value in given.defaults]
    words = [name.arg for name in given.args]
    words = [
        word + value for word, value in zip(words, [""] * (len(words) - len(defaults)) + defaults, strict=True)
    ]
    words += [star + it.arg for star, it in (("*", given.vararg), ("**", given.kwarg)) if it is not None]
    return ", ".join(word for word in words if word != "self")


DRAWINGS: Final[dict[str, Callable[[], str]]] = {
    "poprun": lambda: draw_package("poprun"),
    "popdist": lambda: draw_package("popdist"),
    "poptorch": lambda: draw_package("poptorch"),
    "options": draw_options,
    "operations": draw_operations,
    "floors": draw_floors,
    "tests": draw_map,
}


def redrawn(text: str, name: str) -> str:
    """``text`` with the drawing ``name`` as the code shows it now."""
    begin, end = f"<!-- {name} begins -->", f"<!-- {name} ends -->"
    drawing = f"{begin}\n{DRAWINGS[name]()}\n{end}"
    changed, num_places = re.subn(f"{begin}.*?{end}", lambda _: drawing, text, flags=re.DOTALL)
    assert num_places == 1, f"the document needs one place for the drawing {name}, and has {num_places}"
    return changed


def main() -> None:
    """Renew every drawing."""
    for document, name in PLACES:
        path = ROOT / document
        path.write_text(redrawn(path.read_text(encoding="utf-8"), name), encoding="utf-8")


if __name__ == "__main__":
    main()
