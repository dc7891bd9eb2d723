"""Diagrams say what the live classes and a run say, and hold everything that the documents' diagrams hold."""

import re
from collections import Counter
from dataclasses import fields, replace
from itertools import pairwise

import pytest
import torch

import bertscope
from bertscope.analyses.dataflow import ForwardInputs, dataflow
from bertscope.errors import SelectionError
from bertscope.model import CLASSES, build
from bertscope.tracing.flops import shapes_of, trace
from bertscope.tracing.inputs import example_inputs, inputs_for
from tests.conftest import GOLDEN, cases, data, kinds

SELF = "encoder.layer.0.attention.self"
AS_IN_DOCUMENT = ("--kind", "forward", "--direction", "LR", "--cache", "128")  # of its dataflow

# bert-class-diagrams.md, each class with its base and its attributes. Of the four types that are not a value's
# own: a GELU is a torch.nn.Module.
DOCUMENT = data("diagrams.yaml")["attributes"]
DOCUMENT_CONFIG = data("diagrams.yaml")["config"]
# Its self-attention, arrow by arrow; the linear layers by the names that they have in the module.
DOCUMENT_ARROWS = """
hidden_states > key > torch.cat > key_layer; past_key_value[0] > torch.cat > key_layer > torch.matmul
hidden_states > value > torch.cat > value_layer; past_key_value[1] > torch.cat > value_layer
hidden_states > query > query_layer > torch.matmul > attention_scores
attention_scores > / > attention_scores > + > attention_scores; math.sqrt(self.attention_head_size) > /
attention_mask > +; attention_scores > torch.nn.functional.softmax > dropout > attention_probs
attention_probs > * > attention_probs; head_mask > *
"""


def document_attributes(name: str) -> list[tuple[str, str]]:
    return [tuple(reversed(attribute.split(" "))) for attribute in DOCUMENT[name].split(", ")]


def base(**changes):
    """bert-base-uncased with eager attention, on meta."""
    config = replace(bertscope.load("bert-base-uncased").config, attn_implementation="eager", **changes)
    return build(config, "BertModel")


@pytest.fixture(scope="module")
def attention():
    """The self-attention of the document, which has as many cached positions as new ones."""
    return bertscope.diagram(base(), "forward", SELF, forward_inputs=ForwardInputs(cache=128))


def labels(report) -> dict[str, str]:
    return {node.id: node.name for node in report.nodes}


def chains(report) -> set[tuple[str, str]]:
    names = labels(report)
    return {(names[edge.source], names[edge.target]) for edge in report.edges}


# ---- classes ----


@pytest.mark.parametrize("name", DOCUMENT)
def test_the_class_has_the_documents_attributes_and_base(name):
    report = bertscope.diagram(base(), around=name)
    boxes = {box.name: box for box in report.classes}
    lineage = [boxes[name]]
    for box in lineage:
        lineage += [boxes[parent] for parent in box.bases]
    assert lineage[-1].address == "torch.nn.Module"
    found = {item.name: item for box in reversed(lineage) for item in box.attributes}
    for attribute, kind in document_attributes(name):
        if kind == "torch.nn.Module":
            assert boxes[found[attribute].type].bases == ("Module",)
        else:
            assert found[attribute].type == kind
    order = [item.name for item in boxes[name].attributes]
    wanted = [attribute for attribute, _ in document_attributes(name) if attribute in order]
    assert [attribute for attribute in order if attribute in wanted] == wanted


def test_arrows_to_the_base_of_every_module_are_drawn_on_request_only():
    plain, full = (bertscope.diagram(base(), nn_module=is_drawn) for is_drawn in (False, True))
    assert plain.classes == full.classes
    for part in (torch.nn.Sequential(torch.nn.Module(), torch.nn.Linear(2, 3)), torch.nn.Module()):  # drawn as a part
        assert 'class Module["' in bertscope.diagram(part, "class").to_mermaid()
    arrows = [set(re.findall(r"(\w+) <\|-- (\w+)", report.to_mermaid())) for report in (plain, full)]
    assert arrows[0] == {("BertPreTrainedModel", "BertModel")}
    modules = {box.name for box in full.classes if box.bases == ("Module",)}
    assert arrows[1] - arrows[0] == {("Module", name) for name in modules}
    assert 'class Module["torch.nn.Module"]' in full.to_mermaid()
    assert "Module[" not in plain.to_mermaid()


