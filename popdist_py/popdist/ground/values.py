"""The decorator ``dataclass`` for the frozen dataclasses that poprun loads at each start.

The standard library's decorator compiles six methods for each frozen dataclass, and poprun needs about fifty
dataclasses for a start. The decorator here makes dataclasses, too, but all of them share one set of methods, which
read the fields when they are called. A dataclass of which a program makes objects in every step, such as
`ReplicaLayout`, stays with the standard library's decorator, because compiled methods are faster.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import MISSING
from typing import TYPE_CHECKING, Any, NoReturn

__all__ = ["dataclass"]


def _init(self: Any, /, *positional: Any, **values: Any) -> None:
    """Set each field of ``self`` to its argument or its default; raise TypeError if the arguments do not fit."""
    names = self.__match_args__
    if len(positional) > len(names) or not values.keys().isdisjoint(names[: len(positional)]):
        raise TypeError(f"{type(self).__name__} takes {len(names)} positional arguments, each field once")
    values.update(zip(names, positional, strict=False))
    for field in dataclasses.fields(self):
        name = field.name
        if name in values:
            value = values.pop(name)
        elif field.default is not MISSING:
            value = field.default
        elif field.default_factory is not MISSING:
            value = field.default_factory()
        else:
            raise TypeError(f"{type(self).__name__} needs a value for {name}")
        object.__setattr__(self, name, value)
    if values:
        raise TypeError(f"{type(self).__name__} has no field {', '.join(values)}")
    if hasattr(self, "__post_init__"):
        self.__post_init__()


def _values(self: Any) -> tuple[Any, ...]:
    """Return the values of the fields of ``self``, in the order of the fields."""
    return tuple(getattr(self, field.name) for field in dataclasses.fields(self))


def _eq(self: Any, other: object) -> bool:
    return _values(self) == _values(other) if type(self) is type(other) else NotImplemented


def _hash(self: Any) -> int:
    return hash(_values(self))


def _repr(self: Any) -> str:
    shown = (f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self) if field.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _refuse(self: Any, name: str, _value: object = None, /) -> NoReturn:
    """Raise FrozenInstanceError, because nobody may set or delete the field ``name`` of ``self``."""
    raise dataclasses.FrozenInstanceError(f"cannot change field {name!r} of {type(self).__name__}")


def _setstate(self: Any, state: tuple[Any, ...]) -> None:
    """Set the fields of ``self``, which pickle or copy made, to the values ``state``."""
    for field, value in zip(dataclasses.fields(self), state, strict=True):
        object.__setattr__(self, field.name, value)


_METHODS = {
    "__init__": _init,
    "__eq__": _eq,
    "__hash__": _hash,
    "__repr__": _repr,
    "__setattr__": _refuse,
    "__delattr__": _refuse,
    "__getstate__": _values,
    "__setstate__": _setstate,
}

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(*, frozen: bool, slots: bool, kw_only: bool = False) -> Callable[[type], type]:
        """Return the decorator that makes a dataclass like ``dataclasses.dataclass`` with the same arguments.

        The decorator keeps the methods that a class has itself. Raises ValueError unless ``frozen`` and ``slots``.
        """
        if not (frozen and slots):
            raise ValueError("a dataclass with shared methods must be frozen and have slots")

        def decorate(cls: type) -> type:
            for name, method in _METHODS.items():
                if name not in vars(cls):
                    setattr(cls, name, method)
            compiled_methods = {"init": False, "repr": False, "eq": False}
            return dataclasses.dataclass(slots=True, kw_only=kw_only, **compiled_methods)(cls)

        return decorate
