"""The stubs that a script finds instead of a GPU: torch.cuda answers from the simulated allocator.

Everything here is put back at the end of the context, so that a function can run in a user's own process.
"""

import io
import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial, wraps
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from inspect import signature
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from bertscope.checkpoints.safetensors import DTYPES
from bertscope.dry_run.device import FakeGpu
from bertscope.dry_run.script import ScriptRun
from bertscope.errors import BertscopeError
from bertscope.gpus import capability, processors, sdpa_kernel
from bertscope.memory.extension_kernels import package_actions
from bertscope.memory.kernels import attention
from bertscope.sources.find import find
from bertscope.torch_access import always, nn, torch
from bertscope.torch_access.distributed import fake_store
from bertscope.torch_access.fake_gpu import NoRule, Put, loading
from bertscope.transformers_access import ForOwnCode, stand_in_when_asked

_MEMORY = 80 * 2**30  # of a GPU without a name
# Functions of torch.cuda that return nothing: what waits for the GPU or empties it, and calls that wait for CUDA to be
# initialized, as seeds do.
_IGNORED = """
    _lazy_init _lazy_call init set_device synchronize ipc_collect set_per_process_memory_fraction
    _record_memory_history _dump_snapshot check_error mark range_push range_pop range_start range_end set_device_index
    set_device_idx
"""
_ZERO = """
    current_device current_device_index current_device_idx initial_seed utilization _exchange_device
    _maybe_exchange_device
"""
_HANDLES = "Stream Event stream current_stream default_stream device device_of cudart"
# Keywords of from_pretrained that say from where.
_OF_HUB = """
    cache_dir force_download proxies token local_files_only revision trust_remote_code subfolder commit_hash
    gguf_file resume_download use_auth_token code_revision
"""
_LEGACY = [f"{kind}Tensor" for kind in ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Byte", "Bool")]
_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "ACCELERATE_DISABLE_RICH")
_CUDA_VERSION = "12.8"
_HANDLED = {"elapsed_time": 1.0, "query": True, "is_capturing": False}


