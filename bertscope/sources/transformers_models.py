"""Models of other families, built by `transformers` from their `config.json` on the meta device.

Settings that lead to code are refused, and a configuration without a family is no BERT.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import fields, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from bertscope.config import ARCHITECTURES, RULES, Quantization, refuse_misspelling
from bertscope.errors import (
    BertscopeWarning,
    ConfigError,
    MissingExtraError,
    SourceError,
    importing,
    name_of,
    needs_extra,
    suggestion,
)
from bertscope.files import Mapping as Entries
from bertscope.settings.run_config import FLASH_KERNELS
from bertscope.sources.model_source import ModelSource, SourceOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from bertscope.torch_access import nn

_MAX_INTEGER = 2**31
MAX_LAYERS = 150  # each layer is built from real modules, also on the meta device; an encoder-decoder has two stacks
MAX_EXPERTS = 24_576  # over all layers; each is a module with submodules, except in transformers 5
MAX_LABELS = 100_000
# Fields that hold a number of modules, over all families; none of widths, proposals, records and codevectors.
_MODULES = re.compile(
    r"^(?!.*_(?:size|dim|channels?)(?:_|$))(?!.*_(?:sizes|proposals|records|per_group|of|bins)$)"
    r"(?:n_layer|layers|num_.*layers|.*(?:layers?$|_layers?_|blocks?$|block_|(?:hidden|num)_groups?$|inner_group|experts?"
    r"|stages?|depth))"
)
# The first of these that a field contains has its limit.
_LIMITS = ((re.compile("^num_labels$"), MAX_LABELS), (re.compile("experts?$"), MAX_EXPERTS), (_MODULES, MAX_LAYERS))
# Kernels that are part of torch and transformers; any other may be fetched from the hub, as code.
_KERNELS = {"attn": ("eager", "sdpa", *FLASH_KERNELS), "experts": ("eager", "batched_mm", "grouped_mm")}
_IMPLEMENTATION = re.compile(r"(attn|experts)_implementation")


# Blocks in each stage: He et al. 2015 (arXiv:1512.03385), table 1.
_RESNETS = {"resnet50": [3, 4, 6, 3], "resnet101": [3, 4, 23, 3]}
_STAGES = {"detr": 1, "table-transformer": 1, "conditional_detr": 1, "deformable_detr": 2}  # the first used
_BACKBONE = ("backbone", "backbone_config", "backbone_kwargs", "use_timm_backbone", "use_pretrained_backbone")


def with_resnet(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that build a transformers ResNet for the timm one that a DETR names, without weights.

    Both have the same layers. Nothing for another family or backbone, and for one that is not as published.
    """
    first, name, kwargs = (config.get(key) for key in ("model_type", "backbone", "backbone_kwargs"))
    is_plain = isinstance(kwargs or {}, dict) and set(kwargs or {}) <= {"in_chans", "out_indices"}
    is_other = config.get("backbone_config") or config.get("dilation") or config.get("use_timm_backbone") is not True
    if str(first) not in _STAGES or str(name) not in _RESNETS or not is_plain or is_other:
        return {}
    features = [f"stage{number}" for number in range(_STAGES[str(first)], 5)]
    resnet = {"model_type": "resnet", "depths": _RESNETS[str(name)], "out_features": features}
    built = {"backbone_config": resnet, "use_timm_backbone": False, "use_pretrained_backbone": False}
    return dict.fromkeys(_BACKBONE) | built


def without_code(value: Any) -> Any:
    """Return a copy of a configuration without `auto_map`, which names code in the model's repository."""
    if isinstance(value, dict):
        return {key: without_code(item) for key, item in value.items() if key != "auto_map"}
    return [without_code(item) for item in value] if isinstance(value, list) else value


def check_setting(key: str, value: Any, where: str) -> None:
    """Raise ConfigError for a setting that takes minutes or gigabytes, or that leads to code, files or the network."""
    if reason := _refusal(key, value):
        raise ConfigError(f"{key[:60]} {reason}", where=where, field=key)
    if isinstance(value, dict):
        for inner, item in value.items():
            check_setting(str(inner), item, where)
    elif isinstance(value, list):
        for item in value:
            check_setting(key, item, where)
    elif isinstance(value, int):
        most = next((limit for pattern, limit in _LIMITS if pattern.search(key)), _MAX_INTEGER)
        if abs(value) > most:
            shown = f"{value:,}" if value.bit_length() < 100 else "an integer of more than 30 digits"
            raise ConfigError(f"{key[:60]} may be at most {most:,} here; got {shown}", where=where, field=key)


