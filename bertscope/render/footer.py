"""The lines under a table: every total under the name of its convention."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from bertscope.errors import one_line
from bertscope.render.console import Target, padded, wrapped
from bertscope.reports.base import Subject
from bertscope.texts import ENGLISH, say, texts, word
from bertscope.units import bytes_text, count_text, flops_text

if TYPE_CHECKING:
    from bertscope.reports.params import CountReport, TreeReport, WrittenSum

SHOWN_TIES = 8
SHOWN_PARTS = 4
_OF_A_RUN = ("memory", "fit", "flops", "lengths")  # kinds whose numbers depend on the implementation of the model


def title(report: Any) -> str:
    """Return `bert-large-zh: BertModel, sdpa attention, as in transformers 4.43.4` for a report with a `subject`."""
    text, subject = subtitle(report), report.subject
    if subject.name == subject.architecture:
        return text
    return say("named", name=one_line(subject.name, limit=120), text=text)


def subtitle(report: Any) -> str:
    """Return the title without the name of the model."""
    subject: Subject = report.subject
    attention = say("attention", name=subject.attention) if subject.attention else ""
    adapters = f"LoRA {one_line(subject.lora, limit=120)}" if subject.lora else ""
    whose = _whose(subject.implementation) if subject.implementation and report.kind in _OF_A_RUN else ""
    return say("comma").join(filter(None, (subject.architecture, attention, adapters, whose)))


def _whose(implementation: str) -> str:
    """Return `as in transformers 4.43.4`, `bertscope's own` or another name of an implementation."""
    if implementation == texts(ENGLISH)["own"]:
        return say("own")
    start = texts(ENGLISH)["as_in"].format(name="")
    return say("as_in", name=implementation.removeprefix(start)) if implementation.startswith(start) else implementation


def footer(report: CountReport | TreeReport) -> list[tuple[str, str]]:
    """Return the names and figures of the totals, one line each."""
    totals, ties, subject = report.totals, report.ties, report.subject
    tied = say("tied_at_each_layer") if ties else say("nothing_tied")
    share = f" ({100 * totals.trainable_params / totals.distinct_params:.4f} %)" if totals.frozen_params else ""
    trainable = say("and_frozen", trainable=f"{count_text(totals.trainable_params)}{share}",
                    frozen=count_text(totals.frozen_params))  # fmt: skip
    if ties:
        over = say("and_frozen", trainable=count_text(totals.trainable_layer_params),
                   frozen=count_text(totals.frozen_layer_params))  # fmt: skip
        trainable = say("with_layers", text=trainable, over=over)
    size = say("sizes", fp32=bytes_text(totals.fp32_bytes), bf16=bytes_text(totals.bf16_bytes))
    buffers = say("elements", count=count_text(totals.buffer_params), size=bytes_text(totals.buffer_bytes))
    sums: Sequence[WrittenSum] = getattr(report, "sums", ())
    tied_names = [say("tie", path=tie.path, other=tie.is_path, count=count_text(tie.params)) for tie in ties]
    lines = [
        (say("unique"), say("each_once", count=count_text(totals.distinct_params))),
        (say("over_layers"), say("with_remark", text=count_text(totals.layer_params), remark=tied)),
        *(("", f"{item.terms} = {count_text(item.params)}") for item in sums if item.name == "total"),
        *(("", text) for text in tied_names[:SHOWN_TIES]),
    ]
    if len(ties) > SHOWN_TIES:
        lines.append(("", say("more_ties", count=len(ties) - SHOWN_TIES)))
    lines += _layer_sums(sums)
    lines += [
        (say("trainable"), trainable),
        (say("part_buffers"), buffers),
        (say("size"), size),
    ]
    if (matmul_flops := getattr(report, "matmul_flops", None)) is not None:
        flops, macs = flops_text(matmul_flops), count_text(matmul_flops // 2)
        lines.append((say("tree_forward"), say("forward_flops", flops=flops, macs=macs)))
    if report.unknown:
        unknown = say("not_initialised", count=len(report.unknown), paths=", ".join(report.unknown))
        lines.append((say("not_counted"), unknown))
    classes = subject.implementation or ""  # their version may decide how many parameters there are
    version = f"{subject.torch_version}, {classes}" if classes.startswith("transformers ") else subject.torch_version
    return [*lines, (word("obtained", subject.obtained), say("from_tensors", version=version))]


def _layer_sums(sums: Sequence[WrittenSum]) -> Iterator[tuple[str, str]]:
    """Yield the sum of one of the repeated layers, and below it those of its parts if they are few."""
    several = len([item for item in sums if item.name == "layer"]) > 1
    has_few = len([item for item in sums if item.name not in ("layer", "total")]) <= SHOWN_PARTS
    for item in sums:
        if item.name == "layer":
            place = f"{item.path}: " if several else ""
            yield say("one_layer"), f"{place}{item.terms} = {count_text(item.params)}"
        elif item.name != "total" and has_few:
            yield "", f"{item.name}: {item.terms} = {count_text(item.params)}"


def notes_text(notes: Sequence[str], target: Target, more_rows: int = 0) -> str:
    """Return the notes under a table: all if there are two or with -v, else the first and the number of others.

    `more_rows` is the number of rows that the table has with -v only.
    """
    if notes and not target.verbose and (len(notes) > 2 or more_rows):
        count, more = len(notes) - 1, []
        if count:
            more.append(say("one_more_note") if count == 1 else say("some_more_notes", count=count))
        if more_rows:
            more.append(say("one_more_row") if more_rows == 1 else say("some_more_rows", count=more_rows))
        notes = [say("more_notes", note=notes[0], more=say("comma").join(more))]
    return "".join(wrapped(note, target, 2) for note in notes)


def lines_text(lines: Iterable[tuple[str, str]], width: int = 24, target: Target | None = None) -> str:
    """Return names and their values for the terminal, the values from one column on."""
    return "".join(wrapped(f"{padded(name, width)}{value}", target or Target(), width) for name, value in lines)


def lines_markdown(lines: Iterable[tuple[str, str]]) -> str:
    """Return names and their values as a list; a value without a name belongs to the line above."""
    return _escaped("".join(f"- {name}: {value}\n" if name else f"  - {value}\n" for name, value in lines))


def bullets(notes: Iterable[str]) -> str:
    """Return notes as a list in Markdown."""
    return _escaped("".join(f"- {note}\n" for note in notes))


def _escaped(text: str) -> str:
    return text.replace("_", "\\_").replace("*", "\\*")
