"""Reading and writing of dataclass objects in files and messages, field by field.

A dataclass is written as a mapping whose keys are exactly the fields; `_Reader.read` shows the form of each type.
An error is a PlanError with the name of the file, the place in the file, and the value that was found.
"""

import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, Final, TypeVar, Union, get_args, get_origin

from poprun.errors import PlanError
from poprun.text import IF_USED
from poprun.text.ranges import Hosts, fold_hosts, fold_numbers, parse_hosts, parse_numbers

Record = TypeVar("Record")

Rule = Callable[[Any], object]
"""A function that checks or converts a value, and raises ValueError if the value is wrong. Messages print the name
of the value before the text of the error."""

_RANGES: Final[Mapping[object, tuple[Rule, Callable[[Any], str]]]] = {
    tuple[int, ...]: (parse_numbers, fold_numbers),
    Hosts: (parse_hosts, fold_hosts),
}
"""Types whose values a file contains as ranges, such as ``0-3,6``, each with the functions that read and write
this text."""

_UNIONS: Final = (Union, UnionType)
_SHORT_NUMBER: Final = re.compile("[0-9]{1,9}")


def between(least: float, most: float) -> Rule:
    """Return a function that returns a number from ``least`` to ``most``, or raises ValueError for any other."""

    def check(number: float) -> float:
        if not least <= number <= most:
            raise ValueError(f"must be {_WORDS[type(number)]} from {least} to {most}, not {number!s:.20}")
        return number

    return check


def printable(least: int, most: int) -> Rule:
    """Return a function that returns a printable text of ``least`` to ``most`` letters, or raises ValueError."""

    def check(text: str) -> str:
        if not (least <= len(text) <= most and text.isprintable()):
            raise ValueError(f"must be {least} to {most} characters that can be printed, not {text!r:.60}")
        return text

    return check


def distinct(values: tuple[object, ...]) -> tuple[object, ...]:
    """Return the list ``values`` unchanged. Raises ValueError if the list contains a value twice."""
    if len(set(values)) < len(values):
        raise ValueError("must name nothing twice")
    return values


def read_record(
    kind: type[Record],
    values: object,
    source: str,
    *,
    noun: str = "a plan",
    version: int | None = None,
    is_part: bool = False,
) -> Record:
    """Return an object of the dataclass ``kind``, made from ``values``, the parsed text of the file ``source``.

    Messages call the file ``noun``. If ``is_part`` is true, unknown keys are ignored, and fields with a default
    may be missing. Raises PlanError if a value is wrong.
    """
    reader = _Reader(source=source, noun=noun, is_part=is_part)
    if version is not None:
        reader.check_version(values, version)
    record: Record = reader.record(kind, values, "", () if version is None else ("version",))
    return record


def write_record(record: Any, *, version: int | None = None) -> dict[str, object]:
    """Return the dataclass object ``record`` as a dict for JSON or YAML, from which `read_record` reads it."""
    written: dict[str, object] = {} if version is None else {"version": version}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if field.metadata != IF_USED or value != field.default:
            written[field.name] = _written(field.type, value)
    return written


def _written(kind: Any, value: Any) -> Any:
    """Return ``value``, whose type is ``kind``, as JSON or YAML contains it: a list, a dict, a text, a number."""
    if value is None or kind is Any or kind in _WORDS:
        return value
    if kind in _RANGES:
        return _RANGES[kind][1](value)
    if get_origin(kind) in (*_UNIONS, Annotated):
        inner = next(it for it in get_args(kind) if it is not NoneType)
        return _written(inner, value)
    if dataclasses.is_dataclass(kind):
        return write_record(value)
    if isinstance(value, Enum):
        return value.value
    if kind is range:
        return [value.start, value.stop]
    if get_origin(kind) is Mapping:
        return {key: _written(get_args(kind)[1], each) for key, each in value.items()}
    if pair := _pair(kind):
        return {str(key): _written(pair[1], each) for key, each in value}
    return _written_list(kind, value)


