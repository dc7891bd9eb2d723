"""The base of all reports: frozen, keyword-only dataclasses of plain data in base units, without text for display.

Every report becomes JSON by `to_json`, with `schema` and `kind` in front; `from_json` reads it back. `Report` has the
methods for Python users; what shows a report is set from outside.
"""

from __future__ import annotations

import dataclasses
import functools
import io
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from bertscope.errors import RowError, needs_extra, suggestion, typed_arguments
from bertscope.frozen import Record
from bertscope.reports.layer_ranges import expand
from bertscope.units import json_text

if TYPE_CHECKING:
    from pandas import DataFrame

SCHEMA = 6  # up to 5 what is saved for backward was `kept`, up to 4 a row had the numbers of its `cost` itself
UNVERIFIED = "not_verified"  # the key of a note on a kernel whose rule no test holds against its package
UNCOUNTED = "cpu_scratch_not_counted"  # the key of a note; its `kernels` are such as "convolutions and LSTMs"
PYTHON_ONLY = "python_only"  # the key of a note; its `names` are objects of the program that no command can name
FAILED = "failed"  # the outcome of a point that could not be computed
Shape = tuple[int, ...] | None  # None: not yet known (a lazy parameter)
Row = TypeVar("Row")


class Subject(Record):
    """The model of a report, and the versions and settings that produced the report."""

    name: str
    architecture: str
    dtype: str  # of the bytes: "fp32", "bf16", "fp16", or "stored" for the dtypes of the parameters
    has_head: bool = True  # a model of transformers or a BERT without one has no loss: backward begins at its output
    attention: str | None = None
    implementation: str | None = None  # whose: "bertscope's own", "as in transformers 4.43.4", "transformers 4.56.0"
    lora: str | None = None  # the settings of LoRA adapters, or peft's type of others, if the model has some
    config: dict[str, Any] | None = None
    ignored_fields: tuple[str, ...] = ()
    torch_version: str
    bertscope_version: str
    obtained: str = "computed"  # computed, estimated or measured

    @property
    def adapters(self) -> str:
        """Return the adapters in words, such as `LoRA r=8,alpha=16` or `IA3`; an empty text without any."""
        return f"LoRA {self.lora}" if self.lora and "=" in self.lora else self.lora or ""


def reads_words(config: Mapping[str, Any]) -> bool:
    """Return True if a configuration, or one inside it, has a vocabulary; images have no sequence length."""
    parts = (part for part in config.values() if isinstance(part, Mapping))
    return "vocab_size" in config or any(map(reads_words, parts))


class Note(Record):
    """A sentence about a report, by its key in the catalogue of texts, and its values in base units."""

    key: str
    values: dict[str, Any] = field(default_factory=dict)


class TensorShape(Record):
    """The shape and dtype of one input or output of a module."""

    shape: tuple[int, ...]
    dtype: str


class Tie(Record):
    """One tensor under two names."""

    path: str
    is_path: str
    params: int


class Totals(Record):
    """The sums under each convention.

    distinct_params are the unique parameters: every tensor once, as in `sum(p.numel() for p in model.parameters())`.
    layer_params is the sum over layers: a tied tensor counts once in each layer that uses it; a container counts
    only the tensors that no layer below it has. Bytes count every tensor once.
    """

    distinct_params: int
    layer_params: int
    trainable_params: int
    frozen_params: int
    trainable_layer_params: int
    frozen_layer_params: int
    buffer_params: int
    buffer_bytes: int
    param_bytes: int
    fp32_bytes: int
    bf16_bytes: int
    unknown_tensors: int


@typed_arguments
def to_json(report: Report) -> str:
    """Return the report as JSON text, with `schema` and `kind` in front; `from_json` reads it back.

    >>> print(bertscope.to_json(bertscope.count("bert-tiny")))
    {
      "schema": 6,
      "kind": "count",...
    """
    return json_text(report.to_dict())


