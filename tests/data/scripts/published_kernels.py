"""published_kernels.py KERNEL SIZE: a layer's forward and backward pass, as in Liger's benchmark, on the GPU.

Prints torch.cuda.max_memory_allocated() in MiB. As in the benchmark of 2024 the layer of Liger exists too, with
parameters of the same size, and gradients add up.
"""

import sys

import torch
from torch import nn

kernel, size = sys.argv[1], int(sys.argv[2])
half, device = {"dtype": torch.bfloat16}, {"device": "cuda"}


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class GatedMLP(nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.gate, self.up = (nn.Linear(4096, 11008, bias=False) for _ in range(2))
        self.down, self.activation = nn.Linear(11008, 4096, bias=False), activation

    def forward(self, x):
        return self.down(self.activation(self.gate(x)) * self.up(x))


class HeadLoss(nn.Linear):
    def forward(self, x):
        return nn.functional.cross_entropy(super().forward(x), torch.zeros(len(x), dtype=torch.long, device=x.device))


class Loss(nn.Module):
    def forward(self, x):
        return nn.functional.cross_entropy(x, labels)


make, shape, dtype = {
    "rms_norm": (lambda: RMSNorm(size), (2048, size), torch.bfloat16),
    "layer_norm": (lambda: nn.LayerNorm(size), (4096, size), torch.float32),
    "swiglu": (lambda: GatedMLP(nn.SiLU()).bfloat16(), (4, size, 4096), torch.bfloat16),
    "geglu": (lambda: GatedMLP(nn.GELU("tanh")).bfloat16(), (8, size, 4096), torch.bfloat16),
    "cross_entropy": (Loss, (8 * 2048, size), torch.float32),
    "fused_linear_cross_entropy": (lambda: HeadLoss(4096, 128256, False, **half), (size, 4096), torch.bfloat16),
}[kernel]
labels = torch.zeros(8 * 2048, dtype=torch.long, **device) if kernel == "cross_entropy" else None
layer, other = (make().to("cuda") for _ in range(2))
if kernel in ("swiglu", "geglu"):
    other = None
x = torch.randn(shape, dtype=dtype, requires_grad=True, **device)
gradient = None if kernel.endswith("entropy") else torch.randn_like(x)


def step():
    y = layer(x)
    y.backward(gradient, retain_graph=kernel != "fused_linear_cross_entropy")


for _ in range(3):
    torch.cuda.reset_peak_memory_stats()
    step()
print("MIB", torch.cuda.max_memory_allocated() / 2**20)
