"""The layers of what any front end asks for become the runs and the limit that it means."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from bertscope.errors import suggestion
from bertscope.frozen import dataclass
from bertscope.settings.code_names import NO_PERMIT, CodeName
from bertscope.settings.rows import Row, SettingError, Settings, no_effect, quoted, rows
from bertscope.settings.run_config import ESTIMATED, Limit, RunConfig


class Layer(dict[str, tuple[Any, ...]]):
    """The values of settings from one front end, each a tuple, and the place of each.

    A place is the `file:line` of a key. `forms` are the names of settings for messages, such as `--batch`. Settings of
    a layer `is_default` may have no effect on a run; of other layers that is an error. Only settings in `compared` may
    have several values. With `is_text` numbers are text, as on a command line. With `permit` its names of code may be
    imported: a person typed them, or gave --allow-code.
    """

    def __init__(
        self, given: Mapping[str, Any], *, compared: Collection[str] = (), where: Mapping[str, str] | str = "",
        forms: Mapping[str, str] | None = None, is_default: bool = False, is_text: bool = False,
        records: tuple[type[Settings], ...] = ESTIMATED, permit: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        table = rows(*records)
        self.where = dict.fromkeys(given, where) if isinstance(where, str) else where
        self.forms, self.is_default = forms or {}, is_default
        for name, value in given.items():
            try:
                if name not in table:
                    raise SettingError(unknown_setting(name, table), [name])
                values = table[name].values(value, is_text=is_text, is_compared=name in compared)
                self[name] = tuple(map(CodeName, values)) if permit and table[name].names_code else values
            except SettingError as error:
                message = error.spelled(self.forms)
                raise SettingError(message, error.names, where=self.where.get(name, "")) from None


# What a setting is called here -> former names, and the words of other tools.
_CALLED = {
    "{precision}": "dtype torch_dtype", "{precision} autocast-bf16": "autocast bf16 amp mixed_precision use_amp",
    "{precision} autocast-fp16": "fp16 use_fp16", "{precision} fp16": "half", "{mode} training": "train training",
    "{mode} inference": "infer inference eval", "{expandable_segments}": "alloc_conf", "{loop} plain": "hold_outputs",
    "{input}": "inputs input_size", "{dropout}": "no_dropout", "{architecture}": "head model_class",
    "{budget}": "memory vram gpu_memory max_memory", "{fmt} json": "json", "{fmt} csv": "csv",
    "{fmt} markdown": "markdown md", "{attention}": "attn attn_implementation attention_implementation",
    "{seq}": "max_length max_seq_length max_seq_len seq_len seq_length sequence_length sequence_len context_length ctx "
             "cutoff_len seqlen",
    "{batch}": "batch_size per_device_train_batch_size micro_batch_size train_batch_size bs",
    "{checkpointing} full": "gradient_checkpointing grad_checkpointing activation_checkpointing recompute",
    "{accumulate}": "grad_accum gradient_accumulation_steps gradient_accumulation accumulation_steps grad_acc",
    "{optimizer} adamw-8bit": "8bit use_8bit adam8bit", "{optimizer}": "optim",
    "{world_size}": "num_gpus n_gpus ngpus nproc_per_node num_processes", "{strategy} fsdp": "fsdp use_fsdp",
    "{strategy} ddp": "ddp", "{strategy} zero1": "deepspeed zero", "{lora} r=8,target=query+value": "use_lora peft",
}  # fmt: skip
RENAMED = {word: text for text, words in _CALLED.items() for word in words.split()}


def new_name(name: str, known: Collection[str], forms: Mapping[str, str] | None = None) -> str:
    """Return what a setting is called here, with names in the form of a front end; empty if none of them is known."""
    text = RENAMED.get(name, "")
    names = re.findall(r"\{(\w+)\}", text)
    return SettingError(text).spelled(forms or {}) if names and all(new in known for new in names) else ""


def unknown_setting(name: str, known: Collection[str]) -> str:
    """Return the message about a setting that does not exist."""
    new = new_name(name, known)
    hint = f"it is {new} here" if new else suggestion(name[:100], known)
    return f"there is no setting {name[:60]!r}; {hint}"


@dataclass(frozen=True)
class Resolved:
    """The runs with their limits in the order in which they were asked, and the defaults without effect on any run."""

    points: tuple[tuple[Any, ...], ...]  # of each of the records: a run, its limit ...
    unused: tuple[str, ...] = ()

    @property
    def runs(self) -> tuple[RunConfig, ...]:
        """Return the runs, each once."""
        return tuple(dict.fromkeys(point[0] for point in self.points))

    @property
    def limits(self) -> tuple[Limit, ...]:
        """Return the limits, each once."""
        return tuple(dict.fromkeys(point[1] for point in self.points))


class Combination(NamedTuple):
    """One combination of values: the settings, those left out, and the records that they give, or the error."""

    values: dict[str, Any]
    idle: frozenset[str]
    used: frozenset[str]  # by their values; a default among other values does not tell
    records: tuple[Any, ...] = ()
    error: SettingError | None = None


def combinations(
    kept: Mapping[str, Sequence[Any]], records: tuple[type[Settings], ...] = ESTIMATED
) -> Iterator[Combination]:
    """Yield each combination of the values; the last setting varies first."""
    table = rows(*records)
    first = {name: own.default for name, own in table.items()}
    for combination in product(*kept.values()):
        values = first | dict(zip(kept, combination, strict=True))
        idle: set[str] = set()
        effective = dict(values)
        while further := [name for name in kept if effective[name] != first[name] and table[name].unmet(effective)]:
            idle.update(further)
            effective |= {name: first[name] for name in further}
        given = kept.keys() - idle
        used = frozenset(name for name in given if effective[name] != first[name] or len(kept[name]) == 1)
        try:
            made = tuple(record.of(effective) for record in records)
            yield Combination(effective, frozenset(idle), used, made)
        except SettingError as error:
            yield Combination(effective, frozenset(idle), used, error=error)


def resolve(*layers: Layer, records: tuple[type[Settings], ...] = ESTIMATED) -> Resolved:
    """Return the records that layers ask for, the strongest layer first. Raises SettingError with its place.

    Several values of a setting give one run for each combination; the last setting varies first. A setting is left out
    of a run on which it has no effect. That it has an effect on no run is an error, unless it is a default.

    >>> [run.batch for run in resolve(Layer({"batch": [8, 16]}, compared=["batch"])).runs]
    [8, 16]
    """
    kept = merged(layers, rows(*records))
    found: dict[tuple[Any, ...], None] = {}
    used: set[str] = set()
    for point in combinations(kept, records):
        if point.error is not None:
            raise placed(point.error, layers)
        used |= point.used
        found[point.records] = None
    check_use(layers, kept, used, records)
    return Resolved(tuple(found), tuple(sorted(kept.keys() - used)))


def check_use(
    layers: Sequence[Layer],
    kept: Mapping[str, Sequence[Any]],
    used: Collection[str],
    records: tuple[type[Settings], ...],
) -> None:
    """Raise SettingError for a setting that was asked for and has an effect on no run."""
    table = rows(*records)
    for name in kept:
        if name in used or all(layer.is_default for layer in layers if name in layer):
            continue
        others = {other: kept[other][-1] if other in kept else table[other].default for other in table[name].concerns}
        other = table[name].unmet(others)
        raise placed(SettingError(no_effect(table[name], table[other], others[other]), [name, other]), layers)


def merged(layers: Sequence[Layer], table: Mapping[str, Row]) -> dict[str, tuple[Any, ...]]:
    """Return the values of each setting from its strongest layer, and those that they imply."""
    kept: dict[str, tuple[Any, ...]] = {}
    for layer in layers:
        own = {name: values for name, values in layer.items() if not kept.keys() & {name, *table[name].yields_to}}
        implied: dict[str, tuple[Any, ...]] = {}
        for name in (name for name in table if name in own):
            for other, value_of in table[name].implies.items():
                given = [value for value in own[name] if value and value != table[name].default]
                if given:
                    implied.setdefault(other, tuple(dict.fromkeys(value_of(value, kept | own) for value in given)))
        kept |= {name: values for name, values in (implied | own).items() if name not in kept}
    for name, is_code in ((name, table[name].names_code) for name in kept):
        for value in kept[name] if is_code else ():
            if is_code and not isinstance(value, CodeName) and is_code(value):
                raise placed(SettingError(f"{{{name}}} {quoted(value)} {NO_PERMIT}", [name]), layers)
    return kept


def used_settings(layer: Layer, stronger: Sequence[Layer], records: tuple[type[Settings], ...]) -> list[str]:
    """Return the settings of a layer that the stronger layers leave to it."""
    table = rows(*records)
    before = merged(stronger, table)
    return [name for name in layer if not before.keys() & {name, *table[name].yields_to}]


def placed(error: SettingError, layers: Sequence[Layer]) -> SettingError:
    """Return the error with the place of the first of its settings that has one, in the form of their layers."""
    forms = dict(next((layer.forms for layer in layers if layer.forms), {}))
    places = []
    for name in error.names:
        layer = next((layer for layer in layers if name in layer), None)
        if layer is not None:
            place = layer.where.get(name, "")
            if place or layer.forms:
                forms[name] = layer.forms.get(name, name)
            places.append(place)
    return SettingError(error.spelled(forms), error.names, where=next(filter(None, places), ""))
