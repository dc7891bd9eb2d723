"""kernels.py KIND: a loop with layers of torchao or Liger, on the GPU if there is one; `few` as last word is not read.

Liger's kernels of Triton run on a CPU with TRITON_INTERPRET=1.
"""

import sys

import torch
from torch import nn

kind = next(word for word in sys.argv[1:] if word != "few")
device = "cuda" if torch.cuda.is_available() else "cpu"
first = nn.Linear(128, 256).to(torch.float32 if kind == "liger" else torch.bfloat16).to(device)
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
else:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    head = nn.Linear(256, 4096, bias=False).to(device)
    params += head.parameters()
    fused = LigerFusedLinearCrossEntropyLoss()

    def loss(x, labels):
        return fused(head.weight, first(x), labels)


optimizer = (torch.optim.SGD if kind == "liger" else torch.optim.AdamW)(params)
for _ in range(6):
    x, labels = torch.randn(64, 128, dtype=first.weight.dtype).to(device), torch.randint(0, 512, (64,)).to(device)
    loss(x, labels).backward()
    optimizer.step()
    optimizer.zero_grad()
