"""Comparison of a model with a checkpoint's header: names, shapes, dtypes, ties, buffers; no values."""

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from bertscope.checkpoints.gguf import name_in_torch
from bertscope.checkpoints.reading import Checkpoint, read_checkpoint, sums
from bertscope.errors import Reason, SelectionError, SourceError, name_of, typed_arguments
from bertscope.model.bert import STORED_BUFFERS, modern_name, own_name
from bertscope.model.lora import PeftModel
from bertscope.reports.checkpoint import StoredTensor, VerifyReport, VerifyRow
from bertscope.reports.layer_ranges import collapse, in_order, without_numbers
from bertscope.sources.find import Model, source_of, weights_path
from bertscope.torch_access import nn, torch
from bertscope.tracing.log import shape_of
from bertscope.tracing.module_tree import subject
from bertscope.units import PRECISIONS

ALLOWABLE = ("missing", "unexpected", "dtype")
AUTO = "auto"  # of the prefix that is left out
_WRONG = ("prefix", "missing", "unexpected", "shape", "dtype")
_ORDER = (*_WRONG, "duplicate", "shared", "tied", "renamed", "buffer")
_PARTS = 4  # of a name that may be in front of a model's: `module._orig_mod.model.`
_Named = Sequence[tuple[str, StoredTensor]]  # the name that a tensor may have in a model, and the tensor of the file


@typed_arguments
def verify(
    model: Model,
    checkpoint: Checkpoint | str | os.PathLike[str] | None = None,
    *,
    dtype: str | None = None,
    allow: Iterable[str] = (),
    strip_prefix: str | None = None,
    name: str | None = None,
) -> VerifyReport:
    """Compare a model with a checkpoint's header: it fits if it has exactly the model's tensors, shapes and dtypes.

    `checkpoint` is a file, an index, a folder with one, or a model in the Hugging Face cache; by default the one at the
    model's path. `dtype` (fp32, bf16, fp16) is expected for floating-point tensors, by default the one in the
    config.json, if any. `allow` lists the findings that are reported but not wrong: missing, unexpected, dtype.
    `strip_prefix` is left out of the file's names; "auto" finds one such as `module.`.

    >>> bertscope.verify("my-bert").fits  # a folder with config.json and model.safetensors
    True
    >>> bertscope.verify(bertscope.load("bert-tiny", architecture="BertForMaskedLM"), "my-bert").fits
    False
    """
    if checkpoint is None:
        if not isinstance(model, (str, os.PathLike)):
            raise SelectionError("name the checkpoint: verify(model, 'model.safetensors')")
        checkpoint = model
    if isinstance(checkpoint, (str, os.PathLike)):
        checkpoint = read_checkpoint(weights_path(os.fspath(checkpoint)))
    source = source_of(model, name=name)
    allowed = set(allow)
    if not allowed <= set(ALLOWABLE):
        raise SelectionError(f"allow takes {', '.join(ALLOWABLE)}; got {', '.join(sorted(allowed - set(ALLOWABLE)))}")
    built = source.build()
    expected = _ModelTensors(built, PRECISIONS[dtype].torch_name if dtype else source.stored_dtype)
    named = _named(checkpoint)
    prefix = _wrapper(named, expected) if strip_prefix in (None, AUTO) else strip_prefix or ""
    count = sum(name.startswith(prefix) for name, _ in named) if prefix else 0
    if prefix and not count:
        raise SelectionError(f"no name in the file begins with {prefix[:60]!r}; the first is {named[0][0][:60]!r}")
    named = [
        (name.removeprefix(prefix), replace(tensor, name=tensor.name.removeprefix(prefix),
                                            shares=tensor.shares and tensor.shares.removeprefix(prefix)))
        for name, tensor in named
    ]  # fmt: skip
    findings = [*_folded(expected.rows(named))]
    if prefix and strip_prefix is None:
        findings.append(VerifyRow(
            status="prefix", name=prefix, stored_name=prefix, copies=count, shape=None, stored_shape=None, dtype=None,
            stored_dtype=None, params=0, is_wrong=True,
            note=Reason(f"compared without it; {name_of('strip_prefix')} {prefix} (or auto) leaves it out"),
        ))  # fmt: skip
    rows = [replace(row, is_wrong=False) if row.status in allowed else row for row in findings]
    wrong = {row.status for row in rows if row.is_wrong}
    # The classes of the same configuration whose tensors the checkpoint has.
    alternatives = source.other_classes() if wrong & {"missing", "unexpected"} else ()
    fitting = [
        str(other.architecture)
        for other in alternatives
        if not any(row.is_wrong for row in _ModelTensors(other.build(), None).rows(named))
    ]
    return VerifyReport(
        subject=subject(built, source.name),
        stored=sums(checkpoint),
        fits=not wrong and not checkpoint.problems,
        fitting=tuple(fitting),
        new_modules=tuple(_new_modules(expected, findings)),
        matched_tensors=len(expected.found),
        model_tensors=len(expected.state),
        model_distinct_params=sum(
            {id(value): value.numel() for value in expected.state.values() if isinstance(value, nn.Parameter)}.values()
        ),
        rows=tuple(sorted(rows, key=lambda row: (not row.is_wrong, _ORDER.index(row.status)))),
    )


