"""Assertions for user tests: `assert_params(model, 109_482_240)` on any torch module, with or without pytest."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bertscope.torch_access import nn


def assert_params(model: nn.Module, expected: int, *, over_layers: bool = False, trainable: int | None = None) -> None:
    """Raise AssertionError unless the module has `expected` parameters and, if given, `trainable` trainable ones.

    Every tensor counts once; with `over_layers`, a tied tensor counts at every layer that uses it. The message has
    the expected and the actual number, the difference, and the number of each child of the module. Raises TypeError
    for a number that is not an integer.
    """
    __tracebackhide__ = True
    for number in (expected, 0 if trainable is None else trainable):
        if not isinstance(number, int) or isinstance(number, bool):
            raise TypeError(f"a number of parameters is an integer; got {number!r}")
    from bertscope.analyses.params import count

    report = count(model, by="group")
    totals = report.totals
    suffix = "layer_params" if over_layers else "params"
    counted = totals.layer_params if over_layers else totals.distinct_params
    wanted = [("sum over layers" if over_layers else "unique parameters", expected, counted)]
    if trainable is not None:
        wanted.append(("trainable parameters", trainable, getattr(totals, f"trainable_{suffix}")))
    wrong = [
        f"{type(model).__name__}: {what}: expected {number:,}, got {got:,}, difference {got - number:+,}"
        for what, number, got in wanted
        if number != got
    ]
    if wrong:
        parts = [f"  {row.path or row.name}: {row.params:,} ({row.type})" for row in report.rows]
        if report.unknown:
            parts.append(f"  not counted, since not yet initialised: {', '.join(report.unknown)}")
        raise AssertionError("\n".join(wrong + parts))