def _written_list(kind: Any, value: Sequence[Any]) -> list[Any]:
    """Return the tuple ``value``, whose type is ``kind``, as a list for JSON or YAML."""
    (inner, *_) = get_args(kind)
    inner = get_args(inner)[0] if get_origin(inner) is Annotated else inner
    kinds = get_args(inner) if get_origin(inner) in _UNIONS else (inner,)
    if all(it in _WORDS or it is NoneType for it in kinds):
        return list(value)  # at once: a curve has many
    return [_written(inner, each) for each in value]


_WORDS: Final[Mapping[object, str]] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    """A reader that makes dataclass objects from the parsed content of the file or message ``source``."""

    source: str
    noun: str
    is_part: bool

    def record(self, kind: Any, values: object, path: str, extra: tuple[str, ...] = ()) -> Any:
        """Return an object of the dataclass ``kind``, made from the dict ``values``, which contains the fields
        of the object and also the keys ``extra``.
        """
        mapping, fields = self.mapping(values, path), dataclasses.fields(kind)
        if self.is_part:
            fields = tuple(field for field in fields if field.name in mapping or not _has_default(field))
            mapping = {key: mapping[key] for key in (*extra, *(field.name for field in fields)) if key in mapping}
        left_out = [field for field in fields if field.metadata == IF_USED and field.name not in mapping]
        mapping = {**mapping, **{field.name: _written(field.type, field.default) for field in left_out}}
        self.check_keys([*extra, *(field.name for field in fields)], mapping, path)
        read = {field.name: self.read(field.type, mapping[field.name], f"{path}{field.name}") for field in fields}
        try:
            return kind(**read)
        except ValueError as error:
            raise PlanError(f"{self.source}: {path.removesuffix('.') or 'the file'}: {error}") from None

    def mapping(self, values: object, path: str) -> Mapping[str, object]:
        """Return ``values``, which is at ``path`` in a file. Raise PlanError if ``values`` is no dict."""
        if not isinstance(values, dict):
            raise self._wrong(path.removesuffix(".") or "the file", "a mapping of names to values", values)
        return values

    def check_version(self, values: object, version: int) -> None:
        """Raise PlanError if ``values``, the content of a file, has another version than ``version``."""
        mapping = self.mapping(values, "")
        self.check_keys({*mapping, "version"}, mapping, "")
        file_version = self.read(int, mapping["version"], "version")
        if file_version != version:
            raise PlanError(f"{self.source}: version {file_version}: this poprun reads version {version}")

    def check_keys(self, keys: Collection[str], mapping: Mapping[str, object], path: str) -> None:
        """Raise PlanError unless the dict ``mapping``, at ``path`` in a file, has exactly the keys ``keys``."""
        if missing := [key for key in keys if key not in mapping]:
            raise PlanError(f"{self.source}: {_listed(missing, path)} missing")
        if unknown := [str(key) for key in mapping if key not in keys]:
            known = f"its keys are {', '.join(keys)}" if keys else "it has none"
            raise PlanError(f"{self.source}: {_listed(unknown, path)} no key of {self.noun}; {known}")

    def read(self, kind: Any, value: object, path: str) -> Any:
        """Return ``value``, at ``path`` in a file, as the type ``kind``. Raise PlanError if the type is wrong."""
        origin, inner = get_origin(kind), get_args(kind)
        if origin in _UNIONS:
            (kind,) = set(inner) - {NoneType}
            return None if value is None else self.read(kind, value, path)
        if kind in _RANGES:
            return self._follow(_RANGES[kind][0], self.read(str, value, path), path)
        if origin is Annotated:
            converted = self.read(inner[0], value, path)
            for rule in inner[1:]:
                converted = self._follow(rule, converted, path)
            return converted
        if dataclasses.is_dataclass(kind):
            return self.record(kind, value, f"{path}.")
        if origin is Mapping:
            return dict(self._pairs(inner, value, path))
        if origin is tuple:
            pair = _pair(kind)
            return tuple(self._pairs(pair, value, path) if pair else self._items(inner[0], value, path))
        return self._plain_value(kind, value, path)

    def _pairs(self, kinds: Sequence[Any], value: object, path: str) -> Iterator[tuple[Any, Any]]:
        """Yield the keys and values of the mapping ``value``, converted to the two types in ``kinds``."""
        for key, each in self.mapping(value, path).items():
            place = f"{path}.{key!s:.60}"
            if kinds[0] is int and not _SHORT_NUMBER.fullmatch(str(key)):
                raise PlanError(f"{self.source}: {place}: the key must be a number such as '0'")
            name = int(key) if kinds[0] is int else self.read(kinds[0], str(key), place)
            yield name, self.read(kinds[1], each, place)

    def _items(self, kind: Any, value: object, path: str) -> Iterator[Any]:
        """Return an iterator over the items of the list ``value``, converted to the type ``kind``."""
        if not isinstance(value, list):
            of = "mappings" if dataclasses.is_dataclass(kind) else "texts"
            raise self._wrong(path, f"a list of {of}", value)
        if kind is str and not all(map(_can_be_passed, value)):
            raise self._wrong(path, "a list of texts that a program can be given", value)
        return (self.read(kind, each, f"{path}[{number}]") for number, each in enumerate(value))

    def _plain_value(self, kind: Any, value: Any, path: str) -> Any:
        """Return ``value``, which is no list and no dict of fields, converted to the type ``kind``."""
        if kind is Any:
            return value
        if kind is range:
            if not (isinstance(value, list) and [type(end) for end in value] == [int, int]):
                raise self._wrong(path, "two numbers", value)
            return range(*value)
        if issubclass(kind, Enum):
            member = next((choice for choice in kind if choice.value == value), None)
            if member is None:
                raise self._wrong(path, " or ".join(choice.value for choice in kind), value)
            return member
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise self._wrong(path, _WORDS[kind], value)
        if kind is str and not _is_utf8(value):
            raise self._wrong(path, "text that UTF-8 can hold", value)
        try:
            return kind(value)
        except OverflowError:
            raise self._wrong(path, _WORDS[kind], value) from None

    def _follow(self, rule: Rule, value: object, path: str) -> Any:
        """Return ``rule(value)``. If ``rule`` raises an error, raise PlanError with this error and its place."""
        try:
            return rule(value)
        except (ValueError, PlanError) as error:
            verb = "" if str(error).startswith("must ") else ":"
            raise PlanError(f"{self.source}: {path}{verb} {error}") from None

    def _wrong(self, path: str, description: str, found: object) -> PlanError:
        return PlanError(f"{self.source}: {path} must be {description}, not {_shown(found)}")


def _has_default(field: "dataclasses.Field[Any]") -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def _pair(kind: Any) -> Sequence[Any]:
    """Return the types of key and value if the type ``kind`` is a tuple of pairs; () if it is not."""
    (of, *_) = get_args(kind)
    return () if get_origin(of) is not tuple or Ellipsis in get_args(of) else get_args(of)


def _listed(names: Sequence[str], path: str) -> str:
    """Return the first words of a message about wrong or missing keys, such as ``hosts, program are``."""
    return f"{', '.join(f'{path}{name:.60}' for name in names)} {'is' if len(names) == 1 else 'are'}"


def _shown(value: object) -> str:
    """Return ``value`` as JSON and YAML write it, with null, true and false, for an error message."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else f"{value!r:.60}"


def _is_utf8(text: str) -> bool:
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


def _can_be_passed(word: object) -> bool:
    """Whether ``word`` can be an argument of a program: a text without NUL that UTF-8 can encode."""
    return isinstance(word, str) and "\0" not in word and _is_utf8(word)
