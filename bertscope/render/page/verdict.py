"""The top of the page: if the step fits, the parts of its memory at the peak, and the answers in a few figures."""

from typing import Any

from bertscope.render.colors import PARTS, variable
from bertscope.render.fit import settings_text
from bertscope.render.footer import title
from bertscope.render.page.texts import Words
from bertscope.render.texts import say
from bertscope.render.timeline.panels import run_text
from bertscope.reports.memory import NO, YES, FitReport, FitRow
from bertscope.reports.page import ModelPart
from bertscope.units import bytes_text, count_text, flops_text

CONTEXT = "context"  # of CUDA, with the workspaces of cuBLAS


def verdict(model: ModelPart, words: Words) -> dict[str, Any]:
    """Return the answer for the step of the page, the memory of each variant, and what was assumed."""
    size = words("size", batch=count_text(model.batch), seq=count_text(model.seq))
    first, fit, asked = model.memory.variants[0], model.fit, model.asked
    way = _way(words, _precision(model), first.checkpointing)
    if asked is None or fit is None:
        peak = bytes_text(first.memory.peak.peak_bytes) if first.memory else "--"
        return {
            "answer": "unasked",
            "heading": words("unasked", peak=peak),
            "sentences": [_sentence(words("needs", size=size, way=way, peak=peak))],
            "bars": _bars(model, words),
            "rows": [(words("assumed"), f"{title(model.memory)}, {run_text(model.memory.run)}")],
        }
    row = next(
        row for row in asked.rows if (row.precision, row.checkpointing) == (_precision(model), first.checkpointing)
    )
    sentences = [words("needs", size=size, way=way, peak=bytes_text(row.peak_bytes))]
    if row.answer == NO:
        needed = row.peak_bytes - (asked.context_high_bytes - asked.context_low_bytes)
        sentences.append(words("short", bytes=bytes_text(needed - asked.budget_bytes)))
    if asked.run["device"] == "cuda":
        context = bytes_text(asked.overhead_bytes)
        sentences.append(words("reserved", context=context, bytes=bytes_text(row.reserved_bytes)))
    if row.answer != YES and (others := [_way_of(words, other) for other in asked.rows if other.answer == YES]):
        sentences.append(words("other_ways", ways=say("semicolon").join(others)))
    return {
        "answer": row.answer,
        "heading": words(row.answer, place=place(fit, words)),
        "sentences": [_sentence(text) for text in sentences],
        "bars": _bars(model, words),
        "rows": [
            (words("largest"), say("semicolon").join(_largest(words, found) for found in fit.rows)),
            (words("assumed"), settings_text(fit)),
        ],
    }


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def place(fit: FitReport, words: Words) -> str:
    """Return the budget, or the GPU and its memory."""
    memory = bytes_text(fit.budget_bytes)
    return words("place_gpu" if fit.card else "place_budget", card=fit.card.name if fit.card else "", memory=memory)


def _precision(model: ModelPart) -> str:
    run = model.memory.run
    return f"{run['autocast']} autocast" if run["autocast"] else str(run["dtype"])


def _way(words: Words, precision: str, strategy: str) -> str:
    return words("way" if strategy == "none" else "way_checkpointed", precision=precision, strategy=strategy)


def _way_of(words: Words, row: FitRow) -> str:
    return _way(words, row.precision, row.checkpointing)


def _largest(words: Words, row: FitRow) -> str:
    key = "largest_of" if row.fits else "none_fits"
    return words(key, batch=count_text(row.batch), way=_way_of(words, row))


def _color(part: str) -> str:
    return "var(--context)" if part == CONTEXT else variable("part", part)


def _bars(model: ModelPart, words: Words) -> dict[str, Any]:
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
        listed = ", ".join(f"{words.of('part', part)} {bytes_text(size)}" for part, size in sizes.items())
        way = _way(words, _precision(model), variant.checkpointing)
        bars.append(
            {
                "name": way,
                "label": words("peak_bar", way=way, parts=listed),
                "value": bytes_text(peak.peak_bytes + context),
                "parts": [
                    (
                        _color(part),
                        round(100 * size / whole, 3),
                        f"{words.of('part', part)} {bytes_text(size)}",
                    )
                    for part, size in sizes.items()
                ],
            }
        )
    return {
        "bars": bars,
        "budget": round(100 * budget / whole, 3) if budget else None,
        "place": place(model.fit, words) if model.fit else "",
        "colors": {words.of("part", part): _color(part) for part in (*PARTS, CONTEXT) if part in used},
    }


def figures(model: ModelPart, words: Words) -> list[tuple[str, str, str, str]]:
    """Return names, figures, their exact values and how each was obtained."""
    totals, how = model.tree.totals, words("flops_how", batch=count_text(model.batch), seq=count_text(model.seq))
    flops = (
        ("forward_flops", model.flops.rows[0].total.matmul_flops),
        ("step_flops", model.training.rows[0].total.matmul_flops),
    )
    found = [(words("unique"), count_text(totals.distinct_params), "", words("unique_how"))]
    if totals.layer_params != totals.distinct_params:
        found.append((words("layers"), count_text(totals.layer_params), "", words("layers_how")))
    weights = words("weights_how", bf16=bytes_text(totals.bf16_bytes))
    found.append((words("weights"), bytes_text(totals.fp32_bytes), f"{count_text(totals.fp32_bytes)} B", weights))
    found += [(words(key), flops_text(count), f"{count_text(count)} FLOP", how) for key, count in flops]
    return found