def test_the_config_has_the_documents_fields_and_defaults():
    (config,) = [box for box in bertscope.diagram(base()).classes if box.name == "BertConfig"]
    found = {item.name: item.default for item in config.attributes}
    assert {name: found[name] for name in DOCUMENT_CONFIG} == {
        name: repr(value) for name, value in DOCUMENT_CONFIG.items()
    }
    assert set(found) == {item.name for item in fields(bertscope.BertConfig)}


def test_the_configuration_is_drawn_on_request_only_and_no_name_begins_with_a_dot():
    plain, full = (bertscope.diagram(base(), config=is_drawn) for is_drawn in (False, True))
    assert (plain.classes, plain.links) == (full.classes, full.links)
    assert "+BertConfig config" in plain.to_mermaid()
    assert "class BertConfig" not in plain.to_mermaid()
    assert "vocab_size = 30522" in full.to_mermaid()
    assert "BertEncoder --> BertConfig : config" in full.to_mermaid()
    assert '[".' not in full.to_mermaid()
    for name in ("crossattention", "distance_embedding"):  # of other settings
        assert name not in plain.to_mermaid()
        assert name in full.to_mermaid()
    assert "class BertConfig" in bertscope.diagram(base(), around="BertConfig").to_mermaid()


def public_parents(cls):
    """The names of the nearest base classes that are public."""
    return [name for base in cls.__bases__
            for name in (public_parents(base) if base.__name__.startswith("_") else [base.__name__])]  # fmt: skip


@pytest.mark.parametrize("name", CLASSES)
def test_every_attribute_in_the_diagram_is_on_an_instance_and_every_one_of_an_instance_is_in_it(tiny, name):
    model = build(tiny, name)
    report = bertscope.diagram(model)
    boxes = {box.name: box for box in report.classes}
    for module in model.modules():
        cls = type(module)
        if not cls.__module__.startswith("bertscope.model"):
            continue
        shown = {item.name for base in cls.__mro__ if base.__name__ in boxes for item in boxes[base.__name__].attributes
                 if not item.when}  # fmt: skip
        held = {item for item in vars(module) if not item.startswith("_")} - set(vars(torch.nn.Module()))
        assert shown == held | set(module._modules) | set(module._parameters) | set(module._buffers), cls
        assert boxes[cls.__name__].bases == tuple(public_parents(cls))


def test_what_other_settings_bring_says_which_and_is_plain_where_the_model_has_it():
    def conditions(model):
        return {
            item.name: item.when for box in bertscope.diagram(model).classes for item in box.attributes if item.when
        }

    assert conditions(base()) == {
        "crossattention": "add_cross_attention = true",
        "distance_embedding": "position_embedding_type = relative_key",
        "max_position_embeddings": "position_embedding_type = relative_key",
    }
    decoder = base(is_decoder=True, add_cross_attention=True, position_embedding_type="relative_key_query")
    assert conditions(decoder) == {}


# ---- dataflow ----


def test_every_arrow_of_the_documents_attention_is_one_of_ours(attention):
    drawn = chains(attention)
    for chain in re.split(r"[;\n]", DOCUMENT_ARROWS.strip()):
        names = [name.strip() for name in chain.split(">")]
        for pair in pairwise(names):
            assert pair in drawn, pair
    types = {node.name: node.detail for node in attention.nodes if node.role == "module"}
    assert types == {**dict.fromkeys(("query", "key", "value"), "torch.nn.Linear"), "dropout": "torch.nn.Dropout"}


def test_the_self_attention_of_an_encoder_has_no_cache_and_that_of_a_decoder_has_one():
    encoder, decoder = (bertscope.diagram(base(is_decoder=is_decoder), "forward", SELF) for is_decoder in (False, True))
    assert (encoder.cache, decoder.cache) == (0, 128)
    cached = {"past_key_value[0]", "past_key_value[1]", "torch.cat"}
    assert cached.isdisjoint(labels(encoder).values())
    assert cached <= set(labels(decoder).values())
    assert {node.shape.shape for node in encoder.nodes if node.name == "key_layer"} == {(1, 12, 128, 64)}


WITNESSES = {"+": ("add",), "-": ("sub", "rsub"), "*": ("mul",), "/": ("div",), "torch.cat": ("cat",),
             "torch.arange": ("arange",), "torch.nn.functional.softmax": ("_softmax",), "torch.matmul": ("bmm",),
             "torch.einsum": ("bmm",)}  # fmt: skip


