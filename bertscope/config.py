"""BertConfig: a BERT's configuration, flat, frozen and validated once.

Field names and defaults are as in Hugging Face's `config.json` (transformers 4.43.4). `lora` configures adapters.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from bertscope.errors import ConfigError, name_of, suggestion
from bertscope.reports.layer_ranges import LayerRange
from bertscope.units import PRECISIONS, QUANTIZED, decimal

# Larger than in any BERT; a product of two such sizes still fits torch's 64-bit integers.
MAX_DIMENSION = 2**24
MAX_LAYERS = 10_000
MAX_TRACED_LAYERS = 400  # a trace has the events of every layer: fit takes 10 s of CPU time and 1.1 GiB for 500
MAX_BUILT_LAYERS = 256  # those of a model that is built from real modules, also on the meta device
MAX_LABELS = 100_000

ACTIVATIONS = (
    "gelu", "relu", "silu", "gelu_new", "gelu_fast", "gelu_python", "gelu_pytorch_tanh", "quick_gelu", "leaky_relu",
    "linear", "mish", "relu6", "sigmoid", "swish", "tanh",
)  # fmt: skip
POSITION_EMBEDDING_TYPES = ("absolute", "relative_key", "relative_key_query")
ATTENTION_KERNELS = ("eager", "sdpa")


@dataclass(frozen=True, kw_only=True)
class Head:
    """A BERT class: what its forward takes and returns, and its counterparts in other tools."""

    logits: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # the outputs after the loss, and their sizes
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # the arguments of the loss, and their sizes
    layer: str = ""  # the classifier; it has num_labels outputs, or one for each choice
    takes_encoder: bool = False  # the states of an encoder, for cross-attention
    task_type: str = ""  # of peft

    @property
    def is_choice(self) -> bool:
        """Return True if an input has several choices."""
        return any("choices" in sizes for sizes in self.logits.values())

    @property
    def has_words(self) -> bool:
        """Return True for a language model."""
        return any("vocab_size" in sizes for sizes in self.logits.values())


_TOKENS = ("batch", "seq")
HEADS = {
    "BertModel": Head(takes_encoder=True, task_type="FEATURE_EXTRACTION"),
    "BertForPreTraining": Head(
        logits={"prediction_logits": (*_TOKENS, "vocab_size"), "seq_relationship_logits": ("batch", "2")},
        labels={"labels": _TOKENS, "next_sentence_label": ("batch",)},
    ),
    "BertForMaskedLM": Head(
        logits={"logits": (*_TOKENS, "vocab_size")}, labels={"labels": _TOKENS}, takes_encoder=True,
    ),
    "BertLMHeadModel": Head(
        logits={"logits": (*_TOKENS, "vocab_size")}, labels={"labels": _TOKENS}, takes_encoder=True,
        task_type="CAUSAL_LM",
    ),
    "BertForNextSentencePrediction": Head(
        logits={"logits": ("batch", "2")}, labels={"labels": ("batch",)},
    ),
    "BertForSequenceClassification": Head(
        logits={"logits": ("batch", "num_labels")}, labels={"labels": ("batch",)}, layer="classifier",
        task_type="SEQ_CLS",
    ),
    "BertForMultipleChoice": Head(
        logits={"logits": ("batch", "choices")}, labels={"labels": ("batch",)}, layer="classifier",
    ),
    "BertForTokenClassification": Head(
        logits={"logits": (*_TOKENS, "num_labels")}, labels={"labels": _TOKENS}, layer="classifier",
        task_type="TOKEN_CLS",
    ),
    "BertForQuestionAnswering": Head(
        logits=dict.fromkeys(("start_logits", "end_logits"), _TOKENS),
        labels=dict.fromkeys(("start_positions", "end_positions"), ("batch",)), layer="qa_outputs",
        task_type="QUESTION_ANS",
    ),
}  # fmt: skip
# The settings in which families say how many positions a sequence has.
POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_target_positions")
ARCHITECTURES = tuple(HEADS)
PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")


_WORDS = {bool: "true or false", str: "text", tuple: "a list of names", dict: "layers with lists of heads"}


@dataclass(frozen=True)
class FieldRule:
    """The values that one field accepts."""

    kind: type
    least: float = -math.inf  # every number has these two
    most: float = math.inf
    choices: tuple[str, ...] = ()
    optional: bool = False

    def allowed(self) -> str:
        """Return the accepted values in words."""
        if self.choices:
            text = "one of " + ", ".join(self.choices)
        elif self.kind is int:
            text = f"an integer of at least {self.least:g} and at most {int(self.most):,}"
        elif self.kind is float:
            text = f"a number of at least {self.least:g} and at most {self.most:g}"
        else:
            text = _WORDS[self.kind]
        return text + (", or null" if self.optional else "")

    def accepts(self, value: Any) -> bool:
        """Return True for a value of the right type and in range; True is not an integer, 'gelu' not a list."""
        if value is None:
            return self.optional
        if self.kind in (int, float):
            is_number = isinstance(value, int if self.kind is int else (int, float)) and not isinstance(value, bool)
            return is_number and self.least <= value <= self.most and abs(value) < math.inf
        if self.kind is tuple:
            return isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value)
        if self.kind is dict:
            return isinstance(value, Mapping)
        return isinstance(value, self.kind) and (not self.choices or value in self.choices)


def rule(default: Any, *, kind: type | None = None, **bounds: Any) -> Any:
    """Return a field with a default and its rule."""
    return field(default=default, metadata={"rule": FieldRule(kind or type(default), **bounds)})


def _size(default: int) -> Any:
    return rule(default, least=1, most=MAX_DIMENSION)


def _probability(default: float | None, *, optional: bool = False) -> Any:
    return rule(default, kind=float, least=0, most=1, optional=optional)


@dataclass(frozen=True, slots=True, kw_only=True)
class BertConfig:
    """The sizes and switches of a BERT; raises ConfigError for a value that no BERT can have.

    Source: transformers 4.43.4, `configuration_bert.py`, and google-research/bert, `modeling.py`.

    >>> config = bertscope.BertConfig(hidden_size=128, num_hidden_layers=2, num_attention_heads=2)
    >>> config.head_size
    64
    """

    vocab_size: int = _size(30522)
    hidden_size: int = _size(768)
    num_hidden_layers: int = rule(12, least=0, most=MAX_LAYERS)
    num_attention_heads: int = _size(12)
    intermediate_size: int = _size(3072)
    hidden_act: str | Callable[..., Any] = rule("gelu", choices=ACTIVATIONS)
    hidden_dropout_prob: float = _probability(0.1)
    attention_probs_dropout_prob: float = _probability(0.1)
    max_position_embeddings: int = _size(512)
    type_vocab_size: int = rule(2, least=0, most=MAX_DIMENSION)  # 0: transformers builds it, and cannot run it
    initializer_range: float = rule(0.02, least=0, most=1000)
    layer_norm_eps: float = rule(1e-12, least=0, most=1)
    pad_token_id: int | None = rule(0, least=0, most=MAX_DIMENSION, optional=True)
    position_embedding_type: str = rule("absolute", choices=POSITION_EMBEDDING_TYPES)
    is_decoder: bool = rule(False)
    add_cross_attention: bool = rule(False)
    use_cache: bool = rule(True)
    classifier_dropout: float | None = _probability(None, optional=True)
    num_labels: int = rule(2, least=1, most=MAX_LABELS)
    problem_type: str | None = rule(None, kind=str, choices=PROBLEM_TYPES, optional=True)
    tie_word_embeddings: bool = rule(True)
    chunk_size_feed_forward: int = rule(0, least=0, most=MAX_DIMENSION)
    gradient_checkpointing: bool = rule(False)
    output_attentions: bool = rule(False)
    output_hidden_states: bool = rule(False)
    return_dict: bool = rule(True)
    # Layer -> the removed heads, numbered as before pruning.
    pruned_heads: Mapping[int, tuple[int, ...]] = field(
        default_factory=dict, hash=False, metadata={"rule": FieldRule(dict)}
    )
    # The attention kernel; transformers does not store it in config.json.
    attn_implementation: str = rule("sdpa", choices=ATTENTION_KERNELS)
    # Read from the file; no effect on the model.
    architectures: tuple[str, ...] | None = rule(None, kind=tuple, optional=True)
    model_type: str = rule("bert", choices=("bert",))
    transformers_version: str | None = rule(None, kind=str, optional=True)
    # Keys of the dictionary for `from_dict` that have no effect on a BERT.
    ignored: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        rules = {name: rule for name, rule in RULES.items() if name != "hidden_act" or not callable(self.hidden_act)}
        check_fields(self, rules)
        object.__setattr__(self, "pruned_heads", _checked_heads(self))
        if self.hidden_size % self.num_attention_heads:
            below = self.hidden_size // self.num_attention_heads * self.num_attention_heads
            near = [str(size) for size in (below, below + self.num_attention_heads) if 0 < size <= MAX_DIMENSION]
            raise ConfigError(
                f"hidden_size {self.hidden_size} is not divisible by num_attention_heads "
                f"{self.num_attention_heads}; the nearest are {' and '.join(near)}",
                field="hidden_size",
            )
        if self.pad_token_id is not None and self.pad_token_id >= self.vocab_size:
            raise ConfigError(
                f"pad_token_id {self.pad_token_id} is outside the vocabulary; it must be below "
                f"vocab_size {self.vocab_size}, or null for none",
                field="pad_token_id",
            )
        if self.add_cross_attention and not self.is_decoder:
            raise ConfigError(
                "add_cross_attention true needs is_decoder true; set both, or neither", field="add_cross_attention"
            )

    @property
    def head_size(self) -> int:
        """Return one attention head's width."""
        return self.hidden_size // self.num_attention_heads

    def to_dict(self) -> dict[str, Any]:
        """Return every field as plain data, a callable `hidden_act` as its name."""
        values = {name: getattr(self, name) for name in RULES}
        if callable(self.hidden_act):
            values["hidden_act"] = getattr(self.hidden_act, "__name__", type(self.hidden_act).__name__)
        values["pruned_heads"] = {str(layer): list(heads) for layer, heads in self.pruned_heads.items()}
        if self.architectures is not None:
            values["architectures"] = list(self.architectures)
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> BertConfig:
        """Build a configuration from a Hugging Face `config.json` dictionary.

        Fields without effect on a BERT are accepted and listed in `ignored`. Raises ConfigError for a
        wrong value, another `model_type`, heads already pruned, or a likely misspelling.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(f"a configuration is a dictionary of fields; got {shown_value(values)}")
        model_type = values.get("model_type", "bert")
        if model_type != "bert":
            raise ConfigError(
                f"model_type is {shown_value(model_type)}, and only 'bert' is built here; give a BERT's config.json",
                field="model_type",
            )
        fields = {name: value for name, value in values.items() if name in RULES}
        ignored = [str(name) for name in values if name not in RULES and name != "id2label"]
        for name in ignored:
            refuse_misspelling(name, fields)
        if values.get("torchscript") is True:  # with it, transformers copies the decoder's weight and returns tuples
            fields.update(tie_word_embeddings=False, return_dict=False)
            ignored.remove("torchscript")
        if values.get("id2label") is not None:
            labels = values["id2label"]
            if not isinstance(labels, Mapping) or not labels:
                raise ConfigError(f"id2label must map numbers to names; got {shown_value(labels)}", field="id2label")
            fields["num_labels"] = len(labels)
        return cls(**fields, ignored=tuple(ignored))


def rules_of(config_class: type) -> dict[str, FieldRule]:
    """Return each configuration field's rule."""
    return {item.name: item.metadata["rule"] for item in dataclasses.fields(config_class) if "rule" in item.metadata}