class _Imports(MetaPathFinder):
    """Calls a function with each module of a table when a script imports it."""

    def __init__(self, actions: Mapping[str, Callable[[Any], None]]) -> None:
        self.waiting = dict(actions)
        for name in self.waiting.keys() & sys.modules.keys():
            self.waiting.pop(name)(sys.modules[name])

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec of a module of the table, whose code is followed by the function."""
        act = self.waiting.pop(fullname, None)
        spec = None if act is None else find_spec(fullname)
        if act is not None and spec is not None and spec.loader is not None:
            original = spec.loader.exec_module

            def run(module: Any) -> None:
                original(module)
                act(module)

            spec.loader.exec_module = run  # type: ignore[method-assign]
        return spec


class _Handle:
    """A stream, an event or an index of the GPU: nothing waits for it."""

    device_index = cuda_stream = priority = idx = prev_idx = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cuda", 0)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: _HANDLED.get(name, self)


@contextmanager
def stubbed(
    script_run: ScriptRun, device: FakeGpu, actions: Mapping[str, Callable[[Put, Any], None]]
) -> Iterator[None]:
    """Let the code in this context find the GPU: torch.cuda, its kernel of attention, what cannot run on it.

    `actions` are called with modules of libraries when the code imports them. Only what is contained writes files.
    """
    with ExitStack() as stack:
        put = Put(stack)
        _cuda(put, device)
        _legacy_types(put)
        _kernels(put, stack, device)
        _saving(put, bool(script_run.sandbox))
        _ranks(put)
        offline = {} if script_run.network else dict.fromkeys(_OFFLINE, "1") | {"WANDB_MODE": "disabled"}
        stack.enter_context(patch.dict(os.environ, offline))

        known: dict[str, Callable[[Any], None]] = {
            "torch.distributed.launcher.api": lambda module: put(module.elastic_launch, __call__=_refuse_ranks),
            "torch.utils.cpp_extension": lambda module: put(
                module, load=_without_cuda(module.load), load_inline=_without_cuda(module.load_inline)
            ),
            **package_actions(put, device.note, device.overwritten),
            "safetensors.torch": lambda module: put(
                module, save_file=_save_layout if script_run.sandbox else always(None)
            ),
            # transformers 5 keeps the mask of a fake tensor without asking if it hides positions
            "transformers.utils.import_utils": lambda module: put(module, is_fake_tensor=lambda _: False),
            "transformers.configuration_utils": lambda module: _else_of_preset(
                put, module.PretrainedConfig, "get_config_dict", _config_of
            ),
            "transformers.modeling_utils": partial(_models, put, device),
            # beam search asks scores, which are not known, whether a longer sequence can be better
            "transformers.generation.utils": lambda module: put(
                module.GenerationMixin, _beam_search_has_unfinished_sequences=staticmethod(_has_unfinished)
            ),
        }
        finder = _Imports(known | {name: partial(act, put) for name, act in actions.items()})
        sys.meta_path.insert(0, finder)
        stack.callback(sys.meta_path.remove, finder)
        stack.enter_context(ForOwnCode())
        yield


def _models(put: Put, device: FakeGpu, module: Any) -> None:
    _else_of_preset(put, module.PreTrainedModel, "from_pretrained", partial(_model_of, device))
    stand_in_when_asked(put.stack, device.note)


def _else_of_preset(put: Put, kind: Any, name: str, otherwise: Callable[..., Any]) -> None:
    """Let a class in transformers take the preset of a name on the hub, where nothing is in the cache."""
    original = getattr(kind, name).__func__

    def method(cls: Any, /, source: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(cls, source, *args, **kwargs)
        except OSError:
            with suppress(BertscopeError):
                if not os.path.exists(str(source)):
                    return otherwise(cls, find(str(source)), source, *args, **kwargs)
            raise

    put(kind, **{name: classmethod(method)})


def _has_unfinished(better: Any, is_finished: Any, hits_criteria: torch.Tensor, *_: Any) -> bool:
    return not hits_criteria.all()


def _config_of(cls: Any, preset: Any, name: str, **kwargs: Any) -> Any:
    settings = preset.settings if preset.bert_config is None else preset.bert_config.to_dict()
    return dict(settings), {key: value for key, value in kwargs.items() if key not in _OF_HUB.split() and key[0] != "_"}


def _model_of(device: FakeGpu, cls: Any, preset: Any, name: str, *args: Any, config: Any = None, **kwargs: Any) -> Any:
    """Return a preset's model without its weights, which are not here: they have no effect on memory."""
    model_config = config if config is not None else cls.config_class.from_pretrained(name)
    for key in [key for key in kwargs if hasattr(model_config, key)]:  # such as num_labels
        setattr(model_config, key, kwargs.pop(key))
    device.note(f"{name} was made from its preset: its weights are not here, and have no effect on memory")
    model = cls(model_config, *args).eval()
    dtype = kwargs.get("dtype", kwargs.get("torch_dtype"))
    return model.to(dtype) if isinstance(dtype, torch.dtype) else model


_LAYERDROP = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")  # of transformers' modules and configurations
NO_FAST_PATH = "an evaluation of nn.TransformerEncoderLayer ran without torch's fast path"


def fit_modules(put: Put, device: FakeGpu, model: nn.Module) -> None:
    """Note modules whose kernels on a GPU take more or less than their single operators, and drop no layers."""
    owners = {id(owner): owner for module in model.modules() for owner in (module, getattr(module, "config", None))}
    for owner, name in product(owners.values(), _LAYERDROP):
        if isinstance(getattr(owner, name, None), float) and getattr(owner, name) > 0:
            put(owner, **{name: 0.0})
            device.note("layerdrop: no layer was dropped, which is the upper bound")
    kinds = {type(module) for module in model.modules()}
    if any(issubclass(kind, nn.RNNBase) for kind in kinds):
        device.note("not counted: what cuDNN's recurrent layers reserve; they ran as single operators")
    if any(issubclass(kind, nn.TransformerEncoderLayer) for kind in kinds):
        device.note(NO_FAST_PATH)


