"""Options from text: a file with one setter call a line, or JSON with one setter an entry.

The text is read and not executed: a call's arguments are literals and what `poptorch` has under public names.
"""

import ast
import json
from pathlib import Path
from types import ModuleType
from typing import Any

from poptorch import enums
from poptorch.errors import ConfigFileError


def apply_file(options: object, path: str, names: ModuleType) -> None:
    """Call the setters in file ``path`` on ``options``.

    Raises:
        ConfigFileError: If a line is no call of a setter, or the setter refuses it.
    """
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    for number, text in enumerate(lines, start=1):
        line = text.strip()
        if not line or line.startswith("#"):
            continue
        call = f"options.{line.removeprefix('options.')}"
        try:
            _value_of(ast.parse(call, mode="eval").body, {"options": options, "poptorch": names})
        except Exception as error:
            kind = "SyntaxError" if isinstance(error, SyntaxError) else type(error).__name__
            reason = error.msg if isinstance(error, SyntaxError) else str(error)
            raise ConfigFileError(f"{kind} at line {number} of {path}: {reason}\n> {call}") from error


def apply_json(options: object, text: str, what: str) -> None:
    """Call the setters that the JSON object ``text`` names on ``options``.

    A key is the path of a setter, such as ``Training.gradientAccumulation``; a list is the list of its arguments.

    Raises:
        ConfigFileError: If ``text`` is no JSON object, or names what is no setter.
    """
    try:
        calls = json.loads(text)
    except ValueError as error:
        raise ConfigFileError(f"{what} is no JSON: {error}") from error
    if not isinstance(calls, dict):
        raise ConfigFileError(f'{what} must be a JSON object such as {{"deviceIterations": 4}}, and is {text!r}')
    for path, value in calls.items():
        setter: Any = options
        for name in path.split("."):
            setter = getattr(setter, name, None)
        if not callable(setter):
            raise ConfigFileError(f"{what} names {path!r}, which is no setter of poptorch.Options")
        setter(*map(_member, value if isinstance(value, list) else [value]))


def _member(value: object) -> object:
    """The member of an enumeration that a text such as ``OutputMode.All`` names; else ``value``."""
    if not isinstance(value, str) or value.count(".") != 1:
        return value
    kind, name = value.split(".")
    return getattr(getattr(enums, kind, None), name, value)


def _value_of(node: ast.expr, names: dict[str, object]) -> Any:  # noqa: ANN401 - what the text says
    """The value of an expression of calls, names, literals and collections of them.

    Raises:
        SyntaxError: If there is anything else in it.
    """
    match node:
        case ast.Call(func=function):
            arguments = [_value_of(argument, names) for argument in node.args]
            named = {str(keyword.arg): _value_of(keyword.value, names) for keyword in node.keywords}
            return _value_of(function, names)(*arguments, **named)
        case ast.Attribute(value=owner, attr=name) if not name.startswith("_") or name == "_Popart":
            return getattr(_value_of(owner, names), name)
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.List() | ast.Tuple():
            return [_value_of(part, names) for part in node.elts]
        case ast.Dict(keys=keys):
            pairs = zip(keys, node.values, strict=True)
            return {_value_of(key, names): _value_of(value, names) for key, value in pairs if key is not None}
        case _:
            try:
                return ast.literal_eval(node)
            except ValueError:
                raise SyntaxError(f"{ast.unparse(node)} is no call of a setter") from None
