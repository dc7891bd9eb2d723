"""Known GPUs.

A GPU has the memory that CUDA offers, which is less than the nominal size, a compute capability and peak rates.

Memory is torch's "total capacity" where a source has it, else the total of nvidia-smi, which may be up to 1 GiB
more. It varies with the driver; `--budget` sets it exactly. Peak FLOP/s are dense, and for tensor cores with sums in
fp32; of several products with one name the source names the one that is meant.

The CUDA context is the memory that a process of torch uses outside its allocator: the driver, and the code of the
kernels, of which torch loads all before version 1.13 and only those that run since then (GitHub pull request
pytorch/pytorch 86509). Sources show it in nvidia-smi before a model is loaded, or in messages of out of memory: it is
what is neither reserved nor free. The messages round to 0.01 GiB, so such a size may be 15 MiB off.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from bertscope.errors import SelectionError, name_of, suggestion
from bertscope.frozen import dataclass
from bertscope.units import BF16, FP16, FP32

_GIB, _MIB = 2**30, 2**20


def _issue(place: str) -> str:
    return f"capacity reported by torch, in GitHub issue {place}"


def _smi(place: str) -> str:
    return f"nvidia-smi, GitHub issue {place}"


def _oom(places: str) -> str:
    return f"out of memory, GitHub issues {places}"


Capability = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU by name, the memory that CUDA offers on it, and the sizes of its CUDA context, published or calibrated."""

    name: str
    memory_bytes: int
    source: str
    context_low_bytes: int = 0
    context_high_bytes: int = 0
    context_source: str = ""  # empty: the range over all GPUs
    calibration: str = ""


@dataclass(frozen=True)
class _Row:
    """A GPU with its rates in the units of data sheets; 0 for a rate without a source."""

    memory_bytes: float
    memory_source: str
    capability: Capability  # NVIDIA, CUDA GPU Compute Capability
    processors: int  # NVIDIA, architecture whitepapers and data sheets
    rates_source: str = ""
    fp32_tflops: float = 0  # TFLOP/s without tensor cores
    half_tflops: float = 0  # TFLOP/s in fp16, and from capability 8.0 in bf16 too
    bandwidth_gb_per_second: float = 0  # of memory


