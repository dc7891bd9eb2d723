"""Quantized weights: the tensors that store one weight become one tensor with its shape.

A packing is a row: the packed tensor's name, its scales' and zero points' names, and a function that derives the
weight's shape and dtype. Sources: bitsandbytes 0.50 (`QuantState`, `Int8Params`), AutoGPTQ 0.7 and GPTQModel
(`qlinear`), AutoAWQ 0.2 (`WQLinear_GEMM`, `WQLinear_GEMV`), compressed-tensors 0.20 (`compressors`), transformers'
`Mxfp4`, modelopt's NVFP4, torchao 0.15 (`flatten_tensor_state_dict`), torch.ao, optimum-quanto 0.2 (`QTensor`),
onnxruntime 1.32 (`quantize_dynamic`, `MatMulNBitsQuantizer`).
"""

import json
import math
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from bertscope.checkpoints.files import is_size
from bertscope.reports.checkpoint import StoredTensor

MAX_VALUE_BYTES = 4096  # of a tensor that describes a packing; bitsandbytes' has about 150
_DESCRIBES = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4", ".weight_shape")

Parts = Mapping[str, StoredTensor]  # end of the name -> tensor
Weight = tuple[str, tuple[int, ...]]  # dtype and shape


def describes(tensor: StoredTensor) -> bool:
    """Return True for a small tensor whose values are a packed weight's shape."""
    return tensor.bytes <= MAX_VALUE_BYTES and tensor.name.endswith(_DESCRIBES)


@dataclass(frozen=True)
class _Packing:
    """A way to store weights. A name is the weight's, with `main` at the end instead of `weight`."""

    name: str
    main: str
    weight: str
    needs: tuple[str, ...]  # at least one, with the same front
    unpacked: Callable[[Parts, Mapping[str, bytes]], Weight | None]  # None: another packing
    also: tuple[str, ...] = ()
    forms: tuple[str, ...] = ("safetensors", "pytorch")


