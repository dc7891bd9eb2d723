"""Rows of settings: each setting is declared once, as its dataclass field's metadata.

Options, Python keywords, file keys, schemas and documentation tables are generated from the rows.
Read `run_config.py` for the rows themselves. A value that names code needs a permit, a `CodeName`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import field, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from bertscope.errors import BertscopeError, SelectionError, either_of, name_of, nearest, one_line
from bertscope.frozen import Record
from bertscope.units import PRECISIONS, parse_bytes

if TYPE_CHECKING:
    from typing_extensions import Self

Permitted = TypeVar("Permitted", bound=Record)
NO_PERMIT = f"is code, which no file imports; name it in a command, or add {name_of('allow_code')} to check or sweep"
_NAME = r"[^\W\d]\w*(?:\.[^\W\d]\w*)*"
_CODE = re.compile(rf"(?:{_NAME}|(?:[^:\0]{{0,4000}}[/\\])?[^\W\d]\w*\.py):{_NAME}")


def is_code(name: str) -> bool:
    """Return True if a name has the form `package.module:attribute` or `path/to/file.py:attribute`."""
    return _CODE.fullmatch(name) is not None


class CodeName(str):
    """A text with a permit: the `module:attribute` that it is or contains may be imported.

    The command line, a Python call and `--allow-code` make it (a test lists where). Text from a file is a plain `str`,
    and so is what any method of `str` returns: whatever is made from a name loses the permit.
    """

    __slots__ = ()


class TypedName(str):
    """A model's name as a Python call gave it, which the next call in a report repeats."""

    __slots__ = ()


class CodeObject(str):
    """A text for an object of the caller's program, which is its `value`: an optimizer, or a function as loss.

    It is equal to its text, such as `adamw`, `custom` or `model`, and no command can name the object itself; `label` is
    the name of its class or function.
    """

    value: Any
    label: str

    def __new__(cls, text: str, value: Any, label: str) -> Self:
        instance = super().__new__(cls, text)
        instance.value, instance.label = value, label
        return instance

    def __reduce__(self) -> Any:
        """Return the plain text for a copy or another process."""
        return str, (str(self),)


def permits_of(*records: object) -> tuple[str, ...]:
    """Return the names with a permit in the fields of records, for a process that computes with the same records."""
    values = [value for record in records if record is not None for value in vars(record).values()]
    inner = permits_of(*(value for value in values if isinstance(value, Record))) if values else ()
    return tuple(dict.fromkeys([*(str(value) for value in values if isinstance(value, CodeName)), *inner]))


def with_permits(record: Permitted, permits: Collection[str]) -> Permitted:
    """Return another process's record; its texts among `permits` may be imported, as they may be there."""
    code: Any = {key: CodeName(value) for key, value in vars(record).items() if type(value) is str and value in permits}
    inner = {key: with_permits(value, permits) for key, value in vars(record).items() if isinstance(value, Record)}
    code |= {key: value for key, value in inner.items() if value is not getattr(record, key)}
    return replace(record, **code) if code else record


MAX_SIZE = 2**31
WHOLE = re.compile(r"[-+]?[0-9]{1,20}", re.ASCII)
_NUMBER = re.compile(r"[-+]?[0-9]{1,20}(\.[0-9]{0,20})?([eE][-+]?[0-9]{1,3})?", re.ASCII)


class SettingError(SelectionError):
    """A value or a combination of settings that no run has.

    The text names settings in braces, as in `{momentum} has no effect with {optimizer} adam`.
    """

    def __init__(self, text: str, names: Sequence[str] = (), *, where: str = "") -> None:
        self.names = tuple(names)
        super().__init__(re.sub(r"\{(\w+)\}", lambda match: name_of(match[1]), text), where=where)

    @property
    def of_file(self) -> str:
        """Return the text for a file whose keys are these settings."""
        return str(self.message)


def quoted(value: Any) -> str:
    """Return a value for a message: on one line, cut, and without braces."""
    return one_line(repr(value), limit=60).replace("{", "(").replace("}", ")")


