"""`explain`: a model step by step, with every number as a formula in the configuration's names.

The formulas are closed forms that only this file holds; the sums compare them with the numbers that `count` and
`flops` obtain from the built model.
"""

import dataclasses
import inspect
import itertools
import typing
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from bertscope.analyses.explain_modules import explain_modules, formula, sum_of
from bertscope.analyses.params import count
from bertscope.config import HEADS, BertConfig
from bertscope.errors import SelectionError, name_of, suggestion
from bertscope.model import CLASSES, BertPreTrainedModel
from bertscope.model.encoder import BaseModelOutputWithPoolingAndCrossAttentions
from bertscope.reports.base import Note
from bertscope.reports.explain import Dims, ExplainReport, Point, Section, Step, Sum
from bertscope.reports.layer_ranges import LayerRange, layers_in, with_layers
from bertscope.reports.modules import CountReport, FlopsReport
from bertscope.sources.bert import BertSource
from bertscope.sources.model_source import ModelSource, built_for_counting
from bertscope.tracing.fake_tensors import META_ATTENTION
from bertscope.tracing.flops import FlopsRun
from bertscope.tracing.inputs import CHOICES
from bertscope.tracing.module_tree import subject
from bertscope.units import FP32, bytes_text

SECTIONS = ("config", "inputs", "outputs", "caches", "positions", "checkpointing")
NORM = "2 * hidden_size"
SQUARE = "hidden_size * hidden_size + hidden_size"
_Times = Sequence[tuple[str, int]]  # names and numbers of the items of nested tuples


def explain(
    source: ModelSource, path: str | None = None, *, batch: int = 1, seq: int = 128, inputs: Sequence[str] = ()
) -> ExplainReport:
    """Return the report of `bertscope.explain` on a source; `inputs` are texts for `inputs_for`."""
    model = built_for_counting(source, attention=META_ATTENTION)
    if not isinstance(model, BertPreTrainedModel):
        return explain_modules(source, model, path, batch=batch, seq=seq, inputs=inputs)
    if inputs:
        raise SelectionError(f"the inputs of a BERT are known; leave {name_of('input')} out")
    bert = _Bert(source.require("explain"), batch, seq)
    report = ExplainReport(
        subject=subject(model, source.name), batch=batch, seq=seq, steps=(), sums=(), questions=(),
        sections=tuple(bert.section(key) for key in SECTIONS if path in (None, key)),
    )  # fmt: skip
    if path in SECTIONS:
        return report
    try:
        chosen = bert.steps if path is None else _under(bert.steps, path, bert.layers)
    except SelectionError as error:  # a module that is no step, such as `encoder.layer.0.attention.self`
        try:
            report = explain_modules(source, model, path or "", batch=batch, seq=seq)
        except SelectionError:
            raise error from None
        return replace(report, steps=tuple(replace(step, number=0) for step in report.steps))
    counted = count(model, by="group", name=source.name)
    worked, totals, config = FlopsRun(source=bert.source).at(batch, seq), counted.totals, bert.config
    questions = (
        Note(key="layer_norm", values={"norm": 2 * config.hidden_size, "hidden": config.hidden_size}),
        Note(key="token_type"),
        Note(key="padding_idx", values={"padding": "none" if config.pad_token_id is None else config.pad_token_id}),
        Note(key="totals", values={"distinct": totals.distinct_params, "layers": totals.layer_params}),
    )
    sums = tuple(_sums(bert.steps, counted, worked, bert.layers))
    return replace(report, steps=chosen, sums=sums, questions=questions)


