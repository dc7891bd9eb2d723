"""Example inputs on meta for a model: token ids, masks and labels that fit its forward and its configuration."""

import inspect
import math
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout, suppress
from functools import partial
from itertools import product
from typing import Any

from bertscope.config import ARCHITECTURES, HEADS, POSITIONS
from bertscope.errors import BertscopeError, SelectionError, name_of
from bertscope.model.bert import BertPreTrainedModel
from bertscope.model.lora import PeftModel, base_model_of
from bertscope.settings.rows import MAX_SIZE, SettingError
from bertscope.sources.model_source import ModelSource, as_source_error, required_names
from bertscope.sources.transformers_models import token_types
from bertscope.torch_access import argument_names, has_kernel, nn, torch, tree_map
from bertscope.tracing.log import tensors

Inputs = dict[str, Any]  # a tensor, or a dictionary of tensors, by name

_WORDS = ("input_ids", "decoder_input_ids")
_DTYPES = ("float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool")
_GIVEN = re.compile(
    r"(?P<name>[A-Za-z_]\w{0,99}(?:\.\w{1,100}){0,7})="
    r"(?P<shape>(?:[BS]|[1-9][0-9]{0,9})(?:x(?:[BS]|[1-9][0-9]{0,9})){0,7}):"
    r"(?P<dtype>\w{1,20})",
    re.ASCII,
)
_NAMES = """
    aten prim prims c10d _c10d_functional _c10d_functional_autograd symm_mem fsdp inductor _dtensor higher_order
    rngprims debugprims quantized mkldnn mkldnn_prepacked profiler bertscope
"""
TORCH_NAMESPACES = frozenset(_NAMES.split())
# The annotation of a parameter that takes a tensor, and not several.
_ONE_TENSOR = re.compile(r"(?:<class '|(?:typing\.)?Optional\[)?(?:torch\.)?\w*Tensor(?:'>|\])?(?: \| None)?")


def inputs_for(
    module: nn.Module, batch: int, seq: int, *, labels: bool = False, described: Collection[str] = ()
) -> Any:
    """Return inputs for any module: the result of its `example_inputs(batch, seq)`, or a dictionary of keywords.

    The dictionary has the token ids, masks, pixels, audio and decoder's ids that forward accepts and that the
    configuration describes, and each of `described`, such as `pixel_values=Bx3x224x224:float32`, instead. Raises
    SelectionError for sizes that the model cannot run, and if forward requires an input that is neither derived nor
    described. A peft model has the inputs of the model that it wraps.
    """
    explicit = described_inputs(described, batch, seq)
    if callable(getattr(module, "example_inputs", None)):
        with as_source_error(f"{type(module).__name__}.example_inputs({batch}, {seq})"):
            example = module.example_inputs(batch, seq)  # type: ignore[operator]
        return {**example, **explicit} if isinstance(example, Mapping) else explicit or example
    module = base_model_of(module)
    takes = _parameters(module)
    if isinstance(module, BertPreTrainedModel):
        inputs = example_inputs(module, batch, seq, labels=labels) | explicit
        _check_names(module, takes, inputs)
        return inputs
    is_sequence = any(name in takes and name not in explicit for name in _WORDS)
    most = min(positions(module), MAX_SIZE - 1) if is_sequence else MAX_SIZE - 1
    check_sizes(batch, seq, most, f"the model's {most:,} positions")
    inputs = derived_inputs(module, [name for name in takes if name not in explicit], batch, seq) | explicit
    _check_names(module, takes, inputs)
    all_labels = labels_of(module, batch, seq) if labels else {}
    inputs |= {name: value for name, value in all_labels.items() if name in takes and name not in explicit}
    kinds = {name: takes[name].kind if name in takes else inspect.Parameter.VAR_POSITIONAL for name in inputs}
    by_name = any(param.kind is param.VAR_KEYWORD for param in takes.values())
    if by_name or not {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL} & set(kinds.values()):
        return inputs
    return tuple(inputs[name] for name in sorted(kinds, key=kinds.__getitem__))  # those of *args last


