"""The walk of `explain` as text, CSV and Markdown, in English and in Chinese; the texts are in explain_texts/."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from bertscope.errors import SelectionError, assigned, one_line, shown
from bertscope.reports.base import Note
from bertscope.reports.explain import ExplainReport, Formula, Point, Section, Step, Sum
from bertscope.units import count_text
from bertscope.views.columns import Column, attribute, copies_text, csv_text, markdown_text, number, reader, values
from bertscope.views.console import Target, painted, wrapped

NAMINGS = {"keras": "name", "hf": "path", "tf": "tf_name"}
LANGUAGES = "en", "zh"
_language: ContextVar[str] = ContextVar("language", default="en")


@cache
def texts(language: str) -> dict[str, str]:
    """Return a language's texts by key."""
    import yaml

    file = Path(__file__).parent / "explain_texts" / f"{language}.yaml"
    by_key: dict[str, str] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return by_key


def in_language(language: str) -> AbstractContextManager[None]:
    """Set the language of the texts within a `with` statement; raises SelectionError for another than LANGUAGES."""
    if language not in LANGUAGES:
        raise SelectionError(f"lang must be one of {', '.join(LANGUAGES)}; got {language!r}")
    return assigned(_language, language)


def say(key: str, /, **values: Any) -> str:
    """Return a text in the chosen language with its values."""
    return texts(_language.get())[key].format(**values)


def _title(report: ExplainReport) -> str:
    subject = report.subject
    attention = say("attention", name=subject.attention) if subject.attention else ""
    text = say("comma").join(filter(None, (subject.architecture, attention, one_line(subject.adapters, limit=125))))
    name = one_line(subject.name, limit=120)
    return text if subject.name == subject.architecture else say("named", name=name, text=text)


def _answer(report: ExplainReport) -> str:
    total = report.sums[-1]
    flops = say("explain_answer_flops", flops=count_text(total.counted_flops)) if report.batch is not None else ""
    is_equal = all(item.agrees for item in report.sums)
    verdict = say("explain_equal" if is_equal else "explain_unequal")
    return say("explain_answer", params=count_text(total.counted_params), flops=flops, verdict=verdict)


def _flow(step: Step) -> str:
    return "  =  ".join(dict.fromkeys(_arrow(step, sizes) for sizes in ({}, step.sizes)))


def _arrow(step: Step, sizes: Mapping[str, int]) -> str:
    shapes = (", ".join(str(sizes.get(name, name)) for name in dims) for dims in (*step.inputs, step.output))
    *inputs, output = (f"[{shape}]" for shape in shapes)
    source = say("both").join(inputs) or ("" if step.type else say("explain_ids"))
    return f"{source} -> {output}" if step.output or not step.type else source


def _formula(formula: Formula) -> str:
    value = count_text(formula.value)
    if not formula.numbers:
        return f"{value} ({formula.symbols})"
    numbers = "" if formula.numbers == str(formula.value) else f"{formula.numbers} = "
    terms = f"{' + '.join(map(count_text, formula.terms))} = " if formula.terms else ""
    return f"{formula.symbols} = {numbers}{terms}{value}"


def table(report: ExplainReport, target: Target, naming: str | None = None, lang: str = "en") -> str:
    """Return the steps for the terminal; `naming` puts the names of the other two vocabularies next to it."""
    with in_language(lang):
        text = painted(wrapped(_answer(report), target), "strong", target) if report.sums else ""
        text += painted(wrapped(_title(report), target), "dim" if text else "", target)
        if report.steps:
            sizes = _notes(report) if report.batch is None else say("explain_batch", batch=report.batch)
            sizes = sizes if report.seq is None else say("explain_sizes", batch=report.batch, seq=report.seq)
            steps = "\n".join(_step(step, target, naming) for step in report.steps)
            text += f"{wrapped(sizes, target, 4)}\n{steps}\n"
        text += "".join(wrapped(_sum(item, report), target, 2) for item in report.sums)
        for item in report.questions:
            text += f"\n{_said('question', item)}\n{_wrapped(_said('answer', item), target)}"
        for section in report.sections:
            text += f"\n{section_title(section)}\n"
            text += "".join(_wrapped(section_text(section, key), target) for key in section.notes)
            for number, point in enumerate(section.points, 1):
                text += wrapped(f"{f'{number}.':>4} {_point(section, point)}", target, 5)
        return text


def _said(kind: str, note: Note) -> str:
    return say(f"explain_{kind}_{note.key}", **note.values)


def _sentence(step: Step) -> str:
    return say("sentence_break").join(_said("step", note) for note in step.sentences)