class Row(Record):
    """A setting: the values that it takes, their meaning, and the other settings that they concern."""

    name: str = ""  # of its field
    default: Any = None
    help: str = ""  # one sentence
    section: str = "loop"  # the heading in --help: common, model, sizes, loop, gpu, ranks, measurement or output
    kind: type = str  # of one value: bool, int, float or str
    choices: Collection[str] = ()  # the allowed words; with `convert`, examples
    low: float = 0
    below: float = MAX_SIZE
    is_size: bool = False  # bytes, also as text such as 16GiB
    or_file: bool = False  # the path of a file too; false: no file
    convert: Callable[[Any], Any] | None = None  # of a value to its only form; raises BertscopeError
    names_code: Callable[[str], bool] | None = None  # True for a value that names code, which takes a CodeName
    split: Callable[[str], Iterable[str]] | None = None  # of the text of several values; by default at commas
    metavar: str = ""
    flag: str = ""  # a second option, such as -b
    option: str = ""  # its name on a command line, if it is not that of the setting
    is_argument: bool = False  # of a command line: a word without an option
    complete: Callable[[], Iterable[str]] | None = None  # the words that Tab completes; by default `choices`
    bare: str = ""  # the value of the option without a value
    of_modules: bool = True  # a module that a Python program gives does not determine it itself
    text: str = ""  # in reports, such as `batch {}`; name and value if it is empty
    emitted: Collection[str] = ()  # the forms of a plan's code that have it; a comment in the others names it
    concerns: Mapping[str, Callable[[Any], bool]] = field(default_factory=dict)  # other settings -> has an effect
    # Values of other settings, or functions that return them, unless they are set too.
    implies: Mapping[str, Any] = field(default_factory=dict)
    yields_to: tuple[str, ...] = ()  # a weaker layer's value is not used if one of these settings is set
    trainer: Mapping[str, Callable[[Any, Mapping[str, Any]], Any]] = field(
        default_factory=dict
    )  # TrainingArguments key -> value

    @property
    def is_list(self) -> bool:
        """Return True if one run has a list of values."""
        return isinstance(self.default, tuple)

    def json_schema(self, default: Any, *, is_compared: bool = False) -> dict[str, Any]:
        """Return the JSON Schema of a value; a size, a file, or what a run compares may be a text too."""
        kind: Any = {bool: "boolean", int: "integer", float: "number"}.get(self.kind, "string")
        is_text, limits = is_compared or self.is_size or self.or_file, dict[str, Any]()
        if self.is_list:
            kind, limits = ["array", "string"], {"items": {"type": "string"}}
        elif is_text:
            kind = kind if kind == "string" else [kind, "string"]
        elif self.choices and not self.convert:
            limits = {"enum": [*self.choices]}
        elif kind in ("integer", "number"):
            limits = {"minimum": self.low} | ({"exclusiveMaximum": self.below} if self.below < MAX_SIZE else {})
        takes = f" Takes {self.takes}." * bool(not self.is_list and (is_text or self.convert is not None))
        limits |= {"default": default} if default not in (None, (), ...) else {}
        return {"type": kind, **limits, "description": f"{self.help}{' Several with commas.' * is_compared}{takes}"}

    @property
    def takes(self) -> str:
        """Return the allowed values in words."""
        if self.choices:
            return f"a word such as {', '.join(self.choices)}" if self.convert else f"one of {', '.join(self.choices)}"
        if self.is_size:
            return "a size such as 16GiB"
        most = f"to below {self.below:g}" if self.below == 1 else f"to {int(self.below) - 1:,}"
        is_open = self.below >= MAX_SIZE
        span = f"number of at least {self.low:g}" if is_open else f"number from {self.low:g} {most}"
        whole = f"a {span.replace('number', 'whole number', 1)}"
        text = {bool: "true or false", int: whole, float: f"a {span}", str: "a text"}[self.kind]
        text = "the path of a file, or false for none" if self.or_file else text
        return f"{text}, or a list" if self.is_list else text

    @property
    def form(self) -> str:
        """Return the name for a message, which each front end shows in its form."""
        return f"{{{self.name}}}"

    def read(self, value: Any) -> Any:
        """Return one run's value in its only form; raises SettingError."""
        if value is None:
            return self.default
        if not self.is_list:
            return self._item(value)
        return tuple(map(self._item, value if isinstance(value, list | tuple) else [value]))

    def values(self, value: Any, *, is_text: bool = False, is_compared: bool = False) -> tuple[Any, ...]:
        """Return the values of one or, if `is_compared`, several runs; `is_text`: numbers are text, as in options."""
        if self.is_list:
            lists = isinstance(value, list | tuple) and any(isinstance(item, list | tuple) for item in value)
            return tuple(dict.fromkeys(map(self.read, value if lists and is_compared else [value])))
        if isinstance(value, str) and (is_text or is_compared):
            parts = [value] if not is_compared else self.split(value) if self.split else value.split(",")
            value = [self._number(part.strip()) if is_text else part.strip() for part in parts]
        elif not (is_compared and isinstance(value, list | tuple)):
            value = [value]
        checked = tuple(dict.fromkeys(map(self.read, value)))
        if not checked:
            raise SettingError(f"{self.form} has no value; it takes {self.takes}", [self.name])
        return checked

    def _number(self, text: str) -> Any:
        if self.is_size and (plain := re.fullmatch(r"\s*([0-9]{1,20})\s*", text, re.ASCII)) and int(plain[1]):
            meant = f"{plain[1]}GiB" if len(plain[1]) < 5 else f"{plain[1]}B"
            raise SettingError(
                f"{self.form} {plain[1]} has no unit; {meant}? B, KiB, MiB and GiB are units of a size", [self.name]
            )
        pattern = WHOLE if self.kind is int else _NUMBER
        is_number = self.kind in (int, float) and not self.is_size and pattern.fullmatch(text)
        return self.kind(text) if is_number else text

    def _item(self, value: Any) -> Any:
        item = value
        try:
            if self.is_size and isinstance(item, str):
                item = parse_bytes(item)
            if self.kind is float and type(item) is int:
                item = float(item)
            if type(item) in (self.kind, CodeName, CodeObject) or (self.or_file and type(item) is str):
                is_open = not self.choices or self.convert is not None
                is_word = isinstance(item, str) and item != "" and (is_open or item in self.choices)
                if is_word or (not isinstance(item, str) and (type(item) is bool or self.low <= item < self.below)):
                    return self.convert(item) if self.convert else item
        except BertscopeError as error:
            raise SettingError(f"{self.form}: {_plain(error)}", [self.name]) from None
        except (ValueError, OverflowError):
            pass
        near = near_word(value, self.choices) if isinstance(value, str) and not self.convert else ""
        if near:
            is_any = near == "autocast-bf16" and "bf" not in value
            older = ", or 'autocast-fp16' on a GPU older than Ampere" * is_any
            raise SettingError(f"{self.form} has no value {quoted(value)}; did you mean {near!r}{older}?", [self.name])
        is_grid = isinstance(value, str) and "," in value.strip(",") and self.section != "measurement"
        remedy = f"; '{name_of('bertscope sweep')}' estimates a grid of several values" * is_grid
        renamed = RENAMED.get(str(value).lower().replace("-", "_"), "") if self.choices else ""
        remedy += f"; use {renamed}" * (renamed.startswith("{") and not renamed.startswith("{checkpointing}"))
        raise SettingError(f"{self.form} takes {self.takes}; got {quoted(value)}{remedy}", [self.name])

    def unmet(self, values: Mapping[str, Any]) -> str:
        """Return another setting whose value leaves this one without effect; an empty text if there is none."""
        tests = ((name, test) for name, test in self.concerns.items() if name in values)
        return next((name for name, test in tests if not test(values[name])), "")


