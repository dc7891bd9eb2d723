"""For tests of your own: `assert_params(model, 109_482_240)` on any torch module, with or without pytest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bertscope.torch_access import nn


def assert_params(model: nn.Module, expected: int, *, over_layers: bool = False, trainable: int | None = None) -> None:
    """Raise AssertionError unless the module has `expected` parameters, and of these `trainable` trainable ones.

    Every tensor counts once; with `over_layers` a tied one at every layer that uses it. The message says expected,
    got, the difference, and what each child of the module has. Raises TypeError for a number that is no integer.
    """
    __tracebackhide__ = True
    for number in (expected, 0 if trainable is None else trainable):
        if not isinstance(number, int) or isinstance(number, bool):
            raise TypeError(f"a number of parameters is an integer; got {number!r}")
    from bertscope.analyses.params.count import count

    report = count(model, by="group")
    totals = report.totals
    suffix = "layer_params" if over_layers else "params"
    found = totals.layer_params if over_layers else totals.distinct_params
    wanted = [("over layers" if over_layers else "distinct", expected, found)]
    if trainable is not None:
        wanted.append(("trainable", trainable, getattr(totals, f"trainable_{suffix}")))
    wrong = [
        f"{type(model).__name__}: {what} parameters: expected {number:,}, got {got:,}, difference {got - number:+,}"
        for what, number, got in wanted
        if number != got
    ]
    if wrong:
        raise AssertionError("\n".join([*wrong, *_parts(report)]))


def _parts(report: Any) -> list[str]:
    """What the module is made of, and what was not counted."""
    lines = [f"  {row.path or row.name}: {row.params:,} ({row.type})" for row in report.rows]
    if report.unknown:
        lines.append(f"  not counted, since not yet initialised: {', '.join(report.unknown)}")
    return lines