def section_title(section: Section) -> str:
    """Return a section's title with its values."""
    return say(f"explain_title_{section.key}", **section.values)


def section_text(section: Section, key: str) -> str:
    """Return a sentence of a section with its values."""
    return say(f"explain_{section.key}_{key}", **section.values)


def _point(section: Section, point: Point) -> str:
    shape = f" {point.shape}" if point.shape else ""
    sizes = f" = {point.sizes}" if point.sizes != point.shape else ""
    kind = f" ({point.type})" if point.type else ""
    return say(
        "named",
        name=f"{texts(_language.get()).get(f'explain_point_{point.name}', point.name)}{shape}{sizes}{kind}",
        text=section_text(section, point.key),
    )


def _notes(report: ExplainReport) -> str:
    return "".join(say(note.key, reason=shown(note.values["reason"])) for note in report.notes)


def _step(step: Step, target: Target, naming: str | None) -> str:
    first = NAMINGS[naming or "keras"]
    fields = [field for field in ("path", "tf_name", "name") if field != first] if naming else ["path"]
    name = getattr(step, first) or step.name
    names = (getattr(step, field) for field in fields)
    beside = "".join(f"  =  {other}" for other in names if other and other != name)
    lines = [f"{f'{step.number}. ' if step.number else ''}{name}{_marks(step)}{beside}"]
    lines += [f"  {flow}"] if (flow := _flow(step)) else []
    lines.append("  " + say("explain_params", formula=_formula(step.params) if step.params else "0"))
    if step.flops is not None:
        lines.append("  " + say("explain_flops", formula=_formula(step.flops)))
    return "".join(wrapped(line, target, 4) for line in lines) + _wrapped(_sentence(step), target)


def _marks(step: Step) -> str:
    return copies_text(step.copies) + (f": {step.type}" if step.type else "")


def _wrapped(sentence: str, target: Target) -> str:
    return wrapped(f"  {sentence}", replace(target, width=min(target.width or 110, 110)), 2)


def _sum(item: Sum, report: ExplainReport) -> str:
    flops = ""
    if report.batch is not None:
        flops = say("explain_sum_flops", flops=count_text(item.flops), counted=count_text(item.counted_flops))
    group, each, count = item.group.partition(" (each of ")  # `layer (each of 12)`
    if each:
        group = say("explain_each", name=group, count=count.rstrip(")"))
    elif group == "total":
        group = say("total")
    params = f"{item.symbols} = " * ("+" in item.symbols) + count_text(item.params)
    verdict = say("explain_equal" if item.agrees else "explain_unequal")
    counted = count_text(item.counted_params)
    return say("explain_sum", group=group, params=params, counted=counted, flops=flops, verdict=verdict)


def _columns() -> list[Column]:
    def formula(title: str, name: str) -> Column:
        def value(step: Step) -> int:
            return getattr(getattr(step, name), "value", 0)

        column = attribute(title, name, text=_formula, missing="0")
        return replace(column, csv={f"{name}_formula": reader(f"{name}.symbols"), name: value})

    return [
        number("#", "number", str),
        Column(say("explain_step"), lambda step: step.name + _marks(step), {"step": reader("name")}),
        Column("hf", reader("path"), values("type") | {"hf": reader("path")}),
        Column("tf", reader("tf_name"), {"tf": reader("tf_name")} | values("copies")),
        Column(say("explain_flow"), _flow, {"flow": _flow}),
        formula(say("explain_column_params"), "params"),
        formula("FLOPs", "flops"),
        Column(say("explain_sentence"), _sentence, {"sentence": _sentence}),
    ]


def markdown(report: ExplainReport, lang: str = "en") -> str:
    """Return the report for a page."""

    def escaped(text: str) -> str:
        return text.replace("*", "\\*").replace("_", "\\_")

    with in_language(lang):
        text = f"**{_title(report)}**\n\n"
        text += f"{_notes(report)}\n\n" if report.notes else ""
        text += f"{markdown_text(_columns(), report.steps)}\n" if report.steps else ""
        text += escaped("".join(f"- {_sum(item, report)}\n" for item in report.sums))
        for item in report.questions:
            text += f"\n**{_said('question', item)}** {_said('answer', item)}\n"
        for section in report.sections:
            notes = "".join(f"{section_text(section, key)}\n\n" for key in section.notes)
            points = "".join(f"{number}. {_point(section, point)}\n" for number, point in enumerate(section.points, 1))
            text += f"\n**{section_title(section)}**\n\n{escaped(notes + points)}"
        return text


def csv(report: ExplainReport, lang: str = "en") -> str:
    """Return the steps for a spreadsheet, in English in any language."""
    return csv_text(_columns(), report.steps)