def _named(checkpoint: Checkpoint) -> _Named:
    """Return the tensors of the checkpoint of a model, without a Dense of sentence-transformers."""
    for tensor in checkpoint.tensors:
        if "/" in tensor.name and checkpoint.format in ("safetensors", "pytorch"):
            raise SourceError(
                f"{tensor.name!r} is a TensorFlow name; convert the file first", where=str(checkpoint.path)
            )
    tensors = (tensor for tensor in checkpoint.tensors if not tensor.name.startswith(checkpoint.modules or "\0"))
    return [(name_in_torch(tensor.name) if checkpoint.format == "gguf" else tensor.name, tensor) for tensor in tensors]


def _wrapper(named: _Named, expected: "_ModelTensors") -> str:
    """Return the prefix that most names have and that alone explains most differences; empty if there is none."""
    names = [name for name, _ in named]
    fronts = (name.split(".")[:-1][:_PARTS] for name in names)
    counts = Counter(".".join(front[:size]) + "." for front in fronts for size in range(1, len(front) + 1))
    likely = [front for front, count in counts.items() if 2 * count > len(names)]

    def matches(prefix: str) -> int:
        return sum(expected.own(name.removeprefix(prefix)) in expected.state for name in names)

    best = max(likely, key=matches, default="")
    return best if best and 2 * matches("") < matches(best) else ""


def _new_modules(expected: "_ModelTensors", findings: Iterable[VerifyRow]) -> list[str]:
    missing = [row.name for row in findings if row.status == "missing"]
    inside = [name for name in expected.state if name.startswith(f"{expected.prefix}.")]
    is_new = [(bool(inside) and name not in inside) or "pooler" in name for name in missing]
    if not expected.found or not all(is_new) or any(row.status == "shape" for row in findings):
        return []
    return list(dict.fromkeys(name.rpartition(".")[0] or name for name in missing))


