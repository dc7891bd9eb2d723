"""What a CUDA device says of a step by itself: the allocator's peaks, what is reserved, and the rest of the card."""

from __future__ import annotations

from bertscope.analyses.memory.step import Step
from bertscope.reports.memory import DeviceTerms
from bertscope.torch_access import torch


def device_terms(step: Step) -> DeviceTerms:
    """Run one step and read the allocator's own statistics; the step's optimizer state must be there."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step.run()
    torch.cuda.synchronize()
    free, whole = torch.cuda.mem_get_info()
    context = max(whole - free - torch.cuda.memory_reserved(), 0)  # with other processes' memory, if there are any
    return DeviceTerms(
        allocated_bytes=torch.cuda.max_memory_allocated(),
        workspace_bytes=0,  # in what is allocated already
        reserved_bytes=torch.cuda.max_memory_reserved(),
        context_low_bytes=context,
        context_high_bytes=context,
    )
