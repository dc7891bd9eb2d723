"""Known GPUs: the memory that CUDA offers, which is less than the nominal size, and the compute capability.

Memory is torch's "total capacity" where a source has it, else the total of nvidia-smi, which may be up to 1 GiB
more. It varies with the driver; `--budget` sets it exactly. The compute capability is that of NVIDIA's table.
"""

from __future__ import annotations

from bertscope.errors import SelectionError, suggestion
from bertscope.reports.memory import Gpu
from bertscope.units import BF16

_GIB, _MIB = 2**30, 2**20
_ISSUE = "torch's total capacity, GitHub issue "
_SMI = "nvidia-smi, GitHub issue "
Capability = tuple[int, int]
_ROWS: dict[str, tuple[float, str, Capability]] = {  # memory in bytes, its source, compute capability
    "k80": (11.17 * _GIB, _ISSUE + "lllyasviel/Fooocus 2436 (one of its two halves)", (3, 7)),
    "t4": (14.56 * _GIB, _ISSUE + "Zheng-Chong/CatVTON 133", (7, 5)),
    "p100-16gb": (15.90 * _GIB, _ISSUE + "rmokady/CLIP_prefix_caption 7", (6, 0)),
    "v100-16gb": (16160 * _MIB, "nvidia-smi, transformers documentation, model memory anatomy", (7, 0)),
    "v100-32gb": (31.74 * _GIB, _ISSUE + "liucongg/ChatGLM-Finetuning 73", (7, 0)),
    "titan-x-12gb": (11.91 * _GIB, _ISSUE + "microsoft/Bringing-Old-Photos-Back-to-Life 87", (6, 1)),
    "rtx-2080-ti": (10.76 * _GIB, _ISSUE + "JDAI-CV/image-captioning 11", (7, 5)),
    "rtx-3060-12gb": (11.75 * _GIB, _ISSUE + "Kunhao-Liu/StyleGaussian 12", (8, 6)),
    "rtx-3080-10gb": (9.78 * _GIB, _ISSUE + "zai-org/CogVideo 34", (8, 6)),
    "rtx-3090": (23.70 * _GIB, _ISSUE + "GaoLii/DSP 10", (8, 6)),
    "rtx-4090": (23.64 * _GIB, _ISSUE + "ali-vilab/VGen 104", (8, 9)),
    "a10": (23028 * _MIB, _SMI + "mayooot/detect-gpu 3", (8, 6)),
    "l4": (22.03 * _GIB, _ISSUE + "ArcInstitute/evo2 190", (8, 9)),
    "a100-40gb": (42_298_834_944, "deviceQuery, GitHub pull request bottlerocket-os/bottlerocket 3873", (8, 0)),
    "a100-80gb": (79.14 * _GIB, _ISSUE + "lianqi1008/Control-GIC 6", (8, 0)),
    "h100-80gb": (81559 * _MIB, _SMI + "NVIDIA/nccl 1264", (9, 0)),
    "h200": (143771 * _MIB, _SMI + "sgl-project/sglang 3196", (9, 0)),
}
GPUS = {name: Gpu(name=name, memory_bytes=int(memory), source=source) for name, (memory, source, _) in _ROWS.items()}


def capability(card: Gpu) -> Capability | None:
    """Return the compute capability of a GPU; None for one that is not in the table."""
    return _ROWS[card.name][2] if card.name in _ROWS else None


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