@kinds("positions, cache, head_mask", ["absolute", "relative_key", "relative_key_query"], [0, 16], [True, False])
def test_the_functions_drawn_are_the_operators_that_torch_dispatches(positions, cache, head_mask):
    model = base(position_embedding_type=positions, num_hidden_layers=1).eval()
    report = bertscope.diagram(
        model, "forward", SELF, forward_inputs=ForwardInputs(seq=8, cache=cache, head_mask=head_mask)
    )
    drawn = Counter()
    for node in report.nodes:
        if node.role == "function":
            drawn[WITNESSES[node.name.split(" ")[0]][0]] += 1
    inputs = example_inputs(model, 1, 8) | {"attention_mask": torch.ones(1, 8 + cache, device="meta")}
    past = torch.empty(1, 12, cache, 64, device="meta")
    given = {"past_key_values": ((past, past),)} if cache else {}
    given |= {"head_mask": torch.ones(12, device="meta")} if head_mask else {}
    with torch.no_grad():
        recorded, _ = trace(model, lambda: model(**inputs, **given))
        calls = recorded.calls
    known = {name for names in WITNESSES.values() for name in names}
    dispatched = Counter()
    for (path, _, operator), call in calls.items():
        name = operator.removeprefix("aten.")
        if path == SELF and name in known:
            dispatched[name] += call.calls
    assert drawn == dispatched
    modules = Counter(node.detail for node in report.nodes if node.role == "module")
    assert modules["torch.nn.Linear"] == 3
    assert modules["torch.nn.Embedding"] == (positions != "absolute")


def test_the_keys_of_a_cross_attention_come_from_the_encoder_or_from_the_cache():
    decoder = base(is_decoder=True, add_cross_attention=True)
    path = "encoder.layer.3.crossattention.self"
    drawn = chains(bertscope.diagram(decoder, "forward", path))
    assert {("hidden_states", "query"), ("encoder_hidden_states", "key"), ("encoder_hidden_states", "value")} <= drawn
    assert ("key", "key_layer") in drawn
    assert ("encoder_attention_mask", "+") in drawn
    assert "attention_mask" not in {name for pair in drawn for name in pair}
    cached = chains(bertscope.diagram(decoder, "forward", path, forward_inputs=ForwardInputs(cache=7)))
    assert {("past_key_value[0]", "key_layer"), ("past_key_value[1]", "value_layer")} <= cached
    assert "key" not in {name for pair in cached for name in pair}


def test_the_fused_kernel_is_one_box_with_its_operands_named(tiny):
    report = bertscope.diagram(
        build(replace(tiny, attn_implementation="sdpa")), "forward", SELF, forward_inputs=ForwardInputs(seq=4)
    )
    fused = "torch.nn.functional.scaled_dot_product_attention"
    assert {("query_layer", fused), ("key_layer", fused), ("value_layer", fused), (fused, "context_layer")} <= chains(
        report
    )
    assert ("attention_mask", fused) in chains(report)


@kinds("name, depth", CLASSES, [None, 9])
def test_the_shapes_on_the_arrows_are_those_that_come_out_of_the_modules(tiny, name, depth):
    model = build(replace(tiny, num_hidden_layers=1), name).eval()
    report = bertscope.diagram(model, "forward", depth=depth, forward_inputs=ForwardInputs(batch=3, seq=5, mask=False))
    found = shapes_of(model, inputs_for(model, 3, 5))
    boxes = {node.id: node for node in report.nodes if node.role == "module"}
    assert boxes
    assert {end for edge in report.edges for end in (edge.source, edge.target)} == {node.id for node in report.nodes}
    for edge in report.edges:
        if edge.source in boxes and not edge.views:
            assert edge.shape in found[boxes[edge.source].path][1]
        if edge.target in boxes:
            assert edge.shape in found[boxes[edge.target].path][0]


def test_equal_layers_are_drawn_once_and_a_pruned_one_apart():
    whole = bertscope.diagram(base(), "forward")
    assert [(node.name, node.copies) for node in whole.nodes if node.detail == "BertLayer"] == [("layer.0-11", 12)]
    assert [group.name for group in whole.groups] == ["encoder"]
    pruned = bertscope.diagram(base(pruned_heads={3: (0, 1)}), "forward")
    assert [(node.name, node.copies) for node in pruned.nodes if node.detail == "BertLayer"] == [
        ("layer.0-2", 3), ("layer.3", 1), ("layer.4-11", 8),
    ]  # fmt: skip
    assert {("layer.0-2", "layer.3"), ("layer.3", "layer.4-11")} <= chains(pruned)
    attention = bertscope.diagram(base(pruned_heads={3: (0, 1)}), "forward", "encoder.layer.3.attention.self",
                                  forward_inputs=ForwardInputs(head_mask=False))  # fmt: skip
    assert {node.shape.shape for node in attention.nodes if node.name == "query_layer"} == {(1, 10, 128, 64)}


