"""Modules without their memory: a copy whose tensors have shapes, strides and a device, and no bytes."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bertscope.errors import SelectionError
from bertscope.torch_access import nn, torch


@contextmanager
def fake_tensors() -> Iterator[None]:
    """FakeTensorMode, which here does not log the traceback of an operator that fails: the error is told as it is."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    log = logging.getLogger(FakeTensorMode.__module__)
    before, log.disabled = log.disabled, True
    try:
        with FakeTensorMode():
            yield
    finally:
        log.disabled = before


def fake_copy(module: nn.Module) -> Any:
    """The module with every parameter and buffer made anew, on the host as far as torch can see.

    The caller has `fake_tensors` on. Ties stay ties. Raises SelectionError for what Python cannot copy.
    """
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        memo[id(tensor)] = _fake(tensor)
    try:
        return copy.deepcopy(module, memo)
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise SelectionError(f"{type(module).__name__} cannot be copied to be estimated: {error}") from None


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    if nn.parameter.is_lazy(tensor):
        raise SelectionError("a lazy module has no shapes yet; run it once before you estimate it")
    like = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
    return nn.Parameter(like, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else like


def fake_like(tree: Any) -> Any:
    """The same structure with fake tensors on the host for real or meta ones; a tensor that stands twice is one."""
    from torch.utils._pytree import tree_map

    made: dict[int, torch.Tensor] = {}

    def fake(leaf: Any) -> Any:
        """One tensor, or what is none as it is."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in made:
            made[id(leaf)] = _fake(leaf)
        return made[id(leaf)]

    return tree_map(fake, tree)
