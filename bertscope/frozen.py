"""Dataclasses that take a quarter as long to make: with the standard library's frozen ones, making a hundred
classes takes a quarter as long as a command that counts nothing.

`dataclasses` compiles six methods for each frozen class. Here only `__init__` is; the others are the same
functions for all classes. Equality, hash, text and `dataclasses.replace` are as in the standard library.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, TypeVar

Class = TypeVar("Class", bound=type)

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(
        cls: Class | None = None, /, *, frozen: bool, kw_only: bool = False, repr: bool = True
    ) -> Class | Callable[[Class], Class]:
        """Return a class as `dataclasses.dataclass` does; `frozen` is always True."""
        if cls is None:
            return lambda cls: dataclass(cls, frozen=frozen, kw_only=kw_only, repr=repr)
        record = dataclasses.dataclass(repr=False, eq=False, kw_only=kw_only)(cls)
        for method in (_eq, _hash, _setattr, _delattr, *([_repr] if repr else [])):
            name = f"_{method.__name__}__"
            if name not in cls.__dict__:
                setattr(record, name, method)
        return record


@functools.cache
def _names(cls: Hashable, use: str) -> tuple[str, ...]:
    """Return the field names that are used for `compare`, `hash` or `repr`."""
    of_class: Any = cls
    fields = dataclasses.fields(of_class)
    return tuple(field.name for field in fields if (field.compare if (flag := getattr(field, use)) is None else flag))


def _values(value: Any, use: str = "compare") -> tuple[Any, ...]:
    cls: Hashable = value.__class__
    return tuple(getattr(value, name) for name in _names(cls, use))


def _eq(self: Any, other: object) -> Any:
    return _values(self) == _values(other) if other.__class__ is self.__class__ else NotImplemented


def _hash(self: Any) -> int:
    return hash(_values(self, "hash"))


def _repr(self: Any) -> str:
    cls: Hashable = self.__class__
    fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in _names(cls, "repr"))
    return f"{type(self).__qualname__}({fields})"


def _setattr(self: Any, name: str, value: object) -> None:
    """Set an attribute that has no value yet, as `__init__` does once."""
    if name in self.__dict__ or name not in self.__dataclass_fields__:
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
    self.__dict__[name] = value


def _delattr(self: Any, name: str) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
