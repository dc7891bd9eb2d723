"""Pickles of weights, read without unpickling: nothing is imported, called or constructed.

The standard library's disassembler (`pickletools`) yields the instructions; a small stack machine executes the two
dozen that a state dict needs. A global stays a name. The calls with which torch rebuilds a tensor become a
description of the tensor; any other call raises BadPickle.
"""

from __future__ import annotations

import pickletools
from io import BytesIO
from typing import Any

from bertscope.checkpoints.budget import Budget
from bertscope.checkpoints.files import is_size
from bertscope.checkpoints.rebuilt import BadPickle, Global, Table, called, storage_of

MAX_INSTRUCTIONS = 1 << 20  # a tensor takes about 40
_MARK = object()
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES = frozenset(
    [
        "INT",
        "BININT",
        "BININT1",
        "BININT2",
        "LONG",
        "LONG1",
        "LONG4",
        "FLOAT",
        "BINFLOAT",
        "STRING",
        "BINSTRING",
        "SHORT_BINSTRING",
        "UNICODE",
        "BINUNICODE",
        "SHORT_BINUNICODE",
        "BINUNICODE8",
    ]
)


def described(file: BytesIO, budget: Budget) -> Any:
    """Return the next pickle in the file as plain values, Tables and Tensors; raises BadPickle."""
    machine, count = _Machine(budget), 0
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(file)):
            if count > MAX_INSTRUCTIONS:
                raise BadPickle(f"more than {MAX_INSTRUCTIONS:,} instructions")
            machine.do(opcode.name, argument)
        budget.spend("instructions", count)
        return machine.stack.pop()
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise BadPickle(f"not the pickle of a state dict ({type(error).__name__}: {str(error)[:80]})") from None


class _Machine:
    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def do(self, name: str, argument: Any) -> None:
        """Execute one instruction."""
        if name in _VALUES:
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        else:
            step = getattr(self, f"_{name.lower()}", None)
            if step is None:
                raise BadPickle(f"the instruction {name}, which no state dict needs")
            step(argument)

    def _items(self) -> list[Any]:
        """Pop the values above the last mark, and the mark."""
        place = len(self.stack) - 1
        while self.stack[place] is not _MARK:
            place -= 1
            if place < 0:
                raise BadPickle("an instruction without its mark")
        items = self.stack[place + 1 :]
        del self.stack[place:]
        return items

    def _proto(self, argument: Any) -> None:
        if argument > 5:
            raise BadPickle(f"pickle protocol {argument}")

    def _frame(self, argument: Any) -> None:
        """Do nothing: the machine needs neither the length of a frame nor the end mark."""

    _stop = _frame

    def _mark(self, argument: Any) -> None:
        self.stack.append(_MARK)

    def _empty_dict(self, argument: Any) -> None:
        self.stack.append(Table())

    def _empty_list(self, argument: Any) -> None:
        self.stack.append([])

    def _empty_tuple(self, argument: Any) -> None:
        self.stack.append(())

    def _tuple(self, argument: Any) -> None:
        self.stack.append(tuple(self._items()))

    def _last(self, count: int) -> None:
        items = tuple(self.stack[-count:])
        if len(items) < count:
            raise BadPickle("a tuple of more than there is")
        self.stack[-count:] = [items]

    def _tuple1(self, argument: Any) -> None:
        self._last(1)

    def _tuple2(self, argument: Any) -> None:
        self._last(2)

    def _tuple3(self, argument: Any) -> None:
        self._last(3)

    def _append(self, argument: Any) -> None:
        item = self.stack.pop()
        self._top(list).append(item)

    def _appends(self, argument: Any) -> None:
        items = self._items()
        self._top(list).extend(items)

    def _setitem(self, argument: Any) -> None:
        self._set([self.stack.pop(-2), self.stack.pop()])

    def _setitems(self, argument: Any) -> None:
        self._set(self._items())

    def _set(self, items: list[Any]) -> None:
        table = self._top(Table)
        for key, value in zip(items[::2], items[1::2], strict=True):
            # The hash of nested tuples takes exponential time; that of a long integer takes time linear in its length.
            if not isinstance(key, str) and not is_size(key):
                raise BadPickle(f"a key that is a {type(key).__name__}")
            table[key] = value

    def _top(self, kind: type) -> Any:
        if not isinstance(self.stack[-1], kind):
            raise BadPickle(f"an instruction for a {kind.__name__.lower()} on a {type(self.stack[-1]).__name__}")
        return self.stack[-1]

    def _put(self, argument: Any) -> None:
        self.memo[argument] = self.stack[-1]

    _binput = _long_binput = _put

    def _memoize(self, argument: Any) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def _get(self, argument: Any) -> None:
        self.stack.append(self.memo[argument])

    _binget = _long_binget = _get

    def _global(self, argument: Any) -> None:
        self.stack.append(Global(*argument.split(" ", 1)))

    def _stack_global(self, argument: Any) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if not (isinstance(name, str) and isinstance(module, str)):
            raise BadPickle("a global without a name")
        self.stack.append(Global(module, name))

    def _binpersid(self, argument: Any) -> None:
        self.stack.append(storage_of(self.stack.pop()))

    def _build(self, argument: Any) -> None:
        self.stack.pop()  # attributes of a state dict: its metadata
        self._top(Table)

    def _reduce(self, argument: Any) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, Global) or not isinstance(arguments, tuple):
            raise BadPickle("a call of what is no name")
        self.budget.spend("copied elements", sum(len(item) for item in arguments if isinstance(item, (list, tuple))))
        self.stack.append(called(function, arguments))