def _cuda(put: Put, device: FakeGpu) -> None:
    gpu, allocator = device.gpu, device.allocator
    total = gpu.memory_bytes if gpu is not None else _MEMORY
    limit = total if allocator.limit_bytes is None else allocator.limit_bytes
    able = (capability(gpu) if gpu is not None else None) or (8, 0)
    about = SimpleNamespace(
        name=gpu.name if gpu is not None else "simulated GPU", major=able[0], minor=able[1], total_memory=total,
        gcnArchName="", warp_size=32, is_integrated=0, uuid="",
        multi_processor_count=(processors(gpu) if gpu is not None else None) or 108,
        max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, shared_memory_per_block=49152,
        shared_memory_per_block_optin=166912, L2_cache_size=2**25,
    )  # fmt: skip
    state = torch.zeros(16, dtype=torch.uint8)

    def stats(*_: Any, **__: Any) -> Any:
        counters: dict[str, int] = defaultdict(int)
        for kind in ("allocated", "reserved"):
            counters[f"{kind}_bytes.all.current"] = getattr(allocator, f"{kind}_bytes")
            counters[f"{kind}_bytes.all.peak"] = getattr(allocator, f"peak_{kind}_bytes")
        return counters

    def reset(*_: Any, **__: Any) -> None:
        allocator.peak_allocated_bytes = allocator.allocated_bytes
        allocator.peak_reserved_bytes = allocator.reserved_bytes

    def has_bf16(including_emulation: bool = True) -> bool:
        return able >= (8, 0) or including_emulation

    answers: dict[str, Any] = dict.fromkeys(_IGNORED.split()) | dict.fromkeys(_ZERO.split(), 0)
    answers |= dict.fromkeys(_HANDLES.split(), _Handle) | {
        "is_available": True, "is_initialized": True, "is_current_stream_capturing": False, "memory_summary": "",
        "device_count": lambda: max(_number("LOCAL_WORLD_SIZE", 1), _number("LOCAL_RANK", 0) + 1),
        "current_accelerator": torch.device("cuda"), "get_device_properties": about,
        "get_arch_list": [f"sm_{able[0]}{able[1]}"], "is_bf16_supported": has_bf16,
        "empty_cache": allocator.release_free_memory, "reset_peak_memory_stats": reset,
        **dict.fromkeys(("mem_get_info", "get_memory_info"), lambda *_: (
            max(limit - allocator.reserved_bytes, 0), total)),
        "memory_stats": stats, "get_allocator_backend": "native",
        "version": (2, 27, 7),  # of NCCL
        "_snapshot": {"segments": [], "device_traces": []}, "memory_snapshot": [],
        "get_rng_state": lambda *_, **__: state.clone(),
    }  # fmt: skip
    starts = ("torch.cuda", "torch.accelerator")
    for module in [module for name, module in sys.modules.items() if name.startswith(starts)]:
        put(module, **{key: _own(value) for key, value in answers.items() if key in vars(module)})


def _ctc_loss(device: FakeGpu, run: Any, scores: Any, labels: Any, spans: Any, lengths: Any, *args: Any) -> Any:
    """Compute CTC's loss with lengths as numbers, which CUDA's kernel takes; unknown ones are the longest."""
    if labels.dtype == torch.int32 and torch.backends.cudnn.enabled:
        device.note("not counted: the workspace of cuDNN's CTC loss; torch's own ran")
    longest = len(scores), labels.shape[-1]
    known = [device.value(size) if isinstance(size, torch.Tensor) else size for size in (spans, lengths)]
    numbers = zip(known, (spans, lengths), longest, strict=True)
    lists = ([most] * len(sizes) if value is None else list(map(int, value)) for value, sizes, most in numbers)
    return run(scores, labels, *lists, *args)


