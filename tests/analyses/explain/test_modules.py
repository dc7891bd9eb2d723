"""Simulator of models that are no BERT: formulas that agree with the built module and with torch's own counter."""

import json

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import bertscope
from bertscope.errors import SelectionError
from bertscope.sources.find import find
from bertscope.sources.model_source import GivenModule
from tests.conftest import data

WIDTH = 8


class Block(nn.Module):
    """Attention and a feed-forward, scaled by a tensor of the block itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH, bias=False))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        return self.feed_forward(x) * self.scale


class Net(nn.Module):
    """Convolutions, equal blocks, a block that runs twice, a product and a tied output."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, WIDTH)
        self.down = nn.Conv1d(WIDTH, 6, 3, padding=1, groups=2)
        self.up = nn.ConvTranspose1d(6, WIDTH, 2, bias=False)
        self.blocks = nn.Sequential(Block(), Block(), Block())
        self.again = nn.Linear(WIDTH, WIDTH)
        self.mix = nn.Parameter(torch.ones(WIDTH, WIDTH))
        self.unused = nn.BatchNorm2d(5)
        self.out = nn.Linear(WIDTH, 20)
        self.out.weight = self.words.weight

    def forward(self, input_ids):
        x = self.up(self.down(self.words(input_ids).transpose(1, 2))).transpose(1, 2)
        return self.out(self.again(self.again(self.blocks(x))) @ self.mix)


def explained(module: nn.Module, path: str | None = None, **options):
    return bertscope.explain(GivenModule(name="own", module=module), path, **options)


def counted_by_torch(module: nn.Module, *inputs: torch.Tensor) -> int:
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # it does not know all kernels
        module(*inputs)
    return counter.get_total_flops()


def test_the_sums_are_those_of_the_module_and_of_torchs_counter():
    module = Net()
    *groups, total = explained(module, batch=2, seq=5).sums
    assert all(item.agrees for item in (*groups, total))
    assert total.params == sum(param.numel() for param in module.parameters())
    assert total.flops == counted_by_torch(module, torch.zeros(2, 5, dtype=torch.long))
    assert [item.group for item in groups] == ["words", "down", "up", "blocks", "again", "unused", "out", "(own)"]
    assert total.params == sum(item.params for item in groups)


def test_each_step_has_the_formulas_of_its_class():
    report = explained(Net(), batch=2, seq=5)
    steps, text = {step.name: step for step in report.steps}, " ".join(str(report).split())
    assert list(steps) == [
        "(own)", "unused", "words", "down", "up", "blocks.0-2", "blocks.0-2.attention",
        "blocks.0-2.attention.out_proj", "blocks.0-2.norm", "blocks.0-2.feed_forward.0",
        "blocks.0-2.feed_forward.2", "again", "out",
    ]  # fmt: skip
    shown = {
        name: [[made.symbols, made.numbers] for made in (step.params, step.flops) if made]
        for name, step in steps.items()
    }
    assert shown == data("formulas.yaml")
    assert steps["blocks.0-2.norm"].copies == 3
    assert steps["down"].inputs == (("2", "8", "5"),)
    assert steps["down"].output == ("2", "6", "5")
    assert "weight is words.weight, counted there" in text
    assert "does not call" in text


def test_a_path_shows_one_layer_and_a_range_all_equal_ones():
    one, all_of_them = (explained(Net(), f"blocks.{name}.norm").steps for name in ("1", "0-2"))
    assert [(step.name, step.copies) for step in one] == [("blocks.1.norm", 1)]
    assert [(step.name, step.copies) for step in all_of_them] == [("blocks.0-2.norm", 1)]
    for path in ("blocks.3", "block", ""):
        with pytest.raises(SelectionError, match="no module is called"):
            explained(Net(), path)


class Shared(nn.Module):
    """A block that runs three times and a layer without sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.lazy = Block(), nn.LazyLinear(4)

    def forward(self, input_ids):
        x = input_ids[..., None].expand(-1, -1, WIDTH).float()
        return self.block(self.block(self.block(x)))


def test_a_module_that_runs_several_times_has_its_number_of_calls(cli):
    data = cli("explain", f"{__name__}:Shared", "--seq", 5, "-f", "json").json
    steps = {step["name"]: step for step in data["steps"]}
    keys = "positions x (4 x 2 x embed_dim x embed_dim + 2 x 2 x keys x embed_dim)"
    assert steps["block.attention"]["flops"]["symbols"] == f"calls x {keys}"
    assert steps["block.attention"]["flops"]["numbers"] == "3 x 5 x (4 x 2 x 8 x 8 + 2 x 2 x 5 x 8)"
    assert steps["lazy"]["params"] is None
    assert {"key": "unknown", "values": {}} in steps["lazy"]["sentences"]
    assert all(item["flops"] == item["counted_flops"] for item in data["sums"])


class Routed(nn.Module):
    """Two experts, each of which gets the rows that a router sends to it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, 3) for _ in range(2))

    def forward(self, x):
        which = self.router(x).argmax(-1)
        return torch.cat([expert(x[which == number]) for number, expert in enumerate(self.experts)])


