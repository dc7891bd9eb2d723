"""Kernels that are no part of torch: rules of the user's, and the rows for packages, without these packages."""

import re
from pathlib import Path

import pytest

import bertscope
from bertscope.errors import SelectionError
from bertscope.memory.extension_kernels import KERNELS
from bertscope.torch_access import torch
from tests.conftest import ROOT
from tests.dry_run.test_run import script  # noqa: F401

# An operator whose kernel is for a GPU only, with a formula of autograd in Python.
EXTENSION = """
import torch
library = torch.library.Library("my_ext", "DEF")
library.define("scale(Tensor x, float factor) -> Tensor")
class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        ctx.save_for_backward(x)
        return torch.ops.my_ext.scale(x, factor)
    @staticmethod
    def backward(ctx, grad):
        ctx.saved_tensors
        return torch.ops.my_ext.scale(grad, ctx.factor), None
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(64, 512), torch.nn.Linear(512, 64)
    def forward(self, x):
        return self.second(Scale.apply(self.first(x), 2.0))
"""
RULE = """
import bertscope
@bertscope.kernel("my_ext::scale", scratch=lambda x, factor: {scratch})
def scale(x, factor):
    return torch.empty_like(x)
"""
# The same by operators of torch.
TORCHS = EXTENSION.replace("torch.ops.my_ext.scale", "torch.mul")
WITH_SCRATCH = (
    EXTENSION.replace("torch.ops.my_ext.scale", "scale")
    + """
def scale(x, factor):
    out = torch.mul(x, factor)
    torch.empty_like(x)
    return out
"""
)
LOOP = """
model = Net().cuda()
optimizer = torch.optim.SGD(model.parameters())
for _ in range(4):
    model(torch.randn(1000, 64).cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def peaks(report):
    return {(phase.step, phase.phase): phase.peak_bytes for phase in report.phases}


def test_a_rule_gives_a_kernel_the_memory_of_torchs_own_operator(script):  # noqa: F811
    script(TORCHS + LOOP)
    expected = peaks(bertscope.run("train.py"))
    script(EXTENSION + RULE.format(scratch="0") + LOOP)
    report = bertscope.run("train.py")
    assert peaks(report) == expected
    assert "my_ext::scale: not verified: its rule, from the user's code" in report.remarks
    script(WITH_SCRATCH + LOOP)
    more = peaks(bertscope.run("train.py"))
    assert more[3, "backward"] > expected[3, "backward"]
    script(EXTENSION + RULE.format(scratch="x.nbytes") + LOOP)
    assert peaks(bertscope.run("train.py")) == more


def test_a_kernel_without_a_rule_is_refused_with_the_line_that_registers_one(cli, script):  # noqa: F811
    script(EXTENSION + LOOP)
    refused = cli("run", "train.py")
    (line,) = re.findall(r'bertscope\.kernel\("my_ext::scale"\)\(.*?\)\)', refused.err)
    assert refused.code == 3, refused.err
    script(EXTENSION + f"import bertscope\n{line}\n" + LOOP)
    assert cli("run", "train.py").code == 0
    script(EXTENSION, "net.py")
    estimate = ("estimate", "net.py:Net", "--input", "x=Bx64:float32", "--device", "cuda", "--optimizer", "sgd")
    for command in (estimate, ("flops", *estimate[1:4]), ("tree", *estimate[1:4], "--shapes")):
        refused = cli(*command, "--batch", "1000")
        assert (refused.code, line in refused.err) == (2, True)
    script(EXTENSION.replace("my_ext", "their_ext") + RULE.replace("my_ext", "their_ext").format(scratch="0"), "own.py")
    script(TORCHS.replace("my_ext", "other_ext"), "torchs.py")
    for _ in range(2):  # each answer says it
        texts = [cli(estimate[0], f"{name}.py:Net", *estimate[2:], "--batch", "1000") for name in ("own", "torchs")]
        assert texts[0].out.splitlines()[0] == texts[1].out.splitlines()[0]
        assert "note: their_ext::scale: not verified: its rule, from the user's code" in texts[0].err


# A compiled module, here one that is not there, with functions that torch does not know.
BINDING = """
import bertscope, torch
@bertscope.kernel("compiled_ext._C.scale", scratch=lambda x, factor: x.nbytes)
def scale(x, factor):
    return torch.empty_like(x)
