"""Sections of `explain` on the whole of a BERT: inputs, outputs, caches, relative positions, checkpointing."""

import inspect
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from bertscope.analyses.explain.section_texts import (
    CACHES,
    CHECKPOINTING,
    INPUTS,
    NAMES,
    OUTPUTS,
    POSITIONS,
    TITLES,
)
from bertscope.analyses.explain.texts import LANGUAGES
from bertscope.analyses.tracing.derived_inputs import CHOICES
from bertscope.model import CLASSES
from bertscope.reports.explain import Point, Section
from bertscope.sources.bert import BertSource
from bertscope.units import FP32, bytes_text

SECTIONS = tuple(TITLES)
_Times = Sequence[tuple[str, int]]  # names and numbers of the items of nested tuples
_WITH_ENCODER = ("BertModel", "BertForMaskedLM", "BertLMHeadModel")  # the classes that take an encoder's states
_WORDS = ("batch", "seq", "vocab_size")
_LOGITS: dict[str, dict[str, tuple[str, ...]]] = {
    "BertForPreTraining": {"prediction_logits": _WORDS, "seq_relationship_logits": ("batch", "2")},
    "BertForMaskedLM": {"logits": _WORDS},
    "BertLMHeadModel": {"logits": _WORDS},
    "BertForNextSentencePrediction": {"logits": ("batch", "2")},
    "BertForSequenceClassification": {"logits": ("batch", "num_labels")},
    "BertForMultipleChoice": {"logits": ("batch", "choices")},
    "BertForTokenClassification": {"logits": ("batch", "seq", "num_labels")},
    "BertForQuestionAnswering": dict.fromkeys(("start_logits", "end_logits"), ("batch", "seq")),
}


def sections(source: BertSource, *, language: str, batch: int, seq: int, layer_flops: int) -> tuple[Section, ...]:
    """Return the five sections with the numbers of this model at these sizes.

    `layer_flops` are the FLOPs of a forward pass of one layer.
    """
    writer = _Writer(source, language, batch, seq)
    return (
        writer.inputs(),
        writer.outputs(),
        writer.caches(),
        writer.positions(),
        writer.checkpointing(layer_flops),
    )


