"""A GPU that is not there: fake tensors on `cuda:0`, on which torch's own CUDA dispatch runs (Linux).

A build of torch without CUDA lacks two things: a device guard for `cuda`, and hooks by which autograd and autocast
ask for an accelerator. A build with CUDA on a machine without a GPU lacks answers of the same hooks. Both are in
torch's libraries as data that a process may change; nothing is compiled.
"""

import ctypes
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from sys import modules
from typing import Any
from unittest.mock import patch

from bertscope.errors import WorkerError, is_out_of_memory
from bertscope.torch_access import (
    always,
    close_library,
    fake_class,
    fake_tensor_mode,
    has_kernel,
    nn,
    storage_key,
    torch,
    tree_map,
)

_WORD = ctypes.c_void_p
_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"  # in libc10: a guard for each type of device, CUDA second
_HOOKS = "_ZN2at6detail12getCUDAHooksEv"  # in libtorch_cpu
_YES = (  # hooks that return 1; the last two ask the driver in a build with CUDA
    "isBuilt", "isAvailable", "hasPrimaryContext", "hasCUDA", "deviceCount", "supportsDepthwiseConvolutionWithCuDNN",
    "supportsBFloat16ConvolutionWithCuDNNv8",
)  # fmt: skip
_NO = ("compiledWithCuDNN",)  # in a build with it, recurrent layers would ask the driver for their workspace
_MOST_HOOKS = 128
# Operators that have a formula besides the GPU's kernel: a build without the kernel runs the formula, above autograd.
_WITH_FORMULA = ("silu_backward", "mish_backward", "_fused_rms_norm")
# What torch's Python code asks the driver, with the answer.
_OF_DRIVER = {
    "_cuda_getDevice": 0,
    "_cuda_getDeviceCount": 1,
    "_cuda_isCurrentStreamCapturing": False,
    "_cuda_getCurrentRawStream": 0,
}
_REFUSALS = (OSError, AttributeError, ValueError, AssertionError, RuntimeError, NotImplementedError)
_INSTALLED: list[bool] = []
_LOADED_TO = [""]  # types of devices; "" for the one that was saved
_KEPT: list[object] = []  # what C++ points to, also after the end: objects made meanwhile may keep the address


class NoRule(RuntimeError):
    """An error for what has no rule on a GPU that is not there, such as a kernel of a user's extension."""


class Put:
    """Sets attributes, and puts the former ones back when its stack is closed."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack

    def __call__(self, owner: Any, **values: Any) -> None:
        if values:
            self.stack.enter_context(patch.multiple(owner, create=True, **values))


@contextmanager
def fake_gpu(kind: str = "cuda") -> Iterator[None]:
    """Make fake tensors on `cuda` possible, and put back at the end all that it changed.

    Operators and optimizers take the kernels of a device of this kind: the tests compare with a real "cpu".

    Where torch.cuda is initialized, CUDA's own guard and hooks stay. Raises WorkerError where the GPU cannot be
    installed: on another system, with another torch, and in a process that has run a backward pass without it, since
    autograd makes the queues of its devices once.
    """
    if _INSTALLED:
        raise WorkerError("no fake GPU: this process has one; a run inside a run has no other")
    with ExitStack() as stack:
        _INSTALLED.append(True)
        stack.callback(_INSTALLED.clear)
        try:
            if not torch.cuda.is_initialized():
                _add_guard(stack)
                _answer_hooks(stack)
                with fake_tensor_mode():
                    torch.ones(1, device="cuda", requires_grad=True).sum().backward()
            _add_kernels(stack, kind)
            _fit_python(stack, has_foreach=kind == "cuda")
        except _REFUSALS as error:
            if is_out_of_memory(error):
                raise
            first = str(error).partition("\n")[0][:120] or type(error).__name__
            reason = (
                "this process has run a backward pass, and torch takes a new device only before the first"
                if "device_ready_queues" in str(error)
                else f"torch {torch.__version__} cannot have one here ({first}): it needs Linux and torch 2.10 or newer"
            )
            raise WorkerError(f"no fake GPU: {reason}") from None
        yield


def _add_guard(stack: ExitStack) -> None:
    """Register a guard for CUDA if the build has none: one that counts no devices, which torch replaces."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    registry = (_WORD * 2).in_dll(library, _REGISTRY)
    stack.callback(registry.__setitem__, 1, registry[1])
    if not registry[1]:
        zero = ctypes.CFUNCTYPE(ctypes.c_long, _WORD)(lambda _: 0)
        table = (_WORD * 64)(*[ctypes.cast(zero, _WORD).value] * 64)
        guard = (_WORD * 1)(ctypes.addressof(table))
        _KEPT.extend((zero, table, guard))
        registry[1] = ctypes.addressof(guard)
    torch._C._ensureCUDADeviceGuardSet()


