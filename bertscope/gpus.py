"""Known GPUs.

A GPU has the memory that CUDA offers, which is less than the nominal size, a compute capability and peak rates: the
table is gpus.json, each figure with its source.

Memory is torch's "total capacity" where a source has it, else the total of nvidia-smi, which may be up to 1 GiB
more. It varies with the driver; `--budget` sets it exactly. Peak FLOP/s are dense, and for tensor cores with sums in
fp32; of several products with one name the source names the one that is meant.

The CUDA context is the memory that a process of torch uses outside its allocator: the driver, and the code of the
kernels, of which torch loads all before version 1.13 and only those that run since then (GitHub pull request
pytorch/pytorch 86509). Sources show it in nvidia-smi before a model is loaded, or in messages of out of memory: it is
what is neither reserved nor free. The messages round to 0.01 GiB, so such a size may be 15 MiB off.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from bertscope.errors import SelectionError, name_of, suggestion
from bertscope.frozen import Record
from bertscope.units import BF16, FP16, FP32

_MIB = 2**20
_UNITS = {"gib": 2**30, "mib": _MIB, "bytes": 1}  # of memory in the table
Capability = tuple[int, int]


class Gpu(Record):
    """A GPU by name, the memory that CUDA offers on it, and the sizes of its CUDA context, published or calibrated."""

    name: str
    memory_bytes: int
    source: str
    context_low_bytes: int = 0
    context_high_bytes: int = 0
    context_source: str = ""  # empty: the range over all GPUs
    calibration: str = ""


class _Row(Record, kw_only=False):
    """A GPU with its rates in the units of data sheets; 0 for a rate without a source."""

    memory_bytes: float
    memory_source: str
    capability: Capability  # NVIDIA, CUDA GPU Compute Capability
    processors: int  # NVIDIA, architecture whitepapers and data sheets
    rates_source: str = ""
    fp32_tflops: float = 0  # TFLOP/s without tensor cores
    half_tflops: float = 0  # TFLOP/s in fp16, and from capability 8.0 in bf16 too
    bandwidth_gb_per_second: float = 0  # of memory


def _row(*, source: str, capability: list[int], processors: int, **rates: Any) -> _Row:
    (memory,) = (rates.pop(unit) * size for unit, size in _UNITS.items() if unit in rates)
    return _Row(memory, source, (capability[0], capability[1]), processors, **rates)


_TABLE = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
_ROWS = {name: _row(**row) for name, row in _TABLE["gpus"].items()}
# The lowest and the highest CUDA context of a GPU that was published, in MiB, and the source of each.
_CONTEXTS: dict[str, list[Any]] = _TABLE["contexts_mib"]
# The GPU of a cloud's instance, by the beginning of its name.
_INSTANCES: dict[str, str] = {key: gpu for rows in _TABLE["instances"].values() for key, gpu in rows.items()}
# Words that nvidia-smi, torch and clouds add to a name; a GPU is known without them.
_ADDED = {"nvidia", "geforce", "tesla", "sxm", "sxm2", "sxm3", "sxm4", "sxm5", "pcie", "generation", "gpu",
          "blackwell", "workstation", "server", "edition", "hbm3", "mega", "pascal", "1x", "small", "medium", "large",
          "colab", "kaggle"}  # fmt: skip
# The range over all GPUs with a published context, for those without one of their compute capability.
_LOWS, _HIGHS, _ = zip(*_CONTEXTS.values(), strict=True)
CONTEXT_BYTES: tuple[int, int] = min(_LOWS) * _MIB, max(_HIGHS) * _MIB


def _context(name: str, row: _Row) -> tuple[int, int, str]:
    """Return a GPU's CUDA context in MiB, and its source: the GPU, its compute capability, or all GPUs.

    A single figure is no range.
    """
    low, high, published = _CONTEXTS.get(name, (0, 0, ""))
    if low < high:
        return low, high, published
    alike = [gpu for gpu in _CONTEXTS if _ROWS[gpu].capability == row.capability]
    least = min(alike, key=lambda gpu: _CONTEXTS[gpu][0], default="")
    most = max(alike, key=lambda gpu: _CONTEXTS[gpu][1], default="")
    if not alike or _CONTEXTS[least][0] == _CONTEXTS[most][1]:
        return CONTEXT_BYTES[0] // _MIB, CONTEXT_BYTES[1] // _MIB, ""
    source = f"GPUs of its compute capability: {least}, {_CONTEXTS[least][2]}; {most}, {_CONTEXTS[most][2]}"
    return _CONTEXTS[least][0], _CONTEXTS[most][1], source


COMMON = "t4"  # the GPU that free notebooks have
GPUS = {
    name: Gpu(
        name=name, memory_bytes=int(row.memory_bytes), source=row.memory_source, context_low_bytes=low * _MIB,
        context_high_bytes=high * _MIB, context_source=source,
    )
    for name, row in _ROWS.items() for low, high, source in [_context(name, row)]
}  # fmt: skip


def capability(gpu: Gpu) -> Capability | None:
    """Return a GPU's compute capability; None outside the table."""
    return _ROWS[gpu.name].capability if gpu.name in _ROWS else None