def test_caches_and_head_masks_of_equal_layers_have_one_name():
    report = bertscope.diagram(base(is_decoder=True), "forward", forward_inputs=ForwardInputs(cache=4, head_mask=True))
    names = set(labels(report).values())
    assert {"past_key_values[0-11][0]", "past_key_values[0-11][1]", "head_mask", "last_hidden_state"} <= names
    (edge,) = [edge for edge in report.edges if edge.source == "head_mask"]
    assert edge.views[-1] == "[0-11]"


@pytest.mark.parametrize("name", CLASSES)
def test_every_architecture_flows_from_its_ids_to_its_outputs(tiny, name):
    report = bertscope.diagram(build(tiny, name), "forward", forward_inputs=ForwardInputs(seq=5))
    reached, pending = set(), ["input_ids"]
    while pending:
        here = pending.pop()
        reached.add(here)
        pending += [edge.target for edge in report.edges if edge.source == here and edge.target not in reached]
    outputs = {node.id for node in report.nodes if node.role == "output"}
    assert outputs
    assert outputs <= reached


def test_a_diagram_leaves_the_model_as_it_was(tiny):
    model = bertscope.BertModel(tiny).train()  # real weights
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = bertscope.diagram(model, "forward", SELF, forward_inputs=ForwardInputs(seq=4))
    assert report.nodes
    assert model.training
    assert len(model.encoder.layer) == 2
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_model_without_layers_has_a_diagram(tiny):
    report = bertscope.diagram(
        build(replace(tiny, num_hidden_layers=0)), "forward", forward_inputs=ForwardInputs(seq=4)
    )
    assert ("embeddings", "last_hidden_state") in chains(report)


# ---- tree ----


def test_the_tree_has_the_rows_and_sums_of_the_tree_command():
    model = base()
    report, rows = bertscope.diagram(model, "tree"), bertscope.tree(model).rows
    assert [(node.path, node.params) for node in report.nodes] == [(row.path, row.params) for row in rows]
    assert len(report.edges) == len(rows) - 1
    under = bertscope.diagram(model, "tree", "encoder.layer.7.attention", depth=1)
    assert [node.name for node in under.nodes] == ["attention", "self", "output"]


# ---- forms and errors ----


@pytest.mark.parametrize(
    ("arguments", "golden"),
    [
        (("bert-base-uncased",), "diagram-class.mmd"),
        (("bert-base-uncased", SELF, *AS_IN_DOCUMENT), "diagram-forward-attention.mmd"),
        (("bert-base-uncased", SELF, *AS_IN_DOCUMENT, "--position-embedding", "relative_key_query"),
         "diagram-forward-relative.mmd"),
        (("bert-base-uncased", "encoder.layer.0", "--kind", "forward"), "diagram-forward-layer.mmd"),
    ],
)  # fmt: skip
def test_the_text_is_the_golden_one(cli, arguments, golden):
    text = cli("diagram", *arguments).out.replace(f"bertscope {bertscope.__version__}", "bertscope VERSION")
    assert text == (GOLDEN / golden).read_text()


def test_the_library_refuses_another_kind_and_implementation(tiny):
    for wrong in ({"kind": "flow"}, {"implementation": "flax"}):
        with pytest.raises(SelectionError, match="must be one of"):
            bertscope.diagram(build(tiny), **wrong)


