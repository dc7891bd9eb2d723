"""YAML and JSON files, parsed into values with line numbers.

YAML scalars follow the rules of YAML 1.2. PyYAML follows 1.1, where `1e-12` is text, `no` is False,
`010` is 8 and `12:30` is 750. JSON is parsed by the standard library, one member of the top level
at a time, so that errors in both formats name `file:line`.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, lru_cache
from io import BytesIO
from json.decoder import scanstring  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any, BinaryIO, ClassVar
from zipfile import ZipFile

import yaml

from bertscope.errors import BertscopeError, ConfigError, SelectionError, SourceError, suggestion
from bertscope.frozen import Record

PRESETS = Path(__file__).parent / "presets.zip"  # of an installed wheel, which is smaller so; a checkout has files
MAX_JSON_BYTES = 1 << 20  # the largest published BERT config.json is a few KiB
MAX_YAML_BYTES = 1 << 17  # a preset has 1.5 KiB, and PyYAML takes 10 s for a MiB
MAX_FIELDS = 1000  # a config.json has about 70
MAX_LEVELS = 64  # a config.json has three; reading and writing recurse once for each level


def refuse_outside(root: Path, name: str, value: Any) -> None:
    """Raise SelectionError for a path outside a folder in a value, such as `distil:../x`, whether it exists or not.

    A text with blanks is a path only if it exists.
    """
    for text in [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, str)]:
        for part in [text, *re.split("[:,=]", re.sub("^https?://", "", text))]:
            forms = [Path(form.replace("\0", "")) for form in (part, part.strip())]  # ./~ is ~, which readers expand
            paths = [Path(os.path.realpath(path)) for form in forms for path in (form, os.path.expanduser(form))]
            outside = [path for path in paths if not path.is_relative_to(root.resolve())]
            if any(os.path.exists(path) or len(part.split()) == 1 for path in outside):
                raise SelectionError(f"{name} {part[:100]!r} is outside {root}, in which 'bertscope mcp' was started")


class Entry(Record, kw_only=False):
    """One value of a mapping and the place of its key; `value` is a scalar, a list or a Mapping."""

    value: Any
    path: Path
    line: int

    @property
    def where(self) -> str:
        """Return `file:line`."""
        return f"{self.path}:{self.line}"

    def error(self, message: str, field: str = "") -> ConfigError:
        """Return the error for this value."""
        return ConfigError(message, where=self.where, field=field)

    def mapping(self, name: str, known: Collection[str] = ()) -> Mapping:
        """Return the value if it is a mapping; raise ConfigError if not, or for a key that is not in `known`."""
        if not isinstance(self.value, Mapping):
            raise self.error(f"{name} must hold 'key: value' lines", name)
        self.value.refuse_unknown(known, name)
        return self.value


class Mapping(dict[str, Entry]):
    """Keys to entries."""

    def plain(self) -> dict[str, Any]:
        """Return the same values without their places."""
        return {key: _plain(entry.value) for key, entry in self.items()}

    def lines(self) -> dict[str, int]:
        """Return each key's line."""
        return {key: entry.line for key, entry in self.items()}

    def refuse_unknown(self, known: Collection[str], name: str) -> None:
        """Raise ConfigError for a key that is not in `known`, unless `known` is empty."""
        for key, entry in self.items():
            if known and key not in known:
                raise entry.error(f"unknown key {key!r} in {name}; {suggestion(key, known)}", key)

    def checked(self, key: str, default: Any, accepts: type | Callable[[Any], bool], rule: str) -> Any:
        """Return the value of a key, or the default; raise ConfigError unless a type or a test accepts it."""
        if key not in self:
            return default
        value = self[key].value
        if not (isinstance(value, accepts) if isinstance(accepts, type) else accepts(value)):
            raise self[key].error(f"{key} must be {rule}", key)
        return value


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return value.plain()
    return [_plain(item) for item in value] if isinstance(value, list) else value


def with_places(value: dict[str, Any], entry: Entry) -> Mapping:
    """Return an object inside a JSON member; all its entries get the place of that member."""
    return Mapping(
        (key, replace(entry, value=with_places(item, entry) if isinstance(item, dict) else item))
        for key, item in value.items()
    )