def processors(gpu: Gpu) -> int | None:
    """Return a GPU's multiprocessor count; None outside the table."""
    return _ROWS[gpu.name].processors if gpu.name in _ROWS else None


def gpu_threads(gpu: Gpu) -> int | None:
    """Return the threads that a GPU runs at once; None for one that is not in the table.

    Of a processor it runs 2,048, from 7.5 on 1,024 and from 8.6 on 1,536, but 2,048 with capability 8.0, 9.0 and 10.0
    (NVIDIA, CUDA C++ Programming Guide, technical specifications per compute capability).
    """
    row = _ROWS.get(gpu.name)
    if row is None:
        return None
    return row.processors * {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}.get(row.capability, 2048)


# Where cuDNN's attention is the first choice in 16 bits, in torch 2.5.0 and from 2.9 on with a cuDNN that is new
# enough, as the wheels from 2.11 on have it: check_prefer_cudnn_attention in sdp_utils.cpp, measured on an H200.
_CUDNN_FIRST = ((9, 0), (10, 0))


def sdpa_kernel(gpu: Gpu, dtype: str) -> str:
    """Return the kernel of fused attention that torch chooses on a GPU for a precision; auto: the usual one.

    Below capability 8.0 there is no flash kernel, and the memory-efficient one has no bf16 (torch's sdp_utils.cpp).
    """
    if capability(gpu) in _CUDNN_FIRST and dtype != FP32.name:
        return "cudnn"
    if (capability(gpu) or (8, 0)) >= (8, 0):
        return "auto"
    return "math" if dtype == BF16.name else "efficient"


def half_precision(gpu: Gpu | None) -> str:
    """Return the 16-bit type to try on a GPU: bf16 from capability 8.0 on, below it fp16.

    Tensor cores compute in bf16 from capability 8.0 on (NVIDIA, CUDA C++ Programming Guide, compute capabilities).
    """
    return BF16.name if gpu is None or (capability(gpu) or (8, 0)) >= (8, 0) else FP16.name


def find_gpu(name: str) -> Gpu:
    """Return the GPU of that name in any spelling; raises SelectionError for an unknown one."""
    spelling = re.sub(r"[\s_()]+", "-", name.strip().lower()).removesuffix("x1")
    instance = next((gpu for pattern, gpu in _INSTANCES.items() if re.match(rf"(ml\.)?{pattern}", spelling)), "")
    spelling = spelling.replace("mobile", "laptop")
    spelling = re.sub(r"(?<=[0-9])(?=ti|super)|(?<=rtx|gtx)(?=[0-9])", "-", spelling)  # rtx4060ti
    wanted = instance or "-".join(word for word in spelling.split("-") if word not in {"", *_ADDED})
    sized = re.fullmatch(r"(.+)-([0-9]{1,3})-?gb?", wanted, re.ASCII)  # A10G 24GB, where there is one size
    if sized and sized[1] in GPUS and abs(GPUS[sized[1]].memory_bytes / int(sized[2]) / 2**30 - 1) < 0.1:
        wanted = sized[1]
    sizes = [gpu for gpu in GPUS if re.fullmatch(rf"([rg]tx-)?{re.escape(wanted)}(-[0-9]+gb)?", gpu)]
    if wanted in GPUS or len(sizes) == 1:
        return GPUS[wanted if wanted in GPUS else sizes[0]]
    if "," in name:
        raise SelectionError(f"this command takes one GPU, and fit takes several; got {name[:40]!r}")
    if re.fullmatch("[0-9]+", spelling):
        count = f"{name_of('world_size')} {spelling[:9]} is the number of GPUs"
        raise SelectionError(f"unknown GPU {name[:40]!r}; give a name such as t4 ({count})")
    budget = f"give 'fit' or 'plan' its memory, {name_of('budget')} 16GiB with {name_of('device')} cuda"
    if re.fullmatch(_TABLE["not_modelled"], wanted):
        raise SelectionError(f"GPU {name[:40]!r} is not modelled: only NVIDIA's are; {budget}")
    alike = [gpu for gpu in GPUS if gpu.endswith("-laptop") == ("laptop" in wanted)]  # its memory is another
    near = suggestion(wanted, alike)  # all GPUs, too many to name, where none is near
    near = f"{near} Or {budget}" if near.endswith("?") else f"use a name such as t4, or {budget}"
    hint = f"say which: {', '.join(sizes)}" if sizes else near
    raise SelectionError(f"unknown GPU {name[:40]!r}; {hint}")


