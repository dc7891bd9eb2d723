"""Assertions for tests of users, with or without pytest: `assert_params(model, 109_482_240)` on any torch module."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import bertscope

if TYPE_CHECKING:
    from bertscope.sources.find import Model
    from bertscope.torch_access import nn


def assert_params(model: nn.Module, expected: int, *, over_layers: bool = False, trainable: int | None = None) -> None:
    """Raise AssertionError unless the module has `expected` parameters and, if given, `trainable` trainable ones.

    Every tensor counts once; with `over_layers`, a tied tensor counts at every layer that uses it. The message has
    the expected and the actual number, the difference, and the number of each child of the module. Raises TypeError
    for a number that is not an integer.
    """
    __tracebackhide__ = True
    _require_integers("parameters", expected, 0 if trainable is None else trainable)
    report = bertscope.count(model, by="group")
    totals = report.totals
    suffix = "layer_params" if over_layers else "params"
    counted = totals.layer_params if over_layers else totals.distinct_params
    compared = [("sum over layers" if over_layers else "unique parameters", expected, counted)]
    if trainable is not None:
        compared.append(("trainable parameters", trainable, getattr(totals, f"trainable_{suffix}")))
    if wrong := _differences(type(model).__name__, compared):
        parts = [f"  {row.path or row.name}: {row.params:,} ({row.type})" for row in report.rows]
        if report.unknown:
            parts.append(f"  not counted, since not yet initialised: {', '.join(report.unknown)}")
        raise AssertionError("\n".join(wrong + parts))


def assert_flops(model: Model, expected: int, inputs: Any = None, **settings: Any) -> None:
    """Raise AssertionError unless a run has `expected` FLOPs in its matrix products; a multiply-add counts as 2.

    The other arguments are as for `bertscope.flops`: the `inputs` or the `input_size` of a module, or `batch`, `seq`
    and `mode`.
    """
    __tracebackhide__ = True
    _require_integers("FLOPs", expected)
    report = bertscope.flops(model, inputs, **settings)
    if wrong := _differences(report.subject.name, [("matmul FLOPs", expected, report.total)]):
        raise AssertionError("\n".join(wrong))


def assert_fits(model: Model, gpu: str, inputs: Any = None, **settings: Any) -> None:
    """Raise AssertionError unless a step is certain to fit on a GPU, such as "t4", with the margin free.

    The other arguments are as for `bertscope.estimate`.
    """
    __tracebackhide__ = True
    report = bertscope.estimate(model, inputs, gpu=gpu, **settings)
    if any(variant.answer != "yes" for variant in report.variants):
        answer = str(report).partition("\n")[0]
        raise AssertionError(
            f"{report.subject.name}: expected a step that fits on {gpu}; got: {answer}\n  to update: a smaller batch, "
            "checkpointing or a larger GPU; bertscope.fit lists the batches that fit"
        )


def _require_integers(what: str, *numbers: object) -> None:
    for number in numbers:
        if not isinstance(number, int) or isinstance(number, bool):
            raise TypeError(f"a number of {what} is an integer; got {number!r}")


def _differences(name: str, compared: Iterable[tuple[str, int, int]]) -> list[str]:
    """Return a line for each number that differs, and how to update it."""
    return [
        f"{name}: {what}: expected {number:,}, got {got:,}, difference {got - number:+,} (to update: {got:_})"
        for what, number, got in compared
        if number != got
    ]
