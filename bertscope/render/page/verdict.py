"""The top of the page: if the step fits, the parts of its memory at the peak, and the answers in a few figures."""

from typing import Any

from bertscope.render.colors import PARTS, variable
from bertscope.render.fit import missing_text, settings
from bertscope.render.footer import subtitle
from bertscope.render.timeline.panels import part_name, run_text
from bertscope.reports.memory import NO, YES, FitReport, FitRow
from bertscope.reports.page import ModelPart
from bertscope.settings.run_config import STORED
from bertscope.texts import say
from bertscope.units import bytes_text, count_text, flops_text

CONTEXT = "context"  # of CUDA, with the workspaces of cuBLAS


def verdict(model: ModelPart) -> dict[str, Any]:
    """Return the answer for the step of the page, the memory of each variant, and what was assumed."""
    size = say("page_size", batch=count_text(model.batch), seq=count_text(model.seq))
    first, fit, asked = model.memory.variants[0], model.fit, model.asked
    way = _way(_precision(model), first.checkpointing)
    if asked is None or fit is None:
        peak = bytes_text(first.memory.peak.peak_bytes) if first.memory else "--"
        return {
            "answer": "unasked",
            "heading": say("heading_unasked", peak=peak),
            "sentences": [_sentence(say("needs", size=size, way=way, peak=peak))],
            "bars": _bars(model),
            "rows": [(say("assumed_title"), say("comma").join((subtitle(model.memory), run_text(model.memory.run))))],
        }
    row = next(
        row for row in asked.rows if (row.precision, row.checkpointing) == (_precision(model), first.checkpointing)
    )
    sentences = [say("needs", size=size, way=way, peak=bytes_text(row.peak_bytes))]
    if row.answer == NO:
        sentences.append(say("short_of", bytes=missing_text(asked, row)))
    if asked.run.device == "cuda":
        context = bytes_text(asked.overhead_bytes)
        sentences.append(say("of_it_reserved", context=context, bytes=bytes_text(row.reserved_bytes)))
    if row.answer != YES and (others := [_way_of(other) for other in asked.rows if other.answer == YES]):
        sentences.append(say("other_ways", ways=say("semicolon").join(others)))
    return {
        "answer": row.answer,
        "heading": say(f"heading_{row.answer}", place=place(fit)),
        "sentences": [_sentence(text) for text in sentences],
        "bars": _bars(model),
        "rows": [
            (say("largest"), say("semicolon").join(_largest(found) for found in fit.rows)),
            (say("assumed_title"), say("comma").join((subtitle(fit), *settings(fit)))),
        ],
    }


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def place(fit: FitReport) -> str:
    """Return the budget, or the GPU and its memory."""
    memory = bytes_text(fit.budget_bytes)
    return say("place_gpu" if fit.card else "place_budget", card=fit.card.name if fit.card else "", memory=memory)


def _precision(model: ModelPart) -> str:
    return model.memory.run.precision


def _way(precision: str, strategy: str) -> str:
    shown = say("way_stored") if precision == STORED else precision
    return say("way_plain" if strategy == "none" else "way", precision=shown, strategy=strategy)


def _way_of(row: FitRow) -> str:
    return _way(row.precision, row.checkpointing)


def _largest(row: FitRow) -> str:
    return say("largest_of" if row.fits else "none_fits", batch=count_text(row.batch), way=_way_of(row))


def _color(part: str) -> str:
    return "var(--context)" if part == CONTEXT else variable("part", part)


def _bars(model: ModelPart) -> dict[str, Any]:
    """Return the parts at the peak of each variant as shares of the budget, or of the highest peak if it is higher."""
    known = [(variant, variant.memory.peak) for variant in model.memory.variants if variant.memory]
    budget = model.fit.budget_bytes if model.fit else 0
    context = model.fit.overhead_bytes if model.fit else 0
    whole = max([budget, *(peak.peak_bytes + context for _, peak in known)]) or 1
    bars, used = [], set()
    for variant, peak in known:
        sizes = {part: getattr(peak.parts, part) for part in PARTS if getattr(peak.parts, part)}
        sizes |= {CONTEXT: context} if context else {}
        used |= set(sizes)
        listed = say("comma").join(f"{part_name(part)} {bytes_text(size)}" for part, size in sizes.items())
        way = _way(_precision(model), variant.checkpointing)
        bars.append(
            {
                "name": way,
                "label": say("peak_bar", way=way, parts=listed),
                "value": bytes_text(peak.peak_bytes + context),
                "parts": [
                    (
                        _color(part),
                        round(100 * size / whole, 3),
                        f"{part_name(part)} {bytes_text(size)}",
                    )
                    for part, size in sizes.items()
                ],
            }
        )
    return {
        "bars": bars,
        "budget": round(100 * budget / whole, 3) if budget else None,
        "place": place(model.fit) if model.fit else "",
        "colors": {part_name(part): _color(part) for part in (*PARTS, CONTEXT) if part in used},
    }


def figures(model: ModelPart, *, are_tied: bool) -> list[tuple[str, str, str, str]]:
    """Return names, figures, their exact values and how each was obtained; `are_tied`: with the sum over layers."""
    totals = model.tree.totals
    how = say("comma").join((say("batch", count=count_text(model.batch)), say("sequence", count=count_text(model.seq))))
    flops = (
        (say("forward_pass"), model.flops.rows[0].total.matmul_flops),
        (say("training_step"), model.training.rows[0].total.matmul_flops),
    )
    found = [(_sentence(say("unique")), count_text(totals.distinct_params), "", say("unique_how"))]
    if are_tied:
        how_tied = say("layers_how" if totals.layer_params != totals.distinct_params else "nothing_tied")
        found.append((_sentence(say("over_layers")), count_text(totals.layer_params), "", how_tied))
    weights = say("weights_how", bf16=bytes_text(totals.bf16_bytes))
    found.append((say("weights"), bytes_text(totals.fp32_bytes), f"{count_text(totals.fp32_bytes)} B", weights))
    found += [(name, flops_text(count), f"{count_text(count)} FLOP", how) for name, count in flops]
    return found