class _Bert:
    def __init__(self, source: BertSource, batch: int, seq: int) -> None:
        self.source, self.config, self.head = source, source.config, HEADS[source.architecture]
        self.layers = source.config.num_hidden_layers
        self.values = {
            **{name: value for name, value in source.config.to_dict().items() if type(value) is int},
            "batch": batch, "choices": CHOICES, "batch_choices": batch * CHOICES, "seq": seq, "encoder_seq": seq,
            "past": seq - 1, "heads": source.config.num_attention_heads, "head_size": source.config.head_size,
            "layers": self.layers,
        }  # fmt: skip
        self.batch = "batch_choices" if self.head.is_choice else "batch"
        self.hidden: Dims = (self.batch, "seq", "hidden_size")
        self.keys: Dims = (self.batch, "heads", "seq", "head_size")
        self.scores: Dims = (self.batch, "heads", "seq", "seq")
        self.tokens: Dims = ("batch", "choices", "seq") if self.head.is_choice else ("batch", "seq")
        self.range = LayerRange(0, max(self.layers - 1, 0))
        self.steps = tuple(replace(step, number=number) for number, step in enumerate(self._steps(), 1))

    # ---- steps ----

    def step(
        self, key: str, group: str, names: tuple[str, str, str], inputs: tuple[Dims, ...], output: Dims,
        params: str | None = None, flops: str | None = None,
    ) -> Step:  # fmt: skip
        keras, path, tf_name = names
        has_head = self.source.architecture != "BertModel"
        has_prefix = path and has_head and not path.startswith(("cls", "classifier", "qa_"))
        return Step(
            sizes={name: self.values[name] for dims in (*inputs, output) for name in dims if name in self.values},
            group=group,
            name=keras,
            path="bert." * bool(has_prefix) + path,
            tf_name=tf_name,
            inputs=inputs,
            output=output,
            params=formula(params, self.values) if params else None,
            flops=formula(flops, self.values) if flops else None,
            copies=self.layers if group == "layer" else 1,
            sentences=(Note(key=key, values={"dropout": self.config.hidden_dropout_prob} if key == "dropout" else {}),),
        )

    def _steps(self) -> Iterator[Step]:
        ids: Dims = (self.batch, "seq")
        hidden, pooled = self.hidden, (self.batch, "hidden_size")
        is_absolute = self.config.position_embedding_type == "absolute"
        position = "embedding_position" if is_absolute else "embedding_position_unused"
        yield self.step("input_token", "embeddings", ("Input-Token", "", "input_ids"), (), ids)
        yield self.step("input_segment", "embeddings", ("Input-Segment", "", "token_type_ids"), (), ids)
        for key, name, part, inputs, params in (
            ("embedding_token", "Token", ".word_embeddings", (ids,), "vocab_size * hidden_size"),
            ("embedding_segment", "Segment", ".token_type_embeddings", (ids,), "type_vocab_size * hidden_size"),
            ("embedding_add", "Token-Segment", "", (hidden, hidden), None),
            (position, "Position", ".position_embeddings", (hidden,), "max_position_embeddings * hidden_size"),
            ("norm", "Norm", ".LayerNorm", (hidden,), NORM),
            ("dropout", "Dropout", ".dropout", (hidden,), None),
        ):
            yield self.step(key, "embeddings", _names(f"Embedding-{name}", f"embeddings{part}"), inputs, hidden, params)
        if self.layers:
            yield from self._layer()
        if getattr(CLASSES[self.source.architecture], "add_pooling_layer", self.source.add_pooling_layer):
            flops = f"2 * {self.batch} * hidden_size * hidden_size"
            yield self.step(
                "pooler", "pooler", _names("Pooler-Dense", "pooler.dense"), (hidden,), pooled, SQUARE, flops
            )
        yield from self._head(pooled)

    def _layer(self) -> Iterator[Step]:
        pairs = {"absolute": 0, "relative_key": 1, "relative_key_query": 2}[self.config.position_embedding_type]
        distances = " + (2 * max_position_embeddings - 1) * head_size" if pairs else ""
        # Four dense layers, and the products of queries with keys, distances and values.
        self_flops, cross_flops = (
            f"{self.batch} * seq * (4 * 2 * hidden_size * hidden_size + {products} * 2 * seq * hidden_size)"
            for products in (2 + pairs, 2)
        )
        blocks = [
            ("attention", ".attention", ".{self,output.dense}", "MultiHeadSelfAttention",
             f"4 * ({SQUARE}){distances}", self_flops),
            ("cross_attention", ".crossattention", ".{self,output.dense}", "MultiHeadCrossAttention",
             f"4 * ({SQUARE})", cross_flops if self.head.takes_encoder else None),
            ("feed_forward", "", ".{intermediate,output}.dense", "FeedForward",
             "(hidden_size * intermediate_size + intermediate_size) + (intermediate_size * hidden_size + hidden_size)",
             f"{self.batch} * seq * 2 * 2 * hidden_size * intermediate_size"),
        ]  # fmt: skip
        hidden = self.hidden
        for key, module, dense, keras, params, flops in blocks:
            if key == "cross_attention" and not self.config.add_cross_attention:
                continue
            name, path = f"Transformer-{self.range}-{keras}", f"encoder.layer.{self.range}{module}"
            yield self.step(key, "layer", _names(name, path + dense), (hidden,), hidden, params, flops)
            for following, end, part, inputs, size in (
                ("dropout", "Dropout", ".dropout", (hidden,), None),
                ("add", "Add", "", (hidden, hidden), None),
                ("norm", "Norm", ".LayerNorm", (hidden,), NORM),
            ):
                names = _names(f"{name}-{end}", f"{path}.output{part}")
                yield self.step(following, "layer", names, inputs, hidden, size)

    def _head(self, pooled: Dims) -> Iterator[Step]:
        batch, head = self.batch, self.head
        if head.has_words:
            names = ("MLM-Dense", "cls.predictions.transform", "cls/predictions/transform/{dense,LayerNorm}")
            flops = f"{batch} * seq * 2 * hidden_size * hidden_size"
            yield self.step("mlm_transform", "head", names, (self.hidden,), self.hidden, f"{SQUARE} + {NORM}", flops)
            names = ("MLM-Bias", "cls.predictions.decoder", "cls/predictions/output_bias")
            params = "vocab_size" if self.config.tie_word_embeddings else "vocab_size * hidden_size + vocab_size"
            flops = f"{batch} * seq * 2 * hidden_size * vocab_size"
            yield self.step("mlm_decoder", "head", names, (self.hidden,), (batch, "seq", "vocab_size"), params, flops)
        if ("batch", "2") in head.logits.values():
            names = ("NSP-Proba", "cls.seq_relationship", "cls/seq_relationship/{output_weights,output_bias}")
            flops = f"{batch} * 2 * hidden_size * 2"
            yield self.step("seq_relationship", "head", names, (pooled,), (batch, "2"), "hidden_size * 2 + 2", flops)
        if path := head.layer:
            labels = "1" if head.is_choice else "num_labels"
            per_token = any("seq" in sizes for sizes in head.logits.values())
            source, out = (self.hidden, (batch, "seq", labels)) if per_token else (pooled, (batch, labels))
            flops = f"{batch}{' * seq' if per_token else ''} * 2 * hidden_size * {labels}"
            names = ("Classifier-Dense", path, "{output_weights,output_bias}")
            yield self.step("classifier", "head", names, (source,), out, f"hidden_size * {labels} + {labels}", flops)

    # ---- sections: configuration, inputs and outputs, attention, training ----

    def section(self, key: str) -> Section:
        notes, points, values = getattr(self, f"_{key}")()
        return Section(key=key, notes=tuple(filter(None, notes)), points=tuple(points), values=values)

    def point(
        self, key: str, dims: Sequence[str] | None = None, times: _Times = (), *, name: str = "", kind: str = ""
    ) -> Point:
        shape, sizes = self.shape(dims, times) if dims is not None else ("", "")
        return Point(key=key, name=name or key, shape=shape, sizes=sizes, type=kind)

    def shape(self, dims: Sequence[str], times: _Times = ()) -> tuple[str, str]:
        """Return a shape with names and with numbers, such as `layers x [batch, seq]` and `12 x [1, 128]`."""
        numbers = [str(self.values.get(name, name)) for name in dims]
        return (
            "".join(f"{text} x " for text, _ in times) + f"[{', '.join(dims)}]",
            "".join(f"{number} x " for _, number in times) + f"[{', '.join(numbers)}]",
        )

    def product(self, name: str, *factors: int) -> dict[str, Any]:
        size = bytes_text(prod(factors) * FP32.size_bytes)
        return {f"{name}_terms": " x ".join(map(str, factors)), f"{name}_size": size}

    @property
    def pairs(self) -> int:
        config = self.config
        return 4 if config.is_decoder and config.add_cross_attention and self.head.takes_encoder else 2

    def _config(self) -> tuple[Any, ...]:
        values = self.config.to_dict()
        fields = itertools.takewhile(lambda item: item.name != "num_labels", dataclasses.fields(BertConfig))
        points = [
            Point(key=item.name, name=item.name, sizes=repr(values[item.name]), type=f"{item.type} = {item.default!r}")
            for item in fields
        ]
        return ["fields", "pooling" * (self.source.architecture == "BertModel")], points, {
            "name": self.source.name, "last_id": self.config.vocab_size - 1, "head_size": self.config.head_size,
            "add_pooling_layer": self.source.add_pooling_layer,
        }  # fmt: skip

    def _inputs(self) -> tuple[Any, ...]:
        forward = CLASSES[self.source.architecture].forward
        _, *parameters = inspect.signature(forward, eval_str=True).parameters.values()
        shapes: dict[str, tuple[Sequence[str], _Times]] = {
            **dict.fromkeys(("input_ids", "attention_mask", "token_type_ids", "position_ids"), (self.tokens, ())),
            "head_mask": (("layers", "heads"), ()),
            "inputs_embeds": ((*self.tokens, "hidden_size"), ()),
            "encoder_hidden_states": (("batch", "encoder_seq", "hidden_size"), ()),
            "encoder_attention_mask": (("batch", "encoder_seq"), ()),
            "past_key_values": (("batch", "heads", "past", "head_size"), (("layers", self.layers), ("2", 2))),
            **{name: (sizes, ()) for name, sizes in self.head.labels.items()},
        }
        points = [
            self.point(item.name, *shapes.get(item.name, (None, ())), kind=f"{item.annotation} = None")
            for item in parameters
        ]
        fields, config = self.config.to_dict(), self.config
        flags = ("output_attentions", "output_hidden_states", "return_dict", "use_cache")
        return ["call"], points, {
            "architecture": self.source.architecture, "count": len(points), "last_id": config.vocab_size - 1,
            "last_type": config.type_vocab_size - 1, "last_position": config.max_position_embeddings - 1,
            "past": self.values["past"], **{name: fields[name] for name in flags},
        }  # fmt: skip

    def _outputs(self) -> tuple[Any, ...]:
        model_class = CLASSES[self.source.architecture]
        hint = typing.get_type_hints(model_class.forward)["return"].__args__[0]
        returned = getattr(model_class, "output", hint)  # of the classes that share a forward
        # The tuple of a head may have more than its class.
        every = typing.get_type_hints(BaseModelOutputWithPoolingAndCrossAttentions) | typing.get_type_hints(returned)
        kinds = {name: str(hint) for name, hint in every.items()}
        layers = ("layers", self.layers)
        rows: list[tuple[str, Sequence[str] | None, _Times]] = [("loss", (), ())]
        rows += [(name, dims, ()) for name, dims in self.head.logits.items()]
        if self.source.architecture == "BertModel":
            pooled = ("batch", "hidden_size") if self.source.add_pooling_layer else None
            rows = [("last_hidden_state", self.hidden, ()), ("pooler_output", pooled, ())]
        if self.config.is_decoder:
            rows.append(("past_key_values", self.keys, (layers, (str(self.pairs), self.pairs))))
        index = len(rows)
        rows.append(("hidden_states", self.hidden, (("(layers + 1)", self.layers + 1),)))
        rows.append(("attentions", self.scores, (layers,)))
        if self.pairs == 4:
            rows.append(("cross_attentions", (self.batch, "heads", "seq", "encoder_seq"), (layers,)))
        points = [
            self.point(
                "no_pooler" if dims is None else name,
                dims,
                times,
                name=f"output[{number}] {name}",
                kind=str(kinds[name]),
            )
            for number, (name, dims, times) in enumerate(rows)
        ]
        values = {"architecture": self.source.architecture, "place": index, "output": returned.__name__}
        return ["class", "order", "encoder" * (not self.config.is_decoder)], points, values

    def _caches(self) -> tuple[Any, ...]:
        of_encoder, states = ("batch", "heads", "encoder_seq", "head_size"), ("batch", "encoder_seq", "hidden_size")
        dims = {"cross_cached": of_encoder, "cross": of_encoder, "self_cached": self.keys, "self": self.keys}
        factors = (self.layers, self.pairs, *(self.values[name] for name in self.keys))
        notes = ["size", "layers", "no_cache" * (not self.config.is_decoder)]
        return notes, itertools.starmap(self.point, dims.items()), {
            "encoder_states": " = ".join(self.shape(states)), "states": " = ".join(self.shape(self.hidden)),
            "seq": self.values["seq"], "past": self.values["past"], "cache_numel": prod(factors),
            **self.product("cache", *factors),
        }  # fmt: skip

    def _positions(self) -> tuple[Any, ...]:
        """Return the steps of relative positions, as method 4 of Huang et al. 2020 has them unless only for queries."""
        kind, last = self.config.position_embedding_type, self.config.max_position_embeddings - 1
        before, head_size = self.values["seq"] - 1, self.values["head_size"]
        dims = {
            "distance": ("seq", "seq"), "vectors": ("seq", "seq", "head_size"), "of_queries": self.scores,
            "of_keys": self.scores, "scores": self.scores,
        }  # fmt: skip
        if kind == "relative_key":
            del dims["of_keys"]
        notes = ["absolute" * (kind == "absolute"), "sources"]
        return notes, itertools.starmap(self.point, dims.items()), {
            "kind": kind, "positions": last + 1, "last_position": last, "least": last - before, "most": last + before,
            "table": (2 * last + 1) * head_size, "head_size": head_size,
            "terms": "query x key + of_queries" + " + of_keys" * ("of_keys" in dims),
        }  # fmt: skip

    def _checkpointing(self) -> tuple[Any, ...]:
        layer_flops = sum(step.flops.value for step in self.steps if step.group == "layer" and step.flops)
        forward = self.point("forward", self.hidden, (("layers", self.layers),))
        points = [self.point("enable"), forward, self.point("backward"), self.point("cost")]
        return ["no_cache"], points, {
            "enabled": str(self.config.gradient_checkpointing).lower(), "model": self.source.name,
            "layers": self.layers, "layer_flops": layer_flops, "recomputed_flops": self.layers * layer_flops,
            **self.product("saved", self.layers, *(self.values[name] for name in self.hidden)),
        }  # fmt: skip


