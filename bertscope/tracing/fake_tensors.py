"""Fake copies of modules and optimizers: their tensors have shapes, strides and a device, and no bytes."""

import contextlib
import copy
import functools
import gc
import logging
import sys
import warnings
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from inspect import signature
from typing import Any, TypeVar

from bertscope.errors import BertscopeError, BertscopeWarning, SelectionError, SourceError, name_of
from bertscope.model.attention import say_once
from bertscope.model.modules import MAX_REAL_BYTES, at_most_real_bytes
from bertscope.settings.rows import CodeObject
from bertscope.settings.training import CUSTOM, OPTIMIZERS
from bertscope.sources.model_source import ModelSource
from bertscope.torch_access import (
    always,
    fake_parameter,
    fake_tensor_as,
    fake_tensor_mode,
    is_plain_fake,
    nn,
    operator_name,
    run_on_meta,
    storage_key,
    torch,
    tree_leaves,
    tree_map,
)
from bertscope.torch_access.distributed import tensors_in
from bertscope.tracing.inputs import running, with_values
from bertscope.units import bytes_text

_Found = TypeVar("_Found")
# The attention kernel to run on meta: transformers' sdpa reads values, and the matrix products are the same.
META_ATTENTION = "eager"
# The kernel for experts on meta: the others read values, or take only bf16; the matrix products are the same.
META_EXPERTS = "batched_mm"


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Enter FakeTensorMode without its log of the traceback when an operator fails; the error itself is raised.

    transformers 5 keeps the mask of a fake tensor without asking if it hides positions, which it asks a real tensor:
    inside, it asks a fake tensor too, and `DataDependentAnswers` has the answer. TorchScript
    cannot run fake tensors, so scripted functions (DeBERTa-v2 up to transformers 4.57) run as their Python source.
    """
    mode = fake_tensor_mode()
    log = logging.getLogger(type(mode).__module__)
    with ExitStack() as stack:
        stack.callback(setattr, log, "disabled", log.disabled)
        log.disabled = True
        of_transformers: Any = sys.modules.get("transformers.utils.import_utils")
        if hasattr(of_transformers, "is_fake_tensor"):
            stack.callback(setattr, of_transformers, "is_fake_tensor", of_transformers.is_fake_tensor)
            of_transformers.is_fake_tensor = always(False)
        scripted: Any = torch.jit.ScriptFunction
        call = scripted.__call__  # for functions loaded from a file, which have no Python source
        stack.callback(setattr, scripted, "__call__", call)
        scripted.__call__ = lambda function, *args, **named: getattr(
            function, "_torchdynamo_inline", functools.partial(call, function)
        )(*args, **named)
        stack.enter_context(mode)
        yield


def load_fake_tensors() -> None:
    """Import what the first operator on a fake tensor imports, before a process forks others."""
    with fake_tensors():
        torch.empty(1) + 1


def fake_copy(module: nn.Module, device: str = "cpu") -> Any:
    """Return a copy of the module with an empty tensor for each of its tensors; shared tensors stay shared.

    For fake tensors the caller enters `fake_tensors`. Raises SelectionError for a module that Python cannot copy.
    """
    attributes = (tensor for inner in module.modules() for tensor in attribute_tensors(inner))
    like = torch.empty(0, device=device)
    memo = {id(tensor): fake_as(tensor, like) for tensor in (*module.parameters(), *module.buffers(), *attributes)}
    try:
        return copy.deepcopy(module, memo)
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise SelectionError(f"{type(module).__name__} cannot be copied to be estimated: {error}") from None


def attribute_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors that are attributes of a module itself, such as the prompt tokens in peft."""
    kinds = (list, tuple, dict)
    attributes = [v for v in vars(module).values() if isinstance(v, torch.Tensor) or (isinstance(v, kinds) and v)]
    return (leaf for leaf in tree_leaves(attributes) if isinstance(leaf, torch.Tensor))


