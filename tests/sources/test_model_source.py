"""One type for a model: what each kind of source gives, and what it says that it cannot do."""

from __future__ import annotations

import ast

import pytest
import torch
from torch import nn

import bertscope
from bertscope.analyses.flops import FlopsRun
from bertscope.analyses.memory.steps import estimate_report
from bertscope.analyses.tracing.trace import source_shapes
from bertscope.errors import BertscopeError
from bertscope.settings.run_config import RunConfig
from bertscope.sources.other_models import FactorySource, GivenModule
from bertscope.sources.transformers_models import TransformersSource
from tests.conftest import ROOT


class Tagger(nn.Module):
    """Three classes for each of 50 words."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(50, width), nn.Linear(width, 3)

    def forward(self, input_ids):
        return self.out(self.words(input_ids))


OTHERS = (
    GivenModule(name="given", module=Tagger()),
    FactorySource(name="own:Tagger"),
    TransformersSource(name="gpt", model_type="gpt2", path=ROOT / "config.json", where=f"{ROOT}/config.json:3"),
)


def test_a_module_from_python_is_a_model_like_any_other():
    source = GivenModule(name="tagger", module=Tagger())
    flops = FlopsRun(source=source, run=RunConfig(mode="training", freeze=("words",))).at(2, 7).rows[0]
    assert flops.forward.matmul_flops == 2 * 2 * 7 * 6 * 3
    assert source_shapes(source, 2, 7)["words"][1][0].shape == (2, 7, 6)
    memory = estimate_report(source, [RunConfig(batch=2, seq=7, precision="bf16")]).variants[0].memory
    assert memory.peak.parts.parameters == 2 * (50 * 6 + 6 * 3 + 3)
    difference = bertscope.diff(source, GivenModule(name="wider", module=Tagger(8)))
    assert [row.path for row in difference.rows] == ["out.weight", "words.weight"]


def test_a_module_from_python_stays_as_it_is():
    module = Tagger()
    GivenModule(name="tagger", module=module).build().to(torch.bfloat16).requires_grad_(False)
    assert {(tensor.device.type, tensor.dtype, tensor.requires_grad) for tensor in module.parameters()} == {
        ("cpu", torch.float32, True)
    }


def test_a_tie_of_a_module_from_python_stays_a_tie():
    module = nn.ModuleDict({"one": nn.Linear(3, 3), "two": nn.Linear(3, 3)})
    module["two"].weight = module["one"].weight
    built = GivenModule(name="tied", module=module).build()
    assert built["one"].weight is built["two"].weight


@pytest.mark.parametrize("source", OTHERS, ids=lambda source: type(source).__name__)
@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (
            lambda source: source.require("this"),
            "is for BERTs only; count, tree, .*, explain, diagram",
        ),
        (lambda source: source.require("--no-dropout"), "--no-dropout is for BERTs only; leave it out"),
        (lambda source: source.with_layers(3), "its number of layers cannot be changed"),
        (lambda source: source.with_fields({"is_decoder": True}), "is_decoder can be set for a BERT only"),
        (lambda source: source.with_options(add_pooling_layer=True), "only a BertModel comes with and without"),
        (
            lambda source: source.checkpoint(nn.Linear(2, 2), "every-2"),
            "Linear takes --checkpointing none, or selective and full",
        ),
    ],
)
def test_a_source_says_in_one_line_what_it_cannot_do(source, ask, words):
    with pytest.raises(BertscopeError, match=words) as caught:
        ask(source)
    assert "\n" not in str(caught.value)


def test_only_the_sources_know_their_kinds():
    """No `isinstance` on a source outside `sources/`."""
    for path in sorted((ROOT / "bertscope").rglob("*.py")):
        if path.parent.name != "sources":
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
                    assert "Source" not in ast.unparse(node.args[1]), f"{path.name}:{node.lineno}"
