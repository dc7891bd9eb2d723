"""Sections of `explain` on the whole of a BERT: inputs, outputs, caches, relative positions, checkpointing."""

import inspect
from collections.abc import Sequence
from math import prod
from typing import Any

from bertscope.analyses.tracing.derived_inputs import CHOICES
from bertscope.model import CLASSES
from bertscope.reports.explain import Point, Section
from bertscope.sources.bert import BertSource
from bertscope.units import FP32, bytes_text

SECTIONS = ("inputs", "outputs", "caches", "positions", "checkpointing")
_Times = Sequence[tuple[str, int]]  # names and numbers of the items of nested tuples
_WITH_ENCODER = ("BertModel", "BertForMaskedLM", "BertLMHeadModel")  # the classes that take an encoder's states
_DEFAULTS = ("output_attentions", "output_hidden_states", "return_dict", "use_cache")  # of arguments
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


def sections(source: BertSource, *, batch: int, seq: int, layer_flops: int) -> tuple[Section, ...]:
    """Return the five sections with the numbers of this model at these sizes.

    `layer_flops` are the FLOPs of a forward pass of one layer.
    """
    writer = _Writer(source, batch, seq)
    return (
        writer.inputs(),
        writer.outputs(),
        writer.caches(),
        writer.positions(),
        writer.checkpointing(layer_flops),
    )


class _Writer:
    """Maker of the sections; `sizes` are the numbers of the dimensions."""

    def __init__(self, source: BertSource, batch: int, seq: int) -> None:
        self.source, self.config = source, source.config
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

    def point(self, key: str, dims: Sequence[str] | None = None, times: _Times = (), name: str = "") -> Point:
        """Return a numbered point; `dims` are names of sizes, or numbers."""
        shape, sizes = self.shape(dims, times) if dims is not None else ("", "")
        return Point(key=key, name=name or key, shape=shape, sizes=sizes)

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
        """Return a section with the values of its sentences."""
        return Section(key=key, notes=tuple(notes), points=tuple(points), values=values)

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
        fields = config.to_dict()
        values = {
            "last_id": config.vocab_size - 1,
            "last_type": config.type_vocab_size - 1,
            "last_position": config.max_position_embeddings - 1,
            "past": self.sizes["past"],
            **{
                name: fields[name] for name in ("output_attentions", "output_hidden_states", "return_dict", "use_cache")
            },
        }
        points = [self.point(name, *shapes.get(name, (None,))) for name in names]
        return self.section("inputs", points, architecture=self.architecture, count=len(names), **values)

    def outputs(self) -> Section:
        """Return the outputs of the class in the order of its tuple, as if all of them were asked for."""
        config, layers = self.config, self.layers
        made: list[Point] = []

        def add(name: str, dims: Sequence[str] | None, times: _Times = (), key: str | None = None) -> None:
            made.append(self.point(key or name, dims, times, name=f"output[{len(made)}] {name}"))

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
        notes = ["order", *([] if config.is_decoder else ["encoder"])]
        return self.section("outputs", made, notes, architecture=self.architecture, place=place)

    # ---- attention ----

    def caches(self) -> Section:
        """Return where key and value of an attention come from, and the size of the cache."""
        of_encoder = ("batch", "heads", "encoder_seq", "head_size")
        states = ("batch", "encoder_seq", "hidden_size")
        points = [
            self.point("cross_cached", of_encoder),
            self.point("cross", of_encoder),
            self.point("self_cached", self.keys),
            self.point("self", self.keys),
        ]
        factors = [self.sizes["layers"], self.pairs, *(self.sizes[name] for name in self.keys)]
        values = {
            "encoder_states": self.both(states),
            "states": self.both(self.states),
            "seq": self.sizes["seq"],
            "past": self.sizes["past"],
            "cache_terms": " x ".join(map(str, factors)),
            "cache_numel": prod(factors),
            "cache_size": bytes_text(prod(factors) * FP32.size_bytes),
        }
        notes = ["size", *([] if self.config.is_decoder else ["no_cache"])]
        return self.section("caches", points, notes, **values)

    def positions(self) -> Section:
        """Return the steps of relative positions, as method 4 of Huang et al. 2020 has them unless only for queries."""
        kind, last = self.config.position_embedding_type, self.config.max_position_embeddings - 1
        with_keys = kind != "relative_key"
        values: dict[str, Any] = {
            "kind": kind, "positions": last + 1, "last_position": last, "least": last - (self.sizes["seq"] - 1),
            "most": last + (self.sizes["seq"] - 1), "table": (2 * last + 1) * self.sizes["head_size"],
            "terms": "query x key + of_queries" + " + of_keys" * with_keys, "head_size": self.sizes["head_size"],
        }  # fmt: skip
        steps: list[tuple[str, tuple[str, ...]]] = [
            ("distance", ("seq", "seq")),
            ("vectors", ("seq", "seq", "head_size")),
            ("of_queries", self.scores),
            *([("of_keys", self.scores)] if with_keys else []),
            ("scores", self.scores),
        ]
        points = [self.point(key, dims) for key, dims in steps]
        return self.section("positions", points, ["absolute"] if kind == "absolute" else [], **values)

    # ---- training ----

    def checkpointing(self, layer_flops: int) -> Section:
        """Return what gradient checkpointing saves and computes."""
        factors = [self.sizes["layers"], *(self.sizes[name] for name in self.states)]
        values: dict[str, Any] = {
            "enabled": str(self.config.gradient_checkpointing).lower(), "saved_terms": " x ".join(map(str, factors)),
            "saved_size": bytes_text(prod(factors) * FP32.size_bytes), "layer_flops": layer_flops,
            "recomputed_flops": self.sizes["layers"] * layer_flops, "model": self.source.name,
            "layers": self.sizes["layers"],
        }  # fmt: skip
        dims = {"forward": (self.states, (self.layers,))}
        points = [self.point(key, *dims.get(key, (None,))) for key in ("enable", "forward", "backward", "cost")]
        return self.section("checkpointing", points, ["no_cache"], **values)
