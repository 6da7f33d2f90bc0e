"""A reader for the fields of a mapping that came from a file, each as the type that it must have."""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import TYPE_CHECKING, TypeVar, get_args

from poprun.errors import PlanError
from poprun.text.ranges import parse_numbers

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Value = TypeVar("Value")
Choice = TypeVar("Choice", bound=Enum)
Settings = TypeVar("Settings", bound="DataclassInstance")


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldReader:
    """The fields of one mapping; whatever is wrong with one raises an error that names the file and the key.

    Attributes:
        source: Name of the file.
        values: What a JSON or YAML reader found; no mapping is an error on the first read.
        path: Where in the file the mapping stands: the empty text, or a key with a dot behind it.
        noun: What the mapping is called in messages.
    """

    source: str
    values: object
    path: str = ""
    noun: str = "a plan"

    def expect_keys(self, keys: Collection[str]) -> None:
        """Check that the mapping has exactly ``keys``.

        Raises:
            PlanError: If one is missing or unknown.
        """
        found = self._mapping()
        missing = [key for key in keys if key not in found]
        unknown = [str(key) for key in found if key not in keys]
        if missing:
            raise PlanError(f"{self.source}: {self._names(missing)} missing")
        if unknown:
            known = f"its keys are {', '.join(keys)}" if keys else "it has none"
            raise PlanError(f"{self.source}: {self._names(unknown)} no key of {self.noun}; {known}")

    def text(self, key: str) -> str:
        """The text under ``key``."""
        value = self._typed(key, str, "text")
        if not _is_encodable(value):
            raise self._wrong(key, "text that UTF-8 can hold", value)
        return value

    def count(self, key: str) -> int:
        """The whole number under ``key``."""
        return self._typed(key, int, "a whole number")

    def number(self, key: str) -> float:
        """The number under ``key``, whole or not."""
        value = self._value(key)
        try:
            return float(self.count(key)) if isinstance(value, int) else self._typed(key, float, "a number")
        except OverflowError:
            raise self._wrong(key, "a number", value) from None

    def flag(self, key: str) -> bool:
        """True or false under ``key``."""
        return self._typed(key, bool, "true or false")

    def texts(self, key: str) -> tuple[str, ...]:
        """The list of texts under ``key``."""
        values = self._typed(key, list, "a list of texts")
        for value in values:
            if not isinstance(value, str) or "\0" in value or not _is_encodable(value):
                raise self._wrong(key, "a list of texts that a program can be given", values)
        return tuple(values)

    def names(self) -> tuple[str, ...]:
        """The keys of a mapping that may have any."""
        return tuple(map(str, self._mapping()))

    def index(self, key: str) -> int:
        """``key`` as a number."""
        if not key.isdecimal():
            raise PlanError(f"{self.source}: {self.path}{key}: the key must be a number such as '0'")
        return int(key)

    def optional_texts(self, key: str) -> tuple[tuple[str, str | None], ...]:
        """The names and values of the mapping under ``key``, whose values are texts or null."""
        read = self.nested(key)
        return tuple((name, read.optional(name, read.text)) for name in read.names())

    def converted(self, key: str, convert: Callable[[str], Value]) -> Value:
        """What ``convert`` makes of the text under ``key``; its error becomes one of the file."""
        try:
            return convert(self.text(key))
        except (ValueError, PlanError) as error:
            if str(error).startswith(f"{self.source}: "):
                raise
            raise PlanError(f"{self.source}: {self.path}{key}: {error}") from None

    def choice(self, key: str, choices: type[Choice]) -> Choice:
        """The member of ``choices`` whose value is the text under ``key``."""
        text = self.text(key)
        found = next((choice for choice in choices if choice.value == text), None)
        if found is None:
            raise self._wrong(key, " or ".join(choice.value for choice in choices), text)
        return found

    def optional(self, key: str, read: Callable[[str], Value]) -> Value | None:
        """What ``read``, such as :meth:`count`, makes of the value under ``key``, or None for null."""
        return None if self.is_null(key) else read(key)

    def is_null(self, key: str) -> bool:
        """Whether ``key`` is there and holds null."""
        return self._value(key) is None

    def settings(self, kind: type[Settings]) -> Settings:
        """The mapping as a value of the dataclass ``kind``, whose fields are its keys.

        A field of numbers in ascending order stands in the file as ranges.
        """
        self.expect_keys([field.name for field in dataclasses.fields(kind)])
        return kind(**{field.name: self._field(field.name, field.type) for field in dataclasses.fields(kind)})

    def _field(self, key: str, kind: object) -> object:
        """The value under ``key`` for a field of type ``kind``."""
        read: dict[object, Callable[[str], object]] = {
            bool: self.flag,
            int: self.count,
            float: self.number,
            str: self.text,
            tuple[str, ...]: self.texts,
            tuple[int, ...]: lambda key: self.converted(key, parse_numbers),
        }
        if not isinstance(kind, UnionType):
            return read[kind](key)
        (wanted,) = set(get_args(kind)) - {NoneType}
        return self.optional(key, read[wanted])

    def nested(self, key: str) -> "FieldReader":
        """The mapping under ``key``."""
        return FieldReader(source=self.source, values=self._value(key), path=f"{self.path}{key}.", noun=self.noun)

    def items(self, key: str) -> Iterator["FieldReader"]:
        """The mappings in the list under ``key``."""
        values: list[object] = self._typed(key, list, "a list of mappings")
        for position, value in enumerate(values):
            path = f"{self.path}{key}[{position}]."
            yield FieldReader(source=self.source, values=value, path=path, noun=self.noun)

    def _mapping(self) -> Mapping[object, object]:
        if not isinstance(self.values, dict):
            where = self.path.removesuffix(".") or "the file"
            raise PlanError(
                f"{self.source}: {where} must be a mapping of names to values, not {_shown(self.values)}"
            )
        return self.values

    def _value(self, key: str) -> object:
        mapping = self._mapping()
        if key not in mapping:
            raise PlanError(f"{self.source}: {self.path}{key} is missing")
        return mapping[key]

    def _typed(self, key: str, wanted: type[Value], description: str) -> Value:
        value = self._value(key)
        if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
            raise self._wrong(key, description, value)
        return value

    def _wrong(self, key: str, description: str, found: object) -> PlanError:
        return PlanError(f"{self.source}: {self.path}{key} must be {description}, not {_shown(found)}")

    def _names(self, keys: Collection[str]) -> str:
        words = ", ".join(f"{self.path}{key:.60}" for key in keys)
        return f"{words} {'is' if len(keys) == 1 else 'are'}"


def _shown(value: object) -> str:
    """A value as the file words it where Python words it differently."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else f"{value!r:.60}"


def _is_encodable(text: str) -> bool:
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True
