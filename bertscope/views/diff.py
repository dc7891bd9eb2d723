"""The differences of two models, the contents of a checkpoint, and what of a model it holds."""

import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from bertscope.errors import named, one_line, shown
from bertscope.reports.base import Shape
from bertscope.reports.checkpoint import CheckpointReport, Stored, VerifyReport, VerifyRow
from bertscope.reports.page import DiffReport
from bertscope.units import bytes_text, count_text, counted, shape_text
from bertscope.views.columns import Column, attribute, copies_text, csv_only, listed, number, values
from bertscope.views.console import Target, command_text
from bertscope.views.step import line_of
from bertscope.views.views import Table, View

_SHOWN_FILES, _NAMES, _LINE = 3, 50, 80  # files of a checkpoint; characters of two names, and of a sentence


# ---- two models ----


_FIELDS = (attribute("setting", "field"), attribute("a", "a", missing="--"), attribute("b", "b", missing="--"))
_MARKS = {"added": "+", "removed": "-", "changed": "~"}


def _parameter(row: Any) -> str:
    return f"{row.path}{copies_text(row.copies)}"


_ROWS = (
    Column("parameter", _parameter, values("path")),
    attribute("change", "status", detail=True),
    csv_only(values("copies")),
    Column("difference", lambda row: f"{row.params_b - row.params_a:+,}", values("params_a", "params_b"),
           right=True, csv_order=1),
    attribute("shape in a", "shape_a", text=shape_text, as_text="shape_a", missing="--", detail=True),
    attribute("shape in b", "shape_b", text=shape_text, as_text="shape_b", missing="--", detail=True),
)  # fmt: skip
_TOTALS = (
    attribute("total", "total"),
    number("a", "a", missing="--"),
    number("b", "b", missing="--"),
    number("difference", "difference", "{:+,}".format, csv=(), missing="--"),
)


def parts(report: DiffReport, target: Target | None = None) -> list[Table]:
    """Return the tables: settings, parameters, totals."""
    a, b = report.totals_a, report.totals_b
    flops = "forward FLOPs" if report.inputs_given else f"forward FLOPs at {report.batch} x {report.seq}"
    totals: list[dict[str, Any]] = [
        {"total": "unique parameters", "a": a.distinct_params, "b": b.distinct_params},
        {"total": "sum over layers", "a": a.layer_params, "b": b.layer_params},
        {"total": flops, "a": report.forward_flops_a, "b": report.forward_flops_b},
    ]
    for row in totals:
        row["difference"] = None if None in row.values() else row["b"] - row["a"]
    marked = replace(_ROWS[0], text=lambda row: f"{_MARKS[row.status]} {_parameter(row)}")
    rows = _ROWS if target is None or target.verbose else (marked, *_ROWS[1:])
    return [Table(_FIELDS, report.fields), Table(rows, report.rows), Table(_TOTALS, totals)]


def notes(report: DiffReport, target: Target | None = None) -> list[str]:
    """Return how FLOPs are counted, the models that have none, and that nothing differs."""
    sentences = ["FLOPs: matrix products only, a multiply-add counts as 2"]
    if report.rows and target and not target.verbose:
        sentences.append(f"+ only in b, - only in a, ~ a different shape ({named('to_markdown()')} shows both)")
    for side, flops in ((report.a, report.forward_flops_a), (report.b, report.forward_flops_b)):
        if flops is None and side.obtained == "computed":  # not a file with tensors
            sizes = f"{shlex.quote(side.name)} --batch {report.batch} --seq {report.seq}"
            has_command = not report.inputs_given and " at " not in side.name  # which names a model at a revision
            why = f"; bertscope flops {sizes} says why" * has_command
            sentences.append(f"no FLOPs of {side.name}: its forward pass did not run{why}")
    return [*dict.fromkeys(sentences)]