def _answer_hooks(stack: ExitStack) -> None:
    """Replace the table of CUDA's hooks by a copy in which the hooks in `_YES` return 1 and those in `_NO` 0.

    Slots of the table follow the virtual functions of the two headers, which every wheel has, behind two destructors.
    """
    where = Path(torch.__file__).parent
    get_hooks = getattr(ctypes.CDLL(str(where / "lib" / "libtorch_cpu.so")), _HOOKS)
    get_hooks.restype = _WORD
    hooks: Any = (_WORD * 1).from_address(get_hooks())
    headers = [(where / f"include/ATen/detail/{name}HooksInterface.h").read_text() for name in ("Accelerator", "CUDA")]
    virtual = (name for text in headers for name in re.findall(r"^  virtual [^~;{]*?(\w+)\(", text, re.M))
    slots = ["", "", *dict.fromkeys(virtual)]
    table = (_WORD * (2 + _MOST_HOOKS))(*(_WORD * (2 + _MOST_HOOKS)).from_address(hooks[0] - 16))
    for names, answer in ((_YES, ctypes.pythonapi.Py_IsInitialized), (_NO, ctypes.CDLL(None).sched_yield)):
        for name in names:  # both functions take no arguments, and always return the same
            table[2 + slots.index(name)] = ctypes.cast(answer, _WORD).value
    _KEPT.append(table)
    stack.callback(hooks.__setitem__, 0, hooks[0])
    hooks[0] = ctypes.addressof(table) + 16
    if torch._C._accelerator_getAccelerator() != torch.device("cuda"):
        raise AssertionError("its hooks are others")


def _add_kernels(stack: ExitStack, kind: str) -> None:
    """Register what a build without CUDA, or torch itself, lacks of operators with kernels on a GPU."""
    library = torch.library.Library("aten", "IMPL")
    stack.callback(close_library, library)
    for name in _WITH_FORMULA:
        keys = {key for key in ("CPU", "CUDA") if has_kernel(getattr(torch.ops.aten, name).default, key)}
        if "CUDA" not in keys and (kind == "cuda" or "CPU" in keys):
            library.impl(name, always(None), "CUDA")  # which no fake tensor reaches
    for name, result in _LAYOUTS.items():
        library.impl(name, result, "Meta")


def _like(number: int, *args: Any) -> torch.Tensor:
    return torch.empty_like(args[number])


def _channels(count: int, number: int, *args: Any) -> tuple[torch.Tensor, ...]:
    tensor = args[number]
    kind = torch.promote_types(tensor.dtype, torch.float32)
    return tuple(tensor.new_empty(tensor.shape[1], dtype=kind) for _ in range(count))


def _gru_gradients(gradient: torch.Tensor, saved: torch.Tensor, has_bias: bool) -> tuple[torch.Tensor | None, ...]:
    rows, width = gradient.shape
    gates, biases = ((rows, 3 * width),) * 2, ((3 * width,) if has_bias else None,) * 2
    shapes = (*gates, gradient.shape, *biases)
    return tuple(None if shape is None else saved.new_empty(shape) for shape in shapes)


