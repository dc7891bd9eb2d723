"""The contents of a checkpoint, and its comparison with a model, as a table, CSV and Markdown."""

from collections import Counter

from bertscope.errors import one_line
from bertscope.render.columns import Column, copies_text, csv_only, number, values
from bertscope.render.views import Table, View
from bertscope.reports.base import Shape
from bertscope.reports.checkpoint import CheckpointReport, Stored, VerifyReport, VerifyRow
from bertscope.texts import phrase, say
from bertscope.units import bytes_text, count_text, shape_text

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
    tensors = say("stored_tensors", count=count_text(stored.tensors))
    return f"{one_line(stored.name, limit=120)}: {stored.format}, {tensors}"


def _stored_lines(stored: Stored) -> list[tuple[str, str]]:
    """Return the sums: parameters, dtypes, and the file's size to the last byte."""
    dtypes = say("comma").join(
        say("stored_dtype", count=count_text(row.params), size=bytes_text(row.bytes),
            dtype=say("packed_dtype", dtype=row.dtype, packing=row.packing) if row.packing else row.dtype)
        for row in stored.dtypes
    )  # fmt: skip
    sums = Counter[str]()
    for part in stored.parts:
        sums[part.what] += part.bytes
    parts = " + ".join(f"{count_text(count)} {phrase(what)}" for what, count in sums.items())
    lines = [(say("stored"), say("stored_once", count=count_text(stored.distinct_params), dtypes=dtypes))]
    if stored.weights and (stored.weights != stored.distinct_params or any(row.packing for row in stored.dtypes)):
        bits = f"{8 * stored.weight_bytes / stored.weights:.2f}"
        size = bytes_text(stored.weight_bytes)
        weights = say("weight_bits", count=count_text(stored.weights), bits=bits, size=size)
        lines.append((say("stored_weights"), weights))
    if stored.unknown_packing:
        packing = one_line(stored.unknown_packing, limit=60)
        lines.append((say("unknown_packing"), say("unknown_packing_how", packing=packing)))
    if stored.stored_params != stored.distinct_params:
        lines.append((say("under_all_names"), count_text(stored.stored_params)))
    size = bytes_text(stored.file_bytes)
    lines.append((say("size"), say("stored_bytes", count=count_text(stored.file_bytes), size=size, parts=parts)))
    if len(stored.files) > 1:
        names = ", ".join(map(one_line, stored.files[:_SHOWN_FILES]))
        more = say("more_files", count=len(stored.files) - _SHOWN_FILES) if len(stored.files) > _SHOWN_FILES else ""
        lines.append((say("files"), f"{len(stored.files)}: {names}{more}"))
    return lines + [(say("problem"), one_line(phrase(problem))) for problem in stored.problems]


def _footer(report: CheckpointReport) -> list[tuple[str, str]]:
    lines = _stored_lines(report.stored)
    if report.stored.metadata:
        metadata = ", ".join(f"{key}: {value}" for key, value in report.stored.metadata.items())
        lines.append((say("metadata"), one_line(metadata, limit=200)))
    return [*lines, (say("read"), say("header_only"))]


# ---- verify ----


def _label(row: VerifyRow) -> str:
    name = f"{row.stored_name} -> {row.name}" if row.status == "renamed" else row.name
    return one_line(name) + copies_text(row.copies)


def _side(shape: Shape, dtype: str | None) -> str:
    if shape is None:
        return ""
    return shape_text(shape) + ("" if dtype in (None, "float32") else f" {dtype}")


_VERIFY = (
    Column("", lambda row: phrase("no" if row.is_wrong else "ok"), values("is_wrong")),
    Column("what", lambda row: phrase(row.status), values("status")),
    Column("tensor", _label, values("name", "stored_name", "copies")),
    Column("in the model", lambda row: _side(row.shape, row.dtype), values("shape"), below=2),
    Column("in the file", lambda row: _side(row.stored_shape, row.stored_dtype), values("stored_shape"), below=2),
    csv_only(values("dtype", "stored_dtype")),
    number("params", "params"),
    Column("note", lambda row: one_line(phrase(row.note)), values("note"), below=1),
)


def _answer(report: VerifyReport) -> str:
    """Return one sentence: the checkpoint holds the model, or it does not."""
    subject, stored = report.subject, one_line(report.stored.name, limit=120)
    adapters = f"{say('comma')}LoRA {one_line(subject.lora, limit=120)}" if subject.lora else ""
    model = f"{one_line(subject.name, limit=120)} ({subject.architecture}{adapters})"
    if report.fits:
        return say("verify_yes", stored=stored, model=model)
    wrong = Counter[str]()
    for row in report.rows:
        if row.is_wrong:
            wrong[row.status] += row.copies
    prefix = next((one_line(row.name) for row in report.rows if row.status == "prefix"), "")
    found = [say(f"verify_{status}", count=count, prefix=prefix) for status, count in wrong.items()]
    found += [say("verify_problems", count=len(report.stored.problems))] if report.stored.problems else []
    return say("verify_no", stored=stored, model=model, found=say("comma").join(found))


def _verify_footer(report: VerifyReport) -> list[tuple[str, str]]:
    counts = {
        "count": report.model_distinct_params, "matched": report.matched_tensors, "tensors": report.model_tensors,
    }  # fmt: skip
    lines = [(say("model"), say("verify_counts", **{name: count_text(count) for name, count in counts.items()}))]
    lines += _stored_lines(report.stored)
    if report.new_modules:
        lines.append((say("new_modules"), say("new_modules_how", names=say("comma").join(report.new_modules))))
    if report.fitting:
        lines.append((say("what_fits"), f"--architecture {', '.join(report.fitting)}"))
    return [*lines, (say("verified"), phrase(report.obtained))]


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
