"""Real sequence lengths in tokens: from a file (numbers, JSONL, CSV), or a normal distribution."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bertscope.errors import SelectionError, SourceError, name_of, needs_extra, suggestion
from bertscope.files import open_file, readable
from bertscope.progress import progress
from bertscope.settings.rows import MAX_SIZE
from bertscope.sources.find import cached_folder

MAX_LENGTHS = 10_000_000
_MAX_LINE_BYTES = 2**20
_NORMAL, _NORMAL_COUNT = "normal:", 10_000
_FIELDS = ("length", "text")  # taken without a name, the first that a file has
_AT_ONCE = 1000  # texts that are tokenized together
_WANTED = "give a file with one number a line, .jsonl or .csv, or normal:256,64,16,512"
_Rows = Iterator[tuple[str, Any]]  # the place of each value, and the value


def read_lengths(
    lengths: str | os.PathLike[str] | Iterable[int], *, field: str = "", tokenizer: str = ""
) -> dict[int, int]:
    """Return how many sequences have each length, the shortest first; raise SourceError for what has none.

    `lengths` are numbers, `normal:MEAN,DEVIATION,LEAST,MOST`, or a file: one number a line, or by its suffix JSONL or
    CSV, whose `field` has numbers, token ids, or texts (in JSONL also lists of texts) for a `tokenizer`.
    """
    name = lengths if isinstance(lengths, str | os.PathLike) else "lengths"
    if field and (name is not lengths or str(name).startswith(_NORMAL)):
        raise SelectionError(f"{name_of('field')} selects a field of a file; leave it out for numbers")
    values = os.fspath(lengths) if isinstance(lengths, str | os.PathLike) else lengths
    if tokenizer:  # whose library a file may crash or fill
        from bertscope.processes.child import ask

        question = [values if isinstance(values, str) else list(values), field, tokenizer]
        entry = "bertscope.sources.lengths:answer_parent"
        kind, content, _ = ask(entry, question, lambda: progress(f"counting {os.path.basename(name)}"))
        if kind != "lengths":
            raise SourceError(f"{tokenizer} cannot be read: its reader {content}; check the file")
        counts = dict(content)
    else:
        counts = _read(values, field, tokenizer)
    if not counts:
        raise SourceError(f"{name} has no lengths; {_WANTED}")
    return dict(sorted(counts.items()))


def answer_parent() -> None:
    """Be the child that reads lengths: a process with limited memory."""
    from bertscope.processes import child

    question = json.loads(sys.stdin.readline())
    send = child.sender()
    os.environ.setdefault("RAYON_NUM_THREADS", "8")  # of tokenizers: each thread takes address space
    child.limit_child()
    send("lengths", [*_read(*question).items()])


def _read(lengths: str | Iterable[Any], field: str, tokenizer: str) -> Counter[int]:
    with readable(lengths if isinstance(lengths, str) else "lengths"):
        if not isinstance(lengths, str):
            rows: _Rows = (("lengths", value) for value in lengths)
        elif lengths.startswith(_NORMAL):
            rows = ((lengths, value) for value in _normal(lengths.removeprefix(_NORMAL)))
        else:
            path = Path(lengths).expanduser()
            rows = _READERS.get(path.suffix.lower(), _lines)(path, field)
        return _counted(rows, tokenizer)


def _counted(rows: _Rows, tokenizer: str) -> Counter[int]:
    counts: Counter[int] = Counter()
    texts: list[str] = []
    count = _tokenizer(tokenizer) if tokenizer else None
    for number, (where, value) in enumerate(rows, 1):
        if number > MAX_LENGTHS:
            raise SourceError(f"there are more than {MAX_LENGTHS:,} lengths; give a sample of them")
        items = value if isinstance(value, list) else [value]
        if items is value and all(type(item) is int for item in items):
            value = len(items)
        if length := _length(value):
            counts[length] += 1
        elif count and all(isinstance(item, str) for item in items):
            texts += items
        else:
            raise SourceError(
                f"{repr(value)[:60]} is not a length, a whole number from 1 to below 2**31; of texts "
                f"{name_of('tokenizer')} counts the tokens",
                where=where,
            )
        if count and len(texts) >= _AT_ONCE:
            counts.update(count(texts))
            texts.clear()
    return counts + Counter(count(texts)) if count else counts


def _length(value: Any) -> int:  # 0 for what is none
    if isinstance(value, str):
        value = float(value) if re.fullmatch(r"\s*[0-9]{1,10}(\.0*)?\s*", value, re.ASCII) else 0
    is_whole = type(value) is int or (isinstance(value, float) and value.is_integer())
    return int(value) if is_whole and 1 <= value < MAX_SIZE else 0


def _normal(text: str) -> Iterator[int]:
    """Yield lengths at evenly spaced quantiles of a normal distribution, cut to the least and the most."""
    from statistics import NormalDist

    numbers = [float(word) if re.fullmatch(r"[0-9]{1,10}(\.[0-9]*)?", word) else -1.0 for word in text.split(",")]
    if len(numbers) != 4 or min(numbers) < 0 or not 1 <= numbers[2] <= numbers[3] < MAX_SIZE:
        raise SelectionError(
            f"normal: takes MEAN,DEVIATION,LEAST,MOST, such as normal:256,64,16,512; got {text[:60]!r}"
        )
    mean, deviation, least, most = numbers
    for number in range(_NORMAL_COUNT):
        value = NormalDist(mean, deviation or 1e-9).inv_cdf((number + 0.5) / _NORMAL_COUNT)
        yield round(min(max(value, math.ceil(least)), math.floor(most)))


def _lines(path: Path, field: str = "") -> Iterator[tuple[str, str]]:
    if field:
        raise SelectionError(f"{path} has one number a line; {name_of('field')} is for other files")
    with open_file(path, _WANTED) as file:
        for number in range(1, 2 * MAX_LENGTHS):
            raw, where = file.readline(_MAX_LINE_BYTES + 1), f"{path}:{number}"
            if len(raw) > _MAX_LINE_BYTES:
                raise SourceError(f"a line of more than 1 MiB is not a length; {_WANTED}", where=where)
            if not raw:
                return
            if text := raw.decode("utf-8-sig", errors="replace").strip():
                yield where, text


def _json(path: Path, field: str) -> _Rows:
    for where, line in _lines(path):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise SourceError(f"this is not JSON: {str(error)[:100]}", where=where) from None
        yield where, row[_field(row, field, where)] if isinstance(row, Mapping) else row


def _csv(path: Path, field: str) -> _Rows:
    reader = csv.DictReader(f"{line}\n" for _, line in _lines(path))
    name = _field(dict.fromkeys(reader.fieldnames or ()), field, f"{path}:1")
    yield from ((f"{path}:{reader.line_num}", row[name]) for row in reader)


_READERS: dict[str, Callable[[Path, str], _Rows]] = {".jsonl": _json, ".csv": _csv}


def _field(row: Mapping[str, Any], field: str, where: str) -> str:
    name = field or next((name for name in _FIELDS if name in row), next(iter(row)) if len(row) == 1 else _FIELDS[0])
    if name not in row:
        raise SourceError(
            f"no field {name[:60]!r}, which {name_of('field')} names; {suggestion(name[:60], map(str, row))}",
            where=where,
        )
    return name


def _tokenizer(name: str) -> Callable[[list[str]], Iterable[int]]:
    path = Path(name).expanduser()
    folder = path if path.exists() else cached_folder(name) or path
    file = folder / "tokenizer.json" if folder.is_dir() else folder
    if not file.is_file():
        raise SourceError(
            f"{name[:100]}: there is no tokenizer.json; give a folder with one, or a model in the Hugging Face cache"
        )
    with readable(file):
        with needs_extra(name_of("tokenizer"), "transformers"):
            from tokenizers import Tokenizer
        with open_file(file, "give a tokenizer.json") as stream:
            tokenizer = Tokenizer.from_buffer(stream.read())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda texts: [max(len(encoding.ids), 1) for encoding in tokenizer.encode_batch(texts)]