def read_mapping(path: Path) -> Mapping:
    """Return the mapping in a YAML or JSON file (by its ending); raises SourceError with file and line."""
    with readable(path):
        text = read_text(path)
        if not text.strip():
            raise SourceError("the file is empty; write 'key: value' lines, or name another file", where=f"{path}:1")
        entries = read_json(text, path) if path.suffix == ".json" else read_yaml(text, path)
        for entry in entries.values():
            if not _is_shallow(entry.value, MAX_LEVELS - 1):
                raise SourceError(f"nested more than {MAX_LEVELS} levels deep; write fewer levels", where=entry.where)
        return entries


def _is_shallow(value: Any, levels: int) -> bool:
    if isinstance(value, Mapping):
        value = {key: entry.value for key, entry in value.items()}
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return all(levels > 0 and _is_shallow(item, levels - 1) for item in items)


@contextmanager
def readable(path: object, wanted: str = "") -> Iterator[None]:
    """Convert any exception of the operating system or a library while it reads a path into a SourceError.

    All code that opens or parses a file runs inside this context, since no complete list of such exceptions exists
    (LZMAError, BadZipFile, EOFError, MemoryError, struct.error ...).
    """
    try:
        yield
    except BertscopeError:
        raise
    except OSError as error:
        advice = "check the path and its permissions"
        if isinstance(error, FileNotFoundError):
            advice = "; ".join(filter(None, ["check the path", wanted]))
        raise SourceError(f"{path} cannot be read: {error.strerror or error}; {advice}") from error
    except ImportError as error:  # of a package that only this kind of file needs
        name = (error.name or "").partition(".")[0] or "a package"
        raise SourceError(f"{path} needs {name}, which cannot be imported: pip install --upgrade {name}") from error
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}".removesuffix(": ")
        raise SourceError(f"{path} cannot be read: {reason}; check the path, and that the file is complete") from error


@cache
def packed_presets() -> ZipFile:
    """Return the archive of the presets; in memory, since processes that fork share the position in a file."""
    return ZipFile(BytesIO(PRESETS.read_bytes()))


def open_file(path: str | Path, wanted: str, flags: int = 0) -> BinaryIO:
    """Open a regular file for reading, as every reader of a user's file does; `wanted` ends the error for any other.

    A folder, a pipe and a device are refused: opening a device may change it, and none need have an end. A file of
    /proc, some of which have no end either, has no size, and reads as empty.
    """

    def opener(name: str, mode: int) -> int:
        if not stat.S_ISREG(os.stat(name).st_mode):
            kind = "a folder" if os.path.isdir(name) else "not a regular file"
            raise SourceError(f"{path} is {kind}; {wanted}")
        return os.open(name, mode | flags | getattr(os, "O_NONBLOCK", 0))

    with readable(path, wanted):
        if Path(path).parent == PRESETS:
            return BytesIO(packed_presets().read(Path(path).name))
        file = open(path, "rb", opener=opener)  # noqa: SIM115  # the caller closes it
        if os.fstat(file.fileno()).st_size:  # a pipe that took the file's place since then has none either
            return file
        file.close()
        return BytesIO()


def digest(path: Path) -> str:
    """Return the SHA-256 of a regular file; empty if there is none."""
    if not path.is_file():
        return ""
    with open_file(path, "name a file") as file:
        return hashlib.sha256(file.read()).hexdigest()


_BINARY = {  # the first bytes -> what a file is
    b"\x1f\x8b": "compressed with gzip", b"BZh": "compressed with bzip2", b"\xfd7zXZ": "compressed with xz",
    b"(\xb5/\xfd": "compressed with zstd", b"\x80": "a pickle that torch.save did not write",
}  # fmt: skip


def read_text(path: Path, wanted: str = "name a .yaml or .json file") -> str:
    """Return the text of a regular UTF-8 file of at most 1 MiB (JSON) or 128 KiB (YAML)."""
    most = MAX_JSON_BYTES if path.suffix == ".json" else MAX_YAML_BYTES
    with readable(path), open_file(path, wanted) as file:
        raw = file.read(most + 1)
    if kind := next((kind for start, kind in _BINARY.items() if raw.startswith(start)), ""):
        raise SourceError(f"{path} is {kind}; {wanted}")
    if len(raw) > most:
        raise SourceError(f"{path} is larger than {most >> 10} KiB, the most that is read of such a file; {wanted}")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise SourceError(
            "not UTF-8 text, which a .yaml or .json file is; save it so, or name another", where=f"{path}:{line}"
        ) from None