def check_fields(config: Any, rules: Mapping[str, FieldRule], what: str = "") -> None:
    """Raise ConfigError for a field that its rule does not accept; store numbers as floats and lists as tuples."""
    for name, rule in rules.items():
        value = getattr(config, name)
        if not rule.accepts(value):
            raise ConfigError(f"{what}{name} must be {rule.allowed()}; got {shown_value(value)}", field=name)
        if rule.kind is float and isinstance(value, int) and value is not None:
            object.__setattr__(config, name, float(value))
        elif rule.kind is tuple and value is not None:
            object.__setattr__(config, name, tuple(value))


RULES = rules_of(BertConfig)


def check_built(layers: int) -> None:
    """Raise ConfigError for more layers than are built from real modules."""
    if layers > MAX_BUILT_LAYERS:
        raise ConfigError(
            f"this builds every layer, and {layers:,} are more than {MAX_BUILT_LAYERS}; count, tree, print, diagram, "
            "flops, explain, diff and estimates take equal layers from a few; lower num_hidden_layers for others",
            field="num_hidden_layers",
        )


def check_traced(layers: int) -> None:
    """Raise ConfigError for more layers than the trace of a step repeats."""
    if layers > MAX_TRACED_LAYERS:
        raise ConfigError(
            f"a step is estimated with at most {MAX_TRACED_LAYERS:,} layers, and this model has {layers:,}; lower "
            "num_hidden_layers (count, tree and flops take more layers)",
            field="num_hidden_layers",
        )


