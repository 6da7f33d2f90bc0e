"""Processes: how poprun starts, finds and ends processes, with what a bare interpreter needs for this.

`NamedTuple` is for modules that shims and agents load, because `typing` takes longer to load than all of these.
"""

from __future__ import annotations

from _operator import itemgetter  # the part of operator in C

TYPE_CHECKING = False  # not imported from typing, which loads slowly
if TYPE_CHECKING:
    from typing import Any, ClassVar, Self


class NamedTuple(tuple):  # type: ignore[type-arg]  # noqa: SLOT001 - each annotated name of a subclass is a field
    """A tuple whose fields are the annotated names of its class, as `typing.NamedTuple` makes it."""

    _fields: ClassVar[tuple[str, ...]] = ()
    _defaults: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls) -> None:
        cls._fields = tuple(cls.__annotations__)
        cls._defaults = {field: getattr(cls, field) for field in cls._fields if hasattr(cls, field)}
        for position, field in enumerate(cls._fields):
            setattr(cls, field, property(itemgetter(position)))

    def __new__(cls, *values: Any, **named: Any) -> Self:
        """Make the tuple: ``values``, then ``named`` or default fields. Raise TypeError if fields are wrong."""
        missing = cls._fields[len(values) :]
        named_values = {**{field: cls._defaults[field] for field in missing if field in cls._defaults}, **named}
        if len(values) > len(cls._fields) or named_values.keys() != set(missing):
            raise TypeError(f"{cls.__name__} has the fields {', '.join(cls._fields)}")
        return super().__new__(cls, (*values, *(named_values[field] for field in missing)))

    def __repr__(self) -> str:
        fields = (f"{field}={value!r}" for field, value in zip(self._fields, self, strict=True))
        return f"{type(self).__name__}({', '.join(fields)})"