def fake_as(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor of that layout, fake if `like` is, on the device of `like`."""
    if nn.parameter.is_lazy(tensor):
        raise SelectionError("a lazy module has no shapes yet; run it once first")
    if is_plain_fake(like) and tensor.layout == torch.strided:  # torch.empty_strided takes twenty times as long
        empty = fake_tensor_as(like, tensor.size(), tensor.stride(), tensor.dtype, 0, shares=False)
        return fake_parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=like.device)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def fake_like(tree: Any, device: str = "cpu") -> Any:
    """Return the same structure with fake tensors, or those on meta; a tensor that occurs twice becomes one."""
    like = torch.empty(0, device=device)
    fakes = {id(leaf): fake_as(leaf, like) for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)}
    return tree_map(lambda leaf: fakes.get(id(leaf), leaf), tree)


def on_meta(tree: Any) -> Any:
    """Return the same structure with tensors on meta."""
    return tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf, tree)


def run_without_values(
    source: ModelSource,
    model: Any,
    inputs: Any,
    run: Callable[[nn.Module, Any], _Found],
    build: Callable[[str], nn.Module],
    described: Collection[str] = (),
) -> _Found:
    """Run a source's model on meta, where its forward creates its tensors too, and return the result of `run`.

    If that fails, run the model on fake CPU tensors, for a forward that creates tensors on the CPU, and for one that
    asks whether a mask hides positions: the answer is that it hides none. If that fails too, run what `build` returns
    for the CPU, for a forward that reads values; raises SourceError if its tensors are more than MAX_REAL_BYTES.
    `described` are the inputs that the user describes.
    """
    if callable(getattr(model, "set_experts_implementation", None)):  # of transformers 5
        model.set_experts_implementation(META_EXPERTS)
    try:
        with running(source, model, "meta tensors", described):
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
        if source.bert_config is not None:  # reads no values
            raise
        limit = f"{source.name} cannot be run on meta tensors, as its forward reads values"
        if sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())) > MAX_REAL_BYTES:
            raise SourceError(
                f"{error.marked}; if its forward reads values, give a configuration with fewer layers, whose tensors "
                f"are at most {bytes_text(MAX_REAL_BYTES)}"
            ) from None
    _clear_caches(model)
    with running(source, model, "the CPU", described), at_most_real_bytes(limit), random_state_kept():
        result = run(build("cpu"), with_values(model, inputs))
    say_once(f"{source.name}: its forward reads values, so it ran on the CPU with random inputs")
    return result


def random_state_kept(*modules: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Return a context that leaves the state of torch's random numbers, on the GPUs of the modules too."""
    params = (param for module in modules for param in module.parameters())
    return torch.random.fork_rng({param.device for param in params if param.is_cuda})


def _clear_caches(model: nn.Module) -> None:
    """Clear functools' caches in the code of a model, which may hold fake tensors under arguments of real ones."""
    kind, places = type(functools.cache(int)), {type(module).__module__ for module in model.modules()}
    for item in gc.get_objects():
        if type(item) is kind and item.__module__ in places:
            item.cache_clear()


# ---- fake copies of optimizers ----

_GROUP_FLAGS = {"fused": {True: "fused"}, "foreach": {True: "foreach", False: "loop"}}  # -> the implementation


def given_optimizer(optimizer: Any, params: Sequence[nn.Parameter]) -> dict[str, Any]:
    """Return the settings for an optimizer object of a model with these parameters, or for a class or function.

    A class of torch.optim is its row; any other class or function is called with the trainable parameters. An object is
    kept as a copy on meta, which refers to none of the caller's tensors. Raises SelectionError for an optimizer that
    cannot be copied or has other parameters, and for one that runs forward and backward in its step.
    """
    is_object = isinstance(optimizer, torch.optim.Optimizer)
    kind = type(optimizer) if is_object else optimizer
    if not callable(kind):
        raise SelectionError(
            f"{name_of('optimizer')} takes a word such as adamw, an optimizer of torch.optim or another package, or a "
            f"function that returns one for parameters; got {type(kind).__name__}"
        )
    label = getattr(kind, "__name__", type(kind).__name__)
    closure = signature(getattr(kind, "step", int)).parameters.get("closure") if isinstance(kind, type) else None
    if closure is not None and closure.default is closure.empty:
        raise SelectionError(
            f"{label}.step takes a closure, which runs forward and backward inside the step, as often as the values "
            "say; an estimate has no values: measure it with bertscope.watch, or give another optimizer"
        )
    classes = {getattr(torch.optim, row.class_name, None): word for word, row in OPTIMIZERS.items() if row.in_torch}
    word = classes.get(kind, CUSTOM)
    if not is_object:
        custom = CodeObject(CUSTOM, lambda params: kind(trainable(params)), label)
        return {"optimizer": custom if word == CUSTOM else word}
    numbers = {id(param): number for number, param in enumerate(params)}
    stand_ins = [fake_as(param, torch.empty(0, device="meta")) for param in params]
    copied, held = _copied(optimizer, dict(zip(numbers, stand_ins, strict=True)), "meta")
    if not numbers.keys() & held:
        raise SelectionError(f"{label} has none of the model's parameters; make it with model.parameters()")

    def on(new_params: Sequence[nn.Parameter]) -> Any:
        """Return the optimizer of a copy of the model."""
        return _copied(copied, {id(old): new for old, new in zip(stand_ins, new_params, strict=True)}, "cpu")[0]

    flags = ((forms, copied.param_groups[0].get(flag)) for flag, forms in _GROUP_FLAGS.items())
    forms = [forms[value] for forms, value in flags if value in forms]
    implementation = {"optimizer_implementation": forms[0]} if forms and word != CUSTOM else {}
    group, takes = copied.param_groups[0], OPTIMIZERS[word].takes if word != CUSTOM else ()
    hyperparameters = {name: float(group[name]) for name in takes if 0 < group.get(name, 0) < 1}
    return {"optimizer": CodeObject(word, on, label)} | implementation | hyperparameters


def trainable(params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Return the parameters that have a gradient."""
    return [param for param in params if param.requires_grad]


def optimizer_parts(optimizer: Any) -> Iterator[Any]:
    """Yield an optimizer and those inside it, as in Lookahead."""
    yield optimizer
    for value in vars(optimizer).values():
        if isinstance(value, torch.optim.Optimizer):
            yield from optimizer_parts(value)


def state_tensors(optimizer: Any) -> Iterator[tuple[Any, str, torch.Tensor]]:
    """Yield what an optimizer holds: each tensor with its name, and its parameter if the state says it.

    Attributes may be copies of the parameters in fp32, whose gradients stay from step to step.
    """
    for part in optimizer_parts(optimizer):
        for param, state in part.state.items():
            for name, value in state.items() if isinstance(state, Mapping) else ():
                yield from ((param, name, tensor) for tensor in tensors_in(value))
        for tensor in attribute_tensors(part):
            yield None, "", tensor
            if tensor.is_leaf and tensor.grad is not None:
                yield None, "", tensor.grad


def _copied(optimizer: Any, params: Mapping[int, torch.Tensor], device: str) -> tuple[Any, set[int]]:
    """Return a copy of an optimizer with other parameters, and the ids of the tensors that the optimizer refers to.

    `params` are the new parameters by the ids of the old ones; other tensors are empty ones on the device. Hooks, and
    methods that a scheduler has wrapped, are not copied: they refer to the caller's optimizer.
    """
    like, parts = torch.empty(0, device=device), list(optimizer_parts(optimizer))
    # A state may have keys that are words, such as a number of steps.
    known = [tensor for part in parts for tensor in (*attribute_tensors(part), *filter(torch.is_tensor, part.state))]
    memo: dict[int, Any] = {id(tensor): fake_as(tensor, like) for tensor in known if id(tensor) not in params}
    memo |= {**params} | {id(part): object.__new__(type(part)) for part in parts}
    try:
        for part in parts:
            for name, value in vars(part).items():
                if name.endswith("_hooks"):
                    vars(memo[id(part)])[name] = type(value)()
                elif not (callable(value) and hasattr(type(part), name)):  # a method that is wrapped
                    vars(memo[id(part)])[name] = copy.deepcopy(value, memo)
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise SelectionError(f"{type(optimizer).__name__} cannot be copied to be estimated: {error}") from None
    return memo[id(optimizer)], set(map(id, known))


# ---- operators on fake tensors ----


_Layout = tuple[torch.Size, tuple[int, ...], torch.dtype, int]
# A result: None, the argument of that number, or a tensor of that layout in the storage of an argument or an own one.
_Result = int | tuple[_Layout, int | None] | None
_MOST_OPERATIONS = 20_000  # of about 1 kB
# The operators of transformers whose results have the same layouts on every device. Others may ask for the device.
_NAMES = (
    "_log_softmax _log_softmax_backward_data _safe_softmax _softmax_backward_data _to_copy _unsafe_view add add_ "
    "addcdiv_ addcmul_ addmm alias bernoulli_ bmm clone detach div div_ embedding embedding_dense_backward "
    "empty_like expand gelu gelu_backward lerp_ mm mul mul_ native_dropout native_dropout_backward "
    "native_layer_norm_backward nll_loss_backward nll_loss_forward ones_like select select_backward slice sqrt "
    "sum t tanh tanh_backward transpose unsqueeze view zeros_like"
)
_SAME_EVERYWHERE = frozenset(_NAMES.split())
_LAYER_NORM = "native_layer_norm"  # the same in 32 bits; of 16 bits its mean is in 16 on a CPU and in 32 on CUDA


class OperatorResults:
    """The layouts of results by operator and arguments, so that FakeTensorMode computes each once.

    FakeTensorMode has such a cache too, whose keys take most of its time. It computes a result in 0.6 ms on average,
    tensors on meta give the same one in 0.2. `is_plain` tells of which tensors the layouts say all: fake ones, or those
    on meta.
    """

    def __init__(self, is_plain: Callable[[Any], bool] = is_plain_fake) -> None:
        self.is_plain = is_plain
        # The results, and if they are a tuple; None: FakeTensorMode has to run the operator each time.
        self.known: dict[Hashable, tuple[list[_Result], bool] | None] = {}

    def run(self, operator: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operator on plain tensors; of other ones it is computed."""
        key = self._key(operator, args, kwargs)
        if key is None:
            return self._run_each(operator, args, kwargs)
        known = self.known.get(key)
        is_new = key not in self.known
        if is_new and len(self.known) >= _MOST_OPERATIONS:
            self.known.pop(next(iter(self.known)))  # the oldest
        if is_new and self.is_plain is is_plain_fake and (known := _described_on_meta(operator, args, kwargs)):
            self.known[key] = known
        if known is None:
            out = operator(*args, **kwargs)
            if is_new:
                # Arguments that were resized or transposed in place have another key now.
                is_same = self._key(operator, args, kwargs) == key
                self.known[key] = _described(out, args, args, self.is_plain) if is_same else None
            return out
        results, is_tuple = known
        outputs = [_made(result, args) for result in results]
        return tuple(outputs) if is_tuple else outputs[0]

    def _run_each(self, operator: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of any other operator; on a list of plain tensors without running it.

        An operator for each makes no tensor and changes no layout if it is in place.
        """
        name = operator_name(operator)
        if name.startswith("_foreach_") and args and args[0] and all(map(self.is_plain, args[0])):
            if name.endswith("_"):
                return None
            of_one = getattr(getattr(torch.ops.aten, name.removeprefix("_foreach_"), None), "default", None)
            if of_one is not None and len(args) == 1 and not kwargs:
                return [self.run(of_one, (tensor,), {}) for tensor in args[0]]
        if operator is torch.ops.aten.cat.default and len(args) == 1 and all(map(self.is_plain, args[0])):
            first = args[0][0]
            rows = [(part.shape[1:], part.dtype, part.is_contiguous()) for part in args[0]]
            if first.dim() and set(rows) == {(first.shape[1:], first.dtype, True)}:
                shape = (sum(map(len, args[0])), *first.shape[1:])
                return fake_tensor_as(first, shape, first.stride(), first.dtype, 0, shares=False)
        return operator(*args, **kwargs)

    def _key(self, operator: Any, args: Any, kwargs: Any) -> Hashable:
        """Return all that decides the results' layouts; None if values may decide them too."""
        if not args or not self.is_plain(args[0]) or "out" in kwargs:
            return None
        parts: list[Any] = [operator, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        for value in (*args, *kwargs, *kwargs.values()):
            if isinstance(value, torch.Tensor):
                if not self.is_plain(value):
                    return None
                parts += _layout(value)
            elif isinstance(value, (list, tuple)):
                if any(isinstance(item, torch.Tensor) for item in value):
                    return None
                parts += (len(value), *map(type, value), *value)
            else:
                parts += (type(value), value)
        return tuple(parts)


def _layout(tensor: torch.Tensor) -> _Layout:
    return tensor.shape, tensor.stride(), tensor.dtype, int(tensor.storage_offset())


def _made(result: _Result, args: Any) -> Any:
    if result is None or isinstance(result, int):
        return result if result is None else args[result]
    layout, owner = result
    return fake_tensor_as(args[owner or 0], *layout, shares=owner is not None)


def _described_on_meta(operator: Any, args: Any, kwargs: Any) -> tuple[list[_Result], bool] | None:
    """Return the description of the results that meta tensors give; None if they may be others on fake tensors."""
    named = list(kwargs.values())
    tensors: list[Any] = [value for value in args if isinstance(value, torch.Tensor)]
    devices = {value for value in (*args, *named) if isinstance(value, torch.device)}
    devices |= {tensor.fake_device for tensor in tensors}
    has_named_tensor = any(isinstance(value, torch.Tensor) for value in named)
    name = operator_name(operator)
    is_same = name in _SAME_EVERYWHERE or (
        name == _LAYER_NORM and all(tensor.dtype == torch.float32 for tensor in tensors)
    )
    if not is_same or len(devices) > 1 or has_named_tensor:
        return None
    try:
        meta_args, out = run_on_meta(operator, args, kwargs)
    except (RuntimeError, NotImplementedError):  # fake tensors raise an error with all that is known of them
        return None
    return _described(out, meta_args, args)


def _described(
    out: Any, ran_args: Any, args: Any, is_plain: Callable[[Any], bool] = is_plain_fake
) -> tuple[list[_Result], bool] | None:
    """Return the description of an operator's results; None if it does not say all about them.

    `ran_args` are the arguments that it ran with: `args`, or meta tensors of their layouts in their storages.
    """
    results: list[_Result] = []
    owned: list[int] = []
    for tensor in out if isinstance(out, tuple) else (out,):
        same = [number for number, arg in enumerate(ran_args) if arg is tensor]
        if tensor is None or same:
            results.append(None if tensor is None else same[0])
            continue
        if ran_args is args and (not is_plain(tensor) or tensor.device != args[0].device):
            return None
        stored = storage_key(tensor)
        owners = [n for n, arg in enumerate(args) if isinstance(arg, torch.Tensor) and storage_key(arg) == stored]
        result = _layout(tensor), owners[0] if owners else None
        rebuilt = _made(result, args)
        is_whole = rebuilt.untyped_storage().nbytes() == tensor.untyped_storage().nbytes()
        if len(owners) > 1 or not is_whole or _layout(rebuilt) != _layout(tensor):
            return None
        results.append(result)
        owned.append(stored)
    return (results, isinstance(out, tuple)) if len(set(owned)) == len(owned) else None


_KNOWN = "_bertscope_known"  # of a bool tensor, and of the flag of GradScaler: the value of all its elements
_COUNTED = "_bertscope_counted"  # of the sum of a bool tensor: its number of elements, and True if all are true


def all_valid(operator: Any, args: Any) -> torch.Tensor | tuple[torch.Tensor, ...] | None:
    """Return the largest result of an operator whose shape depends on values: every element is true; else None.

    A loss over the valid labels of a batch selects them so; that all are valid is an upper bound, as a warning says.
    The classifiers of BART ask if all sequences have the same number of end tokens, a sum of true elements: they have.
    """
    aten = torch.ops.aten
    first: Any = args[0] if args else None
    if operator is aten.unique_consecutive.default:
        is_asked = len(args) == 1 and hasattr(first, _COUNTED)
        return (first.new_empty(1), first.new_empty(0), first.new_empty(0)) if is_asked else None
    if operator is aten.index.Tensor and any(index is not None and index.dtype == torch.bool for index in args[1]):
        indices: list[Any] = []
        for index in args[1]:
            is_mask = index is not None and index.dtype == torch.bool
            indices += [index.new_empty(index.numel(), dtype=torch.int64)] * index.dim() if is_mask else [index]
        largest: torch.Tensor = operator(first, indices)
    elif operator is aten.nonzero.default:
        largest = first.new_empty((first.numel(), first.dim()), dtype=torch.int64)
    elif operator is aten.masked_select.default:
        largest = first.new_empty(torch.broadcast_shapes(first.shape, args[1].shape).numel())
    else:
        return None
    text = (
        f"{operator_name(operator)}: the values of labels and ids are not known, so all are taken "
        "as valid, the upper bound"
    )
    warnings.warn(BertscopeWarning(text), stacklevel=2)
    return largest


_WHOLE = "_bertscope_whole"  # of labels and ids, and of whole numbers and masks that depend on nothing else


def mark_whole(inputs: Any) -> None:
    """Mark the labels and ids among `inputs`, so that a selection by their values is known from one by a router's."""
    for tensor in tree_leaves(inputs):
        if isinstance(tensor, torch.Tensor) and not tensor.is_floating_point():
            setattr(tensor, _WHOLE, True)


def selects_inputs(operator: Any, args: Any) -> bool:
    """Return True for an operator that may select elements by the values of labels and ids alone."""
    aten = torch.ops.aten
    if operator is aten.masked_select.default:
        return hasattr(args[1], _WHOLE)
    if operator is aten.index.Tensor:
        return all(hasattr(index, _WHOLE) for index in args[1] if index is not None and index.dtype == torch.bool)
    return bool(args) and hasattr(args[0], _WHOLE)


_VALID = "_bertscope_valid"  # of an attention mask: the valid tokens of each sequence, and its length
_SHARE = "_bertscope_share"  # of a tensor with random elements between 0 and 1
_CHANCE = "_bertscope_chance"  # of the comparison of such a tensor with a number between 0 and 1
_SAME_VALUES = ("view", "_unsafe_view", "reshape", "alias", "detach", "_to_copy", "clone", "slice")
_BELOW = {"lt": True, "le": True, "gt": False, "ge": False}


def mark_valid(inputs: Any, padding: float) -> None:
    """Mark the attention mask of `inputs` as one that hides the share `padding` of each sequence, at its end."""
    mask = inputs.get("attention_mask") if isinstance(inputs, dict) else None
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        setattr(mask, _VALID, (valid_tokens(mask.shape[1], padding), mask.shape[1]))


def valid_tokens(seq: int, padding: float) -> int:
    """Return the tokens of a sequence that are no padding, at least one."""
    return seq - min(round(padding * seq), seq - 1)


class DataDependentAnswers:
    """A record of the tensors whose values are known in advance; `is_masked` means that masks hide positions."""

    def __init__(self, *, is_masked: bool) -> None:
        self.is_masked = is_masked

    def valid(self, operator: Any, args: Any) -> torch.Tensor | None:
        """Return the places of the valid tokens of a mask that `mark_valid` marked; None for another operator."""
        if operator is not torch.ops.aten.nonzero.default or not hasattr(args[0], _VALID):
            return None
        tokens, length = getattr(args[0], _VALID)
        mask: torch.Tensor = args[0]
        return mask.new_empty((mask.numel() // length * tokens, mask.dim()), dtype=torch.int64)

    def note(self, operator: Any, args: Any, out: Any) -> None:
        """Mark the operator's result with its known value."""
        name = operator_name(operator)
        if isinstance(out, torch.Tensor) and not out.is_floating_point():
            tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
            if tensors and all(hasattr(tensor, _WHOLE) for tensor in tensors):
                setattr(out, _WHOLE, True)
        if args and isinstance(out, torch.Tensor) and (valid := getattr(args[0], _VALID, None)):
            if name in _SAME_VALUES and out.numel() == args[0].numel():
                setattr(out, _VALID, valid)
            elif name == "select" and args[2] in (-1, valid[1] - 1):  # the last column, which padding hides
                setattr(out, _VALID, (int(valid[0] == valid[1]), 1))
            elif name == "sum" and out.dim() == args[0].dim() - 1:
                setattr(out, _KNOWN, args[0].numel() // valid[1] * valid[0] // out.numel())
                return
        if name in ("rand", "rand_like"):
            setattr(out, _SHARE, True)
        elif name == "_amp_foreach_non_finite_check_and_unscale_":  # of GradScaler: no gradient is infinite
            setattr(args[1], _KNOWN, False)
        elif name == "sum" and args[0].dtype == torch.bool:
            setattr(out, _COUNTED, (args[0].numel(), self._truth("all", args)))
        elif name in ("max", *_SAME_VALUES) and type(length := getattr(args[0], _KNOWN, None)) is int:
            setattr(out, _KNOWN, length)
        elif isinstance(out, torch.Tensor) and out.dtype == torch.bool and args:
            is_chance = name in _BELOW and getattr(args[0], _SHARE, False) and not isinstance(args[1], torch.Tensor)
            if is_chance and 0 < args[1] < 1:
                setattr(out, _CHANCE, True)
            known = self._truth(name, args)
            if known is not None:
                setattr(out, _KNOWN, known)

    def note_products(self, changed: Any) -> None:
        """Give the numbers among tensors that an optimizer multiplies a value: products of momenta, as in NAdam."""
        for tensor in tree_leaves(changed):
            if tensor.numel() == 1 and not hasattr(tensor, _KNOWN):
                setattr(tensor, _KNOWN, 0.5)

    def _truth(self, name: str, args: Any) -> bool | None:
        before = getattr(args[0], _KNOWN, None)
        if name in ("logical_not", "bitwise_not"):
            return None if before is None else not before
        if name in ("all", "any"):
            if getattr(args[0], _CHANCE, False) and args[0].numel() > 1:
                return name == "any"
            return before if before is not None else self.is_masked == (name == "any")
        if name == "eq":
            counted = getattr(args[0], _COUNTED, (None, None))
            return counted[1] if counted[0] == args[1] else None
        if name in ("isinf", "isnan"):
            return False  # no sum overflows
        if name in _BELOW and getattr(args[0], _SHARE, False) and isinstance(args[1], (int, float)):
            is_open = 0 < args[1] < 1 and (args[0].numel() > 1 or args[1] == 0.5)  # no case is likelier
            return None if is_open else _BELOW[name] == (args[1] >= 0.5)
        return before if name in _SAME_VALUES else None

    def value(self, tensor: torch.Tensor, *, otherwise: int | None = None) -> Any:
        """Return the value of a one-element tensor, `otherwise` if it is not known.

        If both are missing, torch computes a constant, such as the quotient of two sizes in Longformer, and raises
        DataDependentOutputException for any other fake tensor.
        """
        known = getattr(tensor, _KNOWN, otherwise)
        if known is not None and getattr(tensor, _CHANCE, False):
            text = "a random number decides if some code runs; the likelier case is taken"
            warnings.warn(BertscopeWarning(text), stacklevel=2)
        return torch.ops.aten._local_scalar_dense.default(tensor) if known is None else known
