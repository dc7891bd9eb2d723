"""The request that any front end makes: settings with their origins, precedence, and the runs that they mean."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple, TypeVar

from bertscope.errors import name_of, naming, shown, suggestion
from bertscope.frozen import Record
from bertscope.settings.rows import (
    NO_PERMIT,
    RENAMED,
    CodeName,
    CodeObject,
    SettingError,
    Settings,
    no_effect,
    quoted,
    rows,
    with_permits,
)
from bertscope.settings.run_config import ESTIMATED, QUESTIONS, Question

Report = TypeVar("Report")


OF_MODEL = ("architecture", "attention", "add_pooling_layer", "lora", "download")  # options of a model, and of no run


class Value(NamedTuple):
    """The values of a setting, one for each run, and their origin."""

    values: tuple[Any, ...]
    where: str = ""  # file:line, or the table of a project; empty for an option and a keyword
    is_default: bool = False  # it may have no effect on a run, which is an error for other values


Source = dict[str, Value]  # the values that one front end gives


def read_settings(
    settings: Mapping[str, Any], *, compared: Collection[str] = (), where: Mapping[str, str] | str = "",
    is_default: bool = False, is_text: bool = False, records: tuple[type[Settings], ...] = ESTIMATED,
    permit: bool = False,
) -> Source:  # fmt: skip
    """Check the values that a front end reads: the only reader for all front ends; raises SettingError.

    `where` is one origin for all values or, by name, for each. Only settings in `compared` may have several values.
    With `is_text` numbers are text, as on a command line. With `permit` code may be imported by name: a person typed
    it, or gave --allow-code. A value None is not given.
    """
    table, source = rows(*records), Source()
    for name, value in settings.items():
        origin = where if isinstance(where, str) else where.get(name, "")
        try:
            if name not in table:
                raise SettingError(unknown_setting(name, table), [name])
            if value is None:
                continue
            values = table[name].values(value, is_text=is_text, is_compared=name in compared)
        except SettingError as error:
            if not origin:
                raise
            raise SettingError(error.of_file, error.names, where=origin) from None
        if permit and table[name].names_code:
            values = tuple(value if isinstance(value, CodeObject) else CodeName(value) for value in values)
        source[name] = Value(values, origin, is_default)
    return source


def in_words(settings: Mapping[str, Any]) -> str:
    """Return settings in words: `batch 16`, `precision autocast-fp16, grad_scaler`, `no clip_grad_norm`."""
    forms = {True: "{0}", False: "no {0}"}
    texts = {name: ", ".join(map(str, value)) if isinstance(value, list) else value for name, value in settings.items()}
    return ", ".join(
        forms[value].format(name) if isinstance(value, bool) else f"{name} {value}" for name, value in texts.items()
    )


def new_name(name: str, known: Collection[str] | None = None, form: Callable[[str], str] = str) -> str:
    """Return what to write instead of a setting, with names in a front end's form; empty if one is not known."""
    text = RENAMED.get(name, "")
    is_known = known is None or all(new in known for new in re.findall(r"\{(\w+)\}", text))
    with naming(form):
        return shown(SettingError(f"use {text}" if text.startswith("{") else text).message) if is_known else ""


def unknown_setting(name: str, known: Collection[str]) -> str:
    """Return the message about a setting that does not exist."""
    return f"there is no setting {name[:60]!r}; {new_name(name, known) or suggestion(name[:100], known)}"


class Combination(NamedTuple):
    """One combination of values: the settings, those left out, and the records that they give, or the error."""

    values: dict[str, Any]
    idle: frozenset[str]
    used: frozenset[str]  # by their values; a default among other values does not tell
    records: tuple[Any, ...] = ()
    error: SettingError | None = None


