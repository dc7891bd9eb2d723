"""`verify`: comparison of a model with a checkpoint's header: names, shapes, dtypes, ties, buffers; no values."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from bertscope.analyses.modules.totals import subject
from bertscope.analyses.tracing.operator_costs import shape_of
from bertscope.checkpoints.reading import Checkpoint, sums
from bertscope.errors import SelectionError, SourceError, Text
from bertscope.model.lora import PeftModel
from bertscope.model.state_dict import STORED_BUFFERS, modern_name, own_name
from bertscope.reports.checkpoint import StoredTensor, VerifyReport, VerifyRow
from bertscope.reports.layer_ranges import collapse, in_order, without_numbers
from bertscope.sources.model_source import ModelSource
from bertscope.torch_access import nn, torch
from bertscope.units import PRECISIONS

ALLOWABLE = ("missing", "unexpected", "dtype")
_WRONG = ("missing", "unexpected", "shape", "dtype")
_ORDER = (*_WRONG, "duplicate", "shared", "tied", "renamed", "buffer")


def verify(
    source: ModelSource, checkpoint: Checkpoint, *, dtype: str | None = None, allow: Iterable[str] = ()
) -> VerifyReport:
    """Compare a model with a checkpoint's header: it fits if it has exactly the model's tensors, shapes and dtypes.

    `dtype` (fp32, bf16, fp16) is the expected one of floating-point tensors, by default that of the config.json, if
    any. `allow` lists the findings that are reported but not wrong: missing, unexpected, dtype.
    """
    allowed = set(allow)
    if not allowed <= set(ALLOWABLE):
        raise SelectionError(f"allow takes {', '.join(ALLOWABLE)}; got {', '.join(sorted(allowed - set(ALLOWABLE)))}")
    model = source.build()
    expected = _ModelTensors(model, PRECISIONS[dtype].torch_name if dtype else source.stored_dtype)
    findings = _folded(expected.rows(checkpoint))
    rows = [replace(row, is_wrong=False) if row.status in allowed else row for row in findings]
    wrong = {row.status for row in rows if row.is_wrong}
    return VerifyReport(
        subject=subject(model, source.name),
        stored=sums(checkpoint),
        fits=not wrong and not checkpoint.problems,
        fitting=tuple(_fitting(source, checkpoint)) if wrong & {"missing", "unexpected"} else (),
        matched_tensors=len(expected.found),
        model_tensors=len(expected.state),
        model_distinct_params=sum({id(value): value.numel() for value in expected.parameters()}.values()),
        rows=tuple(sorted(rows, key=lambda row: (not row.is_wrong, _ORDER.index(row.status)))),
    )


def _fitting(source: ModelSource, checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the classes of the same configuration whose tensors the checkpoint has."""
    for other in source.other_classes():
        expected = _ModelTensors(other.build(), None)
        if not any(row.is_wrong for row in expected.rows(checkpoint)):
            yield str(other.architecture)


