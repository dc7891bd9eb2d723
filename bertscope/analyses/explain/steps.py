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

from bertscope.analyses.explain.modules import explain_modules, formula
from bertscope.analyses.flops import FlopsRun
from bertscope.analyses.modules.totals import subject
from bertscope.analyses.params import count
from bertscope.analyses.tracing.fake_tensors import META_ATTENTION
from bertscope.analyses.tracing.inputs import CHOICES
from bertscope.config import HEADS, BertConfig
from bertscope.errors import SelectionError, name_of, suggestion
from bertscope.model import CLASSES, BertPreTrainedModel
from bertscope.model.outputs import BaseModelOutputWithPoolingAndCrossAttentions
from bertscope.reports.base import Note
from bertscope.reports.explain import Dims, ExplainReport, Formula, Point, Section, Step, Sum
from bertscope.reports.flops import FlopsReport
from bertscope.reports.layer_ranges import LayerRange, layers_in, with_layers
from bertscope.reports.params import CountReport
from bertscope.sources.bert import BertSource
from bertscope.sources.building import built_for_counting
from bertscope.sources.model_source import ModelSource
from bertscope.units import FP32, bytes_text

SECTIONS = ("config", "inputs", "outputs", "caches", "positions", "checkpointing")
_Times = Sequence[tuple[str, int]]  # names and numbers of the items of nested tuples


