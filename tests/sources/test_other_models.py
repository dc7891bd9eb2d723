"""Modules from elsewhere that need no other package: a factory of the user's own, and MODEL that is none."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import bertscope
from bertscope.errors import BertscopeError, BertscopeWarning, SelectionError
from bertscope.settings.rows import CodeName
from bertscope.sources.find import find
from bertscope.sources.model_source import FactorySource
from tests.child_server import loaded
from tests.conftest import ROOT, cases

CODE = """
import sys
import torch
from torch import nn

print("chatter")

class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(50, 6), nn.Linear(6, 3)
    def forward(self, input_ids):
        return self.out(self.words(input_ids))

class Nest:
    build = Tagger

class Own(nn.Linear):
    def __init__(self):
        super().__init__(4, 5)
    def example_inputs(self, batch, seq):
        return torch.ones(batch, seq, 4)

class NotOnMeta(Tagger):
    def forward(self, input_ids):
        with torch.autocast(input_ids.device.type, enabled=False):  # as ModernBERT's rotary embedding does
            return super().forward(input_ids)

class Broken(Tagger):
    def forward(self, input_ids):
        return self.out(self.words(input_ids)[..., 1:])

class Routed(Tagger):
    def forward(self, input_ids):
        print("chatter")
        hidden = self.words(input_ids)
        kept = hidden[hidden.detach().numpy().std(-1) >= 0]
        return self.out(kept) if kept.isfinite().all() else None

class Bounded(Routed):
    def __init__(self):
        super().__init__()
        self.register_buffer("large", torch.zeros(2**31))

class Pair(nn.Linear):
    def __init__(self):
        super().__init__(4, 5)
    def forward(self, left, /, *others):
        return sum(super(Pair, self).forward(x) for x in (left, *others))

class NoForward(nn.Module):
    pass

class Wide(nn.Linear):
    def __init__(self, width):
        super().__init__(width, width)

class Constant(nn.Module):
    def forward(self, x):
        return x * 2

def scripted():
    return torch.jit.script(Tagger())

def traced():
    return torch.jit.trace(Tagger(), torch.zeros(1, 2, dtype=torch.long))

def parallel():
    return nn.DataParallel(Tagger())

def quantized():
    return torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), {nn.Linear})

def several():
    return nn.Linear(2, 2), "a tokenizer"

class Pixels(nn.Conv2d):
    def __init__(self):
        super().__init__(3, 4, 2, stride=2)
    def forward(self, image, scale=None):
        return super().forward(image)

class Rates(nn.Module):
    def __init__(self):
        super().__init__()
        rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Dropout(rate)) for rate in rates)
        self.layers[2][0].weight = self.layers[0][0].weight
        self.register_buffer("scale", torch.full((4,), 2.0))

class OwnWeight(nn.Linear):
    def __init__(self):
        super().__init__(3, 3)
        self.norm = self.weight.sum().item()

class Orthogonal(nn.Linear):
    def __init__(self):
        super().__init__(6, 6)
        nn.init.orthogonal_(self.weight)

def weight_norm():
    return nn.utils.weight_norm(nn.Conv1d(4, 4, 3))

class Huge(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2**18, 2**18))
        self.norm = self.weight.sum().item()

ready = nn.Linear(2, 3)
number = 5

def plain():
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))

def fails():
    raise ValueError("no\\nway")

def leaves():
    sys.exit(3)

def text():
    return "a model"
"""


@pytest.fixture
def code(tmp_path, monkeypatch):
    """A module of the user's own in the working directory."""
    name = f"models_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield name
    sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("attribute", "params"), [("Tagger", 321), ("Nest.build", 321), ("Own", 25), ("ready", 9), ("plain", 212)]
)
def test_a_factory_is_counted_and_its_running_is_said(cli, code, attribute, params):
    result = cli("count", f"{code}:{attribute}", "--format", "json")
    assert result.code == 0, result.err
    assert result.json["totals"]["distinct_params"] == params
    assert result.err == f"note: runs your code: imports {code} and takes {code}:{attribute} from it\nchatter\n"


