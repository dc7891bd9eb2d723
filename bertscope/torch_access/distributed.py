"""Private names in torch that concern the ranks of a job and their tensors."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any
from unittest.mock import patch

from bertscope.torch_access import key_of, torch

_REDUCTIONS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")  # of functional collectives


def is_wrapper(kind: type) -> bool:
    """Return True for a class of tensors that hold their data in other tensors, such as DTensor."""
    return hasattr(kind, "__tensor_flatten__")


def held_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that hold a tensor's data: this rank's shard of a DTensor, else the tensor itself."""
    if not is_wrapper(type(tensor)):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        inner = getattr(tensor, name)
        if isinstance(inner, torch.Tensor):
            yield from held_tensors(inner)


def tensors_in(value: Any, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """Yield the tensors that an object refers to: an output, its tuples and mappings, and objects such as a cache."""
    seen = set() if seen is None else seen
    if isinstance(value, torch.Tensor):
        yield from held_tensors(value)
    elif id(value) not in seen and not isinstance(value, torch.nn.Module | type):
        seen.add(id(value))
        parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
        for part in (*parts, *vars(value).values()) if hasattr(value, "__dict__") else parts:
            yield from tensors_in(part, seen)


@contextmanager
def watched_resizes(resized: Callable[[int, Any, int], None]) -> Iterator[None]:
    """Call `resized` after each resize of a storage from Python, which no mode sees, with its key and bytes before."""
    original = torch.UntypedStorage.resize_

    def resize(storage: Any, size_bytes: int) -> Any:
        before = storage.nbytes()
        result = original(storage, size_bytes)
        resized(key_of(storage), storage, before)
        return result

    with patch.object(torch.UntypedStorage, "resize_", resize):
        yield


@contextmanager
def watched_gathers(gathering: Callable[[str], AbstractContextManager[None]]) -> Iterator[None]:
    """Enter `gathering` with the path of a module while FSDP2 gathers its parameters.

    In backward FSDP2 gathers those of one layer while another one runs. Fallback: nothing is entered.
    """
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    except ImportError:
        yield
        return
    original: Any = FSDPParamGroup.unshard

    def unshard(group: Any, *args: Any, **kwargs: Any) -> Any:
        with gathering(getattr(group, "_module_fqn", None) or ""):
            return original(group, *args, **kwargs)

    with patch.object(FSDPParamGroup, "unshard", unshard):
        yield


def set_gradient_sync(model: Any, is_on: bool) -> None:
    """Have the next backward of a model in FSDP2 or DDP reduce its gradients, or not."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(is_on)
    else:
        model.require_backward_grad_sync = is_on  # which DDP.no_sync sets


def unreduced_gradients(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the full gradients that FSDP2 keeps for the next micro-batch, with the paths of their parameters."""
    for path, module in model.named_modules():
        if not hasattr(module, "set_requires_gradient_sync"):
            continue
        state: Any = module._get_fsdp_state()
        groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
        for param in (param for group in groups if group is not None for param in group.fsdp_params):
            unsharded = getattr(param, "_unsharded_param", None)  # before the first forward there is none
            gradient = param.unsharded_accumulated_grad
            gradient = unsharded.grad if gradient is None and unsharded is not None else gradient
            if gradient is not None:
                yield getattr(param, "_param_fqn", None) or path, gradient


def fake_store() -> Any:
    """Return the store of a process group without communication. It has no documented replacement."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def real_tensors() -> AbstractContextManager[Any]:
    """Return a context without FakeTensorMode."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def process_group(args: Any) -> Any:
    """Return the process group in a collective's arguments; None without one.

    The operators of c10d have the group itself as a script object, the functional ones its name.
    """
    for value in args:
        if isinstance(value, torch.ScriptObject):
            with suppress(RuntimeError, TypeError):  # of another script object, such as the kind of reduction
                return torch.distributed.ProcessGroup.unbox(value)
        if isinstance(value, str) and value not in _REDUCTIONS:
            from torch.distributed import distributed_c10d

            resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
            return resolve(value)
    return None


def gloo_in_one_thread(interface: str) -> str:
    """Register the backend of gloo whose groups run their collectives one after the other, and return its name.

    Two threads, which are gloo's default, may hold the tensors of a collective that has ended while the next ones run.
    """
    gloo: Any = torch.distributed.ProcessGroupGloo

    def group(store: Any, rank: int, size: int, timeout: Any) -> Any:
        options = gloo._Options()
        options._devices, options._timeout, options._threads = [gloo.create_device(interface=interface)], timeout, 1
        return gloo(store, rank, size, options)

    torch.distributed.Backend.register_backend("gloo_in_one_thread", group, devices=["cpu"])
    return "gloo_in_one_thread"


def drain(group: Any) -> None:
    """Wait until a group that runs in one thread holds no tensor.

    The thread drops the tensors of a collective before it begins the next one. A barrier would not do: it keeps weak
    references to the collectives before it, and their tensors live as long as these.
    """
    group._get_backend(torch.device("cpu")).allreduce([torch.zeros(1)]).wait()


def forget_meshes() -> None:
    """Clear what DTensor remembers of operators, with the meshes of their results, whose process groups are gone.

    Fallback: nothing; then the number of ranks of a later collective may be that of an earlier job.
    """
    with suppress(ImportError, AttributeError):  # torch.distributed.tensor.debug does both, and loads torch._dynamo
        from torch.distributed.tensor import DTensor

        dispatcher: Any = DTensor._op_dispatcher
        dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    with suppress(AttributeError):
        torch._C._clear_DTensor_sharding_propagator_cache()
    with suppress(ImportError, AttributeError):
        from torch.distributed.tensor import _redistribute

        _redistribute._gen_transform_infos.cache_clear()
