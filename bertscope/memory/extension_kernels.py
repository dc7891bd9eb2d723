"""Kernels that are no part of torch: one table of rules, for `run` and `estimate` alike.

A row is an operator of torch's dispatcher, all operators of a package, or a function by its import path. The results
come from the row, from the package's shape function, or from its Python code for CUDA around kernels that do nothing.
What is saved for backward, the autograd code of the package or the user says.
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from math import prod
from types import ModuleType
from typing import Any, NamedTuple

from bertscope.errors import SelectionError, name_of, typed_arguments
from bertscope.memory.kernel_rules import FLASH, Scratch
from bertscope.torch_access import always, argument_names, has_kernel, operator_name, torch, tree_leaves
from bertscope.tracing.inputs import TORCH_NAMESPACES

_HALF = (torch.bfloat16, torch.float16)
_MOST_FLASH_WIDTH = 256  # of a head
_Rule = Callable[..., Any]


class Kernel(NamedTuple):
    """A row: where its rule is from, the results by its arguments, the temporary bytes by operator and arguments."""

    source: str
    outputs: _Rule | None = None
    scratch: _Rule | None = None
    runs_python: bool = False  # for CUDA, around kernels of C that do nothing
    witness: str = ""  # the test that holds it against the package itself


# ---- flash-attn ----

# The names of its arguments, in the packages and in transformers_access.
_FLASH_ARGUMENTS = ("q", "query"), ("k", "key"), ("cu_seqlens_q", "cu_seq_lens_q")


def flash_scratch(operator: Any, args: Any) -> int | Scratch:
    """Return the temporary bytes of flash-attn in backward: gradient sums in fp32, and expanded keys.

    Source: mha_bwd and mha_varlen_bwd, csrc/flash_attn/flash_api.cpp (2.8) and hopper/flash_api.cpp (3, on Hopper).
    """
    named: dict[str, Any] = dict(zip(argument_names(operator), args, strict=False))
    matches: list[Any] = [next((named[name] for name in row if name in named), None) for row in _FLASH_ARGUMENTS]
    query, key, ends = matches
    if query.dtype not in _HALF or query.shape[-1] > _MOST_FLASH_WIDTH:
        raise SelectionError(
            f"flash attention takes fp16 and bf16 and heads of at most {_MOST_FLASH_WIDTH} numbers; got "
            f"{str(query.dtype).removeprefix('torch.')} and {query.shape[-1]}; add "
            f"{name_of('precision')} bf16 or autocast-bf16"
        )
    if not operator_name(operator).endswith(("backward", "bwd")):
        return 0
    if named.get("version", 2) == 2:
        return flash_2_bytes(query, key, ends)
    heads, width = query.shape[-2:]
    tokens, batch = prod(query.shape[:-2]), query.shape[0]
    width = next(size for size in (64, 96, 128, 192, 256) if width <= size)
    is_narrowed = named["causal"] or named["left"] >= 0 or named["right"] >= 0
    block = 128 if width <= 64 else 80 if width == 128 and not is_narrowed else 64
    row, key_row = 4 * heads * (width + 2), 8 * key.shape[-2] * width * (key.shape[-2] != heads)
    if ends is not None:
        return Scratch(FLASH, (ends.numel() - 1, tokens, row, block, prod(key.shape[:-2]), key_row))
    return int(batch * (-(-query.shape[1] // block) * block * row + -(-key.shape[1] // 128) * 128 * key_row))


def flash_2_bytes(query: torch.Tensor, key: torch.Tensor, ends: torch.Tensor | None) -> int:
    """Return the bytes of flash-attn 2's backward on (batch, length, heads, width), or on packed (tokens, ...)."""
    heads, width = query.shape[-2:]
    rows = query.shape[0] * -(-query.shape[1] // 128) * 128
    if ends is not None:
        rows = prod(query.shape[:-2]) + 128 * (ends.numel() - 1)
    expanded = 2 * prod(key.shape[:-2]) * heads * width * key.itemsize if key.shape[-2] != heads else 0
    return int(4 * rows * heads * (-(-width // 32) * 32 + 1) + expanded)


def apex_scratch(operator: Any, args: Any) -> int:
    """Return the bytes of 16 partial sums in fp32 of each gradient of a weight, in backward of Apex's fused norms.

    Source: HostLayerNormGradient and HostRMSNormGradient, csrc/layer_norm_cuda_kernel.cu.
    """
    named: dict[str, Any] = dict(zip(argument_names(operator), args, strict=False))
    weights = [named[name] for name in ("weight", "bias") if "grad_output" in named and name in named]
    return sum(16 * 4 * weight.numel() for weight in weights)


# ---- the table ----

_FLASH_ATTN = "flash-attn 2.8, csrc/flash_attn/flash_api.cpp"
KERNELS: dict[str, Kernel] = {
    "flash_attn::": Kernel(_FLASH_ATTN, scratch=flash_scratch),
    "bertscope_flash_attn::": Kernel(f"{_FLASH_ATTN}; 3, hopper/flash_api.cpp", scratch=flash_scratch),
    "xformers_flash::": Kernel("xformers 0.0.35, ops/fmha/flash.py", scratch=flash_scratch),
    "bitsandbytes::": Kernel(
        "bitsandbytes 0.50.2, backends/cuda/ops.py",
        runs_python=True,
        witness="tests/frameworks.py::test_a_dry_run_of_bitsandbytes_on_a_gpu_has_the_peak_of_the_estimate",
    ),
    "torchao::": Kernel("torchao 0.18, csrc_meta_ops.py"),
    "apex::": Kernel("Apex, normalization/fused_layer_norm.py", scratch=apex_scratch),
}


@typed_arguments
def kernel(name: str, *, scratch: _Rule | None = None) -> Callable[[_Rule], _Rule]:
    """Register a rule for a kernel that needs a GPU: the decorated function returns its results as empty tensors.

    `name` is an operator, "my_ext::scale", or a function of a compiled module, "my_ext._C.scale", which is replaced on
    tensors without values. The function gets the kernel's arguments, and so does `scratch`, which returns the bytes
    that the kernel allocates and frees. Raises SelectionError for a second rule.

    >>> @bertscope.kernel("my_ext._C.scale", scratch=lambda x, factor: x.nbytes)
    ... def scale(x, factor):
    ...     return torch.empty_like(x)
    """

    def register(outputs: _Rule) -> _Rule:
        known = KERNELS.get(name) or KERNELS.get(f"{name.partition('::')[0]}::")
        before, now = (getattr(function, "__code__", None) for function in (known and known.outputs, outputs))
        # Of the same name and file: the user's file was imported anew.
        is_same = before and now and (before.co_filename, before.co_name) == (now.co_filename, now.co_name)
        if known and (known.outputs or known.scratch) and not is_same:
            raise SelectionError(f"{name} has a rule already, from {known.source}; remove one of the two")
        if "::" in name:
            try:
                torch.library.register_fake(name, outputs)
            except RuntimeError as error:
                raise SelectionError(f"{name} takes no rule: {error}; import its module first") from None
        else:
            _replace(name, outputs, scratch)
        KERNELS[name] = Kernel("the user's code", outputs, scratch and partial(_of_arguments, scratch))
        return outputs

    return register


def _of_arguments(scratch: _Rule, operator: Any, args: Any) -> Any:
    return scratch(*args)


def _replace(name: str, outputs: _Rule, scratch: _Rule | None) -> None:
    """Replace a function by a rule, for tensors without values; where its module cannot be imported, for all."""
    path, _, attribute = name.rpartition(".")
    if not path:
        raise SelectionError(f"a kernel is namespace::operator or module.function; got {name!r}")
    module = None
    try:
        module = import_module(path)
    except ImportError:
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            parent, is_there = ".".join(parts[:end]), False
            with suppress(ImportError, ValueError):
                is_there = parent != path and find_spec(parent) is not None
            if not is_there:
                module = sys.modules.setdefault(parent, ModuleType(parent))
                vars(module).update(__spec__=ModuleSpec(parent, None, is_package=True), __path__=[])
                above, _, end_name = parent.rpartition(".")
                vars(sys.modules.get(above, module)).setdefault(end_name, module)
    original = getattr(module, attribute, None)

    def run(*args: Any, **kwargs: Any) -> Any:
        known = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if original is not None and not any(tensor.is_meta or hasattr(tensor, "fake_mode") for tensor in known):
            return original(*args, **kwargs)
        out = outputs(*args, **kwargs)
        if scratch is not None and known:
            torch.empty(scratch(*args, **kwargs), dtype=torch.uint8, device=known[0].device)
        return out

    setattr(module, attribute, run)


def row_of(operator: Any) -> Kernel | None:
    """Return the rule for an operator that is no part of torch: the row of its name, or of its package."""
    if operator.namespace in TORCH_NAMESPACES:
        return None
    name = operator.name().partition(".")[0]
    return KERNELS.get(name) or KERNELS.get(f"{operator.namespace}::") or Kernel("")


def note_on(operator: Any) -> str:
    """Return what the report says of an operator; empty for one of torch and for a rule with a witness."""
    row = row_of(operator)
    if row is None or row.witness:
        return ""
    name = operator.name().partition(".")[0]
    if not row.source:
        return f"{name}: not verified: the shape function of its package, without a rule"
    package = operator.namespace.removeprefix("bertscope_")
    return f"{name if name in KERNELS else package}: not verified: its rule, from {row.source}"


def python_key(operator: Any) -> str:
    """Return the key of the Python code that runs for an operator on fake tensors; empty for most operators."""
    row = row_of(operator)
    keys = ("CUDA", "CompositeExplicitAutograd") if row is not None and row.runs_python else ()
    return next((key for key in keys if has_kernel(operator, key)), "")


# ---- functions of packages that reach the GPU without torch ----

_TRITON = "Triton's kernels did not run; they allocate nothing"
_BUILT = "not verified: kernels of Apex's and DeepSpeed's optimizers did not run; they allocate nothing"


class _NoCalls:
    """The library of C of a package: each function does nothing, and returns no error."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return always(0)

    __getitem__ = __getattr__


def package_actions(
    put: Callable[..., None], note: Callable[[str], None], overwritten: Callable[[Any], None]
) -> dict[str, Callable[[Any], None]]:
    """Return what is replaced in the modules of packages, by their names; each function gets the module.

    `put` sets attributes for as long as a run takes, `note` adds a remark, and `overwritten` is called with what a
    kernel may have written.
    """

    def launch(kernel: Any, *args: Any, **kwargs: Any) -> None:
        """Run no kernel of Triton: it writes into tensors that exist."""
        note(_TRITON)
        overwritten((args, kwargs))

    def paged(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> torch.Tensor:
        """Return the state of a paged optimizer, which is in the driver's managed memory, and not torch's."""
        note("not counted: a paged optimizer's state, which the driver moves between the host and the GPU")
        tensor: Any = torch.empty(shape, dtype=dtype, device="meta")
        tensor.is_paged, tensor.page_deviceid = True, 0
        return tensor  # type: ignore[no-any-return]

    def built(*args: Any) -> _NoCalls:
        """Return the compiled kernels of an optimizer, which update tensors that exist."""
        note(_BUILT)
        return _NoCalls()

    def update(*args: Any) -> None:
        built()

    return {
        "amp_C": partial(_put_in, put, "", multi_tensor_adam=update),
        "deepspeed.ops.op_builder.cpu_adam": partial(_put_in, put, "CPUAdamBuilder", load=built),
        "deepspeed.ops.op_builder.fused_adam": partial(_put_in, put, "FusedAdamBuilder", load=built),
        "triton.runtime.jit": partial(_put_in, put, "JITFunction", run=launch),
        "triton.runtime.autotuner": partial(_put_in, put, "Autotuner", run=launch),
        "bitsandbytes.cextension": partial(_put_in, put, "", lib=_NoCalls()),
        "bitsandbytes.functional": partial(_put_in, put, "", get_paged=paged),
        "xformers._cpp_lib": partial(_put_in, put, "", _built_with_cuda=True),
        "torchao.kernel.intmm": partial(_put_in, put, "", safe_int_mm=_int_product),
    }


def _put_in(put: Callable[..., None], name: str, module: Any, **values: Any) -> None:
    put(getattr(module, name) if name else module, **values)


def _int_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Multiply 8-bit integers as torchao does on CUDA (kernel/intmm.py), which copies the right matrix if it must."""
    product: torch.Tensor = torch.ops.aten._int_mm(left, right.contiguous())
    return product
