"""The report of `why` as a table, CSV and Markdown, and its history as a picture (SVG)."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from types import SimpleNamespace

from bertscope.errors import named
from bertscope.reports.why import MESSAGE, OOM, PEAK, WhyFinding, WhyPart, WhyReport
from bertscope.units import binary_unit, bytes_text, html_text
from bertscope.views.columns import Column, attribute, number
from bertscope.views.console import Target
from bertscope.views.footer import note_text, title
from bertscope.views.step import part_name, run_text
from bertscope.views.timeline import COLORS
from bertscope.views.views import Table, View

_ROWS = 10  # without -v
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT, _LEGEND = 720, 320, 60, 30, 20, 10, 150
_TICKS = 4
_GREY = "#9aa0a6"  # of parts that an estimate does not have


def finding_text(finding: WhyFinding) -> str:
    """Return a finding with its remedy."""
    line = finding.values.get("line", "")
    v = SimpleNamespace(at=f" at {line}" if line else "")
    for name, value in finding.values.items():
        is_size = name.startswith("size") or name == "each"
        setattr(v, name, bytes_text(value) if is_size else part_name(value) if name == "part" else value)
    match finding.key:
        case "why_activations":
            return f"activations of a forward pass{v.at} hold {v.size}; checkpointing full frees up to {v.size_frees}"
        case "why_activations_all":
            return f"activations hold {v.size}: use checkpointing or a smaller batch"
        case "why_unfreed":
            return f"{v.size} of activations are never freed: keep loss.item(), detach outputs, or use torch.no_grad()"
        case "why_optimizer":
            return f"optimizer state holds {v.size}: an 8-bit optimizer needs a quarter of it"
        case "why_parameters":
            return f"parameters hold {v.size}: 16 bits or LoRA need less"
        case "why_graph":
            return (
                f"graphs of {v.passes} earlier forward passes hold {v.size}{v.at}: keep loss.item(), and no "
                "retain_graph"
            )
        case "why_grad_eval":
            return f"{v.passes} forward passes without backward keep activations, {v.size}{v.at}: use torch.no_grad()"
        case "why_outputs":
            return (
                f"outputs of {v.passes} earlier forward passes hold {v.size}, {v.each} each{v.at}: move them to the CPU"
            )
        case "why_losses":
            return f"a list grows by {v.each} in each of {v.passes} forward passes, to {v.size}{v.at}: keep loss.item()"
        case "why_previous":
            return f"outputs of the previous forward pass hold {v.size}{v.at}: delete them (del outputs, loss)"
        case "why_cache":
            return f"the cache of generate holds {v.size}{v.at}: generate fewer tokens or smaller batches"
        case "why_models":
            times, others = ("twice", "second holds") if v.times == 2 else (f"{v.times} times", "others hold")
            return f"a model is on the card {times}, the {others} {v.size} ({v.line}; {v.other}): delete what is unused"
        case "why_copy":
            return f"a copy of the weights (deepcopy) holds {v.size}{v.at}: keep it on the CPU"
        case "why_optimizers":
            return f"optimizer state exists twice, the older holds {v.size}{v.at}: delete the replaced optimizer"
        case "why_gradients":
            return f"used gradients hold {v.size} in the forward pass: call zero_grad() right after optimizer.step()"
        case "why_fragmentation":
            return f"fragmentation: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True frees {v.size} of no tensor"
        case "why_lengths":
            return (
                f"fragmentation: {v.size} is in no tensor, as sizes change{v.at}: pad, or set expandable_segments:True"
            )
        case "why_private":
            return f"private pools of CUDA graphs hold {v.size}: capture fewer graphs, or share one pool"
        case "why_waiting":
            return f"{v.size} is freed and waits for another stream (record_stream): synchronize earlier"
        case "why_attention":
            return f"attention scores hold {v.size}{v.at}: fused attention (sdpa) does not store them"
        case "why_logits":
            return f"logits and their loss hold {v.size}{v.at}: compute the loss in pieces"
        case "why_foreach":
            return f"temporaries of the optimizer hold {v.size}: fused=True or foreach=False needs none of them"
        case "why_buckets":
            return f"buckets of DistributedDataParallel hold {v.size}{v.at}: set gradient_as_bucket_view=True"
        case "why_data":
            return f"tensors from before the first forward pass hold {v.size}{v.at}: move one batch at a time"
        case "why_request":
            return f"the request itself is large, {v.size}{v.at}: use a smaller batch or a shorter sequence"
        case "why_before":
            return f"{v.size} is from before the recording: begin it before the model is built, or give MODEL"
        case "why_other":
            return f"other processes hold {v.size} of {v.size_total}: end them (nvidia-smi lists them)"
        case "why_limit":
            return f"this process may use {v.size} only: raise the limit (set_per_process_memory_fraction)"
        case "why_driver":
            return (
                f"Metal holds {v.size} outside torch's allocator for this process, such as graphs of each shape: pad "
                "to few shapes, or call torch.mps.empty_cache()"
            )
        case "why_shared":
            return (
                f"{v.size} is allocated on a card of {v.size_total}: the driver has moved some to the CPU, which is "
                "slow"
            )
        case "why_free":
            return (
                f"{v.size} was free, more than {v.size_tried}: look for a limit, or a process that has ended "
                "(nvidia-smi)"
            )
        case "why_full":
            return f"the step is too large, {v.size} of {v.size_total}: use a smaller batch, checkpointing or 16 bits"
        case "why_estimate":
            return f"the estimate of the step is {v.size}; {v.size_held} is allocated"
        case "why_more":
            return f"{v.size} more is allocated than the step needs: a memory snapshot tells where"
        case "why_beyond":
            return f"{v.part} hold {v.size}, in the estimate {v.size_estimated}"
        case "why_fits":
            if v.batch < v.asked:
                return (
                    f"the step with batch {v.asked} needs {v.size_needed} of {v.size_total}: the largest batch is "
                    f"{v.batch} with checkpointing {v.checkpointing}"
                )
            return f"checkpointing {v.checkpointing}: batch {v.asked} fits on {v.size_total}, and up to {v.batch}"
    raise KeyError(finding.key)


def answer(report: WhyReport) -> str:
    """Return what held the memory and the change that frees most, in a sentence."""
    held = bytes_text(report.allocated_bytes)
    mostly = ""
    if report.source != MESSAGE and report.parts and report.allocated_bytes:
        largest = max(report.parts, key=attrgetter("held_bytes"))
        mostly = f", of which {100 * largest.held_bytes / report.allocated_bytes:.0f} % is {part_name(largest.part)}"
    phases = {
        "forward": "in a forward pass",
        "backward": "in a backward pass",
        "optimizer": "in the optimizer step",
        "load": "while the model is loaded",
    }
    phase = f" {phases[report.phase]}" if report.phase in phases else ""
    at = f" at {report.line}" if report.line else ""
    moment = f"{held} is allocated at the end of the recording"
    if report.moment == OOM:
        tried = bytes_text(report.tried_bytes or 0)
        moment = f"out of memory: a request of {tried} failed{phase}{at}, with {held} allocated"
    elif report.moment == PEAK:
        moment = f"the peak is {held}{phase}{at}"
    moment += mostly
    return f"{moment}; {finding_text(report.findings[0])}" if report.findings else moment


def _tables(report: WhyReport, target: Target | None) -> list[Table]:
    rows = report.rows if target is None or target.verbose else report.rows[:_ROWS]
    total, has_sizes = max(report.allocated_bytes, 1), report.source != MESSAGE

    def share(part: WhyPart) -> str:
        return f"{100 * part.held_bytes / total:.0f} %"

    parts = [
        attribute("part", "part", text=part_name),
        number("bytes", "held_bytes", bytes_text, shown=has_sizes),
        Column("share", share, right=True, shown=has_sizes),
        number("blocks", "blocks", shown=any(part.blocks for part in report.parts)),
        number("estimate", "estimated_bytes", bytes_text, missing="-", shown=report.run is not None),
    ]
    tables = [Table(parts, report.parts)] if has_sizes or report.run else []
    return [*tables, *([Table(_row_columns(report), rows)] if report.rows else [])]


def _row_columns(report: WhyReport) -> list[Column]:
    return [
        attribute("line", "line", missing="-"),
        attribute("module", "module", missing="-", below=1),
        attribute("part", "part", text=part_name),
        number("blocks", "blocks"),
        number("passes", "passes", detail=report.passes < 2),
        number("bytes", "held_bytes", bytes_text),
        number("smallest", "smallest_bytes", bytes_text, detail=True),
        number("largest", "largest_bytes", bytes_text, detail=True),
    ]


def _lines(report: WhyReport, target: Target | None) -> Iterator[tuple[str, str]]:
    sizes = {
        "tried to allocate": report.tried_bytes,
        "allocated to tensors": report.allocated_bytes,
        "reserved, in no tensor": report.unusable_bytes,
        "reserved by torch": report.reserved_bytes,
        "largest free block": report.largest_free_bytes,
        "other processes": report.other_bytes,
        "outside torch": report.outside_bytes,
        "free on the card": report.free_bytes,
        "memory of the card": report.total_bytes,
    }
    for name, size in sizes.items():
        if size is not None and (size or name in ("free on the card", "reserved, in no tensor")):
            yield name, bytes_text(size)
    if report.run is not None:
        yield "estimate of", f"{title(report)}: {run_text(report.run)}"


def _notes(report: WhyReport, target: Target | None) -> Iterator[str]:
    yield from map(finding_text, report.findings[1:])
    yield from map(note_text, report.notes)
    if target is not None and not target.verbose and len(report.rows) > _ROWS:
        yield f"{len(report.rows) - _ROWS} more rows: {named('to_markdown()')}"


VIEW = View(
    answer=answer,
    tables=_tables,
    lines=_lines,
    notes=_notes,
    shows_all_notes=True,
    records=lambda report: Table(_row_columns(report), report.rows),
)


def history_svg(report: WhyReport) -> str:
    """Return the picture of the history: the bytes of each part, stacked, over the events."""
    names = [part.part for part in report.parts]
    names += [part for sample in report.timeline for part in sample.held if part not in names]
    names = list(dict.fromkeys(names))
    top = max(max(sum(sample.held.values()) for sample in report.timeline), 1)
    unit, unit_name = binary_unit(top)
    right, base = _WIDTH - _RIGHT - _LEGEND, _HEIGHT - _BOTTOM
    last = max(report.timeline[-1].event, 1)

    def place(event: int, size: float) -> str:
        return f"{_LEFT + event / last * (right - _LEFT):.1f},{base - size / top * (base - _TOP):.1f}"

    below, shapes = [0] * len(report.timeline), []
    for row, part in enumerate(names):
        above = [low + sample.held.get(part, 0) for low, sample in zip(below, report.timeline, strict=True)]
        events = [sample.event for sample in report.timeline]
        points = [*map(place, events, above), *map(place, events[::-1], below[::-1])]
        color = COLORS.get(part, _GREY)
        shapes.append(f'<polygon points="{" ".join(points)}" fill="{color}"/>')
        y = _TOP + 18 * row
        shapes.append(f'<rect x="{right + 12}" y="{y}" width="10" height="10" fill="{color}"/>')
        shapes.append(f'<text x="{right + 27}" y="{y + 10}">{html_text(part_name(part))}</text>')
        below = above
    for tick in range(_TICKS + 1):
        height = base - tick / _TICKS * (base - _TOP)
        size = f"{top * tick / _TICKS / unit:.1f}"
        shapes.append(f'<text x="{_LEFT - 6}" y="{height + 4:.1f}" text-anchor="end">{size}</text>')
    shapes.append(f'<path d="M{_LEFT} {_TOP}V{base}H{right}" fill="none" stroke="currentColor"/>')
    shapes.append(f'<text x="6" y="13">{html_text(f"{unit_name}, {report.name[:80]}")}</text>')
    word = html_text(f"{report.events} events")
    shapes.append(f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 8}" text-anchor="middle">{word}</text>')
    box = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}"'
    style = 'font-family="system-ui, sans-serif" font-size="12" fill="currentColor"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {box} {style}>', *shapes, "</svg>\n"])
