"""Draw what the code says of poptorch's options and operations into its pages: ``scripts/draw``.

A drawing stands between two comments, ``<!-- NAME begins -->`` and ``<!-- NAME ends -->``. A test finds a stale
one.
"""

import ast
import re
from collections.abc import Callable, Iterable
from textwrap import fill
from typing import Final, TypeGuard

from tests.architecture.source_tree import ROOT, modules

PLACES: Final = (
    ("docs/poptorch-options.md", "options"),
    ("docs/poptorch.md", "operations"),
)
"""Each document with the name of a drawing in it."""


_NO_EFFECT: Final = " No effect: "
"""What the docstring of a setter or an operation has where it changes nothing."""

_WITHOUT: Final = "Accepted, checked, and without effect, as each docstring says why: "


def draw_options() -> str:
    """Each setter of poptorch's options that has an effect, with its meaning; and the names of all others."""
    return _drawn(
        "| setter | meaning |",
        [
            (f"{_owner(node.name)}{setter.name}", setter)
            for module in modules("poptorch")
            if module.name in {"poptorch.options.model_options", "poptorch.options.sub_options"}
            for node in ast.walk(module.tree)
            if isinstance(node, ast.ClassDef)
            for setter in node.body
            if _is_setter(setter)
        ],
    )


def _drawn(head: str, named: Iterable[tuple[str, ast.FunctionDef | ast.ClassDef]]) -> str:
    """A table of what has an effect, and a sentence with the names of what has none."""
    rows, without = [head, "|---|---|"], []
    for name, node in named:
        summary = (ast.get_docstring(node) or "").partition("\n\n")[0].replace("\n", " ")
        if _NO_EFFECT in summary:
            without.append(f"`{name.partition('(')[0]}`")
        else:
            rows.append(f"| `{name}` | {summary.removesuffix('.')} |")
    sentence = fill(f"{_WITHOUT}{', '.join(without)}.", 115, break_long_words=False, break_on_hyphens=False)
    return "\n".join(rows) + f"\n\n{sentence}"


def _is_setter(node: ast.stmt) -> TypeGuard[ast.FunctionDef]:
    """Whether it is a public method that gives what it belongs to."""
    if not isinstance(node, ast.FunctionDef) or node.name.startswith("_") or node.returns is None:
        return False
    return ast.unparse(node.returns) == "Self"


def _owner(kind: str) -> str:
    part = kind.strip("_").removesuffix("Options").replace("TensorLocation", "TensorLocations")
    known = {"": "", "Popart": "_Popart.", "TensorLocationsSettings": "TensorLocationSettings."}
    return known.get(part, f"{part}.")


_OF_OPERATIONS: Final = ("poptorch.blocks.", "poptorch.options.execution_strategies", "poptorch.ops.")


def draw_operations() -> str:
    """Each public block, strategy and operation that has an effect, with its meaning; the names of all others."""
    public = {
        alias.name
        for module in modules("poptorch")
        if module.name == "poptorch"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    return _drawn(
        "| name | meaning |",
        [
            (node.name, node)
            for module in modules("poptorch")
            if module.name.startswith(_OF_OPERATIONS)
            for node in module.tree.body
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in public
        ],
    )


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