def _parameters(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of forward; of a wrapper those of the module inside, of a compiled one by its schema."""
    forwards_to = {"DataParallel": "module", "DistributedDataParallel": "module", "OptimizedModule": "_orig_mod"}
    while type(module).__name__ in forwards_to:
        module = getattr(module, forwards_to[type(module).__name__])
    forward: Any = module.forward
    if forward is None or getattr(forward, "__func__", None) is nn.Module.forward:
        raise SelectionError(
            f"{type(module).__name__} has no forward, so it cannot be run; count, tree, print and diff do not run it"
        )
    try:
        return inspect.signature(forward).parameters
    except ValueError:  # torch.jit.trace
        kind, none = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
        items = {item.name: item for item in forward.schema.arguments[1:]}
        defaults = {name: item.default_value if item.has_default_value() else none for name, item in items.items()}
        return {name: inspect.Parameter(name, kind, default=value) for name, value in defaults.items()}


def idle_sizes(source: ModelSource, described: Collection[str]) -> set[str]:
    """Return which of batch and seq change no input of the model; none where `example_inputs` decides.

    Only of own code, of images and next to described inputs there may be one; for any other source nothing is built.
    """
    if not (described or source.has_own_dtypes) and source.reads_words:
        return set()
    module = source.build()
    if callable(getattr(module, "example_inputs", None)):
        return set()

    def shapes(batch: int, seq: int) -> list[torch.Size]:
        return [item.shape for item in tensors(inputs_for(module, batch, seq, described=described))]

    usual = shapes(1, 1)
    return {name for name, sizes in (("batch", (2, 1)), ("seq", (1, 2))) if shapes(*sizes) == usual}


def refuse_idle(described: Collection[Collection[str]], named: Collection[str], *sources: ModelSource) -> None:
    """Raise SettingError for a batch or a seq that is named and changes no input of any of these sources.

    `described` has the described inputs of each run. A source that cannot be built is refused elsewhere.
    """
    idle = {*named}
    for source, texts in product(sources, described):
        known = set[str]()
        with suppress(BertscopeError):
            known = idle_sizes(source, texts)
        idle &= known
    for name in sorted(idle):
        raise SettingError(f"{{{name}}} has no effect: no size of an input is {name[0].upper()}; leave it out", [name])


def described_inputs(texts: Collection[str], batch: int, seq: int) -> Inputs:
    """Return the tensors on meta that texts such as `ids=BxS:int64` describe, with B and S as the sizes.

    `batch.ids=BxS:int64` is in a dictionary `batch`. Raises SelectionError for other text, and for a tensor of 2**31 or
    more elements.
    """
    inputs: Inputs = {}
    for text in texts:
        match = _GIVEN.fullmatch(text)
        *path, last = match["name"].split(".") if match else [""]
        inner: Any = inputs
        for key in path:
            inner = inner.setdefault(key, {}) if isinstance(inner, dict) else inner
        if match is None or match["dtype"] not in _DTYPES or not isinstance(inner, dict) or last in inner:
            raise SelectionError(
                f"{name_of('input')} takes a name once, with sizes (numbers, B the batch, S the sequence) and a dtype, "
                "such as pixel_values=Bx3x224x224:float32, or batch.ids=BxS:int64 in a dictionary; dtypes: "
                f"{', '.join(_DTYPES)}; got {text[:60]!r}"
            )
        shape = [{"B": batch, "S": seq}.get(size) or int(size) for size in match["shape"].split("x")]
        if math.prod(shape) >= MAX_SIZE:
            raise SelectionError(
                f"{name_of('input')} {text[:60]}: a tensor has less than 2**31 elements; lower its sizes"
            )
        inner[last] = torch.empty(shape, dtype=getattr(torch, match["dtype"]), device="meta")
    return inputs


def _check_names(module: nn.Module, takes: Mapping[str, inspect.Parameter], inputs: Inputs) -> None:
    """Raise SelectionError for an input that forward does not take, and for a required one that is absent."""
    kinds = {param.kind for param in takes.values()}
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    unknown = [] if kinds & set(variadic) else [name for name in inputs if name not in takes]
    absent = [name for name in required_names(takes.values()) if name not in inputs]
    if unknown:
        raise SelectionError(
            f"{_signature(module)} and no {unknown[0]}; give the name of one of these to {name_of('input')}"
        )
    if absent or not inputs:
        named = [name for name, param in takes.items() if param.kind not in variadic]
        missing = next(iter([*absent, *named]), "x")  # tensors of *args have any names
        key = f"in a dictionary {missing}.KEY=SHAPE:DTYPE; " if missing in named else ""
        raise SelectionError(
            f"{_signature(module)}, and {missing} cannot be derived; add {name_of('input')} {missing}=SHAPE:DTYPE, "
            f"such as {missing}={_likely_shape(module)} ({key}in Python input_size= or inputs=), or give the module a "
            "method example_inputs(batch, seq)"
        )


def _signature(module: nn.Module) -> str:
    """Return the inputs that forward takes as a sentence, those of known shapes in the form of --input."""
    takes, shown_inputs = _parameters(module), []
    known = known_shapes(module, takes)
    for name, param in takes.items():
        if name in known or _ONE_TENSOR.fullmatch(str(param.annotation)):
            shown_inputs.append(f"{name}={known[name]}" if name in known else name)
        elif param.annotation is param.empty or param.default is param.empty:  # no flag such as return_dict
            shown_inputs.append(str(param))
    shown = ", ".join(shown_inputs) or "nothing"
    return f"{type(module).__name__}.forward takes {shown if len(shown) <= 200 else f'{shown[:200]}...'}"


@contextmanager
def running(source: ModelSource, model: nn.Module, where: str, described: Collection[str] = ()) -> Iterator[None]:
    """Run the built model confined, with what it prints on stderr, and its errors as a SourceError with the remedy.

    `where` completes `cannot be run on ...`, and `described` is as in `inputs_for`. An error of a BERT whose inputs are
    all derived stays as it is: it is one of bertscope.
    """
    is_derived = not described and not hasattr(model, "example_inputs")
    errors: AbstractContextManager[None] = running_module(source.name, model, where)
    if is_derived and isinstance(base_model_of(model), BertPreTrainedModel):
        errors = nullcontext()
    with source.confined(), errors, redirect_stdout(sys.stderr):
        yield


@contextmanager
def running_module(name: str, module: nn.Module, where: str) -> Iterator[None]:
    """Raise an error in the code of any module as a SourceError with what its forward takes.

    A kernel that is no part of torch and has no rule is a SelectionError with the line that registers one.
    """

    def remedy() -> str:
        with suppress(BertscopeError):
            takes = f"; {_signature(base_model_of(module))}"
            gives = f"{name_of('input')} NAME=SHAPE:DTYPE gives forward other inputs"
            return f"{takes}; {gives}; count and tree do not run it"
        return ""

    with as_source_error(f"{name} cannot be run on {where}", remedy):
        try:
            yield
        except NotImplementedError as error:
            names = re.search(r"\b(\w+)::(\w+)", str(error), re.ASCII)
            if names is None or names[1] in TORCH_NAMESPACES:
                raise
            packet = getattr(getattr(torch.ops, names[1]), names[2])
            operator = getattr(packet, packet.overloads()[0])
            if has_kernel(operator, "Meta"):  # it has a rule; what lacks is the kernel of a real device
                raise
            raise SelectionError(missing_rule(operator)) from None


def missing_rule(operator: Any) -> str:
    """Return the error for an operator without a rule, with the line that registers one."""
    name = operator.name().partition(".")[0]
    names = ", ".join(argument_names(operator)) or "*args"
    first = names.partition(",")[0]
    line = f'bertscope.kernel("{name}")(lambda {names}: torch.empty_like({first}))'
    return f"{name} has no rule; write what it returns: {line}"


def _likely_shape(module: nn.Module) -> str:
    """Return shape and dtype of an input, in the form of --input, by the first layer that says what it takes."""
    for layer in module.modules():
        if isinstance(layer, nn.Embedding):
            return "BxS:int64"
        if isinstance(layer, nn.Linear):
            return f"Bx{layer.in_features}:float32"
        if isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            return f"Bx{layer.in_channels}{f'x{IMAGE_SIZE}' * len(layer.kernel_size)}:float32"
    return "BxS:float32"


def with_values(module: nn.Module, inputs: Any, *, device: str = "cpu") -> Any:
    """Return inputs with random ids and numbers, masks of ones, and zeros as labels and other integers, on a device.

    Each sequence of ids ends with the end token, of which heads for classification require the same number in each.
    Tensors with values, which `example_inputs` of a module may return, keep them.
    """
    config = getattr(base_model_of(module), "config", None)
    vocab, end = setting(config, "vocab_size"), setting(config, "eos_token_id")

    def real(like: Any, name: str = "") -> Any:
        """Return a tensor like one on meta, with values; any other value stays as it is."""
        if not isinstance(like, torch.Tensor) or not like.is_meta:
            return like.to(device) if isinstance(like, torch.Tensor) else like
        if like.is_floating_point():
            return torch.rand(like.shape, dtype=like.dtype, device=device)
        if "mask" in name:
            return torch.ones(like.shape, dtype=like.dtype, device=device)
        if name not in _WORDS or not isinstance(vocab, int):
            return torch.zeros(like.shape, dtype=like.dtype, device=device)
        ids = torch.randint(0, vocab, like.shape, dtype=like.dtype, device=device)
        if isinstance(end, int) and 0 < end < vocab:
            ids[ids == end] = end - 1
            ids[..., -1] = end
        return ids

    if isinstance(inputs, Mapping):
        return {name: tree_map(partial(real, name=name), value) for name, value in inputs.items()}
    return tree_map(real, inputs)


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments from a tensor, a sequence of tensors, or a dictionary of keywords."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), {}


def loss_of(output: Any) -> tuple[torch.Tensor, str]:
    """Return the scalar that backward starts from, and its name: the loss, or the sum of the first output."""
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss, "the loss"
    floating = [tensor for tensor in tensors(output) if tensor.is_floating_point()]
    if not floating:
        raise SelectionError(f"the module returns no float tensor for backward; use {name_of('mode')} inference")
    return floating[0].sum(), "the sum of the first output (other outputs are unused)"


# ---- derived inputs ----


# Suffixes of classes with a label for each token.
_TOKEN_LABELS = ("ForMaskedLM", "LMHeadModel", "ForCausalLM", "ForConditionalGeneration", "ForTokenClassification")
_PARTS = ("vision_config", "text_config", "encoder")  # configurations inside that of CLIP, of an encoder and a decoder
IMAGE_SIZE = 224  # of a configuration without one, as in crop_size of ResNet's preprocessor_config.json
_AS_IDS = ("attention_mask", "token_type_ids", "position_ids")  # inputs of the shape of input_ids
_TWO_SIZES = ((1, 1), (3, 2))  # batch and sequence; the sizes of an input in both say which of its sizes are which
CHOICES = 2  # BertForMultipleChoice: continuations of one question


def derived_inputs(module: nn.Module, names: Collection[str], batch: int, seq: int) -> Inputs:
    """Return the inputs of these names that the class and the configuration describe."""
    config = getattr(module, "config", None)
    shape = (batch, CHOICES, seq) if type(module).__name__.endswith("ForMultipleChoice") else (batch, seq)
    inputs: Inputs = {}
    for name in names:
        if name == "input_ids" or ("input_ids" in names and name in ("attention_mask", *token_types(config))):
            inputs[name] = _ids(*shape)
        elif name == "decoder_input_ids" and getattr(config, "is_encoder_decoder", False):
            inputs[name] = _ids(batch, seq)
        elif config is not None and (sizes := _sizes(name, config, seq)):
            inputs[name] = torch.empty(batch, *sizes, device="meta")
    return inputs


def setting(config: Any, *names: str) -> Any:
    """Return the first of these settings that the configuration has, or that of its vision tower or encoder."""
    parts = (config, *(getattr(config, part, None) for part in _PARTS))
    values = (getattr(part, name, None) for part in parts for name in names)
    return next((value for value in values if value is not None), None)


# The settings that are the sizes of an input after the batch; an empty name is the length of the sequence.
_SIZE_SETTINGS = {
    "input_values": ("max_length", "num_mel_bins"),
    "past_values": ("context_length", "num_input_channels"),  # of PatchTST
    "visual_feats": ("", "visual_feat_dim"),  # this and the next of LXMERT
    "visual_pos": ("", "visual_pos_dim"),
}


def _sizes(name: str, config: Any, seq: int) -> tuple[int, ...]:
    """Return the sizes of an input after the batch by the configuration; empty if they cannot be derived."""
    if name == "pixel_values":  # the channels, height and width of images; of videos with their frames first
        size, frames = setting(config, "image_size", "input_size"), setting(config, "num_frames")
        sides = tuple(size) if isinstance(size, (list, tuple)) else (size or IMAGE_SIZE,) * 2
        return (*((frames,) if frames else ()), setting(config, "num_channels") or 3, *sides)
    if name == "input_features":  # a spectrogram
        if getattr(config, "model_type", "") == "whisper":  # whose second convolution halves the length
            return (config.num_mel_bins, 2 * config.max_source_positions)
        size = setting(config, "input_feat_per_channel", "feature_projection_input_dim")
        return (seq, size) if size else ()
    if name == "input_values":  # a waveform of which the convolutions make `seq` frames, or a spectrogram
        kernels, strides = setting(config, "conv_kernel"), setting(config, "conv_stride")
        if kernels and strides:
            samples = seq
            for kernel, stride in zip(reversed(kernels), reversed(strides), strict=True):
                samples = (samples - 1) * stride + kernel
            return (samples,)
        channels, ratios = setting(config, "audio_channels"), setting(config, "upsampling_ratios")
        if channels and ratios:  # EnCodec
            return channels, seq * math.prod(ratios)
    sizes = tuple(setting(config, key) if key else seq for key in _SIZE_SETTINGS.get(name, ()))
    return sizes if all(isinstance(size, int) for size in sizes) else ()


def check_sizes(batch: int, seq: int, most: int, limit: str) -> None:
    """Raise SelectionError for a batch, or a length above `most`, that no tensor has; `limit` is `most` in words."""
    if not 1 <= batch < MAX_SIZE:
        raise SelectionError(f"{name_of('batch')} takes a whole number of at least 1; got {batch}")
    if not 1 <= seq <= most:
        raise SelectionError(f"{name_of('seq')} {seq} does not fit the model: at least 1 and at most {limit}")


def positions(module: nn.Module) -> int:
    """Return the length limit of a sequence, MAX_SIZE if it is not known.

    The positions of the RoBERTa family start after the padding index.
    """
    most = setting(getattr(module, "config", None), *POSITIONS)
    if not isinstance(most, int) or most <= 0:
        return MAX_SIZE
    tables = (getattr(inner, "position_embeddings", None) for inner in module.modules())
    padding = next((table.padding_idx for table in tables if isinstance(table, nn.Embedding)), None)
    return most if padding is None else most - padding - 1


def labels_of(module: nn.Module, batch: int, seq: int) -> Inputs:
    """Return the labels that the class's name implies; without labels backward starts from the output."""
    name, config = type(module).__name__, getattr(module, "config", None)
    if name in ARCHITECTURES:
        return _bert_labels(name, config, batch, seq)
    if name.endswith(_TOKEN_LABELS):
        return {"labels": _ids(batch, seq)}
    has_classes = name.endswith("ForSequenceClassification") and getattr(config, "num_labels", 1) > 1
    return {"labels": _ids(batch)} if has_classes and not getattr(config, "problem_type", None) else {}


def _ids(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.long, device="meta")


def example_inputs(model: BertPreTrainedModel | PeftModel, batch: int, seq: int, *, labels: bool = False) -> Inputs:
    """Return ids, encoder states for a decoder with cross-attention, and labels if asked for, all on meta.

    Raises SelectionError for a batch below 1, and a length that the positions or the chunks of the model exclude.
    """
    config, name = model.config, type(base_model_of(model)).__name__
    most = config.max_position_embeddings
    check_sizes(batch, seq, most, f"max_position_embeddings {most}")
    if (chunk := config.chunk_size_feed_forward) and seq % chunk:
        raise SelectionError(f"{name_of('seq')} {seq} is not a multiple of the model's chunk_size_feed_forward {chunk}")
    head = HEADS.get(name, HEADS["BertModel"])
    inputs = {"input_ids": _ids(*((batch, CHOICES, seq) if head.is_choice else (batch, seq)))}
    if config.add_cross_attention and head.takes_encoder:
        inputs["encoder_hidden_states"] = torch.empty(batch, seq, config.hidden_size, device="meta")
    return inputs | (_bert_labels(name, config, batch, seq) if labels else {})


def _bert_labels(name: str, config: Any, batch: int, seq: int) -> Inputs:
    is_regression = config.problem_type == "regression"
    if name.endswith("ForSequenceClassification"):
        if config.problem_type == "multi_label_classification" or (is_regression and config.num_labels > 1):
            return {"labels": torch.empty(batch, config.num_labels, device="meta")}
        if is_regression or config.num_labels == 1:
            return {"labels": torch.empty(batch, device="meta")}
    sizes = {"batch": batch, "seq": seq}
    labels = HEADS[name].labels if name in HEADS else {}
    return {label: _ids(*(sizes[size] for size in names)) for label, names in labels.items()}


def known_shapes(module: nn.Module, names: Collection[str]) -> dict[str, str]:
    """Return the shapes and dtypes of the inputs that the model describes, such as `BxS:int64`, by name."""
    if isinstance(module, BertPreTrainedModel):
        one, other = (example_inputs(module, *sizes, labels=True) for sizes in _TWO_SIZES)
    else:
        one, other = (derived_inputs(module, names, *sizes) | labels_of(module, *sizes) for sizes in _TWO_SIZES)
    letters = {pair: letter for letter, pair in zip("BS", zip(*_TWO_SIZES, strict=True), strict=True)}
    known = {}
    for name, tensor in one.items():
        sizes = (letters.get(pair, str(pair[0])) for pair in zip(tensor.shape, other[name].shape, strict=True))
        known[name] = f"{'x'.join(sizes)}:{str(tensor.dtype).removeprefix('torch.')}"
    of_words = dict.fromkeys(_AS_IDS, known["input_ids"]) if "input_ids" in known else {}
    return of_words | known
