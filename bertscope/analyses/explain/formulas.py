"""Formulas of `explain`: integers, names, +, -, * and exact division, as text and with their value."""

import ast
import operator
import re
from collections.abc import Callable, Mapping

from bertscope.reports.explain import Formula

_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv,
}  # fmt: skip
_MAX_FORMULA = 500  # characters; the longest has about 150
_NAME = re.compile(r"[A-Za-z_]\w*")


def formula(symbols: str, values: Mapping[str, object]) -> Formula:
    """Return a formula with its numbers and value; `values` has an integer or a product as text for each name."""
    if values.get("groups") == 1:
        symbols = symbols.replace(" / groups", "")
    numbers = _NAME.sub(lambda name: str(values[name[0]]), symbols)
    shown, shown_numbers = (text.replace(" * ", " x ") for text in (symbols, numbers))
    terms = tuple(value_of(term) for term in re.split(r"(?<=\)) \+ (?=\()", numbers)) if ") + (" in numbers else ()
    return Formula(symbols=shown, numbers=shown_numbers, value=value_of(numbers), terms=terms)


def value_of(numbers: str) -> int:
    """Return the value of a formula of integers, +, -, *, / and parentheses; raise ValueError for any other text."""
    if len(numbers) > _MAX_FORMULA:
        raise ValueError(f"a formula has at most {_MAX_FORMULA} characters; got {len(numbers)}")
    return _computed(ast.parse(numbers, mode="eval").body)


def _computed(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_computed(node.left), _computed(node.right))
    raise ValueError(f"a formula holds integers, +, -, * and parentheses; got {ast.unparse(node)[:40]!r}")
