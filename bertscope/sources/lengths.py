"""The lengths of real sequences in tokens: of a file (numbers, JSONL, CSV, Parquet), or of a normal distribution."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from bertscope.errors import SelectionError, SourceError, suggestion
from bertscope.settings.rows import MAX_SIZE
from bertscope.sources.find import cached_folder
from bertscope.text_files import readable

MAX_LENGTHS = 10_000_000  # read in about 10 s
MAX_LINE_BYTES = 2**20
NORMAL = "normal:"
_NORMAL_COUNT = 10_000
_FIELDS = ("length", "lengths", "text")  # taken without a name, the first that a file has
_AT_ONCE = 1000  # texts that are tokenized together
_LEAST_PYARROW = 15  # versions before 14.0.1 unpickle what a file names (CVE-2023-47248)


def read_lengths(
    given: str | os.PathLike[str] | Iterable[int], *, field: str = "", tokenizer: str = ""
) -> dict[int, int]:
    """Return the number of sequences of each length, the shortest first.

    `given` are the numbers, `normal:MEAN,DEVIATION,LEAST,MOST`, or a file: one number a line, or by its suffix JSONL,
    CSV or Parquet, whose `field` has numbers, lists of token ids, or texts, which need a `tokenizer`. Raises
    SourceError for what has no lengths.
    """
    name = given if isinstance(given, str | os.PathLike) else "lengths"
    if not isinstance(given, str | os.PathLike):
        rows: Iterator[tuple[str, Any]] = (("lengths", value) for value in given)
    elif isinstance(given, str) and given.startswith(NORMAL):
        rows = ((given, value) for value in _normal(given.removeprefix(NORMAL)))
    else:
        path = Path(given).expanduser()
        with readable(path):
            if not path.is_file():
                what = "is a folder" if path.is_dir() else "is no regular file" if path.exists() else "does not exist"
                raise SourceError(f"{{path}} {what}; {_WANTED}", path=path)
        rows = _READERS.get(path.suffix.lower(), _plain)(path, field)
    with readable(name):
        found = _counted(rows, tokenizer)
    if not found:
        raise SourceError(f"{{path}} has no lengths; {_WANTED}", path=name)
    return dict(sorted(found.items()))


_WANTED = "give a file with one number a line, .jsonl, .csv or .parquet, or normal:256,64,16,512"


def _counted(rows: Iterator[tuple[str, Any]], tokenizer: str) -> Counter[int]:
    """Return the number of values of each length; texts are tokenized."""
    found: Counter[int] = Counter()
    texts: list[str] = []
    count: Callable[[list[str]], Iterable[int]] | None = None
    for number, (where, value) in enumerate(rows, 1):
        if number > MAX_LENGTHS:
            raise SourceError("there are more than {most:,} lengths; give a sample of them", most=MAX_LENGTHS)
        if (length := _length(value)) is not None:
            found[length] += 1
            continue
        own = [value] if isinstance(value, str) else value
        if not isinstance(own, list) or not own or any(type(item) is not type(own[0]) for item in own):
            raise SourceError("{value} is no length; a length is a whole number from 1 to below 2**31, or a list of "
                              "token ids", value=repr(value)[:60], where=where)  # fmt: skip
        if isinstance(own[0], int):
            found[len(own)] += 1
        elif isinstance(own[0], str) and tokenizer:
            count = count or _tokenizer(tokenizer)
            texts += own
        else:
            raise SourceError("{value} is no length from 1 to below 2**31; for texts give --tokenizer, a folder with "
                              "tokenizer.json", value=repr(value)[:60], where=where)  # fmt: skip
        if count and len(texts) >= _AT_ONCE:
            found.update(count(texts))
            texts = []
    if count:
        found.update(count(texts))
    return found


def _length(value: Any) -> int | None:
    """Return the length that a number or its text is; None for anything else."""
    if isinstance(value, str):
        return _of_text(value) if len(value) < 20 else None
    is_whole = type(value) is int or (isinstance(value, float) and value.is_integer())
    return int(value) if is_whole and 1 <= value < MAX_SIZE else None


@lru_cache(2**16)
def _of_text(text: str) -> int | None:
    return _length(int(text.partition(".")[0])) if re.fullmatch(r"\s*\d+(\.0+)?\s*", text, re.ASCII) else None


def _normal(text: str) -> list[int]:
    """Return lengths at evenly spaced quantiles of a normal distribution, cut to the least and the most."""
    from statistics import NormalDist

    try:
        mean, deviation, least, most = map(float, text.split(","))
    except ValueError:
        mean = math.nan
    if not (math.isfinite(mean) and 0 <= deviation < MAX_SIZE and 1 <= least <= most < MAX_SIZE):
        raise SelectionError("normal: takes MEAN,DEVIATION,LEAST,MOST, such as normal:256,64,16,512; got {given!r}",
                             given=text[:60])  # fmt: skip
    quantiles = ((number + 0.5) / _NORMAL_COUNT for number in range(_NORMAL_COUNT))
    values = (NormalDist(mean, deviation or 1e-9).inv_cdf(share) for share in quantiles)
    return [round(min(max(value, math.ceil(least)), math.floor(most))) for value in values]


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield each line that is not empty with its place; raise SourceError for one that is too long."""
    with path.open("rb") as file:
        for number in range(1, 2 * MAX_LENGTHS):
            raw = file.readline(MAX_LINE_BYTES + 1)
            where = f"{path}:{number}"
            if len(raw) > MAX_LINE_BYTES or (number == 1 and b"\0" in raw):
                raise SourceError(f"this is no line of text of at most 1 MiB; {_WANTED}", where=where)
            if not raw:
                return
            if text := raw.decode("utf-8-sig" if number == 1 else "utf-8", errors="replace").strip("\r\n "):
                yield where, text


