"""kernels.py KIND: a loop with layers of torchao or Liger, on the GPU if there is one; `few` as last word is not read.

Liger's kernels of Triton run on a CPU with TRITON_INTERPRET=1.
"""

import os
import sys

import torch
from torch import nn

kind = next(word for word in sys.argv[1:] if word != "few")
device = "cuda" if torch.cuda.is_available() else "cpu"
first = nn.Linear(128, 256).to(torch.float32 if kind.startswith("liger") else torch.bfloat16).to(device)
layers = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)).to(first.weight.dtype).to(device)
params = [*first.parameters()]


def loss(x, labels):
    return layers(first(x)).float().pow(2).mean()


if kind == "float8-training":
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(layers, config=Float8LinearConfig(emulate=True))
    params += layers.parameters()
elif kind in ("int8", "float8"):
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    quantize_(layers, {"int8": Int8WeightOnlyConfig, "float8": Float8WeightOnlyConfig}[kind]())
elif kind == "liger-loss":
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    head = nn.Linear(256, 4096, bias=False).to(device)
    params += head.parameters()
    fused = LigerFusedLinearCrossEntropyLoss()

    def loss(x, labels):
        return fused(head.weight, first(x), labels)

elif kind in ("liger-rms-norm", "liger-layer-norm"):
    from liger_kernel.transformers import LigerLayerNorm, LigerRMSNorm

    norm = (LigerRMSNorm if kind == "liger-rms-norm" else LigerLayerNorm)(256).to(device)
    layers = nn.Sequential(norm, layers)
    params += layers.parameters()
elif kind == "liger-swiglu":
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    def loss(x, labels):
        return LigerSiLUMulFunction.apply(*layers[0](first(x)).chunk(2, dim=-1)).pow(2).mean()

    params += layers[0].parameters()
elif kind == "liger-rope":
    from liger_kernel.transformers import liger_rotary_pos_emb

    cos, sin = torch.rand(1, 64, 32, device=device), torch.rand(1, 64, 32, device=device)

    def loss(x, labels):
        query, key = layers[0](first(x)).view(1, 64, 32, 32).transpose(1, 2).chunk(2, dim=1)
        query, key = liger_rotary_pos_emb(query, key, cos, sin)
        return nn.functional.scaled_dot_product_attention(query, key, query).pow(2).mean()

    params += layers[0].parameters()
if "TRITON_INTERPRET" in os.environ and kind.startswith("liger"):  # what the interpreter lacks of the compiler
    import liger_kernel.ops.layer_norm
    import liger_kernel.ops.rms_norm
    from triton.runtime import interpreter

    class Number(float):
        def to(self, dtype):
            return self

    convert = interpreter._implicit_cvt
    interpreter._implicit_cvt = lambda value: Number(value) if isinstance(value, float) else convert(value)
    for module in (liger_kernel.ops.layer_norm, liger_kernel.ops.rms_norm):
        module.rsqrt = lambda value: value  # of the same shape

optimizer = (torch.optim.SGD if kind.startswith("liger") else torch.optim.AdamW)(params)
for _ in range(6):
    x, labels = torch.randn(64, 128, dtype=first.weight.dtype).to(device), torch.randint(0, 512, (64,)).to(device)
    loss(x, labels).backward()
    optimizer.step()
    optimizer.zero_grad()
