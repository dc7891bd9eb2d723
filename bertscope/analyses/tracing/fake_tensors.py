"""Modules without their memory: a copy whose tensors have shapes, strides and a device, and no bytes."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from bertscope.errors import BertscopeError, SelectionError
from bertscope.sources.model_source import ModelSource
from bertscope.torch_access import fake_tensor_mode, nn, operator_name, torch, tree_map, value_errors

_Found = TypeVar("_Found")
# The attention kernel to run on meta: transformers' sdpa looks at values, and the matrix products are the same.
META_ATTENTION = "eager"


@contextmanager
def fake_tensors() -> Iterator[None]:
    """FakeTensorMode, which here does not log the traceback of an operator that fails: the error is told as it is."""
    mode = fake_tensor_mode()
    log = logging.getLogger(type(mode).__module__)
    before, log.disabled = log.disabled, True
    try:
        with mode:
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
    made: dict[int, torch.Tensor] = {}

    def fake(leaf: Any) -> Any:
        """One tensor, or what is none as it is."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in made:
            made[id(leaf)] = _fake(leaf)
        return made[id(leaf)]

    return tree_map(fake, tree)


def on_meta(tree: Any) -> Any:
    """Return the same structure with tensors on meta."""
    return tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf, tree)


def run_without_values(
    source: ModelSource, model: nn.Module, inputs: Any, run: Callable[[nn.Module, Any], _Found]
) -> _Found:
    """Return what `run` returns for a source's model on meta, with the tensors that its forward makes on meta too.

    Where that fails, run the model on fake CPU tensors: a program may take the CPU for its device there, and
    transformers 5 knows not to ask whether a mask is all ones.
    """
    with source.running("meta tensors"):
        try:
            with torch.device("meta"):
                return run(model, on_meta(inputs))
        except BertscopeError:
            raise
        except Exception:
            with contextlib.suppress(Exception), fake_tensors():
                return run(fake_copy(model), fake_like(inputs))
            raise


_KNOWN = "_bertscope_known"  # of a tensor of truth values, the one that all of them have


_SHARE = "_bertscope_share"  # of a tensor whose elements are drawn from 0 to 1


_BELOW = {"lt": True, "le": True, "gt": False, "ge": False}


class DataDependentAnswers:
    """Notes of each result what is known of it beforehand; `is_masked` tells whether masks hide anything."""

    def __init__(self, *, is_masked: bool) -> None:
        self.is_masked = is_masked

    def note(self, operator: Any, args: Any, out: Any) -> None:
        """Remember what the operator's result will be."""
        name = operator_name(operator)
        if name in ("rand", "rand_like"):
            setattr(out, _SHARE, True)
        elif isinstance(out, torch.Tensor) and out.dtype == torch.bool and args:
            known = self._truth(name, args)
            if known is not None:
                setattr(out, _KNOWN, known)

    def _truth(self, name: str, args: Any) -> bool | None:
        before = getattr(args[0], _KNOWN, None)
        if name in ("logical_not", "bitwise_not"):
            return None if before is None else not before
        if name in ("all", "any"):
            return before if before is not None else self.is_masked == (name == "any")
        if name in ("isinf", "isnan"):
            return False  # no sum overflows
        if name in _BELOW and getattr(args[0], _SHARE, False) and isinstance(args[1], (int, float)):
            return _BELOW[name] == (args[1] >= 1) if not 0 < args[1] < 1 else None
        return before if name in ("view", "reshape", "alias", "detach", "_to_copy", "clone") else None

    def truth(self, operator: Any, asked: torch.Tensor) -> bool:
        """The value of a tensor of one truth value; raises DataDependentOutputException where nothing settles it."""
        known = getattr(asked, _KNOWN, None)
        if asked.dtype != torch.bool or known is None:
            raise value_errors()[0](operator)
        return bool(known)