def _bitsandbytes(parts: Parts, values: Mapping[str, bytes]) -> Weight | None:
    """Return dtype and shape in the quantization state, a JSON record; without it the weights in one dimension."""
    packed = parts[""]
    kind, state = next((end[-3:], tensor) for end, tensor in parts.items() if "bitsandbytes__" in end)
    try:
        shape = json.loads(values.get(state.name, b"{}")).get("shape")
    except (ValueError, RecursionError, AttributeError):
        shape = None
    if not isinstance(shape, list) or not all(map(is_size, shape)) or -(-math.prod(shape) // 2) != packed.bytes:
        shape = [2 * packed.bytes]
    return kind, tuple(shape)


def _whole(parts: Parts, values: Mapping[str, bytes]) -> Weight | None:
    """Return a weight with an integer per element; its scales are in other tensors."""
    packed = next(iter(parts.values()))
    return (packed.dtype, packed.shape) if packed.dtype.lstrip("u") in ("int8", "int4") else None


def _quantized_tensor(parts: Parts, values: Mapping[str, bytes]) -> Weight | None:
    """Return a weight of torch's quantized dtypes; scale and zero point next to it are the activations'."""
    packed = next(iter(parts.values()))
    return (packed.dtype, packed.shape) if packed.dtype.startswith(("qint", "quint")) else None


def _gptq(parts: Parts, values: Mapping[str, bytes]) -> Weight | None:
    """Return (out, in): qweight is (in * bits / 32, out), qzeros (groups, out * bits / 32), scales (groups, out)."""
    packed, scales, zeros, order = (parts.get(end) for end in ("qweight", "scales", "qzeros", "g_idx"))
    if packed is None or scales is None or len(packed.shape) != 2 or packed.shape[1] != scales.shape[-1]:
        return None
    (rows, outputs), bits = packed.shape, 0.0
    if order is not None and order.params:
        bits = rows * 32 / order.params
    elif zeros is not None and outputs:
        bits = zeros.shape[-1] * 32 / outputs
    if bits not in (2, 3, 4, 8):
        return None
    return f"int{int(bits)}", (outputs, rows * 32 // int(bits))


def _awq(parts: Parts, values: Mapping[str, bytes]) -> Weight | None:
    """Return (out, in): qweight is (in, out / 8) with scales (groups, out), and for GEMV (out, in / 8)."""
    packed, scales = parts["qweight"], parts["scales"]
    if packed.dtype != "int32" or len(packed.shape) != 2 or len(scales.shape) != 2:
        return None
    rows, columns = packed.shape
    if columns * 8 == scales.shape[1]:
        return "int4", (scales.shape[1], rows)
    return ("int4", (rows, columns * 8)) if rows == scales.shape[0] else None


def _compressed(parts: Parts, values: Mapping[str, bytes]) -> Weight | None:
    """Return the shape in `weight_shape`; without it weight_packed is two elements a byte (fp4)."""
    packed, stored = parts["weight_packed"], parts.get("weight_shape")
    raw = values.get(stored.name, b"") if stored is not None else b""
    form = "<q" if stored is not None and stored.dtype == "int64" else "<i"
    whole = len(raw) // struct.calcsize(form) * struct.calcsize(form)
    shape = tuple(number for (number,) in struct.iter_unpack(form, raw[:whole]))
    if not shape and packed.dtype == "uint8" and packed.shape:
        return "fp4", (*packed.shape[:-1], packed.shape[-1] * 2)
    if not shape or not packed.shape or not packed.shape[-1] or not all(map(is_size, shape)):
        return None
    bits = 32 // max(1, math.ceil(shape[-1] / packed.shape[-1]))  # 32 // bits integers in one of 32 bits
    fits = shape[:-1] == packed.shape[:-1] and 0 < bits <= 16 and -(-shape[-1] // (32 // bits)) == packed.shape[-1]
    return (f"int{bits}", shape) if fits else None


def _scaled(parts: Parts, values: Mapping[str, bytes]) -> Weight | None:
    """Return an 8-bit weight; modelopt's NVFP4, with two scales, has two elements in a byte."""
    packed = next(iter(parts.values()))
    if packed.dtype == "uint8" and "weight_scale_2" in parts and packed.shape:
        return "fp4", (*packed.shape[:-1], packed.shape[-1] * 2)
    return (packed.dtype, packed.shape) if packed.dtype.startswith(("float8", "int8")) else None


def _quanto(parts: Parts, values: Mapping[str, bytes]) -> Weight | None:
    """Return a weight's groups: two or four elements in a byte by column, with a scale per row."""
    packed, scales = parts["weight._data._data"], parts["weight._scale"]
    if packed.dtype != "uint8" or len(packed.shape) != 2 or not packed.shape[0]:
        return None
    elements = scales.params / packed.shape[0]
    return (f"int{8 // int(elements)}", (scales.params, packed.shape[1])) if elements in (2, 4) else None


def _blocks(parts: Parts, values: Mapping[str, bytes]) -> Weight | None:
    """Return the rows of blocks with two elements a byte: (..., blocks, bytes), in MXFP4 with a scale (..., blocks)."""
    main, packed = next(iter(parts.items()))
    is_mxfp4 = main == "_blocks"
    if packed.dtype != "uint8" or len(packed.shape) < 3 or (is_mxfp4 and packed.shape[:-1] != parts["_scales"].shape):
        return None
    *front, blocks, size = packed.shape
    return "mxfp4" if is_mxfp4 else "int4", (*front, blocks * size * 2)


_INPUTS = ("input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point", "k_scale",
           "v_scale")  # fmt: skip
_PACKINGS = (
    *(_Packing("bitsandbytes", "", "", (f".quant_state.bitsandbytes__{kind}",), _bitsandbytes,
               (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")) for kind in ("nf4", "fp4")),
    _Packing("bitsandbytes", "weight", "weight", ("SCB",), _whole, ("weight_format",)),
    _Packing("GPTQ", "qweight", "weight", ("scales",), _gptq, ("qzeros", "g_idx")),
    _Packing("AWQ", "qweight", "weight", ("scales",), _awq, ("qzeros",)),
    _Packing("compressed-tensors", "weight_packed", "weight", ("weight_scale",), _compressed,
             ("weight_shape", "weight_zero_point", "weight_g_idx", "weight_global_scale", *_INPUTS)),
    _Packing("scaled", "weight", "weight", ("weight_scale", "weight_scale_inv"), _scaled,
             ("weight_scale_2", "weight_zero_point", "weight_shape", *_INPUTS)),
    _Packing("torchao", "_weight_qdata", "weight", ("_weight_scale",), _scaled, ("_weight_zero_point",)),
    _Packing("quanto", "weight._data", "weight", ("weight._scale",), _scaled, _INPUTS),
    _Packing("quanto", "weight._data._data", "weight", ("weight._scale",), _quanto, ("weight._shift", *_INPUTS)),
    *(_Packing("torch.ao", main, "weight", ("scale",), _quantized_tensor, ("zero_point",))
      for main in ("weight", "_packed_params._packed_params.0")),
    _Packing("MXFP4", "_blocks", "", ("_scales",), _blocks),
    _Packing("onnxruntime", "_quantized", "", ("_scale",), _whole, ("_zero_point",), ("onnx",)),
    *(_Packing("onnxruntime", end, "", ("_scales",), _blocks, ("_zero_points",), ("onnx",))
      for end in ("_Q4", "_Q4G32", "_Q4G64", "_Q4G128")),
)  # fmt: skip


# The end of a name -> the packing, whose shapes its tensors do not have.
_UNREAD = {".W_q": "HQQ", "._weight_qdata": "torchao", "._data": "quanto", ".scale_packed": "Marlin 2:4",
           ".workspace": "Marlin", ".bitmask": "2:4 sparse", ".codebooks": "AQLM"}  # fmt: skip


def unread(tensors: Iterable[StoredTensor], method: str = "") -> str:
    """Return the packings for tensors that stay as they are, by their names, else the configuration's method."""
    tensors = list(tensors)
    suffixes = dict.fromkeys(name for tensor in tensors for end, name in _UNREAD.items() if tensor.name.endswith(end))
    dtypes = ("int8", "int32", "float8")
    is_packed = any(len(tensor.shape) > 1 and tensor.dtype.lstrip("u").startswith(dtypes) for tensor in tensors)
    is_unread = is_packed and not any(tensor.packing for tensor in tensors)
    return ", ".join(suffixes) or (method if is_unread else "")


def unpacked(tensors: Iterable[StoredTensor], values: Mapping[str, bytes], form: str) -> tuple[StoredTensor, ...]:
    """Return the tensors with each quantized weight as one tensor; those that belong to no weight stay."""
    by_name = {tensor.name: tensor for tensor in tensors}
    for packing in _PACKINGS:
        for end in packing.needs if form in packing.forms else ():
            for name in [name for name in by_name if name.endswith(end)]:
                _unite(by_name, packing, name[: len(name) - len(end)], values)
    return tuple(by_name.values())


def _unite(by_name: dict[str, StoredTensor], packing: _Packing, front: str, values: Mapping[str, bytes]) -> None:
    if front and packing.weight and not front.endswith("."):
        return  # `my_weight_scale` is no `weight_scale`
    ends = dict.fromkeys((packing.main, *packing.needs, *packing.also))
    parts = {end: by_name[front + end] for end in ends if front + end in by_name}
    if packing.main not in parts:
        return
    weight = packing.unpacked(parts, values)
    name = front + packing.weight
    if weight is None or (name in by_name and packing.main != packing.weight):
        return
    (dtype, shape), main = weight, parts[packing.main]
    if not is_size(math.prod(shape)):
        return
    united = replace(main, name=name, dtype=dtype, shape=shape, params=math.prod(shape), packing=packing.name,
                     bytes=sum(part.bytes for part in parts.values()), tensors=len(parts))  # fmt: skip
    for end in parts:
        if end != packing.main or name != main.name:
            del by_name[front + end]
    by_name[name] = united
