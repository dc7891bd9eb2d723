"""The diagnosis of `why`: one sentence, its fix, and the memory of the GPU as a table; its history as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from bertscope.errors import in_a_sentence, named, one_line
from bertscope.reports.why import MESSAGE, OOM, PEAK, TEXT, WhyFinding, WhyReport, WhyRow
from bertscope.settings.checkpointing import NONE, with_checkpointing
from bertscope.settings.generate import changed, row_words
from bertscope.units import bytes_text
from bertscope.views.columns import attribute, fits_word, number
from bertscope.views.console import Placeholder, Target, command_text, model_code
from bertscope.views.footer import note_text
from bertscope.views.step import micro_batches, need_text, next_command, part_name, precision_text, share_of, sizes
from bertscope.views.timeline import COLORS, Chart
from bertscope.views.views import Table, View

_ROWS, _ALSO = 5, 2  # lines of code and further causes, without -v
_COMPARED = {"why_full", "why_request", "why_attention", "why_logits", "why_shared", "why_more"}
_GREY = "#9aa0a6"  # of parts that an estimate does not have
# Settings that other words tell.
_SAID = {"batch", "seq", "precision", "optimizer", "checkpointing", "device", "sdpa_kernel"}
_EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
_PHASES = {"forward": "in a forward pass", "backward": "in a backward pass", "optimizer": "in the optimizer step",
           "load": "while the model is loaded", "evaluation": "in the evaluation"}  # fmt: skip
# What does not fit and its remedy, where a smaller batch in training is none.
_OTHER_REMEDIES = {
    "optimizer": ("optimizer step", "A smaller batch helps little here: use an 8-bit optimizer or LoRA adapters."),
    "load": ("model", "Load it in 16 bits or quantized, or onto several GPUs."),
    "evaluation": ("evaluation", "Evaluate smaller batches under torch.no_grad(), and move logits to the CPU (Trainer: "
                   "eval_accumulation_steps=1)."),
}  # fmt: skip
_CHANGES = "Use a GPU with more memory, LoRA adapters, an 8-bit optimizer or 16 bits."


def finding_text(report: WhyReport, finding: WhyFinding) -> tuple[str, str]:
    """Return a cause as a sentence of at most 100 characters, and its fix."""
    line = finding.values.get("line", "")
    at = f" ({line.replace(' (', ' in ').removesuffix(')')})" if line else ""
    v = SimpleNamespace(at=at, tried=bytes_text(report.tried_bytes or 0))
    v.lower = "Lower the batch size or sequence length"
    has_head = report.subject is None or report.subject.has_head  # without one its logits are missing
    *first, last = [named(name) for name in ("batch", "seq", "precision", "architecture")[: 3 if has_head else 4]]
    those = f"Are {', '.join(first)} and {last} right?"
    v.compare = f"{those} If so, a memory snapshot names the lines that hold the rest."
    for name, value in finding.values.items():
        is_size = name.startswith("size") or name == "each"
        setattr(v, name, bytes_text(value) if is_size else part_name(value) if name == "part" else value)
    if "size" in finding.values:
        v.share = share_of(finding.values["size"], finding.values.get("size_total", report.allocated_bytes))
    return _held_text(report, finding, v) or _failed_text(report, finding, v)


def _held_text(report: WhyReport, finding: WhyFinding, v: Any) -> tuple[str, str] | None:
    """Return the text of a cause that is in what the tensors hold; `v` has the values as texts."""
    match finding.key:
        case "why_activations":
            frees = f", or use checkpointing, which frees up to {v.size_frees}" if finding.frees_bytes else ""
            return f"Activations hold {v.share}: the backward pass needs them.", f"Lower the batch size{frees}{v.at}."
        case "why_optimizer":
            return f"The optimizer state holds {v.share}.", "An 8-bit optimizer needs a quarter of it."
        case "why_parameters":
            cause = f"The parameters hold {v.share}."
            fix = "Store them in 16 bits, or train LoRA adapters, which need few gradients and little optimizer state."
        case "why_graph":
            graphs = f"The graphs of {v.passes} earlier forward passes are" if v.passes > 1 else "An earlier graph is"
            cause = f"{graphs} still alive: {v.size}."
            fix = f"Keep loss.item() instead of loss, and do not call backward(retain_graph=True){v.at}."
        case "why_grad_eval":
            passes = f"{v.passes} forward passes" if v.passes > 1 else "A forward pass"
            cause = f"{passes} without a backward pass saved activations: {v.size}."
            fix = f"Evaluate under torch.no_grad(){v.at}."
        case "why_outputs":
            cause = f"The outputs of {v.passes} earlier passes stay on the GPU: {v.size}, {v.each} each."
            fix = f"Move what you keep to the CPU: output.detach().cpu(){v.at}."
        case "why_losses":
            cause = f"Memory grows by {v.each} with every forward pass: {v.size} after {v.passes}."
            fix = f"Keep loss.item() in the list of losses, not loss{v.at}."
        case "why_previous":
            cause = f"The outputs of the previous forward pass are still alive: {v.size}."
            fix = f"Delete them before the next one: del outputs, loss{v.at}."
        case "why_cache":
            cause = f"The key-value cache of generate() holds {v.size}."
            fix = f"Generate fewer tokens, or in smaller batches{v.at}."
        case "why_models":
            times, copies = ("twice", "second copy holds") if v.times == 2 else (f"{v.times} times", "others hold")
            both = " and ".join(dict.fromkeys(filter(None, (v.line, v.other))))
            cause = f"The model is on the GPU {times}: the {copies} {v.size}."
            fix = f"Delete what is unused; they are loaded at {both}."
        case "why_copy":
            return f"A copy of the weights (deepcopy) holds {v.size}.", f"Keep the copy on the CPU{v.at}."
        case "why_optimizers":
            cause = f"The optimizer state exists twice: the older one holds {v.size}."
            fix = f"Delete the replaced optimizer and everything that refers to it{v.at}."
        case "why_gradients":
            cause = f"Gradients of the previous step are alive in the forward pass: {v.size}."
            fix = "Call optimizer.zero_grad() right after optimizer.step()."
        case "why_fragmentation":
            small = f", in pieces below {v.tried}" if report.moment == OOM else ""
            return f"Fragmentation: {v.size} is reserved but unused{small}.", f"{_EXPANDABLE} python train.py"
        case "why_lengths":
            cause = f"Fragmentation, as shapes change: {v.size} is reserved but unused."
            fix = (
                f"Pad to a few fixed lengths{v.at}, or set {_EXPANDABLE}. Blocks of one line have {v.size_low} to "
                f"{v.size_high}."
            )
        case "why_private":
            cause = f"CUDA graphs hold {v.size} in private memory pools."
            fix = "Capture fewer graphs, or let them share a pool."
        case "why_waiting":
            cause = f"{v.size} is freed but waits for another CUDA stream (record_stream)."
            fix = "Synchronize the streams earlier."
        case "why_attention":
            cause = f"Attention scores need {v.size}."
            fix = f"Use fused attention, which stores none: attn_implementation='sdpa'{v.at}."
        case "why_logits":
            return f"Logits and their loss need {v.size}.", f"Compute the loss in chunks of tokens{v.at}."
        case "why_foreach":
            cause = f"Temporary tensors of the optimizer hold {v.size}."
            fix = "Create the optimizer with fused=True or foreach=False."
        case "why_buckets":
            cause = f"The buckets of DistributedDataParallel hold {v.size}."
            fix = f"Give it gradient_as_bucket_view=True{v.at}."
        case "why_data":
            cause = f"Tensors from before the first forward pass hold {v.size}."
            fix = f"If they are data, move one batch at a time to the GPU{v.at}."
        case _:
            return None
    return cause, fix


def _failed_text(report: WhyReport, finding: WhyFinding, v: Any) -> tuple[str, str]:
    """Return the text of a cause that is in the request, the GPU or the settings."""
    match finding.key:
        case "why_request":
            total = f"; the GPU has {bytes_text(report.total_bytes)}" if report.total_bytes else ""
            cause = f"One tensor of {v.size} was requested{total}."
            fix = f"{v.lower}{v.at}. Tensors of this size are often attention scores (use sdpa) or logits."
        case "why_before":
            cause = f"{v.size} was allocated before the recording began."
            fix = "Begin the recording before the model is built, or name MODEL for an estimate of its parts."
        case "why_other":
            cause = f"Other processes hold {v.share} on this GPU."
            fix = "End them (nvidia-smi lists them), or use another GPU."
        case "why_limit":
            free = f", and {bytes_text(report.free_bytes)} is free" if report.free_bytes else ""
            cause = f"This process may use {v.size} only{free}."
            fix = "Raise the limit: torch.cuda.set_per_process_memory_fraction()."
        case "why_driver":
            is_metal = report.free_bytes is None  # whose message does not say it
            cause = f"{'Metal' if is_metal else 'This process'} holds {v.size} outside PyTorch's tensors."
            fix = "It keeps a graph for each input shape: pad to a few fixed shapes, or call torch.mps.empty_cache()."
            fix = fix if is_metal else "Limit what other libraries in it may take (TensorFlow, JAX, vLLM, NCCL)."
        case "why_shared":
            cause = f"{v.size} is allocated, the GPU has {v.size_total}: the rest is in slow CPU memory."
            fix = f"{v.lower}, or use checkpointing or 16 bits, until all of it is on the GPU."
        case "why_free":
            cause = f"{v.size} was free, and yet a request for {v.size_tried} failed."
            fix = "Look for a limit (container, MIG slice, ulimit), or a process that has ended since (nvidia-smi)."
        case "why_full":
            outside = report.outside_bytes or 0
            is_much = outside > 0.1 * finding.values["size_total"]
            rest = f", and {bytes_text(outside)} is outside PyTorch" * is_much
            fix = f"{v.lower} ('{named('bertscope fit')}' finds the largest), or use checkpointing or 16 bits."
            what, fix = _OTHER_REMEDIES.get(report.phase, ("step", fix))
            cause = f"The {what} is too large: its tensors hold {v.share}{rest}."
        case "why_more":
            when = f" {_PHASES[report.phase]}" if report.phase in _PHASES else ""
            return f"These settings need {v.size_needed} of tensors{when}, but {v.size_held} was allocated.", v.compare
        case "why_beyond":
            whose = v.part[:1].upper() + v.part[1:]
            return f"{whose} hold {v.size}; these settings need {v.size_estimated}.", "The lines below allocated them."
        case "why_fits":
            largest = [f"{batch:,}{' fits' * (not number)}{_with(name)}" if batch else f"no batch fits{_with(name)}"
                       for number, (name, batch) in enumerate(finding.values["batches"].items())]  # fmt: skip
            most = ", or ".join(largest) if any(finding.values["batches"].values()) else "no batch fits"
            need = need_text(*(finding.values[name] for name in ("verdict", "size_least", "size", "size_total")))
            cause = f"Batch {v.asked} {fits_word(v.verdict)}: {need}."
            fix = v.compare if finding is report.findings[0] else ""
            if finding.frees_bytes:
                cause = f"{cause[:-1]}; {most}."
                fix = f"Train with a batch that fits, and accumulate gradients to an effective batch of {v.asked}."
                fix = fix if most != "no batch fits" else _OTHER_REMEDIES.get(report.phase, ("", _CHANGES))[1]
        case _:
            raise KeyError(finding.key)
    return cause, fix


def _with(checkpointing: str) -> str:
    return f" {with_checkpointing(checkpointing)}" * (checkpointing != NONE)


def _answer(report: WhyReport) -> str:
    if not report.findings:
        return f"{bytes_text(report.allocated_bytes)} is allocated, and no cause was found."
    cause, fix = finding_text(report, report.findings[0])
    return f"{cause}\nFix: {fix}" if fix else cause


def _settings(report: WhyReport) -> str:
    line = f"at {report.line.removesuffix(' (<module>)')}" if report.line else ""
    when = f"{_PHASES.get(report.phase, '')} {line}".strip()
    held = bytes_text(report.allocated_bytes)
    moment = f"{held} is allocated at the end of the recording"
    if report.moment == OOM:
        moment = f"{bytes_text(report.tried_bytes or 0)} failed {when}".rstrip() + f" on top of {held}"
    elif report.moment == PEAK:
        moment = f"the peak is {held} {when}".rstrip()
    if report.run is None or report.subject is None:
        return f"{one_line(report.name, limit=60)}: {moment}"
    run = report.run
    changes = [row_words(name, value) for name, value in changed(run).items() if name not in _SAID]
    texts = [*sizes(report), precision_text(report, run.precision), run.optimizer, _with(run.checkpointing).strip()]
    step = ", ".join([report.subject.architecture, *filter(None, [*texts, *changes])])
    return f"{one_line(report.name, limit=60)}: {moment}\nestimate: {one_line(report.subject.name, limit=60)}, {step}"


def _tables(report: WhyReport, target: Target | None) -> list[Table]:
    """Return what is on the GPU, whose rows add up to its memory, and the lines of code that allocated the tensors."""
    needed = sum(part.estimated_bytes or 0 for part in report.parts) or None
    rows: list[dict[str, Any]] = [{"name": "tensors", "size": report.allocated_bytes, "estimate": needed}]
    for part in report.parts:
        sizes = {"size": part.held_bytes, "blocks": part.blocks, "estimate": part.estimated_bytes}
        rows.append({"name": f"  {part_name(part.part)}", **{name: size for name, size in sizes.items() if size}})
    unused = max((report.reserved_bytes or 0) - report.allocated_bytes, 0)
    around = {"reserved but unused": unused, "outside PyTorch": report.outside_bytes}
    around |= {"other processes": report.other_bytes, "free": report.free_bytes, "total": report.total_bytes}
    whole = report.total_bytes or max(report.reserved_bytes or 0, report.allocated_bytes, 1)
    rows += [{"name": name, "size": size} for name, size in around.items() if size]
    memory = [
        attribute("on the GPU", "name"),
        number("size", "size", bytes_text),
        number("share", "size", lambda size: f"{100 * size / whole:.0f} %"),
        number("blocks", "blocks"),
        number("estimate", "estimate", bytes_text, shown=needed is not None),
    ]
    lines = report.rows if target is None or target.verbose else report.rows[:_ROWS]
    return [Table(memory, rows, lambda row: row["name"] in ("tensors", "total")), _lines(report, lines)]


def _lines(report: WhyReport, rows: Sequence[WhyRow]) -> Table:
    columns = [
        attribute("line", "line", missing="-"),
        attribute("module", "module", text=lambda module: module.removesuffix(" (forward)")),
        attribute("part", "part", text=part_name, is_wide=1),
        number("blocks", "blocks", is_wide=2),
        number("passes", "passes", detail=report.passes < 2),
        number("size", "held_bytes", bytes_text),
        number("smallest", "smallest_bytes", bytes_text, detail=True),
        number("largest", "largest_bytes", bytes_text, detail=True),
    ]
    return Table(columns, rows)


def _notes(report: WhyReport, target: Target | None) -> Iterator[str]:
    is_short = target is not None and not target.verbose
    for finding in report.findings[1:][: _ALSO if is_short else None]:
        cause, fix = finding_text(report, finding)
        yield f"Also: {in_a_sentence(cause)} {fix}".rstrip()
    yield from map(note_text, report.notes)
    if not is_short and report.largest_free_bytes:
        yield f"The largest block that is reserved but unused has {bytes_text(report.largest_free_bytes)}."


def _tip(report: WhyReport) -> str:
    key = report.findings[0].key if report.findings else ""
    run = report.run
    if run is not None and report.subject is not None and key == "why_fits" and report.total_bytes:
        limit = {} if report.gpu else {"device": run.device, "budget": report.total_bytes >> 20 << 20}
        if report.phase == "evaluation":
            why = "see what an evaluation without logits on the GPU needs"
            return next_command(report, "estimate", why, eval_samples=None, **limit)
        return micro_batches(report, run.batch, seq=run.seq, **limit)
    if report.source != MESSAGE or key not in _COMPARED:
        return "nvidia-smi" if key in ("why_other", "why_free") else ""
    if run is not None:
        changes = {"file": "snapshot.pickle"}
        model = model_code(report.subject.name if report.subject else "")
        command = command_text("why", changes, {}, f"bertscope.why('snapshot.pickle', {model})")
        return f"record a memory snapshot (help of '{named('bertscope why')}')\n  {command}"
    changes = {"file": Placeholder("oom.log")} if report.name == TEXT else {}
    names = ["batch", "seq", *["eval_batch", "eval_samples"] * (report.phase == "evaluation")]
    python = f"bertscope.why({report.name!r}, model, {', '.join(f'{name}=N' for name in names)})"
    changes |= {"model": Placeholder("MODEL"), **dict.fromkeys(names, Placeholder("N"))}
    command = command_text("why", changes, {}, python)
    return f"compare it with an estimate\n  {command}"


def _verdict(report: WhyReport) -> str:
    needs_more = report.answer == "why_fits" and report.findings[0].frees_bytes
    return "no" if report.moment == OOM or needs_more else "uncertain" if report.findings else "yes"


VIEW = View(
    answer=_answer,
    verdict=_verdict,
    settings=_settings,
    tip=_tip,
    tables=_tables,
    notes=_notes,
    shows_all_notes=True,
    records=lambda report: _lines(report, report.rows),
)


def history_svg(report: WhyReport) -> str:
    """Return the history's picture: each part's bytes, stacked, over the events."""
    names = list(dict.fromkeys([part.part for part in report.parts] + [n for at in report.timeline for n in at.held]))
    top = max(max(sum(sample.held.values()) for sample in report.timeline), 1)
    chart = Chart(top, one_line(report.name, limit=80), f"{report.events} events", legend=150)
    events = [sample.event / max(report.timeline[-1].event, 1) for sample in report.timeline]
    below, shapes = [0] * len(events), []
    for row, part in enumerate(names):
        above = [low + sample.held.get(part, 0) for low, sample in zip(below, report.timeline, strict=True)]
        edge = [*map(chart.at, events, above), *map(chart.at, events[::-1], below[::-1])]
        color, y = COLORS.get(part, _GREY), 20 + 18 * row
        shapes.append(f'<polygon points="{" ".join(f"{x},{y}" for x, y in edge)}" fill="{color}"/>')
        shapes.append(f'<rect x="632" y="{y}" width="10" height="10" fill="{color}"/>')
        shapes.append(chart.text(647, y + 10, part_name(part)))
        below = above
    return chart.svg(shapes)
