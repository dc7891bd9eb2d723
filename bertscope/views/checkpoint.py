"""The contents of a checkpoint, and its comparison with a model, as a table, CSV and Markdown."""

from collections import Counter

from bertscope.errors import named, one_line, shown
from bertscope.reports.base import Shape
from bertscope.reports.checkpoint import CheckpointReport, Stored, VerifyReport, VerifyRow
from bertscope.units import bytes_text, count_text, shape_text
from bertscope.views.columns import Column, copies_text, csv_only, number, values
from bertscope.views.views import Table, View

_SHOWN_FILES = 3


def _columns(report: CheckpointReport) -> list[Column]:
    return [
        Column("tensor", lambda row: one_line(row.name) + copies_text(row.copies), values("name")),
        Column("dtype", lambda row: row.dtype, values("dtype")),
        Column("shape", lambda row: "" if row.shape is None else shape_text(row.shape), values("shape", "copies")),
        number("params", "params"),
        number("bytes", "bytes", bytes_text, detail=True),
        Column("packing", lambda row: row.packing or "", values("packing"), below=1,
               shown=any(row.packing for row in report.rows)),
        Column("shares the storage of", lambda row: one_line(row.shares or ""), values("shares"), below=1,
               shown=any(row.shares for row in report.rows)),
    ]  # fmt: skip


def _title(report: CheckpointReport) -> str:
    """Return `model.safetensors: safetensors, 62 tensors`."""
    stored = report.stored
    tensors = f"{count_text(stored.tensors)} tensors"
    return f"{one_line(stored.name, limit=120)}: {stored.format}, {tensors}"


def _stored_lines(stored: Stored) -> list[tuple[str, str]]:
    dtypes = ", ".join(
        (f"{count_text(row.params)} in {f'{row.dtype} of {row.packing}' if row.packing else row.dtype} "
f"({bytes_text(row.bytes)})")
        for row in stored.dtypes
    )  # fmt: skip
    sums = Counter[str]()
    for part in stored.parts:
        sums[part.what] += part.bytes
    parts = " + ".join(f"{count_text(count)} {what}" for what, count in sums.items())
    lines = [("stored", f"{count_text(stored.distinct_params)} elements (every storage once): {dtypes}")]
    if stored.weights and (stored.weights != stored.distinct_params or any(row.packing for row in stored.dtypes)):
        bits = f"{8 * stored.weight_bytes / stored.weights:.2f}"
        size = bytes_text(stored.weight_bytes)
        weights = f"{count_text(stored.weights)}, {bits} bits each with their scales ({size})"
        lines.append(("weights", weights))
    if stored.unknown_packing:
        packing = one_line(stored.unknown_packing, limit=60)
        lines.append(("packing", f"{packing}: packed in a way that bertscope does not know; counted as stored"))
    if stored.stored_params != stored.distinct_params:
        lines.append(("under all names", count_text(stored.stored_params)))
    size = bytes_text(stored.file_bytes)
    lines.append(("size", f"{count_text(stored.file_bytes)} bytes ({size}) = {parts}"))
    if len(stored.files) > 1:
        names = ", ".join(map(one_line, stored.files[:_SHOWN_FILES]))
        more = f" and {len(stored.files) - _SHOWN_FILES} more" if len(stored.files) > _SHOWN_FILES else ""
        lines.append(("files", f"{len(stored.files)}: {names}{more}"))
    if left_out := stored.metadata.get("left out"):
        lines.append(("left out", one_line(left_out, limit=200)))
    return lines + [("problem", one_line(problem)) for problem in stored.problems]


def _footer(report: CheckpointReport) -> list[tuple[str, str]]:
    lines = _stored_lines(report.stored)
    if report.stored.metadata.keys() - {"left out"}:
        metadata = ", ".join(f"{key}: {value}" for key, value in report.stored.metadata.items() if key != "left out")
        lines.append(("metadata", one_line(metadata, limit=200)))
    return [*lines, ("read", "only the header; nothing was loaded or run")]


# ---- verify ----


def _label(row: VerifyRow) -> str:
    name = f"{row.stored_name} -> {row.name}" if row.status == "renamed" else row.name
    return one_line(name) + copies_text(row.copies)


def _side(shape: Shape, dtype: str | None) -> str:
    if shape is None:
        return ""
    return shape_text(shape) + ("" if dtype in (None, "float32") else f" {dtype}")


_VERIFY = (
    Column("", lambda row: "no" if row.is_wrong else "ok", values("is_wrong")),
    Column("what", lambda row: row.status, values("status")),
    Column("tensor", _label, values("name", "stored_name", "copies")),
    Column("in the model", lambda row: _side(row.shape, row.dtype), values("shape"), below=2),
    Column("in the file", lambda row: _side(row.stored_shape, row.stored_dtype), values("stored_shape"), below=2),
    csv_only(values("dtype", "stored_dtype")),
    number("params", "params"),
    Column("note", lambda row: one_line(shown(row.note)), values("note"), below=1),
)


def _answer(report: VerifyReport) -> str:
    subject, stored = report.subject, one_line(report.stored.name, limit=120)
    adapters = f", LoRA {one_line(subject.lora, limit=120)}" if subject.lora else ""
    model = f"{one_line(subject.name, limit=120)} ({subject.architecture}{adapters})"
    if report.fits:
        return f"yes: {stored} holds {model}"
    wrong = Counter[str]()
    for row in report.rows:
        if row.is_wrong:
            wrong[row.status] += row.copies
    prefix = next((one_line(row.name) for row in report.rows if row.status == "prefix"), "")
    found = [_wrong_text(status, count, prefix) for status, count in wrong.items()]
    found += [f"{len(report.stored.problems)} problems of the file"] if report.stored.problems else []
    return f"no: {stored} does not hold {model}: {', '.join(found)}"


def _wrong_text(status: str, count: int, prefix: str) -> str:
    if status == "prefix":
        return f"{count} names begin with {prefix} ({named('strip_prefix')} {prefix})"
    return f"{count} of another {status}" if status in ("shape", "dtype") else f"{count} {status}"


def _verify_footer(report: VerifyReport) -> list[tuple[str, str]]:
    matched = f"{count_text(report.matched_tensors)} of {count_text(report.model_tensors)} names are stored"
    lines = [("model", f"{count_text(report.model_distinct_params)} unique parameters; {matched}")]
    lines += _stored_lines(report.stored)
    if report.new_modules:
        names = ", ".join(report.new_modules)
        lines.append(("untrained", f"{names}: not in the file, newly initialised with random values; train it"))
    if report.fitting:
        lines.append(("what fits", f"{named('architecture')} {', '.join(report.fitting)}"))
    return [*lines, ("verified", report.obtained)]


VIEW = View(
    title=_title,
    tables=lambda report, target: [Table(_columns(report), report.rows)],
    lines=lambda report, target: _footer(report),
    name_width=17,
)
# Yes or no first, then what is wrong, then what is worth knowing.
verify = View(
    title=_answer,
    tables=lambda report, target: [Table(_VERIFY, report.rows, lambda row: row.is_wrong)] if report.rows else [],
    lines=lambda report, target: _verify_footer(report),
    name_width=17,
    records=lambda report: Table(_VERIFY, report.rows),
)
