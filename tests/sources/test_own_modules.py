"""Modules as users write them: the parameters and FLOPs that torch counts, and the module stays as it was."""

import dataclasses
import functools
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import bertscope
from bertscope.settings.run_config import RunConfig
from bertscope.sources.find import source_of
from bertscope.tracing.flops import step_flops
from bertscope.tracing.inputs import inputs_for
from tests.conftest import EVERY_CASE, run_python

BATCH, SEQ, WIDTH = 2, 5, 8


class Own(nn.Module):
    """A module with the given children and forward."""

    def __init__(self, run, **children) -> None:
        super().__init__()
        self.run = run
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, *args, **kwargs):
        return self.run(self, *args, **kwargs)


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    extra: object = None


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.t() @ gradient


def number(*shape: int, **options) -> nn.Parameter:
    return nn.Parameter(torch.rand(shape, **options))


def linear(out: int = WIDTH) -> nn.Linear:
    return nn.Linear(WIDTH, out)


def shared_module() -> nn.Module:
    layer = linear()
    return Own(lambda self, x: self.layers[1](self.again(self.first(x))), first=layer, again=layer,
               layers=nn.ModuleList([layer, linear()]))  # fmt: skip


def shared_parameter() -> nn.Module:
    words, out = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 20, bias=False)
    out.weight = words.weight
    return Own(lambda self, ids: self.out(self.words(ids)), words=words, out=out)


def views() -> nn.Module:
    whole = torch.rand(2 * WIDTH, WIDTH)
    parts = {"upper": nn.Parameter(whole[:WIDTH]), "lower": nn.Parameter(whole[WIDTH:]), "whole": nn.Parameter(whole)}
    return Own(lambda self, x: x @ self.upper @ self.lower, **parts)


def with_buffer() -> nn.Module:
    module = Own(lambda self, x: self.layer(x @ self.table), layer=linear())
    module.register_buffer("table", torch.ones(WIDTH, WIDTH), persistent=False)
    return module


def cyclic() -> nn.Module:
    module = Own(lambda self, x: self.layer(x), layer=linear())
    module.layer.__dict__["parent"] = module
    return module


def prints(self, x):
    print("running")
    return self.layer(x)


def by_numpy(self, x):
    return self.layer(x[:, torch.from_numpy(x.detach().numpy().sum(0).argsort().copy())])


def by_values(self, x):
    return self.layer(x[x.sum(1) > -1e9]) if x.sum() < 1e9 else x


def attention(self, x):
    query, key, value = self.packed(x).view(BATCH, SEQ, 3, 2, 4).permute(2, 0, 3, 1, 4)
    scores = (query @ key.transpose(2, 3)).softmax(-1)
    return self.out((scores @ value).transpose(1, 2).flatten(2))


def old_weight_norm() -> nn.Module:
    return nn.utils.weight_norm(nn.Conv1d(4, 4, 3))