def _verdict(report: DiffReport) -> str:
    if report.is_empty:
        return "No differences."
    a, b = report.totals_a.distinct_params, report.totals_b.distinct_params
    if a == b:
        counts = {"setting": len(report.fields), "tensor": len(report.rows)}
        kinds = listed(counted(count, name) for name, count in counts.items() if count)
        return f"Both have {count_text(a)} parameters, but they differ in {kinds}."
    share = f" ({100 * abs(b - a) / a:.1f} %)" if a else ""
    names = [report.a.name, report.b.name]
    one, other = names if len(set(names)) > 1 and len("".join(names)) <= _NAMES else ("a", "b")
    noun = "parameter" if abs(b - a) == 1 else "parameters"
    text = f"{other} has {count_text(abs(b - a))} {'more' if b > a else 'fewer'} {noun} than {one}"
    return f"{text}{share}." if len(text + share) < _LINE else f"{text}."


def _tip(report: DiffReport) -> str:
    """Return how to compare two classes of one family as the same class; else empty."""
    a, b = ((side.config or {}).get("model_type") for side in (report.a, report.b))
    is_same = report.is_empty or report.a.architecture == report.b.architecture or named("architecture")[0] != "-"
    if is_same or not a or a != b or {report.a.obtained, report.b.obtained} != {"computed"}:
        return ""
    return f"compare both as {(name := report.a.architecture)}\n  {command_text('diff', {'architecture': name}, {})}"


VIEW = View(
    answer=_verdict,
    settings=lambda report: "\n".join(
        f"{side}: {one_line(subject.name, limit=60)}, {subject.architecture}"
        for side, subject in (("a", report.a), ("b", report.b))
    ),
    tables=parts,
    notes=notes,
    shows_all_notes=True,
    tip=_tip,
    records=_ROWS,
)


# ---- a checkpoint ----


_STORED = (
    Column("tensor", lambda row: one_line(row.name) + copies_text(row.copies), values("name")),
    attribute("dtype", "dtype"),
    attribute("shape", "shape", "copies", text=shape_text),
    number("params", "params"),
    number("size", "bytes", bytes_text, detail=True),
    attribute("packing", "packing"),
    attribute("shares the storage of", "shares", text=one_line),
)


def _params(report: CheckpointReport) -> int:
    return report.stored.weights or report.stored.distinct_params


_OTHERS = "tensors left out"  # of the file's parts: an optimizer's state


def _checkpoint_answer(report: CheckpointReport) -> str:
    stored = report.stored
    text = f"{counted(_params(report), 'parameter')} in {counted(stored.tensors, 'tensor')}"
    if not (other_bytes := sum(part.bytes for part in stored.parts if part.what == _OTHERS)):
        return f"{text}, {bytes_text(stored.file_bytes)}."
    names = f" ({left_out})" if (left_out := stored.metadata.get("left out")) else "", 1
    return line_of(f"{text}, {bytes_text(stored.tensor_bytes)}; {bytes_text(other_bytes)} of other tensors", names)


def _stored_lines(stored: Stored) -> Iterator[tuple[str, str]]:
    dtypes = []
    for row in stored.dtypes:
        kind = f"{row.dtype} of {row.packing}" if row.packing else row.dtype
        dtypes.append(f"{count_text(row.params)} in {kind} ({bytes_text(row.bytes)})")
    sums = Counter[str]()
    for part in stored.parts:
        sums[part.what] += part.bytes
    yield "stored", f"{count_text(stored.distinct_params)} elements (every storage once): {', '.join(dtypes)}"
    if stored.weights and (stored.weights != stored.distinct_params or any(row.packing for row in stored.dtypes)):
        bits, size = f"{8 * stored.weight_bytes / stored.weights:.2f}", bytes_text(stored.weight_bytes)
        yield "weights", f"{count_text(stored.weights)}, {bits} bits each with their scales ({size})"
    if stored.unknown_packing:
        packing = one_line(stored.unknown_packing, limit=60)
        yield "packing", f"{packing}: packed in a way that bertscope does not know; counted as stored"
    if stored.stored_params != stored.distinct_params:
        yield "under all names", count_text(stored.stored_params)
    kinds = ((count, "other tensors" if what == _OTHERS else what) for what, count in sums.items())
    parts = " + ".join(f"{bytes_text(count)} {kind}" for count, kind in kinds)
    yield "size", f"{count_text(stored.file_bytes)} bytes ({bytes_text(stored.file_bytes)}) = {parts}"
    if len(stored.files) > 1:
        names = [*map(one_line, stored.files)]
        more = f" and {len(names) - _SHOWN_FILES} more" if len(names) > _SHOWN_FILES else ""
        yield "files", f"{len(names)}: {', '.join(names[:_SHOWN_FILES])}{more}"
    if left_out := stored.metadata.get("left out"):
        yield "left out", one_line(left_out, limit=200)
    yield from (("problem", one_line(problem)) for problem in stored.problems)


