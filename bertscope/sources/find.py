"""Find the model for a name or path: a BERT's configuration, or another source.

MODEL may be a preset's name, its name on the Hugging Face hub, a preset file of the user's own, a `config.json`
(of a BERT, or of another family for transformers to build), an adapter in peft, a folder or a checkpoint with one of
these, a model in the local Hugging Face cache, or the user's own code, `module:attribute` or `file.py:attribute`.
Nothing here imports torch or runs that code; only `fetched_folder` uses the network.
"""

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from bertscope.checkpoints import WEIGHTS, has_modules, is_weights, weights_in
from bertscope.config import ARCHITECTURES, LORA_EXAMPLE, LORA_RULES, BertConfig, Lora
from bertscope.errors import (
    MissingExtraError,
    SelectionError,
    SourceError,
    importing,
    install_command,
    name_of,
    one_line,
    typed_arguments,
)
from bertscope.files import open_file, read_json, read_mapping, read_text, readable
from bertscope.frozen import Record
from bertscope.settings.rows import NO_PERMIT, CodeName, TypedName, is_code
from bertscope.settings.training import loss_parts
from bertscope.sources.adapters import ADAPTER_CONFIG, TYPE, base_of, read_adapter
from bertscope.sources.bert import (
    LISTED,
    BertSource,
    configured,
    near_presets,
    preset_paths,
    presets_by_alias,
    read_preset,
)
from bertscope.sources.model_source import FactorySource, GivenModule, ModelSource, SourceOptions, built_for_counting
from bertscope.sources.transformers_models import TransformersSource

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from bertscope.checkpoints.reading import Checkpoint
    from bertscope.torch_access import nn

_NAME = re.compile(r"(?:[A-Za-z0-9_][\w.-]{0,95}/)?[A-Za-z0-9_][\w.-]{0,95}", re.ASCII)
# The first parts of functions in torchvision.models, which people type as a model.
_TORCHVISION = (
    r"(alexnet|convnext|densenet|efficientnet|googlenet|inception|mobilenet|resnet|resnext|swin|vgg|wide_resnet)\w*"
)
_CONFIGS = ("adapter_config.json", "config.json")
# A page of the hub, and the model's name in its address.
_PAGE = re.compile(
    r"(?:(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/|hf://)(?:models/)?([^?#]+?)/*"
    r"(?:/(?:tree|blob|resolve|raw|discussions|commits)(?:/.*)?)?(?:[?#].*)?"
)


def is_hub_name(name: str) -> bool:
    """Return True if a model on the hub can have that name: `bert-base-cased`, `google-bert/bert-base-cased`."""
    return _NAME.fullmatch(name) is not None and "--" not in name and ".." not in name


def has_hub() -> bool:
    """Return True if huggingface_hub is installed, without importing it."""
    return find_spec("huggingface_hub") is not None


def cached_folder(name: str) -> Path | None:
    """Return the folder of that model's files in the local cache, or None."""
    if not is_hub_name(name) or not has_hub():
        return None
    with readable(f"{name} in the Hugging Face cache"):
        for cache in _caches():
            model = cache / f"models--{name.replace('/', '--')}"
            main = model / "refs" / "main"
            snapshot = model / "snapshots" / (read_text(main, "remove it").strip() if main.is_file() else "main")
            if any((snapshot / file).is_file() for file in (*_CONFIGS, *WEIGHTS)):
                return snapshot
    return None


def _caches() -> Iterator[Path]:
    # Those of huggingface_hub, whose import takes 0.1 s, and of transformers. Source: huggingface_hub 0.36.2,
    # `constants.py` and `file_download.py`.
    get = os.environ.get
    home = get("HF_HOME", os.path.join(get("XDG_CACHE_HOME", "~/.cache"), "huggingface"))
    hub = get("HF_HUB_CACHE", get("HUGGINGFACE_HUB_CACHE", os.path.join(home, "hub")))
    former = map(get, ("TRANSFORMERS_CACHE", "PYTORCH_TRANSFORMERS_CACHE"))
    yield from (Path(os.path.expandvars(os.path.expanduser(cache))) for cache in (hub, *former) if cache)


