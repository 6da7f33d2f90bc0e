"""Dataclasses with shared methods behave like dataclasses of the standard library."""

import copy
import dataclasses
import pickle
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popdist.ground import values

Make = Callable[..., Any]


def _classes(dataclass: Make) -> tuple[Any, Any, Any]:
    """A class with fields by keyword, a subclass, and a class with positional fields, made by ``dataclass``."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Point:
        """A class with each kind of field."""

        x: int
        y: float = 0.5
        tags: tuple[str, ...] = dataclasses.field(default=(), metadata={"unit": "none"})
        known: Mapping[str, int] = dataclasses.field(default_factory=dict, repr=False)
        shared: ClassVar[int] = 3

        def __post_init__(self) -> None:
            if self.x < 0:
                raise ValueError(f"x must not be {self.x}")

        @property
        def twice(self) -> int:
            return 2 * self.x

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Named(Point):
        """A class with a field of its own and a text of its own."""

        name: str = "it"

        def __str__(self) -> str:
            return self.name

    @dataclass(frozen=True, slots=True)
    class Pair:
        """A class whose fields may be positional."""

        first: int
        second: int = 2

    return Point, Named, Pair


OURS, THEIRS = _classes(values.dataclass), _classes(dataclasses.dataclass)
Point, Named, Pair = OURS
for _class in OURS:  # pickle finds a class by its name
    _class.__qualname__ = _class.__name__

ARGUMENTS = st.fixed_dictionaries(
    {"x": st.integers(0, 9)},
    optional={"y": st.floats(allow_nan=False), "tags": st.lists(st.text(max_size=2)).map(tuple)},
)


def _text(value: Any) -> str:
    return repr(value).replace("_classes.<locals>.", "")


@given(first=ARGUMENTS, second=ARGUMENTS)
def test_objects_are_equal_hashed_and_shown_as_those_of_the_standard_library(
    first: dict[str, Any], second: dict[str, Any]
) -> None:
    """The two decorators agree on equality, text, fields, dicts and changed copies for any arguments."""
    for ours, theirs in zip(OURS[:2], THEIRS[:2], strict=True):
        one, other = ours(**first), ours(**second)
        assert (one == other) == (theirs(**first) == theirs(**second))
        assert one == ours(**first)
        assert one not in (theirs(**first), first)
        assert _text(one) == _text(theirs(**first))
        assert dataclasses.asdict(one) == dataclasses.asdict(theirs(**first))
        changed = dataclasses.replace(one, y=-1.0)
        assert _text(changed) == _text(dataclasses.replace(theirs(**first), y=-1.0))
        assert one.twice == theirs(**first).twice
        assert copy.deepcopy(one) == copy.copy(one) == pickle.loads(pickle.dumps(one)) == one  # noqa: S301 - our own
    assert str(Named(**first)) == "it"
    assert len({Pair(1), Pair(1, 2), Pair(first=1, second=2), Pair(2)}) == 2


def test_a_class_and_its_subclass_are_different() -> None:
    """An object of a subclass is unequal to an object of the class with the same values, as in the library."""
    for point, named, _ in (OURS, THEIRS):
        assert named(x=1) != point(x=1)
    assert [field.name for field in dataclasses.fields(Named)] == ["x", "y", "tags", "known", "name"]
    assert not hasattr(Named(x=1), "__dict__")
    assert Point(x=1).known is not Point(x=1).known


def test_positional_fields_match_a_pattern() -> None:
    """``match`` finds positional fields, and a field may be given by position or by name."""
    match Pair(3, second=4):
        case Pair(first, second):
            assert (first, second) == (3, 4)


WRONG: Mapping[str, tuple[Callable[[], object], type[Exception]]] = {
    f"{kind}: {name}": (make, error)
    for kind, (point, _, pair) in (("ours", OURS), ("the library's", THEIRS))
    for name, make, error in (
        ("a field is missing", partial(point), TypeError),
        ("a field by position", partial(point, 1), TypeError),
        ("an unknown field", partial(point, x=1, z=2), TypeError),
        ("a value that __post_init__ refuses", partial(point, x=-1), ValueError),
        ("too many positions", partial(pair, 1, 2, 3), TypeError),
        ("a field twice", partial(pair, 1, first=2), TypeError),
        ("a change", partial(setattr, point(x=1), "x", 2), dataclasses.FrozenInstanceError),
        ("a deletion", partial(delattr, point(x=1), "x"), dataclasses.FrozenInstanceError),
        ("a dict as a part of a key", partial(hash, point(x=1)), TypeError),
    )
}
"""A use of each decorator's classes that is wrong → its call, and the error."""


@pytest.mark.parametrize("name", WRONG)
def test_wrong_uses_raise_the_errors_of_the_standard_library(name: str) -> None:
    """Missing, unknown and doubled arguments, changes and hashes of dicts raise the same class of error."""
    make, error = WRONG[name]
    with pytest.raises(error):
        make()


def test_the_decorator_makes_no_class_that_can_be_changed() -> None:
    """A class without slots, or whose objects can be changed, is refused when it is defined."""
    with pytest.raises(ValueError, match="frozen and have slots"):
        values.dataclass(frozen=False, slots=True)
    with pytest.raises(ValueError, match="frozen and have slots"):
        values.dataclass(frozen=True, slots=False)