def largest_layers(config: Mapping[str, Any]) -> int:
    """Return the largest number of layers that a configuration, or one inside it, gives; 0 without one."""
    numbers = [value for key, value in config.items() if type(value) is int and _MODULES.search(key)]
    return max([*numbers, *(largest_layers(value) for value in config.values() if isinstance(value, dict))], default=0)


def check_experts(config: dict[str, Any], where: str) -> None:
    """Raise ConfigError if layers times experts are too many modules, in a configuration or one inside it."""
    for value in config.values():
        if isinstance(value, dict):
            check_experts(value, where)
    counts = [(key, value) for key, value in config.items() if type(value) is int and _MODULES.search(key)]
    experts = max((value for key, value in counts if "expert" in key), default=0)
    layers = max((value for key, value in counts if "expert" not in key), default=1)
    if experts * layers > MAX_EXPERTS:
        raise ConfigError(
            f"{layers:,} layers of {experts:,} experts are {layers * experts:,} modules; at most {MAX_EXPERTS:,} are "
            "built here; lower the number of layers and multiply",
            where=where,
        )


def _refusal(key: str, value: Any) -> str:
    """Return why a setting is refused: transformers or timm would load a model, weights or code because of it."""
    if not value:
        return ""
    if kind := _IMPLEMENTATION.search(key):
        allowed = _KERNELS[kind[1]]
        unknown = [name for name in _strings(value) if name not in allowed]
        return f"may be {' or '.join(allowed)} here; got {unknown[0][:60]!r}; remove it" if unknown else ""
    if "backbone" in key and isinstance(value, str):
        return f"names another model ({value[:60]!r}), which is not loaded; describe it in backbone_config instead"
    if key == "backbone_kwargs" or re.fullmatch(r"use_\w+_backbone", key):
        return "is for a backbone that is loaded by its name; remove it, and describe the backbone in backbone_config"
    if key == "architecture" and isinstance(value, str) and re.search(r"[:/]", value):
        return f"names a location ({value[:60]!r}), and nothing is loaded from it; name an architecture of timm"
    if key == "checkpoint_path":
        return "names a file of weights, which are not loaded; remove it"
    if key in ("trust_remote_code", "attribute_map"):
        return "is refused, since a configuration is data and no code of its model is run; remove it"
    return ""


def _strings(value: Any) -> list[str]:
    if isinstance(value, (dict, list)):
        return [name for item in (value.values() if isinstance(value, dict) else value) for name in _strings(item)]
    return [value] if isinstance(value, str) else []


# ---- a configuration without `model_type`, which transformers writes since 2.2 ----

_OWN_FORM = "params.json"  # of Meta's and Mistral's own code
_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
# RoBERTa's files have the keys of a BERT, and its positions begin at 2.
_ROBERTA = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}


@cache
def _keys() -> tuple[frozenset[str], dict[str, str]]:
    table = yaml.safe_load(Path(__file__).with_name("family_keys.yaml").read_text(encoding="utf-8"))
    return frozenset(table["common"]), table["families"]


def check_family(members: Mapping[str, Any]) -> None:
    """Raise ConfigError for a configuration without `model_type` that lacks sizes of a BERT or has another's keys."""
    if "model_type" in members:
        return
    classes = members.get("architectures")
    if isinstance(classes, list) and classes and not set(map(str, classes)) & set(ARCHITECTURES):
        raise ConfigError(
            f"there is no model_type, and {str(classes[0])[:60]} is not a class of a BERT; "
            'add "model_type" with its family',
            field="architectures",
        )
    common, families = _keys()
    known = RULES.keys() | common
    if strange := [name for name in members if name not in known and not str(name).startswith("_")]:
        of = next((of for keys, of in families.items() if any(name in strange for name in keys.split())), "")
        if len(strange) == 1 and not of:
            refuse_misspelling(str(strange[0]), members)
        family = f"with its family, by these keys {of}" if of else 'with its family; "bert" passes over such keys'
        remedy = f'add "model_type" {family}' if of != _OWN_FORM else f"give its config.json, since this is a {of}"
        names = ", ".join(map(str, strange[:3])) + " ..." * (len(strange) > 3)
        verb = "is not a key" if len(strange) == 1 else "are not keys"
        raise ConfigError(f"there is no model_type, and {names} {verb} of a BERT; {remedy}", field=strange[0])
    if members.items() >= _ROBERTA.items():
        raise ConfigError(
            'there is no model_type, and its token ids are RoBERTa\'s; add "model_type" with its family, roberta or '
            'camembert; "bert" if it is one',
            field="pad_token_id",
        )
    if absent := [name for name in _NEEDED if name not in members]:
        raise ConfigError(
            f"there is no model_type, and no {', '.join(absent)} as in a BERT's config.json; give the file of a model, "
            'or add "model_type": "bert" for the sizes of BERT-base'
        )