def unknown_architecture(name: Any) -> ConfigError:
    """Return the error for a class name that is not built here."""
    hint = suggestion(str(name), ARCHITECTURES)
    return ConfigError(f"unknown architecture {str(name)[:60]!r}; {hint}", field="architecture")


def _checked_heads(config: BertConfig) -> dict[int, tuple[int, ...]]:
    """Return `pruned_heads` with integer keys (in JSON they are text); raise ConfigError for a layer without heads."""
    checked: dict[int, tuple[int, ...]] = {}
    for key, heads in config.pruned_heads.items():
        number = decimal(key, 5) if isinstance(key, str) else None
        layer = key if number is None else number
        if isinstance(layer, int) and -config.num_hidden_layers <= layer < 0:
            layer += config.num_hidden_layers  # negative: counted from the last row, as in a list
        is_layer = isinstance(layer, int) and not isinstance(layer, bool) and 0 <= layer < config.num_hidden_layers
        if not is_layer or not isinstance(heads, (list, tuple, set, frozenset)):
            raise ConfigError(
                f"pruned_heads must map layers 0 to {config.num_hidden_layers - 1} to lists of heads; "
                f"got {shown_value(key)}: {shown_value(heads)}",
                field="pruned_heads",
            )
        numbers = [head for head in heads if isinstance(head, int) and 0 <= head < config.num_attention_heads]
        if len(numbers) < len(heads) or len(set(numbers)) >= config.num_attention_heads:
            raise ConfigError(
                f"pruned_heads of layer {layer} must be numbers of heads, 0 to {config.num_attention_heads - 1}, "
                f"and leave one; got {shown_value(list(heads))}",
                field="pruned_heads",
            )
        if numbers:
            checked[layer] = tuple(sorted({*checked.get(layer, ()), *numbers}))
    return checked


