"""Known cards and what CUDA offers of their memory, which is less than is on the box; each with its source.

Where torch's own "total capacity" was found, that is it; else the total that nvidia-smi shows, which may be
up to 1 GiB more. Drivers differ: `--budget` says it for yours.
"""

from __future__ import annotations

from bertscope.errors import SelectionError, suggestion
from bertscope.reports.memory import Gpu

_GIB, _MIB = 2**30, 2**20
_ISSUE = "torch's total capacity, GitHub issue "
_SMI = "nvidia-smi, GitHub issue "


def _gpu(name: str, memory_bytes: float, source: str) -> Gpu:
    return Gpu(name=name, memory_bytes=int(memory_bytes), source=source)


_KNOWN = (
    _gpu("k80", 11.17 * _GIB, _ISSUE + "lllyasviel/Fooocus 2436 (one of its two halves)"),
    _gpu("t4", 14.56 * _GIB, _ISSUE + "Zheng-Chong/CatVTON 133"),
    _gpu("p100-16gb", 15.90 * _GIB, _ISSUE + "rmokady/CLIP_prefix_caption 7"),
    _gpu("v100-16gb", 16160 * _MIB, "nvidia-smi, transformers documentation, model memory anatomy"),
    _gpu("v100-32gb", 31.74 * _GIB, _ISSUE + "liucongg/ChatGLM-Finetuning 73"),
    _gpu("titan-x-12gb", 11.91 * _GIB, _ISSUE + "microsoft/Bringing-Old-Photos-Back-to-Life 87"),
    _gpu("rtx-2080-ti", 10.76 * _GIB, _ISSUE + "JDAI-CV/image-captioning 11"),
    _gpu("rtx-3060-12gb", 11.75 * _GIB, _ISSUE + "Kunhao-Liu/StyleGaussian 12"),
    _gpu("rtx-3080-10gb", 9.78 * _GIB, _ISSUE + "zai-org/CogVideo 34"),
    _gpu("rtx-3090", 23.70 * _GIB, _ISSUE + "GaoLii/DSP 10"),
    _gpu("rtx-4090", 23.64 * _GIB, _ISSUE + "ali-vilab/VGen 104"),
    _gpu("a10", 23028 * _MIB, _SMI + "mayooot/detect-gpu 3"),
    _gpu("l4", 22.03 * _GIB, _ISSUE + "ArcInstitute/evo2 190"),
    _gpu("a100-40gb", 42_298_834_944, "deviceQuery, GitHub pull request bottlerocket-os/bottlerocket 3873"),
    _gpu("a100-80gb", 79.14 * _GIB, _ISSUE + "lianqi1008/Control-GIC 6"),
    _gpu("h100-80gb", 81559 * _MIB, _SMI + "NVIDIA/nccl 1264"),
    _gpu("h200", 143771 * _MIB, _SMI + "sgl-project/sglang 3196"),
)
GPUS = {card.name: card for card in _KNOWN}
# Compute capability below 8.0: no flash kernel, and the memory-efficient one has no bf16 (torch's sdp_utils.cpp).
_BEFORE_AMPERE = {"k80", "t4", "p100-16gb", "v100-16gb", "v100-32gb", "titan-x-12gb", "rtx-2080-ti"}

_HOPPER = {"h100-80gb", "h200"}


def is_hopper(card: Gpu) -> bool:
    """Whether its compute capability is 9.0."""
    return card.name in _HOPPER


def sdpa_kernel(card: Gpu, dtype: str) -> str:
    """The kernel of fused attention that torch takes on a card for `fp32`, `bf16` or `fp16`; auto: the usual one."""
    if card.name not in _BEFORE_AMPERE:
        return "auto"
    return "math" if dtype == "bf16" else "efficient"


def find_gpu(name: str) -> Gpu:
    """The card of that name, however it is written; raises SelectionError for one that is not known."""
    wanted = name.strip().lower().replace(" ", "-").replace("_", "-")
    if wanted in GPUS:
        return GPUS[wanted]
    alike = [known for known in GPUS if known.startswith(f"{wanted}-")]
    if len(alike) == 1:
        return GPUS[alike[0]]
    several = f"; say which: {', '.join(alike)}" if alike else f"; {suggestion(wanted, GPUS)}"
    raise SelectionError(f"no card is known as {name[:40]!r}{several}, or give --budget")