def _plain(path: Path, field: str) -> Iterator[tuple[str, Any]]:
    if field:
        raise SelectionError("{path} has one number a line; --lengths-field is for other files", path=path)
    yield from _lines(path)


def _json(path: Path, field: str) -> Iterator[tuple[str, Any]]:
    for where, line in _lines(path):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise SourceError("this is no JSON: {reason}", reason=str(error)[:100], where=where) from None
        yield where, row[_field(row, field, where)] if isinstance(row, Mapping) else row


def _csv(path: Path, field: str) -> Iterator[tuple[str, Any]]:
    lines = _lines(path)
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    reader = csv.DictReader((f"{line}\n" for _, line in lines), delimiter=delimiter)
    name = _field(dict.fromkeys(reader.fieldnames or ()), field, f"{path}:1")
    yield from ((f"{path}:{reader.line_num}", row[name]) for row in reader)


def _parquet(path: Path, field: str) -> Iterator[tuple[str, Any]]:
    try:
        from pyarrow import __version__ as version
        from pyarrow.parquet import ParquetFile
    except ImportError:
        version = "0"
    if int(version.partition(".")[0]) < _LEAST_PYARROW:
        raise SourceError("{path}: Parquet needs pyarrow {version} or newer ('pip install pyarrow'); or write the "
                          "lengths to a .csv", path=path, version=_LEAST_PYARROW)  # fmt: skip
    with path.open("rb") as file:
        table = ParquetFile(io.BufferedReader(file))
        name = _field(dict.fromkeys(table.schema_arrow.names), field, str(path))
        for batch in table.iter_batches(columns=[name]):
            yield from ((str(path), value) for value in batch.column(0).to_pylist())


_READERS = {".jsonl": _json, ".ndjson": _json, ".csv": _csv, ".tsv": _csv, ".parquet": _parquet}


def _field(row: Mapping[str, Any], field: str, where: str) -> str:
    """Return the name of the field with the lengths; raises SourceError if a row does not have it."""
    name = field or next((name for name in _FIELDS if name in row), next(iter(row)) if len(row) == 1 else "")
    if name not in row:
        hint = suggestion(name[:60], map(str, row)) if name else "give --lengths-field"
        raise SourceError("no field {name!r}; {words}", name=(name or _FIELDS[0])[:60], words=hint, where=where)
    return name


def _tokenizer(name: str) -> Callable[[list[str]], Iterable[int]]:
    """Return the function from texts to their lengths; a tokenizer.json is data, and no code of a model is run."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise SourceError("--tokenizer needs the package tokenizers; run 'pip install tokenizers'") from None
    path = Path(name).expanduser()
    with readable(one := name[:100]):
        folder = path if path.exists() else cached_folder(name) or path
        file = folder / "tokenizer.json" if folder.is_dir() else folder
        if not file.is_file():
            raise SourceError("{name}: there is no tokenizer.json; give a folder with one, or a model in the Hugging "
                              "Face cache", name=one)  # fmt: skip
        tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda texts: [max(len(found.ids), 1) for found in tokenizer.encode_batch(texts)]