def test_a_factory_runs_on_example_inputs(cli, code):
    flops = cli("flops", f"{code}:Tagger", "--batch", 2, "--seq", 7, "--format", "json").json
    assert flops["rows"][0]["forward"]["matmul_flops"] == 2 * 2 * 7 * 6 * 3
    own = cli("flops", f"{code}:Own", "--batch", 2, "--seq", 7, "--mode", "training", "--format", "json").json
    assert own["rows"][0]["forward"]["matmul_flops"] == 2 * 2 * 7 * 4 * 5
    shapes = cli("tree", f"{code}:Tagger", "--shapes", "--seq", 7, "--format", "json").json
    assert shapes["rows"][0]["outputs"][0]["shape"] == [1, 7, 3]


def test_what_cannot_run_on_meta_runs_on_fake_tensors(cli, code):
    flops = cli("flops", f"{code}:NotOnMeta", "--seq", 7, "--mode", "training", "--format", "json").json
    assert flops["rows"][0]["forward"]["matmul_flops"] == 2 * 7 * 6 * 3
    shapes = cli("tree", f"{code}:NotOnMeta", "--shapes", "--seq", 7, "--format", "json").json
    assert shapes["rows"][0]["outputs"][0]["shape"] == [1, 7, 3]


@pytest.mark.parametrize(
    ("attribute", "params", "how"),
    [
        ("Rates", 5 * 5 * 2 + 5 * 3, "its parameters on meta and its other tensors on the CPU"),
        ("OwnWeight", 12, "all its tensors on the CPU, at most 4.00 GiB"),
    ],
)
def test_a_constructor_that_reads_values_is_built_with_values_and_says_so(code, attribute, params, how):
    source = find(CodeName(f"{code}:{attribute}"))
    with pytest.warns(BertscopeWarning, match=how):
        built = source.build()
    assert sum(param.numel() for param in built.parameters()) == params
    assert {tensor.device.type for tensor in (*built.parameters(), *built.buffers())} == {"meta"}


@pytest.mark.filterwarnings("ignore::bertscope.errors.BertscopeWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    "attribute", ["Rates", "OwnWeight", "Orthogonal", "weight_norm", "scripted", "traced", "quantized"]
)
def test_count_gives_what_torch_counts_however_the_module_is_built(cli, code, attribute):
    counted = cli("count", f"{code}:{attribute}", "--format", "json")
    assert counted.code == 0, counted.err
    real = getattr(sys.modules[code], attribute)()
    assert counted.json["totals"]["distinct_params"] == sum(param.numel() for param in real.parameters())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("attribute", ["Routed", "scripted", "traced", "parallel"])
def test_the_flops_are_those_of_torch_also_where_a_forward_reads_values_or_is_compiled(cli, code, attribute):
    command = ("flops", f"{code}:{attribute}", "--batch", 2, "--seq", 7, "--mode", "training", "--format", "json")
    if attribute == "Routed":
        with pytest.warns(BertscopeWarning, match="its forward reads values, so it ran on the CPU with random inputs"):
            counted = cli(*command)
    else:
        counted = cli(*command)
    real = getattr(sys.modules[code], attribute)()
    with FlopCounterMode(display=False) as torch_counts:
        real(torch.zeros(2, 7, dtype=torch.long)).sum().backward()
    assert counted.json["rows"][0]["total"]["matmul_flops"] == torch_counts.get_total_flops() > 0


def test_inputs_by_position_are_given_in_the_order_of_the_signature(cli, code):
    given = ("--input", "more=Bx4:float32", "--input", "left=Bx4:float32", "--batch", 3)
    flops = cli("flops", f"{code}:Pair", *given, "--format", "json").json
    assert flops["rows"][0]["forward"]["matmul_flops"] == 2 * (2 * 3 * 4 * 5)


def test_a_file_is_imported_by_its_path_also_inside_a_package_and_beside_one_of_the_same_name(cli, tmp_path):
    code = "from torch import nn\nfrom {origin} import size\nclass Net(nn.Linear):\n    def __init__(self):\n"
    code += "        super().__init__(size, 1)\n"
    for place, origin, size in (("a", "sizes", 3), ("b", "sizes", 5), ("c/inside", "..sizes", 7)):
        folder = tmp_path / place
        folder.mkdir(parents=True)
        (folder / "net.py").write_text(code.format(origin=origin))
        sizes = folder.parent if origin.startswith("..") else folder
        (sizes / "sizes.py").write_text(f"size = {size}\n")
    for place in ("c", "c/inside"):
        (tmp_path / place / "__init__.py").touch()
    names = [f"{tmp_path}/{place}/net.py:Net" for place in ("a", "b", "c/inside")]
    rows = cli("count", *names, "--format", "json").json["reports"]
    assert [row["totals"]["distinct_params"] for row in rows] == [4, 6, 8]