ROW, ROWS = torch.rand(BATCH, WIDTH), torch.rand(BATCH, SEQ, WIDTH)
IDS = torch.randint(0, 20, (BATCH, SEQ))
parametrizations = nn.utils.parametrizations
MODULES = {
    "batch norm": (lambda: nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)), (torch.rand(BATCH, 3, 9, 9),)),
    "gru": (lambda: nn.GRU(WIDTH, 6), (ROWS,)),
    "bidirectional gru of two layers": (lambda: nn.GRU(WIDTH, 6, 2, bidirectional=True, batch_first=True), (ROWS,)),
    "transformer": (lambda: nn.Transformer(WIDTH, 2, 1, 1, 16).train(), (ROWS, ROWS)),
    "multi-head attention": (lambda: nn.MultiheadAttention(WIDTH, 2), (ROWS, ROWS, ROWS)),
    "attention by hand": (lambda: Own(attention, packed=linear(3 * WIDTH), out=linear()), (ROWS,)),
    "weight norm": (lambda: parametrizations.weight_norm(linear()), (ROW,)),
    "spectral norm": (lambda: parametrizations.spectral_norm(linear()).eval(), (ROW,)),
    "orthogonal": (lambda: parametrizations.orthogonal(linear()), (ROW,)),
    "old weight norm": (old_weight_norm, (torch.rand(BATCH, 4, 9),)),
    "old spectral norm": (lambda: nn.utils.spectral_norm(linear()).eval(), (ROW,)),
    "parameter list": (
        lambda: Own(lambda self, x: functools.reduce(torch.matmul, self.all, x),
                    all=nn.ParameterList([number(WIDTH, WIDTH), number(WIDTH, 3)])), (ROW,)),
    "parameter dictionary": (
        lambda: Own(lambda self, x: x @ self.all["a"], all=nn.ParameterDict({"a": number(WIDTH, 3)})), (ROW,)),
    "complex and integer parameters": (
        lambda: Own(lambda self, x: (x.to(torch.cfloat) @ self.turn).real, turn=number(WIDTH, 3, dtype=torch.cfloat),
                    order=nn.Parameter(torch.arange(6), requires_grad=False)), (ROW,)),
    "shared module": (shared_module, (ROW,)),
    "shared parameter": (shared_parameter, (IDS,)),
    "views of one storage": (views, (ROW,)),
    "buffer": (with_buffer, (ROW,)),
    "frozen part": (lambda: nn.Sequential(linear().requires_grad_(False), linear()), (ROW,)),
    "bf16": (lambda: linear().bfloat16(), (ROW.bfloat16(),)),
    "fp16": (lambda: nn.Sequential(linear(), nn.LayerNorm(WIDTH)).half(), (ROW.half(),)),
    "float64": (lambda: linear().double(), (ROW.double(),)),
    "bilinear": (lambda: nn.Bilinear(WIDTH, WIDTH, 3), (ROW, ROW)),
    "embedding bag": (lambda: nn.EmbeddingBag(20, 4, mode="sum"), (IDS,)),
    "sparse embedding": (lambda: nn.Embedding(20, 4, sparse=True), (IDS,)),
    "transposed convolution": (lambda: nn.ConvTranspose2d(4, 6, 3, 2, groups=2), (torch.rand(BATCH, 4, 5, 5),)),
    "3-d convolution": (lambda: nn.Conv3d(2, 4, 3, padding=1), (torch.rand(BATCH, 2, 4, 4, 4),)),
    "einsum": (
        lambda: Own(lambda self, x: torch.einsum("bsd,dhk->bhsk", x, self.weight), weight=number(WIDTH, 2, 4)),
        (ROWS,)),
    "checkpointed": (
        lambda: Own(lambda self, x: torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=False),
                    layer=linear()), (ROWS,)),
    "own autograd function": (
        lambda: Own(lambda self, x: Product.apply(x, self.weight), weight=number(WIDTH, 3)), (ROW,)),
    "tensor on the CPU that is no buffer": (
        lambda: Own(lambda self, x: self.layer(x + self.table), layer=linear(), table=torch.ones(WIDTH)), (ROW,)),
    "data parallel": (lambda: nn.DataParallel(linear()), (ROW,)),
    "several tensors": (lambda: Own(lambda self, *all: sum(map(self.layer, all)), layer=linear()), (ROW, ROW, ROW)),
    "keywords": (lambda: Own(lambda self, *, x, mask=None: self.layer(x * mask), layer=linear()),
                 {"x": ROW, "mask": torch.ones(WIDTH)}),
    "dictionary": (lambda: Own(lambda self, batch: self.layer(batch["x"]), layer=linear()), ({"x": ROW},)),
    "returns a dictionary": (lambda: Own(lambda self, x: {"out": self.layer(x), "no": None}, layer=linear()), (ROW,)),
    "returns a dataclass": (lambda: Own(lambda self, x: Output(self.layer(x)), layer=linear()), (ROW,)),
    "returns a tuple": (lambda: Own(lambda self, x: (self.layer(x), (x, None, 3)), layer=linear()), (ROW,)),
    "prints": (lambda: Own(prints, layer=linear()), (ROW,)),
    "numpy": (lambda: Own(by_numpy, layer=linear()), (ROW,)),
    "control flow by values": (lambda: Own(by_values, layer=linear()), (ROW,)),
    "functional": (lambda: Own(lambda self, x: F.linear(F.gelu(x), self.weight), weight=number(3, WIDTH)), (ROW,)),
    "cycle": (cyclic, (ROW,)),
    "compiled": (lambda: torch.compile(linear()), (ROW,)),
}  # fmt: skip