_ROWS = {
    "k80": _Row(11.17 * _GIB, _issue("lllyasviel/Fooocus 2436 (one of its two halves)"), (3, 7), 13,
                "Tesla K80 data sheet, halved", 4.37, 0, 240),
    "t4": _Row(14.56 * _GIB, _issue("Zheng-Chong/CatVTON 133"), (7, 5), 40, "T4 product brief", 8.1, 65, 320),
    "p100-16gb": _Row(15.90 * _GIB, _issue("rmokady/CLIP_prefix_caption 7"), (6, 0), 56,
                      "Tesla P100 PCIe data sheet (no tensor cores)", 9.3, 0, 732),
    "v100-16gb": _Row(16160 * _MIB, "nvidia-smi, transformers documentation, model memory anatomy", (7, 0), 80,
                      "V100 data sheet (SXM2)", 15.7, 125, 900),
    "v100-32gb": _Row(31.74 * _GIB, _issue("liucongg/ChatGLM-Finetuning 73"), (7, 0), 80,
                      "V100 data sheet (SXM2)", 15.7, 125, 900),
    "titan-x-12gb": _Row(11.91 * _GIB, _issue("microsoft/Bringing-Old-Photos-Back-to-Life 87"), (6, 1), 28,
                         "announcement of the Titan X (Pascal)", 11, 0, 480),
    "gtx-1080-ti": _Row(11171 * _MIB, "total in MiB, GitHub issue fyu/drn 22", (6, 1), 28,
                        "Turing architecture whitepaper", 11.3, 0, 484),
    "rtx-2080-ti": _Row(10.76 * _GIB, _issue("JDAI-CV/image-captioning 11"), (7, 5), 68,
                        "Turing architecture whitepaper (reference clocks)", 13.4, 53.8, 616),
    "rtx-3060-12gb": _Row(11.75 * _GIB, _issue("Kunhao-Liu/StyleGaussian 12"), (8, 6), 28,
                          "published boost clock", 12.7, 0, 360),
    "rtx-3070-8gb": _Row(7.78 * _GIB, _issue("akshitac8/OW-DETR 46"), (8, 6), 46,
                         "published boost clock", 20.3, 0, 448),
    "rtx-3080-10gb": _Row(9.78 * _GIB, _issue("zai-org/CogVideo 34"), (8, 6), 68,
                          "GA102 architecture whitepaper", 29.8, 59.5, 760),
    "rtx-3090": _Row(23.70 * _GIB, _issue("GaoLii/DSP 10"), (8, 6), 82, "GA102 architecture whitepaper", 35.6, 71, 936),
    "rtx-4090": _Row(23.64 * _GIB, _issue("ali-vilab/VGen 104"), (8, 9), 128,
                     "Ada architecture whitepaper", 82.6, 165.2, 1008),
    "a10": _Row(23028 * _MIB, _smi("mayooot/detect-gpu 3"), (8, 6), 72, "A10 data sheet", 31.2, 125, 600),
    "a30": _Row(23.53 * _GIB, _issue("google/RB-Modulation 5"), (8, 0), 56, "A30 data sheet", 10.3, 165, 933),
    "a40": _Row(44.4 * _GIB, "CUDA driver's total, GitHub issue ollama/ollama 9858", (8, 6), 84,
                "A40 data sheet", 37.4, 149.7, 696),
    "l4": _Row(22.03 * _GIB, _issue("ArcInstitute/evo2 190"), (8, 9), 58,
               "L4 data sheet, without sparsity", 30.3, 121, 300),
    "l40s": _Row(44.42 * _GIB, _issue("stepfun-ai/Step-Video-T2V 8"), (8, 9), 142, "L40S data sheet", 91.6, 362, 864),
    "a100-40gb": _Row(42_298_834_944,
                      "deviceQuery, GitHub pull request bottlerocket-os/bottlerocket 3873",
                      (8, 0), 108, "A100 data sheet", 19.5, 312, 1555),
    "a100-80gb": _Row(79.14 * _GIB, _issue("lianqi1008/Control-GIC 6"), (8, 0), 108,
                      "A100 data sheet (SXM)", 19.5, 312, 2039),
    "h100-80gb": _Row(81559 * _MIB, _smi("NVIDIA/nccl 1264"), (9, 0), 132,
                      "H100 data sheet (SXM), without sparsity", 67, 989.5, 3350),
    "h200": _Row(143771 * _MIB, _smi("sgl-project/sglang 3196"), (9, 0), 132,
                 "H200 data sheet (SXM), without sparsity", 67, 989.5, 4800),
    "b200": _Row(178.35 * _GIB, "CUDA device query, GitHub pull request pytorch/ao 4002",
                  (10, 0), 148),
}  # fmt: skip
_OF_A100 = "nvidia-smi of a model of 4,093 parameters (3,000 runs: at least 1,443 MiB)"
_OF_V100 = "pytorch/pytorch 20532 (16 GB, torch 1.1)"
_XMEM = "runs of xMem (Middleware 2025), the memory of the process less what torch has reserved"
_ANATOMY = "transformers documentation, model memory anatomy"
# The lowest and the highest CUDA context of a GPU that was published, in MiB, and the source of each.
_CONTEXTS = {
    "k80": (293, 311, _oom("microsoft/unilm 137 and YuvalNirkin/fsgan 20 (both 2020)")),
    "t4": (135, 1083, _oom("Zheng-Chong/CatVTON 133 (2025), leeesangwon/PyTorch-Image-Retrieval 19 (2021)")),
    "p100-16gb": (809, 1081, _oom("openai/jukebox 145 (2020), googlecolab/colabtools 2860 (2022)")),
    "v100-16gb": (300, 1343, f"GitHub issue {_OF_V100}; {_ANATOMY}"),
    "v100-32gb": (300, 1352, f"GitHub issue {_OF_V100}; {_oom('IndoNLP/indonlu 35 (2021)')}"),
    "gtx-1080-ti": (630, 630, _oom("huggingface/sentence-transformers 57 (2019)")),
    "rtx-2080-ti": (877, 1343, f"GitHub issue pytorch/pytorch 49877 (torch 1.6); {_oom('ispc-lab/TMA 5 (2024)')}"),
    "rtx-3090": (256, 1486, "GitHub issue pytorch/pytorch 49877 (torch 1.7); invoke-ai/InvokeAI 9413 (torch 2.7)"),
    "rtx-3060-12gb": (141, 1486, f"{_XMEM} (at most 141 MiB); as an rtx-3090 at most"),
    "rtx-a4000": (210, 210, _oom("DengKaiCQ/VGGT-Long 6 (2025)")),
    "a10g": (282, 282, _oom("meta-pytorch/torchtune 229 (2024)")),
    "rtx-4060": (106, 115, f"{_XMEM} (at most 106 MiB); {_oom('ESRSchao/EdgeRegNet 2 (2025)')}"),
    "rtx-4090": (450, 504, _oom("Soul-AILab/SoulX-FlashTalk 5 (2026), 3DTopia/Phidias-Diffusion 8 (2025)")),
    "l40": (507, 507, _oom("QwenLM/Qwen3-VL 2097 (2026)")),
    "h200": (763, 779, "measured in this project, torch 2.11 and driver 580 (2026), in fp32 and in 16 bits"),
    "a100-40gb": (501, 1451, f"{_oom('TianheWu/CoSeR 10 (2025)')}; {_OF_A100}"),
    "a100-80gb": (409, 1451, f"{_oom('HiDream-ai/VAREdit 6 (2025)')}; {_OF_A100}"),
}  # fmt: skip
# Cards of that table which are not in the first one: their contexts are those of their compute capability.
_OTHERS: dict[str, Capability] = {"rtx-a4000": (8, 6), "a10g": (8, 6), "rtx-4060": (8, 9), "l40": (8, 9)}
# The range over all GPUs with a published context, for those without one of their compute capability.
CONTEXT_BYTES = (
    min(low for low, _, _ in _CONTEXTS.values()) * _MIB, max(high for _, high, _ in _CONTEXTS.values()) * _MIB
)  # fmt: skip


