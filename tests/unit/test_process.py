"""Tuples with named fields that need no other module: as those of typing."""

from typing import Any

import pytest

from poprun.launch.process import NamedTuple


class Point(NamedTuple):
    """A place, with a default."""

    x: int
    y: int = 7

    def total(self) -> Any:
        """The sum of its fields."""
        return self.x + self.y


def test_fields_have_names_and_defaults() -> None:
    """A tuple in every other respect: equal, hashed and unpacked as one."""
    point = Point(1, y=2)

    assert (point.x, point.y, point[0], point.total()) == (1, 2, 1, 3)
    assert tuple(Point(3)) == (3, 7)
    assert Point(x=1, y=2) == point == (1, 2)
    assert len({point, Point(1, 2), (1, 2)}) == 1
    assert repr(point) == "Point(x=1, y=2)"


@pytest.mark.parametrize(("values", "named"), [((), {}), ((1, 2, 3), {}), ((1,), {"x": 2}), ((1,), {"z": 2})])
def test_values_must_fit_the_fields(values: tuple[int, ...], named: dict[str, int]) -> None:
    """None missing, none too many, none twice."""
    with pytest.raises(TypeError, match="Point has the fields x, y"):
        Point(*values, **named)
