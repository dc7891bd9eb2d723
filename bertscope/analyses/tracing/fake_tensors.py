"""Fake copies of modules: their tensors have shapes, strides and a device, and no bytes."""

import contextlib
import copy
import functools
import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from bertscope.analyses.tracing.inputs import absent_inputs, with_values
from bertscope.errors import BertscopeError, SelectionError, SourceError
from bertscope.sources.building import MAX_REAL_BYTES, at_most_real_bytes, note_values
from bertscope.sources.model_source import ModelSource
from bertscope.torch_access import (
    fake_tensor_mode,
    nn,
    operator_name,
    torch,
    tree_leaves,
    tree_map,
)  # fmt: skip
from bertscope.units import bytes_text

_Found = TypeVar("_Found")
# The attention kernel to run on meta: transformers' sdpa reads values, and the matrix products are the same.
META_ATTENTION = "eager"
# The kernel for experts on meta: the others read values, or take only bf16; the matrix products are the same.
META_EXPERTS = "batched_mm"


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Enter FakeTensorMode without its log of the traceback when an operator fails; the error itself is raised."""
    mode = fake_tensor_mode()
    log = logging.getLogger(type(mode).__module__)
    before, log.disabled = log.disabled, True
    try:
        with mode:
            yield
    finally:
        log.disabled = before


def fake_copy(module: nn.Module, device: str = "cpu") -> Any:
    """Return a copy of the module with an empty tensor for each of its tensors; shared tensors stay shared.

    For fake tensors the caller enters `fake_tensors`. Raises SelectionError for a module that Python cannot copy.
    """
    attributes = (leaf for inner in module.modules() for leaf in tree_leaves(list(vars(inner).values())))
    others = [leaf for leaf in attributes if isinstance(leaf, torch.Tensor)]  # such as the prompt tokens of peft
    memo = {id(tensor): _fake(tensor, device) for tensor in (*module.parameters(), *module.buffers(), *others)}
    try:
        return copy.deepcopy(module, memo)
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise SelectionError(f"{type(module).__name__} cannot be copied to be estimated: {error}") from None


def _fake(tensor: torch.Tensor, device: str = "cpu") -> torch.Tensor:
    if nn.parameter.is_lazy(tensor):
        raise SelectionError("a lazy module has no shapes yet; run it once before you estimate it")
    like = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    return nn.Parameter(like, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else like


def fake_like(tree: Any) -> Any:
    """Return the same structure with fake CPU tensors; a tensor that occurs twice becomes one."""
    fakes = {id(leaf): _fake(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)}
    return tree_map(lambda leaf: fakes.get(id(leaf), leaf), tree)


def on_meta(tree: Any) -> Any:
    """Return the same structure with tensors on meta."""
    return tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf, tree)


def run_without_values(
    source: ModelSource,
    model: Any,
    inputs: Any,
    run: Callable[[nn.Module, Any], _Found],
    made: Callable[[str], nn.Module],
) -> _Found:
    """Run a source's model on meta, where its forward creates its tensors too, and return the result of `run`.

    If that fails, run the model on fake CPU tensors, for a forward that creates tensors on the CPU, and for one that
    asks whether a mask hides positions: the answer is that it hides none. If that fails too, run what `made` returns
    for the CPU, for a forward that reads values; raises SourceError if its tensors are more than MAX_REAL_BYTES.
    """
    absent = absent_inputs(model, inputs)
    if callable(getattr(model, "set_experts_implementation", None)):  # of transformers 5
        model.set_experts_implementation(META_EXPERTS)
    try:
        with source.running("meta tensors", absent):
            try:
                with torch.device("meta"):
                    return run(model, on_meta(inputs))
            except BertscopeError:
                raise
            except Exception:
                with contextlib.suppress(Exception), fake_tensors():
                    return run(fake_copy(model), fake_like(inputs))
                raise
    except SourceError as error:
        limit = f"{source.name} cannot be run on meta tensors, as its forward reads values"
        if sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())) > MAX_REAL_BYTES:
            raise SourceError(
                f"{error}; if its forward reads values, give a configuration with fewer layers, whose tensors are at "
                f"most {bytes_text(MAX_REAL_BYTES)}"
            ) from None
    _clear_caches(model)
    with source.running("the CPU", absent), at_most_real_bytes(limit):
        found = run(made("cpu"), with_values(model, inputs))
    note_values(f"{source.name}: its forward reads values, so it ran on the CPU with random inputs")
    return found


def _clear_caches(model: nn.Module) -> None:
    """Clear functools' caches in the code of a model, which may hold fake tensors under arguments of real ones."""
    kind, places = type(functools.cache(int)), {type(module).__module__ for module in model.modules()}
    for item in gc.get_objects():
        if type(item) is kind and item.__module__ in places:
            item.cache_clear()


_KNOWN = "_bertscope_known"  # of a bool tensor, and of the flag of GradScaler: the value of all its elements
_SHARE = "_bertscope_share"  # of a tensor with random elements between 0 and 1
_BELOW = {"lt": True, "le": True, "gt": False, "ge": False}


class DataDependentAnswers:
    """A record of the tensors whose values are known in advance; `is_masked` means that masks hide positions."""

    def __init__(self, *, is_masked: bool) -> None:
        self.is_masked = is_masked

    def note(self, operator: Any, args: Any, out: Any) -> None:
        """Mark the operator's result with its known value."""
        name = operator_name(operator)
        if name in ("rand", "rand_like"):
            setattr(out, _SHARE, True)
        elif name == "_amp_foreach_non_finite_check_and_unscale_":  # of GradScaler: no gradient is infinite
            setattr(args[1], _KNOWN, False)
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

    def knows(self, asked: torch.Tensor) -> bool:
        """Return True if the value of a tensor of one element is known."""
        return getattr(asked, _KNOWN, None) is not None

    def value(self, operator: Any, asked: torch.Tensor, *, otherwise: int | None = None) -> bool | int:
        """Return the value of a tensor of one element, `otherwise` if it is not known.

        If both are missing, the operator returns that of a constant, such as the quotient of two sizes in Longformer;
        for any other fake tensor it raises DataDependentOutputException.
        """
        known = getattr(asked, _KNOWN, otherwise)
        return operator(asked) if known is None else known