"""


def test_a_function_of_a_compiled_module_is_replaced_on_tensors_without_values(script):  # noqa: F811
    code = EXTENSION.replace("torch.ops.my_ext.scale", "compiled_ext._C.scale")
    script(BINDING + "import compiled_ext._C\n" + code.replace("library.define", "0 and library.define") + LOOP)
    report = bertscope.run("train.py")
    script(WITH_SCRATCH + LOOP)
    assert peaks(report) == peaks(bertscope.run("train.py"))


def test_a_second_rule_for_a_kernel_is_refused():
    with pytest.raises(SelectionError, match="flash_attn_backward has a rule already, from flash-attn"):
        bertscope.kernel("flash_attn::_flash_attn_backward")(torch.empty_like)
    with pytest.raises(SelectionError, match=r"nowhere::op takes no rule: .*; import its module first"):
        bertscope.kernel("nowhere::op")(torch.empty_like)
    with pytest.raises(SelectionError, match=r"a kernel is namespace::operator or module.function; got 'scale'"):
        bertscope.kernel("scale")(torch.empty_like)


# The parts of bitsandbytes that a GPU needs: a library of C, operators with Python code for CUDA around it, weights
# that become 4 bits when they move, and states in managed memory.
BITSANDBYTES = {
    "__init__.py": "from . import ops, functional",
    "cextension.py": "def no_gpu(*_): raise RuntimeError('there is no GPU')\nclass lib: cquantize = cpaged = no_gpu",
    "functional.py": "def get_paged(*shape, dtype, device): raise RuntimeError('there is no GPU')",
    "ops.py": """