def refuse_misspelling(name: str, present: Mapping[str, Any]) -> None:
    """Raise ConfigError for a name that probably misspells a field that `present` lacks."""
    if name.startswith("_"):
        return
    absent = [known for known in RULES if known not in present]
    near = difflib.get_close_matches(name, absent, n=1, cutoff=0.93)
    if near:
        raise ConfigError(f"unknown key {name!r}; did you mean {near[0]!r}?", field=name)


def shown_value(value: Any) -> str:
    """Return a value and its type as the user writes them: `true (a boolean)`, `'lots' (text)`."""
    if value is None:
        return "null"
    names = {bool: "a boolean", str: "text", int: "an integer", float: "a number", list: "a list", tuple: "a list"}
    if isinstance(value, int) and value.bit_length() > 128:
        return "an integer of more than 38 digits"
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
    text = text if len(text) <= 40 else text[:37] + "..."
    kind = "a mapping" if isinstance(value, Mapping) else names.get(type(value), type(value).__name__)
    return f"{text} ({kind})"


# ---- lora: the settings of LoRA adapters ----


LORA_BIASES = ("none", "all", "lora_only")
ALL_LINEAR = "all-linear"  # peft's word for every Linear layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """The settings of LoRA adapters; raises ConfigError for a value that they cannot have.

    `target` are the ends of the paths of the Linear layers that get an adapter, in complete parts (`query`,
    `attention.output.dense`), or `all-linear`; by default those that peft takes for the family. `save` are the ends of
    the paths of modules that are copied and trained completely. `bias` names the other biases that are trained;
    `rslora` scales by alpha / sqrt(r) instead of alpha / r.

    Source: Hu et al. 2021, arXiv:2106.09685; peft 0.12.0, `LoraConfig`, whose defaults these are.

    >>> source = bertscope.load("bert-tiny", lora=bertscope.Lora(r=8, target=("query", "value")))
    >>> bertscope.count(source).totals.trainable_params == 2 * 2 * 8 * (128 + 128)
    True
    """

    r: int = rule(8, least=1, most=MAX_DIMENSION)
    alpha: float = rule(8.0, least=0, most=100_000)
    dropout: float = rule(0.0, least=0, most=1)
    target: tuple[str, ...] | None = rule(None, kind=tuple, optional=True)
    bias: str = rule("none", choices=LORA_BIASES)
    rslora: bool = rule(False)
    save: tuple[str, ...] = rule(())

    def __post_init__(self) -> None:
        check_fields(self, LORA_RULES, "lora ")
        for field_name in ("target", "save"):
            names = getattr(self, field_name)
            if names is None:
                continue
            wrong = next((name for name in names if not re.fullmatch(r"[\w.-]{1,200}", name)), None)
            if wrong is not None or (field_name == "target" and not names) or len(names) > MAX_LORA_NAMES:
                got = f"{len(names):,} names" if wrong is None else shown_value(wrong)
                raise ConfigError(
                    f"lora {field_name} must be 1 to {MAX_LORA_NAMES:,} names of modules such as query or "
                    f"attention.output.dense; got {got}",
                    field=field_name,
                )

    @property
    def scaling(self) -> float:
        """Return the factor of the adapters' output."""
        return self.alpha / (math.sqrt(self.r) if self.rslora else self.r)

    @property
    def has_equal_layers(self) -> bool:
        """Return True if no name has a layer's number, so that all layers get the same adapters."""
        parts = (part for name in (*(self.target or ()), *self.save) for part in name.split("."))
        return all(LayerRange.parse(part) is None for part in parts)

    def of_bert(self) -> Lora:
        """Return the settings with the target that peft has for BERT, if there is none."""
        return replace(self, target=self.target or ("query", "value"))

    def to_peft(self) -> dict[str, Any]:
        """Return the settings under the names in an `adapter_config.json`."""
        values = {key: getattr(self, name) for key, name in LORA_KEYS.items()}
        values |= {"target_modules": ALL_LINEAR} if self.target == (ALL_LINEAR,) else {}  # a list has names of layers
        return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items() if value != ()}

    @classmethod
    def parse(cls, text: str) -> Lora:
        """Return the settings in `r=8,alpha=16,dropout=0.05,target=query+value`; raises ConfigError for other text."""
        values: dict[str, Any] = {}
        for part in text.split(","):
            name, equals, value = (word.strip() for word in part.partition("="))
            if not equals or name not in LORA_RULES:
                unnamed = "+".join(word.strip() for word in text.split(",") if "=" not in word)[:60]
                remedy = f"write {'target' if decimal(unnamed) is None else 'r'}={unnamed}"
                if re.fullmatch(r"[\w.+]+", unnamed, re.ASCII) is None:
                    remedy = "write one of these, or name an adapter_config.json"
                takes = f"{name_of('lora')} takes {', '.join(LORA_RULES)}, as in {LORA_EXAMPLE}"
                raise ConfigError(f"{takes}; got {part.strip()[:40]!r}; {remedy}", field="lora")
            if name in values:
                raise ConfigError(f"lora {name} is given twice in {text[:100]!r}; keep one", field=name)
            values[name] = _from_text(value, LORA_RULES[name].kind)
        return cls(**values)

    def __str__(self) -> str:
        """Return the text for `parse`: r, alpha, target, and the settings that differ from the default."""
        parts, default = [], Lora()
        for name in LORA_RULES:
            value = getattr(self, name)
            if name in ("r", "alpha") or value != getattr(default, name):
                text = "+".join(value) if isinstance(value, tuple) else str(value).removesuffix(".0")
                parts.append(f"{name}={text.lower() if isinstance(value, bool) else text}")
        return ",".join(parts)