def _context(name: str, row: _Row) -> tuple[int, int, str]:
    """Return the CUDA context of a GPU in MiB, and its source: its own, that of its compute capability, or of all.

    A single figure of another card is no range.
    """
    if name in _CONTEXTS:
        return _CONTEXTS[name]
    known = _OTHERS | {card: other.capability for card, other in _ROWS.items()}
    alike = [card for card in _CONTEXTS if known[card] == row.capability]
    least, most = (choose(alike, key=lambda card: _CONTEXTS[card][at], default="")
                   for at, choose in enumerate((min, max)))  # fmt: skip
    if not alike or _CONTEXTS[least][0] == _CONTEXTS[most][1]:
        return CONTEXT_BYTES[0] // _MIB, CONTEXT_BYTES[1] // _MIB, ""
    source = f"GPUs of its compute capability: {least}, {_CONTEXTS[least][2]}; {most}, {_CONTEXTS[most][2]}"
    return _CONTEXTS[least][0], _CONTEXTS[most][1], source


GPUS = {
    name: Gpu(
        name=name, memory_bytes=int(row.memory_bytes), source=row.memory_source, context_low_bytes=low * _MIB,
        context_high_bytes=high * _MIB, context_source=source,
    )
    for name, row in _ROWS.items() for low, high, source in [_context(name, row)]
}  # fmt: skip


def capability(card: Gpu) -> Capability | None:
    """Return the compute capability of a GPU; None for one that is not in the table."""
    return _ROWS[card.name].capability if card.name in _ROWS else None


def processors(card: Gpu) -> int | None:
    """Return the number of a GPU's multiprocessors; None for one that is not in the table."""
    return _ROWS[card.name].processors if card.name in _ROWS else None


