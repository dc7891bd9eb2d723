"""The commands about a model: count, flops, tree, explain, diagram, report, diff."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import bertscope
from bertscope.commands.call import CommandLine, note, print_notes, with_progress
from bertscope.config import MAX_BUILT_LAYERS
from bertscope.errors import MissingExtraError, SelectionError
from bertscope.settings.rows import is_code
from bertscope.settings.run_config import RunConfig
from bertscope.sources.find import stored_alone, weights_path
from bertscope.units import count_text

if TYPE_CHECKING:
    from bertscope.checkpoints.reading import Checkpoint
    from bertscope.reports.modules import CountReport, FlopsReport

_STEP_BY_STEP = "eager"  # the kernel of which each step is a tensor


def count(call: CommandLine) -> int:
    """Count parameters in models or a checkpoint."""
    if call.style == "torchinfo":
        _show_as_torchinfo(call, None)
        return 0
    expected = None if call.expect is None else _expected(call.expect)
    checkpoint = None if call.stored or call.others else stored_alone(call.model)
    if checkpoint is not None or call.stored:
        if call.untie:
            raise SelectionError("--untie is for models; the totals of a checkpoint include one under all names")
        report: Any = bertscope.count(checkpoint or _weights(call), by=call.by)
        call.show(report)
        return _judge(expected, report.stored.distinct_params, report.stored.stored_params, "under all names")

    def report_of(model: str) -> CountReport:
        source, built = call.built(model)
        shapes = call.traced(source)
        if call.untie:
            from bertscope.tracing.module_tree import untie

            note(f"{source.name}: counted without ties, which adds {count_text(untie(built))} parameters")
        folded = None if call.unfold is None else not call.unfold
        return bertscope.count(
            built, by=call.by, name=source.name, dtype=call.dtype, folded=folded, sort=call.sort, shapes=shapes
        )

    reports = call.each(report_of)
    call.show_all(*reports, has_notes=False)
    totals = reports[0].totals
    return _judge(expected, totals.distinct_params, totals.layer_params, "sum over layers")


def _weights(call: CommandLine, model: str | None = None) -> Checkpoint:
    return bertscope.read_checkpoint(weights_path(call.model if model is None else model, download=call.download))


def _expected(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,30}|[0-9]{1,3}(,[0-9]{3}){1,9}|[0-9]{1,3}(_[0-9]{3}){1,9}", text.strip(), re.ASCII):
        raise SelectionError(f"--expect takes a number of parameters, 109482240 or 109,482,240; got {text[:40]!r}")
    return int(re.sub(r"[,_]", "", text))


def _judge(expected: int | None, unique: int, other: int, convention: str) -> int:
    if expected is None:
        return 0
    for name, got in (("unique parameters", unique), (convention, other)):
        if got == expected:
            print(f"as expected: {name} {count_text(got)}", file=sys.stderr)
            return 0
    text = (
        f"not as expected: expected {expected:,}, got {unique:,} unique parameters (difference "
        f"{unique - expected:+,}), {convention} {other:,} ({other - expected:+,})"
    )
    print(text, file=sys.stderr)
    return 1


def tree(call: CommandLine) -> None:
    """Show the module tree as a table, in torchinfo's or torch's layout, or on the screen."""
    if call.interactive:
        check_interactive()
    named = {"--freeze": bool(call.freeze), "--shapes": call.shapes, "--unfold": call.unfold}
    named = {f"--style {call.style}": call.style != "bertscope", **named}
    if checkpoint := stored_alone(call.model, beside_config=False, **named):
        if call.interactive:
            _browse(bertscope.tree(checkpoint), bertscope.count(checkpoint), call.depth)
        else:
            call.show(bertscope.tree(checkpoint, depth=call.depth))
    elif call.style == "torch":
        _show_as_torch(call)
    elif call.style == "torchinfo":
        _show_as_torchinfo(call, call.depth)
    else:
        source, built = call.built()
        arguments: dict[str, Any] = {"name": source.name, "folded": not call.unfold, "shapes": call.traced(source)}
        if call.interactive:
            _browse(bertscope.tree(built, **arguments), bertscope.count(built, by="parameter", **arguments), call.depth)
        else:
            call.show(bertscope.tree(built, depth=call.depth, **arguments))


def _browse(*reports: Any) -> None:
    from bertscope.views.interactive import browse

    browse(*reports)


def check_interactive() -> None:
    """Raise an error if the tree cannot be browsed: no Textual, no terminal."""
    if find_spec("textual") is None:
        raise MissingExtraError("--interactive", "interactive")
    if os.environ.get("TERM") == "dumb" or not all(map(os.isatty, range(3))):
        raise SelectionError("--interactive needs a terminal; 'bertscope tree' without it writes to a pipe")


def _show_as_torchinfo(call: CommandLine, depth: int | None) -> None:
    """Show a model's tree in torchinfo's layout, and in a note the unique parameters if its total differs."""
    columns = None if call.columns is None else [name.strip() for name in call.columns.split(",")]
    source, built = call.built()
    shapes = call.traced(source)
    if source.layers > MAX_BUILT_LAYERS:
        raise SelectionError(f"--style torchinfo has a line for each of {source.layers:,} layers; leave it out")
    report = bertscope.tree(built, name=source.name, folded=False, shapes=shapes)
    call.show(report, view="torchinfo", columns=columns, depth=depth)
    totals = report.totals
    if totals.distinct_params != totals.layer_params:
        note(
            f"torchinfo counts a tied tensor at each use; the model has {totals.distinct_params:,} "
            f"unique parameters, {totals.param_bytes / 1e6:.2f} MB"
        )


def _show_as_torch(call: CommandLine) -> None:
    printed = getattr(call.source(), "printed_attention", None)
    call.freeze = None
    source, built = call.built(attention=call.attention or printed)
    from bertscope.reports.tool import PrintReport
    from bertscope.tracing.module_tree import subject

    text = f"{built}\n"
    if source.layers > MAX_BUILT_LAYERS:  # two are built
        text = text.replace("(0-1): 2 x", f"(0-{source.layers - 1}): {source.layers} x", 1)
    report = PrintReport(subject=subject(built, source.name), text=text)
    call.show(report, fmt="text" if call.fmt == "table" else "")


def flops(call: CommandLine) -> None:
    """Count FLOPs by module, operator or convention."""

    def report_of(model: str) -> FlopsReport:
        report = bertscope.flops(call.about(call.source(model)))
        rows = tuple(row for row in report.rows if call.depth is None or row.depth <= call.depth)
        return replace(report, rows=rows)

    reports = call.each(report_of)
    if call.convention is not None and call.fmt == "table":
        if call.convention not in {item.name for item in reports[0].conventions}:
            raise SelectionError(f"the convention {call.convention} does not apply to this model in this mode")
        call.show(reports[0], view="convention", name=call.convention)
    else:
        view = {"view": "operators"} if call.operators and not call.others else {}
        call.show_all(*reports, has_notes=False, **view)


def explain(call: CommandLine) -> None:
    """Explain a model step by step."""
    source = call.source()
    if call.naming:
        source.require("--naming")
    report = bertscope.explain(source, call.path, batch=call.batch, seq=call.seq, inputs=call.inputs or ())
    call.show(report, naming=call.naming, lang=call.lang)


def diagram(call: CommandLine) -> None:
    """Draw one diagram."""
    if call.path in ("class", "classes", "tree", "forward"):
        raise SelectionError(f"PATH is a module; a kind is an option: --kind {call.path.replace('classes', 'class')}")
    original = call.source(attention=None)
    for option in ("cross_attention", "position_embedding", "attention"):
        if getattr(call, option):
            original.require(f"--{option.replace('_', '-')}")
    changes: dict[str, object] = {"attn_implementation": call.attention or _STEP_BY_STEP}
    changes |= {"is_decoder": True, "add_cross_attention": True} if call.cross_attention else {}
    changes |= {"position_embedding_type": call.position_embedding} if call.position_embedding else {}
    source = original.with_fields(changes)
    kind = call.kind or ("class" if call.class_name or source.bert_config else "tree")
    inputs = {name: getattr(call, name) for name in ("batch", "seq", "cache", "mask", "head_mask")}
    with source.confined():
        report = bertscope.diagram(
            source, kind, call.path, depth=call.depth, direction=call.direction, around=call.class_name,
            implementation=call.implementation, nn_module=call.nn_module,
            config=call.config,
            forward_inputs=inputs | {"input": tuple(call.inputs or ())},
        )  # fmt: skip
    call.show(report, fmt=call.fmt or "mermaid")
    if call.output is not None:
        note(f"wrote the diagram to {call.output}")
    elif kind == "class" and call.kind is None and call.fmt is None:
        note(f"'{call.further('diagram', {'kind': 'forward', 'output': 'forward.svg'})}' draws the forward pass")
    kernel = original.bert_config.attn_implementation if original.bert_config else _STEP_BY_STEP
    has_steps = kind == "forward" and any("softmax" in node.name for node in getattr(report, "nodes", ()))
    if has_steps and call.attention is None and kernel != _STEP_BY_STEP:
        note(f"attention is drawn in steps ({_STEP_BY_STEP}); --attention {kernel} draws the model's, as one box")


def diff(call: CommandLine) -> int:
    """Compare two models, two files with tensors, or a model with a checkpoint."""
    of_models = {"--attention": call.attention is not None, "--lora": call.lora is not None}
    of_models |= {"--batch": call.batch != RunConfig.batch, "--seq": call.seq is not None}
    of_weights = bool(call.dtype or call.allow or call.strip_prefix is not None)
    if call.base is not None:
        return _diff_revisions(call)
    one, other = stored_alone(call.a), stored_alone(call.b)
    without_effect = "{option} has no effect with "
    if call.b is None or of_weights or (one is None) != (other is None):
        why = f"{without_effect}a checkpoint: its header is compared (exit code 1: no fit); leave it out"
        _refuse(of_models | {"--exit-code": call.exit_code}, why)
        name, stored = (call.b, one) if call.b and one and not other else (call.a, other if call.b else one)
        stored = stored or _weights(call, call.b or call.a)  # before torch is imported
        checked = bertscope.verify(
            call.source(name), stored, dtype=call.dtype, allow=call.allow or (), strip_prefix=call.strip_prefix
        )
        call.show(checked)
        return 0 if checked.fits else 1
    if one and other:
        options = {"--architecture": call.architecture, "--no-pooler": call.add_pooling_layer}
        of_models |= {name: value is not None for name, value in options.items()}
        _refuse(of_models, f"{without_effect}two files with tensors: their headers are compared; leave it out")
    sides = [stored or call.source(name) for name, stored in ((call.a, one), (call.b, other))]
    report = bertscope.diff(*sides, batch=call.batch, seq=call.seq)
    call.show(report)
    return 1 if call.exit_code and not report.is_empty else 0


def _refuse(options: Mapping[str, Any], why: str) -> None:
    for option in filter(options.get, options):
        raise SelectionError(why.format(option=option))


def _diff_revisions(call: CommandLine) -> int:
    from bertscope.commands import revision  # git's, which other commands need not

    with revision.revision(call.base) as at_revision:
        before = replace(call.found(at_revision(call.a)), name=f"{call.a} at {call.base}")
        if is_code(call.a):
            note(f"runs your code at {call.base} too")
        after = replace(call.source(revision.in_file(call.a)), name=call.a)
        report = bertscope.diff(before, after, batch=call.batch, seq=call.seq)
    call.show(report)
    return 1 if call.exit_code and not report.is_empty else 0


def report(call: CommandLine) -> None:
    """Write the page about one model or two."""
    if call.fmt == "html" and call.output is None:
        raise SelectionError("the page needs a file; name one with -o report.html")
    source, compare = call.source(), call.source(call.compare) if call.compare else None
    page = with_progress(bertscope.report, call.about(source), compare, fit=call.fit)
    print_notes(page.models[0].memory)
    call.show(page)
    if call.fmt == "html":
        note(f"wrote the page to {call.output}")