class Request(Record):
    """A request: the public function, its subject, and the sources of settings, highest precedence first.

    A front end passes it to the public function instead of the model. With `wants`, such as a step's snapshot, the
    function returns a pair: the report, and a dictionary of what is wanted.
    """

    question: str
    subject: Any = None
    sources: tuple[Source, ...] = ()
    training_file: Any = None
    plan: Any = None
    wants: Collection[str] | None = None  # None: the report alone

    @property
    def row(self) -> Question:
        """Return the function's row of QUESTIONS."""
        return QUESTIONS[self.question]

    @property
    def named(self) -> set[str]:
        """Return the settings that were asked for, without defaults."""
        return {name for source in self.sources for name, value in source.items() if not value.is_default}

    @property
    def permitted_plan(self) -> Any:
        """Return the plan, whose loss may be imported if a source with a permit names it too."""
        values = (value for source in self.sources for item in source.values() for value in item.values)
        return with_permits(self.plan, [str(value) for value in values if isinstance(value, CodeName)])

    def has(self, name: str) -> bool:
        """Return True if any source has the setting."""
        return any(name in source for source in self.sources)

    def without(self, *names: str) -> Request:
        """Return the request without defaults of these settings, for which the function has another meaning."""

        def kept(source: Source) -> Source:
            return {name: value for name, value in source.items() if not (value.is_default and name in names)}

        return replace(self, sources=tuple(map(kept, self.sources)))

    def over(self, *stronger: Source) -> Request:
        """Return the request with further sources in front."""
        return replace(self, sources=(*stronger, *self.sources))

    def before_defaults(self, source: Source) -> Request:
        """Return the request with a source before the other defaults."""
        stronger = [item for item in self.sources if not all(value.is_default for value in item.values())]
        return replace(self, sources=(*stronger, source, *(item for item in self.sources if item not in stronger)))

    def with_file(self, file: Any) -> Request:
        """Return the request with the settings of a training file, next to which a project has no precision."""
        taken = {name: value for name, value in file.fields.items() if name not in self.row.unused}
        source = read_settings(taken, where=file.path, is_default=True)
        return replace(self.without("precision").before_defaults(source), training_file=file)

    def with_plan(self, plan: Any, *, permit: bool = False) -> Request:
        """Return the request with a plan's run as a default, and its strategy after those asked for."""
        defaults = read_settings(
            plan.settings,
            is_default=True,
            compared=("freeze", "input"),
            records=self.row.records,
            permit=permit,
            where="the plan",
        )
        request, strategy = replace(self.before_defaults(defaults), plan=plan), plan.rows[0].checkpointing
        if "checkpointing" not in self.named:
            return request.over(read_settings({"checkpointing": strategy}, records=self.row.records))
        if "checkpointing" not in self.row.compared:
            raise self.error("give {checkpointing} or a plan, which sets it", "checkpointing")
        sources = list(request.sources)
        strategies = [source.get("checkpointing") for source in sources]
        number, value = next((n, value) for n, value in enumerate(strategies) if value and not value.is_default)
        value = value._replace(values=tuple(dict.fromkeys((*value.values, strategy))))
        sources[number] = sources[number] | {"checkpointing": value}
        return replace(request, sources=tuple(sources))

    def values(self, *weakest: Source) -> Source:
        """Return each setting's value from its strongest source, and the values that these imply.

        Raises SettingError for code without a permit.
        """
        table, chosen = rows(*self.row.records), Source()
        for source in (*self.sources, *weakest):
            has = chosen.keys()
            named = {name: value for name, value in source.items() if not has & {name, *table[name].yields_to}}
            known = {name: value.values for name, value in (chosen | named).items()}
            implied = Source()
            for name in (name for name in table if name in named):
                nondefault = [value for value in named[name].values if value and value != table[name].default]
                for other, implied_by in table[name].implies.items() if nondefault else ():
                    targets = (implied_by(value, known) if callable(implied_by) else implied_by for value in nondefault)
                    values = tuple(dict.fromkeys(targets))
                    implied.setdefault(other, Value(values, is_default=True))
            chosen |= {name: value for name, value in (implied | named).items() if name not in chosen}
        for name, value in chosen.items():
            is_code = table[name].names_code
            for item in value.values if is_code else ():
                if is_code and not isinstance(item, CodeName) and is_code(item):
                    raise placed(SettingError(f"{{{name}}} {quoted(item)} {NO_PERMIT}", [name]), chosen)
        return chosen

    def combinations(self, *weakest: Source) -> Iterator[Combination]:
        """Yield each combination; the last setting varies first.

        A run leaves out a setting without effect. Raises SettingError at the end if it has an effect
        on no run and is no default.
        """
        table, chosen, used = rows(*self.row.records), self.values(*weakest), set[str]()
        first = {name: names.default for name, names in table.items()}
        for combination in product(*(value.values for value in chosen.values())):
            effective = first | dict(zip(chosen, combination, strict=True))
            idle: set[str] = set()
            while further := [
                name for name in chosen if effective[name] != first[name] and table[name].unmet(effective)
            ]:
                idle.update(further)
                effective |= {name: first[name] for name in further}
            names = frozenset(
                name for name in chosen.keys() - idle if effective[name] != first[name] or len(chosen[name].values) == 1
            )
            used |= names
            try:
                records = tuple(record.of(effective) for record in self.row.records)
                yield Combination(effective, frozenset(idle), names, records)
            except SettingError as error:
                yield Combination(effective, frozenset(idle), names, error=error)
        unused = [name for name, value in chosen.items() if name not in used and not value.is_default]
        if unused:  # perhaps since it depends on one without effect, which is then the one to name
            values = first | {name: value.values[-1] for name, value in chosen.items()}
            name, other = next((name, other) for name in (*unused, *chosen) if (other := table[name].unmet(values)))
            raise placed(SettingError(no_effect(table[name], table[other], values[other]), [name, other]), chosen)

    def resolved(self, **defaults: Any) -> list[tuple[Any, ...]]:
        """Return each run's records, such as its RunConfig and Limit; `defaults` come after the sources.

        Several values for a setting give one run for each combination. Raises SettingError with its place.

        >>> batches = read_settings({"batch": [8, 16]}, compared=["batch"])
        >>> [run.batch for run, _ in Request(question="flops", subject="bert-tiny", sources=(batches,)).resolved()]
        [8, 16]
        """
        weakest = read_settings(defaults, compared=self.row.compared, is_default=True, records=self.row.records)
        points: dict[tuple[Any, ...], None] = {}
        for point in self.combinations(weakest):
            if point.error is not None:
                raise placed(point.error, self.values(weakest))
            points[point.records] = None
        return list(points)

    def answer(self, report: Report, **extras: Any) -> Report:
        """Return the report, or the report and extras for a front end that wants them."""
        pair: Any = (report, {name: extras.get(name) for name in self.wants or ()})
        return report if self.wants is None else pair

    def error(self, text: str, *names: str) -> SettingError:
        """Return the error about these settings, which the text names in braces, each in the form of its origin."""
        values = {name: source[name] for source in reversed(self.sources) for name in names if name in source}
        return placed(SettingError(text, names), values)


def placed(error: SettingError, values: Mapping[str, Value]) -> SettingError:
    """Return the error with `file:line` if one of its settings comes from a file, where names are plain.

    The other names stay marked: the outermost front end spells them as options or keywords.
    """
    places = {name: values[name].where for name in error.names if name in values and values[name].where}
    text = error.message.marked
    for name in places:
        text = text.replace(name_of(name), name)
    return SettingError(text, error.names, where=next(iter(places.values()), ""))