@pytest.mark.filterwarnings("ignore:.*its forward reads values")
def test_a_forward_that_reads_values_is_explained_by_a_run_on_the_cpu():
    report = explained(Routed(), batch=5, inputs=["x=Bx8:float32"])
    assert report.sums[-1].counted_flops == 2 * 5 * WIDTH * 2 + 2 * 5 * WIDTH * 3  # each row has one expert
    assert all(item.agrees for item in report.sums)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning", "ignore:.*its forward reads values")
def test_the_products_of_torchscript_are_those_of_its_root():
    report = explained(torch.jit.script(nn.Sequential(nn.Linear(WIDTH, 3))), batch=5, inputs=["input=Bx8:float32"])
    assert report.sums[-1].counted_flops == 2 * 5 * WIDTH * 3
    assert all(item.agrees for item in report.sums)


FAMILIES = {
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 50, "architectures": ["GPT2LMHeadModel"]},
    "vit": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
            "image_size": 16, "patch_size": 8},
    "t5": {"d_model": 16, "d_kv": 6, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": 50,
           "is_encoder_decoder": True},
    "swin": {"embed_dim": 12, "depths": [2], "num_heads": [2], "image_size": 16, "patch_size": 2, "window_size": 4},
    "albert": {"hidden_size": 16, "embedding_size": 8, "num_attention_heads": 2, "intermediate_size": 24,
               "num_hidden_layers": 3, "vocab_size": 50},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*its constructor reads values")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_sums_of_other_families_are_those_of_transformers(family, tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **FAMILIES[family]}))
    source = find(tmp_path)
    report = bertscope.explain(source, **({} if family in ("vit", "swin") else {"seq": 6}))
    assert all(item.agrees for item in report.sums)
    assert report.sums[-1].params == sum(param.numel() for param in source.build().parameters())
    by_type = {step.type: step for step in report.steps}
    if family == "gpt2":
        assert by_type["Conv1D"].params.symbols == "nx x nf + nf"
        assert by_type["Linear"].params is None  # tied
    products = [step.flops.symbols for step in report.steps if "Attention" in step.type]
    start = {"albert": "calls x "}.get(family, "")
    assert set(products) == {f"{start}2 x 2 x positions x keys x width"}


class Odd(nn.Module):
    """A forward whose input has no usual name, and more tensors than a formula names."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(torch.ones(2, 3) for _ in range(9))
        self.two = nn.ParameterList(torch.ones(4) for _ in range(2))
        self.dense = nn.Linear(5, 6)

    def forward(self, speed):
        return self.dense(speed)


def test_without_inputs_the_note_has_the_reason_and_input_is_the_remedy(cli):
    report = explained(Odd())
    assert (report.batch, report.seq) == (None, None)
    assert "speed cannot be derived; add input speed=SHAPE:DTYPE" in report.notes[0].values["reason"]
    assert [(step.params.symbols, step.params.numbers, step.params.value) for step in report.steps] == [
        ("9 tensors", "9 x 2 x 3", 54), ("_0 + _1", "4 + 4", 8),
        ("in_features x out_features + out_features", "5 x 6 + 6", 36),
    ]  # fmt: skip
    assert report.sums[-1].params == report.sums[-1].counted_params == 98
    assert not any(step.flops or step.output for step in report.steps)
    given = explained(Odd(), inputs=["speed=Bx5:float32"], batch=3)
    assert given.steps[-1].flops.value == given.sums[-1].counted_flops == 2 * 3 * 5 * 6
    with pytest.raises(SelectionError, match="no sped"):
        explained(Odd(), inputs=["sped=Bx5:float32"])
    with pytest.raises(SelectionError, match="leave input out"):
        bertscope.explain(bertscope.load("bert-tiny"), inputs=["speed=Bx5:float32"])
    shown = cli("explain", f"{__name__}:Odd")
    assert shown.code == 0
    assert "without shapes and FLOPs" in shown.out
    assert "FLOPs (counted" not in shown.out