def sections(source: BertSource, *, batch: int, seq: int, layer_flops: int) -> tuple[Section, ...]:
    """Return the sections with the numbers of this model at these sizes.

    `layer_flops` are the FLOPs of a forward pass of one layer.
    """
    writer = _Writer(source, batch, seq)
    return (
        writer.configuration(),
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
        config, is_choice = source.config, HEADS[source.architecture].is_choice
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
        crosses = config.is_decoder and config.add_cross_attention and HEADS[self.architecture].takes_encoder
        self.pairs = 4 if crosses else 2  # tensors in the cache of a layer

    def point(
        self, key: str, dims: Sequence[str] | None = None, times: _Times = (), *, name: str = "", kind: str = ""
    ) -> Point:
        """Return a numbered point; `dims` are names of sizes, or numbers; `kind` is its type."""
        shape, sizes = self.shape(dims, times) if dims is not None else ("", "")
        return Point(key=key, name=name or key, shape=shape, sizes=sizes, type=kind)

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

    # ---- configuration, inputs and outputs ----

    def configuration(self) -> Section:
        """Return the fields of the configuration that all classes have: their values, types and defaults."""
        values = self.config.to_dict()
        fields = itertools.takewhile(lambda item: item.name != "num_labels", dataclasses.fields(BertConfig))
        points = [
            Point(key=item.name, name=item.name, sizes=repr(values[item.name]), type=f"{item.type} = {item.default!r}")
            for item in fields
        ]
        notes = ["fields", *(["pooling"] if self.architecture == "BertModel" else [])]
        return self.section("config", points, notes, name=self.source.name, last_id=self.config.vocab_size - 1,
                            head_size=self.config.head_size,
                            add_pooling_layer=self.source.add_pooling_layer)  # fmt: skip

    def inputs(self) -> Section:
        """Return the arguments of the forward of the class, in their order."""
        parameters = inspect.signature(CLASSES[self.architecture].forward).parameters
        names = list(parameters)[1:]
        config, per_layer = self.config, (self.layers, ("2", 2))
        shapes: dict[str, tuple[Sequence[str], _Times]] = {
            **dict.fromkeys(("input_ids", "attention_mask", "token_type_ids", "position_ids"), (self.tokens, ())),
            "head_mask": (("layers", "heads"), ()),
            "inputs_embeds": ((*self.tokens, "hidden_size"), ()),
            "encoder_hidden_states": (("batch", "encoder_seq", "hidden_size"), ()),
            "encoder_attention_mask": (("batch", "encoder_seq"), ()),
            "past_key_values": (("batch", "heads", "past", "head_size"), per_layer),
            **{name: (sizes, ()) for name, sizes in HEADS[self.architecture].labels.items()},
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
        kinds = {name: f"{parameter.annotation} = None" for name, parameter in parameters.items()}
        points = [self.point(name, *shapes.get(name, (None, ())), kind=kinds[name]) for name in names]
        return self.section("inputs", points, ["call"], architecture=self.architecture, count=len(names), **values)

    def outputs(self) -> Section:
        """Return the outputs of the class in the order of its tuple, as if all of them were asked for."""
        config, layers = self.config, self.layers
        made: list[Point] = []
        model_class = CLASSES[self.architecture]
        hint = typing.get_type_hints(model_class.forward)["return"].__args__[0]
        returned = getattr(model_class, "output", hint)  # of the classes that share a forward
        every = (*dataclasses.fields(BaseModelOutputWithPoolingAndCrossAttentions), *dataclasses.fields(returned))
        kinds = {item.name: str(item.type) for item in every}  # the tuple of a head may have more than its class

        def add(name: str, dims: Sequence[str] | None, times: _Times = (), key: str | None = None) -> None:
            place = f"output[{len(made)}] {name}"
            made.append(self.point(key or name, dims, times, name=place, kind=kinds[name]))

        if self.architecture == "BertModel":
            add("last_hidden_state", self.states)
            has_pooler = self.source.add_pooling_layer
            add("pooler_output", ("batch", "hidden_size") if has_pooler else None,
                key=None if has_pooler else "no_pooler")  # fmt: skip
        else:
            add("loss", ())
            for name, dims in HEADS[self.architecture].logits.items():
                add(name, dims)
        if config.is_decoder:
            add("past_key_values", self.keys, (layers, (str(self.pairs), self.pairs)))
        place = len(made)
        add("hidden_states", self.states, (("(layers + 1)", layers[1] + 1),))
        add("attentions", self.scores, (layers,))
        if self.pairs == 4:
            add("cross_attentions", (self.batch, "heads", "seq", "encoder_seq"), (layers,))
        notes = ["class", "order", *([] if config.is_decoder else ["encoder"])]
        return self.section("outputs", made, notes, architecture=self.architecture, place=place,
                            output=returned.__name__)  # fmt: skip

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
        notes = ["size", "layers", *([] if self.config.is_decoder else ["no_cache"])]
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
        return self.section("positions", points, [*(["absolute"] if kind == "absolute" else []), "sources"], **values)

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


NORM = "2 * hidden_size"
# The frequent questions, with the names of the values in their answers.
_QUESTIONS: dict[str, tuple[str, ...]] = {
    "layer_norm": ("norm", "hidden"), "token_type": (), "padding_idx": ("padding",), "totals": ("distinct", "layers"),
}  # fmt: skip
SQUARE = "hidden_size * hidden_size + hidden_size"


def explain(
    source: ModelSource, path: str | None = None, *, batch: int = 1, seq: int = 128,
    inputs: Sequence[str] = (),
) -> ExplainReport:  # fmt: skip
    """Return the steps of the model, or those under `path` (in any of the three namings), and the sums of its levels.

    FLOPs are those of the matrix products of a forward pass, 2 for a multiply-add. The steps of a model that is no
    BERT, or that has adapters, are its modules; `inputs` are those of `inputs_for` that cannot be derived. Raises
    SelectionError for a path that no step has.
    """
    model = built_for_counting(source, attention=META_ATTENTION)
    if not isinstance(model, BertPreTrainedModel):
        return explain_modules(source, model, path, batch=batch, seq=seq, inputs=inputs)
    if inputs:
        raise SelectionError(f"the inputs of a BERT are known; leave {name_of('input')} out")
    modules, source = source, source.require("explain")
    steps = tuple(_StepWalk(source, batch, seq).steps())
    try:
        chosen = steps if path is None or path in SECTIONS else _under(steps, path, source.config.num_hidden_layers)
    except SelectionError as error:
        return _of_a_module(modules, model, path or "", batch, seq, error)
    counted = count(model, by="group", name=source.name)
    worked = FlopsRun(source=source).at(batch, seq)
    layer_flops = sum(step.flops.value for step in steps if step.group == "layer" and step.flops)
    written = sections(source, batch=batch, seq=seq, layer_flops=layer_flops)
    if path in SECTIONS:
        return ExplainReport(
            subject=subject(model, source.name), batch=batch, seq=seq, steps=(), sums=(),
            questions=(), sections=tuple(section for section in written if section.key == path),
        )  # fmt: skip
    return ExplainReport(
        subject=subject(model, source.name),
        batch=batch,
        seq=seq,
        steps=chosen,
        sums=tuple(_sums(steps, counted, worked, source.config.num_hidden_layers)),
        questions=tuple(_questions(counted, source)),
        sections=written if path is None else (),
    )


def _of_a_module(
    source: ModelSource, model: BertPreTrainedModel, path: str, batch: int, seq: int, error: SelectionError
) -> ExplainReport:
    """Return the steps at the path of a module that is no step, such as `encoder.layer.0.attention.self`, or raise."""
    try:
        report = explain_modules(source, model, path, batch=batch, seq=seq)
    except SelectionError:
        raise error from None
    return replace(report, steps=tuple(replace(step, number=0) for step in report.steps))


class _StepWalk:
    """Maker of the steps; `values` are the names that formulas may use."""

    def __init__(self, source: BertSource, batch: int, seq: int) -> None:
        self.source, self.config = source, source.config
        self.prefix = "" if source.architecture == "BertModel" else "bert."
        is_choice = HEADS[source.architecture].is_choice
        self.batch = "batch_choices" if is_choice else "batch"
        config = source.config
        self.values = {
            "batch": batch, "batch_choices": batch * CHOICES, "seq": seq, "head_size": config.head_size,
            **{name: value for name, value in config.to_dict().items() if type(value) is int},
        }  # fmt: skip
        self.tokens: Dims = (self.batch, "seq")
        self.hidden: Dims = (self.batch, "seq", "hidden_size")
        self.layers = config.num_hidden_layers
        self.range = LayerRange(0, max(self.layers - 1, 0))

    def formula(self, symbols: str | None) -> Formula | None:
        """Return a formula of integers, names, +, - and *, with its numbers and value."""
        return None if symbols is None else formula(symbols, self.values)

    def step(
        self, key: str, group: str, names: tuple[str, str, str], inputs: tuple[Dims, ...], output: Dims,
        params: str | None = None, flops: str | None = None,
    ) -> Step:  # fmt: skip
        """Return one step; `names` are those of keras, Hugging Face and TensorFlow."""
        keras, path, tf_name = names
        named = dict.fromkeys(name for dims in (*inputs, output) for name in dims if name in self.values)
        return Step(
            sizes={name: self.values[name] for name in named},
            group=group,
            name=keras,
            path=self.prefix + path if path and not path.startswith(("cls", "classifier", "qa_")) else path,
            tf_name=tf_name,
            inputs=inputs,
            output=output,
            params=self.formula(params),
            flops=self.formula(flops),
            copies=self.layers if group == "layer" else 1,
            sentences=(Note(key=key, values={"dropout": self.config.hidden_dropout_prob} if key == "dropout" else {}),),
        )

    def steps(self) -> Iterator[Step]:
        """Yield all steps with their numbers, equal layers once."""
        return (replace(step, number=number) for number, step in enumerate(self._steps(), 1))

    def _steps(self) -> Iterator[Step]:
        yield from self.embeddings()
        if self.layers:
            yield from self.layer()
        architecture = self.source.architecture
        pooled: Dims = (self.batch, "hidden_size")
        if getattr(CLASSES[architecture], "add_pooling_layer", self.source.add_pooling_layer):
            flops = f"2 * {self.batch} * hidden_size * hidden_size"
            names = _names("Pooler-Dense", "pooler.dense")
            yield self.step("pooler", "pooler", names, (self.hidden,), pooled, SQUARE, flops)
        yield from self.head(architecture, pooled)

    def embeddings(self) -> Iterator[Step]:
        """Yield the steps from the ids to the normalised sum of the three vectors."""
        tokens, hidden = self.tokens, self.hidden
        is_absolute = self.config.position_embedding_type == "absolute"
        position = "embedding_position" if is_absolute else "embedding_position_unused"
        yield self.step("input_token", "embeddings", ("Input-Token", "", "input_ids"), (), tokens)
        yield self.step("input_segment", "embeddings", ("Input-Segment", "", "token_type_ids"), (), tokens)
        for key, name, part, inputs, params in (
            ("embedding_token", "Token", ".word_embeddings", (tokens,), "vocab_size * hidden_size"),
            ("embedding_segment", "Segment", ".token_type_embeddings", (tokens,), "type_vocab_size * hidden_size"),
            ("embedding_add", "Token-Segment", "", (hidden, hidden), None),
            (position, "Position", ".position_embeddings", (hidden,), "max_position_embeddings * hidden_size"),
            ("norm", "Norm", ".LayerNorm", (hidden,), NORM),
            ("dropout", "Dropout", ".dropout", (hidden,), None),
        ):
            yield self.step(key, "embeddings", _names(f"Embedding-{name}", f"embeddings{part}"), inputs, hidden, params)

    def layer(self) -> Iterator[Step]:
        """Yield the steps of one layer, which represents all."""
        pairs = {"absolute": 0, "relative_key": 1, "relative_key_query": 2}[self.config.position_embedding_type]
        distances = " + (2 * max_position_embeddings - 1) * head_size" if pairs else ""
        dense = ".{self,output.dense}"
        params, flops = f"4 * ({SQUARE})", self._attention_flops(2 + pairs)
        yield from self._block("attention", ".attention", dense, "MultiHeadSelfAttention", params + distances, flops)
        if self.config.add_cross_attention:
            runs = HEADS[self.source.architecture].takes_encoder
            crossed = self._attention_flops(2) if runs else None
            yield from self._block(
                "cross_attention", ".crossattention", dense, "MultiHeadCrossAttention", params, crossed
            )
        params = (
            "(hidden_size * intermediate_size + intermediate_size) + (intermediate_size * hidden_size + hidden_size)"
        )
        flops = f"{self.batch} * seq * 2 * 2 * hidden_size * intermediate_size"
        yield from self._block("feed_forward", "", ".{intermediate,output}.dense", "FeedForward", params, flops)

    def _attention_flops(self, products: int) -> str:
        """Return the FLOPs of four dense layers and of `products` attention products over `seq` positions."""
        return f"{self.batch} * seq * (4 * 2 * hidden_size * hidden_size + {products} * 2 * seq * hidden_size)"

    def _block(self, key: str, module: str, dense: str, keras: str, params: str, flops: str | None) -> Iterator[Step]:
        """Yield an attention or a feed-forward with its dropout, addition and LayerNorm."""
        name, path = f"Transformer-{self.range}-{keras}", f"encoder.layer.{self.range}{module}"
        hidden = self.hidden
        yield self.step(key, "layer", _names(name, path + dense), (hidden,), hidden, params, flops)
        for following, end, part, inputs, own in (
            ("dropout", "Dropout", ".dropout", (hidden,), None),
            ("add", "Add", "", (hidden, hidden), None),
            ("norm", "Norm", ".LayerNorm", (hidden,), NORM),
        ):
            yield self.step(following, "layer", _names(f"{name}-{end}", f"{path}.output{part}"), inputs, hidden, own)

    def head(self, architecture: str, pooled: Dims) -> Iterator[Step]:
        """Yield the steps of the head."""
        batch = self.batch
        head = HEADS[architecture]
        if head.has_words:
            names = ("MLM-Dense", "cls.predictions.transform", "cls/predictions/transform/{dense,LayerNorm}")
            flops = f"{batch} * seq * 2 * hidden_size * hidden_size"
            yield self.step("mlm_transform", "head", names, (self.hidden,), self.hidden, f"{SQUARE} + {NORM}", flops)
            names = ("MLM-Bias", "cls.predictions.decoder", "cls/predictions/output_bias")
            params = "vocab_size" if self.config.tie_word_embeddings else "vocab_size * hidden_size + vocab_size"
            flops = f"{batch} * seq * 2 * hidden_size * vocab_size"
            yield self.step("mlm_decoder", "head", names, (self.hidden,), (batch, "seq", "vocab_size"), params, flops)
        if head.has_pair:
            names = ("NSP-Proba", "cls.seq_relationship", "cls/seq_relationship/{output_weights,output_bias}")
            flops = f"{batch} * 2 * hidden_size * 2"
            yield self.step("seq_relationship", "head", names, (pooled,), (batch, "2"), "hidden_size * 2 + 2", flops)
        if path := head.layer:
            labels, per_token = "1" if head.is_choice else "num_labels", head.is_of_tokens
            given, out = (self.hidden, (batch, "seq", labels)) if per_token else (pooled, (batch, labels))
            flops = f"{batch}{' * seq' if per_token else ''} * 2 * hidden_size * {labels}"
            names = ("Classifier-Dense", path, "{output_weights,output_bias}")
            yield self.step("classifier", "head", names, (given,), out, f"hidden_size * {labels} + {labels}", flops)


def _names(keras: str, path: str) -> tuple[str, str, str]:
    """Return the names of a step of the body; that of TensorFlow follows from the path of Hugging Face."""
    tf_name = path + ".{gamma,beta}" * path.endswith(".LayerNorm")
    tf_name = (
        tf_name.replace("layer.", "layer_").replace("{self,", "{self/query,self/key,self/value,").replace(".", "/")
    )
    return keras, path, f"bert/{tf_name}"


def _under(steps: tuple[Step, ...], path: str, layers: int) -> tuple[Step, ...]:
    """Return the steps that a path names in any naming; every layer has the steps of the one that represents all."""
    every = LayerRange(0, max(layers - 1, 0))
    wanted = with_layers(path, lambda asked: asked if asked.is_run or asked.first not in every else every)
    wanted = wanted.removeprefix("bert.")
    found = []
    for step in steps if wanted else ():
        names = (step.group, step.name, step.tf_name, step.path.removeprefix("bert."))
        if any(name == wanted or name.startswith((f"{wanted}.", f"{wanted}-", f"{wanted}/")) for name in names):
            found.append(step if wanted == path.removeprefix("bert.") else _single(step, path, layers))
    if not found:
        hint = suggestion(path, [*SECTIONS, *(name for step in steps for name in (step.path, step.name) if name)])
        if (asked := layers_in(path)) and asked.last not in every:
            hint = f"the layers are {every}"
        elif "did" not in hint:
            hint = f"try {', '.join(('embeddings', 'layer', *SECTIONS))}"
        raise SelectionError(f"no step is called {path[:100]!r}; {hint}")
    return tuple(found)


def _single(step: Step, path: str, layers: int) -> Step:
    """Return the step with the layer number in `path`."""
    asked = layers_in(path)
    if asked is None or layers < 2:
        return step
    names: dict[str, Any] = {
        field: with_layers(getattr(step, field), lambda _: asked) for field in ("name", "path", "tf_name")
    }
    return replace(step, copies=1, **names)


def _sums(steps: tuple[Step, ...], counted: CountReport, worked: FlopsReport, layers: int) -> Iterator[Sum]:
    """Yield each level by formula and as counted: unique parameters, forward FLOPs."""
    params = {row.name: row.distinct_params for row in counted.rows}
    flops = {row.path.removeprefix("bert."): row.forward.matmul_flops for row in worked.rows}
    body = {name: (params.get(name, 0), flops.get(name, 0)) for name in ("embeddings", "encoder", "pooler")}
    whole = (counted.totals.distinct_params, worked.rows[0].forward.matmul_flops)
    head = tuple(total - sum(part[place] for part in body.values()) for place, total in enumerate(whole))
    levels = [("embeddings", body["embeddings"])]
    if layers:
        levels += [("layer", (body["encoder"][0] // layers, body["encoder"][1] // layers))]
    levels += [("pooler", body["pooler"]), ("head", (head[0], head[1]))]
    total_params = total_flops = 0
    for group, (got_params, got_flops) in levels:
        own = [step for step in steps if step.group == group]
        if not own:
            continue
        terms = [step.params.value for step in own if step.params]
        sum_flops = sum(step.flops.value for step in own if step.flops)
        copies = own[0].copies
        total_params += sum(terms) * copies
        total_flops += sum_flops * copies
        yield Sum(
            group=f"{group} (each of {copies})" if copies > 1 else group,
            symbols=" + ".join(f"{term:,}" for term in terms),
            params=sum(terms),
            counted_params=got_params,
            flops=sum_flops,
            counted_flops=got_flops,
        )
    symbols = " + ".join(
        f"{layers} x {got[0]:,}" if group == "layer" and layers > 1 else f"{got[0]:,}"
        for group, got in levels
        if any(got)
    )
    yield Sum(group="total", symbols=symbols, params=total_params, counted_params=whole[0], flops=total_flops,
              counted_flops=whole[1])  # fmt: skip


def _questions(counted: CountReport, source: BertSource) -> Iterator[Note]:
    padding = source.config.pad_token_id
    values = {
        "norm": 2 * source.config.hidden_size,
        "hidden": source.config.hidden_size,
        "padding": "none" if padding is None else padding,
        "distinct": counted.totals.distinct_params,
        "layers": counted.totals.layer_params,
    }
    for key, names in _QUESTIONS.items():
        yield Note(key=key, values={name: values[name] for name in names})