# The layouts of results of operators without one, in `nn.SyncBatchNorm`, `nn.GRU`, `nn.CTCLoss` and margin losses.
_LAYOUTS: dict[str, Any] = {
    # It saves five numbers for each of the state (RNN.cu).
    "_thnn_fused_gru_cell": lambda gates, _, state, *__: (
        torch.empty_like(state),
        gates.new_empty((len(state), 5 * state.shape[1])),
    ),
    "_thnn_fused_gru_cell_backward": _gru_gradients,
    "_use_cudnn_ctc_loss": always(False),
    "_use_miopen_ctc_loss": always(False),
    "_ctc_loss_backward": partial(_like, 1),
    "multi_margin_loss_backward": partial(_like, 1),
    "multilabel_margin_loss_backward": partial(_like, 1),
    "batch_norm_stats": partial(_channels, 2, 0),
    "batch_norm_gather_stats_with_counts": partial(_channels, 2, 0),
    "batch_norm_elemt": partial(_like, 0),
    "batch_norm_backward_reduce": partial(_channels, 4, 1),
    "batch_norm_backward_elemt": partial(_like, 0),
}


def _fit_python(stack: ExitStack, has_foreach: bool) -> None:
    """Let torch's Python code treat fake tensors on the GPU as CUDA tensors.

    Modules keep the identity of their parameters when they move, which torch
    does by swapping; `torch.tensor(device="cuda")` copies; the functions in torch.cuda that initialize it do nothing.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    put = Put(stack)
    for module in ("torch.optim.optimizer", "torch.utils._foreach_utils") if has_foreach else ():
        kinds = vars(modules[module])["_foreach_supported_types"]
        kinds.append(FakeTensor)
        stack.callback(kinds.remove, FakeTensor)
    stack.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
    torch._C._set_only_lift_cpu_tensors(True)
    known = torch.jit._builtins._get_builtin_table()  # functions that TorchScript compiles as operators
    for name in ("tensor", "as_tensor"):
        lifting = _lifting(original := getattr(torch, name))
        put(torch, **{name: lifting})
        known[id(lifting)] = known.get(id(original))
        stack.callback(known.pop, id(lifting))
    for name in ("_lazy_init", "_lazy_call"):
        put(torch.cuda, **{name: always(None)})
    for name, value in _OF_DRIVER.items():
        put(torch._C, **{name: always(value)})
    put(torch.backends.cudnn, is_acceptable=always(False))
    put(torch.distributions.Distribution, _validate_args=False)  # of values, which are not known
    put(torch._C, _scatter=lambda tensor, *_: (tensor.to("cuda"),))  # of DataParallel
    put(torch.Tensor, _make_subclass=_subclassing(torch.Tensor._make_subclass))
    put(torch.UntypedStorage, data_ptr=_address_of(torch.UntypedStorage.data_ptr))
    put(FakeTensor, data_ptr=storage_key, __deepcopy__=_copied, __reduce_ex__=_reduced)
    data = vars(torch._C.TensorBase)["data"]
    put(nn.Parameter, data=property(data.__get__, lambda old, new: _set_data(data, old, new)))
    put(nn.Module, _apply=lambda module, function, recurse=True: _applied(data, module, function, recurse))


def _lifting(original: Any) -> Any:
    def make(*args: Any, **kwargs: Any) -> Any:
        """Make a tensor on the CPU and move it, also in a thread of autograd: each thread has a flag for it."""
        torch._C._set_only_lift_cpu_tensors(True)
        try:
            return original(*args, **kwargs)
        except NotImplementedError:  # a list of numbers on the GPU, which torch reads below all modes
            numbers = tree_map(lambda leaf: leaf.item() if isinstance(leaf, fake_class()) else leaf, args[0])
            return original(numbers, *args[1:], **kwargs)

    return make


def _address_of(original: Any) -> Any:
    def address(storage: Any) -> int:
        """Return a storage's address; of one without bytes a number that no other has."""
        return storage._cdata if storage.device.type in ("cuda", "meta") else original(storage)  # type: ignore[no-any-return]

    return address


