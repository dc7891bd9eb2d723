"""The import of torch, and every use of a name that torch keeps private, each with its fallback.

tests/test_torch_access.py fails when torch changes one of these names.
"""

import gc
import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from threading import get_ident
from types import ModuleType
from typing import Any

from bertscope.errors import BertscopeError, SelectionError, name_of, one_line
from bertscope.torch_import import load_meta_kernels, quick_import

with quick_import() as _is_new:
    import torch

from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

__all__ = [
    "index_row",
    "load_dynamo_later",
    "nn",
    "on_device",
    "register_optimizer_step_post_hook",
    "register_optimizer_step_pre_hook",
    "torch",
    "tree_leaves",
    "tree_map",
]

_DEFAULT_THREADS = torch.get_num_threads() if _is_new else 0


def threads_of_import() -> int:
    """Return the number of threads that torch chose; 0 if it was imported before, when somebody may have changed it."""
    return _DEFAULT_THREADS


class DispatchMode(TorchDispatchMode):
    """torch's TorchDispatchMode, in which compiled functions run as they were written.

    torch protects each call of a mode from torch.compile, which imports torch._dynamo (0.7 s) and takes longer than
    most of what our modes do in a call. Here nothing is compiled as long as the mode is active.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stances = ExitStack()
        self.stance: dict[str, Any] = {"stance": "force_eager"}

    def run_compiled(self) -> None:
        """Run what was compiled before, without its guards, which would refuse a tensor because of the mode."""
        self.stance = {"stance": "eager_on_recompile", "skip_guard_eval_unsafe": True}

    def __enter__(self) -> Any:
        if "torch._dynamo.eval_frame" in sys.modules:
            self.stances.enter_context(torch.compiler.set_stance(**self.stance))
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.stances.close()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def _unless_on_meta(owner: Any, name: str) -> tuple[Any, str, Any, Any]:
    """Return a method that gives initial values, with one that leaves a tensor, or a weight, on meta as it is."""
    original = getattr(owner, name)

    def fill(target: Any, *args: Any, **kwargs: Any) -> Any:
        tensor = target.weight if isinstance(target, nn.Module) else target
        return target if tensor is not None and tensor.is_meta else original(target, *args, **kwargs)

    return owner, name, original, fill


# Initial values of tensors on meta take half of a build, and `normal_` imports torch._dynamo there (1.4 s). The modules
# are what a BERT has by the hundred.
_FILLING = [_unless_on_meta(kind, "reset_parameters") for kind in (nn.Linear, nn.LayerNorm, nn.Embedding)]
_FILLING += [_unless_on_meta(torch.Tensor, name) for name in ("uniform_", "normal_", "fill_", "zero_")]


def _replace_method(owner: Any, name: str, old: Any, new: Any) -> None:
    if getattr(owner, name) is old:  # not replaced by another thread, nor by somebody else
        setattr(owner, name, new)


@contextmanager
def on_device(device: str | torch.device) -> Iterator[None]:
    """Create tensors on the device, as `with torch.device(device)` does; on meta without work for initial values.

    Raises SelectionError for a device that torch does not know or find.
    """
    try:
        target = torch.empty(0, device=torch.device(device)).device
    except Exception:  # each backend has its own class
        text = one_line(repr(device), limit=60)
        raise SelectionError(f"{name_of('device')} {text} is none that torch finds here; use meta or cpu") from None
    with ExitStack() as stack:
        stack.enter_context(target)
        for owner, name, original, fill in _FILLING if target.type == "meta" else ():
            _replace_method(owner, name, original, fill)
            stack.callback(_replace_method, owner, name, fill, original)
        yield


def index_row(length: int, *, counting: bool) -> torch.Tensor:
    """Return 0, 1 ... length-1, or zeros, of shape (1, length); on meta always zeros, since `arange` takes 0.4 s."""
    row = torch.zeros(1, length, dtype=torch.long)
    return torch.arange(length).unsqueeze(0) if counting and not row.is_meta else row


def always(value: Any) -> Callable[..., Any]:
    """Return a function that returns this value for any arguments."""

    def answer(*_: Any, **__: Any) -> Any:
        return value

    return answer


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that tensors with the same storage share while it exists, also without values.

    Fallback: the identity of the Python object, which torch keeps as long as the storage.
    """
    try:
        return key_of(tensor.untyped_storage())
    except NotImplementedError:  # a wrapper of torch.func
        return id(tensor)


