"""`bertscope count`."""

import re
import sys
from functools import partial
from typing import Annotated, Literal

import typer

from bertscope.commands.model_options import Freeze, ModelOptions, ModelsOptions, ShapeOptions
from bertscope.commands.output import DetailedOutputOptions, note
from bertscope.commands.registry import OneOf, command
from bertscope.commands.tree import StyleOptions, check_style, show_as_torchinfo
from bertscope.errors import SelectionError
from bertscope.frozen import dataclass
from bertscope.reports.params import CountReport
from bertscope.sources.find import stored_alone, weights_path
from bertscope.units import FP32, PRECISIONS, count_text, signed_text

EXAMPLES = """
  bertscope count bert-large-zh
  bertscope count bert-base-uncased --by group
  bertscope count bert-base-uncased --by parameter
  bertscope count bert-tiny bert-base-uncased bert-large-uncased --format csv
  bertscope count bert-base-uncased bert-large-uncased --by group
  bertscope count bert-base-cased --architecture BertForSequenceClassification --freeze embeddings
  bertscope count bert-base-uncased -a BertForSequenceClassification --lora r=8,target=query+value,save=classifier
  bertscope count bert-base-uncased --shapes --batch 8 --seq 512
  bertscope count bert-base-cased --style torchinfo
  bertscope count bert-base-uncased -a BertForPreTraining --untie
  bertscope count bert-large-zh --expect 324,472,832
  bertscope count ./config.json --format json --output count.json
  bertscope count ./my-bert/model.safetensors --by parameter
"""
_OF_ONE = ("module", "parameter")  # units whose names differ between models


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """Options for the rows of the table."""

    by: Annotated[Literal["group", "layer", "module", "parameter"], typer.Option(help="The unit of a row.")] = "layer"
    dtype: Annotated[str, OneOf(PRECISIONS), typer.Option(help="The dtype for the bytes.")] = FP32.name
    unfold: Annotated[
        bool | None,
        typer.Option(
            "--unfold/--fold",
            help="Show equal layers one by one, or as one row; default: as one row, except with --by parameter.",
        ),
    ] = None
    sort: Annotated[Literal["model", "params", "path"], typer.Option(help="The order of the rows.")] = "model"


@command(examples=EXAMPLES)
def count(
    *,
    rows: RowOptions,
    model: ModelsOptions,
    freeze: Freeze = None,
    untie: Annotated[
        bool, typer.Option("--untie", help="Count a shared tensor at each of its names, as separate tensors.")
    ] = False,
    layout: StyleOptions,
    expect: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Exit 1 with the difference unless the model has N unique parameters or a sum over layers of N.",
        ),
    ] = None,
    run: ShapeOptions,
    stored: Annotated[
        bool, typer.Option("--stored", help="Count the contents of MODEL's checkpoint instead of the model.")
    ] = False,
    out: DetailedOutputOptions,
) -> int:
    """Count the parameters of a model or of a checkpoint, layer by layer.

    Equal layers are one row with the number of copies; "per layer" is one of them. Tied tensors are
    counted in two ways: unique parameters (every tensor once) and the sum over layers (at every layer
    that uses them). --untie counts them at every name, as if nothing were shared. Several models are one
    row each, with --by group one column each.
    """
    model.only_one({"--expect": expect is not None, "--stored": stored, f"--by {rows.by}": rows.by in _OF_ONE})
    is_run = layout.needs_run()
    if layout.style == "torchinfo":
        model.only_one({"--style torchinfo": True})
        given = {"--stored": stored, "--untie": untie, "--expect": expect is not None}
        check_style(out, given | {f"--by {rows.by}": rows.by != "layer"})
        source, built = model.built(freeze)
        show_as_torchinfo(source, built, None, layout.chosen(), out, run.traced(source, is_needed=is_run))
        return 0
    expected = None if expect is None else _expected(expect)
    checkpoint = None if stored or model.others else stored_alone(model.model)
    if checkpoint is not None or stored:
        from bertscope.checkpoints.reading import read_checkpoint, stored_report

        if untie:
            raise SelectionError("--untie is for models; the totals of a checkpoint include one under all names")
        checkpoint = checkpoint or read_checkpoint(weights_path(model.model, download=model.download))
        report = stored_report(checkpoint, by=rows.by)
        out.show(report)
        return _judge(expected, report.stored.distinct_params, report.stored.stored_params, "under all names")
    reports = model.each(partial(_report, rows=rows, run=run, freeze=freeze, untie=untie))
    out.show_all(reports)
    totals = reports[0].totals
    return _judge(expected, totals.distinct_params, totals.layer_params, "sum over layers")


def _report(
    one: ModelOptions, *, rows: RowOptions, run: ShapeOptions, freeze: list[str] | None, untie: bool
) -> CountReport:
    """Return the report of one model."""
    source, built = one.built(freeze)
    from bertscope.analyses.modules.totals import untie as separate
    from bertscope.analyses.params import count as analyse

    found = run.traced(source)
    if untie:
        note(f"{source.name}: counted without ties, which adds {count_text(separate(built))} parameters")
    folded = None if rows.unfold is None else not rows.unfold
    return analyse(built, by=rows.by, name=source.name, dtype=rows.dtype, folded=folded, sort=rows.sort, shapes=found)


def _expected(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,30}|[0-9]{1,3}(,[0-9]{3}){1,9}|[0-9]{1,3}(_[0-9]{3}){1,9}", text.strip(), re.ASCII):
        raise SelectionError(
            f"--expect takes a number of parameters such as 109482240 or 109,482,240; got {text[:40]!r}"
        )
    return int(re.sub(r"[,_]", "", text))


def _judge(expected: int | None, unique: int, other: int, convention: str) -> int:
    """Compare both counts with the expected one, if there is one; return the exit code."""
    if expected is None:
        return 0
    for name, got in (("unique parameters", unique), (convention, other)):
        if got == expected:
            print(f"as expected: {name} {count_text(got)}", file=sys.stderr)
            return 0
    text = (
        f"not as expected: expected {count_text(expected)}, got {count_text(unique)} unique parameters (difference "
        f"{signed_text(unique - expected)}), {convention} {count_text(other)} ({signed_text(other - expected)})"
    )
    print(text, file=sys.stderr)
    return 1