def _copied(tensor: Any, memo: dict[int, Any]) -> Any:
    copy = tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        copy = nn.Parameter(copy, tensor.requires_grad)
    memo[id(tensor)] = copy.requires_grad_(tensor.requires_grad)
    return copy


def _reduced(tensor: Any, protocol: int) -> Any:
    layout = tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device.type
    return _rebuilt, (*layout, isinstance(tensor, nn.Parameter), tensor.requires_grad)


def _rebuilt(shape: Any, stride: Any, dtype: Any, device: str, is_parameter: bool, requires_grad: bool) -> Any:
    tensor = torch.empty_strided(shape, stride, dtype=dtype, device=_LOADED_TO[-1] or device)
    return nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)


@contextmanager
def loading(map_location: Any) -> Iterator[None]:
    """Let torch.load read the layouts that `_reduced` has written, to where `map_location` says."""
    is_named = isinstance(map_location, (str, torch.device))
    _LOADED_TO.append(torch.device(map_location).type if is_named else "cpu" if callable(map_location) else "")
    try:
        with torch.serialization.safe_globals([_rebuilt, float]):
            yield
    finally:
        _LOADED_TO.pop()


def _set_data(data: Any, old: Any, new: Any) -> None:
    """Set a tensor's data; where torch cannot, from or to a fake one, the two objects swap their contents."""
    if new is old:
        return
    are_fake = [hasattr(tensor, "fake_mode") for tensor in (old, new)]
    is_alike = type(old) is type(new) and old.device == new.device if any(are_fake) else True
    if is_alike and torch._has_compatible_shallow_copy_type(old, new):
        data.__set__(old, new)
        return
    is_parameter = isinstance(old, nn.Parameter)
    moved: Any = nn.Parameter(new.detach(), old.requires_grad) if is_parameter else new.detach()
    # A package's class of parameters, such as bitsandbytes' Params4bit, stays with its attributes.
    kind = next(base for base in type(old).__mro__ if not issubclass(base, fake_class()))
    if is_parameter and kind not in (torch.Tensor, nn.Parameter):
        moved = _of_kind(kind, moved, vars(old))
    # In spite of weak references: FakeTensorMode's memo has one to each tensor.
    with patch.object(torch.utils.swap_tensors.__globals__["weakref"], "getweakrefs", always([])):
        torch.utils.swap_tensors(old, moved)


_MIXED: dict[tuple[type, type], type] = {}  # a package's class of parameters, and of fake tensors -> one that is both


def _of_kind(kind: type, tensor: Any, attributes: Any) -> Any:
    """Return a tensor with a further class and attributes."""
    if not isinstance(tensor, kind):
        pair, attributes = (kind, type(tensor)), {**attributes, **vars(tensor)}
        _MIXED.setdefault(pair, type(kind.__name__, pair, {}) if isinstance(tensor, fake_class()) else kind)
        tensor.__class__ = _MIXED[pair]
        vars(tensor).update(attributes)
    return tensor


def _subclassing(original: Any) -> Any:
    def make(*args: Any, **kwargs: Any) -> Any:
        """Make a tensor of a package's class, which from a fake one is fake too."""
        kind, tensor, *requires_grad = args
        if isinstance(tensor, fake_class()) and not issubclass(kind, fake_class()):
            return _of_kind(kind, tensor.detach(), {}).requires_grad_(*requires_grad or (False,))
        return original(*args, **kwargs)

    return staticmethod(make)


def _applied(data: Any, module: Any, function: Any, recurse: bool) -> Any:
    """Return the module with a function applied to its tensors, as `nn.Module._apply` does when it swaps."""
    if isinstance(module, torch.jit.ScriptModule):
        raise NoRule("modules of TorchScript have no rule; run the module that was scripted")
    if recurse:
        for child in module.children():
            child._apply(function)
    for parameter in module._parameters.values():
        if parameter is not None:
            grad, parameter.grad = parameter.grad, None
            with torch.no_grad():
                _set_data(data, parameter, function(parameter))
                parameter.grad = None if grad is None else function(grad)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = function(buffer)
    return module