# Further cases of a kind: of an RNN, attention, a parametrization, a dtype, a convolution and an embedding.
TWICE = {
    "bidirectional gru of two layers", "multi-head attention", "spectral norm", "orthogonal", "old spectral norm",
    "parameter dictionary", "fp16", "float64", "bilinear", "embedding bag", "3-d convolution", "returns a dictionary",
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", [name for name in MODULES if EVERY_CASE or name not in TWICE])
def test_an_own_module_has_the_parameters_and_flops_that_torch_counts(name):
    make, inputs = MODULES[name]
    module = make()
    before = [(param.dtype, param.device, param.requires_grad, param.clone()) for param in module.parameters()]
    totals = bertscope.count(module).totals
    assert totals.distinct_params == sum(param.numel() for param in module.parameters())
    assert totals.trainable_params == sum(param.numel() for param in module.parameters() if param.requires_grad)
    assert totals.param_bytes == sum(param.nbytes for param in module.parameters())
    for mode in ("inference", "training"):
        found = bertscope.flops(module, inputs, mode=mode).rows[0].total.matmul_flops
        with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(mode == "training"):
            output = module(**inputs) if isinstance(inputs, dict) else module(*inputs)
            if mode == "training":
                first(output).sum().backward()
        assert found == counter.get_total_flops(), mode
    after = [(param.dtype, param.device, param.requires_grad, param) for param in module.parameters()]
    assert [item[:3] for item in after] == [item[:3] for item in before]
    assert all(torch.equal(new[3], old[3]) for new, old in zip(after, before, strict=True))


def first(output) -> torch.Tensor:
    """Return the first tensor of what a forward returned."""
    if isinstance(output, torch.Tensor):
        return output
    values = (
        output.values() if isinstance(output, dict) else vars(output).values() if hasattr(output, "logits") else output
    )
    return next(value for value in values if isinstance(value, torch.Tensor))


def test_an_lstm_has_the_flops_of_its_formula_as_torch_counts_none_on_the_cpu():
    lstm = nn.LSTM(WIDTH, 12, 2, batch_first=True)
    gates = 4 * 12
    expected = BATCH * SEQ * 2 * (gates * (WIDTH + 12) + gates * (12 + 12))
    assert bertscope.flops(lstm, ROWS).rows[0].total.matmul_flops == expected
    assert bertscope.count(lstm).totals.distinct_params == sum(param.numel() for param in lstm.parameters())


def test_a_lazy_module_says_what_is_unknown_and_is_not_run():
    lazy = nn.Sequential(nn.LazyLinear(5), nn.Linear(5, 2))
    report = bertscope.count(lazy)
    assert report.unknown == ("0.weight", "0.bias")
    assert report.totals.distinct_params == 5 * 2 + 2
    with pytest.raises(bertscope.BertscopeError, match="run it once first"):
        bertscope.flops(lazy, ROW)
    assert nn.parameter.is_lazy(lazy[0].weight)


@pytest.mark.parametrize(
    "layer",
    [nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 3), nn.Conv1d(3, 4, 2), nn.Conv2d(3, 4, 2), nn.Identity()],
    ids=lambda layer: type(layer).__name__,
)
def test_the_input_that_an_error_proposes_runs(layer):
    module = Own(lambda self, x: self.layer(x), layer=layer)
    module.forward = lambda x: layer(x)
    with pytest.raises(bertscope.BertscopeError, match="x cannot be derived") as error:
        inputs_for(module, BATCH, SEQ)
    (proposed,) = re.findall(r"such as (\S+) ", str(error.value))
    given = inputs_for(module, BATCH, SEQ, described=[proposed])["x"]
    assert layer.to("meta")(given).shape[0] == BATCH


class Both(nn.Linear):
    """A forward that fails without its second tensor."""

    def __init__(self):
        super().__init__(WIDTH, 3)

    def forward(self, input_ids, scale: torch.Tensor | None = None, is_loud: bool = False):
        return super().forward(input_ids.float() * scale.sum())


@pytest.mark.parametrize("command", ["flops", "estimate"])
def test_the_error_of_a_forward_names_the_tensors_that_it_did_not_get(cli, command):
    ids = ("--input", f"input_ids=Bx{WIDTH}:int64")
    refused = cli(command, f"{__name__}:Both", *ids)
    assert refused.code == 2
    assert (
        "Both.forward takes input_ids=BxS:int64, scale; --input NAME=SHAPE:DTYPE gives forward other inputs"
        in refused.err.splitlines()[-1]
    )
    assert cli(command, f"{__name__}:Both", *ids, "--input", "scale=3:float32").code == 0