def test_inputs_are_given_by_name_shape_and_dtype(cli, code):
    image = ("--input", "image=Bx3x8x6:float32", "--batch", 2)
    flops = cli("flops", f"{code}:Pixels", *image, "--format", "json").json
    assert flops["rows"][0]["forward"]["matmul_flops"] == 2 * 2 * (4 * 3) * 4 * (3 * 2 * 2)
    for command in ("count", "tree"):
        shown = cli(command, f"{code}:Pixels", "--shapes", *image, "--format", "json").json
        assert shown["rows"][0]["outputs"][0]["shape"] == [2, 4, 4, 3]
    run = cli("estimate", f"{code}:Pixels", *image, "--mode", "inference", "--format", "json").json
    assert run["run"]["input"] == ["image=Bx3x8x6:float32"]
    parts = run["variants"][0]["estimated"]["phases"][0]["parts"]
    assert parts["inputs"] == 2 * 3 * 8 * 6 * 4, parts


def test_what_fails_on_fake_tensors_too_is_one_line(code):
    """In a process of its own, since torch's log goes past what a test captures."""
    run = [*loaded("bertscope"), "estimate", f"{code}:Broken"]
    result = subprocess.run(run, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    *before, told = result.stderr.splitlines()
    expected = ("note: ", "chatter", "estimating")
    assert (result.returncode, [line for line in before if not line.startswith(expected)]) == (2, [])
    assert told.startswith(f"error: {code}:Broken cannot be run on")


@pytest.mark.parametrize(("command", "words"), cases("own_code.yaml", "refused"))
def test_what_cannot_be_run_or_imported_is_one_line_with_a_remedy(cli, code, tmp_path, command, words):
    (tmp_path / "types.py").touch()
    result = cli(*(part.format(code=code) for part in command))
    assert result.code == 2
    assert words.format(code=code) in result.err.splitlines()[-1]


def test_a_file_of_that_name_is_no_factory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a:b").write_text("x")
    with pytest.raises(BertscopeError, match="a:b"):
        find("a:b")
    assert isinstance(find(CodeName("a:c")), FactorySource)
    with pytest.raises(BertscopeError, match="no file imports"):
        find("a:c")


def test_without_transformers_another_family_names_the_extra(cli, tmp_path, monkeypatch):
    monkeypatch.setattr("bertscope.sources.transformers_models.find_spec", lambda name: None)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "roberta"}))
    result = cli("count", tmp_path)
    assert result.code == 2
    assert "pip install 'bertscope[transformers]'" in result.err
    with pytest.raises(BertscopeError, match="needs the extra 'transformers'"):
        bertscope.load(tmp_path)


def test_a_model_of_another_family_is_loaded_with_adapters_as_the_error_advises():
    with pytest.raises(SelectionError, match="give bertscope"):
        bertscope.estimate("gpt2", lora="r=8")
    report = bertscope.count(bertscope.load("gpt2", lora="r=8"))
    assert report.totals.distinct_params == 124_439_808 + 12 * 8 * (768 + 3 * 768)  # of c_attn


def test_a_checkpoint_as_model_takes_the_configuration_beside_it(cli, tmp_path, tiny):
    torch.save(bertscope.BertModel(tiny).state_dict(), tmp_path / "pytorch_model.bin")
    alone = cli("tree", tmp_path / "pytorch_model.bin")
    assert "39 tensors" in alone.out
    assert "39 tensors" in cli("tree", tmp_path).out
    (tmp_path / "config.json").write_text(json.dumps(tiny.to_dict()))
    assert "BertModel" in cli("tree", tmp_path / "pytorch_model.bin").out
    assert cli("count", tmp_path, "--format", "json").json["kind"] == "count"
    assert cli("count", tmp_path, "--stored", "--format", "json").json["kind"] == "checkpoint"