LORA_RULES = rules_of(Lora)
LORA_KEYS = {  # name in an adapter_config.json -> field
    "r": "r", "lora_alpha": "alpha", "lora_dropout": "dropout", "target_modules": "target", "bias": "bias",
    "use_rslora": "rslora", "modules_to_save": "save",
}  # fmt: skip
LORA_EXAMPLE = "r=8,alpha=16,dropout=0.05,target=query+value"
MAX_LORA_NAMES = 2048  # eight in each of the 256 layers


def _from_text(text: str, kind: type) -> Any:
    """Return the value that the text writes for a field of that type, or the text itself, which no rule accepts."""
    if kind is tuple:
        return tuple(text.split("+"))
    if kind is bool:
        return {"true": True, "false": False}.get(text, text)
    number = r"[0-9]{1,12}" if kind is int else r"([0-9]{1,12}(\.[0-9]{0,20})?|\.[0-9]{1,20})(e[-+]?[0-9]{1,3})?"
    return kind(text) if kind in (int, float) and re.fullmatch(number, text, re.ASCII) else text


# ---- quantization: weights in 4 or 8 bits ----


_DTYPES = tuple(row.torch_name for row in PRECISIONS.values())
_METHOD = "bitsandbytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """The weights of linear layers as bitsandbytes stores them; the dtypes are torch's names.

    `skipped` are parts of the paths of modules that stay as they are; None: those that transformers chooses.
    """

    kind: str  # one of QUANTIZED
    computes_in: str | None = None  # None: the run's precision
    loaded: str | None = None  # the dtype of the weights before, in which backward makes them
    skipped: tuple[str, ...] | None = None

    @property
    def is_8bit(self) -> bool:
        """Return True for 8 bits."""
        return self.kind == "int8"

    @property
    def is_double(self) -> bool:
        """Return True if the scales are quantized too."""
        return self.kind.endswith("-dq")

    @classmethod
    def of(cls, members: Any, loaded: str | None) -> Quantization | None:
        """Return what a `quantization_config` says, if there is one; raises ConfigError for what is not modelled."""
        if not members:
            return None
        values: dict[str, Any] = members if isinstance(members, dict) else {"quant_method": members}
        bits = [number for number in (4, 8) if values.get(f"load_in_{number}bit") is True]
        kind = "int8" if bits == [8] else values.get("bnb_4bit_quant_type", "fp4")
        skipped = values.get("llm_int8_skip_modules")
        names = [] if skipped is None else skipped if isinstance(skipped, list) else [""]
        dtype = str(values.get("bnb_4bit_compute_dtype") or _DTYPES[0]).removeprefix("torch.")
        is_wrong = {
            "quant_method": values.get("quant_method", _METHOD) != _METHOD,
            "load_in_4bit": len(bits) != 1,
            "bnb_4bit_quant_type": kind not in QUANTIZED,
            "bnb_4bit_compute_dtype": dtype not in _DTYPES,
            "llm_int8_skip_modules": not all(re.fullmatch(r"[\w.]{1,200}", str(name)) for name in names),
            "llm_int8_has_fp16_weight": values.get("llm_int8_has_fp16_weight"),
            "llm_int8_enable_fp32_cpu_offload": values.get("llm_int8_enable_fp32_cpu_offload"),
        }
        if key := next(filter(is_wrong.get, is_wrong), ""):
            raise ConfigError(
                f"quantization_config: {key} {shown_value(values.get(key))} is not modelled; nf4, fp4 and int8 of "
                f"bitsandbytes are; {name_of('quantize')} none takes the weights before quantization",
                field="quantization_config",
            )
        return cls(
            kind=f"{kind}-dq" if bits == [4] and values.get("bnb_4bit_use_double_quant") else kind,
            computes_in=None if bits == [8] else dtype,
            loaded=loaded if loaded in _DTYPES else None,
            skipped=tuple(map(str, names)) or None,
        )
