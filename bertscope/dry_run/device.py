"""The fake GPU of a dry run: what operators return there, and what its kernels and its allocator take.

Only operators with a tensor on the GPU, or that make one there, are fake: data sets, tokenizers, masks and metrics on
the CPU are real. A tensor on the GPU has a layout; integers and single numbers keep their value too, which came from
the CPU, so that shapes that depend on masks and lengths are the true ones. A loss, whose value is not known, is 1.0.
"""

import math
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from bertscope.gpus import Gpu, capability, gpu_threads
from bertscope.memory.caching_allocator import Allocator, SegmentBlock
from bertscope.memory.extension_kernels import note_on, python_key, row_of
from bertscope.memory.kernel_rules import LT_WORKSPACE_BYTES, MANY_THREADS, MATRICES, blas_bytes
from bertscope.memory.kernels import cuda_scratch, result_bytes
from bertscope.torch_access import (
    active_fake_mode,
    always,
    fake_tensor_mode,
    operator_name,
    run_kernel,
    storage_key,
    torch,
    tree_leaves,
    tree_map,
)
from bertscope.torch_access.fake_gpu import NoRule
from bertscope.tracing.fake_tensors import OperatorResults, all_valid
from bertscope.tracing.inputs import missing_rule
from bertscope.tracing.record import Device
from bertscope.units import bytes_text

# Elements of a tensor whose value is kept: integers, floats made on the GPU and masks, other floats from the CPU.
_MOST_INTEGERS, _MOST_FLOATS, _MOST_COPIED = 2**22, 2**18, 64
_FILLED = 65_536  # elements: initial values from here on are left out, which nobody reads
_COMPARED = ("lt", "le", "gt", "ge")
_ARITHMETIC = ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "neg", "abs", "round")
_GPU, _CPU = torch.device("cuda", 0), torch.device("cpu")
_aten = torch.ops.aten
_COMPARING = (_aten.equal.default, _aten.allclose.default, _aten.is_same_size.default)
_INITIAL = (_aten.normal_.default, _aten.uniform_.default)
# Operators the shape of whose result depends on values, and those that make a tensor with values of no other one.
_BY_VALUES = {
    _aten.nonzero.default, _aten.masked_select.default, _aten.unique_consecutive.default, _aten._unique2.default,
    _aten.unique_dim.default, _aten.repeat_interleave.Tensor, _aten.bincount.default,
}  # fmt: skip
_FACTORIES = (
    "arange", "full", "zeros", "ones", "scalar_tensor", "eye", "linspace", "tril_indices", "triu_indices", "randint",
    "randperm",
)  # fmt: skip
_SIZED = ("full", "zeros", "ones")  # whose first argument is a shape
# Whatever the other operand is, the result has this value if one of them has it everywhere: the end of a generation.
_DECISIVE = {"bitwise_or": True, "logical_or": True, "bitwise_and": False, "logical_and": False}


class UnknownFloat(float):
    """A float whose value is not known: arithmetic passes that on, and a comparison is reported."""

    def __new__(cls, value: float, on_unknown: Callable[[str], None]) -> "UnknownFloat":
        number = super().__new__(cls, value)
        number.on_unknown = on_unknown  # type: ignore[attr-defined]
        return number

    def __reduce__(self) -> Any:
        return float, (float(self),)


def _method(name: str) -> Any:
    original = getattr(float, f"__{name}__")

    def run(number: Any, *operands: Any) -> Any:
        if name in _COMPARED:
            number.on_unknown(name)
        result = original(number, *operands)
        return UnknownFloat(result, number.on_unknown) if isinstance(result, float) else result

    return run


for _name in (*_COMPARED, *_ARITHMETIC):
    setattr(UnknownFloat, f"__{_name}__", _method(_name))