def typed_prices(text: str) -> dict[str, float]:
    """Return the price of an hour of each GPU in `t4=0.35,l4=0.71`; raises SelectionError for any other text."""
    pair_form = r"\s*([^=]+)=\s*([0-9]{1,6}(?:\.[0-9]{1,9})?|\.[0-9]{1,9})\s*"
    pairs = [re.fullmatch(pair_form, part, re.ASCII) for part in text.split(",")]
    prices = {find_gpu(pair[1]).name: float(pair[2]) for pair in pairs if pair and float(pair[2])}
    if len(prices) < len(pairs):
        raise SelectionError(f"write prices such as t4=0.35,l4=0.71, each GPU once, or a YAML file; got {text[:40]!r}")
    return prices


# Words of a device's name that make it another product than the one of the table, unless its row has them.
_VARIANTS = {"ti", "super", "laptop", "max", "mobile", "mig", "nvl", "pcie", "d"}


def find_device(name: str, memory_bytes: int) -> Gpu | None:
    """Return the GPU with the name that torch gives (`NVIDIA A100-SXM4-80GB`) and this memory; None for others."""
    parts = set(re.split(r"[^a-z0-9]+", name.lower()))
    for key, row in _ROWS.items():
        model = {word for word in key.split("-") if not re.fullmatch(r"[0-9]+gb", word, re.ASCII)}
        allowed = model | set(re.split(r"[^a-z0-9]+", row.rates_source.lower()))
        is_it = model <= parts and not (parts & _VARIANTS) - allowed
        if is_it and abs(memory_bytes / row.memory_bytes - 1) < 0.1:
            return GPUS[key]
    return None


def peak_flops(gpu: Gpu, precision: str) -> tuple[float, str] | None:
    """Return a GPU's dense peak in FLOP/s and its source; None without a published one.

    The fp32 peak is without tensor cores.
    """
    row = _ROWS.get(gpu.name)
    is_half = precision in (BF16.name, FP16.name)
    if row is None or (precision == BF16.name and row.capability < (8, 0)) or not (is_half or precision == FP32.name):
        return None
    tflops = row.half_tflops if is_half else row.fp32_tflops
    return (tflops * 1e12, row.rates_source) if tflops else None


def bandwidth(gpu: Gpu) -> float | None:
    """Return a GPU's memory bandwidth in bytes per second by its data sheet; None without a published one."""
    row = _ROWS.get(gpu.name)
    return row.bandwidth_gb_per_second * 1e9 if row and row.bandwidth_gb_per_second else None


def may_have_cuda() -> bool:
    """Return False if torch was built for CPUs or if no driver of a GPU is installed."""
    from importlib.metadata import version

    if "+cpu" in version("torch"):
        return False
    import ctypes

    for name in ("libcuda.so.1", "nvcuda.dll"):
        with suppress(OSError):
            return ctypes.CDLL(name) is not None
    return Path("/dev/kfd").exists()  # the driver of ROCm, whose devices torch calls cuda too
