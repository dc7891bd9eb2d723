"""Modules of any model: how they are built on meta and copied, their lists of layers, and the recomputation of these.

Also a model is built on meta whose constructor reads values, which meta tensors do not have.
"""

import copy
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from bertscope.errors import SelectionError, SourceError, name_of
from bertscope.model.attention import say_once
from bertscope.model.save_policy import save_operators
from bertscope.settings.checkpointing import FULL, SELECTIVE, Checkpointing
from bertscope.torch_access import DispatchMode, nn, on_device, storage_key, torch, tree_leaves
from bertscope.units import bytes_text


def layer_lists(model: nn.Module) -> dict[str, list[str]]:
    """Return the paths of the lists of layers, each with its layers' paths.

    The layers are those in lists of one class, else the model's children, each a list with one layer.
    """

    def is_stack(module: nn.Module) -> bool:  # a Sequential of one module is none
        least = 1 if isinstance(module, nn.ModuleList) else 2 if isinstance(module, nn.Sequential) else 10**9
        return len(list(module.children())) >= least and len(set(map(type, module.children()))) == 1

    stacks = outermost(model, is_stack)
    layers = {f"{path}.{name}": layer for path, stack in stacks.items() for name, layer in stack.named_children()}
    if not layers:
        return {path: [path] for path, child in model.named_children() if any(True for _ in child.parameters())}
    lists: dict[str, list[str]] = {}
    for path, layer in layers.items():
        if any(True for _ in layer.parameters()):
            lists.setdefault(path.rpartition(".")[0], []).append(path)
    return lists


def recompute_layers(model: nn.Module, chosen: Checkpointing) -> None:
    """Recompute the layers that `chosen` names except for the operators that it saves; raises ConfigError."""
    unwrapped: Any = getattr(model, "get_base_model", None)
    lists = layer_lists(unwrapped() if unwrapped else model)
    chosen.check_lists(lists)
    plan: dict[str, Collection[str]] = {}
    for path, layers in lists.items():
        chosen.check_layers(path, len(layers))
        saved = zip(layers, chosen.saved_in(path, len(layers)), strict=True)
        plan |= {layer: operators for layer, operators in saved if operators is not None}
    save_operators(model, plan)


def outermost(model: nn.Module, is_wanted: Callable[[nn.Module], bool], path: str = "") -> dict[str, nn.Module]:
    """Return the modules that are wanted and not inside another one, by their paths."""
    modules: dict[str, nn.Module] = {}
    for name, child in model.named_children():
        at = f"{path}.{name}" if path else name
        modules |= {at: child} if is_wanted(child) else outermost(child, is_wanted, at)
    return modules


# The operators whose outputs selective checkpointing saves: matrix products and fused attention kernels.
_PRODUCTS = (
    "mm addmm bmm baddbmm _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention"
)
_SAVED = frozenset(map("aten::{}".format, _PRODUCTS.split()))


def selective_contexts() -> Any:
    """Return the contexts of a layer's forward pass, which saves its matrix products, and of its recomputation."""

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
        return CheckpointPolicy.MUST_SAVE if operator.name() in _SAVED else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def recompute(model: Any, strategy: str, known: Collection[str], reentrant: bool) -> None:
    """Make a model recompute its layers; `known` are the strategies that it takes. Raises SelectionError for others."""
    chosen = Checkpointing.parse(strategy, use_reentrant=reentrant)
    if chosen is not None and chosen.saved:
        recompute_layers(model, chosen)
        return
    if strategy not in known and (strategy != SELECTIVE or FULL not in known):
        raise SelectionError(
            f"{type(model).__name__} takes {name_of('checkpointing')} none, or selective and full where its "
            "class supports it"
        )
    options: dict[str, Any] = {"context_fn": selective_contexts} if strategy == SELECTIVE else {}
    with warnings.catch_warnings():  # transformers 5 deprecates this name
        warnings.simplefilter("ignore")
        model.gradient_checkpointing_enable({"use_reentrant": reentrant, **options})


def require_gradients(model: Any) -> None:
    """Have the output of the word embeddings require a gradient, if the model has some."""
    embeddings = getattr(model, "get_input_embeddings", None)
    if embeddings is not None:
        embeddings().register_forward_hook(lambda module, inputs, output: output.requires_grad_(True))