def _names(keras: str, path: str) -> tuple[str, str, str]:
    tf_name = path + ".{gamma,beta}" * path.endswith(".LayerNorm")
    tf_name = tf_name.replace("layer.", "layer_").replace("{self,", "{self/query,self/key,self/value,")
    return keras, path, f"bert/{tf_name.replace('.', '/')}"


def _under(steps: tuple[Step, ...], path: str, layers: int) -> tuple[Step, ...]:
    """Return the steps that a path names in any naming; every layer has the steps of the one that represents all."""
    every, layer = LayerRange(0, max(layers - 1, 0)), layers_in(path)
    wanted = with_layers(path, lambda numbers: numbers if numbers.is_run or numbers.first not in every else every)
    wanted = wanted.removeprefix("bert.")
    chosen, begins = [], (f"{wanted}.", f"{wanted}-", f"{wanted}/")
    for step in steps if wanted else ():
        names = (step.group, step.name, step.tf_name, step.path.removeprefix("bert."))
        if any(name == wanted or name.startswith(begins) or f".{wanted}." in name for name in names):
            if layer and layers > 1 and wanted != path.removeprefix("bert."):  # of the layer with that number
                names_of_layer: dict[str, Any] = {
                    field: with_layers(getattr(step, field), lambda _: layer) for field in ("name", "path", "tf_name")
                }
                step = replace(step, copies=1, **names_of_layer)
            chosen.append(step)
    if not chosen:
        hint = suggestion(path, [*SECTIONS, *(name for step in steps for name in (step.path, step.name) if name)])
        if layer and layer.last not in every:
            hint = f"the layers are {every}"
        elif "did" not in hint:
            hint = f"try {', '.join(('embeddings', 'layer', *SECTIONS))}"
        raise SelectionError(f"no step is called {path[:100]!r}; {hint}")
    return tuple(chosen)