def as_data(value: Any) -> Any:
    """Return what dataclasses.asdict returns, without copies of what never changes; that takes three times as long."""
    kind: Any = type(value)
    if kind in _PLAIN:
        return value
    if kind is dict:
        return {key: as_data(item) for key, item in value.items()}
    if names := _field_names(kind):
        return {name: as_data(getattr(value, name)) for name in names}
    return kind(map(as_data, value)) if kind in (tuple, list) else value


_PLAIN = frozenset({int, str, float, bool, type(None)})


@functools.cache
def _field_names(kind: Hashable) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else ()


_display: list[Callable[..., str]] = []  # the package sets it, since reports know nothing of views


def set_display(display: Callable[..., str]) -> None:
    """Set the function that shows a report in a form, such as `printed`, with options of its view."""
    _display[:] = [display]


class Report(Record):
    """A result: `print` shows it as the command does, a notebook as HTML, and `to_...` convert it."""

    kind: ClassVar[str]  # in the header of each class
    rows_in: ClassVar[str] = "rows"  # the field with the rows

    def __init_subclass__(cls, *, kind: str = "", rows_in: str = "", **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if kind:
            cls.kind, cls.rows_in = kind, rows_in or cls.rows_in

    def __str__(self) -> str:
        return self.shown("printed")

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.shown("notebook")

    def shown(self, form: str, **options: Any) -> str:
        """Return the report in a form of its view, such as `printed` or `markdown`, with options of the view.

        >>> bertscope.explain("bert-tiny", "pooler").shown("printed", lang="zh").isascii()
        False
        """
        return _display[0](self, form, **options)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, with `schema` and `kind` in front."""
        return {"schema": SCHEMA, "kind": self.kind, **as_data(self)}

    def to_json(self) -> str:
        """Return the report as JSON text; `bertscope.from_json` reads it back."""
        return to_json(self)

    def to_markdown(self) -> str:
        """Return the report for a page or a pull request, as `--format markdown` prints it."""
        return self.shown("markdown")


class TableReport(Report, Generic[Row]):
    """A report of rows, which are found by path or name: `report["encoder"]`."""

    def __iter__(self) -> Iterator[Row]:
        return iter(getattr(self, self.rows_in))

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and bool(self._found(key))

    def __getitem__(self, key: str) -> Row:
        """Return the row of this path ("" for the model), end of a path, or name.

        One of several equal layers, such as `encoder.layer.3`, has their common row. Raises RowError, a KeyError, for
        a key that no row or several rows have.
        """
        matches = self._found(key) if isinstance(key, str) else []
        if len(matches) == 1:
            return matches[0]
        if matches:
            names = ", ".join(_names(row)[0] for row in matches)
            raise RowError(f"{len(matches)} rows are named {key!r}; give the path of one: {names}")
        known = dict.fromkeys(name for row in self._all() for name in _names(row))
        raise RowError(f"no row {str(key)[:100]!r}; {suggestion(str(key), filter(None, known))}")

    def _all(self) -> Iterator[Row]:
        for row in self:
            yield row
            yield from getattr(row, "parts", ())

    def _found(self, key: str) -> list[Row]:
        """Return this path's rows; if there are none, those with this end of a path; or else of this name."""
        rows = [(row, [path, *expand(path)]) for row in self._all() if (path := getattr(row, "path", None)) is not None]
        return (
            [row for row, paths in rows if key in paths]
            or [row for row, paths in rows if any(path.endswith(f".{key}") for path in paths)]
            or [row for row in self._all() if key in _names(row)]
        )

    def to_csv(self) -> str:
        """Return the rows for a spreadsheet, as `--format csv` prints them."""
        return self.shown("csv")

    def to_pandas(self) -> DataFrame:
        """Return the rows as a DataFrame with the columns of `to_csv`; raises MissingExtraError without pandas."""
        with needs_extra("to_pandas", "pandas", otherwise="; to_csv and to_dict need nothing"):
            import pandas
        return pandas.read_csv(io.StringIO(self.to_csv()))


# The fields that name a row, in reports whose rows are no modules too.
_ROW_NAMES = ("path", "name", "checkpointing", "key", "tf_name", "label")


def _names(row: Any) -> list[str]:
    return [name for field in _ROW_NAMES if isinstance(name := getattr(row, field, None), str) and name]