class Block(torch.nn.Module):
    """A layer with a tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = torch.nn.Linear(4, 4)
        self.scale = torch.nn.Parameter(torch.ones(4))


class Net(torch.nn.Module):
    """Blocks in containers and one under its own name."""

    def __init__(self) -> None:
        super().__init__()
        self.width = 4
        self.blocks = torch.nn.Sequential(Block(), Block(), torch.nn.ReLU(), Block())
        self.by_name = torch.nn.ModuleDict({"a": Block()})
        self.last = Block()


def test_the_classes_of_any_module_are_those_of_its_package():
    report = bertscope.diagram(Net(), "class")
    assert report.package == "tests"
    boxes = {box.name: [(item.type, item.name) for item in box.attributes] for box in report.classes}
    assert boxes == {
        "Module": [],
        "Net": [("int", "width"), ("torch.nn.Sequential", "blocks"), ("torch.nn.ModuleDict", "by_name"),
                ("Block", "last")],
        "Block": [("torch.nn.Linear", "dense"), ("torch.nn.Parameter", "scale")],
    }  # fmt: skip
    torchs = bertscope.diagram(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU()), "class")
    assert [box.name for box in torchs.classes] == ["Module", "Sequential", "Linear", "ReLU"]
    parts = {(link.owner, link.attribute, link.count) for link in report.links if link.part == "Block"}
    assert parts == {("Net", "blocks", 3), ("Net", "by_name", 1), ("Net", "last", 1)}
    assert {box.name for box in bertscope.diagram(Net(), around="Block").classes} == {"Module", "Block"}


def test_the_tree_is_drawn_of_a_model_that_is_no_bert_by_default(cli):
    assert bertscope.diagram(Net()).diagram == "tree"
    name = f"{__name__}:Net"
    assert cli("diagram", name, "-f", "json").json["diagram"] == "tree"
    assert cli("diagram", name, "--class", "Block", "-f", "json").json["around"] == "Block"
    for words in (("--implementation", "transformers"), ("--class", "Block", "--attention", "sdpa")):
        refused = cli("diagram", name, *words, "-f", "json")
        assert (refused.code, refused.out) == (2, "")
        assert words[-2] in refused.err
    with pytest.raises(SelectionError, match="Net has no forward"):
        bertscope.diagram(Net(), "forward")


class Step(torch.nn.Module):
    """A residual step of an own model."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = torch.nn.Linear(8, 8)

    def forward(self, x):
        return x + self.dense(x)


class Simulator(torch.nn.Module):
    """Layers one after the other, and heads that read the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = torch.nn.ModuleList(Step() for _ in range(5))
        self.heads = torch.nn.ModuleList(torch.nn.Linear(8, 4) for _ in range(3))
        self.last = torch.nn.Linear(12, 2)

    def forward(self, x):
        for step in self.steps:
            x = step(x)
        return self.last(torch.cat([head(x) for head in self.heads], -1))

    def example_inputs(self, batch, seq):
        return torch.empty(batch, 8, device="meta")


def _boxes(report) -> list[tuple[str, int]]:
    return [(node.path, node.copies) for node in report.nodes if node.role == "module"]


def test_an_own_model_has_a_dataflow_with_equal_layers_once_where_that_keeps_the_shapes():
    report = bertscope.diagram(Simulator(), "forward", forward_inputs=ForwardInputs(batch=2))
    assert _boxes(report) == [("steps.0-4", 5), ("heads.0", 1), ("heads.1", 1), ("heads.2", 1), ("last", 1)]
    shapes = {(edge.source, edge.target): edge.shape for edge in report.edges}
    assert shapes["cat", "last"].shape == (2, 12)
    inner = bertscope.diagram(Simulator(), "forward", "steps.3", forward_inputs=ForwardInputs(batch=2))
    assert inner.path == "steps.0-4"
    assert [(node.role, node.name) for node in inner.nodes] == [
        ("input", "x"), ("module", "dense"), ("function", "+"), ("output", "output"),
    ]  # fmt: skip


@pytest.mark.parametrize(("kind", "sizes", "layers"), cases("diagrams.yaml", "families"))
def test_a_model_of_another_family_has_a_dataflow_with_its_layers_once(kind, sizes, layers):
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(kind, **sizes))
    report = bertscope.diagram(model, "forward", forward_inputs=ForwardInputs(seq=16))
    found = [path for path, _ in _boxes(report) if path.rpartition(".")[2][0].isdigit()]
    assert found == layers or (kind == "vit" and found == ["layers.0-2"])  # of transformers 5
    inputs, outputs = ({node.id for node in report.nodes if node.role == role} for role in ("input", "output"))
    assert inputs & {edge.source for edge in report.edges}
    assert outputs <= {edge.target for edge in report.edges}


class Identities(torch.nn.Module):
    """Uses what goes into a dropout after it has come out of it, unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = torch.nn.Linear(3, 3), torch.nn.Dropout()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        before = self.linear(hidden)
        after = self.dropout(before)
        return (1 - after[:, None].squeeze(1)) * before


def test_a_module_that_returns_its_input_does_not_take_it_over():
    module = Identities().eval()
    flow = dataflow(module, lambda: module(torch.ones(2, 3)), path="", opens=lambda module, level: False)
    drawn = {(edge.source, edge.target, edge.views) for edge in flow.edges}
    assert drawn == {
        ("hidden", "linear", ()), ("linear", "dropout", ()), ("dropout", "rsub", ("[:, None]", "squeeze")),
        ("rsub", "mul", ()), ("linear", "mul", ()), ("mul", "output", ()),
    }  # fmt: skip
    assert flow.nodes["rsub"].name == "1"
    assert flow.nodes["rsub"].detail == "-"