def _sums(steps: tuple[Step, ...], counted: CountReport, worked: FlopsReport, layers: int) -> Iterator[Sum]:
    params = {row.name: row.distinct_params for row in counted.rows}
    flops = {row.path.removeprefix("bert."): row.forward.matmul_flops for row in worked.rows}
    whole = (counted.totals.distinct_params, worked.rows[0].forward.matmul_flops)
    got = {name: (params.get(name, 0), flops.get(name, 0)) for name in ("embeddings", "encoder", "pooler")}
    body_params, body_flops = map(sum, zip(*got.values(), strict=True))
    got["head"] = whole[0] - body_params, whole[1] - body_flops
    got["layer"] = got["encoder"][0] // max(layers, 1), got["encoder"][1] // max(layers, 1)
    terms = []
    for group in ("embeddings", *["layer"] * bool(layers), "pooler", "head"):
        chosen = [replace(step, copies=1) for step in steps if step.group == group]
        copies = layers if group == "layer" else 1
        if chosen:
            yield sum_of(f"{group} (each of {copies})" if copies > 1 else group, chosen, *got[group])
        if any(got[group]):
            terms.append(f"{copies} x {got[group][0]:,}" if copies > 1 else f"{got[group][0]:,}")
    yield replace(sum_of("total", steps, *whole), symbols=" + ".join(terms))
