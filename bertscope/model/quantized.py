"""Linear layers whose weights are stored in 4 or 8 bits, with the memory of bitsandbytes.

Stored are packed weights and their scales. Each product, forward and backward, makes the weight in the dtype that it
computes in, and frees it. Weights are random, as memory does not depend on them. Source: bitsandbytes 0.50.2
(functional.py, autograd/_functions.py, backends/). Its fused 4-bit product for up to 1,536 tokens, whose use depends on
the GPU, makes no weight in forward; backward always does.
"""

import re
from collections import Counter
from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from bertscope.config import Quantization
from bertscope.errors import SelectionError, name_of

_BLOCK, _SCALE_BLOCK = 64, 256  # weights with one scale, and scales with one scale
_CHUNK = 2**16  # bytes that are unpacked at once
_OUTLIER = 6.0  # llm_int8_threshold


# ---- the operator that unpacks: a kernel, whose temporary memory does not grow ----

_library = torch.library.Library("bertscope", "FRAGMENT")
_library.define("unpack(Tensor packed, Tensor scales, Tensor code, SymInt[] shape, ScalarType dtype) -> Tensor")


def _empty(packed: torch.Tensor, scales: Any, code: Any, shape: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=packed.device)


def _unpack(packed: torch.Tensor, scales: Any, code: Any, shape: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return the entries of `code` that numbers of 4 or 8 bits name, times the scale of their block."""
    out = _empty(packed, scales, code, shape, dtype)
    each, block = (2, _BLOCK) if len(code) == 16 else (1, _SCALE_BLOCK)
    for begin in range(0, packed.numel(), _CHUNK):
        numbers = packed.view(-1)[begin : begin + _CHUNK].int()
        numbers = torch.stack((numbers >> 4, numbers & 15), 1).view(-1) if each == 2 else numbers
        values = out.view(-1)[each * begin : each * begin + len(numbers)]
        of_blocks = scales[each * begin // block :][: -(-len(values) // block)].repeat_interleave(block)
        values.copy_(code[numbers[: len(values)]] * of_blocks[: len(values)])
    return out


_library.impl("unpack", _empty, "Meta")
for _device in ("CPU", "CUDA"):
    _library.impl("unpack", _unpack, _device)


# ---- the layers ----


class _Product(torch.autograd.Function):
    """A product with a weight that is made for it, and made again in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, layer: "QuantizedLinear") -> torch.Tensor:
        ctx.layer, ctx.shape, ctx.dtype = layer, x.shape, x.dtype
        if layer.is_8bit:
            ctx.x = x  # which bitsandbytes keeps with the graph, though no gradient needs it
            return layer.product_in_8bit(x, bias) if layer.on_cuda else functional.linear(x, layer.wide(x.dtype), bias)
        return functional.linear(x, layer.wide(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        of_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        if not ctx.layer.is_8bit:
            return grad @ ctx.layer.wide(ctx.layer.loaded or grad.dtype).to(grad.dtype), of_bias, None
        grad = grad.reshape(-1, grad.shape[-1]).contiguous().to(ctx.dtype)
        return (grad @ ctx.layer.wide(ctx.dtype)).view(ctx.shape), of_bias, None


class QuantizedLinear(nn.Linear):
    """A frozen linear layer of packed weights: 4 bits in blocks of 64 with a scale, or 8 bits with a scale a row.

    The scales of 4-bit weights may be 8-bit numbers themselves ("double quantization"), with scales for blocks of 256.
    """

    absmax: torch.Tensor

    def __init__(self, layer: nn.Module, how: Quantization, computes_in: torch.dtype | None, *, on_cuda: bool) -> None:
        nn.Module.__init__(self)
        weight: Any = layer.weight
        self.is_linear, self.original_dtype = isinstance(layer, nn.Linear), weight.dtype
        shape = weight.shape if self.is_linear else weight.T.shape  # of a Conv1D in transformers
        (self.out_features, self.in_features), numel, device = shape, weight.numel(), weight.device
        self.shape = tuple(shape)  # of the unpacked weight
        self.is_8bit, self.on_cuda, self.computes_in = how.is_8bit, on_cuda, computes_in
        self.loaded = getattr(torch, how.loaded) if how.loaded else None
        packed = shape if how.is_8bit else ((numel + 1) // 2, 1)
        bytes_ = torch.empty(packed, dtype=torch.int8 if how.is_8bit else torch.uint8, device=device)
        self.weight = nn.Parameter(bytes_, requires_grad=False)
        blocks = self.out_features if how.is_8bit else -(-numel // _BLOCK)
        tables = {"absmax": torch.empty(blocks, dtype=torch.uint8 if how.is_double else torch.float32, device=device)}
        sizes = {} if how.is_8bit else {"code": 16}
        sizes |= {"absmax2": -(-blocks // _SCALE_BLOCK), "code2": 256, "offset": 1} if how.is_double else {}
        tables |= {name: torch.empty(size, device=device) for name, size in sizes.items()}
        for name, table in tables.items():
            self.register_buffer(name, table)
        for values in (self.weight.data, *tables.values()) if device.type != "meta" else ():
            values.random_(0, 100) if values.dtype in (torch.uint8, torch.int8) else values.uniform_(-0.1, 0.1)
        bias: Any = layer.bias
        if bias is not None and computes_in is not None and not how.is_8bit:  # for ever, in the first forward pass
            bias = nn.Parameter(bias.to(computes_in), requires_grad=bias.requires_grad)
        self.bias = bias

    def wide(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight in a dtype, a new tensor."""
        if self.is_8bit:
            return self.weight.to(dtype, copy=True).mul_(self.absmax.unsqueeze(1).mul(1 / 127))
        scales = self.absmax
        if scales.dtype == torch.uint8:
            nested: Any = (self.absmax, self.absmax2, self.code2, self.absmax.shape, torch.float32)
            scales = torch.ops.bertscope.unpack(*nested) + self.offset
        wide: torch.Tensor = torch.ops.bertscope.unpack(self.weight, scales, self.code, self.shape, dtype)
        return wide

    @property
    def W_q(self) -> torch.Tensor:  # by this name peft's DoRA knows that `dequantize` gives it the weight
        """The packed weight."""
        return self.weight

    def dequantize(self) -> torch.Tensor:
        """Return the weight in its shape and dtype before it was quantized, a new tensor."""
        if self.is_8bit:
            wide = self.weight * self.absmax.unsqueeze(1) * (1 / 127)
        else:
            wide = self.wide(self.loaded or self.original_dtype)
        return wide if self.is_linear else wide.T

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (..., in) to (..., out), in the dtype of computation; the result has the dtype of x."""
        dtype = x.dtype if self.is_8bit else self.computes_in or x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        out: torch.Tensor = _Product.apply(x.to(dtype), bias, self)  # type: ignore[no-untyped-call]
        return out if self.is_8bit else out.to(x.dtype)

    def product_in_8bit(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Multiply 8-bit numbers on CUDA, where no column has an outlier: the sums have 32 bits, their result 16."""
        rows = x.reshape(-1, x.shape[-1])
        halves = rows.to(torch.float16)
        numbers = torch.empty(rows.shape, dtype=torch.int8, device=x.device)
        numbers.masked_fill_(halves.abs() >= _OUTLIER, 0)
        del halves
        sums = torch.ops.aten._int_mm(numbers, self.weight.t())
        out = torch.empty(sums.shape, dtype=torch.float16, device=x.device)
        if bias is not None and bias.dtype != torch.float16:
            out.add_(bias)
        return out.to(x.dtype).view(*x.shape[:-1], -1)


def _adapted(layer: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return the output of a LoRA layer in the operators of peft 0.21 on bitsandbytes' layers (tuners/lora/bnb.py)."""
    output: torch.Tensor
    result: torch.Tensor = layer.base_layer(x)
    if not layer.base_layer.is_8bit:
        result = result.clone()
    (name,) = layer.lora_A  # of the only adapter
    down, up, dropout = (part[name] for part in (layer.lora_A, layer.lora_B, layer.lora_dropout))
    converts = not (layer.base_layer.on_cuda and torch.is_autocast_enabled(x.device.type))
    x = x.to(down.weight.dtype) if converts else x
    if variant := getattr(layer, "lora_variant", {}).get(name):  # DoRA
        output = variant.forward(layer, active_adapter=name, x=x, result=result)
        return output.to(result.dtype) if converts else output
    scaling = layer.scaling[name] if isinstance(layer.scaling, dict) else layer.scaling
    output = up(down(dropout(x))) * scaling
    return result + (output.to(result.dtype) if converts else output)


def quantize(model: nn.Module, how: Quantization, computes_in: torch.dtype | None, *, on_cuda: bool) -> None:
    """Store the weights of the linear layers in 4 or 8 bits, and freeze all but adapters.

    The output layer, the one with the last parameter, those whose weight is tied, and those that transformers keeps in
    fp32 stay, as in transformers (quantizers/base.py); `how.skipped` replaces the first three. Raises SelectionError if
    nothing is left.
    """
    unwrapped: Any = getattr(model, "get_base_model", None)
    base: nn.Module = unwrapped() if unwrapped else model
    frozen = [path for path, param in base.named_parameters() if base is model or not param.requires_grad]
    skipped = {*(_usual(base, frozen[-1]) if how.skipped is None else how.skipped)}
    skipped |= {*(getattr(base, "_keep_in_fp32_modules", None) or ())}
    forms = (rf"(?:{re.escape(name)}(?:\..*)?|.*{re.escape(name)})" for name in skipped)
    is_skipped = re.compile("|".join(forms) or "(?!)")
    quantized: list[QuantizedLinear] = []
    for path, layer in list(base.named_modules()):
        is_linear = type(layer) is nn.Linear or type(layer).__name__ == "Conv1D"
        if is_linear and f"{path}.weight" in frozen and not is_skipped.fullmatch(_plain(path)):
            dtype = getattr(torch, how.computes_in) if how.computes_in else computes_in
            quantized.append(QuantizedLinear(layer, how, dtype, on_cuda=on_cuda))
            parent, _, name = path.rpartition(".")
            setattr(base.get_submodule(parent), name, quantized[-1])
    if not quantized:
        raise SelectionError(f"{type(base).__name__} has no linear layer to quantize; leave {name_of('quantize')} out")
    for path in frozen:
        base.get_parameter(path).requires_grad_(False)
    for layer in model.modules():
        if hasattr(layer, "lora_A") and isinstance(getattr(layer, "base_layer", None), QuantizedLinear):
            layer.forward = MethodType(_adapted, layer)


def _usual(base: nn.Module, last: str) -> Iterator[str]:
    yield _plain(last.rpartition(".")[0])
    outputs = getattr(base, "get_output_embeddings", int)()
    held = Counter(id(layer._parameters.get("weight")) for layer in base.modules())
    for path, layer in base.named_modules():
        if layer is outputs or (layer._parameters.get("weight") is not None and held[id(layer.weight)] > 1):
            yield _plain(path)


def _plain(path: str) -> str:
    """Return a path in the model before adapters were added."""
    return re.sub(r"\.(base_layer|original_module)(?=\.|$)", "", path)