def file_notes(members: Mapping[str, Any]) -> str:
    """Return notes on what a configuration says and bertscope does not follow; an empty text without any."""
    notes = []
    if members.get("auto_map"):
        notes.append("auto_map names code in the model's repository, which is not run: its network may differ")
    if quantized := members.get("quantization_config"):
        try:
            how = Quantization.of(quantized, None)
            notes.append(f"the weights of linear layers are {how and how.kind}, as its quantization_config says")
        except ConfigError as error:
            notes.append(error.message)
    return "\n".join(notes)


_REFUSE = object()
# Module, or module:class; attribute; its value inside the guard. transformers and huggingface_hub read the
# environment once, at import; later only these attributes decide.
_CHANGES: tuple[tuple[str, str, Any], ...] = (
    ("huggingface_hub.constants", "HF_HUB_OFFLINE", True),
    ("transformers.utils.hub", "_is_offline_mode", True),  # 4.x keeps a copy
    ("transformers.dynamic_module_utils", "TIME_OUT_REMOTE_CODE", 0),  # seconds to wait for an answer; 0: no prompt
    ("transformers.dynamic_module_utils", "get_cached_module_file", _REFUSE),  # copies the code of a repository
    ("transformers.dynamic_module_utils", "get_class_in_module", _REFUSE),  # runs it
    ("transformers.integrations.hub_kernels", "_kernels_enabled", False),  # 5.x
    ("transformers.integrations.hub_kernels", "get_kernel", _REFUSE),  # fetches a kernel and runs its code
    ("torch", "load", _REFUSE),  # may run what a pickle names
    ("socket", "getaddrinfo", _REFUSE),
    ("socket", "create_connection", _REFUSE),
    ("socket:socket", "connect", _REFUSE),
    ("socket:socket", "connect_ex", _REFUSE),
)
_LOCK = threading.RLock()  # without it, two threads would restore each other's changes


@contextmanager
def confined() -> Iterator[None]:
    """Run code in transformers without network, prompts, pickles, or code that is not installed.

    Settings change for the entire process; functions are refused in this thread only. The end restores both.
    """
    with _LOCK, ExitStack() as stack:
        for module, name, value in _CHANGES:
            with contextlib.suppress(ImportError, AttributeError):  # not in every version
                _change(stack, module, name, value)
        _forget_connections()
        stack.callback(_forget_connections)
        yield


def _change(stack: ExitStack, path: str, name: str, value: Any) -> None:
    """Replace an attribute until the stack is closed; raises ImportError or AttributeError if it does not exist."""
    module, _, inner = path.partition(":")
    owner: Any = importlib.import_module(module)
    owner = getattr(owner, inner) if inner else owner
    original, is_inherited = getattr(owner, name), name not in vars(owner)
    setattr(owner, name, _refusing(original, name) if value is _REFUSE else value)
    stack.callback(*((delattr, owner, name) if is_inherited else (setattr, owner, name, original)))