def _legacy_types(put: Put) -> None:
    """Have torch.cuda.FloatTensor and its like make tensors, and be a type for `Tensor.type`."""
    original, kinds = torch.Tensor.type, {name: partial(_legacy, getattr(torch, name).dtype) for name in _LEGACY}
    dtypes = {key: kind.args[0] for name, kind in kinds.items() for key in (f"torch.cuda.{name}", kind)}

    def typed(tensor: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        return tensor.to("cuda", dtypes[dtype]) if dtype in dtypes else original(tensor, dtype, *args, **kwargs)

    put(torch.cuda, **kinds)
    put(torch.Tensor, type=typed)


def _legacy(dtype: torch.dtype, *content: Any) -> torch.Tensor:
    if all(isinstance(size, int) for size in content):
        return torch.empty(content, dtype=dtype, device="cuda")
    return torch.tensor(content[0], dtype=dtype, device="cuda")


def _own(answer: Any) -> Any:
    """Return a separate function for an answer: torch.compile has a rule for each, and allows one for an object."""
    if isinstance(answer, type):
        return answer
    return (lambda *args, **kwargs: answer(*args, **kwargs)) if callable(answer) else always(answer)


def _kernels(put: Put, stack: ExitStack, device: FakeGpu) -> None:
    """Choose kernels as CUDA does, and take the ordinary ones where fake tensors have no other."""

    def chosen(dtype: torch.dtype) -> str:
        """Return the kernel of attention that the GPU and the script's own settings ask for."""
        able = torch.backends.cuda
        kernel = "auto" if device.gpu is None else sdpa_kernel(device.gpu, str(dtype)[6:])
        if kernel == "cudnn" and not getattr(able, "cudnn_sdp_enabled", lambda: False)():
            kernel = "auto"
        if kernel == "auto" and not able.flash_sdp_enabled():
            kernel = "efficient"
        return "math" if kernel == "efficient" and not able.mem_efficient_sdp_enabled() else kernel

    functional = nn.functional
    put(functional, scaled_dot_product_attention=attention(chosen, "cuda"))
    put(torch, ctc_loss=partial(_ctc_loss, device, torch.ctc_loss))

    def uncompiled(model: Any = None, **_: Any) -> Any:
        """Return a model as it is, and of a function one that notes its calls: packages compile some as they load."""
        note = partial(device.note, "torch.compile ran eagerly; compiled code needs less memory, or a little more")
        if model is None:
            return uncompiled
        if isinstance(model, nn.Module):
            note()
            return model
        return wraps(model)(lambda *args, **kwargs: (note(), model(*args, **kwargs))[1])

    if torch.version.cuda is None:  # packages choose their kernels by it
        put(torch.version, cuda=_CUDA_VERSION)
    put(torch.backends.cuda, is_flash_attention_available=always(True))
    put(torch, compile=uncompiled)
    put(nn.Module, compile=lambda module, *_, **__: uncompiled(module), share_memory=_refuse_ranks)
    is_fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    stack.callback(torch.backends.mha.set_fastpath_enabled, is_fast)
    original = torch.Generator

    class Generator(original):  # type: ignore[misc, valid-type]
        def __new__(cls, device: Any = None) -> Any:
            return original.__new__(cls)

    put(torch, Generator=Generator)
    put(torch, Stream=_Handle, Event=_Handle)
    put(torch.Tensor, record_stream=always(None))
    put(
        device.fake,
        coalesce=lambda tensor: tensor,  # of to_sparse, which stays strided
        item=lambda tensor: device.passed_on(tensor, torch.Tensor.item(tensor)),
        numpy=lambda tensor, force=False: torch.Tensor.numpy(device.on_cpu(tensor) if force else tensor),
        __format__=lambda tensor, spec: format(tensor.item(), spec) if tensor.dim() == 0 and spec else repr(tensor),
    )


def _saving(put: Put, is_contained: bool) -> None:
    """Keep in memory what a script saves to a file: tensors on the GPU as layouts, which loading allocates anew."""
    saved: dict[str, bytes] = {}
    given_save, given_load = torch.save, torch.load

    def save(content: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        is_path = isinstance(file, (str, os.PathLike))
        given_save(content, buffer := io.BytesIO() if is_path else file, *args, **kwargs)
        if is_path:
            if is_contained:
                Path(file).touch()
            saved[os.path.abspath(file)] = buffer.getvalue()

    def load(file: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        content = saved.get(os.path.abspath(file)) if isinstance(file, (str, os.PathLike)) else None
        if content is not None:
            file, kwargs = io.BytesIO(content), kwargs | {"mmap": False}
        with loading(map_location):
            return given_load(file, map_location, *args, **kwargs)

    put(torch, save=save, load=load)


def _save_layout(tensors: Mapping[str, torch.Tensor], filename: Any, metadata: Mapping[str, str] | None = None) -> None:
    """Write the safetensors file of tensors without their values, as zeros that take no space."""
    header: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
    codes = {dtype: code for code, (dtype, _) in DTYPES.items()}
    high = 0
    for name, tensor in tensors.items():
        low, high = high, high + tensor.numel() * tensor.itemsize
        dtype = codes[str(tensor.dtype)[6:]]
        header[name] = {"dtype": dtype, "shape": tuple(tensor.shape), "data_offsets": (low, high)}
    text = json.dumps(header).encode()
    with open(filename, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + high)


def _ranks(put: Put) -> None:
    """Let a script be one rank of several, without the others: collectives return at once."""
    ranks: Any = torch.distributed
    if not ranks.is_available():
        return
    from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

    Ddp = nn.parallel.DistributedDataParallel
    initialize, construct, register_hook = ranks.init_process_group, Ddp.__init__, Ddp.register_comm_hook
    make_group = ranks.new_group

    def begin(*_: Any, **__: Any) -> None:
        """Make the group of fake ranks, of the size that torchrun's variables say."""
        initialize("fake", store=fake_store(), rank=_number("RANK", 0), world_size=_number("WORLD_SIZE", 1))

    def wrap(module: Any, *args: Any, **kwargs: Any) -> None:
        """Wrap a module; the reducer expects a tensor of a collective, which no fake group returns."""
        construct(module, *args, **kwargs)
        register_hook(module, None, noop_hook)
        module.logger = _Handle()

    def group(*args: Any, backend: Any = None, **kwargs: Any) -> Any:
        return make_group(*args, **kwargs)

    def gather_objects(gathered: Any, item: Any, *_: Any, **__: Any) -> None:
        """Fill a list with this rank's object, as if every rank had sent the same."""
        gathered[:] = [item] * len(gathered)

    answers = {
        "init_process_group": begin, "new_group": group, "all_gather_object": gather_objects,
        "broadcast_object_list": always(None), "is_nccl_available": always(True),
    }  # fmt: skip
    originals = {key: getattr(ranks, key) for key in answers}
    for module in [module for name, module in sys.modules.items() if name.startswith("torch.distributed")]:
        put(module, **{key: answers[key] for key, known in originals.items() if vars(module).get(key) is known})
    put(torch.multiprocessing, spawn=_refuse_ranks)
    put(Ddp, __init__=wrap, register_comm_hook=always(None))
    put(ranks.Reducer, prepare_for_forward=always(None))  # it takes the time, from the driver


def _without_cuda(build: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that builds an extension of C++, and refuses one of CUDA, whose kernels nothing would run."""

    def refuse_or_build(*args: Any, **options: Any) -> Any:
        named = signature(build).bind(*args, **options).arguments
        files = [named["sources"]] if isinstance(named.get("sources"), str) else named.get("sources", ())
        if named.get("cuda_sources") or any(str(file).endswith(".cu") for file in files):
            raise NoRule(f"extension {named['name']} of CUDA sources has no rule; @bertscope.kernel registers one")
        return build(*args, **options)

    return refuse_or_build


def _number(variable: str, otherwise: int) -> int:
    return int(os.environ.get(variable, otherwise))


def _refuse_ranks(*_: Any, **__: Any) -> None:
    raise NoRule("a process for each rank would start; run one rank, with the variables that torchrun sets")