def fetched_folder(name: str, *, weights: bool = False) -> Path:
    """Download the model's or adapter's configuration, and its weights if wanted, into the cache; return the folder.

    Raises SourceError with a failure's reason, MissingExtraError without huggingface_hub.
    """
    if not is_hub_name(name):
        raise SourceError(f"{name[:100]!r} is not a hub name; those look like google-bert/bert-base-cased")
    if not has_hub():
        raise MissingExtraError(name_of("download"), "hub")
    with importing("huggingface_hub", "HF_", "HUGGINGFACE_"):
        from huggingface_hub import model_info, snapshot_download
    try:
        folder = Path(snapshot_download(name, allow_patterns=list(_CONFIGS)))
        if weights:  # one set: safetensors if the model has them, then an adapter, else torch's
            files = {item.rfilename for item in model_info(name).siblings or ()}
            patterns = ["pytorch_model*.bin", "pytorch_model.bin.index.json"]
            if files & {"model.safetensors", "model.safetensors.index.json"}:
                patterns = ["model*.safetensors", "model.safetensors.index.json"]
            elif "adapter_model.safetensors" in files:
                patterns = ["adapter_model.safetensors"]
            snapshot_download(name, allow_patterns=patterns)
    except Exception as error:  # errors of the hub, the network and the disk have no common base class
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise SourceError(f"{name} cannot be downloaded: {type(error).__name__}: {reason[:300]}") from None
    return folder


DEFAULT_MODEL = "bert-base-cased"
_CONFIG = "config.json"
_SUFFIXES = (".yaml", ".yml", ".json")


@typed_arguments
def load(
    model: str | os.PathLike[str] = DEFAULT_MODEL,
    *,
    architecture: str | None = None,
    attention: str | None = None,
    add_pooling_layer: bool | None = None,
    lora: Lora | str | None = None,
    download: bool = False,
) -> ModelSource:
    """Return the source of the model that `model` names, with the options; only `download` uses the network.

    Raises SourceError if nothing has that name, SelectionError for an option that another family does not have,
    ConfigError for a wrong value in the file.

    >>> source = bertscope.load("bert-base-cased", architecture="BertForSequenceClassification", attention="eager")
    >>> source.config.num_hidden_layers, source.build().num_labels
    (12, 2)
    """
    return find(
        CodeName(os.fspath(model)), download=download, architecture=architecture, attention=attention,
        add_pooling_layer=add_pooling_layer, lora=lora,
    )  # fmt: skip


def find(
    model: str | os.PathLike[str] = DEFAULT_MODEL, *, download: bool = False, **options: "Unpack[SourceOptions]"
) -> ModelSource:
    """Return the source that `model` names, a BERT or another model, with options.

    Raises as `load`, SourceError for code that is no CodeName, and MissingExtraError if another
    family's configuration needs transformers.
    """
    lora, source = options.get("lora"), _find(os.fspath(model), download)
    if not isinstance(lora, str) or "=" in lora or not os.path.exists(os.path.expanduser(lora)):
        return source.with_options(**options)
    path = Path(lora).expanduser()  # an adapter_config.json, or a folder with one
    path = path / ADAPTER_CONFIG if path.is_dir() else path
    entries = read_mapping(path)
    if TYPE not in entries:
        what = f"{name_of('lora')} takes settings or an {ADAPTER_CONFIG}; there is no {TYPE}"
        raise SourceError(what, where=f"{path}:1")
    options["lora"] = None
    return read_adapter(entries, path, source, _of_transformers).with_options(**options)


class Configuration(Protocol):
    """A configuration in transformers."""

    model_type: str

    def to_dict(self) -> dict[str, Any]:
        """Return the content of its config.json."""


# A module, a name or path as for the command line, a configuration or its dictionary, or `bertscope.load(...)`; in some
# functions a checkpoint, `bertscope.read_checkpoint(...)`.
Model: TypeAlias = (
    "nn.Module | ModelSource | Checkpoint | BertConfig | Configuration | Mapping[str, Any] | str | os.PathLike[str]"
)