# A setting, a value of one, or a sentence why there is none -> what other tools call it.
_CALLED = {
    "{precision}": "dtype torch_dtype", "{precision} fp16": "half", "{precision} fp32": "fp32 float32",
    "{precision} autocast-fp16": "fp16 use_fp16 16 16_mixed fp16_mixed mixed_fp16",
    "{precision} autocast-bf16": "autocast bf16 bf16_mixed mixed_bf16 amp mixed mixed_precision use_amp",
    "{loop} plain": "hold_outputs", "{mode} training": "train training backward", "{depth}": "level levels max_depth",
    "{device} cuda": "cuda use_cuda", "{mode} inference": "infer inference eval predict no_grad use_cache kv_cache",
    "{expandable_segments}": "alloc_conf", "{sandbox}": "unsandboxed", "{input}": "inputs",
    "{batch} and {seq}, or {input} NAME=SHAPE:DTYPE": "input_size",
    "{dropout}": "no_dropout", "{architecture}": "head model_class",
    "{architecture} BertForSequenceClassification": "task",
    "{budget}": "memory mem ram vram gpu_memory max_memory max_mem",
    "{fmt}": "output_format", "{fmt} json": "json", "{fmt} csv": "csv", "{fmt} markdown": "markdown md",
    "{attention}": "attn attn_implementation attention_implementation",
    "{seq}": "max_length max_seq_length max_seq_len seq_len seq_length sequence_length sequence_len context_length ctx "
             "cutoff_len seqlen length max_tokens max_model_len model_max_length block_size",
    "{batch}": "batch_size per_device_train_batch_size per_gpu_train_batch_size micro_batch "
               "micro_batch_size train_batch_size bs mbs",
    "{loss} model": "cross_entropy crossentropy ce mse", "{attention} flash_attention_2":
        "flash flash_attn fa2 flash_attention flash_attention_2 use_flash_attention use_flash_attn "
        "use_flash_attention_2",
    "{checkpointing} full": "yes true on gradient_checkpointing grad_checkpointing activation_checkpointing recompute",
    "{accumulate}": "grad_accum gradient_accumulation_steps gradient_accumulation accumulation_steps grad_acc",
    "{optimizer} adamw-8bit": "8bit use_8bit adam8bit adam_8bit bnb adamw_bnb_8bit paged_adamw_8bit "
                              "paged_adamw",
    "{optimizer}": "optim", "{gpu} (their number is {world_size})": "gpus",
    "{world_size}": "num_gpus n_gpus ngpus ngpu nproc_per_node num_processes devices num_devices",
    "{strategy} fsdp": "fsdp fsdp2 use_fsdp full_shard zero3 zero_3 stage3 zero_stage_3",
    "{strategy} ddp": "ddp", "{strategy} zero1": "deepspeed", "{strategy} zero1, or fsdp for ZeRO 3": "zero zero_stage",
    "{quantize} int8": "load_in_8bit int8", "{quantize} nf4": "load_in_4bit 4bit qlora use_4bit nf4",
    "{quantize} fp4": "fp4", "{quantize}": "bits quant",
    "{strategy} tp": "tensor_parallel tensor_parallel_size tp_size tp",
    "{lora} r=8,target=query+value": "use_lora peft adapter lora_r lora_rank lora_target_modules",
    "{lora} r=8,alpha=16,dropout=0.1": "lora_alpha lora_dropout",
    "{batch_total}": "global_batch_size total_batch_size",
    "{clip_grad_norm}": "max_grad_norm gradient_clipping clip grad_clip",
    "{freeze} embeddings": "freeze_embeddings", "{offload_optimizer} or {offload_activations}": "offload cpu_offload",
    "{sequences} N, for the time of an epoch": "samples num_samples examples epochs num_epochs num_train_epochs",
    "it changes no result here": "lr learning_rate max_steps warmup warmup_steps "
                                 "warmup_ratio data dataset seed lr_scheduler lr_scheduler_type num_workers save_steps "
                                 "tf32 report_to low_cpu_mem_usage local_rank",
    "set it in MODEL's config.json or preset": "config hidden_size layers n_layers num_layers num_hidden_layers "
                                               "hidden_dim n_embd d_model num_attention_heads num_labels num_classes "
                                               "vocab_size",
    "code is module:attribute": "trust_remote_code", "set HF_TOKEN": "token hf_token use_auth_token",
    "name the folder of one in MODEL": "revision",
    "it is not modelled": "fp8 device_map packing sample_packing pp pipeline_parallel pipeline_parallel_size",
}  # fmt: skip
RENAMED = {word: text for text, words in _CALLED.items() for word in words.split()}


