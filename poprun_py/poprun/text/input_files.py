"""Reading of files that a user names: as text, as JSON or as YAML, with limits.

A file may come from another person, by mistake or on purpose. So a file has at most :data:`MAX_BYTES` bytes, and
lists and mappings have at most :data:`MAX_DEPTH` levels. YAML is parsed slowly, so it has at most :data:`MAX_YAML`
characters. YAML has no aliases, because a few lines with aliases can stand for more values than memory holds.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from poprun.errors import UsageError

if TYPE_CHECKING:
    import yaml

MAX_BYTES: Final = 4 * 10**6
MAX_YAML: Final = 10**6
MAX_DEPTH: Final = 32
STDIN: Final = "-"


def read_text(file: str, asked: str, most_bytes: int = MAX_BYTES) -> str:
    """Return the text of ``file`` (``-`` means standard input). Raises UsageError if reading fails.

    The message of the error begins with ``asked``, the option that names the file.
    """
    data = b""
    try:
        with open(file, "rb") if file != STDIN else nullcontext(sys.stdin.buffer) as stream:
            data = stream.read(most_bytes + 1)
        if len(data) <= most_bytes:
            return data.decode("utf-8-sig")  # some editors write a byte order mark first
        why: object = _too_long(most_bytes)
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        why = f"line {number} is not in UTF-8: save the file in that encoding"
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
    raise UsageError(f"{asked} {file}: {why}")


def _too_long(most: int) -> str:
    return f"longer than {most // 10**6} MB, which no such file is"


def _readable(error: ValueError) -> str:
    """Return the message of ``error``; a simpler message if Python refused a number with thousands of digits."""
    return "a number has thousands of digits" if "set_int_max_str_digits" in str(error) else str(error)


def parse_json(text: str) -> object:
    """Return the parsed JSON ``text``. Raise ValueError if it is no JSON, repeats a key, or is nested too deep."""
    try:
        values: object = json.loads(text, object_pairs_hook=_unique_keys)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise ValueError(_readable(error)) from None
    layer = [values]
    for _ in range(MAX_DEPTH):
        layer = [inner for value in layer for inner in _inside(value)]
    if layer:
        raise _too_deep()
    return values


def _inside(value: object) -> list[object]:
    """Return the lists and dicts that the list or dict ``value`` contains directly; [] for any other ``value``."""
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [inner for inner in values if isinstance(inner, (dict, list))]


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) < len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"{twice} comes twice")
    return values


def parse_yaml(text: str) -> object:
    """Return the parsed YAML ``text``. Raises ValueError if it is no YAML, has aliases, or is nested too deep."""
    with _loading(text) as loader:
        value: object = loader.get_single_data()
    return value


def compose_yaml(text: str) -> "yaml.Node | None":
    """Return the root node of the YAML ``text``; None if it is empty. Raise ValueError if it is no valid YAML."""
    with _loading(text) as loader:
        node: yaml.Node | None = loader.get_single_node()
    return node


class YamlError(ValueError):
    """Error for a text that is not valid YAML: a message of one line, and the number of the wrong line."""

    def __init__(self, problem: str, line: int | None = None) -> None:
        super().__init__(problem)
        self.line = line


@contextmanager
def _loading(text: str) -> Iterator[Any]:
    import yaml

    if len(text) > MAX_YAML:
        raise YamlError(_too_long(MAX_YAML))
    try:
        loader = _loader()(text)
        try:
            yield loader
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        raise YamlError(error.problem or "", error.problem_mark.line + 1 if error.problem_mark else None) from None
    except yaml.YAMLError as error:
        raise YamlError(" ".join(str(error).split())) from None
    except ValueError as error:
        raise YamlError(_readable(error)) from None


@cache
def _loader() -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """A YAML loader that refuses aliases, and more than :data:`MAX_DEPTH` nested levels."""

        depth = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            event: Any = self.peek_event()  # type: ignore[no-untyped-call] # the type stubs lack this type
            mark = event.start_mark
            if isinstance(event, yaml.AliasEvent):
                problem = f"found the alias *{event.anchor}, which is not read here: write the value out"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
            is_deeper = isinstance(event, yaml.CollectionStartEvent)
            self.depth += is_deeper
            if self.depth > MAX_DEPTH:
                raise yaml.MarkedYAMLError(problem=str(_too_deep()), problem_mark=mark)
            node = super().compose_node(parent, index)
            self.depth -= is_deeper
            return node

    return Loader


def _too_deep() -> ValueError:
    return ValueError(f"more than {MAX_DEPTH} lists and mappings in each other, as in no such file")