def source_of(model: Any, *, name: str | None = None, inputs: Any = None) -> ModelSource:
    """Return the source for what a Python user gives: a name or path, a module, a configuration, or a source.

    A configuration is a BertConfig, a transformers config, or a dictionary with a config.json's content. `name`
    replaces the name that reports show; `inputs` are a module's. Raises SelectionError for anything else, and
    as `find`.
    """
    torch = sys.modules.get("torch")  # without it there are no modules
    if torch is not None and isinstance(model, torch.nn.Module):
        return GivenModule(name=name or type(model).__name__, module=model, inputs=inputs)
    if inputs is not None:
        raise SelectionError("inputs are for a module; this model has those that its forward takes at batch and seq")
    if callable(getattr(model, "with_layers", None)):
        source: ModelSource = model
    elif isinstance(model, (str, os.PathLike)):
        source = _find(CodeName(os.fspath(model)), download=False)
        source = replace(source, name=TypedName(source.name)) if source.name == model else source
    elif isinstance(model, BertConfig):
        source = BertSource.of(model, model.architectures[0] if model.architectures else "bert")
    else:
        if callable(getattr(model, "to_dict", None)) and hasattr(model, "model_type"):  # of transformers
            model = model.to_dict()
        if not isinstance(model, Mapping):
            raise SelectionError(
                "a model is a module of torch, a name or path as for 'bertscope count', a BertConfig, a configuration "
                "of transformers, the dictionary in a config.json, or bertscope.load(...); got "
                f"{type(model).__name__}"
            )
        entries = read_json(json.dumps(model, default=str), Path("configuration"))
        source = configured(entries, Path("configuration"), str(model.get("_name_or_path") or "") or None)
    return replace(source, name=name) if name else source


def teachers(loss: str) -> list[ModelSource]:
    """Return the teacher in loss `distil:TEACHER`, a model without a head; none for any other loss.

    A teacher that is code has the loss's permit.
    """
    name, argument = loss_parts(loss)
    if name != "distil":
        return []
    source = find(CodeName(argument) if isinstance(loss, CodeName) else argument)
    return [source if source.bert_config is None else source.with_options(architecture="BertModel")]


def _find(name: str, download: bool, *, is_base: bool = False) -> ModelSource:
    """Return the source; `is_base` refuses an adapter, so that adapters do not lead to each other."""
    if not name.strip():
        hint = f"give a preset, a file or module:attribute; {LISTED}"
        raise SourceError(f"the name of a model is empty; {hint}")
    page = _PAGE.fullmatch(name.strip())
    if page and is_hub_name(page[1]):
        return _on_hub(page[1], download, is_base)
    if preset := preset_paths().get(name):
        return _preset(preset)
    location = _place(name)
    if not location.exists and is_code(name):
        if not isinstance(name, CodeName):
            raise SourceError(f"model {name[:100]!r} {NO_PERMIT}")
        return FactorySource(name=name, code=name)
    is_path = location.path.suffix in _SUFFIXES or location.has_weights or name.startswith((".", "~", os.sep))
    if location.exists or is_path:
        return _read(location, is_base)
    return _on_hub(name.strip().rstrip("/"), download, is_base)


def _on_hub(name: str, download: bool, is_base: bool) -> ModelSource:
    if preset := presets_by_alias().get(name.lower()):
        return _preset(preset)
    folder = fetched_folder(name) if download else cached_folder(name)
    if folder is None:
        raise _unknown(name)
    cached = _read(_place(folder), is_base)
    return cached if cached.lora else replace(cached, name=name)


def _preset(path: Path) -> ModelSource:
    return read_preset(path) if path.suffix == ".yaml" else replace(_read(_place(path), is_base=False), name=path.stem)


def weights_path(model: str, *, download: bool = False) -> Path:
    """Return the checkpoint's file, index or folder for a path or hub name; raises SourceError for none."""
    location = _place(model)
    if location.exists and location.path.name == _CONFIG:  # the weights are beside it
        location = _place(location.path.parent)
        if not location.has_weights:
            raise SourceError(f"{model} has no weights next to it; name a file with tensors, an index, or a folder")
    if location.exists or location.has_weights:
        return location.path
    folder = fetched_folder(model, weights=True) if download else cached_folder(model)
    if folder is None:
        raise SourceError(
            f"{model[:100]!r} has no checkpoint; name a second model to compare it with, or a file with tensors, an "
            "index, a folder with one or a model in the Hugging Face cache"
        )
    return folder