def key_of(storage: Any) -> int:
    """Return the number that identifies a storage."""
    return getattr(storage, "_cdata", id(storage))


def saved_tensors(node: Any) -> list[torch.Tensor]:
    """Return what a node of autograd's graph saves for backward; of one that has run, nothing."""
    names = ["saved_tensors", *(name for name in dir(node) if name.startswith("_saved_"))]
    saved: list[Any] = []
    for name in names:
        with suppress(RuntimeError, AttributeError):
            value = getattr(node, name)
            saved += value if isinstance(value, (tuple, list)) else [value]
    return [value for value in saved if isinstance(value, torch.Tensor)]


def use_counts(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Return the numbers of references to the tensor and to its storage.

    Fallback: None; a sum of gradients then counts as a new tensor, and an estimate may be too high.
    """
    try:
        return tensor._use_count(), torch._C._storage_Use_Count(storage_key(tensor))  # type: ignore[attr-defined]
    except (AttributeError, TypeError):
        return None


def autograd_node() -> Any:
    """Return the node that backward evaluates, None outside backward.

    Fallback: None; work in backward then belongs to no module.
    """
    current = getattr(torch._C, "_current_autograd_node", None)
    return current and current()


def in_backward() -> bool:
    """Return True if a backward pass runs. Fallback: True if it evaluates a node."""
    task = getattr(torch._C, "_current_graph_task_id", None)
    return autograd_node() is not None if task is None else bool(task() != -1)


def running_frames(thread: int) -> Iterator[Any]:
    """Yield the frame that runs this generator's caller, and if this is another thread that which runs in `thread`."""
    yield sys._getframe(1)
    if get_ident() != thread:
        yield sys._current_frames().get(thread)


def record_name(name: str) -> AbstractContextManager[Any]:
    """Return a context that the profiler shows under `name`, and that no dispatch mode sees.

    Fallback: `record_function`, which dispatch modes see.
    """
    fast = getattr(getattr(torch._C, "_profiler", None), "_RecordFunctionFast", torch.profiler.record_function)
    return fast(name)


def profiled_events(profiler: torch.autograd.profiler.profile) -> list[Any]:
    """Return the profiler's events as trees, with each allocation and its address.

    Fallback: BertscopeError, since no documented function in torch gives the addresses.
    """
    try:
        return profiler.kineto_results.experimental_event_tree()  # type: ignore[union-attr]
    except AttributeError:
        message = f"torch {torch.__version__} does not show its allocations; measure with another version of torch"
        raise BertscopeError(message) from None


def is_of_device(event: Any) -> bool:
    """Return True for a profiled event of the driver or of the GPU, where a mark on the host is shown once more.

    Fallback: False.
    """
    return str(getattr(event, "tag", "")).endswith("Kineto")


def has_kernel(operator: Any, key: str) -> bool:
    """Return True if torch itself has a kernel of an operator for a dispatch key. Fallback: False."""
    try:
        return bool(operator.has_kernel_for_dispatch_key(key))
    except (AttributeError, RuntimeError):  # RuntimeError: an overload of TorchScript only, such as mul.left_t
        return False


@cache
def operator_name(operator: Any) -> str:
    """Return an operator's name without namespace and overload, such as `add_`."""
    return str(operator.name()).rpartition("::")[2].partition(".")[0]


def argument_names(operator: Any) -> list[str]:
    """Return the names of an operator's arguments. Fallback: none."""
    schema = getattr(operator, "_schema", None)
    return [argument.name for argument in schema.arguments] if schema is not None else []


def run_kernel(operator: Any, key: str, args: Any, kwargs: Any) -> Any:
    """Run the kernel of a dispatch key, such as one that a package registered from Python. It has no replacement."""
    return operator._op_dk(getattr(torch._C.DispatchKey, key), *args, **kwargs)


def operator_packet(operator: Any) -> Any:
    """Return all overloads of an operator as one. Fallback: a look-up by name."""
    return getattr(operator, "_overloadpacket", None) or getattr(torch.ops.aten, operator_name(operator))


def fake_device(operator: Any, args: Any) -> torch.device | None:
    """Return the device of a fake tensor if the operator asks for it, as torch does several times for each operator.

    Fallback: None, as for any other operator; the question is then dispatched, and a run takes twice as long.
    """
    asks = operator is getattr(torch.ops.prim.device, "default", None)
    return getattr(args[0], "fake_device", None) if asks else None


def is_view(operator: Any) -> bool:
    """Return True if an operator's result is a view of its input. Fallback: False; a view then moves bytes."""
    schema = getattr(operator, "_schema", None)
    alias = schema.returns[0].alias_info if schema is not None and schema.returns else None
    return alias is not None and not alias.is_write


def written_tensors(operator: Any, args: Any, *, or_returned: bool = False) -> list[Any]:
    """Return the tensors that an operator writes and does not return, as `_foreach_add_` does. Fallback: none.

    With `or_returned` those too that it returns, as `relu_` does.
    """
    schema = getattr(operator, "_schema", None)
    if schema is None or (schema.returns and not or_returned):
        return []
    pairs = zip(schema.arguments, args, strict=False)
    written = [value for row, value in pairs if row.alias_info is not None and row.alias_info.is_write]
    return [leaf for leaf in tree_leaves(written) if hasattr(leaf, "itemsize")]  # a tensor, also in a log


def replace_kernel(library: torch.library.Library, name: Any, kernel: Callable[..., Any], key: str) -> None:
    """Register a kernel without torch's warning, on a process's first one, that it replaces another."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl(name, kernel, key)


def close_library(library: torch.library.Library) -> None:
    """Remove the kernels that a library registered. Fallback: the last reference to it removes them."""
    getattr(library, "_destroy", always(None))()


@cache
def has_bf16_products() -> bool:
    """Return True for a CPU with AVX-512 for bf16 and without AMX. Fallback: False; scratchpads are then left out."""
    names = "_is_avx512_bf16_supported", "_is_amx_tile_supported"
    has_bf16, has_amx = (getattr(torch.cpu, name, always(False))() for name in names)
    return has_bf16 and not has_amx


def fake_tensor_mode(**settings: Any) -> Any:
    """Return a new FakeTensorMode, under which tensors have no values. It has no documented replacement."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    load_dynamo_later()
    return FakeTensorMode(**settings)


@cache
def fake_class() -> Any:
    """Return the class of fake tensors, once a FakeTensorMode was made."""
    return vars(sys.modules["torch._subclasses.fake_tensor"])["FakeTensor"]


def active_fake_mode() -> Any:
    """Return the FakeTensorMode that is entered; None outside. Fallback: None."""
    keys = getattr(torch._C, "_TorchDispatchModeKey", None)
    return None if keys is None else torch._C._get_dispatch_mode(keys.FAKE)


def fake_tensor_as(like: Any, shape: Any, stride: Any, dtype: Any, offset: int, *, shares: bool) -> Any:
    """Return a tensor of that layout, fake or on meta as another one is, in its storage or another."""
    if shares and torch.is_inference_mode_enabled() and not like.is_inference():
        with torch.inference_mode(False):  # where a view of an ordinary tensor is ordinary too
            return fake_tensor_as(like, shape, stride, dtype, offset, shares=shares)
    with torch._C._DisableTorchDispatch():
        if shares:
            layout = _on_meta(like, shape, stride, dtype, offset)
        else:
            layout = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return _fake_of(layout, like) if hasattr(like, "fake_mode") else layout


_FIELDS = "_bertscope_fields"  # of a FakeTensorMode: the attributes of a new fake tensor by its class and device


def _fake_of(layout: torch.Tensor, like: Any) -> Any:
    """Return a meta tensor as a fake one of the mode, the class and the device of another one.

    Fallback: the constructor, which takes five times the time; each device's first is compared with its.
    """
    # Not the class of `like`, which may be a package's class of parameters too.
    mode, fake, device = like.fake_mode, fake_class(), like.fake_device
    fields = vars(mode).setdefault(_FIELDS, {})
    if (fake, device) not in fields:
        fake_tensor = fake(mode, layout, device)
        fields[fake, device] = dict(vars(fake_tensor))
        try:
            short = _fake_of(layout, like)
            is_same = short.fake_mode is mode and short.device == device
            is_same &= vars(short).keys() == vars(fake_tensor).keys()
            is_same &= torch._C._dispatch_keys(short) == torch._C._dispatch_keys(fake_tensor)
        except (AttributeError, TypeError):
            is_same = False
        if not is_same:
            fields[fake, device] = None
        return fake_tensor
    if (known := fields[fake, device]) is None:
        return fake(mode, layout, device)
    fake_tensor = torch.Tensor._make_subclass(fake, layout, False, dispatch_device=True, device_for_backend_keys=device)
    torch._C._set_throw_on_mutable_data_ptr(fake_tensor)
    vars(fake_tensor).update(known)
    return fake_tensor


def _on_meta(like: torch.Tensor, shape: Any, stride: Any, dtype: Any, offset: int) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device="meta").set_(like.untyped_storage(), offset, shape, stride)


