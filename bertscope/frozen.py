"""Frozen records that take a quarter as long to make: with the dataclasses of the standard library, making a hundred
classes takes a quarter as long as a command that counts nothing.

`dataclasses` compiles six methods for each frozen class. Here only `__init__` is; the others are the same
functions for all classes. Equality, hash, text and `dataclasses.replace` are as in the standard library.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: object) -> Any:
        """Leave the class as it is: the decorator is for type checkers."""
        return lambda cls: cls


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field,))
class Record:
    """The base of frozen dataclasses: a subclass's annotations are its fields, which are passed by name.

    With `class Point(Record, kw_only=False)` they may be passed by position too.
    """

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def __init_subclass__(cls, *, kw_only: bool = True, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        dataclasses.dataclass(repr=False, eq=False, kw_only=kw_only)(cls)

    def __eq__(self, other: object) -> Any:
        return _values(self) == _values(other) if other.__class__ is self.__class__ else NotImplemented

    def __hash__(self) -> int:
        return hash(_values(self, "hash"))

    def __repr__(self) -> str:
        cls: Any = type(self)
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in _names(cls, "repr"))
        return f"{cls.__qualname__}({fields})"

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute that has no value yet, as `__init__` does once."""
        if name in self.__dict__ or name not in self.__dataclass_fields__:
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        self.__dict__[name] = value

    def __delattr__(self, name: str) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


@functools.cache
def _names(cls: Any, use: str) -> tuple[str, ...]:
    """Return the field names that are used for `compare`, `hash` or `repr`."""
    fields = dataclasses.fields(cls)
    return tuple(field.name for field in fields if (field.compare if (flag := getattr(field, use)) is None else flag))


def _values(record: Any, use: str = "compare") -> tuple[Any, ...]:
    return tuple(getattr(record, name) for name in _names(record.__class__, use))