def stored_alone(model: Any, *, beside_config: bool = True, **options: object) -> "Checkpoint | None":
    """Return the checkpoint if MODEL is one without a configuration: a weights file, or a folder with them.

    A file next to its configuration is one too, unless `beside_config` is False; so is a
    sentence-transformers folder with a Dense, whose configuration is only its first module's. Raises SelectionError for
    a model option.
    """
    if not isinstance(model, (str, os.PathLike)):
        reading: Any = sys.modules.get("bertscope.checkpoints.reading")  # without it there are no checkpoints
        return model if reading and isinstance(model, reading.Checkpoint) else None
    location = _place(model)
    uses_config = location.is_folder or not beside_config
    is_model = uses_config and location.config and not (location.is_folder and has_modules(location.path))
    if not location.has_weights or is_model or os.fspath(model) in preset_paths():
        return None
    for option, value in options.items():
        if value is not None and value is not False:
            raise SelectionError(f"{option} is for models, and {location.path} has only tensors")
    from bertscope.checkpoints.reading import read_checkpoint

    return read_checkpoint(location.path)


class _Place(Record, kw_only=False):
    path: Path
    exists: bool
    is_folder: bool
    has_weights: bool  # a file of weights, or a folder with one
    config: Path | None  # the adapter_config.json or config.json in the folder, or next to the weights


def _place(name: str | os.PathLike[str]) -> _Place:
    with readable(one_line(os.fspath(name), limit=100)):
        path = Path(name).expanduser()
        try:
            exists = path.exists()
        except (OSError, ValueError, RuntimeError):  # not a valid path: too long, with a NUL, or a loop of links
            exists = False
        is_folder = exists and path.is_dir()
        has_weights = weights_in(path) is not None or has_modules(path) if is_folder else is_weights(path)
        folders = (path, path / "0_Transformer") if is_folder else (path.parent,)  # of sentence-transformers before 2.0
        configs = [folder / name for folder in folders for name in (ADAPTER_CONFIG, _CONFIG)]
        config = next(filter(Path.exists, configs), None) if exists and (is_folder or has_weights) else None
        return _Place(path, exists, is_folder, has_weights, config)


def _unknown(name: str) -> SourceError:
    classes = {known.lower(): known for known in ARCHITECTURES}
    if known := classes.get(name.lower()):
        example = f"such as bert-base-uncased {name_of('architecture')} {known}"
        return SourceError(f"no preset or file named {name!r}; {known} is a class: give a model with it, {example}")
    if name[:1] in ("\u2013", "\u2014"):
        return SourceError(f"{name[:100]!r} begins with a long dash; an option begins with --")
    if name.endswith((".py", ".json", ".yaml", ".yml")):
        return SourceError(f"there is no file {name[:100]!r}; check the path")
    option, _, value = name.partition("=")
    hints = {
        "(?i:true|false|yes|no|on|off|[0-9]*[.][0-9]+)": "an option without a value is written alone",
        "[0-9]+": f"write a list with commas, such as 128,{name[:9]}",
        rf"({'|'.join(LORA_RULES)})=.*": f"{name_of('lora')} has commas, as in {LORA_EXAMPLE}",
        "[a-z_]+=.*": f"an option is --{option.replace('_', '-')} {value[:40]}",
        ".*,.*": "write several models with spaces between them",
        _TORCHVISION: f"torchvision has it as code: torchvision.models:{name}",
        r"[a-zA-Z_]\w*(\.[a-zA-Z_]\w*)+": f"code is module:attribute, such as {':'.join(name[:100].rsplit('.', 1))}",
    }
    if hint := next((hint for pattern, hint in hints.items() if re.fullmatch(pattern, name)), ""):
        return SourceError(f"no preset or file named {name[:100]!r}; {hint}")
    near = near_presets(name)
    fetched = f"{name_of('download')} fetches it from the Hugging Face hub"
    if not has_hub():
        extras = "hub" if find_spec("transformers") else "hub,transformers"
        fetched = f"after {install_command(extras)}, {fetched}"
    advice = [f"{near} {LISTED}".lstrip(), fetched * is_hub_name(name)][:: 1 if near else -1]
    return SourceError("; ".join([f"no preset or file named {name[:100]!r}", *filter(None, advice)]))