import torch
from .cextension import lib
library = torch.library.Library("bitsandbytes", "DEF")
library.define("quantize(Tensor x) -> Tensor")
def quantize(x):
    halves = x.to(torch.float16)
    out = torch.empty(x.numel() // 2, 1, dtype=torch.uint8, device=x.device)
    lib.cquantize(halves.data_ptr(), out.data_ptr())
    return out
library.impl("quantize", quantize, "CUDA")
class Params(torch.nn.Parameter):
    def __new__(cls, data):
        tensor = torch.Tensor._make_subclass(cls, data, False)
        tensor.kind = "nf4"
        return tensor
    def cuda(self):
        self.data = torch.ops.bitsandbytes.quantize(self.data.to("cuda"))
        return self
""",
}
QUANTIZED = """
import bitsandbytes, torch
model = torch.nn.Linear(1024, 1024, bias=False)
model.weight = bitsandbytes.ops.Params(model.weight.data)
weight = model.weight.cuda()
assert weight is model.weight and type(weight).__name__ == "Params" and weight.kind == "nf4", type(weight)
assert weight.shape == (2**19, 1) and weight.is_cuda
again = bitsandbytes.ops.Params(weight.data)  # of a tensor on the GPU
assert type(again).__name__ == "Params" and again.kind == "nf4" and again.is_cuda
state = bitsandbytes.functional.get_paged(2**19, dtype=torch.float32, device=weight.device)
assert state.is_paged and state.numel() == 2**19
"""


def test_the_python_code_of_a_package_runs_around_kernels_that_do_nothing(script):  # noqa: F811
    """4 MiB of fp32 on the GPU, 2 MiB in half precision while they become 0.5 MiB of 4 bits; pages are not torch's."""
    Path("bitsandbytes").mkdir()
    for name, text in BITSANDBYTES.items():
        script(text, f"bitsandbytes/{name}")
    script(QUANTIZED)
    report = bertscope.run("train.py")
    assert report.phases[0].peak_bytes == (4 + 2) * 2**20 + 2**19
    assert "not counted: a paged optimizer's state, which the driver moves between the host and the GPU" in (
        report.remarks
    )


FLASH = """
import torch
from flash_attn import flash_attn_func
model = torch.nn.Linear(256, 768).to(torch.bfloat16).cuda()
optimizer = torch.optim.SGD(model.parameters())
for _ in range(4):
    q, k, v = model(torch.randn(2, 128, 256, dtype=torch.bfloat16).cuda()).view(2, 128, 3, 4, 64).unbind(2)
    flash_attn_func(q, k, v).float().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_script_may_import_flash_attn_where_it_is_not_installed(script):  # noqa: F811
    """2 x 128 tokens, 4 heads of 64: backward has the output's gradient, dq, dk and dv, and sums in blocks of 128."""
    script(FLASH)
    report = bertscope.run("train.py")
    held = report.held
    assert any(text.startswith("flash_attn: not verified: its rule, from flash-attn 2.8") for text in report.remarks)
    output, sums, state = 2 * 128 * 256 * 2, 2 * 4 * 128 * 4, 512
    temporaries = sum(row.held_bytes for row in held if row.part == "temporaries")
    assert temporaries == 512 + output + 3 * output + 4 * (2 * 128) * 4 * (64 + 1)
    saved = sum(row.held_bytes for row in held if row.part == "activations" and row.line == "train.py:8")
    assert saved == output + sums + state + 512  # of the loss


OWN = """
import torch
from flash_attn import flash_attn_func
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(256, 768)
    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 64).unbind(2)
        return flash_attn_func(q, k, v)
"""


def test_own_code_that_imports_flash_attn_is_estimated(cli, script):  # noqa: F811
    """Of 2 x 128 tokens and 4 heads of 64, q, k, v and the output are saved in bf16, sums in fp32, two numbers."""
    script(OWN, "net.py")
    result = cli("estimate", "net.py:Net", "--input", "x=2x128x256:bfloat16", "--precision", "bf16", "--device", "cuda",
                 "--optimizer", "sgd", "--format", "json")  # fmt: skip
    (variant,) = bertscope.from_json(result.out).variants
    assert variant.estimated.cost.saved_bytes == 4 * (2 * 128 * 256 * 2) + 2 * 4 * 128 * 4 + 2 * 512
    assert "flash_attn: not verified: its rule, from flash-attn 2.8" in result.err


def test_a_rule_counts_as_verified_only_by_a_test_that_exists():
    named = [row.witness.split("::") for row in KERNELS.values() if row.witness]
    assert all(f"def {test}(" in (ROOT / path).read_text() for path, test in named)
    assert not KERNELS["flash_attn::"].witness


LLAMA = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(vocab_size=99, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
                     attn_implementation="{kernel}")
model = LlamaForCausalLM(config).to(torch.bfloat16).cuda()
optimizer = torch.optim.SGD(model.parameters())
for _ in range(4):
    ids = torch.randint(1, 99, (4, 128)).cuda()
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_model_that_asks_for_flash_attn_gets_its_memory(script):  # noqa: F811
    pytest.importorskip("transformers")
    left = {}
    for kernel in ("flash_attention_2", "sdpa"):
        script(LLAMA.format(kernel=kernel))
        report = bertscope.run("train.py", gpu="a100-40gb")
        left[kernel] = next(phase for phase in report.phases if (phase.step, phase.phase) == (2, "forward")).left_bytes
        assert ("flash-attn is not installed here" in str(report.remarks)) == (kernel != "sdpa")
    # torch's kernel is flash-attn too; it saves a second number of the random state in each of two layers.
    assert left["flash_attention_2"] == pytest.approx(left["sdpa"], abs=2 * 2 * 512)


BUILDER = """
class {name}Builder:
    def load(self, verbose=True):
        raise RuntimeError("no compiler")
"""
OPTIMIZER = """
import torch, amp_C
from deepspeed.ops.op_builder.fused_adam import FusedAdamBuilder
from deepspeed.ops.op_builder.cpu_adam import CPUAdamBuilder
CPUAdamBuilder().load().create_adam(0, 1e-3)
class FusedAdam(torch.optim.Optimizer):
    def __init__(self, params, update):
        super().__init__(params, {})
        self.update, self.flag = update, torch.cuda.IntTensor([0])
    def step(self):
        lists = [[], [], [], []]
        for param in self.param_groups[0]["params"]:
            self.state[param] = self.state[param] or {"m": torch.zeros_like(param), "v": torch.zeros_like(param)}
            for row, value in zip(lists, (param.grad, param, *self.state[param].values())):
                row.append(value)
        self.update(65536, self.flag, lists, 1e-3)
model = torch.nn.Linear(256, 256).cuda()
optimizer = FusedAdam(model.parameters(), {update})
for _ in range(4):
    model(torch.randn(4, 256).cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("update", ["amp_C.multi_tensor_adam", "FusedAdamBuilder().load().multi_tensor_adam"])
def test_an_optimizer_of_apex_or_deepspeed_holds_its_state_and_is_not_verified(script, tmp_path, update):  # noqa: F811
    script(OPTIMIZER.replace("{update}", update))
    folder = Path("deepspeed/ops/op_builder")
    folder.mkdir(parents=True)
    for name, file in (("FusedAdam", "fused_adam"), ("CPUAdam", "cpu_adam")):
        (folder / f"{file}.py").write_text(BUILDER.replace("{name}", name))
    Path("amp_C.py").write_text("def multi_tensor_adam(*lists): raise RuntimeError('needs pointers')")
    report = bertscope.run("train.py")
    weight = 4 * 256 * 256
    assert sum(row.held_bytes for row in report.held if row.part == "optimizer_state") == 2 * (weight + 1024)
    assert any(text.startswith("not verified: kernels of Apex's") for text in report.remarks)


def test_backward_of_apexs_norms_adds_up_gradients_of_weights_in_16_parts():
    library = torch.library.Library("apex", "FRAGMENT")
    library.define("rms_bwd(Tensor grad_output, Tensor invvar, Tensor input, int[] shape, Tensor weight) -> Tensor")
    rows, weight = torch.empty(8, 32), torch.empty(32)
    args = (rows, torch.empty(8), rows, [32], weight)
    assert KERNELS["apex::"].scratch(torch.ops.apex.rms_bwd.default, args) == 16 * 32 * 4