class _ModelTensors:
    """The tensors of the model, and those found in the checkpoint."""

    def __init__(self, model: nn.Module, dtype: str | None) -> None:
        self.dtype = dtype
        self.found: dict[str, StoredTensor] = {}
        # Of a model with adapters only these and the saved modules are in a file.
        found = model.stored() if isinstance(model, PeftModel) else model.state_dict(keep_vars=True)
        self.state: Mapping[str, torch.Tensor] = found
        self.ties = _ties(self.state)
        self.buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
        self.prefix = str(getattr(model, "base_model_prefix", "bert"))
        self.passed_over = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters among the tensors, one for each name."""
        return (value for value in self.state.values() if isinstance(value, nn.Parameter))

    def rows(self, checkpoint: Checkpoint) -> Iterator[VerifyRow]:
        """Yield the findings, tensor by tensor."""
        own = set(self.state)
        for tensor in checkpoint.tensors:
            if "/" in tensor.name:
                raise SourceError(
                    f"{tensor.name!r} is a TensorFlow name; convert the checkpoint first", where=str(checkpoint.path)
                )
            name = own_name(modern_name(tensor.name), own, self.prefix)
            if name in own and name not in self.found:
                self.found[name] = tensor
                yield from self._compared(name, tensor)
            else:
                yield self._surplus(name, tensor)
        absent = [name for name in self.state if name not in self.found]
        for name in absent:
            other = next((twin for twin in self.ties[name] if twin in self.found), None)
            yield (
                self._row("tied", name, None, Text("it is {path}", path=other))
                if other
                else self._row("missing", name, None)
            )
        yield from self._stored_ties()

    def _compared(self, name: str, tensor: StoredTensor) -> Iterator[VerifyRow]:
        expected = self.state[name]
        if tuple(expected.shape) != tensor.shape:
            yield self._row("shape", name, tensor)
        is_floating = tensor.dtype.startswith(("float", "bfloat"))
        if is_floating != expected.is_floating_point():
            yield self._row("dtype", name, tensor, Text("{dtype} in the model", dtype=shape_of(expected).dtype))
        elif is_floating and self.dtype not in (None, tensor.dtype):
            yield self._row("dtype", name, tensor, Text("{dtype} was asked for", dtype=self.dtype))
        if name != tensor.name:
            yield self._row("renamed", name, tensor, _how(tensor.name, name, self.prefix))

    def _surplus(self, name: str, tensor: StoredTensor) -> VerifyRow:
        """Return the finding on a tensor of the file that matches no remaining tensor of the model."""
        if name in self.found:
            note = Text("{name} is stored as well, for {path}", name=self.found[name].name, path=name)
            return self._row("unexpected", tensor.name, tensor, note)
        is_buffer = name in self.buffers or tensor.name.endswith(STORED_BUFFERS)
        if is_buffer or any(re.search(pattern, tensor.name) for pattern in self.passed_over):
            return self._row("buffer", tensor.name, tensor, "a buffer that older versions stored; computed")
        return self._row("unexpected", tensor.name, tensor)

    def _stored_ties(self) -> Iterator[VerifyRow]:
        """Yield the tensors that are tied in the model or share storage in the file, but not both."""
        own_names = {tensor.name: name for name, tensor in self.found.items()}
        for name, tensor in self.found.items():
            first = next(twin for twin in self.ties[name] if twin in self.found)
            owner = own_names.get(tensor.shares or "")
            if owner is not None and owner not in self.ties[name]:
                yield self._row(
                    "shared", name, tensor, Text("one storage with {path}, two tensors of the model", path=owner)
                )
            elif name != first and owner is None:
                yield self._row(
                    "duplicate", name, tensor, Text("tied to {path}, and stored apart; values not compared", path=first)
                )

    def _row(self, status: str, name: str, tensor: StoredTensor | None, note: str = "") -> VerifyRow:
        """Return a finding on a tensor of the model, of the file, or of both."""
        expected = shape_of(self.state[name]) if status != "unexpected" and name in self.state else None
        return VerifyRow(
            status=status, name=name, stored_name=tensor.name if tensor else None, copies=1,
            shape=expected.shape if expected else None, stored_shape=tensor.shape if tensor else None,
            dtype=expected.dtype if expected else None, stored_dtype=tensor.dtype if tensor else None,
            params=tensor.params if tensor else self.state[name].numel(), is_wrong=status in _WRONG, note=note,
        )  # fmt: skip


def _ties(state: Mapping[str, torch.Tensor]) -> dict[str, list[str]]:
    """Return for each name every name of the same tensor, itself included."""
    names: dict[int, list[str]] = {}
    for name, tensor in state.items():
        names.setdefault(id(tensor), []).append(name)
    return {name: names[id(tensor)] for name, tensor in state.items()}


def _how(stored: str, name: str, prefix: str) -> str:
    parts = []
    if modern_name(stored) != stored:
        parts.append("TensorFlow's gamma and beta for weight and bias")
    if stored.startswith(f"{prefix}.") != name.startswith(f"{prefix}."):
        parts.append(f"prefix {prefix}. only in {'the file' if stored.startswith(f'{prefix}.') else 'the model'}")
    return ", ".join(parts)


def _folded(rows: Iterable[VerifyRow]) -> Iterator[VerifyRow]:
    """Merge equal rows of neighbouring layers, and renamed tensors by the kind of renaming."""
    ordered = sorted(rows, key=lambda row: in_order(row.name))
    others = (row for row in ordered if row.status != "renamed")
    for name, _, items in collapse((row.name, _likeness(row), row) for row in others):
        first = items[0]
        if name == first.name:  # of one row
            yield first
            continue
        stored_name = first.stored_name if len(items) == 1 or first.stored_name is None else name
        params = sum(item.params for item in items)
        yield replace(first, name=name, stored_name=stored_name, copies=len(items), params=params)
    renamed = [row for row in ordered if row.status == "renamed"]
    for how in dict.fromkeys(row.note for row in renamed):
        alike = [row for row in renamed if row.note == how]
        params = sum(row.params for row in alike)
        yield replace(alike[0], copies=len(alike), params=params, shape=None, stored_shape=None)


def _likeness(row: VerifyRow) -> tuple[Any, ...]:
    """Return what the rows of equal layers have in common."""
    shapes = (row.shape, row.stored_shape, row.dtype, row.stored_dtype, row.params)
    return row.status, shapes, row.is_wrong, row.note and without_numbers(row.note)
