"""Draw what the code says of poptorch's options and operations into its pages: ``scripts/draw``.

A drawing stands between two comments, ``<!-- NAME begins -->`` and ``<!-- NAME ends -->``. A test finds a stale
one.
"""

import ast
import re
from collections.abc import Callable, Iterator
from textwrap import fill
from typing import Final

from tests.architecture.source_tree import ROOT, modules, words

_Documented = Iterator[tuple[str, ast.FunctionDef | ast.ClassDef]]

_NO_EFFECT: Final = " No effect: "
"""What the docstring of a setter or an operation has where it changes nothing."""

_WITHOUT: Final = (
    "poptorch accepts and checks the following names, which have no effect, as each docstring explains: "
)

_OF_OPTIONS: Final = words("poptorch.options.model_options poptorch.options.sub_options")
_OF_OPERATIONS: Final = ("poptorch.blocks.", "poptorch.options.execution_strategies", "poptorch.ops.")

_OWNERS: Final = {"Options": "", "_PopartOptions": "_Popart.", "_TensorLocationOptions": "TensorLocations."}
"""What stands before the setters of a class, where that is not its name."""


def _setters() -> _Documented:
    """Each setter of poptorch's options: a public method that gives what it belongs to."""
    kinds = [node for module in modules("poptorch") if module.name in _OF_OPTIONS for node in module.classes]
    for kind in kinds:
        owner = _OWNERS.get(kind.name, f"{kind.name.strip('_').removesuffix('Options')}.")
        for node in kind.body:
            match node:
                case ast.FunctionDef(name=name, returns=ast.Name(id="Self")) if not name.startswith("_"):
                    yield f"{owner}{name}", node


def _operations() -> _Documented:
    """Each public block, strategy and operation of poptorch."""
    package = next(module for module in modules("poptorch") if module.name == "poptorch")
    public = {alias.name for node in package.nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    for module in modules("poptorch"):
        for node in module.tree.body if module.name.startswith(_OF_OPERATIONS) else ():
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in public:
                yield node.name, node


DRAWINGS: Final[dict[str, tuple[str, str, Callable[[], _Documented]]]] = {
    "options": ("docs/poptorch-options.md", "| setter | meaning |", _setters),
    "operations": ("docs/poptorch.md", "| name | meaning |", _operations),
}
"""Of each drawing its document, the head of its table, and what it shows."""


def redrawn(text: str, name: str) -> str:
    """``text`` with the drawing ``name``: a table of what has an effect, and the names of what has none."""
    _, head, documented = DRAWINGS[name]
    rows, without = [head, "|---|---|"], []
    for shown, node in documented():
        summary = (ast.get_docstring(node) or "").partition("\n\n")[0].replace("\n", " ")
        if _NO_EFFECT in summary:
            without.append(f"`{shown}`")
        else:
            rows.append(f"| `{shown}` | {summary.removesuffix('.')} |")
    sentence = fill(f"{_WITHOUT}{', '.join(without)}.", 115, break_long_words=False, break_on_hyphens=False)
    begin, end = f"<!-- {name} begins -->", f"<!-- {name} ends -->"
    drawing = "\n".join([begin, *rows, "", sentence, end])
    changed, num_places = re.subn(f"{begin}.*?{end}", lambda _: drawing, text, flags=re.DOTALL)
    assert num_places == 1, f"the document needs one place for the drawing {name}, and has {num_places}"
    return changed


def main() -> None:
    """Renew every drawing."""
    for name, (document, _, _) in DRAWINGS.items():
        path = ROOT / document
        path.write_text(redrawn(path.read_text(encoding="utf-8"), name), encoding="utf-8")


if __name__ == "__main__":
    main()
