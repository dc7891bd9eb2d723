"""Known GPUs: the memory that CUDA offers, which is less than the nominal size, compute capability and peak rates.

Memory is torch's "total capacity" where a source has it, else the total of nvidia-smi, which may be up to 1 GiB
more. It varies with the driver; `--budget` sets it exactly. Peak FLOP/s are dense, and for tensor cores with sums in
fp32; of several products with one name the source names the one that is meant.
"""

from dataclasses import dataclass

from bertscope.errors import SelectionError, suggestion
from bertscope.reports.memory import Gpu
from bertscope.units import BF16

_GIB, _MIB = 2**30, 2**20
_ISSUE = "capacity reported by torch, in GitHub issue "
_SMI = "nvidia-smi, GitHub issue "
Capability = tuple[int, int]


@dataclass(frozen=True)
class _Row:
    """A GPU with its rates in the units of data sheets; 0 for a rate without a source."""

    memory_bytes: float
    memory_source: str
    capability: Capability  # NVIDIA, CUDA GPU Compute Capability
    rates_source: str = ""
    fp32_tflops: float = 0  # TFLOP/s without tensor cores
    half_tflops: float = 0  # TFLOP/s in fp16, and from capability 8.0 in bf16 too
    bandwidth_gb_per_second: float = 0  # of memory


_ROWS = {
    "k80": _Row(11.17 * _GIB, _ISSUE + "lllyasviel/Fooocus 2436 (one of its two halves)", (3, 7),
                "Tesla K80 data sheet, halved", 4.37, 0, 240),
    "t4": _Row(14.56 * _GIB, _ISSUE + "Zheng-Chong/CatVTON 133", (7, 5), "T4 product brief", 8.1, 65, 320),
    "p100-16gb": _Row(15.90 * _GIB, _ISSUE + "rmokady/CLIP_prefix_caption 7", (6, 0),
                      "Tesla P100 PCIe data sheet (no tensor cores)", 9.3, 0, 732),
    "v100-16gb": _Row(16160 * _MIB, "nvidia-smi, transformers documentation, model memory anatomy", (7, 0),
                      "V100 data sheet (SXM2)", 15.7, 125, 900),
    "v100-32gb": _Row(31.74 * _GIB, _ISSUE + "liucongg/ChatGLM-Finetuning 73", (7, 0),
                      "V100 data sheet (SXM2)", 15.7, 125, 900),
    "titan-x-12gb": _Row(11.91 * _GIB, _ISSUE + "microsoft/Bringing-Old-Photos-Back-to-Life 87", (6, 1),
                         "announcement of the Titan X (Pascal)", 11, 0, 480),
    "gtx-1080-ti": _Row(11171 * _MIB, "total in MiB, GitHub issue fyu/drn 22", (6, 1),
                        "Turing architecture whitepaper", 11.3, 0, 484),
    "rtx-2080-ti": _Row(10.76 * _GIB, _ISSUE + "JDAI-CV/image-captioning 11", (7, 5),
                        "Turing architecture whitepaper (reference clocks)", 13.4, 53.8, 616),
    "rtx-3060-12gb": _Row(11.75 * _GIB, _ISSUE + "Kunhao-Liu/StyleGaussian 12", (8, 6),
                          "published boost clock", 12.7, 0, 360),
    "rtx-3070-8gb": _Row(7.78 * _GIB, _ISSUE + "akshitac8/OW-DETR 46", (8, 6), "published boost clock", 20.3, 0, 448),
    "rtx-3080-10gb": _Row(9.78 * _GIB, _ISSUE + "zai-org/CogVideo 34", (8, 6),
                          "GA102 architecture whitepaper", 29.8, 59.5, 760),
    "rtx-3090": _Row(23.70 * _GIB, _ISSUE + "GaoLii/DSP 10", (8, 6), "GA102 architecture whitepaper", 35.6, 71, 936),
    "rtx-4090": _Row(23.64 * _GIB, _ISSUE + "ali-vilab/VGen 104", (8, 9),
                     "Ada architecture whitepaper", 82.6, 165.2, 1008),
    "a10": _Row(23028 * _MIB, _SMI + "mayooot/detect-gpu 3", (8, 6), "A10 data sheet", 31.2, 125, 600),
    "a30": _Row(23.53 * _GIB, _ISSUE + "google/RB-Modulation 5", (8, 0), "A30 data sheet", 10.3, 165, 933),
    "a40": _Row(44.4 * _GIB, "CUDA driver's total, GitHub issue ollama/ollama 9858", (8, 6),
                "A40 data sheet", 37.4, 149.7, 696),
    "l4": _Row(22.03 * _GIB, _ISSUE + "ArcInstitute/evo2 190", (8, 9),
               "L4 data sheet, without sparsity", 30.3, 121, 300),
    "l40s": _Row(44.42 * _GIB, _ISSUE + "stepfun-ai/Step-Video-T2V 8", (8, 9), "L40S data sheet", 91.6, 362, 864),
    "a100-40gb": _Row(42_298_834_944, "deviceQuery, GitHub pull request bottlerocket-os/bottlerocket 3873", (8, 0),
                      "A100 data sheet", 19.5, 312, 1555),
    "a100-80gb": _Row(79.14 * _GIB, _ISSUE + "lianqi1008/Control-GIC 6", (8, 0),
                      "A100 data sheet (SXM)", 19.5, 312, 2039),
    "h100-80gb": _Row(81559 * _MIB, _SMI + "NVIDIA/nccl 1264", (9, 0),
                      "H100 data sheet (SXM), without sparsity", 67, 989.5, 3350),
    "h200": _Row(143771 * _MIB, _SMI + "sgl-project/sglang 3196", (9, 0),
                 "H200 data sheet (SXM), without sparsity", 67, 989.5, 4800),
    "b200": _Row(178.35 * _GIB, "CUDA device query, GitHub pull request pytorch/ao 4002", (10, 0)),
}  # fmt: skip
GPUS = {
    name: Gpu(name=name, memory_bytes=int(row.memory_bytes), source=row.memory_source) for name, row in _ROWS.items()
}


def capability(card: Gpu) -> Capability | None:
    """Return the compute capability of a GPU; None for one that is not in the table."""
    return _ROWS[card.name].capability if card.name in _ROWS else None


def sdpa_kernel(card: Gpu, dtype: str) -> str:
    """Return the kernel of fused attention that torch chooses on a GPU for a precision; auto: the usual one.

    Below capability 8.0 there is no flash kernel, and the memory-efficient one has no bf16 (torch's sdp_utils.cpp).
    """
    if (capability(card) or (8, 0)) >= (8, 0):
        return "auto"
    return "math" if dtype == BF16.name else "efficient"


def find_gpu(name: str) -> Gpu:
    """Return the GPU of that name in any spelling; raises SelectionError for an unknown one."""
    wanted = name.strip().lower().replace(" ", "-").replace("_", "-")
    if wanted in GPUS:
        return GPUS[wanted]
    alike = [known for known in GPUS if known.startswith(f"{wanted}-")]
    if len(alike) == 1:
        return GPUS[alike[0]]
    several = f"; say which: {', '.join(alike)}" if alike else f"; {suggestion(wanted, GPUS)}"
    raise SelectionError(f"no GPU is known as {name[:40]!r}{several}, or give --budget")