def near_word(text: str, known: Collection[str]) -> str:
    """Return the known word that is nearest to a text, or that another tool calls so; empty if there is none."""
    same = {"-".join(reversed(word.split("-"))): word for word in known} | {word: word for word in known}
    same |= {row.torch_name: name for name, row in PRECISIONS.items() if name in known}
    same |= {"gpu": "cuda"} if "cuda" in known else {}
    same |= {word.lower(): word for word in known}
    renamed = same.get(text.lower()) or RENAMED.get(text.lower().replace("-", "_"), "").partition(" ")[2]
    return renamed if renamed in known else same.get(nearest(text, same), "")


def _plain(value: Any) -> str:
    """Return a value, or the message of an error, without braces."""
    text = value.message.marked if isinstance(value, BertscopeError) else str(value)
    return text.replace("{", "(").replace("}", ")")


def row(default: Any, help: str, **properties: Any) -> Any:
    """Return a setting's dataclass field; its default decides the kind of value."""
    kind = str if isinstance(default, tuple) or default is None else type(default)
    return field(default=default, metadata={"row": Row(default=default, help=help, **{"kind": kind, **properties})})


class Settings(Record):
    """A record of settings and nested records: a dataclass whose fields come from `row`.

    A field without a row is no setting, but follows from one.
    """

    def __post_init__(self) -> None:
        table = rows(type(self))
        for name in self.__dict__.keys() & table.keys():
            value = self.__dict__[name]
            if value is not table[name].default:
                object.__setattr__(self, name, table[name].read(value))
        self.complete()
        check_values(self.flat(), table)

    def complete(self) -> None:
        """Set the fields that follow from others."""

    def flat(self) -> dict[str, Any]:
        """Return a flat dictionary from setting names to values, nested records included."""
        table, values = rows(type(self)), dict[str, Any]()
        for name, value in self.__dict__.items():
            values |= value.flat() if isinstance(value, Settings) else {name: value} if name in table else {}
        return values

    def changed(self, **values: Any) -> Self:
        """Return the record with other values; further settings that have no effect with them take their defaults."""
        table, merged = rows(type(self)), self.flat() | values
        further = table.keys() - values
        while idle := [name for name in further if merged[name] != table[name].default and table[name].unmet(merged)]:
            merged |= {name: table[name].default for name in idle}
        return self.of(self.__dict__ | merged)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Return the record with these values, also for nested records; other names are not used."""
        defaults = {item.name: item.default for item in fields(cls)}
        nested = {name: type(record).of(values) for name, record in defaults.items() if isinstance(record, Settings)}
        return cls(**{name: values[name] for name in defaults if name in values} | nested)


def rows(*records: type[Settings]) -> dict[str, Row]:
    """Return the rows in records and their nested records, by name; raises TypeError for a name used twice."""
    return _rows(records)


@cache
def _rows(records: tuple[type[Settings], ...]) -> dict[str, Row]:
    table: dict[str, Row] = {}
    for item in (item for record in records for item in fields(record)):
        declared = item.metadata.get("row")
        new = {item.name: replace(declared, name=item.name)} if declared else {}
        if isinstance(item.default, Settings):
            new = _rows((type(item.default),))
        if twice := table.keys() & new.keys():
            raise TypeError(f"settings declared twice: {', '.join(sorted(twice))}")
        table |= new
    return table


class Rule(NamedTuple):
    """A combination that no run has: its settings, the test of their values, and the message."""

    names: tuple[str, ...]
    is_broken: Callable[..., Any]
    # With settings and their values in braces, as in `{optimizer} {optimizer_value}`; {found}: what the test returned.
    text: str


RULES: list[Rule] = []


def check_values(values: Mapping[str, Any], table: Mapping[str, Row]) -> None:
    """Raise SettingError for a value without effect, and for a combination that no run has."""
    for name, row in table.items():
        if row.concerns and values[name] != row.default and (other := row.unmet(values)):
            raise SettingError(no_effect(row, table[other], values[other]), [name, other])
    for rule in RULES:
        if values.keys() >= set(rule.names) and (broken := rule.is_broken(*(values[name] for name in rule.names))):
            text = rule.text.replace("{found}", str(broken))
            for name in rule.names:
                text = text.replace(f"{{{name}_value}}", _plain(values[name]))
            raise SettingError(text, rule.names)


def no_effect(row: Row, other: Row, value: Any) -> str:
    """Return the message about a setting without effect, with the words of the other one that would give it one."""
    choices = [str(word) for word in other.choices or (2,) * (other.kind is int) if row.concerns[other.name](word)]
    if value in (None, False, ""):
        return f"{row.form} has no effect without {other.form}; give it too, or leave {row.form} out"
    shown = "" if value is True or isinstance(value, list) else f" {_plain(value)}"
    remedy = f"use {other.form} {either_of(choices[:4])}" if choices else f"leave {other.form} out"
    return f"{row.form} has no effect with {other.form}{shown}; leave it out, or {remedy}"
