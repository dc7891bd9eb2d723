"""`bertscope count`."""

from __future__ import annotations

import re
import sys
from typing import Annotated, Literal

import typer

from bertscope.commands import options
from bertscope.commands.building import build_model, traced_shapes
from bertscope.commands.output import show
from bertscope.errors import SelectionError
from bertscope.render import count as renderer
from bertscope.reports import Totals
from bertscope.units import count_text, signed_text

EPILOG = """\b
examples:
  bertscope count bert-large-zh
  bertscope count bert-base-uncased --by group
  bertscope count bert-base-uncased --by parameter
  bertscope count bert-base-cased --architecture BertForSequenceClassification --freeze embeddings
  bertscope count bert-base-uncased --shapes --batch 8 --seq 512
  bertscope count bert-large-zh --expect 324,472,832
  bertscope count ./config.json --format json --output count.json
"""


def count(
    model: options.Model = options.DEFAULT_MODEL,
    by: Annotated[Literal["group", "layer", "module", "parameter"], typer.Option(help="What one row is.")] = "layer",
    architecture: options.Architecture = None,
    attention: options.Attention = None,
    pooler: options.Pooler = None,
    freeze: options.Freeze = None,
    dtype: Annotated[Literal["fp32", "bf16", "fp16"], typer.Option(help="The type that the bytes are for.")] = "fp32",
    unfold: Annotated[
        bool | None,
        typer.Option(
            "--unfold/--fold", help="Show equal layers one by one, or as one row; by parameter they are unfolded."
        ),
    ] = None,
    sort: Annotated[Literal["model", "params", "path"], typer.Option(help="The order of the rows.")] = "model",
    expect: Annotated[
        str | None,
        typer.Option(
            metavar="N", help="Exit 1 with the difference unless the model has N parameters, distinct or over layers."
        ),
    ] = None,
    shapes: options.Shapes = False,
    batch: options.Batch = 1,
    seq: options.Seq = 128,
    download: options.Download = False,
    fmt: options.Format = "table",
    output: options.Output = None,
) -> None:
    """Count the parameters of a BERT, layer by layer.

    Equal layers are one row with the number of copies; "each" is one of them. Tied tensors are counted
    under both conventions: distinct (every tensor once) and over layers (at every layer that uses them).
    """
    expected = None if expect is None else _expected(expect)
    source, built = build_model(model, architecture, attention, pooler, freeze, download=download)
    from bertscope.analyses.count import count as analyse

    folded = None if unfold is None else not unfold
    found = traced_shapes(source, built, shapes, batch, seq)
    report = analyse(built, by=by, name=source.name, dtype=dtype, folded=folded, sort=sort, shapes=found)
    show(report, renderer, fmt, output)
    if expected is not None:
        _judge(expected, report.totals)


def _expected(text: str) -> int:
    if not re.fullmatch(r"\d{1,30}|\d{1,3}(,\d{3}){1,9}|\d{1,3}(_\d{3}){1,9}", text.strip(), re.ASCII):
        raise SelectionError(
            f"--expect takes a number of parameters such as 109482240 or 109,482,240; got {text[:40]!r}"
        )
    return int(re.sub(r"[,_]", "", text))


def _judge(expected: int, totals: Totals) -> None:
    for name, got in (("distinct", totals.distinct_params), ("over layers", totals.layer_params)):
        if got == expected:
            print(f"as expected: {count_text(got)} parameters, {name}", file=sys.stderr)
            return
    print(
        f"not as expected: expected {count_text(expected)}, got {count_text(totals.distinct_params)} distinct "
        f"(difference {signed_text(totals.distinct_params - expected)}), {count_text(totals.layer_params)} over layers "
        f"({signed_text(totals.layer_params - expected)})",
        file=sys.stderr,
    )
    raise typer.Exit(1)