def _refusing(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    thread = threading.get_ident()

    def refuse(*args: Any, **options: Any) -> Any:
        if threading.get_ident() == thread:
            raise PermissionError(f"{name} is not allowed while a model is built from a configuration, or run")
        return original(*args, **options)

    return refuse


def _forget_connections() -> None:
    """Close the sessions of huggingface_hub below 1.0, which keep the online or offline state they began with."""
    with contextlib.suppress(ImportError, AttributeError):
        utils: Any = importlib.import_module("huggingface_hub.utils")
        utils.reset_sessions()


class TransformersSource(ModelSource):
    """A model that transformers builds from the configuration of another family than BERT's."""

    model_type: str
    path: Path
    attention: str | None = None
    notice: str = ""  # for the user before the model is built

    @property
    def family(self) -> str:
        return f"a {self.model_type} of transformers"

    @property
    def quantization(self) -> Any:
        return self.settings.get("quantization_config")

    def to_data(self) -> dict[str, Any]:
        return {item.name: getattr(self, item.name) for item in fields(self)} | {"path": str(self.path)}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> TransformersSource:
        return cls(**{**data, "path": Path(data["path"])})

    def _model(self, device: str, attention: str | None) -> nn.Module:
        kernel = self.attention or attention
        with quiet_transformers(stands_in=kernel in FLASH_KERNELS) as transformers:
            known = transformers.models.auto.configuration_auto.CONFIG_MAPPING
            if self.model_type not in known:
                remark = "; the code in its repository (auto_map) is not run" if "auto_map" in self.settings else ""
                raise SourceError(
                    f"transformers {transformers.__version__} does not know the model type {self.model_type!r}; "
                    f"a newer one may{remark}",
                    where=str(self.path),
                )
            config_class = known[self.model_type]
            options = {"attn_implementation": kernel} if kernel else {}
            what = f"{self.path}: transformers {transformers.__version__} cannot build this {self.model_type}"

            def make() -> nn.Module:
                config = config_class.from_dict(without_code(self.settings), **options)
                model_class = _model_class(transformers, self, type(config))
                with _without_values() if device == "meta" else nullcontext():
                    model = model_class(config)
                if model_class.__name__.endswith("ForSequenceClassification"):
                    parts = (model.config, getattr(model.config, "get_text_config", lambda: model.config)())
                    for part in parts:
                        if getattr(part, "pad_token_id", 0) is None:  # without one it refuses batches above 1
                            part.pad_token_id = part.eos_token_id if isinstance(part.eos_token_id, int) else 0
                built: nn.Module = model.eval()
                return built

            model: nn.Module = self._built(device, make, what)
        return model

    def layer_counts(self, model: Any) -> Mapping[str, int]:
        return dict(_layer_counts(model.config.to_dict()))

    def with_layer_counts(self, counts: Mapping[str, int]) -> TransformersSource:
        """Return the source with other values of such fields; a list with an element for each layer becomes shorter."""
        settings = copy.deepcopy(dict(self.settings))
        for path, count in counts.items():
            *parts, name = path.split(".")
            config = settings
            for part in parts:
                config = config.setdefault(part, {})
            lists = {key: value for key, value in config.items() if isinstance(value, list)}
            shorter = {key: value[:count] for key, value in lists.items() if len(value) == config.get(name)}
            config |= shorter | {name: count}
        return replace(self, settings=settings)

    def with_options(self, **options: Unpack[SourceOptions]) -> ModelSource:
        if find_spec("transformers") is None:
            what = f"{self.name}: the model type {self.model_type!r}"
            raise MissingExtraError(what, "transformers")
        self._refuse_pooler(options)
        architecture, attention = options.get("architecture"), options.get("attention")
        changed = replace(self, architecture=architecture or self.architecture, attention=attention or self.attention)
        return changed.with_adapters(options.get("lora"))

    def confined(self) -> AbstractContextManager[Any]:
        return quiet_transformers(stands_in=self.attention in FLASH_KERNELS)


def _layer_counts(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, int]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _layer_counts(value, f"{prefix}{name}.")
        elif isinstance(value, int) and value > 1 and re.search(r"layers?$", name):
            yield f"{prefix}{name}", value


def from_config(entries: Entries, name: str) -> TransformersSource:
    """Return the source in a `config.json` of another family.

    Raises ConfigError for sizes that no model has.
    """
    kind = entries["model_type"]
    if not isinstance(kind.value, str) or not re.fullmatch(r"[\w.-]{1,60}", kind.value):
        raise kind.error("model_type must be the name of a model family, such as bert or roberta")
    config, name_of_backbone = entries.plain(), ""
    if resnet := with_resnet(config):
        name_of_backbone, config = config["backbone"], config | resnet
    for key, entry in entries.items():
        if key not in resnet:
            check_setting(key, entry.value, entry.where)
    check_experts(config, kind.where)
    names = config.get("architectures")
    built = f"built with a {name_of_backbone} of transformers, without timm and pretrained weights" if resnet else ""
    return TransformersSource(
        name=name,
        architecture=names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None,
        model_type=kind.value,
        path=kind.path,
        where=kind.where,
        settings=config,
        attention=flash_kernel(config),
        stored_dtype=stored_dtype(config),
        notice="\n".join(filter(None, (built, file_notes(config)))),
    )


def flash_kernel(config: Mapping[str, Any]) -> str | None:
    """Return the kernel of flash-attn that a `config.json` names; None without one."""
    kernels = (config.get(key) for key in ("attn_implementation", "_attn_implementation"))
    return next((kernel for kernel in kernels if kernel in FLASH_KERNELS), None)


def stored_dtype(config: Mapping[str, Any]) -> str | None:
    """Return the dtype of the published weights in a `config.json`; transformers calls it `dtype` since 4.56."""
    dtype = config.get("torch_dtype", config.get("dtype"))
    return dtype if isinstance(dtype, str) else None


def _model_class(transformers: Any, source: TransformersSource, config_class: type) -> Any:
    family: dict[str, Any] = {}
    auto = transformers.models.auto.modeling_auto
    names = (name for name in sorted(vars(auto)) if name.startswith("MODEL_FOR_") and name.endswith("_MAPPING"))
    for mapping in (getattr(auto, name) for name in ("MODEL_MAPPING", *names)):
        classes = mapping.get(config_class, ())
        family |= {cls.__name__: cls for cls in (classes if isinstance(classes, (list, tuple)) else [classes])}
    name = source.architecture or next(iter(family), "")
    model_class = family.get(name) or getattr(transformers, name, None)
    if (classes_by_config := getattr(model_class, "_model_mapping", None)) is not None:  # of an auto class
        model_class = classes_by_config.get(config_class, None)
        family |= {name: model_class} if isinstance(model_class, type) else {}
    architecture = name_of("architecture")
    takes_it = name in family or getattr(model_class, "config_class", None) is config_class
    if not isinstance(model_class, type) or not takes_it:
        raise ConfigError(
            f"unknown architecture {name[:60]!r} for a {source.model_type}; "
            f"{suggestion(name, set(family)) if family else f'name its class: {architecture}'}",
            field="architecture",
        )
    return model_class


@contextmanager
def quiet_transformers(purpose: str = "a model of another family", *, stands_in: bool = False) -> Iterator[Any]:
    """Return the package, confined and without its warnings; raise MissingExtraError for `purpose`.

    With `stands_in` it finds a flash-attn, whatever is installed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("default", BertscopeWarning)
        prefixes = ("HF_", "HUGGINGFACE_", "TRANSFORMERS_", "TORCH_", "PYTORCH_", "TQDM_")
        with needs_extra(purpose, "transformers"), importing("transformers", *prefixes):
            import transformers
        logging: Any = transformers.logging
        with ExitStack() as stack:
            stack.callback(logging.set_verbosity, logging.get_verbosity())
            logging.set_verbosity_error()
            stack.enter_context(confined())
            if stands_in:
                from bertscope.transformers_access import flash_attn_stand_in

                stack.enter_context(flash_attn_stand_in())
            yield transformers


@contextmanager
def _without_values() -> Iterator[None]:
    # Meta tensors have no initial values, and their computation imports torch._dynamo. The constructors still tie
    # weights, which transformers 4 skips together with the values; 5 skips nothing else.
    with ExitStack() as stack:
        with contextlib.suppress(ImportError, AttributeError):
            modeling_utils: Any = importlib.import_module("transformers.modeling_utils")
            stack.enter_context(modeling_utils.no_init_weights())
            modeling_utils._init_weights = True  # the context restores it
            base = "transformers.modeling_utils:PreTrainedModel"
            for name in {"_initialize_weights", "initialize_weights"} & vars(modeling_utils.PreTrainedModel).keys():
                _change(stack, base, name, lambda *_: None)
        yield


def token_types(config: Any) -> tuple[str, ...]:
    """Return `token_type_ids` if the tokenizer of the configuration's family returns them, else nothing.

    Source: model_input_names of its class. The forward of GPT-2 takes them too, and then looks up more words.
    """
    family = getattr(config, "model_type", None)
    if not type(config).__module__.startswith("transformers.") or not isinstance(family, str):
        return ()
    from transformers.models.auto import tokenization_auto

    classes = tokenization_auto.TOKENIZER_MAPPING_NAMES.get(family)  # before version 5 a slow and a fast class
    name = next(filter(None, reversed(classes if isinstance(classes, tuple) else (classes,))), None)
    tokenizer = name and tokenization_auto.tokenizer_class_from_name(name)
    return tuple(name for name in getattr(tokenizer, "model_input_names", ()) if name == "token_type_ids")