class _ModelTensors:
    def __init__(self, model: nn.Module, dtype: str | None) -> None:
        self.dtype = dtype
        self.found: dict[str, StoredTensor] = {}
        # Of a model with adapters only these and the saved modules are in a file.
        stored = model.stored if isinstance(model, PeftModel) else vars(model).get("stored")
        state = stored() if stored else model.state_dict(keep_vars=True)
        self.state: Mapping[str, torch.Tensor] = state
        names: dict[int, list[str]] = {}
        for name, tensor in self.state.items():
            names.setdefault(id(tensor), []).append(name)
        self.ties = {name: names[id(tensor)] for name, tensor in self.state.items()}  # of each name all of its tensor
        self.buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
        self.prefix = str(getattr(model, "base_model_prefix", "bert"))
        self.passed_over = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()

    def own(self, name: str) -> str:
        return own_name(modern_name(name), self.state, self.prefix)

    def rows(self, named: _Named) -> Iterator[VerifyRow]:
        for stored_name, tensor in named:
            name = self.own(stored_name)
            is_buffer = name in self.buffers or tensor.name.endswith(STORED_BUFFERS)
            if name in self.found:
                note = f"{self.found[name].name} is stored as well, for {name}"
                yield self._row("unexpected", tensor.name, tensor, note)
            elif name in self.state:
                self.found[name] = tensor
                yield from self._compared(name, tensor)
            elif is_buffer or any(re.search(pattern, tensor.name) for pattern in self.passed_over):
                yield self._row("buffer", tensor.name, tensor, "a buffer that older versions stored; computed")
            else:
                yield self._row("unexpected", tensor.name, tensor)
        absent = [name for name in self.state if name not in self.found]
        for name in absent:
            other = next((twin for twin in self.ties[name] if twin in self.found), None)
            yield (self._row("tied", name, None, f"it is {other}") if other else self._row("missing", name, None))
        yield from self._stored_ties()

    def _compared(self, name: str, tensor: StoredTensor) -> Iterator[VerifyRow]:
        expected = self.state[name]
        if tuple(expected.shape) != tensor.shape:
            yield self._row("shape", name, tensor)
        is_floating = tensor.dtype.startswith(("float", "bfloat")) or tensor.packing is not None
        if is_floating != expected.is_floating_point():
            yield self._row("dtype", name, tensor, f"{shape_of(expected).dtype} in the model")
        elif is_floating and not tensor.packing and self.dtype not in (None, tensor.dtype):
            yield self._row("dtype", name, tensor, f"{self.dtype} was asked for")
        if name != tensor.name:
            yield self._row("renamed", name, tensor, _how(tensor.name, name, self.prefix))

    def _stored_ties(self) -> Iterator[VerifyRow]:
        own_names = {tensor.name: name for name, tensor in self.found.items()}
        for name, tensor in self.found.items():
            first = next(twin for twin in self.ties[name] if twin in self.found)
            owner = own_names.get(tensor.shares or "")
            if owner is not None and owner not in self.ties[name]:
                yield self._row("shared", name, tensor, f"one storage with {owner}, two tensors of the model")
            elif name != first and owner is None:
                yield self._row("duplicate", name, tensor, f"tied to {first}, and stored apart; values not compared")

    def _row(self, status: str, name: str, tensor: StoredTensor | None, note: str = "") -> VerifyRow:
        expected = shape_of(self.state[name]) if status != "unexpected" and name in self.state else None
        return VerifyRow(
            status=status, name=name, stored_name=tensor.name if tensor else None, copies=1,
            shape=expected.shape if expected else None, stored_shape=tensor.shape if tensor else None,
            dtype=expected.dtype if expected else None, stored_dtype=tensor.dtype if tensor else None,
            params=tensor.params if tensor else self.state[name].numel(), is_wrong=status in _WRONG, note=note,
        )  # fmt: skip


def _how(stored: str, name: str, prefix: str) -> str:
    ends = stored.removeprefix(f"{prefix}."), name.removeprefix(f"{prefix}.")
    if modern_name(ends[0]) != modern_name(ends[1]):
        return "names of another program"
    in_file, in_model = (path.startswith(f"{prefix}.") for path in (stored, name))
    old = "TensorFlow's gamma and beta for weight and bias" if modern_name(stored) != stored else ""
    extra = f"prefix {prefix}. only in {'the file' if in_file else 'the model'}" if in_file != in_model else ""
    return ", ".join(filter(None, (old, extra)))


def _folded(rows: Iterable[VerifyRow]) -> Iterator[VerifyRow]:
    """Merge equal rows of neighbouring layers, and renamed tensors by the kind of renaming."""
    ordered = sorted(rows, key=lambda row: in_order(row.name))
    rest = [row for row in ordered if row.status != "renamed"]
    # Rows of equal layers differ in their names only.
    likeness = [replace(row, name="", stored_name="", note=without_numbers(row.note)) for row in rest]
    for name, _, items in collapse((row.name, like, row) for row, like in zip(rest, likeness, strict=True)):
        first, params = items[0], sum(item.params for item in items)
        stored_name = first.stored_name if len(items) == 1 or first.stored_name is None else name
        yield replace(first, name=name, stored_name=stored_name, copies=len(items), params=params)
    renamed = [row for row in ordered if row.status == "renamed"]
    for how in dict.fromkeys(row.note for row in renamed):
        alike = [row for row in renamed if row.note == how]
        params = sum(row.params for row in alike)
        yield replace(alike[0], copies=len(alike), params=params, shape=None, stored_shape=None)
