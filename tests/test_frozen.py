"""Frozen dataclasses that are made faster behave as those of the standard library."""

import copy
import dataclasses
import pickle
from typing import Any

import pytest

from bertscope.frozen import Record


class Fields:
    """A class with each kind of field."""

    number: int
    names: list[str] = dataclasses.field(default_factory=list)
    hidden: int = dataclasses.field(default=0, repr=False)
    ignored: int = dataclasses.field(default=0, compare=False)


_FIELDS = {name: value for name, value in vars(Fields).items() if name not in ("__dict__", "__weakref__")}
FAST: Any = type("Fields", (Record,), dict(_FIELDS))
STANDARD: Any = dataclasses.dataclass(frozen=True, kw_only=True)(type("Fields", (), dict(_FIELDS)))
VALUES = [{"number": 1}, {"number": 1, "ignored": 3}, {"number": 1, "hidden": 2}, {"number": 2, "names": ["a"]}]


@pytest.mark.parametrize("one", VALUES)
@pytest.mark.parametrize("other", VALUES)
def test_values_are_equal_and_have_the_same_text_and_hash_as_in_the_standard_library(one: Any, other: Any) -> None:
    assert (FAST(**one) == FAST(**other)) == (STANDARD(**one) == STANDARD(**other))
    assert repr(FAST(**one)) == repr(STANDARD(**one))
    assert dataclasses.asdict(dataclasses.replace(FAST(**one), number=7)) == {**dataclasses.asdict(FAST(**one)),
                                                                             "number": 7}  # fmt: skip
    with pytest.raises(TypeError, match="unhashable"):
        hash(FAST(**one))  # for the list, as in the standard library
    assert FAST(number=1) != STANDARD(number=1)


def test_a_value_cannot_be_changed() -> None:
    value = FAST(number=1)
    for change in (
        lambda: setattr(value, "number", 2),
        lambda: setattr(value, "new", 2),
        lambda: delattr(value, "number"),
    ):
        with pytest.raises(dataclasses.FrozenInstanceError):
            change()
    assert value == FAST(number=1)


class Point(Record, kw_only=False):
    """Two numbers, by their places."""

    x: int
    y: int = 0

    def __repr__(self) -> str:
        return "a point"


def test_a_value_is_copied_pickled_and_a_key_and_keeps_the_methods_of_its_class() -> None:
    value = Point(1, 2)
    assert pickle.loads(pickle.dumps(value)) == copy.deepcopy(value) == value
    assert {value: 3}[Point(1, 2)] == 3
    assert repr(value) == "a point"


def test_a_field_without_a_part_in_the_hash_may_be_a_dictionary():
    class Named(Record, kw_only=False):
        name: str
        settings: dict[str, int] = dataclasses.field(default_factory=dict, hash=False)

    assert hash(Named("a", {"x": 1})) == hash(Named("a", {}))
    assert Named("a", {"x": 1}) != Named("a", {})
