"""Named values that setters change, until they are frozen: what `Options` and each of its parts is."""

import copy
from enum import Enum
from operator import index
from typing import Any, Self

from poptorch.errors import is_whole


class OptionValues:
    """Values by name, of the types of their defaults, which are also attributes; frozen, nothing can be set."""

    def __init__(self, **defaults: Any) -> None:
        self.__dict__.update(_defaults=defaults, _values=copy.deepcopy(defaults), _is_frozen=False)

    def set(self, **values: Any) -> Self:
        """Set options by their names; an AssertionError if there is no such option, or it takes another type."""
        for name, value in values.items():
            self.checkIsFrozen(name)
            if name not in self._defaults:
                raise AssertionError(f"Unknown option {name}: choose from {', '.join(sorted(self._defaults))}")
            self._values[name] = _checked(name, value, self._defaults[name])
        return self

    def createOrSet(self, **values: Any) -> Self:
        """Set options that need not have been there."""
        for name in values:
            self.checkIsFrozen(name)
            self._defaults.setdefault(name, None)
        return self.set(**values)

    def update(self, other: dict[str, Any]) -> Self:
        """Set all options of ``other`` by their names."""
        return self.set(**other)

    def deleteIfExists(self, *names: str) -> Self:
        """Take away values of those options that ``createOrSet`` made."""
        for name in names:
            self.checkIsFrozen(name)
            if self._defaults.get(name, "") is None:
                self._values.pop(name, None)
        return self

    def exists(self, name: str) -> bool:
        """Whether an option of that name has a value."""
        return name in self._values

    def toDict(self) -> dict[str, Any]:
        """All values by name, enumerations as their numbers."""
        return {name: plain(value) for name, value in self._values.items()}

    def checkIsFrozen(self, option: str | None = None) -> None:
        """Raise an AttributeError if the options are frozen."""
        if self._is_frozen:
            raise AttributeError(
                f"Can't modify frozen Options{f' ({option})' if option else ''}: they are in use; change a clone()"
            )

    def isFrozen(self) -> bool:
        """Whether the options are in use, so that nothing can be set."""
        return bool(self._is_frozen)

    def _freeze(self) -> None:
        self.__dict__["_is_frozen"] = True

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("_values", {})
        if name not in values:
            raise AttributeError(f"{type(self).__name__} has no option {name!r}")
        return values[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__":
            super().__setattr__(name, value)
        elif name in self._defaults:
            self.set(**{name: value})
        else:
            self.checkIsFrozen(name)
            super().__setattr__(name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo), _is_frozen=False)
        return made

    def __repr__(self) -> str:
        said = ", ".join(f"{name}={value}" for name, value in self._values.items())
        return f"{type(self).__name__.strip('_')}({said})"


def plain(value: Any) -> Any:
    """``value`` with numbers in place of enumerations."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, list | tuple | set) else value


def _checked(name: str, value: Any, default: Any) -> Any:
    """``value`` in the type of ``default``."""
    if isinstance(default, Enum):
        return one_of(name, value, type(default))
    if default is None or (isinstance(value, type(default)) and (type(value) is bool) == (type(default) is bool)):
        return value
    if type(default) is int and is_whole(value):
        return index(value)
    if type(default) is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    raise AssertionError(
        f"Unexpected type {type(value).__name__} for option {name}: {type(default).__name__} is expected"
    )


def at_least_one(name: str, value: Any) -> int:
    """``value`` as a count."""
    if not is_whole(value) or index(value) < 1:
        raise AssertionError(f"{name} must be a whole number greater than 0, and is {value!r}")
    return index(value)


def one_of(name: str, value: Any, kind: type[Enum]) -> Any:
    """``value``, a member of ``kind``."""
    if not isinstance(value, kind):
        members = [f"{kind.__name__}.{member.name}" for member in kind]
        raise AssertionError(f"{name} must be one of {', '.join(members)}, and is {value!r}")
    return value
