"""The walk of `explain` as text, CSV and Markdown, in English and in Chinese; the texts are in explain_texts/."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from bertscope.errors import SelectionError, one_line, shown
from bertscope.reports.base import Note
from bertscope.reports.explain import ExplainReport, Formula, Point, Section, Step, Sum
from bertscope.units import count_text
from bertscope.views.columns import Column, copies_text, csv_text, markdown_text, values
from bertscope.views.console import Target, wrapped

NAMINGS = {"keras": "name", "hf": "path", "tf": "tf_name"}
LANGUAGES = "en", "zh"
_language: ContextVar[str] = ContextVar("language", default="en")


@cache
def texts(language: str) -> dict[str, str]:
    """Return the texts of a language by key."""
    import yaml

    file = Path(__file__).parent / "explain_texts" / f"{language}.yaml"
    found: dict[str, str] = yaml.load(file.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506
    return found


@contextmanager
def in_language(language: str) -> Iterator[None]:
    """Set the language of the texts within a `with` statement; raises SelectionError for another than LANGUAGES."""
    if language not in LANGUAGES:
        raise SelectionError(f"lang must be one of {', '.join(LANGUAGES)}; got {language!r}")
    token = _language.set(language)
    try:
        yield
    finally:
        _language.reset(token)


def say(key: str, /, **values: Any) -> str:
    """Return a text in the chosen language with its values."""
    return texts(_language.get())[key].format(**values)


def _title(report: ExplainReport) -> str:
    subject = report.subject
    attention = say("attention", name=subject.attention) if subject.attention else ""
    adapters = f"LoRA {one_line(subject.lora, limit=120)}" if subject.lora else ""
    text = say("comma").join(filter(None, (subject.architecture, attention, adapters)))
    name = one_line(subject.name, limit=120)
    return text if subject.name == subject.architecture else say("named", name=name, text=text)


def _flow(step: Step) -> str:
    """Return the shapes of inputs and output, with names, and with numbers where they are known."""
    return "  =  ".join(dict.fromkeys(_arrow(step, sizes) for sizes in ({}, step.sizes)))


def _arrow(step: Step, sizes: Mapping[str, int]) -> str:
    shapes = (", ".join(str(sizes.get(name, name)) for name in dims) for dims in (*step.inputs, step.output))
    *inputs, output = (f"[{shape}]" for shape in shapes)
    given = say("both").join(inputs) or ("" if step.type else say("explain_ids"))
    return f"{given} -> {output}" if step.output or not step.type else given


def _formula(formula: Formula | None) -> str:
    if formula is None:
        return "0"
    value = count_text(formula.value)
    if not formula.numbers:
        return f"{value} ({formula.symbols})"
    numbers = "" if formula.numbers == str(formula.value) else f"{formula.numbers} = "
    terms = f"{' + '.join(map(count_text, formula.terms))} = " if formula.terms else ""
    return f"{formula.symbols} = {numbers}{terms}{value}"


def _formula_values(name: str) -> dict[str, Callable[[Step], Any]]:
    return {
        f"{name}_formula": lambda step: getattr(getattr(step, name), "symbols", ""),
        name: lambda step: getattr(getattr(step, name), "value", 0),
    }


def table(report: ExplainReport, target: Target, naming: str | None = None, lang: str = "en") -> str:
    """Return the steps for the terminal; `naming` puts the names of the other two vocabularies next to it."""
    with in_language(lang):
        return _table(report, target, naming)


def _table(report: ExplainReport, target: Target, naming: str | None) -> str:
    blocks = "\n".join(_step(step, target, naming) for step in report.steps)
    sums = "".join(wrapped(_sum(item, report), target, 2) for item in report.sums)
    questions = "".join(
        f"\n{_said('question', item)}\n{_wrapped(_said('answer', item), target)}" for item in report.questions
    )
    if report.steps:
        sizes = _notes(report) if report.batch is None else say("explain_sizes", batch=report.batch, seq=report.seq)
        blocks = f"{wrapped(sizes, target, 4)}\n{blocks}\n"
    sections = "".join(f"\n{_section(section, target)}" for section in report.sections)
    return f"{_title(report)}\n{blocks}{sums}{questions}{sections}"


def _said(kind: str, note: Note) -> str:
    return say(f"explain_{kind}_{note.key}", **note.values)


def sentence(step: Step) -> str:
    """Return what a step does."""
    return say("sentence_break").join(_said("step", note) for note in step.sentences)


def _section(section: Section, target: Target) -> str:
    notes = "".join(_wrapped(section_text(section, key), target) for key in section.notes)
    points = "".join(
        wrapped(f"{f'{number}.':>4} {_point(section, point)}", target, 5)
        for number, point in enumerate(section.points, 1)
    )
    return f"{section_title(section)}\n{notes}{points}"


def section_title(section: Section) -> str:
    """Return the title of a section with its values."""
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
    others = [field for field in ("path", "tf_name", "name") if field != first] if naming else ["path"]
    name = getattr(step, first) or step.name
    names = (getattr(step, field) for field in others)
    beside = "".join(f"  =  {other}" for other in names if other and other != name)
    lines = [f"{f'{step.number}. ' if step.number else ''}{name}{_marks(step)}{beside}"]
    lines += [f"  {flow}"] if (flow := _flow(step)) else []
    lines.append("  " + say("explain_params", formula=_formula(step.params)))
    if step.flops is not None:
        lines.append("  " + say("explain_flops", formula=_formula(step.flops)))
    return "".join(wrapped(line, target, 4) for line in lines) + _wrapped(sentence(step), target)


def _marks(step: Step) -> str:
    """Return ` (12 x): Linear`: the number of equal layers and the class, as far as a step has them."""
    return copies_text(step.copies) + (f": {step.type}" if step.type else "")


def _wrapped(sentence: str, target: Target) -> str:
    return wrapped(f"  {sentence}", replace(target, width=min(target.width or 110, 110)), 2)


def _sum(item: Sum, report: ExplainReport) -> str:
    flops = ""
    if report.batch is not None:
        flops = say("explain_sum_flops", flops=count_text(item.flops), counted=count_text(item.counted_flops))
    terms = f"{item.symbols} = " if "+" in item.symbols else ""
    verdict = say("explain_equal" if item.agrees else "explain_unequal")
    return say("explain_sum", group=_group(item.group), params=terms + count_text(item.params),
               counted=count_text(item.counted_params), flops=flops, verdict=verdict)  # fmt: skip


def _group(name: str) -> str:
    """Return the name of a sum, `layer (each of 12)` or `total`, in words."""
    layer, each, count = name.partition(" (each of ")
    if each:
        return say("explain_each", name=layer, count=count.rstrip(")"))
    return say("total") if name == "total" else name


def _columns() -> list[Column]:
    return [
        Column("#", lambda step: str(step.number), values("number"), right=True),
        Column(say("explain_step"), lambda step: step.name + _marks(step), {"step": lambda step: step.name}),
        Column("hf", lambda step: step.path, values("type") | {"hf": lambda step: step.path}),
        Column("tf", lambda step: step.tf_name, {"tf": lambda step: step.tf_name} | values("copies")),
        Column(say("explain_flow"), _flow, {"flow": _flow}),
        Column(say("explain_column_params"), lambda step: _formula(step.params), _formula_values("params")),
        Column("FLOPs", lambda step: _formula(step.flops), _formula_values("flops")),
        Column(say("explain_sentence"), sentence, {"sentence": sentence}),
    ]


def markdown(report: ExplainReport, lang: str = "en") -> str:
    """Return the report for a page."""
    with in_language(lang):
        return _markdown(report)


def _markdown(report: ExplainReport) -> str:
    sums = "".join(f"- {_sum(item, report)}\n" for item in report.sums).replace("*", "\\*").replace("_", "\\_")
    questions = "".join(f"\n**{_said('question', item)}** {_said('answer', item)}\n" for item in report.questions)
    note = f"{_notes(report)}\n\n" if report.notes else ""
    steps = f"{markdown_text(_columns(), report.steps)}\n" if report.steps else ""
    sections = "".join(_section_markdown(section) for section in report.sections)
    return f"**{_title(report)}**\n\n{note}{steps}{sums}{questions}{sections}"


def _section_markdown(section: Section) -> str:
    notes = "".join(f"{section_text(section, key)}\n\n" for key in section.notes)
    points = "".join(f"{number}. {_point(section, point)}\n" for number, point in enumerate(section.points, 1))
    return f"\n**{section_title(section)}**\n\n" + (notes + points).replace("*", "\\*").replace("_", "\\_")


def csv(report: ExplainReport, lang: str = "en") -> str:
    """Return the steps for a spreadsheet, in English in any language."""
    return csv_text(_columns(), report.steps)
