"""A name or a path -> the configuration that it stands for.

MODEL may be a preset's name, its name on the Hugging Face hub, a preset file of the user's own, a
`config.json`, or a folder that holds one. Nothing here touches the network or imports torch.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from bertscope.config import ARCHITECTURES, BertConfig
from bertscope.errors import ConfigError, SourceError, one_line, suggestion
from bertscope.presets import Source, preset_paths, read_preset, unknown_architecture
from bertscope.reading import read_mapping, readable

DEFAULT_MODEL = "bert-base-cased"
_SUFFIXES = (".yaml", ".yml", ".json")


def load(
    model: str | os.PathLike[str] = DEFAULT_MODEL,
    *,
    architecture: str | None = None,
    attention: str | None = None,
    add_pooling_layer: bool | None = None,
) -> Source:
    """The source that `model` names, with what the caller overrides.

    Raises SourceError when nothing has that name, ConfigError for a wrong value in the file.
    """
    source = _find(os.fspath(model))
    changes: dict[str, object] = {"architecture": architecture, "add_pooling_layer": add_pooling_layer}
    if attention is not None:
        changes["config"] = replace(source.config, attn_implementation=attention)
    source = replace(source, **{name: value for name, value in changes.items() if value is not None})  # type: ignore[arg-type]
    if source.architecture not in ARCHITECTURES:
        line = source.config_lines.get("architectures")
        raise unknown_architecture(source.architecture).at(f"{source.path}:{line}" if architecture is None else "")
    if add_pooling_layer is not None and source.architecture != "BertModel":
        raise ConfigError(f"only BertModel comes with and without a pooler; {source.architecture} decides by itself")
    return source


def _find(name: str) -> Source:
    presets = preset_paths()
    if name in presets:
        return read_preset(presets[name])
    with readable(one_line(name, limit=100)):
        path = Path(name).expanduser()
    if path.suffix in _SUFFIXES or _exists(path) or name.startswith((".", "~", os.sep)):
        return read_source(path)
    for preset in presets.values():
        source = read_preset(preset)
        if name in source.hub_names:
            return source
    raise SourceError(
        f"no preset or file named {name[:100]!r}; {_near(name, presets)} "
        "('bertscope presets' lists them; a .yaml preset or a config.json works too)"
    )


def _near(name: str, presets: dict[str, Path]) -> str:
    return suggestion(name.rsplit("/", 1)[-1], presets)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError, RuntimeError):  # no path at all: too long, or with a NUL, or a loop of links
        return False


def read_source(path: Path) -> Source:
    """The source in a preset file, a `config.json`, or a folder with a `config.json`."""
    with readable(path):
        is_model_folder = path.is_dir() and (path / "config.json").exists()
    absolute = Path(os.path.abspath(path))
    if is_model_folder:
        return _read_config_json(path / "config.json", absolute.name)
    if path.suffix == ".json":
        return _read_config_json(path, absolute.parent.name if path.name == "config.json" else path.stem)
    return read_preset(path)


def _read_config_json(path: Path, name: str) -> Source:
    entries = read_mapping(path)
    lines = {key: entry.line for key, entry in entries.items()}
    try:
        config = BertConfig.from_dict(entries.plain())
    except ConfigError as error:
        raise error.at(f"{path}:{lines.get(error.field, 1)}") from None
    architecture = config.architectures[0] if config.architectures else "BertModel"
    return Source(name=name, path=path, config=config, architecture=architecture, config_lines=lines)