def _checkpoint_lines(report: CheckpointReport, target: Target | None) -> Iterator[tuple[str, str]]:
    yield from _stored_lines(report.stored)
    if metadata := [f"{key}: {value}" for key, value in report.stored.metadata.items() if key != "left out"]:
        yield "metadata", one_line(", ".join(metadata), limit=200)
    yield "read", "only the header; nothing was loaded or run"


checkpoint = View(
    params=_params,
    answer=_checkpoint_answer,
    settings=lambda report: f"{one_line(report.stored.name, limit=120)}: {report.stored.format}",
    columns=_STORED,
    lines=_checkpoint_lines,
    name_width=17,
    tip=lambda report: (
        f"list every tensor\n  {command_text('count', {'by': 'parameter'}, {})}" if report.by == "layer" else ""
    ),
)


# ---- a model in a checkpoint: yes or no first, then what is wrong, then what is worth knowing ----


def _label(row: VerifyRow) -> str:
    name = f"{row.stored_name} -> {row.name}" if row.status == "renamed" else row.name
    return one_line(name) + copies_text(row.copies)


def _side(shape: Shape, dtype: str | None) -> str:
    if shape is None:
        return ""
    return shape_text(shape) + ("" if dtype in (None, "float32") else f" {dtype}")


_VERIFY = (
    attribute("", "is_wrong", text={True: "no", False: "ok"}.__getitem__, csv=["is_wrong", "status"]),
    Column("tensor", _label, values("name", "stored_name", "copies")),
    attribute("what", "status", csv=()),
    Column("in the model", lambda row: _side(row.shape, row.dtype), values("shape")),
    Column("in the file", lambda row: _side(row.stored_shape, row.stored_dtype), values("stored_shape")),
    csv_only(values("dtype", "stored_dtype")),
    number("params", "params"),
    Column("note", lambda row: one_line(shown(row.note)), values("note")),
)


def _answer(report: VerifyReport) -> str:
    subject, stored = report.subject, one_line(report.stored.name, limit=120)
    adapters = f", {one_line(subject.adapters, limit=125)}" if subject.lora else ""
    model = f"{one_line(subject.name, limit=120)} ({subject.architecture}{adapters})"
    if report.fits:
        return f"yes: {stored} holds {model}"
    wrong, faults = Counter[str](), []
    for row in report.rows:
        if row.is_wrong:
            wrong[row.status] += row.copies
    for status, count in wrong.items():
        text = f"{count} of another {status}" if status in ("shape", "dtype") else f"{count} {status}"
        if status == "prefix":
            prefix = next(one_line(row.name) for row in report.rows if row.status == "prefix")
            text = f"{counted(count, 'name')} with the prefix {prefix} ({named('strip_prefix')} {prefix})"
        faults.append(text)
    faults += [f"{counted(len(report.stored.problems), 'problem')} of the file"] if report.stored.problems else []
    return f"no: {stored} does not hold {model}: {', '.join(faults)}"


def _verify_lines(report: VerifyReport, target: Target | None) -> Iterator[tuple[str, str]]:
    matched = f"{count_text(report.matched_tensors)} of {count_text(report.model_tensors)} names are stored"
    yield "model", f"{count_text(report.model_distinct_params)} unique parameters; {matched}"
    yield from _stored_lines(report.stored)
    if report.new_modules:
        names = ", ".join(report.new_modules)
        yield "untrained", f"{names}: not in the file, newly initialised with random values; train it"
    if report.fitting:
        yield "what fits", f"{named('architecture')} {', '.join(report.fitting)}"
    yield "verified", report.obtained


verify = View(
    answer=_answer,
    verdict=lambda report: "yes" if report.fits else "no",
    columns=_VERIFY,
    names=2,
    strong="is_wrong",
    lines=_verify_lines,
    name_width=17,
)