def run_on_meta(operator: Any, args: Any, kwargs: Any) -> tuple[list[Any], Any]:
    """Return meta tensors of the layouts of fake ones, in their storages, and an operator's result for them."""

    def on_meta(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return _on_meta(value, value.size(), value.stride(), value.dtype, int(value.storage_offset()))
        return torch.device("meta") if isinstance(value, torch.device) else value

    with torch._C._DisableTorchDispatch():
        meta_args = [on_meta(value) for value in args]
        return meta_args, operator(*meta_args, **{name: on_meta(value) for name, value in kwargs.items()})


def fake_parameter(fake: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    """Return a fake tensor as a parameter. Fallback: nn.Parameter, which detaches it first: ten times the time."""
    fake._is_param = True
    return fake.requires_grad_(requires_grad) if isinstance(fake, nn.Parameter) else nn.Parameter(fake, requires_grad)


def is_plain_fake(value: Any) -> bool:
    """Return True for a fake tensor with strides and real elements that has no value; some have that of a constant."""
    is_fake = getattr(value, "fake_mode", None) is not None
    return is_fake and value.constant is None and value.layout == torch.strided and not value.dtype.is_complex


def is_plain_meta(value: Any) -> bool:
    """Return True for a tensor on meta, of no other class, with strides and real elements."""
    is_meta = type(value) in (torch.Tensor, nn.Parameter) and value.is_meta
    return is_meta and value.layout == torch.strided and not value.dtype.is_complex


def value_errors() -> tuple[type[Exception], type[Exception]]:
    """Return the errors of FakeTensorMode for an operator whose result, or its shape, depends on values."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    return DataDependentOutputException, DynamicOutputShapeException


# ---- compiled modules ----


_INNER = "_orig_mod"  # the module inside torch.compile(module)


def compile_module(module: nn.Module) -> nn.Module:
    """Return the module compiled for the sizes that it gets, each separately."""
    os.environ["PYTHONSAFEPATH"] = "1"  # from Python 3.11: inductor's `python -c` imports from the working directory
    return torch.compile(module, dynamic=False)  # type: ignore[return-value]


def compiled_paths(module: nn.Module) -> list[str]:
    """Return the paths of the compiled modules that are in no other one; "" is the module itself.

    torch.compile returned them, or their compile() was called. Fallback: without torch's private names, none.
    """
    paths: list[str] = []
    for path, part in module.named_modules():
        has_module = _INNER in vars(part).get("_modules", ())
        is_compiled = has_module or getattr(part, "_compiled_call_impl", None) is not None
        if is_compiled and not _is_within(path, paths):
            paths.append(path)
    return paths


def uncompiled_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules with their paths, without those that are compiled or inside one: a hook would be compiled."""
    compiled = compiled_paths(module)
    for path, part in module.named_modules():
        if not _is_within(path, compiled):
            yield path, part


def _is_within(path: str, paths: Collection[str]) -> bool:
    return any(not outer or path == outer or path.startswith(f"{outer}.") for outer in paths)


def without_compiler(module: nn.Module) -> nn.Module:
    """Return the module inside torch.compile(module); any other module is returned as it is."""
    inner = vars(module).get("_modules", {}).get(_INNER)
    return module if inner is None else inner


# ---- torch._dynamo, which takes half a second of CPU time to load and which an analysis hardly ever needs ----


class _LaterRules:
    """torch._dynamo.trace_rules before its package has run; torch.distributed empties its cache without a test."""

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module("torch._dynamo.trace_rules"), name)

    def clear_lru_cache(self) -> None:
        """Do nothing: nothing is cached yet."""


class _LaterPackage(ModuleType):
    """torch._dynamo before its code has run, which happens when an attribute that it does not have yet is read."""

    def __getattr__(self, name: str) -> Any:
        if not self.__dict__.get("is_waiting"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self.is_waiting = False
        self.__dict__.pop("trace_rules", None)  # the package imports the module of that name
        spec: Any = self.__spec__
        self.__path__ = spec.submodule_search_locations
        try:
            with torch._C._DisableTorchDispatch():  # its tensors are no model's
                spec.loader.exec_module(self)
        except BaseException:  # the next use tries again, as after an import that failed
            del self.__path__
            self.is_waiting = True
            raise
        gc.collect()  # the cycles that it leaves hold the frames of its callers, and with them a model's tensors
        return getattr(self, name)

    def disable(self, function: Any = None, *settings: Any, **more: Any) -> Any:
        """Return a function that runs `function` as it is, and once the package is loaded, without compiling it."""
        disabled: list[Any] = []

        def run(*args: Any, **kwargs: Any) -> Any:
            if self.is_waiting:
                return function(*args, **kwargs)
            if not disabled:
                disabled.append(self.__dict__["disable"](function, *settings, **more))
            return disabled[0](*args, **kwargs)

        return run if function is not None else self.decorators.disable(None, *settings, **more)

    def graph_break(self, *_: Any) -> None:
        """Do nothing, as outside a compiled function; each step of an optimizer calls it."""

    def is_compiling(self) -> bool:
        """Return False, as outside a compiled function; the models in transformers ask in each forward."""
        return False


def load_dynamo_later() -> None:
    """Have torch._dynamo run its code at its first real use; call this before operators run on meta.

    torch imports it (0.5 s of CPU time) to exclude meta kernels and dispatch modes from torch.compile, which is not in
    use while the package is not loaded. The package has no search path, which Python reads to import a module in it:
    any other use runs the package first, as an import does. Its settings, which FakeTensorMode reads, are there without
    it: they are a module that imports nothing of the package.
    Fallback: where the package is loaded or cannot be found, nothing.
    """
    load_meta_kernels()
    name = "torch._dynamo"
    if name in sys.modules or (spec := find_spec(name)) is None or spec.loader is None:
        return
    package = module_from_spec(spec)
    del package.__path__
    package.__class__ = _LaterPackage
    package.is_waiting = True  # type: ignore[attr-defined]
    package.trace_rules = _LaterRules()  # type: ignore[attr-defined]
    torch._dynamo = sys.modules[name] = package
    settings = f"{name}.config"
    path = Path(str(spec.origin)).with_name("config.py")
    if path.is_file() and (config := spec_from_file_location(settings, path)) and config.loader:
        package.config = sys.modules[settings] = module_from_spec(config)  # type: ignore[attr-defined]
        config.loader.exec_module(package.config)