class FakeGpu(Device):
    """A GPU of fake tensors, with a simulated allocator.

    `limit_bytes` is what torch may reserve; a request above it raises torch.OutOfMemoryError, as on a GPU.
    """

    kind, counts_random_states = "cuda", False  # the random state of checkpointing is on the CPU

    def __init__(self, gpu: Gpu | None = None, limit_bytes: int | None = None, *, expandable: bool = False) -> None:
        self.gpu = gpu
        self.threads = (gpu_threads(gpu) if gpu is not None else None) or MANY_THREADS
        self.mode = fake_tensor_mode(allow_non_fake_inputs=True)
        self.fake: Any = type(self._fake(torch.empty(0)))
        self.results = OperatorResults()
        self.allocator = Allocator(limit_bytes, expandable_segments=expandable)
        self.workspaces: dict[int, int] = {}  # bytes of cuBLAS's by its thread, of cuBLASLt's at 0
        self.laid: list[tuple[int, int]] = []  # the event before which each was allocated, and its bytes
        self.stale: dict[int, torch.Tensor] = {}  # values that an operator has overwritten with unknown ones
        self.remarks: dict[str, None] = {}  # on what the numbers leave out
        self.on_unknown: Callable[[str], None] = always(None)  # told of an unknown value that the script asks for

    def note(self, text: str) -> None:
        """Add a remark on what the numbers leave out."""
        self.remarks[text] = None

    # ---- which operators ----

    def takes(self, operator: Any, args: Any, kwargs: Any) -> bool:
        if active_fake_mode() is not None:  # such as DTensor's, which learns the shapes of results by it
            return False
        for value in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(value, self.fake):
                return True
            if isinstance(value, (list, tuple)) and any(isinstance(item, self.fake) for item in value):
                return True
        device = kwargs.get("device")
        return device is not None and torch.device(device).type == "cuda"

    def has(self, tensor: Any) -> bool:
        is_there = isinstance(tensor, self.fake) and tensor.fake_device.type == "cuda"
        if is_there and tensor.layout != torch.strided:
            raise NoRule(f"tensors of the layout {tensor.layout} have no rule")
        return is_there

    def elsewhere(self, operator: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator on the CPU, but for the initial values of large tensors."""
        if operator in _INITIAL and args[0].numel() >= _FILLED:
            return args[0]
        if operator is _aten.is_pinned.default:
            return True
        return operator(*args, **kwargs | ({"pin_memory": False} if kwargs.get("pin_memory") else {}))

    # ---- results ----

    def run(self, operator: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operator on the GPU; raises NoRule if it is not known."""
        if operator in _COMPARING:
            known = list(map(self.value, args[:2]))
            if all(value is not None for value in known):
                return operator(*known, *args[2:], **kwargs)
            self.on_unknown(operator_name(operator))
            return True
        if operator is _aten.copy_.default and not isinstance(args[0], self.fake):  # to the CPU
            if (copied := self.value(args[1])) is not None:
                args[0].copy_(copied)
            return args[0]
        target = _GPU if kwargs.get("device") is None else torch.device(kwargs["device"])
        if operator is _aten._to_copy.default and target.type == "cpu":
            return self.on_cpu(args[0], kwargs.get("dtype"))
        if target.type == "cuda" and target != _GPU:
            if (target.index or 0) >= torch.cuda.device_count():
                self.note(f"a run has one GPU, which holds what the script puts on {target} too")
            kwargs = kwargs | {"device": _GPU}
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        known = self._known(operator, args, kwargs, leaves)
        if operator is _aten.convolution.default:
            self.note("not counted: the workspaces of cuDNN's convolutions")
        if text := note_on(operator):
            self.note(text)
        if key := python_key(operator):
            with self.recorder:
                return run_kernel(operator, key, args, kwargs)
        try:
            out = self._layout(operator, args, kwargs, known)
        except RuntimeError as error:  # NotImplementedError is one
            if isinstance(error, (NoRule, torch.OutOfMemoryError)) or not lacks_kernel(
                f"{type(error).__name__}: {error}"
            ):
                raise
            if row_of(operator) is not None:
                raise NoRule(missing_rule(operator)) from None
            reason = str(error).partition("\n")[0].partition(". ")[0] or type(error).__name__
            raise NoRule(f"{operator} has no rule: {reason}") from None
        self._keep(out, known, leaves)
        return tree_map(
            lambda leaf: self.on_cpu(leaf) if isinstance(leaf, self.fake) and not self.has(leaf) else leaf, out
        )

    def _layout(self, operator: Any, args: Any, kwargs: Any, known: Any) -> Any:
        if operator is _aten._to_copy.default and not isinstance(args[0], self.fake):
            is_strided = args[0].layout == torch.strided
            return self._fake(args[0], kwargs.get("dtype")) if is_strided else self._in_mode(operator, args, kwargs)
        if operator in _BY_VALUES and known is not None:
            return tree_map(lambda leaf: self._fake(leaf) if isinstance(leaf, torch.Tensor) else leaf, known)
        if operator is _aten._to_sparse.default:  # an index in each dimension, and a value
            self.note("to_sparse: all elements count as nonzero, the upper bound; the result has a strided layout")
            per_element = args[0].dim() * 8 // args[0].itemsize + 1
            return args[0].new_empty(args[0].numel() * per_element).as_strided(args[0].shape, args[0].stride())
        if operator is _aten._ctc_loss.default:
            scores, lengths = args[0], args[3]
            alpha = len(lengths), len(scores), 2 * max(lengths) + 1
            return scores.new_empty(len(lengths)), scores.new_empty(alpha)
        if operator is _aten._pack_padded_sequence.default:
            packed, lengths = args[:2]
            sizes = [int((lengths > step).sum()) for step in range(int(lengths.max()))]
            return packed.new_empty((int(lengths.sum()), *packed.shape[2:])), torch.tensor(sizes)
        if operator is _aten.index.Tensor and any(self._is_mask(index) for index in args[1]):
            indices = [inner for index in args[1] for inner in self._indices(index)]
            if not any(self._is_mask(index) for index in indices):
                return self._in_mode(operator, (args[0], indices), kwargs)
        if operator in _BY_VALUES or operator is _aten.index.Tensor:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with self.mode:
                    if (bound := all_valid(operator, args)) is not None:
                        self.on_unknown(operator_name(operator))
                        return bound
        if args and isinstance(args[0], self.fake):
            return self.results.run(operator, args, kwargs)
        return self._in_mode(operator, args, kwargs)

    def _in_mode(self, operator: Any, args: Any, kwargs: Any) -> Any:
        with self.mode:
            return operator(*args, **kwargs)

    def _fake(self, like: Any, dtype: torch.dtype | None = None) -> Any:
        with self.mode:
            return torch.empty_strided(like.shape, like.stride(), dtype=dtype or like.dtype, device=_GPU)

    def _is_mask(self, index: Any) -> bool:
        return isinstance(index, self.fake) and index.dtype == torch.bool

    def _indices(self, index: Any) -> list[Any]:
        """Return the indices that an index names: for a mask with a value as many as it has true elements."""
        if (known := self.value(index) if self._is_mask(index) else None) is None:
            return [index]
        count = int(known.sum())
        with self.mode:
            return [torch.empty(count, dtype=torch.long, device=_GPU) for _ in range(known.dim())]

    # ---- values ----

    def value(self, tensor: Any) -> torch.Tensor | None:
        """Return a tensor's value; None for one on the GPU whose value is not known."""
        if not isinstance(tensor, self.fake):
            return tensor if isinstance(tensor, torch.Tensor) else None
        known: torch.Tensor | None = vars(tensor).get(_VALUE)
        return None if known is None or storage_key(known) in self.stale else known

    def number(self, tensor: Any) -> Any:
        """Return the value of a one-element tensor; a float that is not known is 1, another number 0."""
        known, kind, is_float = self.value(tensor), tensor.dtype, tensor.dtype.is_floating_point
        if not is_float and (known is None or _GUESSED in vars(tensor)):
            self.on_unknown("item")
        return known.item() if known is not None else 1.0 if is_float else False if kind == torch.bool else 0

    def passed_on(self, tensor: Any, number: Any) -> Any:
        """Return the number that a script gets from a tensor; a float that is not known tells of its comparisons."""
        is_known = self.value(tensor) is not None and _GUESSED not in vars(tensor)
        return number if is_known or not isinstance(number, float) else UnknownFloat(number, self.on_unknown)

    def on_cpu(self, tensor: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the tensor's copy on the CPU: its value, else zeros, or of a mask True, which selects all."""
        if (known := self.value(tensor)) is not None:
            return known.to(dtype or known.dtype, copy=True)
        kind = dtype or tensor.dtype
        return torch.full(tensor.shape, kind == torch.bool and tensor.dim() > 0, dtype=kind)

    def _known(self, operator: Any, args: Any, kwargs: Any, leaves: list[Any]) -> Any:
        """Return the result of an operator on its tensors' values; None if one is not known."""
        name = operator_name(operator)
        if name == "_amp_foreach_non_finite_check_and_unscale_":  # no gradient is infinite
            return None
        values = list(map(self.value, leaves))
        is_known = all(value is not None for value in values) if leaves else name in _FACTORIES
        if (finite := _of_finite(name, args)) is not None and (not is_known or _GUESSED in vars(args[0])):
            leaves.clear()  # it follows from no guess
            return torch.full((), finite).expand(args[0].shape)
        for value in values if name in _DECISIVE and not is_known else ():
            if value is not None and value.dtype == torch.bool and bool((value == _DECISIVE[name]).all()):
                return torch.full(torch.broadcast_shapes(*(leaf.shape for leaf in leaves)), _DECISIVE[name])
        if name == "sum" and not is_known and args[0].dtype == torch.bool and _is_kept(args[0]):
            vars(args[0])[_GUESSED] = True  # no more than all elements are true
            return operator(torch.ones((), dtype=torch.bool).expand(args[0].shape), *args[1:], **kwargs)
        if is_known and operator is _aten._to_copy.default:
            data, is_plain = args[0], type(args[0]) is torch.Tensor and args[0].layout == torch.strided
            is_plain = is_plain and data.device == _CPU and data.is_floating_point() and data.itemsize > 1
            is_mask = (
                is_plain and data.numel() and _is_kept(data) and ((data == data.min()) | (data == data.max())).all()
            )
            most = _MOST_FLOATS if is_mask or isinstance(data, self.fake) else _MOST_COPIED
            is_known = values[0] is not None and _is_kept(values[0], most)
        if is_known and not leaves and name in _SIZED:
            is_known = isinstance(args[0], (list, tuple)) and torch.Size(args[0]).numel() <= _MOST_INTEGERS
        if is_known:
            named = {key: _CPU if key == "device" else item for key, item in kwargs.items() if key != "pin_memory"}
            of = lambda leaf: self.value(leaf) if isinstance(leaf, torch.Tensor) else leaf  # noqa: E731
            with suppress(RuntimeError, NotImplementedError, TypeError), torch.no_grad():
                return operator(*tree_map(of, args), **tree_map(of, named))
        if name.endswith("_") or "out" in kwargs:
            self.overwritten((args[:1], kwargs.get("out")))
        return None

    def overwritten(self, values: Any) -> None:
        """Note that the tensors' values in a tree are no longer known."""
        for leaf in tree_leaves(values):
            known = vars(leaf).get(_VALUE) if isinstance(leaf, self.fake) else None
            if known is not None:
                self.stale[storage_key(known)] = known

    def _keep(self, out: Any, known: Any, leaves: list[Any]) -> None:
        """Keep the values of results; a single float without one is 1."""
        results, guess = [leaf for leaf in tree_leaves(out) if isinstance(leaf, self.fake)], {_GUESSED: True}
        if known is not None:
            values = [leaf for leaf in tree_leaves(known) if isinstance(leaf, torch.Tensor)]
            guess = guess if any(_GUESSED in vars(leaf) for leaf in leaves if isinstance(leaf, self.fake)) else {}
            for tensor, value in zip(results, values, strict=False):
                vars(tensor).update({_VALUE: value, **guess} if _is_kept(value) else {})
            return
        for tensor in results:
            if tensor.dim() == 0 and tensor.dtype.is_floating_point:
                vars(tensor).update({_VALUE: torch.ones((), dtype=tensor.dtype), **guess})

    # ---- memory ----

    def malloc(self, size: int) -> SegmentBlock:
        """Return a block of the allocator; raises torch.OutOfMemoryError as torch does where the limit is exceeded."""
        allocator, recorder = self.allocator, self.recorder
        peaks = allocator.peak_allocated_bytes, allocator.peak_reserved_bytes
        block: SegmentBlock = allocator.malloc(size)
        if not allocator.missing_bytes:
            return block
        recorder.log.refused.append((size, recorder.line(), len(recorder.log.events)))
        allocator.missing_bytes = 0
        allocator.free(block)
        allocator.release_free_memory()
        allocator.peak_allocated_bytes, allocator.peak_reserved_bytes = peaks
        used, held = allocator.reserved_bytes, allocator.allocated_bytes
        limit = allocator.limit_bytes or 0
        total = self.gpu.memory_bytes if self.gpu is not None else limit
        raise torch.OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate {bytes_text(size)}. GPU 0 has a total capacity of "
            f"{bytes_text(total)} of which {bytes_text(limit - used)} is free. Including non-PyTorch memory, this "
            f"process has {bytes_text(total - limit + used)} memory in use. Of the allocated memory {bytes_text(held)} "
            f"is allocated by PyTorch, and {bytes_text(used - held)} is reserved by PyTorch but unallocated."
        )

    def scratch(self, operator: Any, args: Any) -> Any:
        """Return what a kernel allocates while it runs; an index by masks the indices of their true elements.

        A thread's first matrix product allocates cuBLAS's workspace, its first `addmm` also cuBLASLt's.
        """
        name, thread, able = operator_name(operator), threading.get_ident(), capability(self.gpu) if self.gpu else None
        libraries = {thread: blas_bytes(able)} if name in MATRICES else {}
        libraries |= {0: LT_WORKSPACE_BYTES} if name == "addmm" else {}
        for library, size in libraries.items():
            if library not in self.workspaces:
                self.malloc(size)
                self.workspaces[library] = size
                self.laid.append((len(self.recorder.log.events), size))
        if operator is _aten.index.Tensor and any(map(self._is_mask, args[1])):
            masks = (self.value(index) for index in args[1] if self._is_mask(index))
            return sum(8 * int(known.sum()) * known.dim() for known in masks if known is not None)
        return cuda_scratch(operator, args, self.threads)

    def true_bytes(self, operator: Any, args: Any, number: int, tensor: Any) -> int | None:
        return result_bytes(operator, args, number, tensor, on_cuda=True)


# In the text of an error of a kernel or a function of the driver that is not there.
_OF_GPU = (
    "Could not run", "not implemented", "data pointer", "data_ptr", "DynamicOutput", "DataDependent",
    "dummy base class", "'torch._C' has no attribute", "not compiled with CUDA", "CUDA driver", "ATen_cuda",
    "no fake impl", "nested_int", "UnsupportedOperator", "HigherOrderOperator", "FakeTensorMode is active",
)  # fmt: skip
_VALUE, _GUESSED = "_bertscope_value", "_bertscope_guessed"  # which of them follow from a loss that is 1.0


def _is_kept(value: torch.Tensor, most_floats: int = _MOST_FLOATS) -> bool:
    return value.numel() <= (most_floats if value.dtype.is_floating_point else _MOST_INTEGERS)


def _of_finite(name: str, args: Any) -> bool | None:
    """Return what a test for infinite or missing values says of finite ones, as which unknown ones count."""
    if name in ("isnan", "isinf"):
        return False
    if name not in ("eq", "ne"):
        return None
    is_itself = args[0] is args[1]
    is_infinity = isinstance(args[1], float) and math.isinf(args[1])
    return (name == "eq") == is_itself if is_itself or is_infinity else None


def lacks_kernel(error: str) -> bool:
    """Return True for an error of a kernel that needs a real GPU or real values, not of the user's arguments."""
    return any(sign in error for sign in _OF_GPU)