class Fails(nn.Linear):
    """A forward that raises an error, with `on_values` only for tensors that have values."""

    on_values = False

    def __init__(self):
        super().__init__(WIDTH, 3)

    def forward(self, x):
        if not self.on_values or (type(x) is torch.Tensor and not x.is_meta):
            raise KeyError("of my own")
        return super().forward(x)


class FailsOnValues(Fails):
    """A forward that an estimate can run."""

    on_values = True


STEP = ("--batch", "2", "--input", f"x=Bx{WIDTH}:float32")


@pytest.mark.parametrize(
    ("name", "command"),
    [("Fails", command) for command in ("estimate", *EVERY_CASE * ("flops", "profile", "count --shapes", "explain"))]
    + [("FailsOnValues", "profile")],
)
def test_an_error_of_the_users_forward_is_one_line_with_its_file_and_line_and_exit_code_2(cli, name, command):
    result = cli(*command.split(), f"{__name__}:{name}", *STEP)
    last = result.err.splitlines()[-1]
    assert (result.code, result.out) == (2, "")
    assert last.startswith(f"error: {__name__}:{name} cannot be run on ")
    assert re.search(r"KeyError \(test_own_modules.py:\d+\): 'of my own'; \w+.forward takes x; --input", last)


def test_an_error_inside_torch_names_the_line_of_the_user(cli):
    result = cli("estimate", f"{__name__}:FailsOnValues", "--input", "x=Bx7:float32")
    assert re.search(r"RuntimeError \(test_own_modules.py:\d+\)", result.err.splitlines()[-1])


def test_an_error_of_example_inputs_is_one_line(cli):
    result = cli("estimate", f"{__name__}:NoExample")
    assert result.code == 2
    assert "NoExample.example_inputs(8, 128): ZeroDivisionError (test_own_modules.py:" in result.err.splitlines()[-1]


class NoExample(Fails):
    """A module whose example inputs cannot be made."""

    def example_inputs(self, batch, seq):
        return batch / 0


def test_a_file_of_the_user_with_the_name_of_a_package_does_not_replace_it(tmp_path):
    (tmp_path / "own.py").write_text("import torch\n\ndef build():\n    return torch.nn.Linear(4, 4)\n")
    for name in ("rich", "jinja2", "yaml", "typer"):
        (tmp_path / f"{name}.py").write_text("")
    words = ("flops", f"{tmp_path}/own.py:build", "--input", "input=Bx4:float32")
    done = run_python("from bertscope.__main__ import main; main()", *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("32 FLOPs")


@pytest.mark.parametrize(
    "run",
    [lambda: bertscope.flops(Fails(), torch.ones(2, WIDTH)), lambda: bertscope.estimate(Fails(), torch.ones(2, WIDTH)),
     lambda: bertscope.profile(FailsOnValues(), torch.ones(2, WIDTH), steps=1)],
)  # fmt: skip
def test_an_error_of_forward_is_a_bertscope_error_in_python_that_keeps_its_cause(run):
    with pytest.raises(bertscope.BertscopeError, match="KeyError") as found:
        run()
    assert isinstance(found.value.__cause__, KeyError)


class ReadsValues(nn.Module):
    """A forward pass that needs values, and leaves traces."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.calls = nn.Linear(8, 4), nn.BatchNorm1d(4), []

    def forward(self, x):
        self.calls.append(x.sum().item())
        return self.norm(F.dropout(self.linear(x)))


@pytest.mark.filterwarnings("ignore:.*reads values")
@pytest.mark.parametrize("mode", ["inference", "training"])
def test_a_module_whose_values_are_needed_stays_as_it_is_too(mode):
    module = ReadsValues()
    before, state = {name: value.clone() for name, value in module.state_dict().items()}, torch.get_rng_state()
    assert bertscope.flops(module, torch.ones(2, 8), mode=mode).rows[0].forward.matmul_flops == 2 * 2 * 8 * 4
    assert bertscope.tree(module, inputs=torch.ones(2, 8))["linear"].outputs[0].shape == (2, 4)
    step_flops(source_of(module, inputs=torch.ones(2, 8)), RunConfig(batch=2, mode=mode))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert not module.calls
    assert module.linear.weight.grad is None