# ---- YAML ---------------------------------------------------------------------------------------

_PRESET_FORM = "write lines of 'key: value', as in a preset"
_TAG = "tag:yaml.org,2002:"
_INT = re.compile(r"[-+]?[0-9][0-9_]*")
_FLOAT = re.compile(
    r"[-+]?(?:[0-9][0-9_]*)?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?[0-9][0-9_]*\.?(?:[eE][-+]?[0-9]+)|[-+]?[0-9]+\.|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
_SCALARS = (
    ("null", re.compile(r"~|null|Null|NULL|")),
    ("bool", re.compile(r"true|True|TRUE|false|False|FALSE")),
    ("int", _INT),
    ("float", _FLOAT),
)


class _Loader(yaml.SafeLoader):
    """PyYAML's parser without its resolvers: this module resolves the tags and refuses aliases."""

    yaml_implicit_resolvers: ClassVar[dict[str, list[Any]]] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Compose a node as PyYAML does; raise for an alias."""
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(problem="aliases (*name) are refused; write the value out", problem_mark=mark)
        return super().compose_node(parent, index)


@lru_cache(maxsize=32)  # to parse a preset takes 3 ms, and a sweep reads one for each point
def root_node(text: str) -> yaml.Node | None:
    """Return the node of a YAML document, which nothing changes; None for an empty one."""
    loader = _Loader(text)
    try:
        return loader.get_single_node()
    finally:
        loader.dispose()


def read_yaml(text: str, path: Path, *, form: str = _PRESET_FORM) -> Mapping:
    """Return the top-level mapping of a YAML document; `form` tells in an error what it contains."""
    try:
        root = root_node(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise SourceError(f"not valid YAML: {error.problem or error.context}; {form}", where=f"{path}:{line}") from None
    except yaml.YAMLError as error:
        line = text[: getattr(error, "position", 0)].count("\n") + 1
        reason = getattr(error, "reason", None) or "unreadable"
        raise SourceError(f"not valid YAML: {reason}; {form}", where=f"{path}:{line}") from None
    except RecursionError:
        raise SourceError("nested too deeply; write fewer levels", where=f"{path}:1") from None
    if not isinstance(root, yaml.MappingNode):
        kind = "nothing" if root is None else f"a {root.id}"
        raise SourceError(f"the file holds {kind}, and 'key: value' lines are needed", where=f"{path}:1")
    entries: Mapping = _value(root, path)
    return entries


def _mapping(node: yaml.MappingNode, path: Path) -> Mapping:
    entries = Mapping()
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != f"{_TAG}str":
            raise SourceError("a key must be one plain word", where=f"{path}:{line}")
        key = key_node.value
        if key in entries:
            raise SourceError(f"{key!r} is set twice (line {entries[key].line}); keep one", where=f"{path}:{line}")
        entries[key] = Entry(_value(value_node, path), path, line)
    return entries


def _value(node: yaml.Node, path: Path) -> Any:
    text, where = node.value, f"{path}:{node.start_mark.line + 1}"
    tag = node.tag.removeprefix(_TAG)
    if isinstance(node, yaml.MappingNode) and tag == "map":
        return _mapping(node, path)
    if isinstance(node, yaml.SequenceNode) and tag == "seq":
        return [_value(item, path) for item in node.value]
    if tag == "str" and node.style is None and node.tag.startswith(_TAG):
        tag = next((name for name, pattern in _SCALARS if pattern.fullmatch(text)), "str")
    elif not isinstance(node, yaml.ScalarNode) or node.style is None or tag != "str":
        raise SourceError(f"the tag {node.tag!r} is not allowed; write the plain value", where=where)
    if tag == "null":
        return None
    if tag == "bool":
        return text.lower() == "true"
    if tag == "str":
        return text
    if len(text) > 40:
        raise SourceError(f"a number of {len(text)} characters is unreasonable; shorten it", where=where)
    digits = text.replace("_", "").lower()
    return int(digits) if tag == "int" else float(digits.replace(".inf", "inf").replace(".nan", "nan"))


# ---- JSON ---------------------------------------------------------------------------------------

_JSON_FORM = 'the file is to be one object of "key": value members'
_SPACE = re.compile(r"[ \t\n\r]*")


def read_json(text: str, path: Path) -> Mapping:
    """Return the top-level object of a JSON document."""
    try:
        return _json_members(text, path)
    except json.JSONDecodeError as error:
        raise SourceError(f"not valid JSON: {error.msg}; {_JSON_FORM}", where=f"{path}:{error.lineno}") from None
    except RecursionError:
        raise SourceError("nested too deeply; write fewer levels", where=f"{path}:1") from None
    except ValueError as error:  # an integer of more than 4,300 digits
        raise SourceError(f"not valid JSON: {error}", where=f"{path}:1") from None


def _json_members(text: str, path: Path) -> Mapping:
    decoder, members, position, counted, line = json.JSONDecoder(), Mapping(), 0, 0, 1

    def take(wanted: str, message: str) -> str:
        """Go behind the next character but spaces, and return it; raise unless it is one of `wanted`."""
        nonlocal position
        position = _SPACE.match(text, position).end()  # type: ignore[union-attr]  # it matches no space too
        character = text[position : position + 1]
        if not character or character not in wanted:
            raise json.JSONDecodeError(message, text, position)
        position += 1
        return character

    take("{", "an object '{...}' was expected")
    mark = take('"}', "a key in double quotes was expected")
    while mark == '"':
        line += text.count("\n", counted, position)
        counted = position
        if len(members) >= MAX_FIELDS:
            raise SourceError(f"more than {MAX_FIELDS:,} fields, the most that are read", where=f"{path}:{line}")
        key, position = scanstring(text, position, True)
        take(":", "':' was expected")
        value, position = decoder.raw_decode(text, _SPACE.match(text, position).end())  # type: ignore[union-attr]
        if key in members:
            raise SourceError(f"{key!r} is set twice (line {members[key].line}); keep one", where=f"{path}:{line}")
        members[key] = Entry(value, path, line)
        mark = take(",}", "',' or '}' was expected")
        if mark == "," and (mark := take('"}', "a key in double quotes was expected")) == "}":
            raise json.JSONDecodeError("a comma before the closing '}'", text, position - 1)
    if text[position:].strip(" \t\n\r"):
        raise json.JSONDecodeError("text after the closing '}'", text, _SPACE.match(text, position).end())  # type: ignore[union-attr]
    return members


# ---- writing ----


def check_writable(path: Path) -> Path | None:
    """Return the file that a path means, None for a device; raises SourceError if it cannot be written."""
    with _explained(path):
        if _is_device(path):
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return None
        import tempfile  # 4 ms, for those who name a file

        with tempfile.TemporaryFile(dir=path.resolve().parent) as file:
            file.write(b"\0")  # on a full disk the file can be created and the byte cannot be written
        return path.resolve()


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file atomically; raises SourceError if it cannot be written.

    A device or a pipe, such as /dev/stdout, is written to directly.
    """
    if isinstance(content, str):  # file names and JSON keys may contain lone surrogates
        content = content.encode("utf-8", errors="backslashreplace")
    from bertscope.processes.signals import uninterrupted

    with _explained(path):
        if _is_device(path):
            path.write_bytes(content)
        else:
            with uninterrupted():
                _replace(path, content)


def _is_device(path: Path) -> bool:
    """Return True for a device or pipe, False for a file, existing or not; raises SourceError for a folder."""
    if path.is_dir():
        raise SourceError(f"{path} is a folder; name a file to write")
    return path.exists() and not path.is_file()


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Raise SourceError instead of the system's error about writing this file."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SourceError(f"{path} cannot be written: {reason}; name a file in a folder that exists") from None


def _replace(path: Path, content: bytes) -> None:
    import tempfile

    target = path.resolve()
    if target.is_symlink():  # a loop of links, which resolve() leaves as it is since Python 3.13
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    umask = os.umask(0)
    os.umask(umask)
    mode = target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~umask
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=".bertscope-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, mode)
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