class _Writer:
    """Maker of the sections; `sizes` are the numbers of the dimensions."""

    def __init__(self, source: BertSource, language: str, batch: int, seq: int) -> None:
        self.source, self.config, self.language = source, source.config, LANGUAGES.index(language)
        self.architecture = source.architecture
        config, is_choice = source.config, source.architecture == "BertForMultipleChoice"
        self.sizes = {
            "batch": batch, "choices": CHOICES, "batch_choices": batch * CHOICES, "seq": seq, "encoder_seq": seq,
            "past": seq - 1, "hidden_size": config.hidden_size, "heads": config.num_attention_heads,
            "head_size": config.head_size, "vocab_size": config.vocab_size, "num_labels": config.num_labels,
            "layers": config.num_hidden_layers,
        }  # fmt: skip
        self.batch = "batch_choices" if is_choice else "batch"
        self.tokens = ("batch", "choices", "seq") if is_choice else ("batch", "seq")
        self.states = (self.batch, "seq", "hidden_size")
        self.keys = (self.batch, "heads", "seq", "head_size")
        self.scores = (self.batch, "heads", "seq", "seq")
        self.layers = ("layers", self.sizes["layers"])
        crosses = config.is_decoder and config.add_cross_attention and self.architecture in _WITH_ENCODER
        self.pairs = 4 if crosses else 2  # tensors in the cache of a layer

    def text(self, texts: Mapping[str, tuple[str, str]], key: str, **values: Any) -> str:
        """Return a sentence in the language of the report."""
        return texts[key][self.language].format(**self.sizes | values)

    def point(
        self, texts: Mapping[str, tuple[str, str]], key: str, dims: Sequence[str] | None = None, times: _Times = (),
        name: str | None = None, **values: Any,
    ) -> Point:  # fmt: skip
        """Return a numbered point; `dims` are names of sizes, or numbers."""
        if name is None:
            name = NAMES[key][self.language] if key in NAMES else key
        shape, sizes = self.shape(dims, times) if dims is not None else ("", "")
        return Point(name=name, shape=shape, sizes=sizes, sentence=self.text(texts, key, **values))

    def shape(self, dims: Sequence[str], times: _Times = ()) -> tuple[str, str]:
        """Return a shape with names and with numbers, such as `layers x [batch, seq]` and `12 x [1, 128]`."""
        numbers = [str(self.sizes.get(name, name)) for name in dims]
        return (
            "".join(f"{text} x " for text, _ in times) + f"[{', '.join(dims)}]",
            "".join(f"{number} x " for _, number in times) + f"[{', '.join(numbers)}]",
        )

    def both(self, dims: Sequence[str]) -> str:
        """Return `[batch, seq] = [1, 128]`."""
        return " = ".join(self.shape(dims))

    def section(self, key: str, points: Sequence[Point], notes: Sequence[str] = (), **values: Any) -> Section:
        """Return a section."""
        title = self.text(TITLES, key, **values)
        return Section(key=key, title=title, notes=tuple(notes), points=tuple(points))

    # ---- inputs and outputs ----

    def inputs(self) -> Section:
        """Return the arguments of the forward of the class, in their order."""
        names = list(inspect.signature(CLASSES[self.architecture].forward).parameters)[1:]
        config, per_layer = self.config, (self.layers, ("2", 2))
        one_token = self.architecture in (
            "BertForPreTraining", "BertForMaskedLM", "BertLMHeadModel", "BertForTokenClassification",
        )  # fmt: skip
        shapes: dict[str, tuple[Sequence[str], _Times]] = {
            **dict.fromkeys(("input_ids", "attention_mask", "token_type_ids", "position_ids"), (self.tokens, ())),
            "head_mask": (("layers", "heads"), ()),
            "inputs_embeds": ((*self.tokens, "hidden_size"), ()),
            "encoder_hidden_states": (("batch", "encoder_seq", "hidden_size"), ()),
            "encoder_attention_mask": (("batch", "encoder_seq"), ()),
            "past_key_values": (("batch", "heads", "past", "head_size"), per_layer),
            "labels": (("batch", "seq") if one_token else ("batch",), ()),
            **dict.fromkeys(("next_sentence_label", "start_positions", "end_positions"), (("batch",), ())),
        }
        values = {
            **config.to_dict(),
            "last_id": config.vocab_size - 1,
            "last_type": config.type_vocab_size - 1,
            "last_position": config.max_position_embeddings - 1,
        }
        points = [self.point(INPUTS, name, *shapes.get(name, (None,)), **values) for name in names]
        return self.section("inputs", points, architecture=self.architecture, count=len(names))

    def outputs(self) -> Section:
        """Return the outputs of the class in the order of its tuple, as if all of them were asked for."""
        config, layers = self.config, self.layers
        made: list[Point] = []

        def add(name: str, dims: Sequence[str] | None, times: _Times = (), key: str | None = None) -> None:
            made.append(self.point(OUTPUTS, key or name, dims, times, name=f"output[{len(made)}] {name}"))

        if self.architecture == "BertModel":
            add("last_hidden_state", self.states)
            has_pooler = self.source.add_pooling_layer
            add("pooler_output", ("batch", "hidden_size") if has_pooler else None,
                key=None if has_pooler else "no_pooler")  # fmt: skip
        else:
            add("loss", ())
            for name, dims in _LOGITS[self.architecture].items():
                add(name, dims)
        if config.is_decoder:
            add("past_key_values", self.keys, (layers, (str(self.pairs), self.pairs)))
        place = len(made)
        add("hidden_states", self.states, (("(layers + 1)", layers[1] + 1),))
        add("attentions", self.scores, (layers,))
        if self.pairs == 4:
            add("cross_attentions", (self.batch, "heads", "seq", "encoder_seq"), (layers,))
        notes = [self.text(OUTPUTS, "order", place=place)]
        notes += [] if config.is_decoder else [self.text(OUTPUTS, "encoder")]
        return self.section("outputs", made, notes, architecture=self.architecture)

    # ---- attention ----

    def caches(self) -> Section:
        """Return where key and value of an attention come from, and the size of the cache."""
        of_encoder = ("batch", "heads", "encoder_seq", "head_size")
        states = ("batch", "encoder_seq", "hidden_size")
        points = [
            self.point(CACHES, "cross_cached", of_encoder),
            self.point(CACHES, "cross", of_encoder, encoder_states=self.both(states)),
            self.point(CACHES, "self_cached", self.keys),
            self.point(CACHES, "self", self.keys, states=self.both(self.states)),
        ]
        factors = [self.sizes["layers"], self.pairs, *(self.sizes[name] for name in self.keys)]
        size = {
            "cache_terms": " x ".join(map(str, factors)),
            "cache_numel": prod(factors),
            "cache_size": bytes_text(prod(factors) * FP32.size_bytes),
        }
        notes = [self.text(CACHES, "size", **size)]
        notes += [] if self.config.is_decoder else [self.text(CACHES, "no_cache")]
        return self.section("caches", points, notes)

    def positions(self) -> Section:
        """Return the steps of relative positions, as method 4 of Huang et al. 2020 has them unless only for queries."""
        kind, last = self.config.position_embedding_type, self.config.max_position_embeddings - 1
        with_keys = kind != "relative_key"
        values: dict[str, Any] = {
            "kind": kind, "positions": last + 1, "last_position": last, "least": last - (self.sizes["seq"] - 1),
            "most": last + (self.sizes["seq"] - 1), "table": (2 * last + 1) * self.sizes["head_size"],
            "terms": "query x key + of_queries" + " + of_keys" * with_keys,
        }  # fmt: skip
        steps: list[tuple[str, tuple[str, ...]]] = [
            ("distance", ("seq", "seq")),
            ("vectors", ("seq", "seq", "head_size")),
            ("of_queries", self.scores),
            *([("of_keys", self.scores)] if with_keys else []),
            ("scores", self.scores),
        ]
        points = [self.point(POSITIONS, key, dims, **values) for key, dims in steps]
        notes = [self.text(POSITIONS, "absolute")] if kind == "absolute" else []
        return self.section("positions", points, notes, kind=kind)

    # ---- training ----

    def checkpointing(self, layer_flops: int) -> Section:
        """Return what gradient checkpointing saves and computes."""
        factors = [self.sizes["layers"], *(self.sizes[name] for name in self.states)]
        values: dict[str, Any] = {
            "enabled": str(self.config.gradient_checkpointing).lower(), "saved_terms": " x ".join(map(str, factors)),
            "saved_size": bytes_text(prod(factors) * FP32.size_bytes), "layer_flops": layer_flops,
            "recomputed_flops": self.sizes["layers"] * layer_flops, "model": self.source.name,
        }  # fmt: skip
        dims = {"forward": (self.states, (self.layers,))}
        points = [
            self.point(CHECKPOINTING, key, *dims.get(key, (None,)), **values)
            for key in ("enable", "forward", "backward", "cost")
        ]
        return self.section("checkpointing", points, [self.text(CHECKPOINTING, "no_cache")])