def copied(module: nn.Module, device: str | None = None) -> nn.Module:
    """Return a copy of a module on a device. On the same one it shares the parameters' memory.

    It never shares buffers: a forward pass writes running statistics into them.
    """
    memo: dict[int, Any] = {}
    attributes = (value for part in module.modules() for value in vars(part).values())
    values = (value for value in attributes if isinstance(value, torch.Tensor))  # such as the weight of weight_norm
    for tensor in (*module.parameters(), *module.buffers(), *values):
        if nn.parameter.is_lazy(tensor):
            continue
        moved = tensor.detach().to(device or tensor.device)
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(moved, tensor.requires_grad) if is_parameter else moved.clone()
    return copy.deepcopy(module, memo)


# ---- a model on meta, also one whose constructor reads values ----

MAX_REAL_BYTES = 4 * 2**30  # of the tensors with values that exist at one time while a model is built or run for meta
_ON_META = "_bertscope_on_meta"  # of a parameter with values: the one on meta that replaces it


def built_on(device: str, make: Callable[[], Any], name: str) -> Any:
    """Return what `make` builds on the device; warn once if it was built on meta only in part.

    For meta, a constructor that fails there, such as one that calls `.item()` for its drop-path rates, runs again with
    only its parameters on meta, and then with all tensors on the CPU; afterwards all tensors move to meta. Raises
    SourceError if the CPU's tensors are more than MAX_REAL_BYTES, else the error of the last attempt.
    """
    try:
        with on_device(device):
            return make()
    except (RuntimeError, TypeError):  # of torch, for tensors without values
        if device != "meta":
            raise
    limit = f"{name} cannot be built on meta, as its constructor reads values"
    try:
        with torch.device("cpu"), at_most_real_bytes(limit), _parameters_on_meta():
            built = make()
        how = "its parameters on meta and its other tensors on the CPU"
    except (RuntimeError, TypeError):
        with torch.device("cpu"), at_most_real_bytes(limit):
            built = make()
        how = f"all its tensors on the CPU, at most {bytes_text(MAX_REAL_BYTES)}"
    say_once(f"{name}: its constructor reads values, so it was built with {how}")
    return copied(built, "meta") if isinstance(built, nn.Module) else built


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Put each parameter on meta when a module registers it; one that several modules share stays shared."""

    def to_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> nn.Parameter | None:
        if type(param) is not nn.Parameter or param.is_meta:
            return None
        if not hasattr(param, _ON_META):
            setattr(param, _ON_META, nn.Parameter(param.detach().to("meta"), param.requires_grad))
        on_meta: nn.Parameter = getattr(param, _ON_META)
        return on_meta

    register = nn.modules.module.register_module_parameter_registration_hook
    handle = register(to_meta)  # type: ignore[arg-type]  # torch's annotation has None for the result
    try:
        yield
    finally:
        handle.remove()


def at_most_real_bytes(what: str) -> AbstractContextManager[Any]:
    """Return a mode in which an operator raises SourceError if the tensors with values become too large.

    `what` is the start of the error: the model, and why it needs values.
    """

    def tensors(tree: Any) -> list[torch.Tensor]:
        return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and not leaf.is_meta]

    class Bounded(DispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.sizes: dict[int, int] = {}
            self.real_bytes = 0

        def free(self, key: int) -> None:
            self.real_bytes -= self.sizes.pop(key)

        def check(self, more_bytes: int) -> None:
            if self.real_bytes + more_bytes > MAX_REAL_BYTES:
                raise SourceError(
                    f"{what}, and on the CPU its tensors are more than {bytes_text(MAX_REAL_BYTES)}; count a smaller "
                    "configuration of it"
                )

        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if not tensors((args, kwargs)) and kwargs.get("device", "meta") != "meta":  # check before it allocates
                with suppress(NotImplementedError):  # of a quantized tensor
                    self.check(operator(*args, **kwargs | {"device": torch.device("meta"), "pin_memory": False}).nbytes)
            out = operator(*args, **kwargs)
            for tensor in tensors(out):
                storage, key = tensor.untyped_storage(), storage_key(tensor)
                if key not in self.sizes:
                    self.sizes[key] = storage.nbytes()
                    self.real_bytes += storage.nbytes()
                    weakref.finalize(storage, self.free, key)
            self.check(0)
            return out

    return Bounded()