def _read(location: _Place, is_base: bool) -> ModelSource:
    path = location.config or location.path
    if location.exists and location.has_weights and not location.config:
        raise SourceError(
            f"{path} has no config.json next to it; add the model's, or count its tensors with: bertscope count "
            f"{shlex.quote(str(path))}"
        )
    if location.is_folder and not location.config:
        raise SourceError(f"{path} has no config.json, adapter_config.json or checkpoint; name one that has")
    if path.suffix == ".py":
        classes: list[str] = []
        if path.is_file():
            with open_file(path, LISTED) as file:  # it is not run
                classes = re.findall(r"^class (\w+)", file.read(2**20).decode(errors="replace"), re.MULTILINE)
        example = f"{path}:{classes[0] if classes else 'build'}"
        raise SourceError(f"{path} is code; name a class or function in it, such as {example}")
    if path.suffix != ".json":
        return read_preset(path)
    entries = read_mapping(path)
    name = path.stem
    if path.name == _CONFIG:  # a file has the name that it gives itself, and a folder its own
        values = [entries[key].value for key in ("_name_or_path", "architectures") if key in entries]
        texts = [value[0] if isinstance(value, list) and value else value for value in values]
        names = [text.rstrip("/") for text in texts if isinstance(text, str) and not location.config]
        names = [one.rpartition("/")[2].strip(".") if one[:1] in ("/", ".", "~") else one for one in names]  # of a path
        name = next(filter(None, names), "")[:100] or Path(os.path.abspath(path)).parent.name
    if TYPE in entries and is_base:
        raise SourceError(f"{path} is an adapter, and an adapter needs a model without one as its base")
    if TYPE in entries:

        def base(model: str) -> ModelSource:
            beside = _place(path.parent / model)  # a path from there, or any name
            return _find(str(beside.path) if beside.exists else model, download=False, is_base=True)

        return read_adapter(entries, path, base_of(entries, path, base), _of_transformers)
    source = configured(entries, path, name)
    if location.config and not location.is_folder:
        _check_tensors(source, location)
    return source


def _check_tensors(source: ModelSource, location: _Place) -> None:
    """Raise SelectionError if a file of weights contradicts the configuration next to it, which a model is built from.

    It does without any tensor of the model, and with another shape of one. Its further tensors may belong to a head.
    """
    from bertscope.checkpoints.reading import read_checkpoint
    from bertscope.model import bert

    try:
        stored = read_checkpoint(location.path)
    except SourceError:  # `count` says what is wrong with the file; the configuration alone gives the model
        return
    if stored.format not in ("safetensors", "pytorch") or stored.unknown_packing or not stored.tensors:
        return
    built = built_for_counting(source)
    state, base = built.state_dict(), str(getattr(built, "base_model_prefix", "bert"))
    plain = [tensor for tensor in stored.tensors if not tensor.packing]
    pairs: list[tuple[Any, Any]] = []
    for tensor in plain:
        ends = (tensor.name.split(".", parts)[-1] for parts in range(4))  # without the name of a module around it
        names = (bert.own_name(bert.modern_name(end), state, base) for end in ends)
        pairs += [(tensor, state[name]) for name in names if name in state][:1]
    wrong = next((pair for pair in pairs if pair[0].shape != pair[1].shape), None)
    if not plain or (pairs and not wrong):
        return
    what = f"it has none of that model's tensors, but {plain[0].name}"
    if wrong:
        what = f"{wrong[0].name} is {[*wrong[0].shape]} in it and {[*wrong[1].shape]} in that model"
    raise SelectionError(
        f"{location.path} does not belong to {location.config}, a {source.architecture or source.family}: {what}; name "
        f"the model itself, such as my.py:MyModel, or count the file's tensors: bertscope count {location.path}"
    )


def _of_transformers(source: ModelSource) -> ModelSource:
    """Return a BERT as a model of transformers, whose classes peft's expect."""
    config = source.bert_config
    if config is None:
        return source
    fields: Any = {key: getattr(source, key) for key in ("name", "architecture", "where")}
    path = getattr(source, "path", None) or Path()
    return TransformersSource(model_type="bert", path=path, settings=config.to_dict(), **fields)
