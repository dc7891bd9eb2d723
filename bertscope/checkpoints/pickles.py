"""Pickles of weights, read without unpickling: nothing is imported, called or constructed.

The standard library's disassembler (`pickletools`) yields the instructions; a small stack machine executes the two
dozen that a state dict needs. A global stays a name. The calls with which torch rebuilds a tensor become a
description of the tensor; any other call raises BadPickle.
"""

import pickletools
from collections.abc import Callable
from io import BytesIO
from typing import Any

from bertscope.checkpoints.files import Budget, is_size
from bertscope.checkpoints.rebuilt import BadPickle, Global, Table, called, storage_of

MAX_INSTRUCTIONS = 1 << 20  # a tensor takes about 40
_MARK = object()
# Instructions that push their argument.
_VALUES = {
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING", "BINSTRING",
    "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
}  # fmt: skip
_NEW: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False,
    "MARK": lambda: _MARK, "EMPTY_DICT": Table, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple,
}  # fmt: skip


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
        stack = self.stack
        match name:
            case "PROTO":
                if argument > 5:
                    raise BadPickle(f"pickle protocol {argument}")
            case "FRAME" | "STOP":
                pass  # neither the length of a frame nor the end mark is needed
            case _ if name in _VALUES:
                stack.append(argument)
            case _ if name in _NEW:
                stack.append(_NEW[name]())
            case "TUPLE":
                stack.append(tuple(self._items()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                self._collect(int(name[-1]))
            case "APPEND":
                item = stack.pop()
                self._top(list).append(item)
            case "APPENDS":
                items = self._items()
                self._top(list).extend(items)
            case "SETITEM":
                self._set([stack.pop(-2), stack.pop()])
            case "SETITEMS":
                self._set(self._items())
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                self.memo[argument] = stack[-1]
            case "MEMOIZE":
                self.memo[len(self.memo)] = stack[-1]
            case "GET" | "BINGET" | "LONG_BINGET":
                stack.append(self.memo[argument])
            case "GLOBAL":
                stack.append(Global(*argument.split(" ", 1)))
            case "STACK_GLOBAL":
                function, module = stack.pop(), stack.pop()
                if not (isinstance(function, str) and isinstance(module, str)):
                    raise BadPickle("a global without a name")
                stack.append(Global(module, function))
            case "BINPERSID":
                stack.append(storage_of(stack.pop()))
            case "BUILD":
                stack.pop()  # attributes of a state dict: its metadata
                self._top(Table)
            case "REDUCE":
                self._call()
            case _:
                raise BadPickle(f"the instruction {name}, which no state dict needs")

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

    def _collect(self, count: int) -> None:
        """Replace the last values by a tuple of them."""
        items = tuple(self.stack[-count:])
        if len(items) < count:
            raise BadPickle("a tuple of more than there is")
        self.stack[-count:] = [items]

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

    def _call(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, Global) or not isinstance(arguments, tuple):
            raise BadPickle("a call of what is no name")
        self.budget.spend("copied elements", sum(len(item) for item in arguments if isinstance(item, (list, tuple))))
        self.stack.append(called(function, arguments))
