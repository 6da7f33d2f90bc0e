"""Draw what the code says of poptorch's options and operations into its page: ``scripts/draw``.

A drawing stands between two comments, ``<!-- NAME begins -->`` and ``<!-- NAME ends -->``. A test finds a stale
one.
"""

import ast
import re
from collections.abc import Callable
from typing import Final, TypeGuard

from tests.architecture.source_tree import ROOT, Module, modules

PLACES: Final = (
    ("docs/poptorch.md", "options"),
    ("docs/poptorch.md", "operations"),
)
"""Each document with the name of a drawing in it."""


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
    "options": draw_options,
    "operations": draw_operations,
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
