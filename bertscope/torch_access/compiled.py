"""Inductor's programs without their kernels, which need no C++ compiler.

A program that inductor writes for a graph allocates its buffers by `empty_strided_cpu`, calls a kernel for each group
of fused operators, and frees each buffer after its last use. On fake tensors it runs with kernels that do nothing.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from bertscope.torch_access import always, torch


@contextmanager
def inductor_without_kernels() -> Iterator[None]:
    """Have inductor write its programs with kernels that do nothing, for fake tensors; nothing of them is kept.

    Raises AttributeError or ImportError in a version of torch that has other names.
    """

    from torch._C._dynamo import guards
    from torch._inductor import async_compile, codecache, config, cpu_vec_isa

    def empty(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype)

    def view(tensor: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
        return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)

    # Nothing is read from a cache or written to it.
    settings = {"force_disable_caches": True, "compile_threads": 1}
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "dynamo_pgo")  # it says that the caches are disabled
        log = logging.getLogger("torch._higher_order_ops.wrap")  # it warns of operators in place where some are kept
        stack.enter_context(patch.object(log, "disabled", True))
        stack.callback(codecache.PyCodeCache.cache_clear)
        stack.callback(torch._dynamo.reset)
        torch._dynamo.reset()
        for owner, name, value in (
            (async_compile.AsyncCompile, "cpp_pybinding", always(always(None))),
            (cpu_vec_isa, "valid_vec_isa_list", list),  # else it compiles C++ for each instruction set, 7 s
            (guards, "_empty_strided_cpu", empty),
            (guards, "_reinterpret_tensor", view),
        ):
            stack.enter_context(patch.object(owner, name, value))
        stack.enter_context(config.patch(settings))
        yield
