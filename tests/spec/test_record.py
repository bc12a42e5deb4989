"""Records: fields, defaults, equality, and that a record cannot be changed."""

from __future__ import annotations

import pytest

from runner.record import as_dict, field, fields, mutable_record, record, replace


@record
class Point:
    """Two numbers and what follows from them."""

    x: int
    y: int = 2
    tags: list[str] = field(default_factory=list)
    secret: str = field(default="s", repr=False, compare=False)
    total: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", self.x + self.y)


@mutable_record
class Counter:
    """A number that grows."""

    count: int = 0


def test_fields_come_by_position_by_name_and_from_defaults() -> None:
    """A default factory gives each record a value of its own."""
    first, second = Point(1), Point(x=1, y=2)

    assert (first.x, first.y, first.total) == (1, 2, 3)
    assert first.tags is not second.tags
    assert as_dict(Counter(3)) == {"count": 3}
    assert as_dict(Counter(Counter(3))) == {"count": {"count": 3}}  # type: ignore[arg-type]  # a record in a record
    assert [each.name for each in fields(Point)] == ["x", "y", "tags", "secret", "total"]


@pytest.mark.parametrize(
    ("values", "named", "says"),
    [
        ((), {}, "needs x"),
        ((1, 2, [], "a", 5), {}, "takes 4"),
        ((1,), {"x": 2}, "x twice"),
        ((1,), {"z": 2}, "no z"),
        ((1,), {"total": 2}, "no total"),
    ],
)
def test_a_wrong_constructor_call_is_a_type_error(
    values: tuple[object, ...], named: dict[str, object], says: str
) -> None:
    """As with any function."""
    with pytest.raises(TypeError, match=says):
        Point(*values, **named)  # type: ignore[arg-type]  # that is the point


def test_records_are_equal_by_class_and_compared_fields() -> None:
    """A field left out of the comparison does not count, in hashes neither."""
    assert Point(1, secret="a") == Point(1, secret="b")
    assert Point(1) != Point(2)
    assert Point(1) != object()
    assert "secret" not in repr(Point(1))
    assert repr(Counter(4)) == "Counter(count=4)"


def test_a_record_cannot_be_changed_and_a_mutable_one_can() -> None:
    """Neither takes a field it does not have."""
    point, counter = Point(1), Counter()

    with pytest.raises(AttributeError, match="cannot be changed"):
        point.x = 5  # type: ignore[misc]  # that is the point
    counter.count += 1
    assert counter.count == 1
    with pytest.raises(AttributeError):
        counter.other = 1  # type: ignore[attr-defined]  # that is the point


def test_replace_makes_a_changed_copy() -> None:
    """What follows from the fields is made anew."""
    assert replace(Point(1), y=5).total == 6