def card_threads(card: Gpu) -> int | None:
    """Return the threads that a GPU runs at once; None for one that is not in the table.

    Of a processor it runs 2,048, from 7.5 on 1,024 and from 8.6 on 1,536, but 2,048 with capability 8.0, 9.0 and 10.0
    (NVIDIA, CUDA C++ Programming Guide, technical specifications per compute capability).
    """
    row = _ROWS.get(card.name)
    if row is None:
        return None
    return row.processors * {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}.get(row.capability, 2048)


# Where cuDNN's attention is the first choice in 16 bits, in torch 2.5.0 and from 2.9 on with a cuDNN that is new
# enough, as the wheels from 2.11 on have it: check_prefer_cudnn_attention in sdp_utils.cpp, measured on an H200.
_CUDNN_FIRST = ((9, 0), (10, 0))


def sdpa_kernel(card: Gpu, dtype: str) -> str:
    """Return the kernel of fused attention that torch chooses on a GPU for a precision; auto: the usual one.

    Below capability 8.0 there is no flash kernel, and the memory-efficient one has no bf16 (torch's sdp_utils.cpp).
    """
    if capability(card) in _CUDNN_FIRST and dtype != FP32.name:
        return "cudnn"
    if (capability(card) or (8, 0)) >= (8, 0):
        return "auto"
    return "math" if dtype == BF16.name else "efficient"


def half_precision(card: Gpu | None) -> str:
    """Return the 16-bit type to try on a GPU: bf16 from capability 8.0 on, below it fp16.

    Tensor cores compute in bf16 from capability 8.0 on (NVIDIA, CUDA C++ Programming Guide, compute capabilities).
    """
    return BF16.name if card is None or (capability(card) or (8, 0)) >= (8, 0) else FP16.name


def find_gpu(name: str) -> Gpu:
    """Return the GPU of that name in any spelling; raises SelectionError for an unknown one."""
    wanted = name.strip().lower().replace(" ", "-").replace("_", "-")
    if wanted in GPUS:
        return GPUS[wanted]
    alike = [known for known in GPUS if known.startswith(f"{wanted}-")]
    if len(alike) == 1:
        return GPUS[alike[0]]
    hint = f"say which: {', '.join(alike)}" if alike else suggestion(wanted, GPUS)
    hint = f"{hint} or" if hint.endswith("?") else f"{hint}; or"
    raise SelectionError(
        f"no GPU is known as {name[:40]!r}; {hint} give its memory, {name_of('budget')} 16GiB with "
        f"{name_of('device')} cuda"
    )


# Words of a device's name that make it another product than the one of the table, unless its row has them.
_VARIANTS = {"ti", "super", "laptop", "max", "mobile", "mig", "nvl", "pcie", "d"}


def find_device(name: str, memory_bytes: int) -> Gpu | None:
    """Return the GPU with the name that torch gives (`NVIDIA A100-SXM4-80GB`) and this memory; None for others."""
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    for key, row in _ROWS.items():
        own = {word for word in key.split("-") if not re.fullmatch(r"[0-9]+gb", word, re.ASCII)}
        allowed = own | set(re.split(r"[^a-z0-9]+", row.rates_source.lower()))
        is_it = own <= words and not (words & _VARIANTS) - allowed
        if is_it and abs(memory_bytes / row.memory_bytes - 1) < 0.1:
            return GPUS[key]
    return None


def peak_flops(card: Gpu, precision: str) -> tuple[float, str] | None:
    """Return the dense peak of a GPU in FLOP/s and its source; None without a published one.

    That of fp32 is without tensor cores.
    """
    row = _ROWS.get(card.name)
    is_half = precision in (BF16.name, FP16.name)
    if row is None or (precision == BF16.name and row.capability < (8, 0)) or not (is_half or precision == FP32.name):
        return None
    tflops = row.half_tflops if is_half else row.fp32_tflops
    return (tflops * 1e12, row.rates_source) if tflops else None


def bandwidth(card: Gpu) -> float | None:
    """Return the memory bandwidth of a GPU in bytes per second by its data sheet; None without a published one."""
    row = _ROWS.get(card.name)
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
